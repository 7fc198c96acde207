"""Every metric's name, unit and labels (Prometheus)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from modelyard.serve.dataplane.exposition import HandlerMetrics, Record, read_records
from modelyard.serve.dataplane.histogram import Histograms

KINDS = ("predict", "explain")
"""Label values by kind of job: index 0 and 1."""
REFUSED = ("full", "deadline")
"""Label values: why a request was refused."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
OUTCOMES = ("explained", "busy", "interrupted", "failed")
"""Label values: what became of a prediction that was drawn to be explained."""


class Recorder(Protocol):
    """What keeps the metrics of handlers, and whatever else a dialect measures."""

    is_alone: bool
    """Whether nothing but its text is exposed."""

    def reported(self, records: Iterable[Record], seconds: float) -> None:
        """Take what a handler measured in one batch, which its worker had for `seconds`."""

    def forget(self, model: str) -> None:
        """Drop the series of a model."""

    def text(self, names: Collection[str] = ()) -> str:
        """Return Prometheus text; only metrics of these names unless there are none."""


class CallObserver(Protocol):
    """What wants to know of each call for a model."""

    def accepted(self, model: str, version: str | None) -> None:
        """Count a request for a prediction or an explanation."""

    def inferred(self, model: str, version: str | None, queued_s: float, total_s: float) -> None:
        """Take note of an answer, not an error: how long it waited, and how long it took in all."""


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
        self.batch_size = observe("batch_size", "Requests in one handler call.", SIZES)
        self.queue_length = gauge("queue_length", "Requests waiting now.", kind)
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
        part = (*model, "part")
        self.explained = count(
            "explained_predictions",
            "Predictions drawn to be explained unasked, by what became of them.",
            (*model, "outcome"),
        )
        self.attribution_share = Histograms(
            "modelyard_attribution_share",
            "Share of a part of the input in the sum of an explanation's absolute attributions.",
            part,
            SHARES,
            registry,
        )
        self.attribution_reference = gauge(
            "attribution_reference", "Mean share of a part in the archive's reference.", part
        )
        self.attribution_drift = gauge(
            "attribution_drift",
            "Total variation distance of the latest shares' means to the archive's reference.",
            model,
        )
        self.unrouted = count(
            "unrouted_requests",
            "Requests for no registered model, or without the right to it, by HTTP status.",
            ("code",),
        )

    def text(self, names: Collection[str] = ()) -> str:
        """Return everything as Prometheus text; only these metrics unless there are none."""
        recorded = self.recorder.text(names)
        if self.recorder.is_alone:
            return recorded
        registry: Collector = self.registry.restricted_registry(names) if names else self.registry
        return recorded + generate_latest(registry).decode()


class VersionMetrics:
    """The metrics of one model version, label lookups done once."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        self._metrics = metrics
        self._labels = (model, version)
        self.kinds = tuple(KindMetrics(metrics, model, version, kind) for kind in KINDS)
        self.restarts = metrics.restarts.labels(model, version)
        self._drift: DriftMetrics | None = None

    def watch_workers(self, ready: Callable[[], float]) -> None:
        """Read the number of ready workers from `ready` at each scrape."""
        self._metrics.ready_workers.labels(*self._labels).set_function(ready)

    def watch_drift(self, reference: Mapping[str, float]) -> DriftMetrics:
        """Return the series of the parts whose mean shares a reference holds."""
        self._drift = DriftMetrics(self._metrics, self._labels, reference)
        return self._drift

    def reported(self, records: object, seconds: float) -> None:
        """Take what a handler measured in one batch, which its worker had for `seconds`."""
        self._metrics.recorder.reported(read_records(records), seconds)

    def remove(self) -> None:
        """Forget the series of this model version."""
        metrics = self._metrics
        metrics.recorder.forget(self._labels[0])
        metrics.restarts.remove(*self._labels)
        metrics.ready_workers.remove(*self._labels)
        for kind in self.kinds:
            kind.remove()
        if self._drift is not None:
            self._drift.remove()


class DriftMetrics:
    """What explanations that nobody asked for say of one model version.

    Its labels are the parts of the archive's reference, of which there are few.
    """

    def __init__(
        self, metrics: Metrics, labels: tuple[str, str], reference: Mapping[str, float]
    ) -> None:
        self._metrics = metrics
        self._labels = labels
        self.shares = {part: metrics.attribution_share.labels(*labels, part) for part in reference}
        for part, mean in reference.items():
            metrics.attribution_reference.labels(*labels, part).set(mean)
        self.distance = metrics.attribution_drift.labels(*labels)
        self.explained, self.busy, self.interrupted, self.failed = (
            metrics.explained.labels(*labels, outcome) for outcome in OUTCOMES
        )

    def remove(self) -> None:
        """Forget the series."""
        metrics, labels = self._metrics, self._labels
        for part in self.shares:
            metrics.attribution_share.remove(*labels, part)
            metrics.attribution_reference.remove(*labels, part)
        metrics.attribution_drift.remove(*labels)
        for outcome in OUTCOMES:
            metrics.explained.remove(*labels, outcome)


class KindMetrics:
    """The metrics of one model version and kind of job."""

    def __init__(self, metrics: Metrics, model: str, version: str, kind: str) -> None:
        self._metrics = metrics
        self._labels = (model, version, kind)
        self._codes: dict[int, tuple[Counter, ...]] = {}
        self.latency = metrics.latency.labels(*self._labels)
        self.queue_time = metrics.queue_time.labels(*self._labels)
        self.worker_queue = metrics.worker_queue.labels(*self._labels)
        self.handler = metrics.handler.labels(*self._labels)
        self.batch_size = metrics.batch_size.labels(*self._labels)
        self.queue_length = metrics.queue_length.labels(*self._labels)
        self.refused_full, self.refused_late = (
            metrics.refused.labels(*self._labels, reason) for reason in REFUSED
        )

    def ran(self, queue_us: int, handler_us: int) -> None:
        """Take the times that a worker's reply states."""
        self.worker_queue.observe(queue_us / 1e6)
        self.handler.observe(handler_us / 1e6)

    def answered(self, code: int, seconds: float) -> None:
        """Count one answer and how long it took."""
        counters = self._codes.get(code)
        if counters is None:
            metrics, labels = self._metrics, (*self._labels, str(code))
            families = (metrics.requests, metrics.errors) if code >= 400 else (metrics.requests,)
            counters = self._codes[code] = tuple(family.labels(*labels) for family in families)
        for counter in counters:
            counter.inc()
        self.latency.observe(seconds)

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
        ):
            family.remove(*labels)
        for reason in REFUSED:
            metrics.refused.remove(*labels, reason)
        for code in self._codes:
            metrics.requests.remove(*labels, str(code))
            if code >= 400:
                metrics.errors.remove(*labels, str(code))
