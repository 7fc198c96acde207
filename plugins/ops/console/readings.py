"""What the server does: read once a second, remembered for an hour, whether or not somebody looks.

Counters and histograms of the data plane are there anyway; a reading copies a few numbers of each
model version by a timer, and what is shown is the difference of two.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from modelyard.serve.api.management import memory_bytes
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.dataplane.call import PREDICT
from modelyard.serve.dataplane.metrics import PAUSE_S, SECONDS, Histogram
from modelyard.serve.dataplane.pool import Pool

logger = logging.getLogger(__name__)

EVERY_S = 1.0
TOGETHER = 10
"""Versions that are read in one go, half a millisecond during which predictions wait."""
WINDOW = 300
"""Readings that are remembered one by one: five minutes."""
RECENT = 10
"""Readings over which percentiles are taken, and of which one point of the hour is made; one second
has too few requests for a p99."""
POINTS = 360
"""Points of the hour."""
HISTORY_BYTES = 64 << 10
"""Most memory of what is remembered of one version."""
MOST_REMEMBERED = 64
"""Most versions that are remembered; one that is busy takes the place of one that has been idle,
and one that is looked at that of any."""
IDLE_S = 300.0
"""Time without answers and looks after which a version has been idle."""
LOOKED_S = 10.0
"""Time for which a look counts."""
MEMORY_EVERY_S = 10.0, 30.0
"""Worker processes are asked for their memory so often while somebody looks, and while nobody does:
the kernel goes through all their pages."""

Key = tuple[str, str]
"""A model's name and version."""
TOTAL: Key = "", ""
"""The key of all of them together."""


class Percentile(NamedTuple):
    """A latency that a histogram can only bound."""

    seconds: float
    """Seconds as Prometheus' `histogram_quantile` has them: even within their bucket."""
    low: float
    high: float
    """Bounds of the bucket; infinite above the last one."""


class Reading(NamedTuple):
    """A second of one version, or of all; or a longer time of it."""

    at: float
    """Seconds since 1970."""
    rate: float
    """Answers per second, predictions and explanations, errors included."""
    errors: float
    refused: float
    p50: Percentile | None
    """Median latency of predictions over the latest `RECENT` readings; None while there were
    none."""
    p99: Percentile | None
    batch: float | None
    """Mean rows of a handler's call."""
    queue: int
    """Rows that wait."""
    ready: int
    """Workers."""
    workers: int
    busy: float | None
    """Share of the time of ready workers in which they had work."""
    memory: int | None
    """Bytes of its workers."""


BUCKETS = len(SECONDS) + 1
NAMES = ("answered", "errors", "refused", "late", "failed", "rows", "batches", "busy_s")
"""What is counted besides: answers, those with status 400 or above, refusals (503), what had no
answer in time (504), what failed otherwise (500 or above), rows, batches, time at work."""
AT = {name: BUCKETS + place for place, name in enumerate(NAMES)}
SIZE = BUCKETS + len(NAMES)
"""Numbers of what a version has counted: predictions by bucket of latency, then by `NAMES`."""
COLUMNS = 10
"""Numbers of a point."""
QUEUE = 7
"""Column of what waits."""


class History:
    """Points of one version: the last five minutes by the second, the last hour by ten.

    It holds from the start what it will ever hold: a server's memory then grows by none of it.
    """

    def __init__(self) -> None:
        self._fine, self._coarse = _nothing(WINDOW), _nothing(POINTS)
        self.wanted_at = -math.inf
        """Time of the last answer or look."""

    def add(self, reading: Reading) -> None:
        """Take the newest reading."""
        _append(self._fine, point(reading))

    def add_coarse(self, reading: Reading) -> None:
        """Take one over the latest `RECENT` readings; of what waited, the most."""
        row = point(reading)
        waited = self._fine[-RECENT * COLUMNS :][QUEUE::COLUMNS]
        row[QUEUE] = max((each for each in waited if not math.isnan(each)), default=row[QUEUE])
        _append(self._coarse, row)

    def points(
        self, is_hour: bool = False, most: int = WINDOW + POINTS
    ) -> list[list[float | None]]:
        """Return points as plots have them, oldest first; of an hour, the newest ones are fine."""
        rows = _rows(self._fine)
        if is_hour:
            first = rows[0][0] if rows else math.inf
            rows = [row for row in _rows(self._coarse) if row[0] < first] + rows
        return [[None if math.isnan(each) else each for each in row] for row in rows[-most:]]

    def medians(self) -> Sequence[float]:
        """Return the median latencies of the hour, in milliseconds, that are known."""
        return [each for each in self._coarse[4::COLUMNS] if not math.isnan(each)]

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        return self._fine.itemsize * (len(self._fine) + len(self._coarse))


