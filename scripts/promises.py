"""Print docs/promises.md: what a version 1 promises, as the code has it today.

python -P scripts/promises.py > docs/promises.md
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import modelyard_client
import typer.main
from typer.core import TyperGroup, TyperOption

import modelyard
import modelyard.handlers
from modelyard.archiver import manifest
from modelyard.archiver.untrusted import names
from modelyard.cli import _load as load
from modelyard.cli import commands
from modelyard.serve.settings import Settings

OPERATIONS = Path(__file__).parents[1] / "tests" / "serve" / "operations.jsonl"
"""What the server says of its routes, which a test compares with it."""
INTRODUCTION = """\
# What version 1 promises

Versions are [semantic](https://semver.org). From 1.0 on, no line of this page goes, and none
changes what it means, before 2.0; new ones may come with any minor version. What goes is named a
minor version earlier in the changelog and by a warning. Today's version is below 1: the page says
what the promise will be of, and lines may still go.

Made by `python -P scripts/promises.py > docs/promises.md`. A test compares it with the code, and
with the page of the last tag of the same major version: a line that was there and is not is an
error.

Not promised: texts of messages and logs, pages of the console, metrics that no page names,
anything below `modelyard.` in Python but the names here, what plug-ins and core call of each
other, speed, and that a number of an answer keeps its last digits with another torch or
onnxruntime (the [archive](archive.md#versions) says which it was proven with). The drop-in's
promise is [TorchServe's behaviour](from-torchserve.md) itself.
"""


def promised() -> dict[str, list[str]]:
    """Return heading → lines, each of which is a promise."""
    return {
        "Commands and options": sorted(_command_lines()),
        "Settings": sorted(Settings.model_fields.keys() - {"torchserve"}),
        "HTTP": sorted(
            f"{each['method'].upper()} {each['path']}"
            for each in map(json.loads, OPERATIONS.read_text().splitlines())
        ),
        "Archives": sorted(_archive_lines()),
        "Python": sorted(_python_lines()),
    }


def _command_lines() -> Iterator[str]:
    for name in commands():
        yield from _options(f"modelyard {name}", typer.main.get_command(load(name)))


def _options(words: str, command: Any) -> Iterator[str]:
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield from _options(f"{words} {name}", inner)
        return
    yield words
    for option in command.params:
        if isinstance(option, TyperOption) and not option.hidden and option.name != "help":
            for spelling in (*option.opts, *option.secondary_opts):
                yield f"{words} {spelling}"


def _archive_lines() -> Iterator[str]:
    """Yield the files of an archive that have a meaning, and the manifest's keys."""
    for name, value in vars(names).items():
        if name.endswith("_NAME") and isinstance(value, str):
            yield value
    for key in ("createdOn", "runtime", "archiverVersion", "modelyard"):
        yield f"{names.MANIFEST_NAME}: {key}"
    for key in manifest.KEYS.values():
        yield f"{names.MANIFEST_NAME}: model.{key}"
    for place, kind in (("", manifest.Seal), (".golden[]", manifest.Golden)):
        for field in dataclasses.fields(kind):
            yield f"{names.MANIFEST_NAME}: modelyard{place}.{field.name}"


def _python_lines() -> Iterator[str]:
    for module in (modelyard, modelyard.handlers, modelyard_client):
        for name in module.__all__:
            value = getattr(module, name)
            yield f"{module.__name__}.{name}"
            if inspect.isfunction(value) or inspect.ismethod(value):
                for parameter in inspect.signature(value).parameters:
                    yield f"{module.__name__}.{name}({parameter})"
            elif inspect.isclass(value):
                for member in vars(value):
                    if not member.startswith("_"):
                        yield f"{module.__name__}.{name}.{member}"


def broken(before: Mapping[str, list[str]], now: Mapping[str, list[str]]) -> list[str]:
    """Return the lines that were promised and are gone."""
    return sorted(
        f"{heading}: {line}" for heading, lines in before.items() for line in lines
        if line not in now.get(heading, ())
    )  # fmt: skip


def read(page: str) -> dict[str, list[str]]:
    """Return the lines of a page, by heading."""
    found = {}
    for part in page.split("\n## ")[1:]:
        heading, _, rest = part.partition("\n")
        found[heading] = rest.partition("```text\n")[2].partition("\n```")[0].splitlines()
    return found


def write() -> str:
    """Return the page."""
    parts = (
        "\n".join((f"## {heading}\n", "```text", *lines, "```\n"))
        for heading, lines in promised().items()
    )
    return "\n".join((INTRODUCTION, *parts))


if __name__ == "__main__":
    sys.stdout.write(write())
