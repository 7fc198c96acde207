"""The metric of `MetricsStore`."""

import socket
import time
from collections.abc import Sequence
from typing import Any

from ts.metrics.caching_metric import CachingMetric
from ts.metrics.dimension import Dimension


class Metric:
    """One value of a metric, which each `update` writes to the log."""

    def __init__(
        self,
        name: str,
        value: Any,
        unit: str,
        dimensions: Sequence[Dimension],
        request_id: str | None = None,
        metric_method: str | None = None,
    ) -> None:
        self.dimensions = dimensions
        self._metric = CachingMetric(name, unit, [dimension.name for dimension in dimensions])
        self.name = name
        self.value = value
        self.unit = self._metric.unit
        self.metric_type = self._metric.metric_type
        self.metric_method = metric_method
        self.request_id = request_id

    def update(self, value: Any) -> None:
        """Report a value."""
        values = [dimension.value for dimension in self.dimensions]
        self._metric.add_or_update(value, values, self.request_id)

    def reset(self) -> None:
        """Report 0."""
        self.update(0)

    def __str__(self) -> str:
        dimensions = ",".join(map(str, self.dimensions))
        line = f"{self.name}.{self.unit}:{self.value}|#{dimensions}"
        line += f"|#hostname:{socket.gethostname()},{int(time.time())}"
        return f"{line},{self.request_id}" if self.request_id else line

    def to_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return {
            "MetricName": self.name,
            "Value": self.value,
            "Unit": self.unit,
            "Dimensions": self.dimensions,
            "Timestamp": int(time.time()),
            "HostName": socket.gethostname(),
            "RequestId": self.request_id,
        }
