"""What a request costs the server process and its frontends.

    python -m benchmarks.frontends [-n 1 -n 2] [-c 8 -c 64] [--rounds 5] [--seconds 3] [-o FILE]

Serves a handler that answers at once, with each number of frontends, and loads the servers in turns
with wrk. On a machine where wrk, the worker, the server process and each frontend have no core of
their own, the CPU per request says more than the rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import procfs, wrk
from benchmarks.archives import Subject, build_echo, modelyard_json
from benchmarks.server import Server

SCHEMA = 1
WARM_UP_S = 1


@dataclass(frozen=True)
class Sample:
    """One run."""

    frontends: int
    connections: int
    round: int
    requests: int
    failures: int
    seconds: float
    p50_ms: float
    p99_ms: float
    server_us: float
    """CPU of the server process per request, in microseconds."""
    frontends_us: list[float]
    """The same of each frontend process, per request that the server answered."""
    worker_us: float
    other_cores: float
    """Cores that were busy with what does not belong to the benchmark."""

    @property
    def rate(self) -> float:
        """Well answered requests per second."""
        return (self.requests - self.failures) / self.seconds


class Measured:
    """One running server and its processes."""

    def __init__(self, server: Server, count: int, state_dir: Path, subject: Subject) -> None:
        about = modelyard_json("serve", "status", "--state-dir", state_dir)
        self.count = count
        self._subject = subject
        self._url = server.url
        self._groups = [[server.pid], *([pid] for pid in about["frontends"]), server.worker_pids]

    def load(self, connections: int, round: int, seconds: float) -> Sample:
        """Run wrk once."""
        send = self._subject.content_type, self._subject.requests
        wrk.run_wrk(self._url, connections, WARM_UP_S, *send)
        busy, before, began = procfs.busy_s(), self._cpu_s(), time.perf_counter()
        load = wrk.run_wrk(self._url, connections, seconds, *send)
        used = [now - then for now, then in zip(self._cpu_s(), before, strict=True)]
        elapsed = time.perf_counter() - began
        other = (procfs.busy_s() - busy - sum(used) - load.cpu_s) / elapsed
        server, *frontends, worker = (1e6 * cpu_s / load.requests for cpu_s in used)
        return Sample(
            self.count, connections, round, load.requests, load.failures, load.seconds,
            load.p50_ms, load.p99_ms, server, frontends, worker, max(0.0, other),
        )  # fmt: skip

    def memory(self) -> list[procfs.Memory]:
        """Return the memory of the server process and of each frontend."""
        return [procfs.memory(pid) for (pid,) in self._groups[:-1]]

    def _cpu_s(self) -> list[float]:
        return [sum(map(procfs.cpu_s, pids)) for pids in self._groups]


def main() -> None:
    """Measure, print a table, keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--frontends", type=int, action="append")
    parser.add_argument("-c", "--connections", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, help="JSON file for all figures.")
    given = parser.parse_args()
    counts, connections = given.frontends or [1, 2], given.connections or [8, 64]
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="modelyard-frontends-") as name, ExitStack() as stack:
        folder = Path(name)
        subject = build_echo(folder)
        servers = []
        for count in counts:
            os.environ["MODELYARD_FRONTENDS"] = str(count)
            state = folder / f"state-{count}"
            server = stack.enter_context(Server(subject, 1, state))
            servers.append(Measured(server, count, state, subject))
        for round in range(given.rounds):
            for each in connections:
                samples += [server.load(each, round, given.seconds) for server in servers]
        memory = {server.count: server.memory() for server in servers}
    machine = procfs.describe_machine()
    print(f"{machine['cpu']}, {machine['cores']} cores · wrk -t1 · "
          f"medians of {given.rounds} rounds of {given.seconds} s")  # fmt: skip
    print_table(samples)
    for count, (own, *others) in memory.items():
        sizes = [f"server {own.rss_mb:.0f}, {own.pss_mb:.0f}"]
        sizes += [f"frontend {each.rss_mb:.0f}, {each.pss_mb:.0f}" for each in others]
        print(f"RSS, PSS in MB with N = {count}: {' · '.join(sizes)}")
    if given.output is not None:
        content = {
            "schema": SCHEMA,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": machine,
            "wrk": wrk.version(),
            "samples": [asdict(sample) for sample in samples],
            "memory": {count: [asdict(each) for each in found] for count, found in memory.items()},
        }
        given.output.write_text(json.dumps(content, indent=1) + "\n")


def print_table(samples: list[Sample]) -> None:
    """Print one line per number of frontends and connections: medians over the rounds."""
    print(f"{'N':>2} {'c':>3} {'req/s':>8} {'p50 ms':>7} {'p99 ms':>7} {'server':>7} "
          f"{'frontends, µs each':>20} {'worker':>7} {'all':>7} {'other cores':>12}")  # fmt: skip
    for count, connections in sorted({(s.frontends, s.connections) for s in samples}):
        own = [s for s in samples if (s.frontends, s.connections) == (count, connections)]
        if failures := sum(sample.failures for sample in own):
            print(f"{count:>2} {connections:>3} {failures} requests failed")
            continue
        each = [statistics.median(values) for values in zip(*(s.frontends_us for s in own))]  # noqa: B905
        server, worker = median(own, "server_us"), median(own, "worker_us")
        shown = " ".join(f"{value:.1f}" for value in each)
        print(f"{count:>2} {connections:>3} {median(own, 'rate'):>8,.0f} "
              f"{median(own, 'p50_ms'):>7.2f} {median(own, 'p99_ms'):>7.2f} {server:>7.1f} "
              f"{shown:>20} {worker:>7.1f} {server + worker + sum(each):>7.1f} "
              f"{median(own, 'other_cores'):>12.2f}")  # fmt: skip


def median(samples: list[Sample], figure: str) -> float:
    """Return the median of one figure."""
    return statistics.median(float(getattr(sample, figure)) for sample in samples)


if __name__ == "__main__":
    main()
