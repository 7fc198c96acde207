"""The measuring: all servers are up, and take turns in every round to share the machine's mood."""

from __future__ import annotations

import json
import runpy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks import procfs
from benchmarks.archives import PEERS, Subject
from benchmarks.bare import Bare
from benchmarks.peer import Peer, PeerServer
from benchmarks.results import BARE, OURS, Cell, Footprint, Results, Sample
from benchmarks.server import Server, wait_idle
from benchmarks.wrk import WrkFailed, run_wrk

WARM_UP_S = 1
SKIP_S = 1.0
"""Start of a compute-bound run that is skipped; what is counted then begins and ends anywhere
between answers."""
TOLERANCE = 1e-4
"""Between the probabilities of two servers that do the same work."""

Progress = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """How often to measure, and for how long."""

    rounds: int
    seconds: float
    """Length of each run of a fast model."""
    compute_seconds: float
    """Length of each run of a slow one."""
    connections: tuple[int, ...]
    workers: int
    """Workers of ours and of every peer."""
    compute_workers: int
    """Workers of a slow model, and processes of the bare loop beside it."""

    def steps(self, servers: int) -> int:
        """Count starts and runs of so many servers."""
        return servers * (1 + self.rounds * len(self.connections))

    @property
    def compute_steps(self) -> int:
        """Count starts and runs of a slow model and its bare loop."""
        return 1 + len(self.connections) * (2 * self.rounds + 1)


class WrongAnswer(Exception):
    """A server answered a request otherwise than the others do."""


class Rounds:
    """Measures in a folder of its own and gathers what it finds.

    Args:
        progress: is told before each run.
    """

    def __init__(self, plan: Plan, folder: Path, progress: Progress) -> None:
        self._plan = plan
        self._folder = folder
        self._progress = progress
        self._samples: list[Sample] = []
        self._footprints: list[Footprint] = []
        self.problems: list[str] = []
        """Peers that could not be measured, and why."""

    def results(self, about: dict[str, object]) -> Results:
        """Return what was found so far."""
        return Results(about, self._samples, self._footprints)

    def measure_beside(
        self, subject: Subject, peers: Sequence[Peer], ours: bool, envs: Path | None
    ) -> None:
        """Start every server, see that each answers right, and load them in turns."""
        workers, counts = self._plan.workers, self._plan.connections
        expected = _expected(subject)
        with ExitStack() as stack:
            running: dict[str, Server | PeerServer] = {}
            if ours:
                own = stack.enter_context(self._ours(subject, workers))
                is_text = subject.artifact is None
                _check(OURS, own.answer if is_text else json.loads(own.answer),
                       b"ok" if is_text else expected)  # fmt: skip
                running[OURS] = own
            for peer in peers:
                self._progress(f"{subject.name}: start {peer.shown}")
                work = self._folder / "peers" / f"{subject.name}-{peer.name}-{peer.batch}"
                try:
                    other = PeerServer(peer, envs, subject, workers, work)
                    stack.enter_context(other)
                    _check(peer.shown, _read(peer, other.answer), expected)
                    running[peer.shown] = other
                except (RuntimeError, WrongAnswer) as error:
                    self.problems.append(f"{peer.shown}: {error}")
            for round in range(self._plan.rounds):
                for connections in counts:
                    for name in _rotated([*running], round):
                        cell = Cell(subject.name, name, workers, connections)
                        self._announce(cell)
                        server = running[name]
                        try:
                            sample = run_served(
                                cell, server.subject, server, round, self._plan.seconds
                            )
                            self._samples.append(sample)
                        except WrkFailed as error:
                            self.problems.append(f"{name}, {connections} connections: {error}")
            self._footprints += (each.footprint(subject.name, 0) for each in running.values())

    def measure_compute(self, resnet: Subject) -> None:
        """Serve a large network, in turns with the bare loop of as many processes as can be busy.

        The machine drifts by more than the two differ, so each is held against its neighbours.
        """
        plan = self._plan
        with self._ours(resnet, plan.compute_workers) as server:
            with Bare(resnet, self._folder / "bare", plan.compute_workers) as bare:
                for connections in plan.connections:
                    for round in range(plan.rounds):
                        self._samples.append(self._run_bare(resnet, bare, connections, round))
                        cell = Cell(resnet.name, OURS, plan.compute_workers, connections)
                        self._announce(cell)
                        run = run_served(cell, resnet, server, round, plan.compute_seconds, SKIP_S)
                        self._samples.append(run)
                        wait_idle(server.usage)
                    self._samples.append(self._run_bare(resnet, bare, connections, plan.rounds))
            # Without the bare loop, which shares pages with the workers.
            self._footprints.append(server.footprint(resnet.name, 0))

    def _ours(self, subject: Subject, workers: int) -> Server:
        self._progress(f"{subject.name}: start")
        state = self._folder / "state" / f"{subject.name}-{time.monotonic_ns()}"
        state.parent.mkdir(exist_ok=True)
        return Server(subject, workers, state)

    def _announce(self, cell: Cell) -> None:
        self._progress(f"{cell.subject}: {cell.server}, {cell.connections} connections")

    def _run_bare(self, subject: Subject, bare: Bare, connections: int, round: int) -> Sample:
        processes = min(connections, self._plan.compute_workers)
        self._progress(f"{subject.name}: bare, beside {connections} connections")
        busy, began = procfs.busy_s(), time.perf_counter()
        loop = bare.run(1, self._plan.compute_seconds, processes)
        others = (procfs.busy_s() - busy - loop.cpu_s) / (time.perf_counter() - began)
        return Sample(
            Cell(subject.name, BARE, processes, connections), round, loop.requests, loop.seconds,
            loop.p50_ms, loop.p99_ms, 0, 0.0, loop.cpu_s, max(0.0, others),
        )  # fmt: skip


