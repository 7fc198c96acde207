"""A few programs of the fuzzer; `python -m tests.fuzz` runs as many as there is time for."""

import os
import subprocess
import sys

SEED, PROGRAMS = 0, 120


def test_programs_of_listed_operators_end_no_process_and_show_no_memory() -> None:
    command = [sys.executable, "-m", "tests.fuzz", f"--seed={SEED}", f"--programs={PROGRAMS}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "findings: none" in ran.stdout, ran.stdout + ran.stderr
    assert ran.returncode == 0
