import hashlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from modelyard.exporter import (
    ConversionError,
    ExportError,
    ParityError,
    PartialExportError,
    UsageError,
    export,
)
from modelyard.handlers.models.backends import open_artifact

Author = Callable[[str], tuple[Path, str]]

LINEAR = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[1., 2., 3.], [4., 5., 6.]]))
            self.layer.bias.copy_(torch.tensor([10., 20.]))

    def forward(self, x):
        return self.layer(x)
"""

TOKENS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 4)

    def forward(self, tokens, mask):
        words = self.table(tokens) * mask.unsqueeze(-1)
        return words.sum(1), words.mean(-1)
"""

# Each of these gives, once exported, something else than when it is run.
LIARS = {
    "pt2": """
class Net(nn.Module):
    def forward(self, x):
        return x + (0.5 if torch.compiler.is_exporting() else 0)
""",
    "torchscript": """
class Net(nn.Module):
    def forward(self, x):
        return x + (0.5 if torch.jit.is_scripting() else 0.0)
""",
}

LIES_TWICE = """
class Net(nn.Module):
    def forward(self, x):
        if torch.compiler.is_exporting():
            return x + 0.25
        return x + (0.5 if torch.jit.is_scripting() or torch.jit.is_tracing() else 0.0)
"""

FIXED = """
class Net(nn.Module):
    def forward(self, x):
        for row in range(x.shape[0]):
            x = x + row
        return x
"""


