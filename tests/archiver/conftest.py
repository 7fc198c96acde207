"""Small stand-ins for what the exporter writes: the archiver never opens an artifact."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

FORMATS = {"digits.pt": "torchscript", "digits.pt2": "pt2", "digits.onnx": "onnx"}
HANDLER = "class DigitsHandler:\n    pass\n"


def report(artifact: Path, artifact_format: str, checkpoint: bytes = b"weights") -> dict[str, Any]:
    data = artifact.read_bytes()
    return {
        "schema": 1,
        "format": artifact_format,
        "artifact": artifact.name,
        "artifact_sha256": hashlib.sha256(data).hexdigest(),
        "artifact_bytes": len(data),
        "signature": {
            "inputs": [{"name": "image", "dtype": "float32", "shape": ["batch", 1, 8, 8]}],
            "outputs": [{"name": "logits", "dtype": "float32", "shape": ["batch", 10]}],
            "dims": {"batch": {"min": 1, "max": 8}},
        },
        "parity": {"verdict": "agrees", "tolerance": 1e-4, "cases": 24},
        "checkpoint": {"file": "digits.pt", "sha256": hashlib.sha256(checkpoint).hexdigest()},
        "versions": {name: version(name) for name in ("torch", "onnxruntime")},
    }


def fill(folder: Path) -> Path:
    """Write three artifacts with reports, a handler, labels, a configuration and two requests."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, artifact_format in FORMATS.items():
        artifact = folder / name
        artifact.write_bytes(f"{name} ".encode() * 1000)
        text = json.dumps(report(artifact, artifact_format))
        artifact.with_name(f"{name}.report.json").write_text(text)
    (folder / "handler.py").write_text(HANDLER)
    (folder / "index_to_name.json").write_text('{"0": "0"}')
    (folder / "model-config.yaml").write_text("batchSize: 8\n")
    (folder / "0.png").write_bytes(b"\x89PNG zero")
    (folder / "7.png").write_bytes(b"\x89PNG seven")
    return folder


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Return a folder of input files."""
    return fill(tmp_path / "inputs")
