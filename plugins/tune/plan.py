"""From measured costs to workers, cells and memory: a queueing model of one cell.

A worker with n jobs before it runs them in batches of up to the batch size, so its rate grows with
n. The number of jobs of a model in a cell is a birth-death chain: they come at random (Poisson) and
go at the rate of the batches that n jobs make over all workers. From the chain's stationary
distribution follow the batches that are before a new job, which are as long as they were measured:
of the one that runs any part is left, and the others are scaled by (1 + cv²) / 2, as waiting is in
M/G/c where service varies with cv (Allen and Cunneen). The server process is a queue of its own,
M/D/1, that a request passes twice. Threads that are more than the cores slow each other down by how
many run at a time, on average.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from modelyard.plugins.tune.costs import Costs
from modelyard.serve.errors import ServeError

MOST_CELLS = 1_000_000
MOST_STATES = 4000
"""Jobs in a cell that are reckoned with; beyond them the cell is as good as full."""
FULL = 0.995
"""Utilisation from which on nothing is predicted but that it is too much."""
ROUNDS = 6
"""Rounds to a fixed point: cores that are shared make times longer, which makes cores busier."""


class CannotPlan(ServeError):
    """There is no number of cells that does it, and why."""


@dataclass(frozen=True)
class KnownModel:
    """A model of the mix, with what is known of it."""

    name: str
    share: float
    costs: Costs
    batch_size: int
    threads: int

    @cached_property
    def batch_s(self) -> list[float]:
        """Mean time of a batch, by its size; of none at place 0."""
        return [0.0, *(float(times.mean()) for times in self.times_s[1:])]

    @cached_property
    def times_s(self) -> list[np.ndarray]:
        """Times of a batch, by its size, each as likely as the next; of none at place 0."""
        return [np.zeros(1), *map(self.costs.times_s, range(1, self.batch_size + 1))]

    @cached_property
    def best_job_s(self) -> float:
        """What a job costs a worker at least, in the batches that are best for it."""
        return min(self.batch_s[size] / size for size in range(1, self.batch_size + 1))

    @cached_property
    def variation(self) -> float:
        """Squared coefficient of variation of a single job's time."""
        return float(self.times_s[1].var() / self.times_s[1].mean() ** 2)


@dataclass(frozen=True)
class Expected:
    """What one model's clients may expect of a cell."""

    model: KnownModel
    rate: float
    """Requests per second and cell."""
    workers: int
    busy: float
    """Share of the time that a worker is busy; above 1 it cannot keep up."""
    mean_batch: float
    waits: Sequence[tuple[float, float, float, int]] = field(repr=False, default=())
    """How likely it is that so long a batch runs before a request, that those behind take so long,
    and that its own is of such a size; none where the cell cannot keep up."""
    stretch: float = 1.0
    around_s: float = 0.0
    """Time of a request outside the worker."""

    @cached_property
    def latencies_s(self) -> Sequence[float]:
        """Each as likely as the next, sorted; none where the cell cannot keep up."""
        return _mixed(self.model, self.waits, self.stretch, self.around_s) if self.waits else ()

    def quantile_s(self, share: float) -> float:
        """Return a quantile of the latency, infinite where it grows without end."""
        if not self.latencies_s:
            return math.inf
        return self.latencies_s[min(int(share * len(self.latencies_s)), len(self.latencies_s) - 1)]


@dataclass(frozen=True)
class CellPlan:
    """One cell, and what is expected of it."""

    cores: int
    models: Sequence[Expected]
    server_busy: float
    stretch: float
    """Factor by which times are longer for sharing the cores."""

    @property
    def memory_mb(self) -> float:
        """Memory of the server with all its workers."""
        own = sum(each.workers * each.model.costs.worker_mb for each in self.models)
        return own + max(each.model.costs.server_mb for each in self.models)

    @property
    def threads(self) -> int:
        """Threads of all workers."""
        return sum(each.workers * each.model.threads for each in self.models)

    @property
    def keeps_up(self) -> bool:
        """Whether no queue grows without end."""
        return all(each.waits for each in self.models)

    def worst_s(self, share: float) -> float:
        """Return the largest of the models' quantiles."""
        return max(each.quantile_s(share) for each in self.models)


@dataclass(frozen=True)
class Plan:
    """Cells that are alike."""

    cells: int
    cell: CellPlan


