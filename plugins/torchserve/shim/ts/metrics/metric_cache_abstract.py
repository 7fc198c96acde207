"""The methods of `context.metrics`, which are those of every handler's."""

from collections.abc import Mapping
from typing import Any

from modelyard.handlers.metrics import Reporter
from ts.metrics.metric_cache_errors import MetricsCacheValueError

Requests = Mapping[int, str] | str | None


class MetricCacheAbstract(Reporter):
    """What reports metrics."""

    unit_error = MetricsCacheValueError

    def __init__(self, request_ids: Requests | Any = None, model_name: str | None = None) -> None:
        super().__init__(request_ids, model_name)
        self.cache: dict[Any, Any] = {}
        self.store: list[Any] = []

    def set_request_ids(self, request_ids: Requests) -> None:
        """Set which requests the next values are about."""
        self.request_ids = request_ids
