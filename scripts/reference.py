"""Print docs/api.md: the public names of Python, from their signatures and docstrings.

python -P scripts/reference.py > docs/api.md
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

INTRODUCTION = """\
# Python reference

Made of the docstrings by `python -P scripts/reference.py > docs/api.md`; a test says when it is
stale. How they go together: [in a notebook](notebooks.md), [the client](client.md),
[handlers](handlers.md).
"""

PARTS = {
    "From `modelyard`": {
        "modelyard.exporter.request": ["export"],
        "modelyard.archiver.api": ["archive", "verify", "Verification"],
        "modelyard.serve.tools.handle": ["serve", "Server"],
        "modelyard.client": ["Client", "AsyncClient", "Explanation"],
    },
    "From `modelyard.client`": {"modelyard.client": ["ExplainOptions", "Outputs"]},
    "From `modelyard.handlers`": {"modelyard.handlers": ["BaseHandler", "Context"]},
    "From `modelyard.exporter`": {"modelyard.exporter": ["ExportReport"]},
    "Errors": {
        "modelyard.exporter.errors": [],
        "modelyard.archiver.errors": [],
        "modelyard_client.errors": [],
        "modelyard.handlers.errors": [],
        "modelyard.serve.errors": ["StartError"],
    },
}
"""Heading → module → names; all exceptions of a module that names none."""


def page() -> str:
    """Return the page."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(write())).rstrip() + "\n"


def write() -> Iterator[str]:
    """Yield its parts."""
    yield INTRODUCTION
    for heading, modules in PARTS.items():
        yield f"## {heading}\n"
        for place, names in modules.items():
            module = importlib.import_module(place)
            if heading == "Errors":
                yield f"### `{place}`\n\n| error | a kind of | |\n| --- | --- | --- |"
                yield from (
                    row(each) for each in errors_of(module) if names in ([], [each.__name__])
                )
                yield ""
                continue
            for name in names:
                yield from entry(name, getattr(module, name))


def errors_of(module: ModuleType) -> list[type[Exception]]:
    """Return the exceptions that a module defines."""
    found = [each for each in vars(module).values() if isinstance(each, type)]
    return [
        each for each in found if issubclass(each, Exception) and each.__module__ == module.__name__
    ]


def row(error: type[Exception]) -> str:
    """Return an error's line of a table: the first sentence of what it says."""
    first = (inspect.getdoc(error) or "").partition("\n\n")[0].replace("\n", " ")
    return f"| `{error.__name__}` | `{error.__bases__[0].__name__}` | {first} |"


def entry(name: str, value: Any) -> Iterator[str]:
    """Yield a function's or a class's part of the page, with the class's public methods."""
    yield f"### {name}\n"
    if isinstance(value, type) and issubclass(value, dict):  # a TypedDict
        fields = ", ".join(f"{key}: {kind}" for key, kind in texts_of(value).items())
        yield f"```python\n{wrapped(f'{name}({fields})')}\n```\n"
    else:
        yield f"```python\n{wrapped(name + signature_of(value))}\n```\n"
    yield from prose(inspect.getdoc(value) or "")
    if not isinstance(value, type):
        return
    if documented := dict(documented_fields(value)):
        yield from (f"- `{field}`: {text}" for field, text in documented.items())
        yield ""
    for method, found in vars(value).items():
        function = found.fget if isinstance(found, property) else found
        function = getattr(function, "__func__", function)
        if method.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        call = "" if isinstance(found, property) else signature_of(function, is_method=True)
        is_async = "await " if inspect.iscoroutinefunction(function) else ""
        yield f"#### {name}.{method}\n"
        yield f"```python\n{wrapped(is_async + method + call)}\n```\n"
        yield from prose(inspect.getdoc(function) or "")


def texts_of(value: type) -> dict[str, str]:
    """Return a TypedDict's annotations as they are written."""
    return {key: kind.__forward_arg__ for key, kind in value.__annotations__.items()}


def signature_of(value: Any, *, is_method: bool = False) -> str:
    """Return how something is called, types as they are written."""
    text = str(inspect.signature(value)).replace("_local.Path", "Path")  # Python 3.13
    if is_method:
        text = re.sub(r"^\((self|cls)(, )?", "(", text)
    text = re.sub(r"(?<=[:>]) '([^']*)'", r" \1", text)
    return re.sub(
        r"<factory>",
        "…",
        re.sub(r"\bmodelyard\.[\w.]*\.|\bcollections\.abc\.|\btyping\.|\bpathlib\.", "", text),
    )


def wrapped(call: str) -> str:
    """Return a call, an argument a line where it is long."""
    if len(call) <= 100 or "(" not in call:
        return call
    head, _, rest = call.partition("(")
    inner, _, tail = rest.rpartition(")")
    parts = re.split(r", (?![^\[(]*[\])])", inner)
    return f"{head}(\n" + "".join(f"    {part},\n" for part in parts) + f"){tail}"


def prose(doc: str) -> Iterator[str]:
    """Yield a docstring as Markdown: its sections as lists."""
    text, *sections = re.split(r"^(Args|Returns|Raises|Yields|Attributes):\n", doc, flags=re.M)
    yield text.strip() + "\n"
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        listed, _, rest = body.partition("\n\n")
        lines = textwrap.dedent(listed)
        entries = re.sub(r"\n[ ]+", " ", lines).strip().split("\n")
        yield f"{title}:\n"
        for each in entries:
            names, colon, said = each.partition(": ")
            yield f"- `{names}`: {said}" if colon and title != "Returns" else f"- {each}"
        yield ""
        if rest.strip():
            yield textwrap.dedent(rest).strip() + "\n"


def documented_fields(value: type) -> Iterator[tuple[str, str]]:
    """Yield a dataclass's fields that a sentence stands under, or that are public."""
    if not dataclasses.is_dataclass(value):
        return
    source = inspect.getsource(value)
    for field in dataclasses.fields(value):
        below = re.search(
            rf"^    {field.name}: [^\n]*\n    \"\"\"(.*?)\"\"\"$", source, re.M | re.S
        )
        if below:
            yield field.name, re.sub(r"\s+", " ", below[1])


if __name__ == "__main__":
    sys.stdout.write(page())
