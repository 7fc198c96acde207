import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from modelyard.exporter.cli import app
from modelyard.exporter.formats import to_torchscript

Author = Callable[[str], tuple[Path, str]]

DOUBLE = """
class Net(nn.Module):
    def forward(self, x):
        print("authors print")
        return 2 * x
"""

LIAR = """
class Net(nn.Module):
    def forward(self, x):
        return x + (0.5 if torch.jit.is_scripting() else 0.0)
"""


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def _export(author: Author, source: str, out: Path, *more: object) -> Result:
    checkpoint, model = author(source)
    usual = ("--input", "x:float32[batch,3]", "--output", "y", "--format", "torchscript")
    return _run(checkpoint, "--model", model, *usual, "-o", out, *more)


def test_the_room_is_the_single_command_export() -> None:
    assert typer.main.get_command(app).name == "export"


def test_help_shows_an_example_and_the_exit_codes() -> None:
    result = _run("--help")
    assert result.exit_code == 0
    assert "modelyard export digits.pt" in result.output
    assert "'image:float32[batch,1,8,8]'" in result.output
    assert "name:dtype[dims]" in result.output
    assert "Exit codes" in result.output


def test_a_table_says_what_was_written(author: Author, tmp_path: Path) -> None:
    result = _export(author, DOUBLE, tmp_path / "out")
    heading, row = result.stdout.splitlines()
    assert heading.split() == ["format", "file", "size", "max_abs", "batches", "verdict"]
    assert row.split()[:3] == ["torchscript", "(script)", str(tmp_path / "out" / "net.pt")]
    assert row.split()[5:] == ["0.0e+00", "1–8", "agrees"]
    assert result.exit_code == 0
    assert set(result.stderr.splitlines()) == {
        "authors print",
        f"warning: {to_torchscript.DEPRECATION}",
    }


def test_json_is_the_reports_and_nothing_else(author: Author, tmp_path: Path) -> None:
    result = _export(author, DOUBLE, tmp_path / "out", "--json")
    written = (tmp_path / "out" / "net.pt.report.json").read_text(encoding="utf-8")
    assert json.loads(result.stdout) == [json.loads(written)]


def test_a_disagreement_ends_with_1_and_one_line(author: Author, tmp_path: Path) -> None:
    result = _export(author, LIAR, tmp_path / "out")
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith('error: torchscript: output "y": max_abs 5.0e-01 ')
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "as_json", [pytest.param(False, marks=pytest.mark.nightly, id="table"), True]
)
def test_a_format_that_is_missing_ends_with_3_and_is_named(
    as_json: bool, author: Author, tmp_path: Path
) -> None:
    more = ["--format", "pt2", *(["--json"] if as_json else [])]
    result = _export(author, LIAR, tmp_path / "out", *more)
    assert result.exit_code == 3
    (line,) = result.stderr.splitlines()
    assert line.startswith('error: torchscript is not written: output "y": max_abs 5.0e-01 ')
    if as_json:
        written, missing = json.loads(result.stdout)
        assert written["format"] == "pt2"
        assert missing["format"] == "torchscript"
        assert "max_abs 5.0e-01" in missing["error"]
    else:
        _, row = result.stdout.splitlines()
        assert row.startswith("pt2")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "net.pt2",
        "net.pt2.report.json",
    }


@pytest.mark.parametrize(
    ("more", "code", "seen"),
    [
        pytest.param(["--input", "y:float33[3]"], 2, '"float33" is not a dtype', id="input"),
        pytest.param(["--format", "tflite"], 2, '--format "tflite" is unknown', id="format"),
        pytest.param(["--model-args", "{"], 2, "--model-args { is not valid JSON", id="no json"),
        pytest.param(["--model-args", "[1]"], 2, "it is a JSON list", id="no object"),
        pytest.param(["--model-args", '{"a": 1}'], 1, "Net(a=1) fails", id="wrong argument"),
        pytest.param(["--no-such-option"], 2, "No such option", id="unknown option"),
    ],
)
def test_wrong_usage_ends_with_2_and_a_failed_job_with_1(
    more: list[str], code: int, seen: str, author: Author, tmp_path: Path
) -> None:
    result = _export(author, DOUBLE, tmp_path / "out", *more)
    assert result.exit_code == code
    assert seen in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_a_missing_checkpoint_ends_with_1(author: Author, tmp_path: Path) -> None:
    _, model = author(DOUBLE)
    result = _run(
        tmp_path / "no.pt", "--model", model, "--input", "x:float32[batch]", "-o", tmp_path
    )
    assert result.exit_code == 1
    assert "does not exist" in result.stderr


MIXES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = torch.ones(3)

    def forward(self, x):
        return x - x.mean(0) + self.shift
"""


def test_warnings_are_lines_on_stderr_and_change_no_exit_code(
    author: Author, tmp_path: Path
) -> None:
    result = _export(author, MIXES, tmp_path / "out", "--format", "pt2", "--json")
    assert result.exit_code == 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 3
    assert lines[0].startswith('warning: "shift" is a tensor outside the state dict')
    assert lines[1].startswith(
        'warning: not batchable, served one request at a time: a row of output "y'
    )
    assert [report["format"] for report in json.loads(result.stdout)] == ["torchscript", "pt2"]
    assert not json.loads(result.stdout)[1]["signature"]["batching"]["batchable"]


def test_precision_and_samples_are_options(author: Author, tmp_path: Path) -> None:
    sample = tmp_path / "mine.json"
    sample.write_text("[[1, 2, 3]]", encoding="utf-8")
    result = _export(
        author, DOUBLE, tmp_path / "out", "--dtype", "bf16", "--sample", sample, "--json"
    )
    (report,) = json.loads(result.stdout)
    assert report["signature"]["inputs"][0]["dtype"] == "bfloat16"
    assert report["parity"]["samples"] == [{"file": "mine.json", "rows": 1}]
    assert "--dtype bf16 --sample mine.json" in report["command"]


def test_a_quick_look_says_that_it_is_one(author: Author, tmp_path: Path) -> None:
    result = _export(author, DOUBLE, tmp_path / "out", "--quick", "--json")
    (report,) = json.loads(result.stdout)
    assert report["parity"]["plan"]["extent"] == "quick"
    assert report["parity"]["cases"] == 6
    assert report["parity"]["batches"] == [1, 8]
    assert "--quick" in report["command"]
    assert "warning: compared on 6 inputs only; export it again without --quick" in result.stderr


BRANCH = """
class Net(nn.Module):
    def forward(self, x, **options):
        if float(x.detach().abs().max()) > 50:
            x = x / 255
        return x * 2
"""


def test_a_trace_says_which_branches_it_kept_and_where_it_differs(
    author: Author, tmp_path: Path
) -> None:
    result = _export(author, BRANCH, tmp_path / "out")
    assert result.exit_code == 0
    assert "agrees on what was tried; traced with 1 branch" in result.stdout
    line = 1 + (tmp_path / "net.py").read_text().splitlines().index(BRANCH.splitlines()[3])
    kept, deprecated = (
        f"torchscript: what forward() chose at net.py:{line} for one input is done for every other",
        to_torchscript.DEPRECATION,
    )
    differs, *others = result.stderr.splitlines()
    assert differs.startswith(
        'warning: torchscript: its answers are not the checkpoint\'s where "x" holds a value below '
    )
    assert others == [f"warning: {kept}", f"warning: {deprecated}"]
