"""Every metric's name, unit and labels (Prometheus)."""

import asyncio
import platform
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import psutil

from modelyard.archiver.proven import installed_version
from modelyard.serve.dataplane.call import CLASSES

if TYPE_CHECKING:
    from modelyard.serve.dataplane.cache import VersionAnswers
    from modelyard.serve.dataplane.exposition import HandlerMetrics

KINDS = ("predict", "explain")
"""Label values by kind of job: index 0 and 1."""
LOOKUPS = ("hit", "miss", "joined", "bypass")
"""Label values: what came of looking for an answer that is kept."""

SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Bounds from the smallest models' answers to the longest time that a request has by default."""
FEW_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
"""Those of them that are exposed unless a scrape asks for all."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
SLICE = 100
"""Series that are written in one go, a quarter of a millisecond during which predictions wait."""
PAUSE_S = 0.001
"""Time from one to the next: a request needs the event loop several times. A thread is no way out,
since it holds the interpreter's lock for 5 ms at a time."""


COUNTER, GAUGE, HISTOGRAM = TYPES = "counter", "gauge", "histogram"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})
Values = tuple[str, ...]


class Histogram:
    """One series: observations counted by the first bound that is not below them.

    A bisection and two additions, no lock.
    """

    __slots__ = ("_bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, tuple[float, str]] = {}
        """Bucket → time and text of the latest value that is known where it comes from."""

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
        bucket, now = bisect_left(self._bounds, value), time.time()
        self.exemplars[bucket] = now, f' # {{trace_id="{trace_id}"}} {value} {now}'


class Count:
    """One series: a number that grows, or is set."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Count up."""
        self.value += amount


class Family:
    """One metric: a series for each combination of its labels' values; used on one thread.

    Args:
        kind: COUNTER, GAUGE or HISTOGRAM.
        name: name as it is exposed; of a counter without its `_total`.
        labels: their names.
        text: text for the HELP line.
        bounds: of a histogram the bounds of its buckets, rising; one for all that is larger is
            added.
        few: bounds that are exposed unless all are asked for; none makes it a summary, which has
            a count and a sum.
    """

    total, last = "_total", ""
    """End of a counter's name, and what stands behind the last label, but in OpenMetrics."""

    def __init__(
        self,
        kind: str,
        name: str,
        labels: Sequence[str],
        text: str,
        bounds: Sequence[float] = SECONDS,
        few: Collection[float] | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.labels = tuple(labels)
        self._text = text.translate(_HELP_ESCAPES)
        self._bounds = bounds
        self._shown = [
            [(at, f'le="{float(bound)}"') for at, bound in enumerate(bounds) if bound in each]
            for each in (bounds if few is None else few, bounds)
        ]
        """Place of each bucket, and its label, by whether all are asked for."""
        self._series: dict[Values, tuple[str, Any]] = {}
        """Labels' values → labels as they are written, and the series."""
        self._of: dict[Values, dict[Values, None]] = {}
        """First value → the values of its series: a thousand models come and go one by one."""

    def _new(self, values: Values, series: Any) -> Any:
        pairs = zip(self.labels, values, strict=True)
        labels = "".join([f'{label}="{value.translate(_ESCAPES)}",' for label, value in pairs])
        self._series[values] = labels, series
        self._of.setdefault(values[:1], {})[values] = None
        return series

    def count(self, *values: str) -> Count:
        """Return the series of these values, a new one where there is none."""
        known = self._series.get(values)
        return cast("Count", known[1] if known else self._new(values, Count()))

    def histogram(self, *values: str) -> Histogram:
        """Return the series of these values, a new one where there is none."""
        known = self._series.get(values)
        return cast("Histogram", known[1] if known else self._new(values, Histogram(self._bounds)))

    def watch(self, read: Callable[[], float | None], *values: str) -> None:
        """Read the series of these values at each scrape; None is not exposed."""
        self._new(values, read)

    def forget(self, *first: str) -> None:
        """Forget the series whose first values are these."""
        for values in [each for each in self._of.get(first[:1], ()) if each[: len(first)] == first]:
            self._drop(values)

    def _drop(self, values: Values) -> None:
        del self._series[values], self._of[values[:1]][values]
        if not self._of[values[:1]]:
            del self._of[values[:1]]

    def is_among(self, names: Collection[str]) -> bool:
        """Return whether one of these names it or its series, or there are none."""
        ends = ("", "_total", "_bucket", "_sum", "_count")
        return not names or any(f"{self.name}{end}" in names for end in ends)

    def texts(self, is_open: bool = False, has_all: bool = False) -> Iterator[str]:
        """Yield HELP and TYPE, and then the text of each series; of a histogram's all at once.

        Args:
            is_open: whether as OpenMetrics, which knows no counter without `_total`.
            has_all: whether with all buckets.
        """
        name, kind, shown = self.name, self.kind, self._shown[has_all]
        if kind == COUNTER:
            name += self.total
            kind = "unknown" if is_open and not self.total else kind
        elif kind == HISTOGRAM and not shown:
            kind = "summary"
        about = self.name if is_open else name
        yield f"# HELP {about} {self._text}\n# TYPE {about} {kind}"
        for labels, series in list(self._series.values()):
            braced = f"{{{labels[:-1]}{'' if is_open else self.last}}}" if labels else ""
            if isinstance(series, Histogram):
                if (counts := list(accumulate(map(float, series.counts))))[-1]:
                    lines = self._buckets(series, counts, labels, has_all, is_open) if shown else ()
                    yield "\n".join((*lines, f"{name}_count{braced} {counts[-1]}",
                                     f"{name}_sum{braced} {series.total}"))  # fmt: skip
            elif (value := series.value if isinstance(series, Count) else series()) is not None:
                yield f"{name}{braced} {value}"

    def _buckets(
        self, series: Histogram, counts: Sequence[float], labels: str, has_all: bool, is_open: bool
    ) -> Iterator[str]:
        """Yield the line of each bucket; as OpenMetrics with the latest value of known origin."""
        start, before = f"{self.name}_bucket{{{labels}", -1
        for at, bound in (*self._shown[has_all], (len(counts) - 1, 'le="+Inf"')):
            line = f"{start}{bound}{'' if is_open else self.last}}} {counts[at]}"
            if is_open and series.exemplars:
                of = [each for number, each in series.exemplars.items() if before < number <= at]
                line += max(of, default=(0.0, ""))[1]
                before = at
            yield line


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
     "From the whole body read to the answer ready, in seconds.", SECONDS, FEW_SECONDS),
    (HISTOGRAM, "queue_time_seconds", KIND,
     "From arrival in the queue to hand-over to a worker, in seconds.", SECONDS, ()),
    (HISTOGRAM, "worker_queue_seconds", KIND,
     "From hand-over to a worker to the start of the batch there, in seconds.", SECONDS, ()),
    (HISTOGRAM, "handler_seconds", KIND,
     "The handler's call that answered the request, in seconds.", SECONDS, ()),
    (HISTOGRAM, "batch_size", KIND,
     "Rows in one handler call: requests, or those of a request of several.", SIZES, ()),
    (GAUGE, "queue_length", KIND,
     "Rows waiting now: requests, or those of a request of several."),
    (GAUGE, "queue_oldest_seconds", KIND,
     "How long the first request of the queue has waited."),
    (GAUGE, "queue_length_by_priority", PRIORITIZED,
     "Rows waiting now, of each class, once a request has named another than normal."),
    (HISTOGRAM, "queue_time_by_priority_seconds", PRIORITIZED,
     "The queue time of each class, once a request has named another than normal.", SECONDS, ()),
    (GAUGE, "requests_in_flight", KIND, "Requests that wait or are being answered now."),
    (COUNTER, "refused_requests", (*KIND, "reason"),
     "Requests refused because too many waited (full), none would be answered in its time "
     "(deadline), or they or others of their client had ended workers (poison)."),
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
    (GAUGE, "loaded_models", (), "Models that have workers, where they are loaded on demand."),
    (COUNTER, "model_loads", ("outcome",), "Loads of models at a request, by what came of them."),
    (COUNTER, "model_unloads", (), "Models that went to make room for others."),
    (COUNTER, "unrouted_requests", ("code",),
     "Requests for no registered model, or without the right to it, by HTTP status."),
    (GAUGE, "build_info", ("version", "python", "torch"), "1; the server's own versions."),
)  # fmt: skip
"""Kind, name, labels and text of each metric, of a histogram its bounds: `Family`."""
OF_PROCESS: tuple[tuple[str, str, str, Callable[[psutil.Process], float]], ...] = (
    (GAUGE, "virtual_memory_bytes", "Virtual memory.", lambda own: own.memory_info().vms),
    (GAUGE, "resident_memory_bytes", "Resident memory.", lambda own: own.memory_info().rss),
    (GAUGE, "start_time_seconds", "Start, since 1970.", lambda own: own.create_time()),
    (COUNTER, "cpu_seconds", "User and system time.", lambda own: sum(own.cpu_times()[:2])),
    (GAUGE, "open_fds", "Open files, sockets and pipes.", lambda own: own.num_fds()),
    (GAUGE, "max_fds", "Most of these.", lambda own: own.rlimit(psutil.RLIMIT_NOFILE)[0]),
)
"""What is exposed of the server's process, by the names that every client library gives it."""


