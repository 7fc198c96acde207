"""Graphs of networks whose every figure can be worked out, and the page that shows them."""

import json
import re
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from modelyard.exporter import UsageError, export
from modelyard.exporter.graph import Graph, Node, find_source
from modelyard.exporter.graph_page import read_graph, read_report, write_graph_page
from modelyard.exporter.inspect_cli import inspect_app
from modelyard.exporter.viewers import open_model_explorer, open_netron, with_fixed_shapes
from modelyard.handlers.errors import LoadError, UnsafeProgram

NET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(x).relu()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(4, 3)

    def forward(self, image):
        features = self.block(image)
        return self.head(features.mean((2, 3)))
"""

CONV_FLOPS = 2 * 6 * 6 * 4 * 2 * 9
HEAD_FLOPS = 2 * 4 * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    (folder / "net.py").write_text(NET, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(NET, "net.py", "exec"), names)
    torch.save(names["Net"]().state_dict(), folder / "weights.pt")
    export(
        folder / "weights.pt",
        f"{folder / 'net.py'}:Net",
        ["image:float32[batch,2,6,6]"],
        output_names=["logits"],
        name="net",
        output_dir=folder,
    )
    return folder


@pytest.fixture(params=["pt2", "onnx"])
def artifact(request: pytest.FixtureRequest, folder: Path) -> Path:
    return folder / f"net.{request.param}"


def read(artifact: Path) -> Graph:
    return read_graph(artifact, read_report(artifact))


def find(graph: Graph, module: str) -> Node:
    """Return the node of a module that does its arithmetic."""
    (found,) = (node for node in graph.nodes if node.module == module and node.flops)
    return found


def test_operators_stand_in_their_modules_with_shape_and_cost(artifact: Path) -> None:
    graph = read(artifact)
    convolution, head = find(graph, "block.conv"), find(graph, "head")
    assert "conv" in convolution.operator.lower()
    assert convolution.shape == ("batch", 4, 6, 6)
    assert convolution.dtype == "float32"
    assert convolution.flops == CONV_FLOPS
    assert convolution.parameters == 4 * 2 * 9 + 4
    assert (head.shape, head.flops, head.parameters) == (("batch", 3), HEAD_FLOPS, 15)
    assert graph.flops == CONV_FLOPS + HEAD_FLOPS
    assert graph.sizes == {"batch": 1}
    assert sum(graph.parameters.values()) == 76 + 15
    assert {"": "Net", "block": "Block", "block.conv": "Conv2d", "head": "Linear"}.items() <= (
        graph.classes.items()
    )


def test_a_node_names_the_line_of_the_author(artifact: Path) -> None:
    source = find(read(artifact), "block.conv").source
    assert source is not None
    assert (source.file, source.text) == ("net.py", "return self.conv(x).relu()")
    assert NET.splitlines()[source.line - 1].strip() == source.text


def test_inputs_and_outputs_have_the_names_of_the_report(artifact: Path) -> None:
    graph = read(artifact)
    assert [(one.name, one.shape) for one in graph.inputs] == [("image", ("batch", 2, 6, 6))]
    assert [(one.name, one.shape) for one in graph.outputs] == [("logits", ("batch", 3))]


def test_nodes_say_which_others_they_read(artifact: Path) -> None:
    graph = read(artifact)
    known = {node.name for node in graph.nodes} | {"image"}
    convolution = find(graph, "block.conv")
    assert convolution.inputs == ("image",)
    users = [node for node in graph.nodes if convolution.name in node.inputs]
    assert len(users) == 1
    assert set(users[0].inputs) <= known


def test_without_a_report_one_item_is_counted(artifact: Path, tmp_path: Path) -> None:
    alone = tmp_path / artifact.name
    alone.write_bytes(artifact.read_bytes())
    assert read_report(alone) is None
    graph = read(alone)
    assert graph.flops == CONV_FLOPS + HEAD_FLOPS
    assert list(graph.sizes.values()) == [1]


def test_the_page_holds_graph_and_parity_and_needs_nothing_else(
    artifact: Path, tmp_path: Path
) -> None:
    page = tmp_path / "graph.html"
    write_graph_page(artifact, page)
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"https?://|<(link|img|iframe)|@import|url\(|src=", text)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*)</script>', text)
    found = json.loads(data)
    assert len(found["nodes"]) == len(read(artifact).nodes)
    assert found["parity"]["verdict"] == "agrees"
    assert found["parity"]["outputs"]["logits"]["max_abs"] < 1e-4


def test_a_report_of_another_artifact_is_not_believed(artifact: Path, tmp_path: Path) -> None:
    other = tmp_path / artifact.name
    other.write_bytes(artifact.read_bytes() + b" ")
    report = artifact.with_name(f"{artifact.name}.report.json")
    (tmp_path / report.name).write_bytes(report.read_bytes())
    assert read_report(other) is None


class _Branches(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x + 1, (x,))


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


def program(model: nn.Module, path: Path, *inputs: Tensor) -> Path:
    dims = tuple({0: torch.export.Dim.AUTO} for _ in inputs)
    with warnings.catch_warnings():
        # Said of the LSTM's own list of its weights.
        warnings.filterwarnings("ignore", "The tensor attributes", UserWarning)
        made = torch.export.export(model.eval(), inputs, dynamic_shapes=dims)
    torch.export.save(made, path)
    return path


def test_both_branches_of_a_condition_are_shown(tmp_path: Path) -> None:
    graph = read(program(_Branches(), tmp_path / "cond.pt2", torch.ones(5, 3)))
    operators = {(node.module, node.operator) for node in graph.nodes}
    assert ("true_graph_0", "aten.mul.Tensor") in operators
    assert ("false_graph_0", "aten.add.Tensor") in operators
    assert graph.classes["true_graph_0"] == "branch of cond"


def test_an_lstm_has_a_count(tmp_path: Path) -> None:
    graph = read(program(_Lstm(), tmp_path / "lstm.pt2", torch.ones(5, 7, 8)))
    assert graph.flops == 2 * 7 * 4 * 6 * (8 + 6)


def test_a_program_that_holds_code_is_refused(folder: Path, tmp_path: Path) -> None:
    data = (folder / "net.pt2").read_bytes()
    path = tmp_path / "doctored.pt2"
    path.write_bytes(data + b"PK")
    with pytest.raises((UnsafeProgram, LoadError)):
        read(path)


def test_torchscript_is_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)
    with pytest.raises(UsageError, match="export --format pt2 or onnx"):
        read(path)


def test_a_damaged_onnx_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.onnx"
    path.write_bytes((folder / "net.onnx").read_bytes()[:200])
    with pytest.raises(LoadError, match=r"cut\.onnx is not an ONNX model"):
        read(path)


def test_the_deepest_line_that_is_not_torchs_is_the_authors() -> None:
    trace = (
        'File "train.py", line 3, in forward\n    y = self.block(x)\n'
        '  File "blocks.py", line 7, in forward\n    return self.conv(x)\n'
        '  File "conv.py", line 565, in forward\n    return self._conv_forward(input)'
    )
    found = find_source(trace)
    assert found is not None and (found.file, found.line) == ("blocks.py", 7)
    named = find_source(trace, "train.py:Net")
    assert named is not None and named.line == 3
    assert find_source("") is None


def test_a_copy_with_fixed_shapes_computes_the_same(folder: Path) -> None:
    fixed = with_fixed_shapes(folder / "net.pt2")
    assert not fixed.range_constraints
    image = torch.rand(2, 2, 6, 6)
    graph = torch.export.load(folder / "net.pt2").module()
    torch.testing.assert_close(fixed.module()(image), graph(image))


def test_netron_serves_on_this_machine_only(folder: Path) -> None:
    netron = pytest.importorskip("netron")
    address = open_netron(folder / "net.onnx", browse=False)
    try:
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert answer.status == 200
    finally:
        netron.stop()


def test_a_viewer_that_is_absent_says_how_to_install_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for open_viewer, package in (
        (open_netron, "pip install netron"),
        (open_model_explorer, "pip install ai-edge-model-explorer"),
    ):
        with pytest.raises(UsageError, match=package):
            open_viewer(folder / "net.onnx")


def test_inspect_writes_the_page(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "graph.html"
    done = CliRunner().invoke(inspect_app, [str(folder / "net.pt2"), "--graph", str(page)])
    assert done.exit_code == 0, done.stderr
    assert str(page) in done.stderr
    assert "block.conv" in page.read_text(encoding="utf-8")


def test_inspect_says_why_there_is_no_graph(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "graph.html"
    done = CliRunner().invoke(inspect_app, [str(folder / "weights.pt"), "--graph", str(page)])
    assert done.exit_code == 1
    assert "--graph: weights.pt is a checkpoint, not an artifact" in done.stderr
    assert not page.exists()
