"""Every metric's name, unit and labels (Prometheus)."""

from __future__ import annotations

import math
import platform
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_open
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from modelyard.archiver.proven import installed_version
from modelyard.serve.dataplane.call import CLASSES
from modelyard.serve.dataplane.exposition import HandlerMetrics, read_records

if TYPE_CHECKING:
    from modelyard.serve.dataplane.cache import VersionAnswers

KINDS = ("predict", "explain")
"""Label values by kind of job: index 0 and 1."""
LOOKUPS = ("hit", "miss", "joined", "bypass")
"""Label values: what came of looking for an answer that is kept."""

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

    def buckets(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Return bound, how many do not exceed it, and the exemplar of each bucket."""
        bounds = map(floatToGoString, (*self._bounds, math.inf))
        counts = zip(bounds, accumulate(self.counts), strict=True)
        named = self.exemplars
        return [(*each, named[at]) if at in named else each for at, each in enumerate(counts)]

    def exemplify(self, value: float, trace_id: str) -> None:
        """Name the trace of a value, which is counted already."""
        bucket = bisect_left(self._bounds, value)
        self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())


class Count:
    """One series: a number that grows, or is set."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Count up."""
        self.value += amount


COUNTER, GAUGE, HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily


class Family(Collector):
    """One metric: a series for each combination of its labels' values; used on one thread.

    Args:
        registry: what exposes it.
        kind: COUNTER, GAUGE or HISTOGRAM.
        name: name as it is exposed, behind `modelyard_`; of a counter without its `_total`.
        labels: their names.
        text: text for the HELP line.
        bounds: of a histogram the bounds of its buckets, rising; one for all that is larger is
            added.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        kind: type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily],
        name: str,
        labels: Sequence[str],
        text: str,
        bounds: Sequence[float] = SECONDS,
    ) -> None:
        self._kind = kind
        self._about = f"modelyard_{name}", text
        self._labelnames = labels  # as prometheus_client's own metrics call it
        self._bounds = bounds
        self._series: dict[tuple[str, ...], Count | Histogram | Callable[[], float]] = {}
        registry.register(self)

    def count(self, *values: str) -> Count:
        """Return the series of these values, a new one where there is none."""
        series = self._series.setdefault(values, Count())
        assert isinstance(series, Count)
        return series

    def histogram(self, *values: str) -> Histogram:
        """Return the series of these values, a new one where there is none."""
        series = self._series.setdefault(values, Histogram(self._bounds))
        assert isinstance(series, Histogram)
        return series

    def watch(self, read: Callable[[], float], *values: str) -> None:
        """Read the series of these values at each scrape: nothing is kept up to date between."""
        self._series[values] = read

    def forget(self, *first: str) -> None:
        """Forget the series whose first values are these."""
        for values in [each for each in self._series if each[: len(first)] == first]:
            del self._series[values]

    def describe(self) -> Iterable[Metric]:
        """Return the name."""
        return [self._kind(*self._about, labels=self._labelnames)]

    def collect(self) -> Iterable[Metric]:
        """Return all series."""
        family: Any = self._kind(*self._about, labels=self._labelnames)
        for values, series in self._series.items():
            if isinstance(series, Histogram):
                family.add_metric(values, series.buckets(), series.total)
            else:
                family.add_metric(values, series.value if isinstance(series, Count) else series())
        return [family]


class CallObserver(Protocol):
    """What wants to know of each call for a model."""

    def accepted(self, model: str, version: str | None) -> None:
        """Count a request for a prediction or an explanation."""

    def inferred(self, model: str, version: str | None, queued_s: float, total_s: float) -> None:
        """Take note of an answer, not an error: how long it waited, and how long it took in all."""


MODEL = ("model", "version")
KIND = (*MODEL, "kind")
CODED, PRIORITIZED = (*KIND, "code"), (*KIND, "priority")
METRICS: tuple[tuple[Any, ...], ...] = (
    (COUNTER, "requests", CODED, "Requests answered, by HTTP status."),
    (COUNTER, "errors", CODED, "Requests answered with status 400 or above."),
    (HISTOGRAM, "request_latency_seconds", KIND,
     "From the whole body read to the answer ready, in seconds."),
    (HISTOGRAM, "queue_time_seconds", KIND,
     "From arrival in the queue to hand-over to a worker, in seconds."),
    (HISTOGRAM, "worker_queue_seconds", KIND,
     "From hand-over to a worker to the start of the batch there, in seconds."),
    (HISTOGRAM, "handler_seconds", KIND,
     "The handler's call that answered the request, in seconds."),
    (HISTOGRAM, "batch_size", KIND,
     "Rows in one handler call: requests, or those of a request of several.", SIZES),
    (GAUGE, "queue_length", KIND,
     "Rows waiting now: requests, or those of a request of several."),
    (GAUGE, "queue_oldest_seconds", KIND,
     "How long the first request of the queue has waited."),
    (GAUGE, "queue_length_by_priority", PRIORITIZED,
     "Rows waiting now, of each class, once a request has named another than normal."),
    (HISTOGRAM, "queue_time_by_priority_seconds", PRIORITIZED,
     "The queue time of each class, once a request has named another than normal."),
    (GAUGE, "requests_in_flight", KIND, "Requests that wait or are being answered now."),
    (COUNTER, "refused_requests", (*KIND, "reason"),
     "Requests refused because too many waited (full), none would be answered in its time "
     "(deadline), or the same one had ended two workers (poison)."),
    (COUNTER, "worker_restarts", MODEL, "Workers that ended unasked and were replaced."),
    (GAUGE, "ready_workers", MODEL, "Workers that can take work."),
    (COUNTER, "worker_busy_seconds", MODEL,
     "Time in which those workers had work, all of them together."),
    (GAUGE, "capacity_requests_per_second", MODEL,
     "Rate that `modelyard tune` measured for the model's configuration."),
    (COUNTER, "cache_lookups", (*KIND, "outcome"),
     "Requests to versions whose answers are kept, by what came of that."),
    (GAUGE, "cache_bytes", MODEL, "Memory of the answers that are kept."),
    (COUNTER, "cache_evictions", MODEL, "Kept answers that went to make room for others."),
    (GAUGE, "model_info", (*MODEL, "digest", "format"), "1; what is served."),
    (GAUGE, "model_unproven", (*MODEL, "reason"),
     "1; nobody has proven it on the versions here."),
    (COUNTER, "unrouted_requests", ("code",),
     "Requests for no registered model, or without the right to it, by HTTP status."),
    (GAUGE, "build_info", ("version", "python", "torch"), "1; the server's own versions."),
)  # fmt: skip
"""Kind, name, labels and text of each metric, of a histogram its bounds: `Family`."""


class Metrics:
    """The metrics of one server. Labels come from registered models only, so they are bounded."""

    def __init__(
        self, recorder: HandlerMetrics | None = None, observer: CallObserver | None = None
    ) -> None:
        self.recorder = recorder or HandlerMetrics(socket.gethostname())
        self.observer = observer
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp beside every series, which nobody reads
        registry = self.registry = CollectorRegistry()
        self._families = {about[1]: Family(registry, *about) for about in METRICS}
        build = (
            installed_version("modelyard"),
            platform.python_version(),
            installed_version("torch"),
        )
        self["build_info"].count(*build).inc()
        ProcessCollector(registry=registry)

    def __getitem__(self, name: str) -> Family:
        """Return the metric of a name of METRICS."""
        return self._families[name]

    def forget(self, model: str, version: str) -> None:
        """Forget the series of a model version."""
        self.recorder.forget(model)
        for family in self._families.values():
            family.forget(model, version)

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


class VersionMetrics:
    """The metrics of one model version, label lookups done once."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        self._metrics = metrics
        self._labels = (model, version)
        self.kinds = tuple(KindMetrics(metrics, model, version, kind) for kind in KINDS)
        self.restarts = metrics["worker_restarts"].count(model, version)

    def watch_workers(self, ready: Callable[[], float], busy_s: Callable[[], float]) -> None:
        """Read the number of ready workers, and how long they were busy, at each scrape."""
        self._metrics["ready_workers"].watch(ready, *self._labels)
        self._metrics["worker_busy_seconds"].watch(busy_s, *self._labels)

    def describe(self, digest: str, format: str, capacity: float) -> None:
        """Expose what is served, and the rate that it was tuned to, 0 for none."""
        self._metrics["model_info"].count(*self._labels, digest, format).value = 1
        if capacity:
            self._metrics["capacity_requests_per_second"].count(*self._labels).value = capacity

    def doubt(self, reason: str) -> None:
        """Expose why nobody has proven what runs here."""
        self._metrics["model_unproven"].count(*self._labels, reason).value = 1

    def watch_cache(self, answers: VersionAnswers) -> None:
        """Read what came of looking for answers that are kept, at each scrape."""
        metrics, labels = self._metrics, self._labels
        metrics["cache_bytes"].watch(lambda: answers.held, *labels)
        metrics["cache_evictions"].watch(lambda: answers.evictions, *labels)
        for kind, counts in zip(KINDS, answers.outcomes, strict=True):
            for outcome in counts:
                read = partial(counts.__getitem__, outcome)
                metrics["cache_lookups"].watch(read, *labels, kind, outcome)

    def reported(self, records: object, seconds: float) -> None:
        """Take what a handler measured in one batch, which its worker had for `seconds`."""
        self._metrics.recorder.reported(read_records(records), seconds)

    def remove(self) -> None:
        """Forget the series of this model version."""
        self._metrics.forget(*self._labels)


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
        self._labels = labels = (model, version, kind)
        self._codes: dict[int, tuple[Count, ...]] = {}
        self.latency = metrics["request_latency_seconds"].histogram(*labels)
        self.queue_time = metrics["queue_time_seconds"].histogram(*labels)
        self.worker_queue = metrics["worker_queue_seconds"].histogram(*labels)
        self.handler = metrics["handler_seconds"].histogram(*labels)
        self.batch_size = metrics["batch_size"].histogram(*labels)
        self.refused_full = metrics["refused_requests"].count(*labels, "full")
        self.refused_late = metrics["refused_requests"].count(*labels, "deadline")
        self.refused_poison = metrics["refused_requests"].count(*labels, "poison")

    def watch_queue(self, rows: Callable[[], float]) -> None:
        """Read how many rows wait at each scrape."""
        self._metrics["queue_length"].watch(rows, *self._labels)

    def watch(self, in_flight: Callable[[], float], oldest_s: Callable[[], float]) -> None:
        """Read how many requests there are, and since when the first waits, at each scrape."""
        self._metrics["requests_in_flight"].watch(in_flight, *self._labels)
        self._metrics["queue_oldest_seconds"].watch(oldest_s, *self._labels)

    def watch_classes(self, rows: Callable[[], Sequence[int]]) -> Sequence[Histogram]:
        """Read how many rows of each class wait, and return what takes how long they did."""
        length, time = (
            self._metrics[name]
            for name in ("queue_length_by_priority", "queue_time_by_priority_seconds")
        )
        for at, name in enumerate(CLASSES):
            length.watch(lambda at=at: rows()[at], *self._labels, name)  # type: ignore[misc]
        return [time.histogram(*self._labels, name) for name in CLASSES]

    def ran(self, queue_us: int, handler_us: int) -> None:
        """Take the times that a worker's reply states."""
        self.worker_queue.observe(queue_us / 1e6)
        self.handler.observe(handler_us / 1e6)

    def answered(self, code: int, seconds: float, trace_id: str = "") -> None:
        """Count one answer and how long it took; a trace's id is the exemplar of its latency."""
        counts = self._codes.get(code)
        if counts is None:
            names = ("requests", "errors") if code >= 400 else ("requests",)
            counts = self._codes[code] = tuple(
                self._metrics[name].count(*self._labels, str(code)) for name in names
            )
        for count in counts:
            count.value += 1
        self.latency.observe(seconds)
        if self.watcher is not None:
            self.watcher(code, seconds)
        if trace_id:
            self.latency.exemplify(seconds, trace_id)

    def by_code(self) -> dict[int, int]:
        """Return how many answers had which status."""
        return {code: int(counts[0].value) for code, counts in self._codes.items()}

    def counted(self) -> Counted:
        """Return the counts of answers."""
        by_code = self.by_code()
        return Counted(
            sum(by_code.values()),
            sum(count for code, count in by_code.items() if code >= 400),
            int(self.refused_full.value + self.refused_late.value),
        )
