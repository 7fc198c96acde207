"""Models of one's own: what comes from elsewhere is served as what it is."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner

from modelyard.archiver import open_archive
from modelyard.archiver.cli import archive_app
from modelyard.archiver.report import read_report
from modelyard.exporter import export


def write_onnx(file: Path, last: str) -> None:
    """Write x:float32[N,4] → scores[N,3] as another tool would, with this operator at its end."""
    weights = helper.make_tensor(
        "W", TensorProto.FLOAT, [4, 3], [float(at % 5 - 2) for at in range(12)]
    )
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "W"], ["z"]), helper.make_node(last, ["z"], ["scores"])],
        "flowers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 3])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, file)


@pytest.mark.nightly
@pytest.mark.parametrize("last", ["Softmax", "Sigmoid"])
def test_a_softmax_of_another_tool_is_not_taken_again(last: str, tmp_path: Path) -> None:
    write_onnx(tmp_path / "flowers.onnx", last)
    (report,) = export(
        tmp_path / "flowers.onnx", None, (), output_dir=tmp_path / "build", quick=True
    )
    read = read_report(report.artifact)
    assert read is not None and read.probabilities == {"scores": True}

    names = ["length", "width", "petal", "sepal"]
    (tmp_path / "features.json").write_text(json.dumps({"features": [{"name": n} for n in names]}))
    (tmp_path / "index_to_name.json").write_text('{"0": "a", "1": "b", "2": "c"}')
    (tmp_path / "row.json").write_text("[1, 0, 2, 1]")
    extra = [f"--extra-files={tmp_path / name}.json" for name in ("features", "index_to_name")]
    arguments = [
        *("flowers", "--artifact", str(report.artifact), *extra),
        *("--example", str(tmp_path / "row.json"), "-o", str(tmp_path / "store")),
    ]
    archived = CliRunner().invoke(archive_app, arguments)
    assert archived.exit_code == 0, archived.stderr
    assert (
        "handler tabular: by the artifact's inputs and outputs, and the labels" in archived.stdout
    )
    with open_archive(tmp_path / "store" / "flowers.mar") as archive:
        answer = json.loads(archive.read("MAR-INF/golden/0.expected.json"))["answer"]
    # x·W is −2, −3, 1. A second softmax of the third would be 0.55.
    expected = 0.9362 if last == "Softmax" else 0.7311
    assert answer["c"] == pytest.approx(expected, abs=1e-4)


SCORE = """
import json


class Score:
    def __init__(self):
        with open("weights.json") as file:
            self.weights = json.load(file)

    def __call__(self, row):
        return {"score": sum(self.weights[name] * row[name] for name in row)}


def shout(text):
    return text.upper()


def handle(data, context):
    return [len(row["body"]) for row in data or []]
"""


@pytest.mark.parametrize(
    ("handler", "request_file", "answer"),
    [
        ("score.py:Score", '{"a": 2, "b": 1}', {"score": 7}),
        ("score.py:shout", "hello", "HELLO"),
        ("score.py", "hello", 5),
    ],
    ids=["class of callables", "function of one request", "function of batches"],
)
def test_code_alone_is_archived_and_answers(
    handler: str, request_file: str, answer: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("score.py").write_text(SCORE)
    Path("weights.json").write_text('{"a": 3, "b": 1}')
    request = Path("request.json" if request_file.startswith("{") else "request.txt")
    request.write_text(request_file)

    arguments = ["--extra-files", "weights.json", "--example", f"{request}={json.dumps(answer)}"]
    archived = CliRunner().invoke(archive_app, ["own", "--handler", handler, *arguments])

    assert (archived.exit_code, archived.stderr) == (0, "")
    with open_archive(Path("model_store/own.mar")) as archive:
        assert archive.manifest.serialized_file is None
        assert archive.manifest.handler == handler
        assert {"score.py", "weights.json"} <= set(archive.names)
