"""A metric that reports each value as it comes."""

import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from modelyard.handlers.metrics import UNITS, Measurement, Record
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes

logger = logging.getLogger(__name__)


class CachingMetric:
    """A declared metric that hands each value to `record`, or to the log where that is None.

    Attributes:
        unit: its name in output, as "Milliseconds".
        dimension_names: the labels that every value of it has, in order.
    """

    def __init__(
        self,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
        record: Callable[[Record], None] | None = None,
    ) -> None:
        self.metric_name = metric_name
        self.unit = UNITS.get(unit, unit)
        self.dimension_names = list(dimension_names or [])
        self.metric_type = metric_type
        self._record = record

    def add_or_update(
        self, value: Any, dimension_values: Sequence[Any] = (), request_id: str | None = ""
    ) -> None:
        """Report a value; one that cannot be is an error in the log, never one of the handler.

        Args:
            value: a number; of a counter not below 0.
            dimension_values: values as many as there are dimension names, in their order.
            request_id: the requests that it is about, separated by commas.
        """
        values = list(dimension_values or ())
        dimensions = ",".join(
            str(Dimension(*pair)) for pair in zip(self.dimension_names, values, strict=False)
        )
        if problem := self._problem(value, values):
            logger.error(
                "[METRICS]Failed to update metric with name:%s and dimensions: %s "
                "with value: %s: %s",
                *(self.metric_name, dimensions, value, problem),
            )
        elif self._record is None:
            self.emit_metrics(request_id, value, dimensions)
        else:
            about = self.metric_name, value, self.unit, request_id, (), self.metric_type
            labels = dict(zip(self.dimension_names, values, strict=True))
            self._record(Measurement(*about).record(labels))

    def update(
        self, value: Any, request_id: str = "", dimensions: Sequence[Dimension] = ()
    ) -> None:
        """Report a value with other dimensions than it was declared with, which are replaced."""
        logger.warning("the dimensions of %s are replaced", self.metric_name)
        self.dimension_names = [dimension.name for dimension in dimensions]
        self.add_or_update(value, [dimension.value for dimension in dimensions], request_id)

    def emit_metrics(self, request_id: str | None, value: Any, dimension_string: str) -> None:
        """Write a value to the log, in the form that TorchServe's log readers know."""
        line = (
            f"[METRICS]{self.metric_name}.{self.unit}:{value}|#{dimension_string}|"
            f"#type:{self.metric_type.name}|#hostname:{socket.gethostname()},{int(time.time())}"
        )
        logger.info("%s,%s" if request_id else "%s", *filter(None, (line, request_id)))

    def _problem(self, value: Any, dimension_values: Sequence[Any]) -> str | None:
        if len(dimension_values) != len(self.dimension_names):
            return f"its dimensions are {self.dimension_names}, the values {dimension_values}"
        try:
            number = float(value)
        except (TypeError, ValueError):
            return "the value is not a number"
        if self.metric_type is MetricTypes.COUNTER and number < 0:
            return "a counter cannot go down"
        return None
