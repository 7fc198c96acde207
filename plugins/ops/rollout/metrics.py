"""What is exposed of roll-outs (Prometheus)."""

from __future__ import annotations

from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge

from modelyard.plugins.ops.rollout.record import Record

LABELS = ("model", "candidate")
COUNTS = {
    "compared": (
        "Answers of a roll-out's candidate that were compared, by verdict.",
        "verdict",
    ),
    "noise": ("Requests that the live version answered a second time, by verdict.", "verdict"),
    "shadow_dropped": (
        "Requests that were drawn for the candidate and not compared, by reason.",
        "reason",
    ),
    "returned": ("Candidates that were taken back after they had answered.",),
}
"""Name of a counter → its text, and its label beside those of all."""


class Series:
    """The metrics of all roll-outs of one server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counts = {
            name: Counter(f"modelyard_rollout_{name}", text, (*LABELS, *more), registry=registry)
            for name, (text, *more) in COUNTS.items()
        }
        self.state = Gauge(
            "modelyard_rollout_state",
            "1 for the state that a roll-out is in.",
            (*LABELS, "state"),
            registry=registry,
        )
        self.share = Gauge(
            "modelyard_rollout_canary_share",
            "Share of the requests that the candidate answers.",
            LABELS,
            registry=registry,
        )


class RolloutMetrics:
    """The metrics of one roll-out."""

    def __init__(self, series: Series, record: Record) -> None:
        self._series = series
        self._labels = record.model, record.candidate.version
        self._state = ""
        self._child = cache(lambda name, *more: series.counts[name].labels(*self._labels, *more))
        series.counts["returned"].labels(*self._labels)

    def count(self, name: str, *more: str, by: int = 1) -> None:
        """Count something of `COUNTS`."""
        self._child(name, *more).inc(by)

    def entered(self, record: Record) -> None:
        """Expose the state, and what share the candidate answers."""
        if self._state:
            self._series.state.labels(*self._labels, self._state).set(0)
        self._state = record.state
        self._series.state.labels(*self._labels, record.state).set(1)
        self._series.share.labels(*self._labels).set(record.share)

    def remove(self) -> None:
        """Forget the series."""
        for family in (*self._series.counts.values(), self._series.state, self._series.share):
            family.remove_by_labels(dict(zip(LABELS, self._labels, strict=True)))
