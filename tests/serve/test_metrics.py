from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterable
from functools import partial

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from modelyard.serve.dataplane.call import EXPLAIN, PREDICT
from modelyard.serve.dataplane.metrics import KINDS, SLICE, KindMetrics, Metrics, VersionMetrics
from tests.serve.collectors import text_of, value_of


def parse(text: str) -> Iterable[Metric]:
    """Read OpenMetrics as strictly as its specification asks for."""
    families: Iterable[Metric] = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    return families


ONE = {"model": "digits", "version": "1.0", "kind": "predict"}


def test_kinds_are_named_by_their_number() -> None:
    assert (KINDS[PREDICT], KINDS[EXPLAIN]) == ("predict", "explain")


def test_answers_are_counted_by_status_and_errors_once_more() -> None:
    metrics = Metrics()
    kind = VersionMetrics(metrics, "digits", "1.0").kinds[PREDICT]
    for code in (200, 200, 400, 500):
        kind.answered(code, 0.02)
    value = partial(value_of, metrics)
    assert value("modelyard_requests_total", {**ONE, "code": "200"}) == 2
    assert value("modelyard_requests_total", {**ONE, "code": "400"}) == 1
    assert value("modelyard_errors_total", {**ONE, "code": "500"}) == 1
    assert value("modelyard_errors_total", {**ONE, "code": "200"}) is None
    assert value("modelyard_request_latency_seconds_count", ONE) == 4
    assert value("modelyard_request_latency_seconds_bucket", {**ONE, "le": "0.025"}) == 4
    assert value("modelyard_request_latency_seconds_bucket", {**ONE, "le": "0.01"}) == 0


def test_ready_workers_are_read_at_each_scrape() -> None:
    metrics = Metrics()
    ready = [1]
    VersionMetrics(metrics, "digits", "1.0").watch_workers(lambda: ready[0], lambda: 0.0)
    labels = {"model": "digits", "version": "1.0"}
    assert value_of(metrics, "modelyard_ready_workers", labels) == 1
    ready[0] = 3
    assert value_of(metrics, "modelyard_ready_workers", labels) == 3


def test_a_removed_model_leaves_no_series() -> None:
    metrics = Metrics()
    version = VersionMetrics(metrics, "digits", "1.0")
    version.watch_workers(lambda: 1, lambda: 0.5)
    version.describe("d1", "onnx", 100.0)
    version.restarts.inc()
    for kind in version.kinds:
        kind.answered(200, 0.1)
        kind.answered(503, 0.1)
        kind.queue_time.observe(0.1)
        kind.batch_size.observe(1)
        kind.watch("requests_in_flight", lambda: 2)
    assert 'model="digits"' in text_of(metrics)
    version.remove()
    assert 'model="digits"' not in text_of(metrics)


def test_a_version_tells_what_it_is_and_what_it_can_do() -> None:
    metrics = Metrics()
    version = VersionMetrics(metrics, "digits", "1.0")
    version.watch_workers(lambda: 2, lambda: 7.5)
    version.describe("sha256:ab", "onnx", 812.0)
    version.kinds[PREDICT].watch("requests_in_flight", lambda: 3)
    version.kinds[PREDICT].watch("queue_oldest_seconds", lambda: 0.25)
    value = partial(value_of, metrics)
    model = {"model": "digits", "version": "1.0"}
    assert value("modelyard_worker_busy_seconds_total", model) == 7.5
    assert value("modelyard_capacity_requests_per_second", model) == 812
    info = {**model, "digest": "sha256:ab", "format": "onnx"}
    assert value("modelyard_model_info", info) == 1
    assert value("modelyard_requests_in_flight", ONE) == 3
    assert value("modelyard_queue_oldest_seconds", ONE) == 0.25
    untuned = VersionMetrics(metrics, "digits", "2.0")
    untuned.describe("sha256:cd", "onnx", 0.0)
    of_untuned = {**model, "version": "2.0"}
    assert value("modelyard_capacity_requests_per_second", of_untuned) is None
    for each in (version, untuned):
        each.restarts.inc()
    version.remove()
    assert value("modelyard_worker_busy_seconds_total", model) is None
    assert value("modelyard_model_info", info) is None


def test_open_metrics_name_the_trace_of_an_answer_that_has_one() -> None:
    metrics = Metrics()
    kind = VersionMetrics(metrics, "digits", "1.0").kinds[PREDICT]
    kind.answered(200, 0.02, "4bf92f3577b34da6a3ce929d0e0e4736")
    kind.answered(200, 0.2)
    families = {each.name: each for each in parse(text_of(metrics, is_open=True))}
    latency = families["modelyard_request_latency_seconds"]
    named = {
        sample.labels["le"]: sample.exemplar.labels["trace_id"]
        for sample in latency.samples
        if sample.exemplar is not None
    }
    assert named == {"0.025": "4bf92f3577b34da6a3ce929d0e0e4736"}
    assert "4bf92f3577b34da6a3ce929d0e0e4736" not in text_of(metrics)


