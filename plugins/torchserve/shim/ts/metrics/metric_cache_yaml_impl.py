"""A metrics cache that metrics.yaml declares."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from modelyard.handlers.context import Context
from modelyard.handlers.metrics import Measurement, Record
from ts.metrics import metric_cache_errors as errors
from ts.metrics.caching_metric import CachingMetric
from ts.metrics.metric_cache_abstract import MetricCacheAbstract, Requests
from ts.metrics.metric_type_enum import MetricTypes

logger = logging.getLogger(__name__)


class MetricsCacheYamlImpl(MetricCacheAbstract):
    """Metrics by type and name, whose values go to the log; reporting one declares it.

    `initialize_cache` declares what the file says.

    Args:
        config_file_path: TorchServe's metrics.yaml.

    Raises:
        MetricsCacheTypeError: no path.
        MetricsCacheIOError: the file cannot be read.
        MetricsCachePyYamlError: it is not YAML.
        GeneralMetricsCacheError: it is not text.
    """

    record: Callable[[Record], None] | None = None
    """Takes every value instead of the log."""

    def __init__(self, config_file_path: str) -> None:
        super().__init__()
        _check_type("config_file_path", config_file_path or None, str)
        self.config_file_path = config_file_path
        try:
            self._declared: Any = yaml.safe_load(Path(config_file_path).read_text("utf-8"))
        except OSError as error:
            raise errors.MetricsCacheIOError(
                f"{config_file_path} cannot be read: {error}"
            ) from error
        except yaml.YAMLError as error:
            raise errors.MetricsCachePyYamlError(
                f"{config_file_path} is not YAML: {error}"
            ) from error
        except UnicodeDecodeError as error:
            raise errors.GeneralMetricsCacheError(f"{config_file_path}: {error}") from error

    def initialize_cache(self) -> None:
        """Declare the file's `model_metrics`.

        Raises:
            MetricsCacheKeyError: the section, a type or an entry is not there.
            MetricsCacheValueError: the section is empty.
        """
        try:
            declared = self._declared["model_metrics"]
        except (KeyError, TypeError) as error:
            raise errors.MetricsCacheKeyError(
                "metrics.yaml has no section model_metrics"
            ) from error
        if not declared:
            raise errors.MetricsCacheValueError("model_metrics of metrics.yaml is empty")
        self.declare(declared)

    def declare(self, model_metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Declare metrics as metrics.yaml lists them: by type, with name, unit and dimensions.

        Raises:
            MetricsCacheKeyError: a type that does not exist, or an entry that is missing.
        """
        for kind, metrics in model_metrics.items():
            try:
                metric_type = MetricTypes(kind)
            except ValueError as error:
                known = ", ".join(known.value for known in MetricTypes)
                raise errors.MetricsCacheKeyError(
                    f"{kind!r} is not a type; known are {known}"
                ) from error
            for metric in metrics or ():
                try:
                    name, unit, dimensions = metric["name"], metric["unit"], metric["dimensions"]
                except KeyError as error:
                    raise errors.MetricsCacheKeyError(
                        f"{metric} of {kind} lacks {error}"
                    ) from error
                self.add_metric_to_cache(name, unit, dimensions, metric_type)

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> CachingMetric:
        """Declare a metric; one of that type and name is replaced.

        Raises:
            MetricsCacheTypeError: an argument is of the wrong type.
        """
        _check_type("metric_name", metric_name, str)
        _check_type("unit", unit, str)
        _check_type("metric_type", metric_type, MetricTypes)
        if dimension_names:
            _check_type("dimension_names", dimension_names, list)
        metrics = self.cache.setdefault(metric_type, {})
        if metric_name in metrics:
            logger.warning("the %s %s is declared again", metric_type.value, metric_name)
        metric = CachingMetric(metric_name, unit, dimension_names, metric_type, self.record)
        metrics[metric_name] = metric
        return metric

    def get_metric(
        self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER
    ) -> CachingMetric:
        """Return a declared metric.

        Raises:
            MetricsCacheKeyError: there is none of that type and name.
            MetricsCacheTypeError: an argument is of the wrong type.
        """
        _check_type("metric_name", metric_name, str)
        _check_type("metric_type", metric_type, MetricTypes)
        try:
            metric: CachingMetric = self.cache[metric_type][metric_name]
            return metric
        except KeyError as error:
            raise errors.MetricsCacheKeyError(
                f"there is no {metric_type.value} {metric_name!r}; declare it first with "
                "add_metric_to_cache, or report it with add_metric"
            ) from error

    def _report(self, measured: Measurement) -> None:
        named, kind = self.labels(measured), measured.kind
        if isinstance(kind, str):
            kind = MetricTypes(kind)
        try:
            metric = self.get_metric(measured.name, kind)
        except errors.MetricsCacheKeyError:
            metric = self.add_metric_to_cache(measured.name, measured.unit, list(named), kind)
        metric.add_or_update(measured.value, list(named.values()), measured.request_id)

    def cache_keys(self) -> list[str]:
        """List what is declared, as `type:name`."""
        return [f"{kind.value}:{name}" for kind, metrics in self.cache.items() for name in metrics]


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


def _check_type(name: str, value: object, expected: type[Any]) -> None:
    if not isinstance(value, expected):
        raise errors.MetricsCacheTypeError(f"{name} is {value!r}; expected a {expected.__name__}")
