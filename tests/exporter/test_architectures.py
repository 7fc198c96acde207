"""Every architecture and every format once, with parity; all pairs at night, large ones too."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from modelyard.exporter import ExportReport, export
from modelyard.handlers.models.backends import open_artifact


def _load() -> ModuleType:
    import importlib.util
    import sys

    file = Path(__file__).parent / "architectures.py"
    spec = importlib.util.spec_from_file_location("architectures", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


architectures = _load()


DIAGONAL = {("two", "pt2"), ("small bert", "torchscript")}
"""Beside the LSTM, which has a test of its own, and the README's network as ONNX."""


def _cases() -> Iterator[Any]:
    for name in (*architectures.SMALL, *architectures.LARGE):
        for format in architectures.FORMATS:
            if format == "aoti" or name in architectures.LARGE:
                marks = [pytest.mark.slow, pytest.mark.timeout(900)]
            else:
                marks = [] if (name, format) in DIAGONAL else [pytest.mark.nightly]
            yield pytest.param(name, format, id=f"{name} as {format}", marks=marks)


def _export(name: str, format: str, folder: Path, **more: Any) -> ExportReport:
    architecture = {**architectures.SMALL, **architectures.LARGE}[name]
    if "bert" in name:
        pytest.importorskip("transformers")
    (report,) = export(
        architectures.save_checkpoint(architecture, folder),
        architecture.model,
        architecture.inputs,
        output_dir=folder / "out",
        formats=[format],
        model_args=architecture.args,
        output_names=architecture.outputs,
        **more,
    )
    return report


# transformers warns of its own properties, which deep copies and scripting read.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
@pytest.mark.parametrize(("name", "format"), list(_cases()))
def test_an_architecture_is_written_and_proven(name: str, format: str, tmp_path: Path) -> None:
    report = _export(name, format, tmp_path)
    assert report.parity.batches[0] == 1
    assert {1, 2, 7, 8} <= set(report.parity.batches)
    assert all(found.scaled <= 1e-4 for found in report.parity.outputs.values())
    # Untrained and so deep, its answers hardly vary: rounding alone moves them by more.
    assert name == "resnet50" or not report.parity.ill_conditioned
    assert report.signature.batching is not None
    assert report.signature.batching.batchable
    assert report.warnings == ()


@pytest.mark.parametrize(
    "format",
    [
        pytest.param("pt2", marks=pytest.mark.nightly),
        "onnx",
        pytest.param("torchscript", marks=pytest.mark.nightly),
    ],
)
def test_an_lstm_takes_lengths_other_than_the_examples(format: str, tmp_path: Path) -> None:
    report = _export("lstm", format, tmp_path)
    artifact = open_artifact(report.artifact, format)
    model = architectures.LstmClassifier().eval()
    model.load_state_dict(torch.load(tmp_path / "model.ckpt", weights_only=True))
    for length in (1, 2, 17, 40, 100):
        tokens = torch.randint(0, 500, (3, length))
        with torch.no_grad():
            torch.testing.assert_close(artifact(tokens), model(tokens), rtol=0, atol=1e-5)
    assert report.parity.scope["sizes"]["length"][::6] == [1, 40]
    assert report.parity.scope["integers"] == {"tokens": [0, 499]}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_native_code_says_what_it_is_tied_to(tmp_path: Path) -> None:
    report = _export("lstm", "aoti", tmp_path)
    assert report.artifact.name == "model.aoti.pt2"
    details = report.to_json()["details"]
    assert details["torch"] == torch.__version__
    assert details["platform"].startswith("linux ")
    assert details["cpu_isa"] != "?"
    assert details["native_code"].startswith("native code")
    assert str(Path(__file__).parent).encode() not in report.artifact.read_bytes()
    artifact = open_artifact(report.artifact, "aoti")
    from modelyard.handlers.errors import InputMismatch, LoadError

    with pytest.raises(InputMismatch, match="the artifact takes tokens:int64"):
        artifact(torch.ones(2, 3))
    with pytest.raises(LoadError, match="holds aoti, not pt2"):
        open_artifact(report.artifact, "pt2")