def run_served(
    cell: Cell,
    subject: Subject,
    server: Server | PeerServer,
    round: int,
    seconds: float,
    skip_s: float = 0,
) -> Sample:
    """Load a server that runs, after a short time to warm up.

    Args:
        cell: what is measured; its connections are opened.
        subject: subject whose requests are sent.
        server: is loaded.
        round: number of the sample.
        seconds: length of the run.
        skip_s: time as in `run_wrk`; with it the server is warmed by one connection, and idle at
            first.
    """
    send = subject.content_type, subject.requests
    run_wrk(server.url, 1 if skip_s else cell.connections, WARM_UP_S, *send)
    if skip_s:
        wait_idle(server.usage)
    busy, before, began = procfs.busy_s(), server.usage(), time.perf_counter()
    load = run_wrk(server.url, cell.connections, seconds, *send, skip_s=skip_s)
    used, elapsed = server.usage(), time.perf_counter() - began
    server_s, workers_s = used.server_s - before.server_s, used.workers_s - before.workers_s
    others = procfs.busy_s() - busy - server_s - workers_s - load.cpu_s
    counted = load.seconds / (load.seconds + skip_s)
    return Sample(
        cell, round, load.requests, load.seconds, load.p50_ms, load.p99_ms, load.failures,
        counted * server_s, counted * workers_s, max(0.0, others / elapsed), load.errors,
    )  # fmt: skip


def _rotated(items: Sequence[T], round: int) -> Iterator[T]:
    """Begin each round with another one, so that none is always the first."""
    for at in range(len(items)):
        yield items[(at + round) % len(items)]


def _expected(subject: Subject) -> object:
    """Return the answer to the first request, from the work that every server calls."""
    if subject.artifact is None:
        return [1.0]
    work = runpy.run_path(str(PEERS / "work.py"))["Work"](str(subject.artifact))
    (answer,) = work([subject.requests[0].read_bytes()])
    return list(answer)


def _read(peer: Peer, answer: bytes) -> object:
    """Return what a peer answered.

    Raises:
        WrongAnswer: it does not have that peer's form.
    """
    try:
        return peer.read(json.loads(answer))
    except (ValueError, LookupError, TypeError) as error:
        raise WrongAnswer(f"{peer.shown} answered {answer[:200]!r}") from error


def _check(server: str, answer: object, expected: object) -> None:
    """See that a server does the work.

    Raises:
        WrongAnswer: its first answer is another one.
    """
    right = answer == expected or (
        isinstance(answer, list)
        and isinstance(expected, list)
        and len(answer) == len(expected)
        and all(abs(one - two) < TOLERANCE for one, two in zip(answer, expected, strict=True))
    )
    if not right:
        raise WrongAnswer(f"{server} answered {answer}; all servers should answer {expected}")
