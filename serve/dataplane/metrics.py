"""Every metric's name, unit and labels (Prometheus)."""

from __future__ import annotations

import math
import platform
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import NamedTuple, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_open
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from modelyard.serve.dataplane.call import CLASSES
from modelyard.serve.dataplane.exposition import HandlerMetrics, Record, read_records
from modelyard.serve.dataplane.readings import Family, Readings

KINDS = ("predict", "explain")
"""Label values by kind of job: index 0 and 1."""
BUILD = ("version", "python", "torch")
LOOKUPS = ("hit", "miss", "joined", "bypass")
"""Label values: what came of looking for an answer that is kept."""
REFUSED = ("full", "deadline")
"""Label values: why a request was refused."""

SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Bounds from the smallest models' answers to the longest time that a request has by default."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Histogram:
    """One series: observations counted by the first bound that is not below them.

    A bisection and two additions, no lock: prometheus_client's own observe goes through all bounds
    and takes two locks, five times the cost.
    """

    __slots__ = ("_bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}
        """Bucket → the latest value that is known where it comes from."""

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def quantile(self, q: float) -> float:
        """Return the value that a share `q` of them does not exceed, interpolated in its bucket.

        The largest bound where it is above that, 0 where nothing was observed.
        """
        wanted = q * sum(self.counts)
        below, low = 0, 0.0
        for bound, count in zip(self._bounds, self.counts, strict=False):
            if count and below + count >= wanted:
                return low + (bound - low) * max(0.0, wanted - below) / count
            below, low = below + count, bound
        return low if below or self.counts[-1] else 0.0

    def exemplify(self, value: float, trace_id: str) -> None:
        """Name the trace of a value, which is counted already."""
        bucket = bisect_left(self._bounds, value)
        self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())


