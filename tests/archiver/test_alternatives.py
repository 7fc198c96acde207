"""Other artifacts of an archive: which of them may predict, and that a worker loads the chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver import open_archive
from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.report import choose_artifact, difference, find_alternatives, read_report
from modelyard.archiver.untrusted.names import MANIFEST_NAME
from modelyard.handlers.errors import LoadError
from modelyard.serve.worker.load import load_service


@pytest.fixture(scope="module")
def folder(digits_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the archive of the ONNX artifact, which holds its twin."""
    folder = tmp_path_factory.mktemp("unpacked") / "digits"
    with open_archive(digits_store / "onnx.mar") as archive:
        archive.unpack(folder)
    return folder


@pytest.fixture
def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / MANIFEST_NAME).read_bytes())
    return found


def test_another_artifact_of_the_checkpoint_takes_the_place(
    folder: Path, manifest: dict[str, Any]
) -> None:
    names = [file.name for file in folder.iterdir()]
    found = find_alternatives(manifest, names, lambda name: (folder / name).read_bytes())
    assert list(found) == ["digits.pt2"]
    chosen = choose_artifact(manifest, "digits.pt2", lambda name: (folder / name).read_bytes())
    assert chosen["model"]["serializedFile"] == "digits.pt2"
    assert chosen["modelyard"]["report"] == "digits.pt2.report.json"
    assert manifest["model"]["serializedFile"] == "digits.onnx"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"checkpoint_sha256": "0" * 64}, "checkpoints differ"),
        ({"batch": 2}, "proven for batches of 2"),
        ({"parity": None}, "proves nothing"),
        ({"missing": True}, "expected a report beside each"),
    ],
)
def test_what_is_not_the_same_model_is_refused(
    folder: Path, manifest: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    report = json.loads((folder / "digits.pt2.report.json").read_bytes())
    if "batch" in change:
        for dim in _dims(report):
            dim["max"] = 2
    elif "parity" in change:
        del report["parity"]
    elif "checkpoint_sha256" in change:
        report["checkpoint"]["sha256"] = change["checkpoint_sha256"]

    def read(name: str) -> bytes:
        if name == "digits.pt2.report.json":
            if "missing" in change:
                raise KeyError(name)
            return json.dumps(report).encode()
        return (folder / name).read_bytes()

    with pytest.raises(CannotArchive, match=reason):
        choose_artifact(manifest, "digits.pt2", read)


def _dims(value: Any) -> list[dict[str, Any]]:
    """Return every dimension of a report that has a largest size."""
    if isinstance(value, dict):
        own = [value] if {"min", "max"} <= set(value) else []
        return own + [dim for each in value.values() for dim in _dims(each)]
    return [dim for each in value for dim in _dims(each)] if isinstance(value, list) else []


def test_inputs_of_another_shape_are_another_model(folder: Path) -> None:
    report = read_report(folder / "digits.onnx")
    assert report is not None
    fewer = replace(report, signature=replace(report.signature, inputs=()))
    assert "instead of" in (difference(report, fewer) or "")


@pytest.mark.parametrize(("artifact", "format"), [("", "onnx"), ("digits.pt2", "pt2")])
def test_a_worker_loads_the_chosen_artifact(
    folder: Path, manifest: dict[str, Any], artifact: str, format: str
) -> None:
    service = load_service(message(folder, manifest, artifact))
    assert service.predict.__self__.model.format == format  # type: ignore[attr-defined]


def test_a_worker_says_why_an_artifact_cannot_be_chosen(
    folder: Path, manifest: dict[str, Any]
) -> None:
    with pytest.raises(
        LoadError, match=r"artifact: other\.pt2 cannot predict .* expected a report"
    ):
        load_service(message(folder, manifest, "other.pt2"))


def message(folder: Path, manifest: dict[str, Any], artifact: str) -> dict[str, Any]:
    return {
        "name": "digits", "folder": str(folder), "manifest": manifest, "worker": 1,
        "handler": "image_classifier", "config_file": "model-config.yaml",
        "device": "cpu", "batch_size": 8, "artifact": artifact,
    }  # fmt: skip
