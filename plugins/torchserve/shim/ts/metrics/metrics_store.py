"""The metrics of TorchServe up to 0.6, which unit tests of handlers still use."""

from modelyard.handlers.metrics import Measurement
from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric
from ts.metrics.metric_cache_abstract import MetricCacheAbstract


class MetricsStore(MetricCacheAbstract):
    """Metrics in a list, `store`.

    Args:
        request_ids: index in the batch → request id.
        model_name: the dimension `ModelName`.
    """

    def _report(self, measured: Measurement) -> None:
        name, value, unit, request_id, dimensions, _ = measured
        if dimensions and not isinstance(dimensions, list):
            raise ValueError(f"dimensions is {dimensions!r}; expected a list of Dimension")
        level = [Dimension("Level", "Error")]
        if request_id is not None:
            level = [Dimension("ModelName", self.model_name), Dimension("Level", "Model")]
        named = [*(dimensions or []), *level]
        key = "-".join([name, unit, str(request_id), *map(str, named)])
        if key in self.cache:
            self.cache[key].update(value)
        else:
            method = "counter" if unit == "count" else None
            self.cache[key] = Metric(name, value, unit, named, request_id, method)
            self.store.append(self.cache[key])
