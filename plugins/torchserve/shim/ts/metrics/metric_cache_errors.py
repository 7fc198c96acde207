"""What a metrics cache raises."""

import yaml


class GeneralMetricsCacheError(Exception):
    """metrics.yaml cannot be used, for a reason that no other class here names."""


class MetricsCacheIOError(OSError):
    """metrics.yaml cannot be read."""


class MetricsCachePyYamlError(yaml.YAMLError):
    """metrics.yaml is not YAML."""


class MetricsCacheTypeError(TypeError):
    """An argument is of the wrong type."""


class MetricsCacheValueError(ValueError):
    """A unit or a section that does not exist."""


class MetricsCacheKeyError(KeyError):
    """A metric or an entry that does not exist."""