def _all_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".pyc"}


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, int, int]]:
    """What the export of `tokens` announced."""
    return []


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]) -> Path:
    """Export a model with two inputs, two outputs and two dynamic dims; give its folder."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "net.py").write_text(f"import torch\nfrom torch import nn\n{TOKENS}", "utf-8")
    torch.manual_seed(0)
    torch.save({"table.weight": torch.randn(50, 4)}, folder / "net.pt")
    export(
        folder / "net.pt",
        f"{folder / 'net.py'}:Net",
        ["tokens:int64[batch=1..3,length=2..16]", "mask:bool[batch,length]"],
        output_dir=folder / "out",
        formats=["pt2", "onnx", "torchscript"],
        output_names=["bag", "means"],
        progress=lambda *step: steps.append(step),
    )
    return folder


def test_artifacts_and_reports_are_all_that_is_written(tokens: Path) -> None:
    names = ("net.pt2", "net.onnx", "net.pt")
    assert _all_files(tokens / "out") == {*names, *(f"{name}.report.json" for name in names)}


def test_every_step_is_announced(tokens: Path, steps: list[tuple[str, int, int]]) -> None:
    assert [number for _, number, _ in steps] == list(range(8))
    assert [name for name, _, _ in steps] == [
        "load net.pt",
        "run the checkpoint's model",
        *(
            f"{verb} {file}"
            for file in ("net.pt2", "net.onnx", "net.pt")
            for verb in ("write", "check")
        ),
    ]


@pytest.mark.parametrize(
    ("file", "format"),
    [("net.pt2", "pt2"), ("net.onnx", "onnx"), ("net.pt", "torchscript")],
    ids=["pt2", "onnx", "torchscript"],
)
@pytest.mark.parametrize("length", [2, 9, 16])
def test_both_dynamic_dims_vary_in_every_artifact(
    file: str, format: str, length: int, tokens: Path
) -> None:
    table = torch.load(tokens / "net.pt", weights_only=True)["table.weight"]
    words = torch.arange(4 * length).view(4, length) % 50
    mask = words % 3 > 0
    bag, means = open_artifact(tokens / "out" / file, format)(words, mask)
    expected = table[words] * mask.unsqueeze(-1)
    torch.testing.assert_close(bag, expected.sum(1))
    torch.testing.assert_close(means, expected.mean(-1))


def test_the_report_holds_signature_parity_and_origin(tokens: Path) -> None:
    artifact = tokens / "out" / "net.onnx"
    report = json.loads((tokens / "out" / "net.onnx.report.json").read_text(encoding="utf-8"))
    promised = report["signature"]["batching"].pop("invariant")
    assert set(promised) == {"sizes", "apart"}
    assert promised["sizes"]
    assert set(promised["sizes"]) <= {1, 2, 3}
    assert 0 <= promised["apart"] < 1e-4
    assert report["signature"] == {
        "inputs": [
            {
                "name": "tokens",
                "dtype": "int64",
                "shape": ["batch", "length"],
                "limits": {"low": 0},
            },
            {"name": "mask", "dtype": "bool", "shape": ["batch", "length"]},
        ],
        "outputs": [
            {"name": "bag", "dtype": "float32", "shape": ["batch", 4]},
            {"name": "means", "dtype": "float32", "shape": ["batch", "length"]},
        ],
        "dims": {"batch": {"min": 1, "max": 3}, "length": {"min": 2, "max": 16}},
        "batching": {
            "batchable": True,
            "reason": "a row gives the same alone and beside any other rows",
        },
    }
    parity = report["parity"]
    assert (parity["verdict"], parity["tolerance"]) == ("agrees", 1e-4)
    assert (parity["cases"], parity["batches"]) == (3 * 2 * 3 + 4, [1, 2, 3])
    assert set(parity["outputs"]) == {"bag", "means"}
    assert all(found["max_abs"] <= 1e-4 for found in parity["outputs"].values())
    assert report["artifact_sha256"] == hashlib.sha256(artifact.read_bytes()).hexdigest()
    assert report["artifact_bytes"] == artifact.stat().st_size
    assert report["checkpoint"] == {
        "file": "net.pt",
        "kind": "state dict",
        "sha256": hashlib.sha256((tokens / "net.pt").read_bytes()).hexdigest(),
        "writer": None,
        "loader": "weights_only",
        "weights_key": "",
        "prefixes_stripped": [],
        "refused": [],
        "imported": [],
    }
    assert (report["schema"], report["format"], report["artifact"]) == (1, "onnx", "net.onnx")
    assert (report["model"], report["model_args"]) == ("net.py:Net", {})
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["command"].startswith("modelyard export net.pt --model net.py:Net --input ")
    assert str(tokens) not in json.dumps(report)


def test_onnx_keeps_the_names_of_inputs_outputs_and_dims(tokens: Path) -> None:
    graph = onnx.load(tokens / "out" / "net.onnx").graph
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert shapes == {
        "tokens": ["batch", "length"],
        "mask": ["batch", "length"],
        "bag": ["batch", 4],
        "means": ["batch", "length"],
    }


@pytest.mark.parametrize("format", [pytest.param("pt2", marks=pytest.mark.nightly), "torchscript"])
def test_an_artifact_that_disagrees_is_not_written_and_an_earlier_one_stays(
    format: str, author: Author, tmp_path: Path
) -> None:
    checkpoint, model = author(LIARS[format])
    earlier = tmp_path / "out" / {"pt2": "net.pt2", "torchscript": "net.pt"}[format]
    earlier.parent.mkdir()
    earlier.write_bytes(b"earlier")
    with pytest.raises(ParityError, match=rf'{format}: output "y": max_abs 5\.0e-01 .* at batch='):
        export(
            checkpoint,
            model,
            ["x:float32[batch,3]"],
            output_dir=earlier.parent,
            formats=[format],
            output_names=["y"],
        )
    assert _all_files(earlier.parent) == {earlier.name}
    assert earlier.read_bytes() == b"earlier"


def test_a_part_of_the_model_is_exported_alone(author: Author, tmp_path: Path) -> None:
    checkpoint, model = author("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.encoder(x))
""")
    (report,) = export(
        checkpoint,
        model,
        ["x:float32[batch,3]"],
        output_dir=tmp_path / "out",
        formats=["pt2"],
        submodule="encoder",
        quick=True,
    )
    assert report.details["submodule"] == "encoder"
    assert " --submodule encoder " in report.command
    state = torch.load(checkpoint, weights_only=True)
    x = torch.ones(2, 3)
    expected = (x @ state["encoder.0.weight"].T + state["encoder.0.bias"]).relu()
    torch.testing.assert_close(open_artifact(report.artifact, "pt2")(x), expected)


def test_one_format_that_fails_leaves_the_others_written(author: Author, tmp_path: Path) -> None:
    checkpoint, model = author(FIXED)
    fixed = r'the model fixes dim "batch" of input "x" to 5 at net\.py:7 "for row'
    with pytest.raises(PartialExportError, match=rf"^net\.pt written .* pt2: .*{fixed}") as caught:
        export(
            checkpoint,
            model,
            ["x:float32[batch,3]"],
            output_dir=tmp_path / "out",
            formats=["pt2", "torchscript"],
        )
    assert [report.format for report in caught.value.reports] == ["torchscript"]
    assert {name: type(why) for name, why in caught.value.failures.items()} == {
        "pt2": ConversionError
    }
    assert _all_files(tmp_path / "out") == {"net.pt", "net.pt.report.json"}
    torch.testing.assert_close(
        open_artifact(tmp_path / "out" / "net.pt", "torchscript")(torch.ones(6, 3)),
        torch.full((6, 3), 16.0),
    )