def _nothing(points: int) -> array[float]:
    return array("d", [math.nan]) * (points * COLUMNS)


def _append(to: array[float], row: Sequence[float]) -> None:
    to[:-COLUMNS] = to[COLUMNS:]
    to[-COLUMNS:] = array("d", row)


def _rows(of: array[float]) -> list[list[float]]:
    """Return the points that there are: those with a time."""
    starts = range(0, len(of), COLUMNS)
    return [of[at : at + COLUMNS].tolist() for at in starts if not math.isnan(of[at])]


class Watch:
    """Reads the versions of a registry. Lives on the event loop."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._seen: dict[Key, deque[tuple[float, array[float]]]] = {}
        """The latest counts of each version, with their times, oldest first."""
        self._histories: OrderedDict[Key, History] = OrderedDict()
        """Those that were busy or looked at most recently come last."""
        self._last_look = -math.inf
        self._tasks: Sequence[asyncio.Task[None]] = ()
        self.on_reading: Callable[[Watch], Iterable[None]] = lambda watch: ()
        """Called after each reading; what it does in steps is done in slices."""
        self.models: Sequence[ModelVersion] = ()
        """Versions of the latest reading."""
        self.latest: Mapping[Key, Reading] = {}
        """Latest reading of every version, and of `TOTAL`."""
        self.number = 0
        """Number of the latest reading; it changes with every one."""
        self.memory: Mapping[int, int] = {}
        """Bytes of each worker process, by its id."""

    def look(self, key: Key = TOTAL) -> History:
        """Return what is remembered of a version; from now on, where that was nothing."""
        self._last_look = time.monotonic()
        if not self._tasks:
            self.start()
        history = self._remember(key, math.inf)
        assert history is not None
        history.wanted_at = self._last_look
        self._histories.move_to_end(key)
        return history

    def start(self) -> None:
        """Read, and begin to read again and again."""
        deque(self._read(time.monotonic(), time.time()), 0)
        self._tasks = [asyncio.create_task(of) for of in (self._run(), self._read_memory())]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                steps = chain(self._read(time.monotonic(), time.time()), self.on_reading(self))
                while len(list(islice(steps, TOGETHER))) == TOGETHER:
                    await asyncio.sleep(PAUSE_S)
            except Exception:  # the next reading is a second away
                logger.exception("console: a reading failed")

    def _remember(self, key: Key, now: float) -> History | None:
        """Return what is remembered of a version; None where others need the room."""
        history = self._histories.get(key)
        if history is None:
            if len(self._histories) >= MOST_REMEMBERED:
                oldest = next(iter(self._histories))
                if now - self._histories[oldest].wanted_at < IDLE_S:
                    return None
                del self._histories[oldest]
            history = self._histories[key] = History()
        return history

    def _read(self, now: float, at: float) -> Iterator[None]:
        """Read, in a step for each version and another one."""
        models, counts = list(self._registry), []
        for model in models:
            counts.append(count(model))
            yield
        total = array("d", map(sum, zip(*counts, strict=True))) or array("d", [0.0] * SIZE)
        groups = [(TOTAL, models), *(((each.name, each.version), [each]) for each in models)]
        number, readings = self.number + 1, dict[Key, Reading]()
        for (key, members), counted in zip(groups, [total, *counts], strict=True):
            seen = self._seen.setdefault(key, deque(maxlen=RECENT + 1))
            if seen and counted[AT["answered"]] < seen[-1][1][AT["answered"]]:
                seen.clear()  # a version was unregistered, or another one has its name
            seen.append((now, counted))
            reading = readings[key] = self._make(
                at, members, seen, seen[-2 if len(seen) > 1 else -1]
            )
            is_busy = bool(reading.rate) or key == TOTAL
            has_room = is_busy or len(self._histories) < MOST_REMEMBERED
            history = self._remember(key, now) if has_room else self._histories.get(key)
            if history is not None:
                history.add(reading)
                if is_busy:
                    history.wanted_at = now
                    self._histories.move_to_end(key)
                if number % RECENT == 0:
                    history.add_coarse(self._make(at, members, seen, seen[0]))
            yield
        for gone in self._seen.keys() - readings.keys():
            del self._seen[gone]
            self._histories.pop(gone, None)
        self.models, self.latest, self.number = models, readings, number

    def medians(self, key: Key) -> Sequence[float]:
        """Return the median latencies of a version's hour, in milliseconds, that are known."""
        history = self._histories.get(key)
        return history.medians() if history is not None else ()

    def recent(self, key: Key) -> Mapping[str, float]:
        """Return what a version has counted over the latest `RECENT` readings, by `NAMES`."""
        seen = self._seen[key]
        return {name: seen[-1][1][at] - seen[0][1][at] for name, at in AT.items()}

    def _make(
        self,
        at: float,
        models: Sequence[ModelVersion],
        seen: Sequence[tuple[float, array[float]]],
        before: tuple[float, array[float]],
    ) -> Reading:
        """Return the reading from one look to the newest one."""
        now, counts = seen[-1]
        span, since = (
            now - before[0],
            [new - old for new, old in zip(counts, before[1], strict=True)],
        )
        workers = sum(len(model.pool.slots) for model in models)
        ready = sum(model.pool.ready_count for model in models)
        latency = [new - old for new, old in zip(counts[:BUCKETS], seen[0][1], strict=False)]
        rate, errors, refused = (since[AT[name]] / (span or 1.0) for name in NAMES[:3])
        batches, busy_s = since[AT["batches"]], since[AT["busy_s"]]
        return Reading(
            at,
            rate,
            errors,
            refused,
            p50=percentile(latency, 0.5),
            p99=percentile(latency, 0.99),
            batch=since[AT["rows"]] / batches if batches else None,
            queue=sum(batcher.waiting for model in models for batcher in model.batchers),
            ready=ready,
            workers=workers,
            busy=max(0.0, min(1.0, busy_s / (span * ready))) if span and ready else None,
            memory=self.memory_of(pool for model in models for pool in model.pools),
        )

    def memory_of(self, pools: Iterable[Pool]) -> int | None:
        """Return what workers hold; None before that was read."""
        pids = [slot.worker.pid for pool in pools for slot in pool.slots if slot.worker is not None]
        known = [self.memory[pid] for pid in pids if pid in self.memory]
        return sum(known) if known else None

    async def _read_memory(self) -> None:
        while True:
            slots = [slot for of in self._registry for pool in of.pools for slot in pool.slots]
            pids = [slot.worker.pid for slot in slots if slot.worker is not None]
            self.memory = {pid: await asyncio.to_thread(memory_bytes, pid) for pid in pids}
            at = now = time.monotonic()
            while now - at < MEMORY_EVERY_S[now - self._last_look > LOOKED_S]:
                await asyncio.sleep(EVERY_S)
                now = time.monotonic()

    def close(self) -> None:
        """Read no more."""
        for task in self._tasks:
            task.cancel()
        self._tasks = ()


