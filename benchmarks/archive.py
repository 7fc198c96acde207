"""How long it takes to write and to check a large archive, beside hashing and copying its weights.

    python -P -m benchmarks.archive [--gigabytes 1] [--content random|sparse] [--rounds 3]

Each step runs in a process of its own, which reports its peak memory; one round before the
measured ones fills the page cache. `archive` and `verify` are the commands, without running the
archive; what is written is on the disk when a step ends. The goal for all but the tar is 1.3 times
the SHA-256 (hashlib) of the same file in the same round.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

CHUNK_BYTES = 1 << 24
GOAL = 1.3

STEPS = {
    "SHA-256": """
import hashlib
with open("in/weights.pt", "rb") as file:
    hashlib.file_digest(file, "sha256")
""",
    "write": """
from pathlib import Path
from modelyard.archiver import write_archive
write_archive("big", version="1.0", artifact=Path("in/weights.pt"), handler="base_handler",
              output_dir=Path("."), force=True, archive_format="zip-store")
""",
    "write tgz": """
from pathlib import Path
from modelyard.archiver import write_archive
write_archive("big", version="1.0", artifact=Path("in/weights.pt"), handler="base_handler",
              output_dir=Path("."), force=True, archive_format="tgz")
""",
    "open": """
from modelyard.archiver import open_archive
open_archive("big.mar").close()
""",
    "open tgz": """
from modelyard.archiver import open_archive
open_archive("big.tar.gz").close()
""",
}
COMMANDS = {
    "archive": """
from modelyard.cli import main
main(["archive", "big", "--artifact", "in/weights.pt", "--handler", "base_handler", "-o", ".",
      "--force", "--no-dry-run"])
""",
    "verify": """
from modelyard.cli import main
main(["verify", "big.mar", "--no-run"])
""",
}
MEMORY = """
import atexit, resource
atexit.register(lambda: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
"""


def main() -> None:
    """Make the weights, run every step, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--content", choices=("random", "sparse"), default="random")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="archive-bench-") as name:
        folder = Path(name)
        size = int(given.gigabytes * 2**30)
        (folder / "in").mkdir()
        _make(folder / "in" / "weights.pt", size, given.content)
        _print(_measure(folder, given.rounds), size, given.content)


def _make(file: Path, size: int, content: str) -> None:
    with file.open("wb") as out:
        if content == "sparse":
            out.truncate(size)
            return
        block = os.urandom(CHUNK_BYTES)
        for at in range(0, size, CHUNK_BYTES):
            # Another start each time: no two blocks are equal, and none takes long to make.
            turn = at // CHUNK_BYTES % CHUNK_BYTES
            out.write((block[turn:] + block[:turn])[: size - at])


def _measure(folder: Path, rounds: int) -> dict[str, tuple[list[float], int]]:
    """Return step → its seconds per round, and its peak memory in MB."""
    found: dict[str, tuple[list[float], int]] = {"cp": ([], 0), "cp, synced": ([], 0)}
    for round_ in range(rounds + 1):
        copied, synced = _copy(folder)
        if round_:
            found["cp"][0].append(copied)
            found["cp, synced"][0].append(synced)
        for step, code in (STEPS | COMMANDS).items():
            seconds, memory = _run(code, folder)
            times, peak = found.setdefault(step, ([], 0))
            if round_:
                times.append(seconds)
            found[step] = (times, max(peak, memory))
    return found


def _copy(folder: Path) -> tuple[float, float]:
    """Return the seconds that a copy takes, and those until it is on the disk as an archive is."""
    begun = perf_counter()
    subprocess.run(["cp", "--sparse=never", "in/weights.pt", "copy"], cwd=folder, check=True)
    copied = perf_counter() - begun
    subprocess.run(["sync", "copy"], cwd=folder, check=True)
    synced = perf_counter() - begun
    (folder / "copy").unlink()
    return copied, synced


def _run(code: str, folder: Path) -> tuple[float, int]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    begun = perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEMORY + code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return perf_counter() - begun, int(done.stdout.split()[-1]) // 1024


def _print(found: dict[str, tuple[list[float], int]], size: int, content: str) -> None:
    print(f"{size / 2**30:g} GiB, {content}; {platform.platform()}, Python "
          f"{platform.python_version()}, {len(os.sched_getaffinity(0))} cores")  # fmt: skip
    print(f"{'STEP':<10} {'SECONDS':>8} {'SPREAD':>13} {'OF SHA-256':>11} {'PEAK MB':>8}")
    hashed, _ = found["SHA-256"]
    for step, (times, memory) in found.items():
        spread = f"{min(times):.1f}–{max(times):.1f}"
        share = statistics.median(each / base for each, base in zip(times, hashed, strict=True))
        goal = "" if step.startswith(("cp", "SHA")) or "tgz" in step else (
            "met" if share <= GOAL else "not met"
        )  # fmt: skip
        print(f"{step:<10} {statistics.median(times):>8.2f} {spread:>13} {share:>11.2f} "
              f"{memory or '':>8} {goal}")  # fmt: skip
    print(f"the goal is {GOAL:g} of the SHA-256")


if __name__ == "__main__":
    main()
