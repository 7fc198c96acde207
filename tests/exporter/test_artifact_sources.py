"""Artifacts that another tool wrote are exported as they are: no class, no --input."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.export import Dim

from modelyard.archiver.collect import ArchiveRequest, plan_archive
from modelyard.exporter import ExportError, ExportReport, ModelError, UsageError, export
from modelyard.exporter.ingest import read_checkpoint
from modelyard.handlers.models.backends import open_artifact


class Net(nn.Module):
    """Takes a dict, which an artifact does not, and gives one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.meta = nn.Linear(4, 3)  # a name that torch's GraphModule has a use of its own for
        self.drop = nn.Dropout(0.5)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return scores (N, L, 3) and their sum (N, L)."""
        scores = self.drop(self.meta(batch["x"])) * batch["weight"][:, None, None]
        return {"scores": scores + torch.tensor([1.0, 2.0, 3.0]), "total": scores.sum(2)}


def _program(path: Path, net: nn.Module) -> Path:
    batch, length = Dim("batch", min=2, max=6), Dim("length", min=1, max=9)
    given = {"x": torch.randn(3, 5, 4), "weight": torch.randn(3)}
    shapes = {"x": {0: batch, 1: length}, "weight": {0: batch}}
    torch.export.save(torch.export.export(net, (given,), dynamic_shapes=(shapes,)), path)
    return path


@pytest.fixture(scope="module")
def from_program(tmp_path_factory: pytest.TempPathFactory) -> list[ExportReport]:
    """The reports of an exported program's export to both formats."""
    folder = tmp_path_factory.mktemp("program")
    return export(_program(folder / "net.pt2", Net().eval()), None, (), output_dir=folder / "out")


def test_a_program_from_elsewhere_says_what_it_takes(from_program: list[ExportReport]) -> None:
    for report in from_program:
        assert [str(spec) for spec in report.signature.inputs] == [
            "batch_x:float32[batch=1..6,batch_x_1=1..9,4]",
            "batch_weight:float32[batch=1..6]",
        ]
        assert [spec.name for spec in report.signature.outputs] == ["scores", "total"]
        assert report.signature.batching is not None
        assert report.signature.batching.batchable
        assert report.warnings == ()


def test_its_artifacts_give_what_the_network_gives(from_program: list[ExportReport]) -> None:
    inputs = {"x": torch.randn(1, 7, 4), "weight": torch.randn(1)}
    expected = Net().eval()(inputs)["scores"]
    for report in from_program:
        artifact = open_artifact(report.artifact, report.format, "cpu")
        scores = artifact(inputs["x"], inputs["weight"])[0]
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


def test_its_report_says_where_the_weights_are_from(from_program: list[ExportReport]) -> None:
    content = from_program[0].to_json()
    assert content["model"] == "net.pt2"
    assert content["checkpoint"]["kind"] == "exported program"
    assert content["checkpoint"]["writer"] == f"torch.export {torch.__version__}"


def test_a_program_traced_in_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"differs by .* between two runs"):
        export(_program(tmp_path / "net.pt2", Net().train()), None, (), output_dir=tmp_path / "out")


def test_a_program_takes_no_arguments_of_a_class(tmp_path: Path) -> None:
    source = _program(tmp_path / "net.pt2", Net().eval())
    with pytest.raises(UsageError, match="takes no arguments"):
        export(source, None, (), output_dir=tmp_path / "out", model_args={"classes": 3})


# -- ONNX ------------------------------------------------------------------------------------------


def _onnx(
    path: Path,
    nodes: list[Any],
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    weights: Sequence[Any] = (),
    *domains: str,
) -> Path:
    """Write a file by hand: values are float32 shapes, or types."""

    def value(name: str, kind: Any) -> Any:
        is_shape = isinstance(kind, list)
        kind = helper.make_tensor_type_proto(TensorProto.FLOAT, kind) if is_shape else kind
        return helper.make_value_info(name, kind)

    graph = helper.make_graph(
        nodes,
        "graph",
        [value(*item) for item in inputs.items()],
        [value(*item) for item in outputs.items()],
        list(weights),
    )
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(name, 1) for name in domains)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="by hand")
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3) / 10


