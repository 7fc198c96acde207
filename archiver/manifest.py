"""Manifest ↔ MAR-INF/MANIFEST.json: TorchServe's keys, and the seal under `modelyard`."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from modelyard.archiver.errors import BadManifest, BadName
from modelyard.archiver.signature import Signature, read_signature
from modelyard.archiver.untrusted import names
from modelyard.archiver.untrusted.json import Fields, format_json, parse_json

SCHEMA = 1
MAX_MANIFEST_BYTES = 1024 * 1024
# Readers of this form warn when these differ from what they know; 0.12.0 is its last release.
ARCHIVER_VERSION = "0.12.0"
RUNTIMES = ("python", "python3", "LSP")

KEYS = {
    "model_name": "modelName",
    "serialized_file": "serializedFile",
    "handler": "handler",
    "model_file": "modelFile",
    "model_version": "modelVersion",
    "requirements_file": "requirementsFile",
    "config_file": "configFile",
}
"""Field of a manifest → its key below `model`, in the form's order."""
FILES = ("serialized_file", "model_file", "requirements_file", "config_file")
"""Fields that name a file of the archive."""

PIN = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*) --hash=sha256:(?P<sha256>[0-9a-f]{64})"
)
"""A pinned requirement, as pip's requirements files have it."""


@dataclass(frozen=True)
class Explain:
    """The differentiable artifact that explanations are computed with."""

    artifact: str
    report: str


@dataclass(frozen=True)
class Golden:
    """A real request and the answer that a worker must give before it is ready."""

    request: str
    content_type: str
    expected: str
    """A JSON file: {"label": "7"} or {"answer": …}."""
    tolerance: float
    """Largest difference allowed, over the largest number of its row where that is above 1."""


@dataclass(frozen=True)
class Seal:
    """What `modelyard archive` adds to the form's keys."""

    digests: Mapping[str, str]
    """SHA-256 in lower-case hex of every file but the manifest."""
    report: str | None = None
    signature: Signature | None = None
    explain: Explain | None = None
    golden: tuple[Golden, ...] = ()
    requirements: tuple[str, ...] = ()
    """What the handler imports beside the archive, pinned: `NAME==VERSION --hash=sha256:…`."""


@dataclass(frozen=True)
class Manifest:
    """The archive's description of itself; absent keys are None."""

    model_name: str | None
    model_version: str = "1.0"
    handler: str | None = None
    serialized_file: str | None = None
    model_file: str | None = None
    requirements_file: str | None = None
    config_file: str | None = None
    runtime: str = "python"
    created_on: str | None = None
    archiver_version: str | None = None
    modelyard: Seal | None = None
    """None in archives that we did not seal."""


def parse_manifest(data: bytes) -> Manifest:
    """Read a manifest: the form's keys as its readers do, `modelyard` strictly.

    Raises:
        BadManifest: not JSON, or fields are wrong; each problem names its field.
    """
    try:
        document = parse_json(data, MAX_MANIFEST_BYTES)
    except ValueError as error:
        raise BadManifest(f"{names.MANIFEST_NAME} cannot be read", [str(error)]) from error
    fields = Fields(document)
    manifest = _manifest(fields)
    if fields.problems:
        raise BadManifest(f"{names.MANIFEST_NAME} is wrong", fields.problems)
    return manifest


def format_manifest(manifest: Manifest) -> bytes:
    """Write a manifest: the form's keys in its order, 2-space indent, UTF-8."""
    model = {key: getattr(manifest, field) for field, key in KEYS.items()}
    document: dict[str, Any] = {
        "createdOn": manifest.created_on,
        "runtime": manifest.runtime,
        "model": {key: value for key, value in model.items() if value is not None},
        "archiverVersion": manifest.archiver_version,
        "modelyard": _seal_to_json(manifest.modelyard),
    }
    document = {key: value for key, value in document.items() if value is not None}
    return format_json(document)


