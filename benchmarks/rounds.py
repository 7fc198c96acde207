"""The measuring: every cell once per round, so that all share the machine's mood."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks import procfs
from benchmarks.archives import ECHO, Subject
from benchmarks.bare import Bare
from benchmarks.results import BARE, SERVED, Cell, Footprint, Results, Sample
from benchmarks.server import Server, Usage
from benchmarks.wrk import Load, run_wrk

BATCHES = (1, 8)
WARM_UP_S = 1

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to measure, and for how long."""

    rounds: int
    seconds: float
    """Of each run."""
    connections: tuple[int, ...]
    workers: tuple[int, ...]

    def servers(self, subject: Subject) -> tuple[int, ...]:
        """Return with how many workers a subject is served; the ceiling needs one."""
        return (1,) if subject.name == ECHO else self.workers


class Rounds:
    """Runs a plan in a folder of its own and gathers what it finds."""

    def __init__(self, plan: Plan, subjects: list[Subject], folder: Path) -> None:
        self._plan = plan
        self._subjects = subjects
        self._folder = folder
        self._samples: list[Sample] = []
        self._footprints: list[Footprint] = []

    @property
    def count(self) -> int:
        """Runs in all."""
        plan = self._plan
        served = sum(len(plan.servers(subject)) for subject in self._subjects)
        loops = len(self._subjects) - 1
        per_round = served * len(plan.connections) + loops * len(BATCHES) * len(plan.workers)
        return plan.rounds * per_round

    def run(self, about: dict[str, object], progress: Progress) -> Results:
        """Measure everything; `progress` is told before each run."""
        with ExitStack() as stack:
            most = max(self._plan.workers)
            loops = {
                subject.name: stack.enter_context(
                    Bare(subject, self._folder / "bare" / subject.name, most)
                )
                for subject in self._subjects
                if subject.name != ECHO
            }
            for round in range(self._plan.rounds):
                for subject in _rotated(self._subjects, round):
                    self._measure(subject, loops.get(subject.name), round, progress)
        return Results(about, self._samples, self._footprints)

    def _measure(self, subject: Subject, bare: Bare | None, round: int, progress: Progress) -> None:
        """Run one subject's loops, then its servers, each next to the other."""
        for workers in self._plan.servers(subject):
            for batch in BATCHES if bare is not None else ():
                assert bare is not None
                cell = Cell(subject.name, BARE, workers, batch=batch)
                progress(f"{subject.name}: bare, {workers} × batch {batch}")
                self._samples.append(_run_bare(cell, bare, round, self._plan.seconds))
            self._serve(subject, workers, round, progress)

    def _serve(self, subject: Subject, workers: int, round: int, progress: Progress) -> None:
        state = self._folder / "state" / f"{subject.name}-{workers}-{round}"
        state.parent.mkdir(exist_ok=True)
        with Server(subject, workers, state) as server:
            for connections in self._plan.connections:
                cell = Cell(subject.name, SERVED, workers, connections)
                progress(f"{subject.name}: served, {workers} workers, {connections} connections")
                self._samples.append(_run_served(cell, subject, server, round, self._plan.seconds))
            ours, each = server.server_memory(), server.worker_memory()
            sizes = ours.rss_mb, ours.pss_mb, each.rss_mb, each.pss_mb
            self._footprints.append(Footprint(subject.name, workers, round, server.start_s, *sizes))


def _rotated(subjects: list[Subject], round: int) -> Iterator[Subject]:
    """Begin each round with another subject, so that none is always the first."""
    for at in range(len(subjects)):
        yield subjects[(at + round) % len(subjects)]


def _run_bare(cell: Cell, bare: Bare, round: int, seconds: float) -> Sample:
    busy, began = procfs.busy_s(), time.perf_counter()
    loop = bare.run(cell.batch, seconds, cell.workers)
    others = (procfs.busy_s() - busy - loop.cpu_s) / (time.perf_counter() - began)
    return Sample(
        cell, round, loop.requests, loop.seconds, loop.p50_ms, loop.p99_ms, 0, 0.0, loop.cpu_s,
        max(0.0, others),
    )  # fmt: skip


def _run_served(cell: Cell, subject: Subject, server: Server, round: int, seconds: float) -> Sample:
    send = subject.content_type, subject.requests
    run_wrk(server.url, cell.connections, WARM_UP_S, *send)
    busy, before, began = procfs.busy_s(), server.usage(), time.perf_counter()
    load = run_wrk(server.url, cell.connections, seconds, *send)
    used, elapsed = server.usage(), time.perf_counter() - began
    return _sample(cell, round, load, before, used, (procfs.busy_s() - busy) / elapsed, elapsed)


def _sample(
    cell: Cell, round: int, load: Load, before: Usage, after: Usage, busy: float, elapsed: float
) -> Sample:
    server_s, workers_s = after.server_s - before.server_s, after.workers_s - before.workers_s
    ours = (server_s + workers_s + load.cpu_s) / elapsed
    return Sample(
        cell, round, load.requests, load.seconds, load.p50_ms, load.p99_ms, load.failures,
        server_s, workers_s, max(0.0, busy - ours), load.errors,
    )  # fmt: skip
