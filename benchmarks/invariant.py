"""What `batchInvariant` costs: the digits model with and without it, in turns.

    python -m benchmarks.invariant [--seconds 5] [--rounds 3]

Prints answers per second and CPU time per answer of one worker, at 1, 8 and 64 connections.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.archives import archive_digits, build_digits
from benchmarks.server import Server, wait_idle
from benchmarks.wrk import run_wrk

FORMATS = ("onnx", "pt2")
CONNECTIONS = (1, 8, 64)
KEY = "batchInvariant: true\n"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(f"{'artifact':<10}{'connections':>12}{'':>12}{'per s':>10}{'CPU us':>10}")
    with tempfile.TemporaryDirectory(prefix="modelyard-invariant-") as name, ExitStack() as stack:
        folder = Path(name)
        build_digits(folder, FORMATS)
        for format in FORMATS:
            servers = {
                word: stack.enter_context(
                    Server(
                        archive_digits(folder, format, f"{format}-{word}", more),
                        1,
                        folder / f"{format}-{word}",
                    )
                )
                for word, more in (("off", ""), ("on", KEY))
            }
            for connections in CONNECTIONS:
                runs: dict[str, list[tuple[float, float]]] = {word: [] for word in servers}
                for _ in range(given.rounds):
                    for word, server in servers.items():
                        runs[word].append(measure(server, connections, given.seconds))
                for word, found in runs.items():
                    rate, cpu_us = (median(column) for column in zip(*found, strict=True))
                    print(f"{format:<10}{connections:>12}{word:>12}{rate:>10,.0f}{cpu_us:>10,.0f}")


def measure(server: Server, connections: int, seconds: float) -> tuple[float, float]:
    """Return answers per second, and microseconds of CPU for each.

    Raises:
        RuntimeError: an answer was none.
    """
    wait_idle(server.usage)
    before, subject = server.usage().total_s, server.subject
    load = run_wrk(server.url, connections, seconds, subject.content_type, subject.requests)
    if load.failures:
        raise RuntimeError(f"{load.failures} of {load.requests} requests failed")
    return load.requests / load.seconds, (server.usage().total_s - before) / load.requests * 1e6


if __name__ == "__main__":
    main()