def refuse_impossible(model: KnownModel, limit_s: float, quantile: float) -> None:
    """Raise where one request alone, in a cell that has nothing else to do, takes longer.

    Raises:
        CannotPlan: with the parts of that time.
    """
    times = model.times_s[1]
    service_s = float(times[int(quantile * len(times))])
    around_s = (model.costs.server_ms + 2 * model.costs.turn_ms + model.costs.wait_ms) / 1e3
    if service_s + around_s > limit_s:
        raise CannotPlan(
            f"{model.name}: p{quantile * 100:g}={limit_s * 1e3:g}ms cannot be met with any number "
            f"of cells: one request alone takes {1e3 * (service_s + around_s):.3g} ms at that "
            f"quantile, {1e3 * service_s:.3g} of them in the model. A faster artifact, or more "
            "threads of a worker, make it shorter; cells do not"
        )


def make_plan(
    models: Sequence[KnownModel],
    rate: float,
    limit_s: float,
    quantile: float,
    cores: int,
    cells: int | None = None,
) -> Plan:
    """Return the fewest cells of so many cores with which each model keeps the limit.

    Args:
        models: models whose shares add up to 1.
        rate: requests per second, to all cells.
        limit_s: limit of the quantile of each model's latency.
        quantile: 0.99 for p99.
        cores: cores of a cell.
        cells: this number of them, whatever is expected.

    Raises:
        CannotPlan: no number of cells is enough, and why.
    """
    for model in models:
        refuse_impossible(model, limit_s, quantile)

    def at(number: int) -> CellPlan:
        return best_cell(models, rate / number, quantile, cores)

    if cells is not None:
        return Plan(cells, at(cells))
    # With more of them, each has less to do.
    fewest = (
        bisect_left(
            range(1, MOST_CELLS), True, key=lambda number: at(number).worst_s(quantile) <= limit_s
        )
        + 1
    )
    if fewest == MOST_CELLS:
        raise CannotPlan(
            f"more than {MOST_CELLS} cells of {cores} cores would be needed for {rate:g} "
            "requests per second; give a cell more --cores"
        )
    return Plan(fewest, at(fewest))


def best_cell(models: Sequence[KnownModel], rate: float, quantile: float, cores: int) -> CellPlan:
    """Return the better of two cells: workers for all cores, or with one left to the server."""
    tried = [
        expect(models, rate, workers, cores)
        for threads in dict.fromkeys((cores - 1, cores))
        if threads >= 1 and (workers := share_out(models, threads))
    ]
    return min(tried, key=lambda cell: (cell.worst_s(quantile), cell.threads))


def share_out(models: Sequence[KnownModel], threads: int) -> list[int]:
    """Return workers for each model, by what it costs, and one at least, on so many threads."""
    workers = [1] * len(models)
    demand = [model.share * model.best_job_s * model.threads for model in models]
    left = threads - sum(model.threads for model in models)
    while True:
        able = [at for at, model in enumerate(models) if model.threads <= left]
        if not able:
            return workers
        # One whose demand is nothing gets no second worker.
        at = max(able, key=lambda at: demand[at] / workers[at])
        workers[at] += 1
        left -= models[at].threads


def expect(
    models: Sequence[KnownModel], rate: float, workers: Sequence[int], cores: int
) -> CellPlan:
    """Return what is to be expected of a cell that gets `rate` requests per second."""
    rates = [rate * model.share for model in models]
    working = sum(own * each.costs.server_ms for own, each in zip(rates, models, strict=True)) / 1e3
    turning = sum(own * each.costs.turn_ms for own, each in zip(rates, models, strict=True)) / 500
    # Where it is idle it takes two turns for a request; the busier, the more have one together.
    server_busy = working if working >= 1 else (working + turning) / (1 + turning)
    threads = sum(number * model.threads for number, model in zip(workers, models, strict=True))
    stretch = 1.0
    found: list[Expected] = []
    for _ in range(ROUNDS):
        found = [
            _expect_model(model, own, number, stretch, server_busy * stretch)
            for model, own, number in zip(models, rates, workers, strict=True)
        ]
        if threads + 1 <= cores:
            break
        again = _stretch(found, min(1.0, server_busy), cores)
        if abs(again - stretch) < 1e-3:
            break
        stretch = again
    return CellPlan(cores, found, server_busy * stretch, stretch)


def _stretch(found: Sequence[Expected], server_busy: float, cores: int) -> float:
    """Return by how much a thread is slowed down on average by others that run beside it."""
    chances = [min(1.0, each.busy) for each in found for _ in range(each.workers)]
    sizes = [each.model.threads for each in found for _ in range(each.workers)]
    # The one that runs is one of these; the others run as often as they are busy.
    running = {sizes[0]: 1.0}
    for chance, size in [*zip(chances[1:], sizes[1:], strict=True), (server_busy, 1)]:
        after: dict[int, float] = {}
        for number, likely in running.items():
            after[number] = after.get(number, 0.0) + likely * (1 - chance)
            after[number + size] = after.get(number + size, 0.0) + likely * chance
        running = after
    return sum(likely * max(1.0, number / cores) for number, likely in running.items())


