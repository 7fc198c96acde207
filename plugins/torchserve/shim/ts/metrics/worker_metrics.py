"""`context.metrics` of a worker."""

from collections.abc import Mapping, Sequence
from typing import Any

from modelyard.handlers.context import Context
from modelyard.handlers.metrics import Record
from ts.metrics.metric_cache_abstract import MetricCacheAbstract, Requests
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl


class WorkerMetrics(MetricsCacheYamlImpl):
    """A metrics cache that keeps every value until the worker's loop takes them.

    Args:
        context: context whose requests the values are about.
        declared: `model_metrics` of the server's metrics.yaml, None without one.
    """

    def __init__(
        self, context: Context, declared: Mapping[str, Sequence[Mapping[str, Any]]] | None
    ) -> None:
        self._context = context
        MetricCacheAbstract.__init__(self, model_name=context.model_name)
        self.declare(declared or {})

    @property  # the loop changes the context's requests with every batch
    def request_ids(self) -> Requests:
        """The requests of the current batch."""
        return self._context.request_ids

    @request_ids.setter
    def request_ids(self, value: Requests) -> None:
        pass

    def record(self, record: Record) -> None:
        """Keep a value for `drain`."""
        self.records.append(record)
