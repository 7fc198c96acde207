"""What an export proved: the `<artifact>.report.json` that travels with the artifact."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from modelyard.archiver.signature import Signature
from modelyard.exporter.parity import Parity

SCHEMA = 1


@dataclass(frozen=True)
class ExportReport:
    """One artifact and the proof that it agrees with its checkpoint."""

    artifact: Path
    format: str
    artifact_sha256: str
    artifact_bytes: int
    signature: Signature
    parity: Parity
    checkpoint: str
    """The checkpoint's file name."""
    checkpoint_sha256: str
    model: str
    """As in `--model`, without the folder."""
    model_args: Mapping[str, Any]
    device: str
    details: Mapping[str, object]
    """What one format alone has to say, such as how TorchScript was made."""
    command: str
    """The command line that makes this artifact, without absolute paths."""
    checkpoint_kind: str = "state dict"
    checkpoint_details: Mapping[str, object] = field(default_factory=dict)
    """How the checkpoint was read: loader, weights chosen, prefixes stripped, names refused."""
    warnings: Sequence[str] = ()
    """What the author may want to change in the model."""

    @property
    def path(self) -> Path:
        """Where the report lies: beside the artifact."""
        return report_path(self.artifact)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the report file; equal exports give equal content."""
        return {
            "schema": SCHEMA,
            "format": self.format,
            "artifact": self.artifact.name,
            "artifact_sha256": self.artifact_sha256,
            "artifact_bytes": self.artifact_bytes,
            "signature": self.signature.to_json(),
            "parity": self.parity.to_json(),
            "checkpoint": {
                "file": self.checkpoint,
                "kind": self.checkpoint_kind,
                "sha256": self.checkpoint_sha256,
                **self.checkpoint_details,
            },
            "model": self.model,
            "model_args": dict(self.model_args),
            "device": self.device,
            "details": dict(self.details),
            "warnings": list(self.warnings),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "onnx", "onnxruntime")},
            },
            "command": self.command,
        }


def report_path(artifact: Path) -> Path:
    """Name the report of an artifact."""
    return artifact.with_name(f"{artifact.name}.report.json")


def sha256(path: Path) -> str:
    """Digest a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(report: ExportReport, finished: Path) -> None:
    """Move a finished artifact to its place, with its report beside it.

    Args:
        report: names the place.
        finished: the artifact, in a folder of the same file system.

    Both are whole on disk before either has its name. The report holds the artifact's digest, so
    that a power cut between the two renames cannot leave a pair that seems to belong together.
    """
    draft = report_path(finished)
    # Not NaN: JSON has none, and a proof of parity needs none.
    text = json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n"
    draft.write_text(text, encoding="utf-8")
    for path in (finished, draft, finished.parent):
        _flush(path)
    finished.replace(report.artifact)
    draft.replace(report.path)
    _flush(report.artifact.parent)


def _flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
