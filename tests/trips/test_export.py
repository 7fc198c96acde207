"""Checkpoint → artifacts, on the digits model, through the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.digits.net import DigitsNet
from examples.digits.train import accuracy, held_out, to_input
from modelyard.exporter.formats import to_torchscript
from modelyard.handlers.models.backends import open_artifact
from tests.shared import DIGITS, FILES


@pytest.fixture(scope="module")
def exported(digits_artifacts: dict[str, Path]) -> Path:
    """Return the folder of the digits artifacts, one in every format."""
    return digits_artifacts["pt2"].parent


def test_the_command_warns_of_torchscript_and_prints_the_reports(exported: Path) -> None:
    assert (exported.parent / "stderr").read_text() == f"warning: {to_torchscript.DEPRECATION}\n"
    reports = json.loads((exported.parent / "stdout").read_text())
    assert [report["format"] for report in reports] == list(FILES)


def _checkpoint() -> DigitsNet:
    model = DigitsNet()
    model.load_state_dict(torch.load(DIGITS / "digits.pt", weights_only=True))
    return model.eval()


def test_the_committed_checkpoint_reads_97_percent_of_the_held_out_scans() -> None:
    assert (DIGITS / "digits.pt").stat().st_size < 500_000
    assert accuracy(_checkpoint(), *held_out()) >= 0.97


@pytest.mark.parametrize("format", FILES)
def test_every_artifact_reads_every_held_out_scan_as_the_checkpoint_does(
    format: str, exported: Path
) -> None:
    pixels, _ = held_out()
    inputs = to_input(pixels)
    with torch.inference_mode():
        wanted: Tensor = _checkpoint()(inputs)
    artifact = open_artifact(exported / FILES[format], format)
    with torch.inference_mode():
        found = torch.cat([torch.as_tensor(artifact(rows)) for rows in torch.split(inputs, 8)])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert torch.equal(found.argmax(1), wanted.argmax(1))


@pytest.mark.parametrize("format", FILES)
def test_every_report_proves_batches_1_to_8_within_1e_4(format: str, exported: Path) -> None:
    text = (exported / f"{FILES[format]}.report.json").read_text(encoding="utf-8")
    report = json.loads(text)
    assert report["parity"]["batches"] == list(range(1, 9))
    assert report["parity"]["verdict"] == "agrees"
    assert report["parity"]["outputs"]["logits"]["max_abs"] <= 1e-4
    assert report["parity"]["outputs"]["logits"]["top1_agreement"] == 1.0
    assert report["signature"]["outputs"] == [
        {"name": "logits", "dtype": "float32", "shape": ["batch", 10]}
    ]
    assert str(DIGITS) not in text


def test_nothing_else_is_written(exported: Path) -> None:
    written = {path.name for path in exported.iterdir()}
    assert written == {name for file in FILES.values() for name in (file, f"{file}.report.json")}


@pytest.mark.slow
def test_training_again_gives_as_good_a_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.digits.train", "-o", str(tmp_path)]
    subprocess.run(command, cwd=DIGITS.parents[1], check=True)
    model = DigitsNet()
    model.load_state_dict(torch.load(tmp_path / "digits.pt", weights_only=True))
    assert accuracy(model, *held_out()) >= 0.97
    assert {path.name for path in (tmp_path / "scans").glob("*.png")} == {
        f"{digit}.png" for digit in range(10)
    }