def _external(location: str) -> Any:
    tensor = TensorProto(name="W", data_type=TensorProto.FLOAT, dims=[4, 3])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def _product(path: Path, weight: Any) -> Path:
    """A matrix product whose names no signature can hold."""
    nodes = [
        helper.make_node("MatMul", ["input.1", "W"], ["h"]),
        helper.make_node("Relu", ["h"], ["out/scores:0"]),
    ]
    return _onnx(
        path, nodes, {"input.1": [None, 4]}, {"out/scores:0": [None, 3], "h": [None, 3]}, [weight]
    )


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose weights lie beside it."""
    source = _product(tmp_path_factory.mktemp("onnx") / "net.onnx", _external("net.data"))
    source.with_name("net.data").write_bytes(WEIGHT.tobytes())
    return source


@pytest.fixture(scope="module")
def from_onnx(product: Path) -> ExportReport:
    """The report of its export."""
    (report,) = export(product, None, (), output_dir=product.parent / "out")
    return report


def test_an_onnx_file_from_elsewhere_says_what_it_takes(from_onnx: ExportReport) -> None:
    signature = from_onnx.signature
    assert [str(spec) for spec in signature.inputs] == ["input_1:float32[batch=1..8,4]"]
    assert [str(spec) for spec in signature.outputs] == [
        "out_scores_0:float32[batch=1..8,3]",
        "h:float32[batch=1..8,3]",
    ]
    assert signature.batching is not None
    assert signature.batching.batchable
    content = from_onnx.to_json()
    assert content["checkpoint"]["kind"] == "ONNX"
    assert content["checkpoint"]["writer"] == "by hand"
    assert content["parity"]["compared_with"] == "the file as it stands, not optimised"


def test_what_is_written_has_its_weights_inside_and_the_signatures_names(
    from_onnx: ExportReport, tmp_path: Path
) -> None:
    alone = Path(shutil.copy(from_onnx.artifact, tmp_path))
    onnx.checker.check_model(alone, full_check=True)
    graph = onnx.load(alone).graph
    assert [value.name for value in graph.input] == ["input_1"]
    assert [value.name for value in graph.output] == ["out_scores_0", "h"]
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    rows = torch.randn(5, 4)
    scores, h = open_artifact(alone, "onnx", "cpu")(rows)
    torch.testing.assert_close(h, rows @ torch.from_numpy(WEIGHT))
    torch.testing.assert_close(scores, h.relu())


def test_its_checkpoint_is_the_file_and_its_weights(product: Path) -> None:
    files = {file.name for file in read_checkpoint(product).files}
    assert files == {"net.onnx", "net.data"}


def test_it_can_be_archived(from_onnx: ExportReport) -> None:
    plan = plan_archive(
        ArchiveRequest("net", version="1.0", artifact=from_onnx.artifact, handler="tabular")
    )
    assert plan.manifest.modelyard is not None
    assert plan.manifest.modelyard.signature == from_onnx.signature


def test_one_output_is_kept_in_another_range(product: Path, tmp_path: Path) -> None:
    (report,) = export(
        product, None, ["input_1:float32[batch=1..3,4]"], output_dir=tmp_path, output_names=["h"]
    )
    assert [value.name for value in onnx.load(report.artifact).graph.output] == ["h"]
    assert report.parity.batches == (1, 2, 3)


def test_samples_without_a_name_go_to_the_files_input_and_take_its_name(
    product: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "rows.npy", np.ones((3, 4), np.float32))
    (report,) = export(product, None, (), output_dir=tmp_path, samples=[tmp_path / "rows.npy"])
    assert [value.name for value in onnx.load(report.artifact).graph.input] == ["input_1"]


ML = "ai.onnx.ml"
CLASSIFIER = helper.make_node(
    "LinearClassifier",
    ["X"],
    ["label", "scores"],
    domain=ML,
    coefficients=WEIGHT.flatten().tolist(),
    intercepts=[0.0, 0.1, 0.2],
    classlabels_ints=[0, 1, 2],
)
MAPS = helper.make_sequence_type_proto(
    helper.make_map_type_proto(
        TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    )
)
LABELS = helper.make_tensor_type_proto(TensorProto.INT64, [None])


def _as_scikit_learn_writes_it(path: Path) -> Path:
    zipmap = helper.make_node("ZipMap", ["scores"], ["p"], domain=ML, classlabels_int64s=[0, 1, 2])
    return _onnx(path, [CLASSIFIER, zipmap], {"X": [None, 4]}, {"label": LABELS, "p": MAPS}, (), ML)


def test_a_map_becomes_the_numbers_of_its_classes(tmp_path: Path) -> None:
    source = _as_scikit_learn_writes_it(tmp_path / "net.onnx")
    (report,) = export(source, None, (), output_dir=tmp_path / "out", quick=True)
    label, scores = report.signature.outputs
    assert (label.dtype, scores.dtype) == ("int64", "float32")
    assert report.to_json()["details"]["table"]["classes"] == {"p": ["0", "1", "2"]}


def _mean(path: Path) -> Path:
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0]),
        helper.make_node("Sub", ["x", "mean"], ["y"]),
    ]
    return _onnx(path, nodes, {"x": ["n", 4]}, {"y": ["n", 4]})


def test_rows_of_a_file_that_mix_are_found(tmp_path: Path) -> None:
    source = _mean(tmp_path / "net.onnx")
    (report,) = export(source, None, (), output_dir=tmp_path / "out", quick=True)
    assert report.signature.batching is not None
    assert not report.signature.batching.batchable


STRINGS = helper.make_tensor_type_proto(TensorProto.STRING, [None])
FLOATS = helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
NAN = np.full((4, 3), np.nan, np.float32)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: _product(path, _external("../net.data")), "outside of its folder"),
        (lambda path: _product(path, _external("/etc/hostname")), "outside of its folder"),
        (lambda path: _product(path, _external("link.data")), "is a link that leaves the folder"),
        (lambda path: _product(path, _external("none.data")), "is not beside it"),
        (lambda path: _product(path, _external("short.data")), "at 0 of a file of 47"),
        (lambda path: _product(path, numpy_helper.from_array(NAN, "W")), "no finite value"),
        (
            lambda path: _onnx(
                path,
                [helper.make_node("Foo", ["x"], ["y"], domain="my.ops")],
                {"x": [1, 4]},
                {"y": [1, 4]},
                (),
                "my.ops",
            ),
            "the operator my.ops.Foo: it is of a library",
        ),
        (
            lambda path: _onnx(
                path, [helper.make_node("Identity", ["x"], ["y"])], {"x": STRINGS}, {"y": STRINGS}
            ),
            'states no categories of its input "x".*turn other texts into numbers.* as a callable',
        ),
        (
            lambda path: _onnx(
                path,
                [helper.make_node("Relu", ["x"], ["y"])],
                {"x": helper.make_tensor_type_proto(TensorProto.FLOAT, None)},
                {"y": [None]},
            ),
            "'shape' of 'type' is required",
        ),
        (
            lambda path: _onnx(
                path,
                [helper.make_node("SequenceConstruct", ["x"], ["y"])],
                {"x": [2]},
                {"y": helper.make_sequence_type_proto(FLOATS)},
            ),
            "gives no tensor of numbers, only y \\(sequence\\)",
        ),
        (
            lambda path: _onnx(
                path, [helper.make_node("RandomNormalLike", ["x"], ["y"])], {"x": [2]}, {"y": [2]}
            ),
            "between two runs",
        ),
    ],
)
def test_a_file_that_cannot_be_served_is_refused(
    write: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "in" / "net.onnx")
    (tmp_path / "net.data").write_bytes(WEIGHT.tobytes())
    (tmp_path / "in" / "link.data").symlink_to(tmp_path / "net.data")
    (tmp_path / "in" / "short.data").write_bytes(WEIGHT.tobytes()[:-1])
    with pytest.raises(ExportError, match=message):
        export(source, None, (), output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (None, {"formats": ["pt2", "onnx"]}, "of which only onnx can be written"),
        (None, {"dtype": "fp16"}, "taken as it is"),
        (None, {"submodule": "layer"}, "taken as it is"),
        (None, {"model_args": {"n": 1}}, "takes no arguments"),
        ("torch.nn:Linear", {}, "leave --model out"),
    ],
)
def test_what_only_a_model_has_is_refused_of_an_onnx_file(
    product: Path, model: str | None, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        export(product, model, (), output_dir=tmp_path / "out", **options)
