"""What a cell's server measures, among Ray's own metrics.

They are scraped where a cluster is watched already, and carry the cell as `replica`: no port of a
cell needs to be found.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import Metric
from ray.serve.metrics import Gauge

MOST_SERIES = 5000
"""Most series of a cell; what handlers measure may have labels without end."""
OF_THE_PROCESS = ("process_", "python_")
"""Ray has its own of its processes."""


class Publisher:
    """Gauges of Ray under the server's names: rates and quantiles are of samples, not of kinds."""

    def __init__(self) -> None:
        self._gauges: dict[str, Any] = {}

    def __call__(self, families: Iterable[Metric]) -> None:
        """Set a gauge for each sample."""
        samples = [
            (sample, family.documentation)
            for family in families
            if not family.name.startswith(OF_THE_PROCESS)
            for sample in family.samples
        ]
        for sample, documentation in samples[:MOST_SERIES]:
            gauge = self._gauges.get(sample.name)
            if gauge is None:
                gauge = Gauge(sample.name, documentation, tuple(sample.labels))
                self._gauges[sample.name] = gauge
            gauge.set(sample.value, sample.labels)
