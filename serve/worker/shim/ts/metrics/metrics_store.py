"""The metrics of TorchServe up to 0.6, which unit tests of handlers still use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric


class MetricsStore:
    """Metrics in a list, `store`; the methods are those of `context.metrics`.

    Args:
        request_ids: index in the batch → request id.
        model_name: the dimension `ModelName`.
    """

    def __init__(self, request_ids: Mapping[int, str] | Any, model_name: str) -> None:
        self.store: list[Metric] = []
        self.cache: dict[str, Metric] = {}
        self.request_ids = request_ids
        self.model_name = model_name

    def add_counter(
        self,
        name: str,
        value: Any,
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
    ) -> None:
        """Report what a counter grows by."""
        self._report(name, value, "count", self._request(idx), dimensions, "counter")

    def add_time(
        self,
        name: str,
        value: Any,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Sequence[Dimension] | None = None,
        metric_type: Any = None,
    ) -> None:
        """Report a duration in ms or s.

        Raises:
            ValueError: another unit.
        """
        if unit not in ("ms", "s"):
            raise ValueError("the unit for a timed metric should be one of ['ms', 's']")
        self._report(name, value, unit, self._request(idx), dimensions)

    def add_size(
        self,
        name: str,
        value: Any,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Sequence[Dimension] | None = None,
        metric_type: Any = None,
    ) -> None:
        """Report a size in B, kB, MB or GB.

        Raises:
            ValueError: another unit.
        """
        if unit not in ("MB", "kB", "GB", "B"):
            raise ValueError("The unit for size based metric is one of ['MB','kB', 'GB', 'B']")
        self._report(name, value, unit, self._request(idx), dimensions)

    def add_percent(
        self,
        name: str,
        value: Any,
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
        metric_type: Any = None,
    ) -> None:
        """Report a percentage."""
        self._report(name, value, "percent", self._request(idx), dimensions)

    def add_error(
        self, name: str, value: Any, dimensions: Sequence[Dimension] | None = None
    ) -> None:
        """Report a value, also text, that belongs to no request."""
        self._report(name, value, "", None, dimensions)

    def add_metric(
        self,
        name: str,
        value: Any,
        unit: str,
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
        metric_type: Any = None,
    ) -> None:
        """Report a value of any unit."""
        self._report(name, value, unit, self._request(idx), dimensions)

    def _request(self, idx: int | None) -> Any:
        if not isinstance(self.request_ids, Mapping):
            return self.request_ids
        if idx is not None and idx in self.request_ids:
            return self.request_ids[idx]
        return ",".join(self.request_ids.values())

    def _report(
        self,
        name: str,
        value: Any,
        unit: str,
        request_id: Any,
        dimensions: Sequence[Dimension] | None,
        method: str | None = None,
    ) -> None:
        if dimensions is not None and not isinstance(dimensions, list):
            raise ValueError(f"dimensions is {dimensions!r}; expected a list of Dimension")
        level = [Dimension("Level", "Error")]
        if request_id is not None:
            level = [Dimension("ModelName", self.model_name), Dimension("Level", "Model")]
        named = [*(dimensions or []), *level]
        key = "-".join([name, unit, str(request_id), *map(str, named)])
        if key in self.cache:
            self.cache[key].update(value)
        else:
            self.cache[key] = Metric(name, value, unit, named, request_id, method)
            self.store.append(self.cache[key])
