"""What Ray's hop takes: HAProxy with it, and HAProxy straight to the same cells, in turns.

    python -m benchmarks.hop [--rounds 3] [--seconds 3]

Two cells of one worker, and two handlers: one answers at once, the other takes 20 ms without a
core, as a model on a device of its own does. Needs Ray and wrk; in namespaces of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.chaos import ALONE, PORT, STRAIGHT_PORT, Cells, straight, surroundings
from benchmarks.wrk import run_wrk

MODELS = {"at-once": 0, "20-ms": 20}
CONNECTIONS = (1, 8, 64)
HANDLER = '''\
"""Answer with the length of each body."""

import time


class Handler:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        if {milliseconds}:
            time.sleep({milliseconds} / 1000)
        return [str(len(row.get("body") or b"")) for row in data]
'''


def build(store: Path) -> None:
    """Archive both handlers."""
    from modelyard.archiver import write_archive

    with tempfile.TemporaryDirectory() as name:
        sources = Path(name)
        (sources / "nothing.bin").write_bytes(b"nothing")
        for model, milliseconds in MODELS.items():
            handler = sources / "handler.py"
            handler.write_text(HANDLER.format(milliseconds=milliseconds))
            write_archive(model, version="1.0", artifact=sources / "nothing.bin",
                          handler=str(handler), output_dir=store)  # fmt: skip


def inside(folder: Path, rounds: int, seconds: float) -> None:
    """Measure, and print the table."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    body = folder / "body"
    body.write_bytes(b"x" * 100)
    ways = {"hop": PORT, "straight": STRAIGHT_PORT}
    found: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    failures = 0
    cells = Cells(folder)
    with cells.running(), straight():
        cells.whole()
        time.sleep(3)  # both proxies have asked every cell
        for at in range(rounds):
            for model in MODELS:
                for connections in CONNECTIONS:
                    for way in sorted(ways, reverse=bool(at % 2)):
                        url = f"http://127.0.0.1:{ways[way]}/predictions/{model}"
                        load = run_wrk(url, connections, seconds, "text/plain", [body])
                        failures += load.failures
                        rate = (load.requests - load.failures) / load.seconds
                        found.setdefault((model, connections, way), []).append((rate, load.p50_ms))
    table = Table(box=box.SIMPLE)
    for column in ("handler", "connections", "hop: rate", "p50", "straight: rate", "p50", "times"):
        table.add_column(column, justify="right")
    for model in MODELS:
        for connections in CONNECTIONS:
            both = [found[model, connections, way] for way in ("hop", "straight")]
            rates = [statistics.median(rate for rate, _ in each) for each in both]
            times = [statistics.median(p50 for _, p50 in each) for each in both]
            table.add_row(
                model, str(connections), f"{rates[0]:,.0f}", f"{times[0]:.2f} ms",
                f"{rates[1]:,.0f}", f"{times[1]:.2f} ms", f"{rates[1] / rates[0]:.1f}",
            )  # fmt: skip
    Console(width=120).print(table, f"{failures} failures; medians of {rounds} rounds in turns")


def main() -> int:
    """Read the arguments and run in namespaces of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        inside(given.inside, given.rounds, given.seconds)
        return 0
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # Ray's sockets have long names
        build(Path(name, "one"))
        command = [*ALONE, sys.executable, "-m", "benchmarks.hop", "--inside", name,
                   "--rounds", str(given.rounds), "--seconds", str(given.seconds)]  # fmt: skip
        return subprocess.run(command, cwd=name, env=surroundings(name)).returncode


if __name__ == "__main__":
    sys.exit(main())
