"""Read `<artifact>.report.json`, which the exporter writes beside every artifact."""

import re
from dataclasses import dataclass
from pathlib import Path

from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.signature import Signature, read_signature
from modelyard.archiver.untrusted.json import Fields, parse_json

_MAX_REPORT_BYTES = 16 * 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Report:
    """What the archiver needs of a report."""

    path: Path
    format: str
    """`pt2`, `onnx`, `torchscript` …"""
    artifact_sha256: str
    checkpoint_sha256: str
    signature: Signature
    tolerance: float | None
    """Largest difference from the checkpoint that was allowed; None in reports without parity."""


def read_report(artifact: Path) -> Report | None:
    """Read the report beside an artifact, or return None when there is none.

    Raises:
        CannotArchive: the report is not valid JSON, or lacks a field; each problem names its field.
    """
    path = artifact.with_name(f"{artifact.name}.report.json")
    if not path.exists():
        return None
    try:
        return parse_report(path.read_bytes(), path)
    except OSError as error:
        raise CannotArchive("cannot read the report", [f"{path.name}: {error}"]) from error


def parse_report(data: bytes, path: Path) -> Report:
    """Read a report's content.

    Raises:
        CannotArchive: as `read_report`.
    """
    problems: list[str] = []
    try:
        fields = Fields(parse_json(data, _MAX_REPORT_BYTES), "", problems)
    except ValueError as error:
        raise CannotArchive("cannot read the report", [f"{path.name}: {error}"]) from error
    report = Report(
        path,
        format=fields.text("format"),
        artifact_sha256=_sha256(fields, "artifact_sha256"),
        checkpoint_sha256=_sha256(fields.object("checkpoint"), "sha256"),
        signature=read_signature(fields.object("signature")),
        tolerance=_tolerance(fields),
    )
    if problems:
        raise CannotArchive("cannot read the report", [f"{path.name}: {p}" for p in problems])
    return report


def _tolerance(fields: Fields) -> float | None:
    return fields.object("parity").number("tolerance") if "parity" in fields.values else None


def _sha256(fields: Fields, key: str) -> str:
    digest = fields.text(key)
    if digest and not _SHA256.fullmatch(digest):
        fields.wrong(key, "64 lower-case hexadecimal digits", digest)
    return digest
