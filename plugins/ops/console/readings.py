"""What the server does, read once a second while somebody looks, and not at all otherwise.

Counters and histograms of the data plane are there anyway; a reading copies a few numbers of each
model version, and what is shown is the difference of two.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from modelyard.serve.api.management import memory_bytes
from modelyard.serve.control.register import pools_of
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.dataplane.call import PREDICT
from modelyard.serve.dataplane.metrics import SECONDS

logger = logging.getLogger(__name__)

EVERY_S = 1.0
LOOKED_S = 10.0
"""Time after the last look at which readings end."""
WINDOW = 300
"""Readings that a plot shows: five minutes."""
RECENT = 10
"""Readings over which percentiles are taken; one second has too few requests for a p99."""
MOST_WATCHED = 32
"""Model versions of which a window is kept at once: those whose pages are open."""
MEMORY_EVERY_S = 10.0
"""Worker processes are asked for their memory so often: the kernel goes through all their pages."""

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


Counts = Counter[str | int]
"""What one version, or all, has counted: by name, and predictions by the bound they are under."""


class Reading(NamedTuple):
    """A second of one version, or of all."""

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


class Watch:
    """Reads the versions of a registry while somebody looks. Lives on the event loop."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._seen: dict[Key, deque[tuple[float, Counts]]] = {}
        """The latest counts of each version, with their times, oldest first."""
        self._windows: OrderedDict[Key, deque[Reading]] = OrderedDict()
        self._looked_at: dict[Key, float] = {}
        self._last_look = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.latest: Mapping[Key, Reading] = {}
        """Latest reading of every version, and of `TOTAL`."""
        self.number = 0
        """Number of the latest reading; it changes with every one."""
        self.memory: Mapping[int, int] = {}
        """Bytes of each worker process, by its id."""
        self._memory_task: asyncio.Task[None] | None = None
        self._memory_at = 0.0

    def look(self, key: Key = TOTAL) -> Sequence[Reading]:
        """Return the window of a version, and go on reading for `LOOKED_S`."""
        now = time.monotonic()
        self._last_look = self._looked_at[key] = now
        window = self._windows.get(key)
        if window is None:
            while len(self._windows) >= MOST_WATCHED:
                old, _ = self._windows.popitem(last=False)
                self._looked_at.pop(old, None)
            window = self._windows[key] = deque(maxlen=WINDOW)
        self._windows.move_to_end(key)
        if self._timer is None:
            self._tick()
        return window

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._last_look > LOOKED_S:
            self._timer = None
            self._seen.clear()
            self._windows.clear()
            self._looked_at.clear()
            self.latest = {}
            return
        self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._tick)
        try:
            self._read(now)
        except Exception:
            logger.exception("console: a reading failed")
        if now - self._memory_at >= MEMORY_EVERY_S and (
            self._memory_task is None or self._memory_task.done()
        ):
            self._memory_at = now
            self._memory_task = asyncio.create_task(self._read_memory())

    def _read(self, now: float) -> None:
        models = list(self._registry)
        readings: dict[Key, Reading] = {}
        total, at = Counts(), time.time()
        for model in models:
            key = model.name, model.version
            counts = count(model)
            total.update(counts)
            readings[key] = self._make(key, now, at, counts, [model])
        readings[TOTAL] = self._make(TOTAL, now, at, total, models)
        for key in self._seen.keys() - readings.keys():
            del self._seen[key]
        for key, window in list(self._windows.items()):
            if key in readings and now - self._looked_at[key] <= LOOKED_S:
                window.append(readings[key])
            else:
                del self._windows[key], self._looked_at[key]
        self.latest = readings
        self.number += 1

    def _make(
        self, key: Key, now: float, at: float, counts: Counts, models: Iterable[ModelVersion]
    ) -> Reading:
        seen = self._seen.setdefault(key, deque(maxlen=RECENT + 1))
        if seen and counts["answered"] < seen[-1][1]["answered"]:
            seen.clear()  # a version was unregistered, or another one has its name
        seen.append((now, counts))
        models = list(models)
        workers = sum(len(model.pool.slots) for model in models)
        ready = sum(model.pool.ready_count for model in models)
        queue = sum(batcher.waiting for model in models for batcher in model.batchers)
        last_at, last = seen[-2] if len(seen) > 1 else (now, counts)
        span, since, recent = now - last_at, counts.copy(), counts.copy()
        since.subtract(last)
        recent.subtract(seen[0][1])
        rate, errors, refused = (since[name] / (span or 1.0) for name in RATES)
        latency = [recent[bound] for bound in range(len(SECONDS) + 1)]
        return Reading(
            at,
            rate,
            errors,
            refused,
            p50=percentile(latency, 0.5),
            p99=percentile(latency, 0.99),
            batch=since["rows"] / since["batches"] if since["batches"] else None,
            queue=queue,
            ready=ready,
            workers=workers,
            busy=min(1.0, since["busy_s"] / (span * ready)) if span and ready else None,
        )

    async def _read_memory(self) -> None:
        pools = [pool for model in self._registry for pool in pools_of(model)]
        pids = [slot.worker.pid for pool in pools for slot in pool.slots if slot.worker is not None]
        found: dict[int, int] = {}
        for pid in pids:
            found[pid] = await asyncio.to_thread(memory_bytes, pid)
        self.memory = found

    def close(self) -> None:
        """Read no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._memory_task is not None:
            self._memory_task.cancel()


RATES = ("answered", "errors", "refused")


def count(model: ModelVersion) -> Counts:
    """Return what a version has counted so far."""
    predictions, kinds = model.metrics.kinds[PREDICT], model.metrics.kinds
    counts: Counts = Counter(dict(enumerate(predictions.latency.counts)))
    for kind in kinds:
        counts.update(kind.counted()._asdict())
    sizes = predictions.batch_size
    # It adds and subtracts what is not whole as well.
    more: dict[str | int, Any] = {"rows": sizes.total, "busy_s": model.pool.busy_s}
    counts.update(more | {"batches": sum(sizes.counts)})
    return counts


def percentile(counts: Sequence[int], share: float) -> Percentile | None:
    """Return the latency below which a share of the answers was; None of no answers."""
    whole = sum(counts)
    if whole <= 0:
        return None
    rank, below = share * whole, 0
    for at, inside in enumerate(counts):
        if inside and below + inside >= rank:
            low = SECONDS[at - 1] if at else 0.0
            if at == len(SECONDS):
                return Percentile(low, low, float("inf"))
            high = SECONDS[at]
            return Percentile(low + (high - low) * (rank - below) / inside, low, high)
        below += inside
    raise AssertionError("the ranks of a histogram end with its last count")
