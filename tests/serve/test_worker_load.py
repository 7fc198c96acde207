"""Which handler an archive means, found in a folder of its own by a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Load = Callable[..., dict[str, Any]]

# A fork of one interpreter per case: importing torch for each would take minutes.
PROBE = """
import json, os, sys
from pathlib import Path
from serve.worker import __main__ as boot, load

def answer(message):
    folder = Path(message["folder"])
    try:
        boot._import_shim()
        boot._enter(folder)
        service = load.load_service(message)
        service.context.reset(request_ids=["id"], headers=[{}], queries=[{}])
        rows = [{"body": bytearray(b"hi")}]
        entries = (service.predict, service.explain)
        return {"answers": [entry(rows, service.context) for entry in entries]}
    except BaseException as error:
        return {"error": load.describe(error, folder)}

for line in sys.stdin:
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        print(json.dumps(answer(json.loads(line))), flush=True)
        os._exit(0)
"""


@pytest.fixture(scope="module")
def probe() -> Iterator[subprocess.Popen[str]]:
    """Start the interpreter that loads handlers in forks of itself."""
    command = [sys.executable, "-P", "-c", PROBE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@pytest.fixture
def load(tmp_path: Path, probe: subprocess.Popen[str]) -> Load:
    """Write `handler.py`, load it as a worker does, and give its answers or the error."""

    def run(source: str, handler: str = "handler.py", **files: str) -> dict[str, Any]:
        (tmp_path / handler.partition(":")[0]).write_text(source, encoding="utf-8")
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        message = {
            "folder": str(tmp_path),
            "name": "m",
            "manifest": {"model": {"modelName": "m", "handler": handler}},
            "handler": handler,
            "config_file": None,
            "device": "cpu",
            "batch_size": 4,
            "worker": 1,
        }
        assert probe.stdin is not None and probe.stdout is not None
        probe.stdin.write(json.dumps(message) + "\n")
        probe.stdin.flush()
        found: dict[str, Any] = json.loads(probe.stdout.readline())
        return found

    return run


def body(name: str = "one", base: str = "", method: str = "handle") -> str:
    head = f"class {name.title()}{base}:\n    def initialize(self, context):\n        pass\n"
    return f"{head}\n    def {method}(self, data, context):\n        return ['{name}']\n"


def test_the_only_class_of_the_file_is_the_handler(load: Load) -> None:
    assert load(body("one"))["answers"] == [["one"], ["one"]]


def test_a_class_may_be_named(load: Load) -> None:
    assert load(body("one") + body("two"), "handler.py:Two")["answers"][0] == ["two"]


def test_of_several_classes_the_one_that_is_a_handler_is_taken(load: Load) -> None:
    source = "from handlers import BaseHandler\n" + body("one") + body("two", "(BaseHandler)")
    source += "\n    explain = handle\n"
    assert load(source)["answers"][0] == ["two"]


def test_imported_classes_do_not_count(load: Load) -> None:
    source = "from pathlib import Path\nfrom handlers import BaseHandler\n" + body("one")
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


def test_a_handler_with_explain_explains(load: Load) -> None:
    source = body("one") + "\n    def explain(self, data, context):\n        return ['because']\n"
    assert load(source)["answers"] == [["one"], ["because"]]


@pytest.mark.parametrize(
    ("source", "handler", "expected"),
    [
        (body("one") + body("two"), "handler.py", "found classes: none"),
        ("x = 1\n", "handler.py", "expected one class or a function handle(data, context)"),
        (body("one"), "handler.py:Three", 'expected "Three", found classes: One'),
        ("import nothing_like_this\n", "handler.py", "No module named 'nothing_like_this'"),
        ("raise OSError('on import')\n", "handler.py", "OSError: on import (handler.py:1)"),
        ("def broken(:\n", "handler.py", "SyntaxError: invalid syntax (handler.py:1)"),
        ("import sys\nsys.exit(3)\n", "handler.py", "SystemExit: 3 (handler.py:2)"),
        (
            "class A:\n    def initialize(self, context):\n        self.x = 1 / 0\n",
            "handler.py",
            "ZeroDivisionError: division by zero (handler.py:3)",
        ),
        ("class A:\n    pass\n", "handler.py", "has no attribute 'initialize'"),
        (
            "class A:\n    def initialize(self, context):\n        pass\n",
            "handler.py",
            "has no attribute 'handle'",
        ),
        (
            "class A:\n    def __init__(self, x):\n        pass\n",
            "handler.py",
            "missing 1 required positional argument: 'x'",
        ),
    ],
    ids=["several classes", "nothing", "no such class", "missing library", "import", "syntax",
         "exit", "initialize", "no initialize", "no handle", "arguments"],
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


def test_torchserves_names_are_ours_even_where_torchserve_is_installed(load: Load) -> None:
    source = "from ts.torch_handler.base_handler import BaseHandler\n" + body("one")
    source = source.replace("['one']", "[BaseHandler.__module__]")
    assert load(source)["answers"][0] == ["handlers.base"]
