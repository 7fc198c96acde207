"""What a reader can enter for a model: by its handler, its signature and the files beside it.

A model's document (`api/schemas.py`) says the same to programs, from the same schemas.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelyard.archiver.signature import Signature, parse_signature
from modelyard.serve.api.description import Schema
from modelyard.serve.api.schemas import body_and_answer
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.errors import BadRequest

MOST_ENTRIES = 100
MOST_EXAMPLE_NUMBERS = 1000
"""Most numbers of an example that is made up; a longer row is left to whoever asks."""
JSON, BYTES = "application/json", "application/octet-stream"
PREFIX = "entry."
"""Text before an entry's name, as the form's field has it."""


@dataclass(frozen=True)
class Entry:
    """One value that is entered by its name."""

    name: str
    """Empty where the value is the whole body."""
    kind: str
    """`number`, `text`, `lines`, `choice` or `file`."""
    choices: tuple[str, ...] = ()
    is_needed: bool = True

    @property
    def field(self) -> str:
        """Its name in the form."""
        return f"{PREFIX}{self.name}"


@dataclass(frozen=True)
class Form:
    """The ways in which a body can be entered, the likeliest first."""

    file: str
    """What a file must be; empty where the model takes none."""
    accept: str
    """What a browser offers to choose from."""
    entries: tuple[Entry, ...]
    example: str
    """JSON to begin with."""

    @property
    def ways(self) -> list[str]:
        """`file`, `entries` and `json`, as far as the model takes them."""
        found = ["file"] if self.file else []
        return [*found, *(["entries"] if self.entries else []), "json"]


def form_of(model: ModelVersion, features: object = None) -> Form:
    """Return the form of a model version.

    Args:
        features: what its archive says of the features of a table, where it does.
    """
    manifest = model.manifest or {}
    seal = manifest.get("modelyard") or {}
    signature = parse_signature(seal["signature"]) if seal.get("signature") else None
    handler = str((manifest.get("model") or {}).get("handler") or "")
    bodies, _ = body_and_answer(handler, signature)
    as_file, as_json = bodies.get(BYTES), bodies.get(JSON, {})
    entries = tuple(_features(features)) or tuple(_entries(as_json))
    return Form(
        file=str(as_file.get("description", "A file.")) if as_file is not None else "",
        accept=_accepted(as_file or {}),
        entries=entries if len(entries) <= MOST_ENTRIES else (),
        example=_example(as_json, entries, signature if handler == "base_handler" else None),
    )


def write_body(
    entries: Iterable[Entry], fields: Mapping[str, str], files: Mapping[str, bytes]
) -> bytes:
    """Return the JSON of what was entered.

    Raises:
        BadRequest: names the entry, and what was expected.
    """
    values: dict[str, Any] = {}
    for entry in entries:
        value = _read(entry, fields.get(entry.field, ""), files.get(entry.field, b""))
        if value is not None:
            values[entry.name] = value
    return json.dumps(values.get("", values), ensure_ascii=False).encode()


def _read(entry: Entry, text: str, content: bytes) -> Any:
    """Return a value; None where nothing is entered and nothing is needed."""
    if entry.kind == "file" and content:
        return base64.b64encode(content).decode()
    if not text:
        if entry.is_needed and (entry.name or entry.kind == "file"):
            wanted = {"number": "a number", "file": "a file"}.get(entry.kind, "a text")
            raise BadRequest(f"{entry.name}: nothing is entered; expected {wanted}")
        return "" if not entry.name else None
    if entry.kind == "lines":
        return text.splitlines()
    if entry.kind != "number":
        return text
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadRequest(f"{entry.name}: expected a number, got {text[:40]!a}")
    return int(text) if text.lstrip("-").isdecimal() else number


def _accepted(schema: Schema) -> str:
    for word, kind in (("picture", "image/*"), ("sound", "audio/*")):
        if word in schema.get("description", ""):
            return kind
    return ""


def _entries(schema: Schema) -> Sequence[Entry]:
    """Return the values of a body that is a text, or has them by name.

    Those that can be entered by JSON alone are left out, and all are where such a one is needed.
    """
    if schema.get("type") == "string":
        return [Entry("", "text")]
    needed, found = schema.get("required", ()), []
    for name, each in schema.get("properties", {}).items():
        if (kind := _kind(each)) is not None:
            found.append(Entry(name, kind, is_needed=name in needed))
        elif name in needed:
            return []
    return found


def _kind(schema: Schema) -> str | None:
    """Return how a value is entered; None where it can be by JSON alone."""
    match schema:
        case {"type": "string", "contentEncoding": "base64"}:
            return "file"
        case {"type": "string"}:
            return "text"
        case {"type": "number" | "integer"}:
            return "number"
        case {"type": "array", "items": {"type": "string"}}:
            return "lines"
    return None


def _features(document: object) -> Iterable[Entry]:
    """Yield the features of a table, as far as a file says them that the worker has checked."""
    listed = document.get("features") if isinstance(document, dict) else None
    for each in listed if isinstance(listed, list) else ():
        if not isinstance(each, dict) or not isinstance(name := each.get("name"), str):
            return
        choices = each.get("one_hot") or each.get("values") or ()
        texts = tuple(map(str, choices)) if isinstance(choices, Sequence | Mapping) else ()
        yield Entry(name, "choice" if texts else "number", texts)


def _example(schema: Schema, entries: Iterable[Entry], signature: Signature | None) -> str:
    """Return a body of the right form, whose values mean nothing."""
    if entries := tuple(entries):
        found = {each.name: _value(each) for each in entries if each.is_needed}
        return json.dumps(found.get("", found), ensure_ascii=False, indent=1)
    if signature is None or not signature.inputs:
        return ""
    count = sum(math.prod(_sizes(spec.shape[1:])) for spec in signature.inputs)
    if count > MOST_EXAMPLE_NUMBERS:
        return ""
    rows = {spec.name: _zeros(_sizes(spec.shape[1:]), spec.dtype) for spec in signature.inputs}
    return json.dumps(rows if len(rows) > 1 else next(iter(rows.values())))


def _value(entry: Entry) -> Any:
    return {
        "number": 0, "lines": [], "choice": entry.choices[0] if entry.choices else "",
    }.get(entry.kind, "")  # fmt: skip


def _sizes(shape: Sequence[Any]) -> list[int]:
    return [size if isinstance(size, int) else max(1, size.min) for size in shape]


def _zeros(sizes: Sequence[int], dtype: str) -> Any:
    if not sizes:
        return False if dtype == "bool" else 0 if "int" in dtype else 0.0
    return [_zeros(sizes[1:], dtype) for _ in range(sizes[0])]
