"""The benchmark of CUDA devices, as far as it goes without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.bare import WARM_UP_CALLS
from benchmarks.gpu import Rate, batches_per_s, find_device, table

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_it_refuses_in_one_line_where_there_is_no_device(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "-o", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "torch finds no CUDA device cuda:0 on this machine" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_another_kind_of_device_is_none() -> None:
    assert find_device("cpu") is None
    assert find_device("cuda:99") is None


def test_every_batch_is_answered_and_counted() -> None:
    answered = []
    rate = batches_per_s(lambda: answered.append(0), 0.01)
    assert rate > 0
    assert len(answered) > WARM_UP_CALLS


def test_the_table_has_a_row_for_each_batch() -> None:
    served = Rate("served, 4", 8, 2000.0, failures=3)
    rates = [Rate("bare", 1, 200.0), Rate("bare", 8, 1234.4), served]
    machine = {"gpu": "A card", "cpu": "A processor", "cores": 4}
    assert table(machine, rates).splitlines() == [
        "A card, A processor, 4 cores; requests per second",
        "batch        bare   served, 4",
        "    1         200           -",
        "    8       1,234    3 failed",
    ]


@pytest.mark.nightly
def test_the_script_for_a_device_runs_on_the_cpu_and_writes_nothing() -> None:
    page = (ROOT / "docs" / "seen-on.md").read_text()
    done = subprocess.run([ROOT / "scripts" / "gpu", "--dry-run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "no device, " in done.stdout
    assert (ROOT / "docs" / "seen-on.md").read_text() == page


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_nothing_is_recorded_without_a_device() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--record", "tests/serve/test_gpu.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 4
    assert "torch sees none here" in done.stderr