class Metrics:
    """The metrics of one server. Labels come from registered models only, so they are bounded."""

    def __init__(
        self, recorder: "HandlerMetrics | None" = None, observer: CallObserver | None = None
    ) -> None:
        from modelyard.serve.dataplane.exposition import HandlerMetrics  # builds on this module

        self.recorder = recorder or HandlerMetrics(socket.gethostname())
        self.observer = observer
        self.families: dict[str, Family] = {}
        """Name as it is exposed → metric."""
        for about in METRICS:
            self.add(*about)
        ours, torch = map(installed_version, ("modelyard", "torch"))
        self["build_info"].count(ours, platform.python_version(), torch).inc()
        for kind, name, text, read in OF_PROCESS:
            self.add(kind, name, (), text, prefix="process_").watch(partial(read, psutil.Process()))

    def add(self, kind: str, name: str, *about: Any, prefix: str = "modelyard_") -> Family:
        """Add a metric, as `Family` describes it."""
        name = prefix + name
        return self.families.setdefault(name, Family(kind, name, *about))

    def __getitem__(self, name: str) -> Family:
        """Return the metric of a name of METRICS."""
        return self.families[f"modelyard_{name}"]

    def forget(self, model: str, version: str) -> None:
        """Forget the series of a model version."""
        self.recorder.forget(model)
        for about in METRICS:
            self[about[1]].forget(model, version)

    async def gather(
        self, names: Collection[str] = (), is_open: bool = False, has_all: bool = False
    ) -> str:
        """Return everything as Prometheus text, written SLICE series at a time.

        Args:
            names: only these metrics, unless there are none.
            is_open: whether as OpenMetrics, which has the exemplars.
            has_all: whether with all buckets of every histogram.
        """
        exposed = self.recorder.exposed(self.families.values())
        families = [each for each in exposed if each.is_among(names)]
        texts = chain.from_iterable(each.texts(is_open, has_all) for each in families)
        found = ["\n".join(islice(texts, SLICE))]
        while found[-1]:  # what else there is goes first
            await asyncio.sleep(PAUSE_S)
            found.append("\n".join(islice(texts, SLICE)))
        return "\n".join((*found[:-1], "# EOF\n" if is_open else ""))


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

    def watch_cache(self, answers: "VersionAnswers") -> None:
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
        self._metrics.recorder.reported(records, seconds)

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
        self.batches: dict[int, list[float]] = {}
        """Rows of a handler's call → how many, and their seconds; not of more rows than SIZES."""
        self.failed_s = 0.0
        """What the latency has of answers with status 400 or above."""
        self.refused_full, self.refused_late, self.refused_poison = Count(), Count(), Count()
        counts = (self.refused_full, self.refused_late, self.refused_poison)
        for reason, count in zip(("full", "deadline", "poison"), counts, strict=True):
            read = partial(lambda count: count.value or None, count)
            metrics["refused_requests"].watch(read, *labels, reason)

    def watch(self, name: str, read: Callable[[], float]) -> None:
        """Read a value at each scrape; of explanations once there was one, as most have none."""
        is_shown = self._labels[2] == KINDS[0]
        self._metrics[name].watch(
            lambda: read() or (0.0 if is_shown or self._codes else None), *self._labels
        )

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

    def ran_batch(self, rows: int, seconds: float) -> None:
        """Take one call of the handler."""
        self.batch_size.observe(rows)
        if rows <= SIZES[-1]:
            took = self.batches.get(rows) or self.batches.setdefault(rows, [0, 0.0])
            took[0] += 1
            took[1] += seconds

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
        if code >= 400:
            self.failed_s += seconds
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
        errors = sum(count for code, count in by_code.items() if code >= 400)
        refused = int(self.refused_full.value + self.refused_late.value)
        return Counted(sum(by_code.values()), errors, refused)
