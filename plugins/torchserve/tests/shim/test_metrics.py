"""`context.metrics`, and the metrics classes that authors' unit tests use."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ts.metrics.dimension import Dimension
from ts.metrics.metric_cache_errors import (
    MetricsCacheIOError,
    MetricsCacheKeyError,
    MetricsCachePyYamlError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
)
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl, WorkerMetrics
from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.metrics_store import MetricsStore

from modelyard.handlers.context import Context
from modelyard.handlers.metrics import MOST_RECORDS

MakeContext = Callable[..., Context]

MODEL = {"ModelName": "m", "Level": "Model"}


@pytest.mark.parametrize(
    ("report", "unit", "kind"),
    [
        (lambda m: m.add_counter("n", 2), "Count", "counter"),
        (lambda m: m.add_time("n", 2), "Milliseconds", "gauge"),
        (lambda m: m.add_time("n", 2, None, "s"), "Seconds", "gauge"),
        (lambda m: m.add_size("n", 2), "Megabytes", "gauge"),
        (lambda m: m.add_size("n", 2, None, "kB"), "Kilobytes", "gauge"),
        (lambda m: m.add_size("n", 2, None, "GB"), "Gigabytes", "gauge"),
        (lambda m: m.add_size("n", 2, None, "B"), "Bytes", "gauge"),
        (lambda m: m.add_percent("n", 2), "Percent", "gauge"),
        (lambda m: m.add_metric("n", 2, "tokens"), "tokens", "counter"),
        (lambda m: m.add_metric("n", 2, ""), "unit", "counter"),
        (
            lambda m: m.add_metric("n", 2, "ms", None, [], MetricTypes.HISTOGRAM),
            "Milliseconds",
            "histogram",
        ),
    ],
)
def test_a_record_says_all_of_a_value(
    make_context: MakeContext, report: Callable[[Any], None], unit: str, kind: str
) -> None:
    metrics = make_context(requests=2).metrics
    report(metrics)
    expected = {"name": "n", "value": 2, "unit": unit, "type": kind, "dimensions": MODEL}
    assert metrics.drain() == [{**expected, "request_id": "id0,id1"}]
    assert metrics.drain() == []


def test_a_value_may_be_about_one_request_or_none(make_context: MakeContext) -> None:
    metrics = make_context(requests=2).metrics
    metrics.add_counter("one", 1, 1)
    metrics.add_error("none", 1)
    records = [(r["request_id"], r["dimensions"]) for r in metrics.drain()]
    assert records == [("id1", MODEL), (None, {"Level": "Error"})]


def test_dimensions_of_the_authors_come_first_and_their_list_stays(
    make_context: MakeContext,
) -> None:
    metrics = make_context().metrics
    own = [Dimension("Step", 3)]
    metrics.add_counter("n", 1, dimensions=own)
    assert list(metrics.drain()[0]["dimensions"].items()) == [("Step", "3"), *MODEL.items()]
    assert len(own) == 1
    metrics.add_counter("other", 1)
    assert metrics.drain()[0]["dimensions"] == MODEL


def test_a_declared_metric_has_the_dimensions_that_were_declared(make_context: MakeContext) -> None:
    metrics = make_context().metrics
    declared = metrics.add_metric_to_cache("n", "count", ["Route"], MetricTypes.GAUGE)
    declared.add_or_update(2, ["main"])
    assert metrics.get_metric("n", MetricTypes.GAUGE) is declared
    declared.update(3, "id7", [Dimension("Other", "x")])
    records = [(r["value"], r["dimensions"], r["request_id"]) for r in metrics.drain()]
    assert records == [(2, {"Route": "main"}, None), (3, {"Other": "x"}, "id7")]


def test_the_servers_metrics_are_declared(make_context: MakeContext) -> None:
    declared = {"gauge": [{"name": "Size", "unit": "kB", "dimensions": ["ModelName", "Level"]}]}
    metrics = WorkerMetrics(make_context(), declared)
    metrics.get_metric("Size", MetricTypes.GAUGE).add_or_update(1, ["m", "Model"])
    assert metrics.drain()[0]["unit"] == "Kilobytes"


@pytest.mark.parametrize(
    ("value", "dimensions", "message"),
    [
        (1, ["a", "b"], r"its dimensions are \['Route'\], the values \['a', 'b'\]"),
        (-1, ["a"], "a counter cannot go down"),
        ("much", ["a"], "the value is not a number"),
    ],
    ids=["dimensions", "negative", "text"],
)
def test_a_value_that_cannot_be_is_logged_and_never_raised(
    make_context: MakeContext,
    caplog: pytest.LogCaptureFixture,
    value: Any,
    dimensions: list[str],
    message: str,
) -> None:
    metrics = make_context().metrics
    metrics.add_metric_to_cache("n", "count", ["Route"]).add_or_update(value, dimensions)
    assert metrics.drain() == []
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("[METRICS]Failed to update metric with name:n")
    assert re.search(message, record.getMessage())


def test_a_number_of_numpy_becomes_one_that_can_be_sent(make_context: MakeContext) -> None:
    metrics = make_context().metrics
    metrics.add_counter("n", np.float32(0.5))
    assert type(metrics.drain()[0]["value"]) is float


def test_only_the_latest_records_are_kept(make_context: MakeContext) -> None:
    metrics = make_context().metrics
    for value in range(MOST_RECORDS + 5):
        metrics.add_counter("n", value)
    assert metrics.drain()[0]["value"] == 5


def test_wrong_units_and_names_raise(make_context: MakeContext) -> None:
    metrics = make_context().metrics
    with pytest.raises(MetricsCacheValueError, match="the unit for a timed metric should be"):
        metrics.add_time("n", 1, None, "ns")
    with pytest.raises(ValueError, match="The unit for size based metric is one of"):
        metrics.add_size("n", 1, None, "TB")
    with pytest.raises(MetricsCacheKeyError, match="there is no counter"):
        metrics.get_metric("n")
    with pytest.raises(MetricsCacheTypeError, match="dimension_names is"):
        metrics.add_metric_to_cache("n", "count", "Route")


def test_outside_of_a_worker_values_are_lines_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "metrics.yaml"
    file.write_text(
        "model_metrics:\n  counter:\n    - {name: Calls, unit: count, dimensions: [Level]}\n",
        encoding="utf-8",
    )
    metrics = MetricsCacheYamlImpl(str(file))
    metrics.initialize_cache()
    assert metrics.cache_keys() == ["counter:Calls"]
    caplog.set_level(logging.INFO)
    metrics.get_metric("Calls").add_or_update(3, ["Model"], "id")
    (line,) = caplog.messages
    assert line.startswith("[METRICS]Calls.Count:3|#Level:Model|#type:COUNTER|#hostname:")
    assert line.endswith(",id")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, MetricsCacheIOError),
        ("{", MetricsCachePyYamlError),
        ("other: 1\n", MetricsCacheKeyError),
        ("model_metrics:\n", MetricsCacheValueError),
        ("model_metrics: {meter: []}\n", MetricsCacheKeyError),
        ("model_metrics: {counter: [{name: n}]}\n", MetricsCacheKeyError),
    ],
    ids=["absent", "no YAML", "no section", "empty", "type", "entry"],
)
def test_a_metrics_file_that_cannot_be_used_raises(
    tmp_path: Path, text: str | None, error: type[Exception]
) -> None:
    if text is not None:
        (tmp_path / "metrics.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(error):
        MetricsCacheYamlImpl(str(tmp_path / "metrics.yaml")).initialize_cache()


def test_the_old_store_keeps_one_metric_for_each_set_of_dimensions() -> None:
    store = MetricsStore({0: "a", 1: "b"}, "m")
    store.add_counter("n", 1, 0)
    store.add_counter("n", 1, 0)
    store.add_time("t", 20, 1, "s")
    store.add_error("e", "text")
    found = [(metric.name, metric.value, metric.unit, metric.request_id) for metric in store.store]
    assert found == [("n", 1, "Count", "a"), ("t", 20, "Seconds", "b"), ("e", "text", "unit", None)]
    assert str(store.store[1]).startswith("t.Seconds:20|#ModelName:m,Level:Model|#hostname:")
