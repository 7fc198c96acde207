"""A few programs of the fuzzer; `python -m tests.fuzz` runs as many as there is time for."""

import os
import subprocess
import sys
import time

import pytest

SEED, PROGRAMS = 0, 50
NIGHT_S = int(os.environ.get("MODELYARD_FUZZ_SECONDS", "600"))
"""How long each generator runs at night."""


def fuzz(*options: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "findings: none" in ran.stdout, ran.stdout + ran.stderr
    assert ran.returncode == 0


def test_programs_of_listed_operators_end_no_process_and_show_no_memory() -> None:
    fuzz(f"--seed={SEED}", f"--programs={PROGRAMS}")


@pytest.mark.nightly
@pytest.mark.timeout(NIGHT_S + 300)
@pytest.mark.parametrize("generator", ["samples", "edges"])
def test_samples_of_torch_in_every_layout_and_with_hostile_values(generator: str) -> None:
    """From another seed each day, which the output of a failure names."""
    fuzz(generator, f"--seconds={NIGHT_S}", f"--seed={int(time.time()) // 86400 * 100_000}")
