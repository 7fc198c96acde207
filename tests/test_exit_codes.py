"""An option whose value means nothing, whatever files and servers hold, ends a command with 2."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from modelyard.cli import commands, main

URL = "no-url"
WRONG: dict[str, dict[str, str]] = {
    "export": {
        "--input": "a:b:c", "--format": "zip", "--device": "zip", "--dtype": "zip",
        "--quantize": "zip", "--model": "nonsense", "--model-args": "{", "--name": "a/b",
    },
    "bench": {
        "--model-args": "{", "--input": "a:b:c", "--batch": "zip", "--threads": "zip",
        "--size": "zip", "--device": "zip",
    },
    "archive": {
        "name": "a b", "--handler": "image_clasifier", "--version": "a b", "--expires": "soon",
    },
    "verify": {"--device": "zip"},
    "diff": {"--device": "zip", "--tolerance": "-1"},
    "recertify": {"archives": "nowhere", "--with": "zip", "--runtime": "zip"},
    "serve start": {
        "--device": "zip", "--auth": "zip", "--log-format": "zip", "--log-level": "zip",
        "--port": "99999", "--workers": "9999", "--explain-share": "2",
    },
    "serve token": {"api": "zip"},
    "models list": {"--url": URL},
    "models describe": {"--url": URL},
    "models register": {"--url": URL},
    "models scale": {"--url": URL},
    "models default": {"--url": URL},
    "models unregister": {"--url": URL},
    "rollout start": {"--url": URL},
    "rollout status": {"--url": URL},
    "rollout promote": {"--url": URL},
    "rollout abort": {"--url": URL},
    "rollout back": {"--url": URL},
    "token new": {"name": "a b", "--rights": "predct"},
    "tune": {"--slo": "zip", "--device": "zip"},
    "plan": {"--slo": "zip", "--rps": "0", "--mix": "=0"},
    "incident": {"--url": URL},
    "provenance attest": {"--expires": "soon"},
    "predict": {"--url": URL},
    "explain": {"--url": URL, "--output": "a.jpg"},
}  # fmt: skip
"""Command → option → a value that means nothing to it."""

FREE = {
    "--task", "--weights-key", "--submodule", "--model", "--example", "--extra-files", "--models",
    "more_models", "--host", "--model_name", "--predictor_host", "--token", "model", "archive",
    "--name", "--base", "--output-name", "name",
}  # fmt: skip
"""Text that is a name: what files and servers hold decides over it."""
SERVERS = {
    *("--shadow", "--for", "--canary", "--rule", "--expect", "--header", "--to"),
    *("--method", "--target", "--against", "--region", "--output-kind", "--baseline", "--layer"),
    *("--aggregate", "id", "--at"),
}
"""What the server judges, whose version may know others."""
OTHERS = {
    "--output",  # of `export` the name of an output
    *("--router", "--arrivals", "--burst", "--timeout", "--hop", "--fail", "--slow", "--hot"),
    "--costs",
}
"""What `plan` reads when it has found the models is in the tests of `plan`."""

REQUIRED = {
    "export": ["examples/digits/digits.pt"],
    "archive": ["m", "--handler", "h.py"],
    "verify": ["m.mar"],
    "diff": ["m.mar", "n.mar"],
    "recertify": ["examples/digits/digits.pt"],
    "models describe": ["m"],
    "models register": ["m.mar"],
    "models scale": ["m", "1"],
    "models default": ["m/1"],
    "models unregister": ["m"],
    "rollout start": ["m", "m.mar"],
    "rollout status": ["m"],
    "rollout promote": ["m"],
    "rollout abort": ["m"],
    "rollout back": ["m"],
    "token new": ["app", "--rights", "predict"],
    "tune": ["m"],
    "plan": ["--slo", "p99=50ms", "--mix", "m=1", "--rps", "3"],
    "incident": ["7f3c", "-o", "i.json"],
    "provenance attest": ["m.mar", "-o", "p.json"],
    "provenance sbom": ["m.mar", "-o", "s.json"],
    "predict": ["m", "README.md"],
    "explain": ["m", "README.md"],
}


def options() -> Iterator[tuple[str, Any]]:
    """Yield every command with each of its arguments and options that takes a value."""
    for name, command in commands().items():
        app = getattr(importlib.import_module(command.module), command.app)
        found: Any = typer.main.get_command(app)
        subcommands = getattr(found, "commands", {"": found})
        for sub, each in subcommands.items():
            for parameter in each.params:
                if not getattr(parameter, "is_flag", False):
                    yield f"{name} {sub}".strip(), parameter


def name_of(parameter: Any) -> str:
    """Return an option's long name, or an argument's."""
    return next((each for each in parameter.opts if each.startswith("--")), str(parameter.name))


OPTIONS = [(path, name_of(each), each.type_descriptor) for path, each in options()]
NUMBERS = [
    (path, name, "zip")
    for path, name, descriptor in OPTIONS
    if name.startswith("--") and (descriptor.is_choice or descriptor.annotation in (int, float))
]
TEXTS = [
    (path, name, value)
    for path, each in WRONG.items()
    if path.split()[0] in commands()  # a plug-in may not be there
    for name, value in each.items()
]


@pytest.mark.parametrize(("path", "name", "value"), [*NUMBERS, *TEXTS], ids=str)
def test_a_value_that_means_nothing_is_wrong_usage(
    path: str, name: str, value: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, digits_artifacts: dict[str, Path],
) -> None:  # fmt: skip
    monkeypatch.setenv("MODELYARD_STATE_DIR", str(tmp_path))
    required = [str(digits_artifacts["onnx"])] if path == "bench" else REQUIRED.get(path, ())
    given = [*path.split(), *required]
    if name.startswith("-"):
        given += [name, value]
    else:
        given[len(path.split()) :] = [value, *given[len(path.split()) + 1 :]]
    with pytest.raises(SystemExit) as ended:
        main(given)
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert value in said


def test_every_option_that_takes_text_is_in_one_of_the_tables() -> None:
    for path, name, descriptor in OPTIONS:
        annotation = str(descriptor.annotation)
        if descriptor.is_choice or "str" not in annotation or descriptor.is_path:
            continue
        known = name in WRONG.get(path, ()) or name in FREE | SERVERS | OTHERS
        assert known, f"{path} {name} is in no table: what does a value that means nothing do?"
