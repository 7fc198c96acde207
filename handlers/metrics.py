"""`context.metrics`: what a handler measures, which its worker sends on with the answers."""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from modelyard.handlers.context import Context

logger = logging.getLogger(__name__)

MOST_RECORDS = 10_000
"""More are not kept between two calls of `drain`; the oldest go first."""
UNITS: dict[str | None, str] = {
    "ms": "Milliseconds", "s": "Seconds", "percent": "Percent", "count": "Count",
    "MB": "Megabytes", "GB": "Gigabytes", "kB": "Kilobytes", "B": "Bytes", "": "unit", None: "unit",
}  # fmt: skip
"""Short unit → its name in output; a unit that is not here is its own name."""

Record = dict[str, Any]
"""name, value, unit, type, dimensions (name → value) and request_id (None without) of one value."""
Labels = Mapping[str, Any] | Sequence[Any]
"""Name → value, or objects with both."""


class Measurement(NamedTuple):
    """A value that a handler reports."""

    name: str
    value: Any
    unit: str
    request_id: str | None
    """Id of the requests that it is about; None: it belongs to no request."""
    dimensions: Labels
    kind: Any

    def record(self, labels: Mapping[str, Any]) -> Record:
        """Return it as a worker sends it; raise TypeError or ValueError where it is not one."""
        return {
            "name": self.name,
            "value": self.value if type(self.value) in (int, float) else float(self.value),
            "unit": UNITS.get(self.unit, self.unit),
            "type": getattr(self.kind, "value", self.kind),
            "dimensions": {name: str(value) for name, value in labels.items()},
            "request_id": self.request_id or None,
        }


class Reporter(ABC):
    """The methods by which handlers report values.

    Every `add_…` method takes `idx`, the index of a request in the batch (None stands for all of
    them), and `dimensions`, labels to which `ModelName` and `Level` are added. The type of a metric
    is counter, gauge or histogram.
    """

    unit_error: type[ValueError] = ValueError
    """What a unit raises that a method does not take."""

    def __init__(self, request_ids: Any = None, model_name: str | None = None) -> None:
        self.request_ids = request_ids
        self.model_name = model_name
        self.records: deque[Record] = deque(maxlen=MOST_RECORDS)
        """What was reported since the last `drain`."""

    @abstractmethod
    def _report(self, measured: Measurement) -> None:
        """Take a value."""

    def drain(self) -> list[Record]:
        """Return what was reported since the last call, in order, and forget it."""
        records = list(self.records)
        self.records.clear()
        return records

    def add_metric(
        self, name: str, value: Any, unit: str, idx: int | None = None, dimensions: Labels = (),
        metric_type: Any = "counter",
    ) -> None:  # fmt: skip
        """Report a value of any unit."""
        request_id = self._request(idx)
        self._report(Measurement(name, value, unit, request_id, dimensions, metric_type))

    def add_counter(
        self, name: str, value: Any, idx: int | None = None, dimensions: Labels = ()
    ) -> None:
        """Report what a counter grows by."""
        self.add_metric(name, value, "count", idx, dimensions)

    def add_time(
        self, name: str, value: Any, idx: int | None = None, unit: str = "ms",
        dimensions: Labels = (), metric_type: Any = "gauge",
    ) -> None:  # fmt: skip
        """Report a duration in ms or s; raise ValueError for another unit."""
        if unit not in ("ms", "s"):
            raise self.unit_error("the unit for a timed metric should be one of ['ms', 's']")
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_size(
        self, name: str, value: Any, idx: int | None = None, unit: str = "MB",
        dimensions: Labels = (), metric_type: Any = "gauge",
    ) -> None:  # fmt: skip
        """Report a size in B, kB, MB or GB; raise ValueError for another unit."""
        if unit not in ("MB", "kB", "GB", "B"):
            raise self.unit_error("The unit for size based metric is one of ['MB','kB', 'GB', 'B']")
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_percent(
        self, name: str, value: Any, idx: int | None = None, dimensions: Labels = (),
        metric_type: Any = "gauge",
    ) -> None:  # fmt: skip
        """Report a percentage."""
        self.add_metric(name, value, "percent", idx, dimensions, metric_type)

    def add_error(self, name: str, value: Any, dimensions: Labels = ()) -> None:
        """Report a value that belongs to no request."""
        self._report(Measurement(name, value, "", None, dimensions, "counter"))

    def labels(self, measured: Measurement) -> dict[str, Any]:
        """Return the labels of a value: those that were named, the model's and the level."""
        given, belongs = measured.dimensions or (), measured.request_id is not None
        if not isinstance(given, Mapping):
            given = {each.name: each.value for each in given}
        named = dict(given)
        if belongs:
            named.setdefault("ModelName", self.model_name)
        named.setdefault("Level", "Model" if belongs else "Error")
        return named

    def _request(self, idx: int | None) -> Any:
        """Return the id of request `idx`, or all ids of the batch; None where there are none."""
        requests = self.request_ids
        if not isinstance(requests, Mapping):
            return requests
        if idx is not None and idx in requests:
            return requests[idx]
        return ",".join(requests.values())


class Metrics(Reporter):
    """Keeps every value until the worker's loop takes it.

    Args:
        context: context whose requests the values are about.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(None, context.model_name)
        self._context = context

    def _request(self, idx: int | None) -> Any:
        self.request_ids = self._context.request_ids  # the loop replaces them with every batch
        return super()._request(idx)

    def _report(self, measured: Measurement) -> None:
        try:
            self.records.append(measured.record(self.labels(measured)))
        except (TypeError, ValueError):
            text = "the metric %s is %r; expected a number"
            logger.error(text, measured.name, measured.value)