def _manifest(fields: Fields) -> Manifest:
    model = fields.object("model")
    runtime = fields.text("runtime")
    if runtime and runtime not in RUNTIMES:
        fields.wrong("runtime", f"one of {', '.join(RUNTIMES)}", runtime)
    return Manifest(
        model_name=_checked(model, "modelName", names.check_name),
        model_version=_version(model),
        # `name`, `file.py` or `file.py:Class`
        handler=_file(model, "handler", lambda value: value.partition(":")[0]),
        **{field: _file(model, KEYS[field]) for field in FILES},
        runtime=runtime,
        created_on=fields.text_or_none("createdOn"),
        archiver_version=fields.text_or_none("archiverVersion"),
        modelyard=_seal(fields.object("modelyard")) if "modelyard" in fields.values else None,
    )


def _checked(fields: Fields, key: str, check: Callable[[str], None]) -> str | None:
    value = fields.text_or_none(key)
    if value:
        try:
            check(value)
        except BadName as error:
            fields.problems.append(f"{fields.at(key)}: {error}")
    return value


def _version(fields: Fields) -> str:
    """Read the version: absent means 1.0, empty is refused."""
    if fields.values.get("modelVersion") == "":
        return fields.text("modelVersion")
    return _checked(fields, "modelVersion", names.check_version) or "1.0"


def _file(fields: Fields, key: str, name_of: Callable[[str], str] = str) -> str | None:
    """Read what names a file, which must stay inside the archive."""
    value = fields.text_or_none(key)
    if value and (problem := names.file_name_problem(name_of(value))):
        fields.problems.append(f"{fields.at(key)}: {names.quoted(value)}: {problem}")
    return value


def _seal(fields: Fields) -> Seal:
    schema = fields.integer("schema")
    if schema != SCHEMA and "schema" in fields.values:
        fields.problems.append(
            f"{fields.at('schema')}: this version reads {SCHEMA}, found {schema}; "
            "update modelyard or write the archive again"
        )
        return Seal(digests={})
    seal = Seal(
        digests=fields.mapping("digests", Fields.sha256),
        report=_file(fields, "report"),
        signature=_optional(fields, "signature", read_signature),
        explain=_optional(
            fields, "explain", lambda each: Explain(each.text("artifact"), each.text("report"))
        ),
        golden=tuple(_golden(item) for item in fields.objects("golden")),
        requirements=_requirements(fields),
    )
    _check_references(fields, seal)
    return seal


def _check_references(fields: Fields, seal: Seal) -> None:
    """Refuse a seal that names files which it holds no digest of."""
    named = [("report", seal.report)]
    if seal.explain:
        named += [("explain.artifact", seal.explain.artifact)]
        named += [("explain.report", seal.explain.report)]
    for i, golden in enumerate(seal.golden):
        named += [(f"golden[{i}].request", golden.request)]
        named += [(f"golden[{i}].expected", golden.expected)]
    fields.problems.extend(
        f"{fields.path}.{field}: {names.quoted(name)} has no digest in {fields.at('digests')}"
        for field, name in named
        if name and name not in seal.digests
    )


def _optional(fields: Fields, key: str, read: Callable[[Fields], Any]) -> Any:
    return None if fields.values.get(key) is None else read(fields.object(key))


def _golden(fields: Fields) -> Golden:
    request, kind, expected = map(fields.text, ("request", "content_type", "expected"))
    golden = Golden(request, kind, expected, fields.number("tolerance"))
    if golden.tolerance < 0:
        fields.wrong("tolerance", "a number of at least 0", golden.tolerance)
    return golden


def _requirements(fields: Fields) -> tuple[str, ...]:
    items = fields.items("requirements")
    for i, item in enumerate(items):
        if not isinstance(item, str) or not PIN.fullmatch(item):
            fields.wrong(f"requirements[{i}]", "NAME==VERSION --hash=sha256:DIGEST", item)
    return tuple(items)


def _seal_to_json(seal: Seal | None) -> dict[str, Any] | None:
    if seal is None:
        return None
    return {
        **{"schema": SCHEMA, **vars(seal)},
        "signature": seal.signature.to_json() if seal.signature else None,
        "explain": vars(seal.explain) if seal.explain else None,
        "golden": [vars(golden) for golden in seal.golden],
    }
