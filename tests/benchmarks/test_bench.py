"""The benchmark itself, on real servers, as short as it can be."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.archives import ECHO, RESNET, ROOT, TINY
from benchmarks.results import BARE, DROP_IN, OURS, Results, read_results

TIMEOUT_S = 600
pytestmark = [
    pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed"),
    pytest.mark.timeout(TIMEOUT_S + 60),
]


def bench(folder: Path, *options: str) -> tuple[str, Results]:
    """Run one quick round and return what it printed and kept."""
    command = [sys.executable, "-m", "benchmarks.bench", "--quick", "-o", str(folder)]
    done = subprocess.run(
        [*command, "--name", "found", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "found.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "found.txt").read_text() in done.stdout
    return done.stdout, read_results(folder / "found.json")


@pytest.mark.nightly
def test_overhead_is_measured_and_peers_that_are_not_there_are_named(tmp_path: Path) -> None:
    envs = tmp_path / "envs"
    envs.mkdir()
    chosen = ["--server", OURS, "--server", DROP_IN, "--server", "mosec"]
    printed, found = bench(tmp_path, "--only", "overhead", "--peers", str(envs), "-c", "2", *chosen)
    assert "mosec: skipped" in printed
    assert "ray" not in printed
    servers = [OURS, f"{DROP_IN} b=8", f"{DROP_IN} b=32"]
    cells = [(each.cell.subject, each.cell.server, each.cell.connections) for each in found.samples]
    assert cells == [(TINY, name, 2) for name in servers]
    for sample in found.samples:
        assert sample.requests > 0 and sample.failures == 0 and sample.server_cpu_s > 0
    assert found.samples[0].workers_cpu_s > 0
    assert [each.server for each in found.footprints] == servers
    footprint = found.footprints[0]
    assert footprint.has_torch is False
    assert footprint.server_pss_mb is not None and footprint.worker_pss_mb is not None
    assert footprint.pss_mb == footprint.server_pss_mb + footprint.worker_pss_mb
    assert found.about["command"].endswith("--server drop-in --server mosec")


@pytest.mark.slow
def test_the_other_parts_are_measured(tmp_path: Path) -> None:
    counts = ["-c", "1", "-c", "3", "--server", OURS]
    _, found = bench(tmp_path, "--only", "ceiling", "--only", "compute", *counts)
    cells = [(s.cell.subject, s.cell.server, s.cell.connections, s.round) for s in found.samples]
    turns = [(BARE, 0), (OURS, 0), (BARE, 1)]
    assert cells == [
        *((ECHO, OURS, count, 0) for count in (1, 3)),
        *((RESNET, server, count, round) for count in (1, 3) for server, round in turns),
    ]
    assert all(sample.requests > 0 and sample.failures == 0 for sample in found.samples)
    summary = json.loads((tmp_path / "found.json").read_text())["summary"]
    ratios = [row["rate_ratio"] for row in summary if row["cell"]["subject"] == RESNET
              and row["cell"]["server"] == OURS]  # fmt: skip
    assert len(ratios) == 2 and all(ratio["median"] > 0 for ratio in ratios)
