"""Artifact + handler + files → archive → what a worker finds."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from modelyard.archiver import open_archive
from modelyard.archiver.untrusted.names import MANIFEST_NAME
from tests.shared import DIGITS, archive_digits

ARTIFACTS = {
    "digits.pt2": "digits.pt2",
    "digits.onnx": "digits.pt2",
    "digits.pt": "digits.pt",
}


@pytest.fixture
def exported(digits_artifacts: dict[str, Path]) -> Path:
    """Return the folder of the three artifacts of one checkpoint."""
    return digits_artifacts["onnx"].parent


@pytest.mark.parametrize(("artifact", "twin"), ARTIFACTS.items())
def test_each_artifact_becomes_an_archive_that_a_worker_can_unpack(
    exported: Path, tmp_path: Path, artifact: str, twin: str
) -> None:
    with open_archive(archive_digits("digits", exported / artifact, tmp_path)) as archive:
        archive.unpack(tmp_path / "worker")
        names = set(archive.names)
        seal = archive.manifest.modelyard

    assert names == {
        artifact,
        f"{artifact}.report.json",
        twin,
        f"{twin}.report.json",
        "index_to_name.json",
        "model-config.yaml",
        *(f"MAR-INF/golden/{i}.{end}" for i in range(2) for end in ("request", "expected.json")),
        "MAR-INF/sbom.cdx.json",
        MANIFEST_NAME,
    }
    assert seal is not None
    assert seal.explain is not None
    assert (seal.explain.artifact, seal.report) == (twin, f"{artifact}.report.json")
    assert seal.signature is not None
    assert seal.signature.dims["batch"].max == 8
    for name, digest in seal.digests.items():
        data = (tmp_path / "worker" / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest
    for name in {artifact, twin}:
        assert (tmp_path / "worker" / name).read_bytes() == (exported / name).read_bytes()
    for i, digit in enumerate("27"):
        golden = tmp_path / "worker" / "MAR-INF" / "golden"
        request = (golden / f"{i}.request").read_bytes()
        assert request == (DIGITS / "scans" / f"{digit}.png").read_bytes()
        assert json.loads((golden / f"{i}.expected.json").read_text()) == {"label": digit}


@pytest.mark.nightly
def test_same_artifact_gives_the_same_bytes_anywhere(exported: Path, tmp_path: Path) -> None:
    here = archive_digits("digits", exported / "digits.onnx", tmp_path / "here", dry_run=True)
    moved = tmp_path / "moved"
    shutil.copytree(exported, moved)
    shutil.copytree(DIGITS, moved / "example", ignore=shutil.ignore_patterns("__pycache__"))
    for i, file in enumerate(sorted(moved.rglob("*"))):
        os.utime(file, (10**9 + i, 10**9 + i))
        if file.is_file():
            file.chmod(0o600)
    command = [
        *(sys.executable, "-c", "from modelyard.archiver.cli import archive_app; archive_app()"),
        *("digits", "--version=1.0", "--artifact=digits.onnx", "--handler=image_classifier"),
        *("--extra-files=example/index_to_name.json", "--config-file=example/model-config.yaml"),
        *("--example=example/scans/2.png=2", "--example=example/scans/7.png=7", "-o", "there"),
    ]
    environment = {**os.environ, "TZ": "Asia/Kathmandu", "LC_ALL": "C", "PYTHONHASHSEED": "7"}

    subprocess.run(command, cwd=moved, env=environment, umask=0o077, check=True)

    assert (moved / "there" / "digits.mar").read_bytes() == here.read_bytes()


def test_any_zip_reader_finds_torchserves_manifest(exported: Path, tmp_path: Path) -> None:
    path = archive_digits("digits", exported / "digits.pt", tmp_path)

    with zipfile.ZipFile(path) as zipped:
        assert zipped.testzip() is None
        assert zipped.namelist()[-1] == MANIFEST_NAME
        model = json.loads(zipped.read(MANIFEST_NAME))["model"]
    assert model == {
        "modelName": "digits",
        "serializedFile": "digits.pt",
        "handler": "image_classifier",
        "modelVersion": "1.0",
        "configFile": "model-config.yaml",
    }
