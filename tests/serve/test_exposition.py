"""Metrics that others name, as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from modelyard.serve.dataplane import exposition
from modelyard.serve.dataplane.exposition import (
    HandlerMetrics,
    Recorded,
    read_records,
)
from modelyard.serve.dataplane.metrics import Family


def record(**changes: Any) -> dict[str, Any]:
    fields = {"name": "Calls", "value": 2, "unit": "count", "type": "counter", "request_id": None}
    return {**fields, "dimensions": {"ModelName": "m"}, **changes}


def text(families: Iterable[Family]) -> str:
    return "".join(f"{part}\n" for family in families for part in family.texts())


def value(family: Family, *values: str) -> float:
    if family.kind == "histogram":
        return sum(family.histogram(*values).counts)
    return family.count(*values).value


def take(metrics: HandlerMetrics, *records: dict[str, Any]) -> None:
    for one in read_records(list(records)):
        metrics.record(one)


def test_a_counters_text_is_that_of_torchserves_library() -> None:
    family = Recorded("Requests2XX", "counter", "Count", ("Level", "Hostname"))
    assert text([family]).splitlines() == [
        "# HELP Requests2XX Torchserve prometheus counter metric with unit: Count",
        "# TYPE Requests2XX counter",
    ]
    family.add(("Host", 'a"b\\c\nd'), 1)
    family.add(("Host", 'a"b\\c\nd'), 2)
    assert text([family]).splitlines()[2:] == [
        r'Requests2XX{Level="Host",Hostname="a\"b\\c\nd",} 3.0'
    ]


def test_a_gauge_keeps_its_last_value_and_a_histogram_counts() -> None:
    gauge, histogram = Recorded("G", "gauge", "ms", ()), Recorded("H", "histogram", "ms", ("a",))
    for each in (0.005, 0.3, 99.0):
        gauge.add((), each)
        histogram.add(("1",), each)
    lines = text([gauge, histogram]).splitlines()
    assert "G 99.0" in lines
    assert 'H_bucket{a="1",le="0.005",} 1.0' in lines
    assert 'H_bucket{a="1",le="0.25",} 1.0' in lines
    assert 'H_bucket{a="1",le="0.5",} 2.0' in lines
    assert 'H_bucket{a="1",le="+Inf",} 3.0' in lines
    assert 'H_count{a="1",} 3.0' in lines
    assert 'H_sum{a="1",} 99.305' in lines
    assert (value(gauge), value(histogram, "1")) == (99.0, 3.0)


def test_only_the_metrics_that_are_asked_for_are_given() -> None:
    families = [Recorded("A", "gauge", "ms", ()), Recorded("B", "gauge", "ms", ())]
    assert [each.is_among(["A", "B_count"]) for each in families] == [True, True]
    assert [each.is_among(["A"]) for each in families] == [True, False]


def test_a_handlers_metric_appears_with_its_first_value_and_the_hostname() -> None:
    metrics = HandlerMetrics("here")
    take(metrics, record(), record(value="3"))
    assert text(metrics.families.values()).splitlines()[2:] == [
        'Calls{ModelName="m",Hostname="here",} 5.0'
    ]


def test_a_metric_that_is_not_declared_is_dropped_where_only_those_are_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    declared = Recorded("Calls", "counter", "count", ("ModelName", "Hostname"))
    metrics = HandlerMetrics("here", [declared], detects=False)
    take(metrics, record(), record(name="Other"), record(name="Other"))
    assert value(declared, "m", "here") == 2
    assert list(metrics.families) == ["Calls"]
    assert [r.message.startswith("metric Other of a handler") for r in caplog.records] == [True]


def test_the_declared_type_counts_whatever_the_handler_says() -> None:
    declared = Recorded("Calls", "histogram", "count", ("ModelName", "Hostname"))
    take(HandlerMetrics("here", [declared]), record(type="gauge"), record())
    assert value(declared, "m", "here") == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"dimensions": {"ModelName": "m", "Route": "a"}},
        {"value": -1},
        {"name": "no name"},
        {"name": "New", "dimensions": {"a-b": "c"}},
        {"name": "New", "type": "summary"},
        {"name": "modelyard_requests_total"},
        {"name": "Requests2XX"},
        {"value": "many"},
        {"dimensions": None},
        {"dimensions": ["a"]},
        {"dimensions": {"ModelName": "m" * 1000}},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_what_cannot_be_exposed_is_dropped_with_a_warning(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    metrics = HandlerMetrics("here", reserved={"Requests2XX"})
    take(metrics, record(), record(**changes))
    assert text(metrics.families.values()).splitlines()[2:] == [
        'Calls{ModelName="m",Hostname="here",} 2.0'
    ]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("records", [None, {}, "records", [1, None, "x", []]], ids=str)
def test_what_is_no_record_is_left_out(records: object) -> None:
    assert list(read_records(records)) == []


def test_labels_without_end_do_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exposition, "MOST_SERIES", 3)
    metrics = HandlerMetrics("here")
    take(metrics, *(record(dimensions={"id": str(at)}) for at in range(9)))
    assert len(text(metrics.families.values()).splitlines()) == 2 + 3
    take(metrics, record(dimensions={"id": "0"}))
    assert value(metrics.families["Calls"], "0", "here") == 4
    assert len(caplog.records) == 1


def test_a_removed_models_series_go() -> None:
    metrics = HandlerMetrics("here")
    take(metrics, record(), record(dimensions={"ModelName": "other"}))
    metrics.forget("m")
    assert value(metrics.families["Calls"], "m", "here") == 0
    assert value(metrics.families["Calls"], "other", "here") == 2
