"""The methods of `context.metrics`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ts.metrics.dimension import Dimension
from ts.metrics.metric_cache_errors import MetricsCacheValueError
from ts.metrics.metric_type_enum import MetricTypes

Requests = Mapping[int, str] | str | None


class MetricCacheAbstract(ABC):
    """What reports metrics.

    Every `add_…` method takes `idx`, the index of a request in the batch (None stands for all of
    them), and `dimensions`, to which `ModelName` and `Level` are added.
    """

    def __init__(self, request_ids: Requests | Any = None, model_name: str | None = None) -> None:
        self.cache: dict[Any, Any] = {}
        self.store: list[Any] = []
        self.request_ids = request_ids
        self.model_name = model_name

    @abstractmethod
    def _report(
        self,
        name: str,
        value: Any,
        unit: str,
        request_id: str | None,
        dimensions: Sequence[Dimension],
        metric_type: MetricTypes,
    ) -> None:
        """Report a value; without a request id it belongs to no request."""

    def set_request_ids(self, request_ids: Requests) -> None:
        """Set which requests the next values are about."""
        self.request_ids = request_ids

    def add_metric(
        self,
        name: str,
        value: Any,
        unit: str,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        """Report a value of any unit."""
        self._report(name, value, unit, self._request(idx), dimensions, metric_type)

    def add_counter(
        self, name: str, value: Any, idx: int | None = None, dimensions: Sequence[Dimension] = ()
    ) -> None:
        """Report what a counter grows by."""
        self.add_metric(name, value, "count", idx, dimensions, MetricTypes.COUNTER)

    def add_time(
        self,
        name: str,
        value: Any,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Report a duration in ms or s.

        Raises:
            MetricsCacheValueError: another unit.
        """
        if unit not in ("ms", "s"):
            raise MetricsCacheValueError("the unit for a timed metric should be one of ['ms', 's']")
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_size(
        self,
        name: str,
        value: Any,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Report a size in B, kB, MB or GB.

        Raises:
            ValueError: another unit.
        """
        if unit not in ("MB", "kB", "GB", "B"):
            raise ValueError("The unit for size based metric is one of ['MB','kB', 'GB', 'B']")
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_percent(
        self,
        name: str,
        value: Any,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Report a percentage."""
        self.add_metric(name, value, "percent", idx, dimensions, metric_type)

    def add_error(self, name: str, value: Any, dimensions: Sequence[Dimension] = ()) -> None:
        """Report a value that belongs to no request."""
        self._report(name, value, "", None, dimensions, MetricTypes.COUNTER)

    def _request(self, idx: int | None) -> str | None:
        """Return the id of request `idx`, or all ids of the batch; None where there are none."""
        requests = self.request_ids
        if not isinstance(requests, Mapping):
            return requests
        if idx is not None and idx in requests:
            return requests[idx]
        return ",".join(requests.values())
