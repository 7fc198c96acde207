"""A scenario → what became of its requests: cells behind routers, on a clock of their own."""

from __future__ import annotations

import math
from array import array
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from random import Random

from modelyard.archiver.quantile import nearest_rank
from modelyard.serve.dataplane.call import Reply
from modelyard.serve.dataplane.metrics import Metrics, VersionMetrics
from modelyard.serve.errors import DeadlinePassed
from modelyard.serve.simulation.arrivals import Arrivals
from modelyard.serve.simulation.cell import Cell, Client, Cores, ModelShape, World
from modelyard.serve.simulation.loop import VirtualLoop, virtual_loop
from modelyard.serve.simulation.router import Router

STEPS = 200
"""Of the progress."""
REDISPATCH_S = 1.0
"""HAProxy's pause before it sends a request to another cell."""
LONGEST_REST_S = 600.0
"""For answers after the last request."""


@dataclass(frozen=True)
class Failure:
    """A cell that dies with all that it holds, and comes back empty."""

    cell: int
    at: float
    back_at: float
    noticed_s: float = 1.0
    """After which routers send nothing there any more."""


@dataclass(frozen=True)
class Hot:
    """A model that is asked for more for a while: its share of all requests."""

    model: str
    share: float
    since: float
    until: float


@dataclass(frozen=True)
class Scenario:
    """What is simulated."""

    groups: Sequence[tuple[int, Sequence[ModelShape]]]
    """So many cells with these models; a model may be in several groups."""
    cores: int
    """Of a cell; of the machine, where the client runs on it."""
    rate: float
    """Requests per second, to all cells."""
    mix: Mapping[str, float]
    arrivals: Arrivals
    seconds: float
    """In which requests come."""
    warm_s: float
    """Of these, those that are not counted."""
    rule: str = "least"
    routers: int = 1
    timeout_s: float = math.inf
    """That each client gives."""
    limit_s: float = math.inf
    """An answer that takes longer is not good."""
    hop_s: float = 0.0
    """That a router adds to each request."""
    client_s: float = 0.0
    """That a client has of a core for a request and its answer, where it runs on the machine of the
    cells, which then is one: as in a benchmark on one machine."""
    repeats: bool = True
    """Whether routers send what a dying cell held to another, once."""
    failures: Sequence[Failure] = ()
    slow: Mapping[int, float] = field(default_factory=dict)
    """Cell → by which everything takes longer there."""
    hot: Hot | None = None
    seed: int = 1


OUTCOMES = ("good", "late", "refused", "expired", "lost")


@dataclass
class Tally:
    """What became of the requests for one model; each is in exactly one of the counts."""

    offered: int = 0
    good: int = 0
    late: int = 0
    """Answered, after the limit."""
    refused: int = 0
    """503: the queue was full, or no answer to be expected in time."""
    expired: int = 0
    """504."""
    lost: int = 0
    """With the cell that held it, or there was none to send it to."""
    repeated: int = 0
    """Of all these, sent to a second cell."""
    latencies_s: array[float] = field(default_factory=lambda: array("d"))
    """Of those that were answered 200."""
    came_at: array[float] = field(default_factory=lambda: array("d"))
    """The moments of the same."""

    def quantile_s(self, share: float) -> float:
        """Return a quantile of the latency; infinite where nothing was answered."""
        return nearest_rank(self.ordered, share)

    @property
    def ordered(self) -> Sequence[float]:
        """The latencies, sorted; sorted once."""
        if len(self._ordered) != len(self.latencies_s):
            self._ordered = sorted(self.latencies_s)
        return self._ordered

    _ordered: list[float] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Outcome:
    """What a simulation found."""

    models: Mapping[str, Tally]
    all: Tally
    seconds: float
    """In which requests were counted."""
    cells: int
    requests: int
    """Simulated, uncounted ones as well."""
    mean_batch: float
    cores_busy: float
    """Of all the cells' cores, over the whole time."""
    server_busy: float
    """Of the time, the server process of a cell on average."""
    busiest_server: float

    def per_second(self, count: int) -> float:
        """Return a count as a rate."""
        return count / self.seconds


OnStep = Callable[[str, int, int], None]


def simulate(scenario: Scenario, on_step: OnStep = lambda text, done, total: None) -> Outcome:
    """Run a scenario to its end."""
    with virtual_loop() as loop:
        return _Run(scenario, loop).play(on_step)


