"""Files that scikit-learn, XGBoost and LightGBM write by default answer as the tools do."""

import csv
import io
import json
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from modelyard.archiver.api import archive
from modelyard.archiver.read import open_archive
from modelyard.exporter import CheckpointError, export
from modelyard.handlers import BadInput, Context, TabularHandler

FILES = Path(__file__).parent / "onnx_files"
QUICK = ("columns_strict", "svc")
"""What every run of the tests tries; the others are tried at night."""
ALL = [
    pytest.param(file.stem, marks=() if file.stem in QUICK else pytest.mark.slow)
    for file in sorted(FILES.glob("*.onnx"))
]
TEXTS = helper.make_tensor_type_proto(TensorProto.STRING, [None, 1])


def _served(name: str, folder: Path) -> tuple[TabularHandler, Context]:
    """Export a file and archive what is written, with no option; return the archive's handler."""
    (report,) = export(FILES / f"{name}.onnx", output_dir=folder, quick=True)
    packed = archive("table", artifact=report.artifact, output_dir=folder, dry_run=False)
    with open_archive(packed) as opened:
        opened.unpack(folder / "unpacked")
    manifest = json.loads((folder / "unpacked/MAR-INF/MANIFEST.json").read_text())
    assert manifest["model"]["handler"] == "tabular"
    context = Context("table", str(folder / "unpacked"), manifest)
    context.reset(["a"])
    handler = TabularHandler()
    handler.initialize(context)
    return handler, context


@pytest.mark.parametrize("name", ALL)
def test_a_default_export_is_served_in_every_form(name: str, tmp_path: Path) -> None:
    handler, context = _served(name, tmp_path)
    known = json.loads((FILES / f"{name}.json").read_text())
    objects = [
        row if isinstance(row, dict)
        else dict(zip([each.name for each in handler.features], row, strict=True))
        for row in known["rows"]
    ]  # fmt: skip
    rows = [list(row.values()) for row in objects]
    table = io.StringIO()
    csv.writer(table).writerows([list(objects[0]), *rows])
    first, *others = (
        handler.handle([{"body": body}], context)[0]
        for body in (rows, objects, json.dumps(objects).encode(), table.getvalue().encode())
    )
    assert all(other == first for other in others)
    (alone,) = handler.handle([{"body": objects[0]}], context)
    assert type(alone) is type(first[0])
    for at, answer in enumerate(first):
        expected = known["predict"][at]
        if not isinstance(answer, dict):
            assert answer == pytest.approx([expected], rel=1e-5)
            continue
        (label,) = (value for key, value in answer.items() if "label" in key)
        assert label in (expected, [expected])
        if "probabilities" in known:
            (shares,) = (value for key, value in answer.items() if "prob" in key)
            named = dict(zip(known["classes"], known["probabilities"][at], strict=True))
            assert shares == pytest.approx(named, abs=5e-5)


def test_texts_that_the_file_does_not_know(tmp_path: Path) -> None:
    row = {"age": 50, "income": 3000.0, "city": "Bern", "job": "cook"}
    handler, context = _served("columns", tmp_path / "any")
    two = [{**row, "city": city} for city in ("Bern", "oslo")]
    first, second = handler.handle([{"body": two}], context)[0]
    assert first == second != handler.handle([{"body": {**row, "city": "Oslo"}}], context)[0]
    with pytest.raises(BadInput, match="need a model of one input of numbers; this one takes 4"):
        handler.explain([{"body": row}], context)
    handler, context = _served("columns_strict", tmp_path / "known")
    with pytest.raises(BadInput, match='city is "Bern"; expected one of Oslo, Paris, Rome'):
        handler.handle([{"body": row}], context)
    with pytest.raises(BadInput, match=r"age is 1.5|fractional"):
        handler.handle([{"body": {**row, "city": "Rome", "age": 1.5}}], context)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"x0,x1,x2,x3\n1,2,3\n", "line 2 of the table has 3 values; expected 4"),
        (b"a,b,c\n1,2,3\n", "row 0 of the list: x0 is missing"),
        (b"x0,x1,x2,x3\n1,2,,4\n", 'row 0 of the list: x2 is ""; expected a finite number'),
        (b"1,2,3,4\n", "is not JSON"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    kinds: tuple[TabularHandler, Context], body: bytes, said: str
) -> None:
    handler, context = kinds
    with pytest.raises(BadInput, match=said):
        handler.handle([{"body": body}], context)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> tuple[TabularHandler, Context]:
    """A classifier of four columns without names."""
    return _served("strings", tmp_path_factory.mktemp("kinds"))


def test_texts_that_are_read_otherwise_are_refused(tmp_path: Path) -> None:
    node = helper.make_node("StringNormalizer", ["text"], ["y"])
    value = helper.make_value_info
    graph = helper.make_graph([node], "graph", [value("text", TEXTS)], [value("y", TEXTS)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match="reads the texts of its input text by StringNorm"):
        export(tmp_path / "net.onnx", output_dir=tmp_path / "out")
