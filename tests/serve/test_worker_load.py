"""Which handler an archive means, found in a folder of its own by a fresh interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from modelyard.handlers.errors import LoadError
from modelyard.handlers.models.backends import onnx_has_cuda
from modelyard.serve.worker import dialect
from modelyard.serve.worker.codec import OURS, Rules, our_rules
from modelyard.serve.worker.load import choose_manifest, settle_device
from tests.serve.forks import Run, forks

Load = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with forks() as run:
        yield run


@pytest.fixture
def load(tmp_path: Path, run: Run) -> Load:
    return loading(tmp_path, run)


def loading(tmp_path: Path, run: Run) -> Load:
    """Return what writes `handler.py`, loads it as a worker does, and returns its answers."""

    def load(
        source: str,
        handler: str = "handler.py",
        *,
        sealed: bool = True,
        envelope: str | None = None,
        golden: str = "",
        **files: str,
    ) -> dict[str, Any]:
        if source:
            (tmp_path / handler.partition(":")[0]).write_text(source, encoding="utf-8")
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        example = {"request": "request", "expected": "expected", "content_type": "", "tolerance": 0}
        (tmp_path / "request").write_bytes(b"hi")
        (tmp_path / "expected").write_text(json.dumps({"answer": golden}), encoding="utf-8")
        message = {
            "folder": str(tmp_path),
            "golden": [example] if golden else [],
            "name": "m",
            "manifest": {"model": {"modelName": "m", "handler": handler}}
            | ({"modelyard": {}} if sealed else {}),
            "envelope": envelope,
            "handler": handler,
            "config_file": None,
            "device": "cpu",
            "batch_size": 4,
            "worker": 1,
            "batches": [(kind, [{"body": {"b64": "aGk="}}]) for kind in ("predict", "explain")],
        }
        return run(message)

    return load


def body(name: str = "one", base: str = "", method: str = "handle") -> str:
    head = f"class {name.title()}{base}:\n    def initialize(self, context):\n        pass\n"
    return f"{head}\n    def {method}(self, data, context):\n        return ['{name}']\n"


def test_the_only_class_of_the_file_is_the_handler(load: Load) -> None:
    assert load(body("one"))["answers"] == [["one"], ["one"]]


def test_a_class_may_be_named(load: Load) -> None:
    assert load(body("one") + body("two"), "handler.py:Two")["answers"][0] == ["two"]


def test_of_several_classes_the_one_that_is_a_handler_is_taken(load: Load) -> None:
    source = (
        "from modelyard.handlers import BaseHandler\n" + body("one") + body("two", "(BaseHandler)")
    )
    source += "\n    explain = handle\n"
    assert load(source)["answers"][0] == ["two"]


@pytest.mark.parametrize(
    "line",
    [
        "from logging import Handler",
        pytest.param("from modelyard.handlers import BaseHandler", marks=pytest.mark.nightly),
    ],
)
def test_imported_classes_do_not_count(load: Load, line: str) -> None:
    source = f"from pathlib import Path\n{line}\n" + body("one")
    assert load(source)["answers"][0] == ["one"]


def test_a_function_handle_comes_before_a_class(load: Load) -> None:
    source = body("one") + "calls = []\ndef handle(data, context):\n"
    source += "    calls.append(data)\n    return [calls[0]]\n"
    assert load(source)["answers"] == [[None], [None]]


def test_a_function_may_be_named(load: Load) -> None:
    assert load("def go(data, context):\n    return ['went']\n", "handler.py:go")["answers"] == [
        ["went"],
        ["went"],
    ]


EXPLAINS = body("one") + "\n    def explain(self, data, context):\n        return ['because']\n"


def test_a_handler_with_explain_explains(load: Load) -> None:
    assert load(EXPLAINS)["answers"] == [["one"], ["because"]]


def test_a_name_that_the_file_lacks_leaves_its_one_class(load: Load) -> None:
    assert load(body("one"), "handler.py:three")["answers"][0] == ["one"]


def test_an_archive_of_another_server_is_refused_without_a_plug_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialect, "registered", lambda group: {})
    found = dialect.find_dialect.__wrapped__()
    with pytest.raises(LoadError, match=r"made for TorchServe: .* install the plug-in torchserve"):
        found.choose_rules({"manifest": {"model": {}}})
    assert found.choose_rules({"manifest": {"modelyard": {}}}) == OURS
    with pytest.raises(LoadError, match="there is no envelope 'json'"):
        found.envelope("json")


def test_a_sealed_archive_has_our_rules() -> None:
    sealed: dict[str, Any] = {"manifest": {"modelyard": {}}}
    assert our_rules(sealed) == OURS
    assert our_rules({**sealed, "max_response_bytes": 9}) == Rules(max_answer_bytes=9)


def test_what_handle_is_after_initialize_answers(load: Load) -> None:
    source = body("one").replace("pass", "self.handle = lambda data, context: ['replaced']")
    assert load(source)["answers"][0] == ["replaced"]


@pytest.mark.parametrize(
    ("source", "handler", "expected"),
    [
        (
            body("one") + body("two"),
            "handler.py",
            "Expected only one class in custom service code or a function entry point "
            "[<class 'handler.One'>, <class 'handler.Two'>]",
        ),
        ("x = 1\n", "handler.py", "or a function entry point []"),
        ("import nothing_like_this\n", "handler.py:x", "No module named 'nothing_like_this'"),
        ("import nothing_like_this\n", "handler.py", "No module named 'nothing_like_this'"),
        ("raise OSError('on import')\n", "handler.py", "OSError: on import (handler.py:1)"),
        ("def broken(:\n", "handler.py", "SyntaxError: invalid syntax (handler.py:1)"),
        ("import sys\nsys.exit(3)\n", "handler.py", "SystemExit: 3 (handler.py:2)"),
        (
            body("one").replace("pass", "self.x = 1 / 0"),
            "handler.py",
            "ZeroDivisionError: division by zero (handler.py:3)",
        ),
        (
            "class A:\n    def handle(self, data, context):\n        pass\n",
            "handler.py",
            "has no attribute 'initialize'",
        ),
        (
            "class A:\n    def initialize(self, context):\n        pass\n",
            "handler.py",
            "Expect handle method in class <class 'handler.A'>",
        ),
        (
            "class A:\n    def __init__(self, x):\n        pass\n",
            "handler.py",
            "missing 1 required positional argument: 'x'",
        ),
    ],
    ids=["several classes", "nothing", "library and name", "library", "import", "syntax", "exit",
         "initialize", "no initialize", "no handle", "arguments"],
)  # fmt: skip
def test_what_is_wrong_with_a_handler_is_said(
    load: Load, source: str, handler: str, expected: str
) -> None:
    assert expected in load(source, handler)["error"]


def test_a_handler_that_is_neither_a_file_nor_built_in_is_named(load: Load) -> None:
    found = load("", "object_classifier")["error"]
    assert '"object_classifier" is neither a file of the archive nor one of' in found
    assert "image_classifier" in found


def test_the_archives_modules_come_before_ours_and_ours_keep_working(load: Load) -> None:
    source = "import handlers\nNAME = handlers.NAME\n" + body("one")
    source = source.replace("['one']", "[NAME]")
    found = load(source, handlers="NAME = 'of the author'\n")
    assert found["answers"][0] == ["of the author"]


@pytest.mark.parametrize(
    ("only_predicts", "handler", "is_sealed", "has_twin"),
    [
        (True, "image_classifier", True, False),
        (False, "image_classifier", True, True),
        (True, "handler.py", True, True),
        (True, "image_classifier", False, True),
    ],
    ids=["left-out", "explains-too", "of-an-author", "not-sealed"],
)
def test_our_handlers_are_given_no_twin_where_others_explain(
    only_predicts: bool, handler: str, is_sealed: bool, has_twin: bool, tmp_path: Path
) -> None:
    seal = "modelyard" if is_sealed else "another"
    explain = {"explain": {"artifact": "n.pt2"}}
    manifest: dict[str, Any] = {"model": {"serializedFile": "net.onnx"}, seal: explain}
    message = {"manifest": manifest, "handler": handler, "only_predicts": only_predicts}
    assert bool(choose_manifest(tmp_path, message, {})[seal]["explain"]) == has_twin
    assert manifest[seal]["explain"], "the message is as it was"


@pytest.mark.parametrize(
    ("requested", "file", "sealed", "device"),
    [
        ("auto", "digits.onnx", True, "cpu"),
        ("cuda", "digits.onnx", True, "cuda:0"),  # and is refused when it is opened
        ("auto", "digits.pt2", True, "cuda:0"),
        ("auto", "digits.onnx", False, "cuda:0"),
        ("auto", "", True, "cuda:0"),
    ],
)
def test_an_artifact_that_cannot_use_cuda_goes_to_the_cpu_unless_cuda_was_asked_for(
    requested: str, file: str, sealed: bool, device: str
) -> None:
    if onnx_has_cuda():
        pytest.skip("this onnxruntime has CUDA support")
    manifest = {"model": {"serializedFile": file}} | ({"modelyard": {}} if sealed else {})
    assert settle_device(requested, "cuda:0", manifest) == device
    assert settle_device(requested, "cpu", manifest) == "cpu"