class _Request:
    """A request on its way: the sink of its call."""

    __slots__ = ("cell", "has_ended", "is_repeat", "model", "router", "run", "since")

    def __init__(self, run: _Run, model: str, since: float, is_repeat: bool = False) -> None:
        self.run = run
        self.model = model
        self.since = since
        self.is_repeat = is_repeat
        self.has_ended = False
        self.cell = -1
        self.router: Router

    def done(self) -> bool:
        """Return whether it has its answer."""
        return self.has_ended

    def set_result(self, reply: Reply, /) -> None:
        """Take the answer."""
        self.run.ended(self, None)

    def set_exception(self, error: Exception, /) -> None:
        """Take the error that there is instead."""
        self.run.ended(self, error)

    def cancel(self) -> bool:
        """Note nothing: no client leaves."""
        return True


class _Run:
    def __init__(self, scenario: Scenario, loop: VirtualLoop) -> None:
        self._scenario = scenario
        self._loop = loop
        # One for each purpose: what one draws is not to change the others.
        root = Random(scenario.seed)
        self._arriving, self._choosing, self._routing, self._working = (
            Random(root.random()) for _ in range(4)
        )
        self._world = World(VersionMetrics(Metrics(), "simulated", "1"))
        self._shapes: list[Sequence[ModelShape]] = []
        able: dict[str, list[int]] = {model: [] for model in scenario.mix}
        for number, models in scenario.groups:
            for shape in models:
                own = range(len(self._shapes), len(self._shapes) + number)
                able.setdefault(shape.name, []).extend(own)
            self._shapes += [models] * number
        self._waits = {
            shape.name: shape.wait_s + scenario.hop_s
            for _, models in scenario.groups
            for shape in models
        }
        self._cores: int | Cores = scenario.cores
        self._client: Client | None = None
        if scenario.client_s:
            threads = 1 + sum(
                number * (1 + sum(shape.workers * shape.threads for shape in models))
                for number, models in scenario.groups
            )
            self._cores = Cores(loop, scenario.cores, threads)
            self._client = Client(self._cores, scenario.client_s)
        self._cells: list[Cell | None] = [self._build(at) for at in range(len(self._shapes))]
        self._is_down = [False] * len(self._cells)
        self._held: list[set[_Request]] = [set() for _ in self._cells]
        self._routers = [
            Router(scenario.rule, {model: tuple(cells) for model, cells in able.items()},
                   self._routing)
            for _ in range(scenario.routers)
        ]  # fmt: skip
        self._names = list(scenario.mix)
        self._sums = list(accumulate(scenario.mix.values()))
        self._tallies = {model: Tally() for model in scenario.mix}
        self._requests = self._batches = self._answers = self._pending = 0
        self._busy = [0.0] * len(self._cells)
        self._cores_busy_s = 0.0

    def _build(self, at: int) -> Cell:
        scenario = self._scenario
        return Cell(
            self._loop,
            self._world,
            self._shapes[at],
            self._cores,
            self._working,
            scenario.slow.get(at, 1.0),
        )

    def play(self, on_step: OnStep) -> Outcome:
        scenario, loop = self._scenario, self._loop
        moments = scenario.arrivals.between(scenario.rate, scenario.seconds, self._arriving)
        self._next = moments.__next__
        self._send_next()
        for failure in scenario.failures:
            loop.at(failure.at, self._fail, failure)
        for step in range(STEPS):
            on_step(f"{loop.now:.1f} s, {self._requests} requests", step, STEPS)
            loop.run_until(scenario.seconds * (step + 1) / STEPS)
        end = scenario.seconds
        while self._pending and end < scenario.seconds + LONGEST_REST_S:
            end += 0.1
            loop.run_until(end)
        for at in range(len(self._cells)):
            self._close(at)
        everything = Tally()
        for tally in self._tallies.values():
            everything.offered += tally.offered
            everything.repeated += tally.repeated
            for name in OUTCOMES:
                setattr(everything, name, getattr(everything, name) + getattr(tally, name))
            everything.latencies_s.extend(tally.latencies_s)
            everything.came_at.extend(tally.came_at)
        time_s = loop.now
        return Outcome(
            self._tallies,
            everything,
            scenario.seconds - scenario.warm_s,
            len(self._cells),
            self._requests,
            self._answers / max(1, self._batches),
            self._cores_busy_s
            / (time_s * scenario.cores * (len(self._cells) if self._client is None else 1)),
            sum(self._busy) / len(self._busy) / time_s,
            max(self._busy) / time_s,
        )

    def _send_next(self) -> None:
        try:
            at, model = self._next()
        except StopIteration:
            return
        self._loop.at(at, self._arrive, model)

    def _arrive(self, model: str | None) -> None:
        now = self._loop.now
        if model not in self._tallies:
            model = self._choose(now)
        self._requests += 1
        self._pending += 1
        request = _Request(self, model, now)
        if self._client is None:
            self._route(request)
        else:
            self._client.run(partial(self._route, request))
        self._send_next()

    def _choose(self, now: float) -> str:
        hot, draw = self._scenario.hot, self._choosing.random
        if hot is not None and hot.since <= now < hot.until:
            if draw() < hot.share:
                return hot.model
            while (name := self._drawn(draw())) == hot.model:
                pass
            return name
        return self._drawn(draw())

    def _drawn(self, number: float) -> str:
        return self._names[bisect(self._sums, number * self._sums[-1]) % len(self._names)]

    def _route(self, request: _Request) -> None:
        routers = self._routers
        if len(routers) == 1:
            router = routers[0]
        else:
            router = routers[int(self._routing.random() * len(routers))]
        cell = router.pick(request.model)
        if cell is None:
            self.lost(request)
            return
        request.router, request.cell = router, cell
        self._held[cell].add(request)
        if self._is_down[cell]:
            self._repeat(request)
            return
        of = self._cells[cell]
        assert of is not None
        of.server.request(request.model, self._scenario.timeout_s, request)

    def ended(self, request: _Request, error: Exception | None) -> None:
        """Count what became of a request, once its client knows."""
        if request.has_ended:
            return
        self._let_go(request)
        if self._client is None:
            self._count(request, error)
        else:
            self._client.run(partial(self._count, request, error))

    def lost(self, request: _Request) -> None:
        """Count a request that nobody answers."""
        self._let_go(request)
        self._count(request, None, is_lost=True)

    def _count(self, request: _Request, error: Exception | None, is_lost: bool = False) -> None:
        self._pending -= 1
        if error is None and not is_lost:
            self._answers += 1
        if request.since < self._scenario.warm_s:
            return
        tally = self._tallies[request.model]
        tally.offered += 1
        tally.repeated += request.is_repeat
        if is_lost:
            tally.lost += 1
        elif error is None:
            took_s = self._loop.now - request.since + self._waits[request.model]
            tally.latencies_s.append(took_s)
            tally.came_at.append(request.since)
            if took_s <= self._scenario.limit_s:
                tally.good += 1
            else:
                tally.late += 1
        elif isinstance(error, DeadlinePassed):
            tally.expired += 1
        else:
            tally.refused += 1

    def _let_go(self, request: _Request) -> None:
        request.has_ended = True
        if request.cell >= 0:
            self._held[request.cell].discard(request)
            request.router.left(request.model, request.cell)

    # -- failures ------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> None:
        at = failure.cell
        if self._is_down[at]:
            return
        self._is_down[at] = True
        for request in list(self._held[at]):
            self._repeat(request)
        self._close(at)
        self._cells[at] = None
        self._loop.at(self._loop.now + failure.noticed_s, self._notice, at)
        self._loop.at(failure.back_at, self._come_back, at)

    def _repeat(self, request: _Request) -> None:
        """Send what a dead cell held to another one, after a pause and only once."""
        if request.is_repeat or not self._scenario.repeats:
            self.lost(request)
            return
        self._let_go(request)
        again = _Request(self, request.model, request.since, is_repeat=True)
        self._loop.at(self._loop.now + REDISPATCH_S, self._route, again)

    def _notice(self, at: int) -> None:
        if self._is_down[at]:
            for router in self._routers:
                router.down(at)

    def _come_back(self, at: int) -> None:
        self._is_down[at] = False
        self._cells[at] = self._build(at)
        for router in self._routers:
            router.up(at)

    def _close(self, at: int) -> None:
        """Take a cell's figures."""
        cell = self._cells[at]
        if cell is not None:
            cell.stop()
            self._batches += cell.batches
            self._busy[at] += cell.server.busy_s
            self._cores_busy_s += cell.work_s
