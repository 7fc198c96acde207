"""What a setting costs: the digits model with and without it, in turns.

    python -m benchmarks.costs [--seconds 5] [--rounds 3] [batchInvariant | incidents | ...]

Prints answers per second, the median latency and the CPU time per answer of one worker, at 1, 8 and
64 connections; of the latency also with over without, the median of the rounds' pairs.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.archives import archive_digits, build_digits
from benchmarks.server import Server, wait_idle
from benchmarks.wrk import run_wrk

FORMATS = ("onnx", "pt2")
CONNECTIONS = (1, 8, 64)


class Setting(NamedTuple):
    """Lines of a model's configuration, and of the server's."""

    model: str = ""
    server: str = ""


SETTINGS = {
    "batchInvariant": Setting(model="batchInvariant: true\n"),
    "incidents": Setting(server="incidents: 10000\n"),
    "incidents and inputs": Setting(server="incidents: 10000\nincident_inputs: true\n"),
}


class Run(NamedTuple):
    """What one run gave."""

    rate: float
    p50_ms: float
    cpu_us: float
    """Microseconds of server and worker together, per answer."""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", default=[*SETTINGS], help=", ".join(SETTINGS))
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if unknown := {*given.settings} - {*SETTINGS}:
        parser.error(f"{', '.join(sorted(unknown))}: known are {', '.join(SETTINGS)}")
    print(f"{'':<22}{'':<6}{'connections':>12}{'':>6}", end="")
    print(f"{'per s':>10}{'p50 ms':>10}{'CPU us':>10}{'p50 on / off':>16}")
    with tempfile.TemporaryDirectory(prefix="modelyard-costs-") as name:
        folder = Path(name)
        build_digits(folder, FORMATS)
        for setting in given.settings:
            for format in FORMATS:
                compare(folder, setting, format, given.rounds, given.seconds)


def compare(folder: Path, name: str, format: str, rounds: int, seconds: float) -> None:
    """Measure two servers in turns and print their rows."""
    with ExitStack() as stack:
        servers = dict[str, Server]()
        for word, setting in (("off", Setting()), ("on", SETTINGS[name])):
            place = folder / f"{name}-{format}-{word}"
            place.mkdir()
            config = place / "server.yaml"
            config.write_text(setting.server or "{}\n")
            subject = archive_digits(folder, format, f"{format}-{word}", setting.model)
            servers[word] = stack.enter_context(
                Server(subject, 1, place, options=("--config", config))
            )
        for connections in CONNECTIONS:
            runs: dict[str, list[Run]] = {word: [] for word in servers}
            for turn in range(rounds):
                for word in sorted(servers, reverse=bool(turn % 2)):
                    runs[word].append(measure(servers[word], connections, seconds))
            pairs = zip(runs["on"], runs["off"], strict=True)
            ratio = median(on.p50_ms / off.p50_ms for on, off in pairs)
            for word, found in runs.items():
                rate, p50_ms, cpu_us = (median(column) for column in zip(*found, strict=True))
                print(f"{name:<22}{format:<6}{connections:>12}{word:>6}", end="")
                print(f"{rate:>10,.0f}{p50_ms:>10.3f}{cpu_us:>10,.1f}", end="")
                print(f"{ratio:>16.3f}" if word == "on" else "", flush=True)


def measure(server: Server, connections: int, seconds: float) -> Run:
    """Load one server.

    Raises:
        RuntimeError: an answer was none.
    """
    wait_idle(server.usage)
    before, subject = server.usage().total_s, server.subject
    load = run_wrk(server.url, connections, seconds, subject.content_type, subject.requests)
    if load.failures:
        raise RuntimeError(f"{load.failures} of {load.requests} requests failed")
    cpu_us = (server.usage().total_s - before) / load.requests * 1e6
    return Run(load.requests / load.seconds, load.p50_ms, cpu_us)


if __name__ == "__main__":
    main()