class Histograms(Collector):
    """A histogram for each combination of its labels' values; used on one thread.

    Args:
        name: name as it is exposed.
        text: text for the HELP line.
        labels: their names.
        bounds: bounds of the buckets, rising; one for all that is larger is added.
        registry: what exposes it.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._about = name, text
        self._labelnames = labels  # as prometheus_client's own metrics call it
        self._bounds = bounds
        self._series: dict[tuple[str, ...], Histogram] = {}
        registry.register(self)

    def labels(self, *values: str) -> Histogram:
        """Return the series of these values, a new one where there is none."""
        return self._series.setdefault(values, Histogram(self._bounds))

    def remove(self, *values: str) -> None:
        """Forget a series."""
        del self._series[values]

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Return the name."""
        return [HistogramMetricFamily(*self._about, labels=self._labelnames)]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Return all series."""
        family = HistogramMetricFamily(*self._about, labels=self._labelnames)
        bounds = [
            floatToGoString(bound)  # type: ignore[no-untyped-call]
            for bound in (*self._bounds, math.inf)
        ]
        for values, series in self._series.items():
            counts = zip(bounds, accumulate(series.counts), strict=True)
            buckets = [
                (*each, series.exemplars[at]) if at in series.exemplars else each
                for at, each in enumerate(counts)
            ]
            family.add_metric(values, buckets, series.total)
        return [family]


class Recorder(Protocol):
    """What keeps the metrics of handlers, and whatever else a dialect measures."""

    is_alone: bool
    """Whether nothing but its text is exposed."""

    def reported(self, records: Iterable[Record], seconds: float) -> None:
        """Take what a handler measured in one batch, which its worker had for `seconds`."""

    def forget(self, model: str) -> None:
        """Drop the series of a model."""

    def text(self, names: Collection[str] = (), is_open: bool = False) -> str:
        """Return Prometheus text; only metrics of these names unless there are none.

        Args:
            is_open: whether it is read as OpenMetrics; what ends that is not written.
        """


class CallObserver(Protocol):
    """What wants to know of each call for a model."""

    def accepted(self, model: str, version: str | None) -> None:
        """Count a request for a prediction or an explanation."""

    def inferred(self, model: str, version: str | None, queued_s: float, total_s: float) -> None:
        """Take note of an answer, not an error: how long it waited, and how long it took in all."""


class KeptCounts(Protocol):
    """What is counted of the answers that are kept, of one version."""

    held: int
    """Bytes."""
    evictions: int
    outcomes: list[dict[str, int]]
    """Kind → outcome of `LOOKUPS` → how often."""


class Metrics:
    """The metrics of one server. Labels come from registered models only, so they are bounded."""

    def __init__(
        self, recorder: Recorder | None = None, observer: CallObserver | None = None
    ) -> None:
        self.recorder: Recorder = recorder or HandlerMetrics(socket.gethostname())
        self.observer = observer
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp beside every series, which nobody reads
        registry = self.registry = CollectorRegistry()
        model = ("model", "version")
        kind = (*model, "kind")

        def count(name: str, text: str, labels: Sequence[str]) -> Counter:
            return Counter(f"modelyard_{name}", text, labels, registry=registry)

        def observe(name: str, text: str, bounds: Sequence[float] = SECONDS) -> Histograms:
            return Histograms(f"modelyard_{name}", text, kind, bounds, registry)

        def gauge(name: str, text: str, labels: Sequence[str]) -> Gauge:
            return Gauge(f"modelyard_{name}", text, labels, registry=registry)

        def read(
            name: str, text: str, labels: Sequence[str], form: type[Family] = GaugeMetricFamily
        ) -> Readings:
            return Readings(form, f"modelyard_{name}", text, labels, registry)

        coded = (*kind, "code")
        self.requests = count("requests", "Requests answered, by HTTP status.", coded)
        self.errors = count("errors", "Requests answered with status 400 or above.", coded)
        self.latency = observe(
            "request_latency_seconds", "From the whole body read to the answer ready, in seconds."
        )
        self.queue_time = observe(
            "queue_time_seconds", "From arrival in the queue to hand-over to a worker, in seconds."
        )
        self.worker_queue = observe(
            "worker_queue_seconds",
            "From hand-over to a worker to the start of the batch there, in seconds.",
        )
        self.handler = observe(
            "handler_seconds", "The handler's call that answered the request, in seconds."
        )
        self.batch_size = observe(
            "batch_size",
            "Rows in one handler call: requests, or those of a request of several.",
            SIZES,
        )
        self.queue_length = gauge(
            "queue_length", "Rows waiting now: requests, or those of a request of several.", kind
        )
        self.queue_oldest = read(
            "queue_oldest_seconds", "How long the first request of the queue has waited.", kind
        )
        prioritized = (*kind, "priority")
        self.class_queue_length = read(
            "queue_length_by_priority",
            "Rows waiting now, of each class, once a request has named another than normal.",
            prioritized,
        )
        self.class_queue_time = Histograms(
            "modelyard_queue_time_by_priority_seconds",
            "The queue time of each class, once a request has named another than normal.",
            prioritized,
            SECONDS,
            registry,
        )
        self.in_flight = read(
            "requests_in_flight", "Requests that wait or are being answered now.", kind
        )
        self.refused = count(
            "refused_requests",
            "Requests refused because too many waited (full) or none would be answered in its time "
            "(deadline).",
            (*kind, "reason"),
        )
        self.restarts = count(
            "worker_restarts", "Workers that ended unasked and were replaced.", model
        )
        self.ready_workers = gauge("ready_workers", "Workers that can take work.", model)
        self.busy_seconds = read(
            "worker_busy_seconds",
            "Time in which those workers had work, all of them together.",
            model,
            CounterMetricFamily,
        )
        self.capacity = gauge(
            "capacity_requests_per_second",
            "Rate that `modelyard tune` measured for the model's configuration.",
            model,
        )
        self.cache_lookups = read(
            "cache_lookups",
            "Requests to versions whose answers are kept, by what came of that.",
            (*kind, "outcome"),
            CounterMetricFamily,
        )
        self.cache_bytes = read("cache_bytes", "Memory of the answers that are kept.", model)
        self.cache_evictions = read(
            "cache_evictions",
            "Kept answers that went to make room for others.",
            model,
            CounterMetricFamily,
        )
        self.model_info = gauge("model_info", "1; what is served.", (*model, "digest", "format"))
        self.unproven = gauge(
            "model_unproven", "1; nobody has proven it on the versions here.", (*model, "reason")
        )
        self.unrouted = count(
            "unrouted_requests",
            "Requests for no registered model, or without the right to it, by HTTP status.",
            ("code",),
        )
        self.build_info = gauge("build_info", "1; the server's own versions.", BUILD)
        build = (_installed("modelyard"), platform.python_version(), _installed("torch"))
        self.build_info.labels(*build).set(1)
        ProcessCollector(registry=registry)

    def text(self, names: Collection[str] = (), is_open: bool = False) -> str:
        """Return everything as Prometheus text; only these metrics unless there are none.

        Args:
            is_open: whether as OpenMetrics, which has the exemplars.
        """
        recorded = self.recorder.text(names, is_open)
        if self.recorder.is_alone:
            return recorded
        registry: Collector = self.registry.restricted_registry(names) if names else self.registry
        generate = generate_open if is_open else generate_latest
        return recorded + generate(registry).decode()


def _installed(package: str) -> str:
    """Return the version of a package, which need not be imported; empty where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


