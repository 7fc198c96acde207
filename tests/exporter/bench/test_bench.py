"""What a bench reports about artifacts whose figures are known. No test asserts on time."""

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from modelyard.archiver.signature import parse_inputs
from modelyard.exporter import UsageError, export
from modelyard.exporter.bench.child import read_joules
from modelyard.exporter.bench.measure import (
    Plan,
    bench,
    choose_batches,
    choose_subjects,
    fix_sizes,
    read_signature,
)
from modelyard.exporter.bench.report import (
    BenchReport,
    Cell,
    bench_table,
    describe_machine,
    script_data,
    write_bench_page,
)
from modelyard.exporter.cli import bench_app as app

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        print("the author's own words")
        return self.head(x)
"""

Author = Callable[[str], tuple[Path, str]]

nightly = pytest.mark.nightly
"""Of what one bench of four artifacts, 40 s of a core, is looked at for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, its artifacts, an artifact of other weights, and one that is damaged."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "net.py").write_text(f"import torch\nfrom torch import nn\n\n{NET}", encoding="utf-8")
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)
    weights = {f"head.{name}": value for name, value in layer.state_dict().items()}
    torch.save(weights, folder / "net.pt")
    export(
        folder / "net.pt",
        f"{folder / 'net.py'}:Net",
        ["x:float32[batch,4]"],
        output_dir=folder,
    )
    other = onnx.load(folder / "net.onnx")
    (bias,) = (one for one in other.graph.initializer if one.name == "head.bias")
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + 1, bias.name))
    onnx.save(other, folder / "other.onnx")
    whole = (folder / "net.onnx").read_bytes()
    (folder / "damaged.onnx").write_bytes(whole[: len(whole) // 2])
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> BenchReport:
    (folder / "traces").mkdir()
    subjects = choose_subjects(
        [folder / name for name in ("net.pt2", "net.onnx", "other.onnx", "damaged.onnx")],
        folder / "net.pt",
        f"{folder / 'net.py'}:Net",
        {},
        compiled=False,
    )
    signature = read_signature(folder / "net.pt2")
    return bench(
        Plan(subjects, signature, (1, 3), (1,), rounds=2, cell_s=0.02, profile=folder / "traces")
    )


def cells(report: BenchReport, subject: str) -> list[Cell]:
    return [cell for cell in report.cells if cell.subject == subject]


@nightly
def test_every_subject_is_measured_at_every_batch_size(report: BenchReport) -> None:
    for subject in ("eager", "net.pt2", "net.onnx", "other.onnx"):
        found = cells(report, subject)
        assert [cell.batch for cell in found] == [1, 3]
        for cell in found:
            assert cell.error is None
            assert cell.calls >= 2
            assert len(cell.round_p50_ms) == 2
            assert cell.p50_ms is not None and cell.p99_ms is not None
            assert 0 < cell.p50_ms <= cell.p99_ms


@nightly
def test_outputs_are_compared_with_the_first_subject(report: BenchReport) -> None:
    assert report.reference == "eager"
    assert [cell.max_abs for cell in cells(report, "eager")] == [None, None]
    assert [cell.max_abs for cell in cells(report, "net.pt2")] == [0.0, 0.0]
    for cell in cells(report, "other.onnx"):
        assert cell.max_abs == pytest.approx(1.0, abs=1e-5)


@nightly
def test_a_model_gives_just_the_outputs_that_its_artifacts_have(tmp_path: Path) -> None:
    """The eager model would give "twice" too, and be no reference for an artifact without."""
    source = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return {"twice": x * 2, "sum": x.sum(1), "thrice": x * 3}
"""
    (tmp_path / "net.py").write_text(source, encoding="utf-8")
    torch.save({}, tmp_path / "net.pt")
    model, inputs = f"{tmp_path / 'net.py'}:Net", ["x:float32[batch=1..3,4]"]
    export(
        *(tmp_path / "net.pt", model, inputs),
        output_dir=tmp_path,
        formats=["onnx"],
        output_names=["thrice", "sum"],
        quick=True,
    )
    subjects = choose_subjects(
        [tmp_path / "net.onnx"], tmp_path / "net.pt", model, {}, compiled=False
    )
    found = bench(Plan(subjects, read_signature(tmp_path / "net.onnx"), (2,), (1,), 1, 0.01))
    assert [(cell.error, cell.max_abs) for cell in found.cells] == [(None, None), (None, 0.0)]


@nightly
def test_a_subject_that_does_not_load_says_why_and_the_others_run(report: BenchReport) -> None:
    for cell in cells(report, "damaged.onnx"):
        assert cell.error is not None and "damaged" in cell.error
        assert cell.p50_ms is None


@nightly
def test_the_footprint_holds_sizes_parameters_and_operations(
    report: BenchReport, folder: Path
) -> None:
    found = {footprint.subject: footprint for footprint in report.footprints}
    assert found["net.pt2"].parameters == 15
    assert found["net.pt2"].flops_per_item == 2 * 4 * 3
    assert found["net.onnx"].flops_per_item == 2 * 4 * 3
    assert found["net.onnx"].flops_note == "counted on eager"
    assert found["net.onnx"].file_bytes == (folder / "net.onnx").stat().st_size
    peak, own = found["net.pt2"].peak_bytes, found["net.pt2"].own_bytes
    assert peak is not None and own is not None and peak > own >= 0
    assert found["damaged.onnx"].error is not None


@nightly
def test_a_trace_of_each_subject_is_written(report: BenchReport, folder: Path) -> None:
    assert {path.name for path in (folder / "traces").iterdir()} == {
        f"{name}.trace.json" for name in ("eager", "net.pt2", "net.onnx", "other.onnx")
    }
    trace = json.loads((folder / "traces" / "net.pt2.trace.json").read_text(encoding="utf-8"))
    assert "call with batch 1" in {event.get("name") for event in trace["traceEvents"]}
    assert any("Total Allocated" in event.get("args", {}) for event in trace["traceEvents"])
    found = {footprint.subject: footprint.operators for footprint in report.footprints}
    operators = {each["operator"]: each for each in found["net.pt2"]}
    # y = Wx + b of one row: 3 numbers of 4 bytes, in each of the 3 calls.
    assert operators["aten::addmm"]["calls"] == 3
    assert operators["aten::addmm"]["own_bytes"] == 3 * 3 * 4
    assert operators["aten::addmm"]["total_ms"] >= operators["aten::addmm"]["self_ms"] > 0
    assert {"call with batch 1", "aten::linear"} <= operators.keys()
    assert not found["damaged.onnx"]


@nightly
def test_memory_around_the_calls_and_what_is_not_there_are_told(report: BenchReport) -> None:
    for cell in cells(report, "net.pt2"):
        assert cell.before_bytes is not None and cell.after_bytes is not None
        assert 2**26 < cell.before_bytes < 2**32
        assert cell.to_device_ms is None and cell.from_device_ms is None, "nothing moves on a CPU"
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(bench_table(report))
    shown = console.export_text()
    assert "aten::addmm" in shown
    is_known = cells(report, "net.pt2")[0].joules_per_item is not None
    assert ("energy is not available" in shown) != is_known


def test_energy_is_that_of_all_packages_and_none_where_no_counter_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelyard.exporter.bench.child._RAPL", tmp_path)
    assert read_joules(torch.device("cpu")) is None
    for name, microjoules in (("intel-rapl:0", 2_000_000), ("intel-rapl:1", 500_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{microjoules}\n")
    (tmp_path / "intel-rapl:0:0").mkdir()  # the cores of a package, counted in it
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("1000000\n")
    assert read_joules(torch.device("cpu")) == 2.5
    (tmp_path / "intel-rapl:2").mkdir()
    (tmp_path / "intel-rapl:2" / "energy_uj").symlink_to(tmp_path / "none")
    assert read_joules(torch.device("cpu")) is None


@nightly
def test_the_report_is_json_without_nan(report: BenchReport) -> None:
    strange = replace(report.cells[0], max_abs=math.inf, p50_ms=math.nan)
    text = json.dumps(replace(report, cells=(strange,)).to_json(), allow_nan=False)
    assert json.loads(text)["cells"][0]["p50_ms"] is None


@nightly
def test_the_table_holds_every_subject_and_the_reason_of_a_failure(report: BenchReport) -> None:
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(bench_table(report))
    shown = console.export_text()
    for footprint in report.footprints:
        assert footprint.subject in shown
    assert "damaged.onnx is refused" in shown
    assert "reference" in shown


@nightly
def test_the_page_needs_nothing_else(report: BenchReport, tmp_path: Path) -> None:
    page = tmp_path / "made" / "bench.html"
    write_bench_page(report, page)
    text = page.read_text(encoding="utf-8")
    outside = set(re.findall(r"(?:https?:)?//[\w.-]+[^\s\"']*", re.sub(r"//[ -].*", "", text)))
    assert outside <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"<(link|img|iframe)|@import|url\(", text)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*)</script>', text)
    assert json.loads(data) == report.to_json()
    assert [path.name for path in page.parent.iterdir()] == ["bench.html"]


@nightly
def test_text_of_a_report_cannot_end_the_script(report: BenchReport) -> None:
    text = script_data(replace(report, reference="</script><b>"))
    assert "</script>" not in text
    assert json.loads(text)["reference"] == "</script><b>"


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 2**28
    assert machine["versions"]["torch"] == torch.__version__.partition("+")[0] or (
        machine["versions"]["torch"] == torch.__version__
    )
    json.dumps(machine, allow_nan=False)


def test_batches_are_one_and_the_largest_proven_unless_asked() -> None:
    signature = parse_inputs(["x:float32[batch=1..16,4]"])
    assert choose_batches(signature, []) == (1, 16)
    assert choose_batches(signature, [2, 64, 2]) == (2, 64)
    assert choose_batches(parse_inputs(["x:float32[5,4]"]), []) == (5,)
    with pytest.raises(UsageError, match="--batch 8: the model takes batches of 5 only"):
        choose_batches(parse_inputs(["x:float32[5,4]"]), [8])


def test_other_dims_can_be_given_a_size() -> None:
    signature = parse_inputs(["x:int64[batch,length=1..128]"])
    fixed = fix_sizes(signature, {"length": 32})
    assert (fixed.dims["length"].min, fixed.dims["length"].max) == (32, 32)
    with pytest.raises(UsageError, match='--size names "depth"; beside the batch the dims are'):
        fix_sizes(signature, {"depth": 3})


@pytest.mark.nightly
def test_a_file_that_is_no_artifact_is_refused_before_anything_runs(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"net\.pt is a checkpoint, not an artifact"):
        choose_subjects([folder / "net.pt"], None, None, {})
    with pytest.raises(UsageError, match="nothing to measure"):
        choose_subjects([], None, None, {})
    with pytest.raises(UsageError, match=r'two artifacts are named "net\.onnx"'):
        choose_subjects([folder / "net.onnx"] * 2, None, None, {})


@pytest.mark.nightly
def test_an_artifact_without_a_report_needs_its_inputs(folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.onnx"
    alone.write_bytes((folder / "net.onnx").read_bytes())
    with pytest.raises(UsageError, match="no report that states its inputs"):
        read_signature(alone)


def _run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelyard", "bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.nightly
def test_the_command_prints_json_and_writes_the_page(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    done = _run(
        *(folder / "net.onnx", "--batch", "1,2", "--rounds", 1, "--seconds", 0.01),
        *("--json", "--html", page),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [cell["batch"] for cell in found["cells"]] == [1, 2]
    assert page.exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to measure"),
        (["absent.onnx"], "absent.onnx"),
        (["net.onnx", "--batch", "0"], '--batch "0" is not a list of numbers'),
        (["net.onnx", "--size", "length"], '--size "length" is not a size of a dim'),
        (["net.onnx", "--model-args", "[1]"], "--model-args [1] is not a JSON object"),
    ],
    ids=["nothing", "absent file", "batch", "size", "model args"],
)
def test_wrong_usage_ends_with_code_2(
    folder: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.slow
def test_torch_compile_is_measured_too(folder: Path) -> None:
    subjects = choose_subjects([], folder / "net.pt", f"{folder / 'net.py'}:Net", {})
    found = bench(Plan(subjects, parse_inputs(["x:float32[batch,4]"]), (2,), (1, 2), 1, 0.01))
    compiled = [one for one in found.footprints if one.subject == "torch.compile"]
    assert [one.threads for one in compiled] == [1, 2]
    assert all(one.error is None and one.compile_s for one in compiled)
    assert all(cell.max_abs is not None for cell in cells(found, "torch.compile"))
