"""The viewers of graphs that `inspect --graph` opens."""

import urllib.request
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from modelyard.exporter import export
from modelyard.exporter.cli import inspect_app
from modelyard.exporter.inspection import start_netron, with_fixed_shapes
from modelyard.handlers.errors import UnsafeProgram


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    torch.save(nn.Linear(4, 3).state_dict(), folder / "weights.pt")
    export(
        folder / "weights.pt",
        "torch.nn:Linear",
        ["features:float32[batch,4]"],
        model_args={"in_features": 4, "out_features": 3},
        name="net",
        output_dir=folder,
    )
    return folder


def test_a_copy_with_fixed_shapes_computes_the_same(folder: Path) -> None:
    fixed = with_fixed_shapes(folder / "net.pt2")
    assert not fixed.range_constraints
    features = torch.rand(2, 4)
    graph = torch.export.load(folder / "net.pt2").module()
    torch.testing.assert_close(fixed.module()(features), graph(features))


def test_a_program_that_holds_code_is_refused_before_torch_loads_it(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "doctored.pt2"
    path.write_bytes((folder / "net.pt2").read_bytes() + b"PK")
    with pytest.raises(UnsafeProgram):
        with_fixed_shapes(path)


def test_netron_serves_on_this_machine_only(folder: Path) -> None:
    netron = pytest.importorskip("netron")
    address = start_netron(folder / "net.onnx", browse=False)
    try:
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert answer.status == 200
    finally:
        netron.stop()


@pytest.mark.parametrize("name", ["net.pt2", "net.onnx"])
def test_without_a_viewer_inspect_says_how_to_install_one(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = CliRunner().invoke(inspect_app, [str(folder / name), "--graph"])
    assert done.exit_code == 1
    assert "pip install netron" in done.stderr
    assert "pip install ai-edge-model-explorer" in done.stderr
    assert name in done.stdout


def test_inspect_says_why_there_is_no_graph(folder: Path) -> None:
    done = CliRunner().invoke(inspect_app, [str(folder / "weights.pt"), "--graph"])
    assert done.exit_code == 1
    assert "--graph: weights.pt is a checkpoint, not an artifact" in done.stderr
