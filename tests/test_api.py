"""The Python API as people call it: `from modelyard import …`."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main

import modelyard
from modelyard import archive, export, serve, verify
from modelyard.archiver import ArchiveError
from modelyard.archiver.cli import archive_app, verify_app
from modelyard.client import RequestFailed
from modelyard.exporter.errors import UsageError
from modelyard.exporter.request import ExportRequest
from modelyard.serve.cli import serve_app
from modelyard.serve.errors import StartError
from modelyard.serve.tools.handle import serve as start
from scripts import reference
from tests.shared import DIGITS

NAMES = ", ".join(modelyard.__all__)


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_names_are_there_and_none_loads_what_is_heavy_before_it_is_used() -> None:
    heavy = "{'torch', 'numpy', 'onnx', 'onnxruntime', 'pydantic', 'fastapi', 'typer'}"
    show = f"import sys; print(sorted({heavy} & set(sys.modules)))"
    out = run(f"from modelyard import {NAMES}; {show}; help(export); {show}; print(__version__)")
    assert out.startswith("[]\n") and out.endswith(f"[]\n{modelyard.__version__}\n")


@pytest.mark.parametrize(
    "first",
    [
        "from modelyard import serve",
        "import modelyard.serve.settings",
        "from modelyard.serve import errors",
        "import modelyard.serve.tools.handle",
    ],
)
def test_serve_is_one_callable_in_every_order_of_imports(first: str) -> None:
    code = f"""
{first}
from modelyard import serve
import modelyard.serve.settings, inspect
from modelyard import serve as again
from modelyard.serve.settings import Settings
assert serve is again is modelyard.serve
assert modelyard.serve.settings.Settings is Settings
print(*inspect.signature(serve).parameters)
try:
    serve(port=-1)
except modelyard.serve.errors.StartError as error:
    print(error)
"""
    names, refused = run(code).splitlines()
    assert names.startswith("models model_store config host port")
    assert "port" in refused and "-1" in refused


def test_export_shows_the_arguments_that_it_takes() -> None:
    shown = inspect.signature(export).parameters
    taken = {field.name: field for field in dataclasses.fields(ExportRequest)}
    assert [*shown, "origin"] == list(taken)  # which the source of a location says
    for name, parameter in shown.items():
        default = taken[name].default
        if default is not dataclasses.MISSING:
            assert parameter.default == default, name
    assert [n for n, p in shown.items() if p.default is p.empty] == ["checkpoint"]


@pytest.mark.parametrize(
    ("function", "app", "command", "other"),
    [
        (archive, archive_app, None, {"example": "examples"}),
        (verify, verify_app, None, {}),
        (
            serve,
            serve_app,
            "start",
            # What prints, attaches or asks is the command's own.
            {name: "" for name in ("more_models", "foreground", "explain_plan", "reload")},
        ),
    ],
)
def test_a_function_takes_what_the_command_of_its_name_takes(
    function: Callable[..., Any], app: typer.Typer, command: str | None, other: Mapping[str, str]
) -> None:
    found: Any = typer.main.get_command(app)
    params = (found.commands[command] if command else found).params
    options = {other.get(each.name, each.name) for each in params}
    dropped = {"", "json_output", "as_json", "help"}
    assert set(inspect.signature(function).parameters) == options - dropped
    text = inspect.getdoc(start if function is serve else function) or ""
    assert {name for name in inspect.signature(function).parameters if f"{name}: " not in text} <= {
        "file"
    }


def test_text_names_a_file_as_a_path_does(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--format"):
        export(str(tmp_path / "none.pt"), formats="nope")
    with pytest.raises(ArchiveError, match="no such file"):
        archive("x", artifact=str(tmp_path / "none.onnx"), output_dir=str(tmp_path))
    with pytest.raises(ArchiveError, match="there is no"):
        verify(str(tmp_path / "none.mar"))


def test_mypy_knows_every_argument() -> None:
    """`make check` fails where one of these is not a mistake any more: an ignore is unused then."""
    with pytest.raises(TypeError):
        export("a.pt", input="x:float32[1]")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        archive("a", artifct="a.onnx")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        serve("a", prt=0)  # type: ignore[call-arg]


def test_a_server_is_started_used_and_stopped(digits_store: Path, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    with serve(
        digits_store / "onnx.mar",
        port=0,
        management_port=0,
        metrics_port=0,
        workers=1,
        state_dir=state,
    ) as server:
        with pytest.raises(StartError, match=f"already running: pid {server.about['pid']}"):
            serve("onnx", model_store=str(digits_store), state_dir=state)
        with server.client(timeout_s=30) as client:
            answer = client.predict("onnx", DIGITS / "scans" / "7.png")
            assert next(iter(answer)) == "7"
            (why,) = client.explain("onnx", DIGITS / "scans" / "7.png", target=7)
            # As above: `make check` fails where one of these is not a mistake any more.
            with pytest.raises(RequestFailed, match='unknown parameter "n_stesp"'):
                client.explain("onnx", b"x", n_stesp=50)  # type: ignore[call-arg]
            with pytest.raises(RequestFailed, match='method is "saliencyy"'):
                client.explain("onnx", b"x", method="saliencyy")  # type: ignore[arg-type]
            (later,) = client.explain("onnx", DIGITS / "scans" / "7.png", target=7)
        assert why._repr_html_() and why._repr_png_(), "the client is closed, the server is not"
    assert repr(server).endswith(", stopped>")
    server.stop()
    assert why._repr_html_() == why._repr_html_(), "what was shown is kept"
    assert "not drawn: no answer from" in str(later._repr_html_()) and not later._repr_png_()
    copied = pickle.loads(pickle.dumps(why))
    assert copied._repr_png_() == why._repr_png_() and copied.label == "7"


def test_the_reference_is_what_the_docstrings_say() -> None:
    made = reference.page()
    page = (DIGITS.parents[1] / "docs" / "api.md").read_text()
    assert page == made, "python -P scripts/reference.py > docs/api.md"
    for name in {*modelyard.__all__} - {"__version__"}:
        assert f"\n### {name}\n" in page


def test_archives_of_two_folders_are_not_one_store(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="serves those of one folder"):
        serve(tmp_path / "a" / "x.mar", tmp_path / "b" / "y.mar", state_dir=tmp_path)