class VersionMetrics:
    """The metrics of one model version, label lookups done once."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        self._metrics = metrics
        self._labels = (model, version)
        self.kinds = tuple(KindMetrics(metrics, model, version, kind) for kind in KINDS)
        self.restarts = metrics.restarts.labels(model, version)
        self._has_cache = False
        self._about: tuple[str, ...] = ()
        self._doubt: tuple[str, ...] = ()

    def watch_workers(self, ready: Callable[[], float], busy_s: Callable[[], float]) -> None:
        """Read the number of ready workers, and how long they were busy, at each scrape."""
        self._metrics.ready_workers.labels(*self._labels).set_function(ready)
        self._metrics.busy_seconds.watch(self._labels, busy_s)

    def describe(self, digest: str, format: str, capacity: float) -> None:
        """Expose what is served, and the rate that it was tuned to, 0 for none."""
        self._about = (*self._labels, digest, format)
        self._metrics.model_info.labels(*self._about).set(1)
        if capacity:
            self._metrics.capacity.labels(*self._labels).set(capacity)

    def doubt(self, reason: str) -> None:
        """Expose why nobody has proven what runs here."""
        self._doubt = (*self._labels, reason)
        self._metrics.unproven.labels(*self._doubt).set(1)

    def watch_cache(self, kept: KeptCounts) -> None:
        """Read what came of looking for answers that are kept, at each scrape."""
        metrics, labels = self._metrics, self._labels
        self._has_cache = True
        metrics.cache_bytes.watch(labels, lambda: kept.held)
        metrics.cache_evictions.watch(labels, lambda: kept.evictions)
        for kind, found in zip(KINDS, kept.outcomes, strict=True):
            for outcome in found:
                read = partial(_read_of, found, outcome)
                metrics.cache_lookups.watch((*labels, kind, outcome), read)

    def reported(self, records: object, seconds: float) -> None:
        """Take what a handler measured in one batch, which its worker had for `seconds`."""
        self._metrics.recorder.reported(read_records(records), seconds)

    def remove(self) -> None:
        """Forget the series of this model version."""
        metrics = self._metrics
        metrics.recorder.forget(self._labels[0])
        metrics.restarts.remove(*self._labels)
        metrics.ready_workers.remove(*self._labels)
        metrics.busy_seconds.remove(*self._labels)
        metrics.capacity.remove(*self._labels)
        if self._about:
            metrics.model_info.remove(*self._about)
        if self._doubt:
            metrics.unproven.remove(*self._doubt)
        for kind in self.kinds:
            kind.remove()
        if self._has_cache:
            metrics.cache_bytes.remove(*self._labels)
            metrics.cache_evictions.remove(*self._labels)
            for name in KINDS:
                for outcome in LOOKUPS:
                    metrics.cache_lookups.remove(*self._labels, name, outcome)


class Counted(NamedTuple):
    """What one model version has counted so far, of one kind of job."""

    answered: int
    errors: int
    """Answers of those with status 400 or above."""
    refused: int


class KindMetrics:
    """The metrics of one model version and kind of job."""

    watcher: Callable[[int, float], None] | None = None
    """Called with the status of each answer, and how long it took."""

    def __init__(self, metrics: Metrics, model: str, version: str, kind: str) -> None:
        self._metrics = metrics
        self._labels = (model, version, kind)
        self._codes: dict[int, tuple[Counter, ...]] = {}
        self._has_classes = False
        self.latency = metrics.latency.labels(*self._labels)
        self.queue_time = metrics.queue_time.labels(*self._labels)
        self.worker_queue = metrics.worker_queue.labels(*self._labels)
        self.handler = metrics.handler.labels(*self._labels)
        self.batch_size = metrics.batch_size.labels(*self._labels)
        self.queue_length = metrics.queue_length.labels(*self._labels)
        self.refused_full, self.refused_late = (
            metrics.refused.labels(*self._labels, reason) for reason in REFUSED
        )

    def watch(self, in_flight: Callable[[], float], oldest_s: Callable[[], float]) -> None:
        """Read how many requests there are, and since when the first waits, at each scrape."""
        self._metrics.in_flight.watch(self._labels, in_flight)
        self._metrics.queue_oldest.watch(self._labels, oldest_s)

    def watch_classes(self, rows: Callable[[], Sequence[int]]) -> Sequence[Histogram]:
        """Read how many rows of each class wait, and return what takes how long they did."""
        metrics, self._has_classes = self._metrics, True
        for at, name in enumerate(CLASSES):
            metrics.class_queue_length.watch((*self._labels, name), partial(_read_at, rows, at))
        return [metrics.class_queue_time.labels(*self._labels, name) for name in CLASSES]

    def ran(self, queue_us: int, handler_us: int) -> None:
        """Take the times that a worker's reply states."""
        self.worker_queue.observe(queue_us / 1e6)
        self.handler.observe(handler_us / 1e6)

    def answered(self, code: int, seconds: float, trace_id: str = "") -> None:
        """Count one answer and how long it took; a trace's id is the exemplar of its latency."""
        counters = self._codes.get(code)
        if counters is None:
            metrics, labels = self._metrics, (*self._labels, str(code))
            families = (metrics.requests, metrics.errors) if code >= 400 else (metrics.requests,)
            counters = self._codes[code] = tuple(family.labels(*labels) for family in families)
        for counter in counters:
            counter.inc()
        self.latency.observe(seconds)
        if self.watcher is not None:
            self.watcher(code, seconds)
        if trace_id:
            self.latency.exemplify(seconds, trace_id)

    def counted(self) -> Counted:
        """Return the counts of answers."""
        by_code = {code: int(each[0]._value.get()) for code, each in self._codes.items()}
        return Counted(
            sum(by_code.values()),
            sum(count for code, count in by_code.items() if code >= 400),
            int(self.refused_full._value.get() + self.refused_late._value.get()),
        )

    def remove(self) -> None:
        """Forget the series of this kind."""
        metrics, labels = self._metrics, self._labels
        for family in (
            metrics.latency,
            metrics.queue_time,
            metrics.worker_queue,
            metrics.handler,
            metrics.batch_size,
            metrics.queue_length,
            metrics.in_flight,
            metrics.queue_oldest,
        ):
            family.remove(*labels)
        for name in CLASSES if self._has_classes else ():
            metrics.class_queue_length.remove(*labels, name)
            metrics.class_queue_time.remove(*labels, name)
        for reason in REFUSED:
            metrics.refused.remove(*labels, reason)
        for code in self._codes:
            metrics.requests.remove(*labels, str(code))
            if code >= 400:
                metrics.errors.remove(*labels, str(code))


def _read_of(counts: Mapping[str, int], name: str) -> float:
    return counts[name]


def _read_at(rows: Callable[[], Sequence[int]], at: int) -> float:
    return rows()[at]
