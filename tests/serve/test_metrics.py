from prometheus_client.exposition import generate_latest

from modelyard.serve.dataplane.call import EXPLAIN, PREDICT
from modelyard.serve.dataplane.metrics import KINDS, Metrics, VersionMetrics

ONE = {"model": "digits", "version": "1.0", "kind": "predict"}


def test_kinds_are_named_by_their_number() -> None:
    assert (KINDS[PREDICT], KINDS[EXPLAIN]) == ("predict", "explain")


def test_answers_are_counted_by_status_and_errors_once_more() -> None:
    metrics = Metrics()
    kind = VersionMetrics(metrics, "digits", "1.0").kinds[PREDICT]
    for code in (200, 200, 400, 500):
        kind.answered(code, 0.02)
    value = metrics.registry.get_sample_value
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
    VersionMetrics(metrics, "digits", "1.0").watch_workers(lambda: ready[0])
    labels = {"model": "digits", "version": "1.0"}
    assert metrics.registry.get_sample_value("modelyard_ready_workers", labels) == 1
    ready[0] = 3
    assert metrics.registry.get_sample_value("modelyard_ready_workers", labels) == 3


def test_a_removed_model_leaves_no_series() -> None:
    metrics = Metrics()
    version = VersionMetrics(metrics, "digits", "1.0")
    version.watch_workers(lambda: 1)
    version.restarts.inc()
    for kind in version.kinds:
        kind.answered(200, 0.1)
        kind.answered(503, 0.1)
        kind.queue_time.observe(0.1)
        kind.batch_size.observe(1)
    assert b'model="digits"' in generate_latest(metrics.registry)
    version.remove()
    assert b'model="digits"' not in generate_latest(metrics.registry)