def test_what_handlers_measure_is_open_metrics_too() -> None:
    metrics = Metrics()
    of = {"ModelName": 'a",} b', "Level": "Model"}
    for kind, name in (("counter", "Calls"), ("gauge", "Depth"), ("histogram", "Took")):
        record = {"name": name, "value": 2, "unit": "a\nb", "type": kind, "dimensions": of}
        VersionMetrics(metrics, "digits", "1.0").reported([record], 0.1)
    families = {each.name: each for each in parse(text_of(metrics, is_open=True))}
    kinds = {name: families[name].type for name in ("Calls", "Depth", "Took")}
    assert kinds == {"Calls": "unknown", "Depth": "gauge", "Took": "histogram"}
    (calls,) = families["Calls"].samples
    assert (calls.name, calls.value, calls.labels["ModelName"]) == ("Calls", 2, 'a",} b')
    plain = text_of(metrics, ["Calls"])
    assert plain.startswith("# HELP Calls ")
    assert len(plain.splitlines()) == 3, "a unit with a line break is one line"


def test_the_process_and_its_versions_are_there() -> None:
    text = text_of(Metrics())
    for name in ("process_resident_memory_bytes", "process_start_time_seconds", "process_open_fds"):
        assert f"\n{name} " in text
    (build,) = (line for line in text.splitlines() if line.startswith("modelyard_build_info{"))
    assert f'python="{platform.python_version()}"' in build
    assert 'torch="2.' in build


def test_a_model_has_few_series_unless_a_scrape_asks_for_all_buckets() -> None:
    metrics = Metrics()
    version = VersionMetrics(metrics, "digits", "1.0")
    version.watch_workers(lambda: 1, lambda: 0.5)
    version.describe("d1", "onnx", 0.0)
    for kind in version.kinds:
        for name in ("queue_length", "queue_oldest_seconds", "requests_in_flight"):
            kind.watch(name, lambda: 0)

    def series(has_all: bool = False) -> int:
        lines = text_of(metrics, has_all=has_all).splitlines()
        return sum('model="digits"' in line for line in lines)

    assert series() == 7, "of a model that was not asked yet"
    use(version.kinds[PREDICT])
    assert series() == 30
    assert series(has_all=True) == 30 + 5 + 3 * 17 + 9
    use(version.kinds[EXPLAIN])
    assert series() == 30 + 26
    version.kinds[PREDICT].answered(503, 0.1)
    version.kinds[PREDICT].refused_full.inc()
    assert series() == 30 + 26 + 3, "a status, an error and a reason"


def use(kind: KindMetrics) -> None:
    kind.answered(200, 0.02)
    kind.ran(10, 200)
    kind.queue_time.observe(0.001)
    kind.batch_size.observe(1)


def test_few_buckets_count_what_all_do() -> None:
    metrics = Metrics()
    kind = VersionMetrics(metrics, "digits", "1.0").kinds[PREDICT]
    for seconds in (0.0002, 0.3, 0.7, 45.0):
        kind.answered(200, seconds, f"{seconds}")
    few, every = (
        {bound: value for text in parse(text_of(metrics, is_open=True, has_all=has_all))
         if text.name == "modelyard_request_latency_seconds"
         for name, labels, value, *_ in text.samples if (bound := labels.get("le"))}
        for has_all in (False, True)
    )  # fmt: skip
    assert few.items() < every.items()
    assert few["1.0"] == 3
    assert every["0.5"] == 2
    assert few["+Inf"] == 4


def test_many_models_are_written_in_slices_between_which_the_loop_goes_on() -> None:
    metrics = Metrics()
    for number in range(1000):
        use(VersionMetrics(metrics, f"m{number}", "1.0").kinds[PREDICT])
    before = text_of(metrics)

    async def scenario() -> tuple[str, int]:
        gathering = asyncio.create_task(metrics.gather())
        turns = 0
        while not gathering.done():
            if turns == 2:  # a model that goes meanwhile, and one that comes
                metrics.forget("m999", "1.0")
                use(VersionMetrics(metrics, "new", "1.0").kinds[PREDICT])
            await asyncio.sleep(0)
            turns += 1
        return gathering.result(), turns

    text, turns = asyncio.run(scenario())
    assert turns >= 7000 / SLICE
    assert list(parse(text_of(metrics, is_open=True)))
    assert text.count('model="m998"') == before.count('model="m998"')