def _expect_model(
    model: KnownModel, rate: float, workers: int, stretch: float, server_busy: float
) -> Expected:
    size = model.batch_size
    batch_s = [each * stretch for each in model.batch_s]
    most = workers / (model.best_job_s * stretch)
    if rate >= FULL * most or server_busy >= FULL:
        return Expected(model, rate, workers, rate / most, float(size))
    states = _chain(rate, workers, size, batch_s)
    before = [_before(jobs, workers, size, batch_s) for jobs in range(len(states))]
    served = sum(
        likely * min(jobs, workers) for jobs, likely in enumerate(states)
    )  # workers that are busy, on average
    mean_batch = sum(
        likely * max(1.0, min(size, jobs / workers)) for jobs, likely in enumerate(states)
    )
    costs = model.costs
    server_s = costs.server_ms / 1e3 * stretch
    at_server_s = server_s + 2 * costs.turn_ms / 1e3 * (1 - server_busy)
    at_server_s += server_busy * server_s / 2 / (1 - server_busy)  # 2 passes, each of half
    waits = [
        (likely, running_s, full_s * (1 + model.variation) / 2, own)
        for likely, (running_s, full_s, own) in zip(states, before, strict=True)
    ]
    around_s = at_server_s + costs.wait_ms / 1e3
    return Expected(model, rate, workers, served / workers, mean_batch, waits, stretch, around_s)


def _chain(rate: float, workers: int, size: int, batch_s: Sequence[float]) -> list[float]:
    """Return how likely each number of jobs is in the cell."""
    weights = [1.0]
    total = 1.0
    for jobs in range(1, MOST_STATES):
        if jobs <= workers:
            leaving = jobs / batch_s[1]
        else:
            batch = min(float(size), jobs / workers)
            leaving = workers * batch / _between(batch_s, batch)
        weights.append(weights[-1] * rate / leaving)
        total += weights[-1]
        if weights[-1] < 1e-7 * total and jobs > workers:
            break
        if total > 1e200:
            weights = [each / total for each in weights]
            total = 1.0
    return [each / total for each in weights]


def _before(
    jobs: int, workers: int, size: int, batch_s: Sequence[float]
) -> tuple[float, float, int]:
    """Return how long the batch takes that runs before a new job, those behind it, its own size."""
    if jobs < workers:
        return 0.0, 0.0, 1
    running = min(float(size), jobs / workers)
    waiting = (jobs - running * workers) / workers  # for each worker
    full = int(waiting // size)
    own = min(size, max(1, round(waiting - full * size + 1)))
    return _between(batch_s, running), full * batch_s[size], own


def _between(batch_s: Sequence[float], size: float) -> float:
    """Return the mean time of batches of this size on average."""
    low = int(size)
    high = min(len(batch_s) - 1, low + 1)
    return batch_s[low] + (size - low) * (batch_s[high] - batch_s[low])


LEAST_POINTS, MOST_POINTS = 20, 6_000
"""Times of a batch that stand for all of them; times of all batches that are told apart."""
GOLDEN = 0.618034
"""The golden section, whose multiples fill a range evenly in an order of their own."""


def _mixed(
    model: KnownModel,
    waits: Sequence[tuple[float, float, float, int]],
    stretch: float,
    around_s: float,
) -> list[float]:
    """Return latencies, each as likely as the next: of waiting and of the own batch's time."""
    likely_waits = [each for each in waits if each[0] > 1e-7]
    count = max(LEAST_POINTS, min(1000, MOST_POINTS // len(likely_waits)))
    points = np.arange(count)
    found = []
    for _, running_s, full_s, own in likely_waits:
        times = model.times_s[own]
        own_s = times[((points + 0.5) / count * len(times)).astype(int)]
        found.append(full_s + points * GOLDEN % 1 * running_s + own_s * stretch + around_s)
    latencies_s = np.concatenate(found)
    weights = np.repeat([likely for likely, *_ in likely_waits], count)
    order = latencies_s.argsort()
    levels = (np.arange(2000) + 0.5) / 2000 * weights.sum()
    places = np.searchsorted(weights[order].cumsum(), levels).clip(max=len(order) - 1)
    return [float(each) for each in latencies_s[order][places]]
