"""Cells on Ray, as a user runs them; in a network of their own, since Ray opens ports to all."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.serve.live import build_archive

REPO = Path(__file__).parents[4]
RAY = Path(os.environ.get("RAY_PYTHON") or REPO / ".peers" / "ray" / "bin" / "python")
"""A Python that has Ray beside everything of ours; `scripts/peers ray` makes it."""
ALONE = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
"""In namespaces of its own, all of which end with the command."""


def can_be_alone() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0


@pytest.mark.timeout(600)
@pytest.mark.skipif(not RAY.exists(), reason="`scripts/peers ray` has not been run")
@pytest.mark.parametrize("events", ["kill", pytest.param("kill update", marks=pytest.mark.nightly)])
def test_cells_lose_no_request_when_a_server_dies_or_the_archive_changes(events: str) -> None:
    if not can_be_alone():
        pytest.skip("no network namespace of one's own here")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # Ray's sockets have long names
        store = Path(folder, "store")
        build_archive(store, "echo")
        build_archive(store / "next", "echo", version="2.0")
        for each in (store, store / "next"):
            shutil.rmtree(each / ".build")
        trip = f"ip link set lo up && exec {RAY} {Path(__file__).with_name('trip.py')}"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MODELYARD_", "RAY_"))}
        ran = subprocess.run(
            [*ALONE, "sh", "-c", f"{trip} {store} {events}"],
            cwd=folder,
            env={
                **kept,
                "TMPDIR": folder,
                "RAY_TMPDIR": folder,
                "PYTHONPATH": str(REPO),
                "RAY_raylet_start_wait_time_s": "240",  # on a machine with other work
                "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # 0.1 keeps a core busy by a tenth
            },
            capture_output=True,
            text=True,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("all is well\n")
