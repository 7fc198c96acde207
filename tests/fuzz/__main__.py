"""Run programs of allowed operators, with hostile constants and inputs, in a child that must not die.

    python -m tests.fuzz [programs|samples|edges] --seconds 3600 [--seed 0] [--operators REGEX] …
    python -m tests.fuzz [programs|samples|edges] --replay SEED

`programs` chains calls of real exports, `edges` gives single ones what wraps around, and `samples`
lays the tensors of torch's own tests out in every way (`samples.py`).
Every program runs twice, with memory that held other bytes before: what differs then was read from
memory that nobody wrote. Where there is a C compiler, every tensor has pages of its own, and one
that may not be touched beside it (`guard.c`). A finding is a child that a signal ended, such a
difference, or another answer for another layout; each names its seed, which `--replay` runs again.
"""  # noqa: E501 - the first line says it all

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

GUARD = "MODELYARD_FUZZ_GUARD"


def main() -> int:
    """Fuzz, or show one program; return 1 if there was a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "generator", nargs="?", default="programs", choices=("programs", "samples", "edges")
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--programs", type=int, default=1 << 62, help="end after so many")
    parser.add_argument("--operators", default="", help="only those that this expression finds")
    parser.add_argument("--findings", type=Path, help="add each to this file, one line of JSON")
    parser.add_argument("--replay", type=int, help="show and run the program of this seed")
    options = parser.parse_args()
    preload_guard()
    # Only now: what torch allocates must be guarded from its first tensor on.
    from modelyard.handlers.judge.checked import CHECKED
    from modelyard.handlers.judge.operators import ALLOWED
    from tests.fuzz.run import Fuzzer, replay

    make = {"programs": "Program", "samples": "Samples", "edges": "Edges"}[options.generator]
    make = getattr(import_module(f"tests.fuzz.{options.generator}"), make)

    names = [
        name
        for name in sorted(ALLOWED | set(map(str, CHECKED)))
        if re.search(options.operators, name)
    ]
    if options.replay is not None:
        return replay(names, make, options.replay)
    fuzzer = Fuzzer(names, make, options.findings)
    fuzzer.run(options.seed, options.programs, options.seconds)
    sys.stdout.write(fuzzer.summary() + "\n")
    return 1 if fuzzer.findings else 0


def preload_guard() -> None:
    """Begin this process again with `guard.c` loaded, where it can be compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if GUARD in os.environ or compiler is None or sys.platform != "linux":
        return
    folder = Path(tempfile.mkdtemp(prefix="modelyard-fuzz-"))
    library = folder / "guard.so"
    source = Path(__file__).with_name("guard.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), GUARD: str(library)}
    words = [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]]
    os.execve(sys.executable, words, environment)


if __name__ == "__main__":
    sys.exit(main())
