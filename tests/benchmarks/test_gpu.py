"""The benchmark of CUDA devices, as far as it goes without one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import Rate, batches_per_s, find_device, table

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("in_flight", [1, 2])
def test_every_batch_that_starts_is_answered(in_flight: int) -> None:
    open_batches: list[int] = []
    most = done = 0

    def start() -> Callable[[], Any]:
        nonlocal most
        open_batches.append(0)
        most = max(most, len(open_batches))

        def answer() -> list[float]:
            nonlocal done
            done += 1
            open_batches.pop()
            return [0.5]

        return answer

    rate = batches_per_s(start, in_flight, 0.01)
    assert rate > 0
    assert (most, open_batches) == (in_flight, [])
    assert done > 20


def test_the_table_has_a_row_for_each_batch_with_graphs_and_without() -> None:
    rates = [
        Rate("in turn", 8, True, 1234.4),
        Rate("pinned", 8, True, 2345.6),
        Rate("served", 8, True, 2000.0, failures=3),
        Rate("in turn", 8, False, 1200.0),
    ]
    machine = {"gpu": "A card", "cpu": "A processor", "cores": 4}
    assert table(machine, rates).splitlines() == [
        "A card, A processor, 4 cores; requests per second",
        "batch  graphs     in turn      pinned    pageable      served",
        "    8      on       1,234       2,346           -    3 failed",
        "    8     off       1,200           -           -           -",
    ]
