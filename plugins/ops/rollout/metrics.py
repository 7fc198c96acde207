"""What is exposed of roll-outs (Prometheus)."""

from __future__ import annotations

from typing import Any

from modelyard.plugins.ops.rollout.record import Record
from modelyard.serve.dataplane.metrics import COUNTER, GAUGE, Family, Metrics

_LABELS = ("model", "candidate")
_KINDS: dict[str, tuple[Any, ...]] = {
    "compared": (COUNTER, "Answers that were compared, by verdict.", "verdict"),
    "noise": (COUNTER, "Second answers of the live version, by verdict.", "verdict"),
    "shadow_dropped": (COUNTER, "Copies that were not compared, by reason.", "reason"),
    "returned": (COUNTER, "Candidates that were taken back after they had answered."),
    "state": (GAUGE, "1 for the state that a roll-out is in.", "state"),
    "canary_share": (GAUGE, "Share of the requests that the candidate answers."),
}
"""Name → its kind, its text, and its label beside those of all."""


def rollout_families(metrics: Metrics) -> dict[str, Family]:
    """Return the metrics of all roll-outs of one server, by name."""
    return {
        name: metrics.add(kind, f"rollout_{name}", (*_LABELS, *more), text)
        for name, (kind, text, *more) in _KINDS.items()
    }


class RolloutMetrics:
    """The metrics of one roll-out."""

    def __init__(self, families: dict[str, Family], record: Record) -> None:
        self._families = families
        self._values = record.model, record.candidate.version
        self._state = ""
        self.count("returned", by=0)

    def count(self, name: str, *more: str, by: int = 1) -> None:
        """Count something."""
        self._families[name].count(*self._values, *more).inc(by)

    def entered(self, record: Record) -> None:
        """Expose the state, and what share the candidate answers."""
        state, share = self._families["state"], self._families["canary_share"]
        if self._state:
            state.count(*self._values, self._state).value = 0
        self._state = record.state
        state.count(*self._values, self._state).value = 1
        share.count(*self._values).value = record.share

    def remove(self) -> None:
        """Forget the series."""
        for family in self._families.values():
            family.forget(*self._values)
