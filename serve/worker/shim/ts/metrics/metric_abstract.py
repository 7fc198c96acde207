"""What every metric of a cache has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.unit import Units

UNITS = Units().units


class MetricAbstract(ABC):
    """A declared metric.

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
    ) -> None:
        self.metric_name = metric_name
        self.unit = UNITS.get(unit, unit)
        self.dimension_names = list(dimension_names or [])
        self.metric_type = metric_type

    @abstractmethod
    def add_or_update(
        self, value: Any, dimension_values: Sequence[Any] = (), request_id: str | None = ""
    ) -> None:
        """Report a value: what a counter grows by, what a gauge is now, one observation."""
