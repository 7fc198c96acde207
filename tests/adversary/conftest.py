"""The demonstration's archive, whose files others alter."""

import zipfile
from pathlib import Path

import pytest

from modelyard.archiver.api import archive

DIGITS = Path(__file__).resolve().parents[2] / "examples/digits"


@pytest.fixture(scope="session")
def digits(
    digits_artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """Return the files of the demonstration's archive."""
    packed = archive(
        "digits",
        artifact=digits_artifacts["onnx"],
        explain_with=digits_artifacts["pt2"],
        handler="image_classifier",
        extra_files=[DIGITS / "index_to_name.json"],
        config_file=DIGITS / "model-config.yaml",
        examples=[f"{DIGITS}/scans/3.png", f"{DIGITS}/scans/7.png=7"],
        output_dir=tmp_path_factory.mktemp("digits"),
    )
    with zipfile.ZipFile(packed) as file:
        return {name: file.read(name) for name in file.namelist()}
