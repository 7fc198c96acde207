"""`from ts.metrics.metric_type_enum import MetricTypes`."""

import enum


class MetricTypes(enum.Enum):
    """What the values of a metric mean."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
