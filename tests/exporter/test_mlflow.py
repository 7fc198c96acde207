"""Folders that MLflow wrote: by day in its layout, nightly by the package itself."""

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from modelyard.exporter import CheckpointError, ExportReport, export
from modelyard.handlers.models.backends import open_artifact

MODELS = Path(__file__).parent / "mlflow_models"
ROWS = [[0.5, 0.25, 1.0, 0.0], [1.0, 2.0, 3.0, 4.0]]


def _folder(folder: Path, kind: str, *, signature: str | None = None, example: Any = ROWS) -> Path:
    """Write what mlflow-skinny 3.17.2 and 2.22.5 write, as far as it is read."""
    torch.manual_seed(0)
    net, rows = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval(), torch.tensor(ROWS)
    (folder / "data").mkdir(parents=True)
    flavor: dict[str, Any] = {"pytorch": {"code": None, "model_data": "data"}}
    auto = ({0: torch.export.Dim.AUTO},)
    if kind == "pt2":
        program = torch.export.export(net, (rows,), dynamic_shapes=auto)
        torch.export.save(program, folder / "data" / "model.pt2")
    elif kind == "pickle":
        (folder / "data" / "pickle_module_info.txt").write_text("mlflow.pytorch.pickle_module")
        torch.save(net, folder / "data" / "model.pth")
    else:
        flavor = {"onnx": {"code": None, "data": "model.onnx", "onnx_session_options": None}}
        shapes = ({0: "batch"},)
        written = torch.onnx.export(net, (rows,), dynamo=True, verbose=False, dynamic_shapes=shapes)
        assert written is not None
        written.save(folder / "model.onnx", external_data=False)
    tensor = '[{"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, 4]}}]'
    described: dict[str, Any] = {
        "flavors": {"python_function": {"loader_module": "mlflow.pytorch"}, **flavor},
        "mlflow_version": "3.17.2",
        "signature": {"inputs": signature or tensor, "outputs": None, "params": None},
    }
    if example is not None:
        described["saved_input_example_info"] = {"artifact_path": "input_example.json"}
        (folder / "input_example.json").write_text(json.dumps(example))
    (folder / "MLmodel").write_text(yaml.safe_dump(described))
    return folder


def _agrees(report: ExportReport, rows: Any, answer: Any) -> None:
    given = [
        torch.tensor(rows[spec.name] if isinstance(rows, dict) else rows).to(
            getattr(torch, spec.dtype)
        )
        for spec in report.signature.inputs
    ]
    with torch.no_grad():
        found = open_artifact(report.artifact, report.format)(*given)
    torch.testing.assert_close(found, torch.tensor(answer), rtol=0.0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")  # torch's own
@pytest.mark.parametrize("kind", ["pt2", "pickle", "onnx"])
def test_a_folder_of_mlflow_says_all_that_an_export_needs(kind: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "default", kind)
    reports = export(folder, None, (), output_dir=tmp_path / "out", formats=["onnx"], quick=True)
    assert [report.signature.inputs[0].shape[1] for report in reports] == [4]
    assert reports[0].signature.batching is not None
    assert reports[0].signature.batching.batchable
    assert reports[0].to_json()["checkpoint"]["writer"] == "MLflow 3.17.2"
    request = json.loads((tmp_path / "out" / "default.example.json").read_text())
    assert request == ROWS[0]
    torch.manual_seed(0)
    answer = nn.Sequential(nn.Linear(4, 3), nn.ReLU())(torch.tensor(ROWS)).tolist()
    _agrees(reports[0], ROWS, answer)


def test_an_example_of_something_else_is_a_warning(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "default", "pickle", example={"text": "good"})
    (report,) = export(folder, None, (), output_dir=tmp_path / "out", formats=["onnx"], quick=True)
    assert any("the example in default is not used" in line for line in report.warnings)
    assert not (tmp_path / "out" / "default.example.json").exists()


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ({"flavors": {"sklearn": {}}}, "MLflow model of sklearn; expected the flavor pytorch or"),
        ({"flavors": {"onnx": {"data": "../model.onnx"}}}, "not the name of a file or folder"),
        ({"flavors": {"onnx": {}}}, "has none of model.onnx"),
        ({"flavors": {"pytorch": {"model_data": 3}}}, "not the name of a file or folder"),
    ],
    ids=["flavor", "outside", "missing", "type"],
)
def test_a_folder_that_cannot_be_read_is_refused_by_what_it_says(
    content: Any, seen: str, tmp_path: Path
) -> None:
    (tmp_path / "MLmodel").write_text(yaml.safe_dump(content))
    with pytest.raises(CheckpointError, match=seen):
        export(tmp_path, None, (), output_dir=tmp_path / "out")


@pytest.mark.network
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("version", "count"), [("3.17.2", 30), ("2.22.5", 12)])
def test_what_mlflow_itself_saved_is_exported(version: str, count: int, tmp_path: Path) -> None:
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    (theirs,) = home.glob("lib/*/site-packages")
    (theirs / "ours.pth").write_text(ours)
    python = home / "bin" / "python"
    wanted = (f"mlflow-skinny=={version}", "pandas")
    subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=True)
    subprocess.run([python, MODELS / "save.py", tmp_path / "saved"], check=True)
    folders = sorted(path for path in (tmp_path / "saved").iterdir() if path.is_dir())
    assert len(folders) == count
    others = [folder for folder in folders if folder.name.startswith("sklearn")]
    for folder in others:
        with pytest.raises(
            CheckpointError, match=r"MLflow model of .*sklearn; expected the flavor"
        ):
            export(folder, None, (), output_dir=tmp_path / "out")
    for folder in set(folders) - set(others):
        known = json.loads(folder.with_suffix(".json").read_text())
        model = f"{MODELS / 'nets.py'}:{known['class']}" if known["class"] else None
        formats = ["onnx"] if folder.name.startswith("onnx") else ["pt2", "onnx"]
        out = tmp_path / "out" / folder.name
        reports = export(folder, model, (), output_dir=out, formats=formats, quick=True)
        assert [report.format for report in reports] == formats, folder.name
        for report in reports:
            _agrees(report, known["input"], known["answer"])
        has_example = (folder / "input_example.json").exists()
        assert (out / f"{folder.name}.example.json").exists() == has_example