def count(model: ModelVersion) -> array[float]:
    """Return what a version has counted so far."""
    predictions, kinds = model.metrics.kinds[PREDICT], model.metrics.kinds
    sums = dict.fromkeys(NAMES, 0.0)
    for kind in kinds:
        for name, number in zip(NAMES, kind.counted(), strict=False):
            sums[name] += number
        for code, number in kind.by_code().items():
            if code >= 500 and code != 503:
                sums["late" if code == 504 else "failed"] += number
    sizes = predictions.batch_size
    more = {"rows": sizes.total, "batches": sum(sizes.counts), "busy_s": model.pool.busy_s}
    return array("d", [*predictions.latency.counts, *(sums | more).values()])


def percentile(counts: Sequence[float], share: float) -> Percentile | None:
    """Return the latency below which a share of the answers was; None of no answers."""
    if (whole := sum(counts)) <= 0:
        return None
    histogram = Histogram(SECONDS)
    histogram.counts = list(map(int, counts))
    seconds = histogram.quantile(share)
    if sum(counts[:-1]) < share * whole:
        return Percentile(seconds, seconds, math.inf)
    at = min(bisect_left(SECONDS, seconds), len(SECONDS) - 1)
    return Percentile(seconds, SECONDS[at - 1] if at else 0.0, SECONDS[at])


def point(reading: Reading) -> list[float]:
    """Return a reading as plots have it: milliseconds, percent and megabytes; NaN is unknown."""

    def scaled(value: float | None, by: float) -> float:
        return math.nan if value is None else value * by

    p50, p99 = (of and of.seconds for of in (reading.p50, reading.p99))
    return [
        *(reading.at, reading.rate, reading.errors, reading.refused),
        *(scaled(p50, 1e3), scaled(p99, 1e3), scaled(reading.batch, 1.0), reading.queue),
        *(scaled(reading.busy, 100.0), scaled(reading.memory, 1e-6)),
    ]