@pytest.mark.parametrize(
    ("source", "formats", "kind", "seen"),
    [
        pytest.param(FIXED, ["pt2", "onnx"], ConversionError, "the model cannot", id="one reason"),
        pytest.param(
            LIES_TWICE,
            ["pt2", "torchscript"],
            ParityError,
            r"pt2: output .*max_abs 2\.5e-01 .*; torchscript: output .*max_abs 5\.0e-01 ",
            id="two",
        ),
    ],
)
def test_nothing_is_written_where_no_format_can_be(
    source: str, formats: list[str], kind: type, seen: str, author: Author, tmp_path: Path
) -> None:
    checkpoint, model = author(source)
    with pytest.raises(kind, match=f"^{seen}") as caught:
        export(
            checkpoint,
            model,
            ["x:float32[batch,3]"],
            output_dir=tmp_path / "new" / "out",
            formats=formats,
        )
    assert type(caught.value) is kind
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        pytest.param({"formats": ["tflite"]}, '--format "tflite" is unknown', id="format"),
        pytest.param({"formats": []}, "no --format given", id="no format"),
        pytest.param({"name": "a/b"}, '--name "a/b" is not a file name', id="name"),
        pytest.param({"output_names": ["x"]}, '--output "x" is also an input', id="output"),
        pytest.param({"output_names": ["1"]}, '--output "1" is not a name', id="output name"),
        pytest.param({"device": "tpu"}, '--device "tpu" is unknown', id="device"),
        pytest.param({"device": "meta"}, '--device "meta" is not supported', id="other device"),
        pytest.param({"tolerance": -1.0}, "--tolerance -1.0 is not a difference", id="tolerance"),
        pytest.param({"model": "net"}, '--model "net" names no class', id="model"),
        pytest.param(
            {"inputs": ["y:float32[batch]"]}, "forward() takes x, y", id="inputs out of order"
        ),
        pytest.param({"model_args": {"a": {1}}}, "model_args cannot be kept", id="model args"),
    ],
)
def test_arguments_that_mean_nothing_are_wrong_usage(
    arguments: dict[str, Any], seen: str, author: Author, tmp_path: Path
) -> None:
    checkpoint, model = author("""
class Net(nn.Module):
    def forward(self, x, y):
        return x + y
""")
    given = {"model": model, "inputs": ["x:float32[batch]", "y:float32[batch]"], **arguments}
    with pytest.raises(UsageError) as caught:
        export(checkpoint, output_dir=tmp_path / "out", **given)
    assert seen in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_checkpoint_is_never_written_over(author: Author, tmp_path: Path) -> None:
    checkpoint, model = author(LINEAR)
    content = checkpoint.read_bytes()
    with pytest.raises(UsageError, match=r'would write "net\.pt" over the checkpoint'):
        export(
            checkpoint,
            model,
            ["x:float32[batch,3]"],
            output_dir=tmp_path,
            formats=["torchscript"],
        )
    assert checkpoint.read_bytes() == content


def test_an_output_folder_that_cannot_be_is_refused(author: Author, tmp_path: Path) -> None:
    checkpoint, model = author(LINEAR)
    with pytest.raises(ExportError, match="cannot write to"):
        export(checkpoint, model, ["x:float32[batch,3]"], output_dir=checkpoint / "out")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_a_device_that_is_not_there_is_refused(author: Author, tmp_path: Path) -> None:
    checkpoint, model = author(LINEAR)
    with pytest.raises(ExportError, match="this machine has 0 CUDA devices"):
        export(checkpoint, model, ["x:float32[batch,3]"], output_dir=tmp_path, device="cuda")


def test_importing_the_room_changes_no_setting() -> None:
    code = """
import random, sys, warnings, torch
def settings():
    return (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(),
            torch.get_float32_matmul_precision(), torch.initial_seed(), random.getstate(),
            torch.are_deterministic_algorithms_enabled(), list(warnings.filters), list(sys.path))
before = settings()
import modelyard.exporter
assert settings() == before
assert not {"onnx", "onnxruntime", "handlers", "typer"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_what_is_replaced_and_what_goes_by_its_place_is_said(
    author: Callable[[str], tuple[Path, str]],
) -> None:
    checkpoint, model = author(
        "class Net(nn.Linear):\n    def __init__(self):\n        super().__init__(3, 2)\n"
    )
    said: list[str] = []
    for _ in range(2):
        export(
            checkpoint,
            model,
            ["row:float32[batch,3]"],
            output_dir=checkpoint.parent / "out",
            formats=["pt2"],
            quick=True,
            tell=said.append,
        )
    place = 'input "row" goes to the argument "input" of forward(), by its place'
    assert [line.partition(";")[0] for line in said] == [
        place,
        place,
        "replaces net.pt2 of an earlier export",
    ]
