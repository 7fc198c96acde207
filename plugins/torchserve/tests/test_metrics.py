"""TorchServe's metrics: names, labels, modes, and the machine's own figures."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from modelyard.plugins.torchserve.logs import Logs, default_config
from modelyard.plugins.torchserve.metrics import DEFAULT_CONFIG, TorchServeMetrics, read_config
from modelyard.plugins.torchserve.policy import TorchServeWorkers
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve.dataplane.exposition import Record
from modelyard.serve.dataplane.metrics import Metrics, VersionMetrics
from modelyard.serve.errors import StartError
from tests.serve.collectors import text_of
from tests.serve.live import poll

HOST = socket.gethostname()


def settings(tmp_path: Path, **options: Any) -> TorchServeSettings:
    return TorchServeSettings(**{"directory": tmp_path, "metrics_mode": "prometheus", **options})


def as_sent(record: Record) -> dict[str, Any]:
    return {**record._asdict(), "type": record.kind}


def text(metrics: TorchServeMetrics) -> str:
    return "".join(f"{part}\n" for family in metrics.exposed() for part in family.texts())


def make(tmp_path: Path, **options: Any) -> TorchServeMetrics:
    return TorchServeMetrics(settings(tmp_path, **options))


def sample(metrics: TorchServeMetrics, start: str) -> float | None:
    for line in text(metrics).splitlines():
        if line.startswith(start):
            return float(line.rpartition(" ")[2])
    return None


PREDICTION_TIME = Record(
    "PredictionTime", 4.0, "ms", "gauge", {"ModelName": "m", "Level": "Model"}, "id-1"
)


def test_every_family_has_its_help_and_type_before_its_first_value(tmp_path: Path) -> None:
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text(make(tmp_path)), re.M))
    config = read_config(DEFAULT_CONFIG)
    declared = {
        metric["name"]: kind
        for section in ("ts_metrics", "model_metrics")
        for kind, metrics in config[section].items()
        for metric in metrics
    }
    assert kinds == declared
    assert len(kinds) == 21


def test_answers_are_counted_by_the_hundred_of_their_status(tmp_path: Path) -> None:
    metrics = make(tmp_path)
    for status in (200, 202, 304, 404, 503):
        metrics.answered(status)
    for hundred, count in (("2", 2), ("4", 1), ("5", 1)):
        start = f'Requests{hundred}XX{{Level="Host",Hostname="{HOST}",}}'
        assert sample(metrics, start) == count


def test_inferences_are_summed_by_model_and_version(tmp_path: Path) -> None:
    metrics = make(tmp_path)
    for version in (None, "1.0", None):
        metrics.accepted("m", version)
        metrics.inferred("m", version, queued_s=0.001, total_s=0.25)
    labels = f'{{model_name="m",model_version="default",hostname="{HOST}",}}'
    assert sample(metrics, f"ts_inference_requests_total{labels}") == 2
    assert sample(metrics, f"ts_inference_latency_microseconds{labels}") == 500_000
    assert sample(metrics, f"ts_queue_latency_microseconds{labels}") == 2_000
    assert sample(metrics, "QueueTime{") == 1
    metrics.forget("m")
    assert sample(metrics, f"ts_inference_requests_total{labels}") is None


def test_a_batch_gives_the_handlers_time_and_the_time_around_it(tmp_path: Path) -> None:
    metrics = make(tmp_path)
    metrics.reported([as_sent(PREDICTION_TIME)], seconds=0.01)
    start = f'PredictionTime{{ModelName="m",Level="Model",Hostname="{HOST}",}}'
    assert sample(metrics, start) == 4
    assert sample(metrics, "WorkerThreadTime{") == 6


def test_a_worker_is_named_with_its_model(tmp_path: Path) -> None:
    theirs = make(tmp_path)
    metrics = Metrics(theirs)
    VersionMetrics(metrics, "dump", "1.0").watch_workers(lambda: 1, lambda: 0.5)
    TorchServeWorkers(theirs).loaded("W-9000-dump_1.0", 1.5)
    start = f'WorkerLoadTime{{WorkerName="W-9000-dump_1.0",Level="Host",Hostname="{HOST}",}}'
    assert sample(theirs, start) == 1500
    assert "modelyard_ready_workers" in text_of(metrics)
    assert text_of(metrics, ["WorkerLoadTime"]).count("# TYPE") == 1
    assert text_of(metrics, ["modelyard_restarts", "NoSuchMetric"]) == ""


def test_in_log_mode_values_are_lines_and_nothing_is_exposed(tmp_path: Path) -> None:
    logs = Logs(default_config(tmp_path, tmp_path))
    theirs = TorchServeMetrics(settings(tmp_path, metrics_mode="log"), logs)
    metrics = Metrics(theirs)
    theirs.accepted("m", None)
    theirs.answered(200)
    theirs.inferred("m", None, 0.000_123_4, 0.0021)
    theirs.reported([as_sent(PREDICTION_TIME)], 0.01)
    logs.start_writing()
    logs.close()
    assert text_of(metrics) == ""
    host = rf"\|#hostname:{re.escape(HOST)}"
    of_model = rf"\|#model_name:m,model_version:default{host},timestamp:\d+"
    of_host = rf"\|#Level:Host{host},timestamp:\d+"
    expected = {
        "model_metrics": [
            rf"PredictionTime\.ms:4\.0\|#ModelName:m,Level:Model{host},requestID:id-1,timestamp:\d+"
        ],
        "ts_metrics": [
            rf"ts_inference_requests_total\.Count:1\.0{of_model}",
            rf"Requests2XX\.Count:1\.0{of_host}",
            rf"ts_inference_latency_microseconds\.Microseconds:2100\.0{of_model}",
            rf"ts_queue_latency_microseconds\.Microseconds:123\.4{of_model}",
            rf"QueueTime\.Milliseconds:0\.123{of_host}",
            rf"WorkerThreadTime\.Milliseconds:6\.0{of_host}",
        ],
    }
    for name, patterns in expected.items():
        lines = (tmp_path / f"{name}.log").read_text().splitlines()
        assert len(lines) == len(patterns)
        for line, pattern in zip(lines, patterns, strict=True):
            assert re.fullmatch(rf"\S+ - {pattern}", line)


def test_in_legacy_mode_only_the_three_old_counters_are_exposed(tmp_path: Path) -> None:
    metrics = make(tmp_path, metrics_mode="legacy")
    metrics.accepted("m", "1.0")
    metrics.answered(200)
    assert re.findall(r"^# TYPE (\S+)", text(metrics), re.M) == [
        "ts_inference_requests_total",
        "ts_inference_latency_microseconds",
        "ts_queue_latency_microseconds",
    ]
    assert sample(metrics, "ts_inference_requests_total{") == 1


def test_a_configuration_of_ones_own_decides_what_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "metrics.yaml"
    file.write_text(
        "ts_metrics:\n"
        "  histogram:\n"
        "    - {name: QueueTime, unit: Milliseconds, dimensions: [Level, Hostname]}\n"
        "model_metrics:\n"
        "  counter:\n"
        "    - {name: Calls, unit: count, dimensions: [ModelName]}\n"
    )
    metrics = make(tmp_path, metrics_config=file)
    metrics.answered(200)
    metrics.inferred("m", None, 0.1, 0.2)
    calls = Record("Calls", 1, "count", "counter", {"ModelName": "m"}, "")
    metrics.reported([as_sent(PREDICTION_TIME), as_sent(calls)], 0.1)
    found = re.findall(r"^# TYPE (\S+) (\S+)", text(metrics), re.M)
    assert found == [("QueueTime", "histogram"), ("Calls", "counter")]
    assert sample(metrics, "QueueTime_count{") == 1
    assert sample(metrics, f'Calls{{ModelName="m",Hostname="{HOST}",}}') == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("[1", "cannot read"),
        ("- a", "holds no ts_metrics"),
        ("ts_metrics: {summary: []}", "summary: expected counter, gauge, histogram"),
        ("model_metrics: {gauge: [{name: A}]}", "expected name, unit and dimensions"),
    ],
    ids=str,
)
def test_a_wrong_configuration_stops_the_start(
    tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / "metrics.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StartError, match=message):
        make(tmp_path, metrics_config=file)


def test_the_machine_is_measured_unless_that_is_switched_off(tmp_path: Path) -> None:
    silent, metrics = make(tmp_path, disable_system_metrics=True), make(tmp_path)
    try:
        silent.start()
        metrics.start()
        poll(lambda: sample(metrics, "DiskAvailable{"), "the machine is measured")
        for name in ("CPUUtilization", "MemoryUtilization", "DiskUtilization"):
            value = sample(metrics, f'{name}{{Level="Host",Hostname="{HOST}",}}')
            assert value is not None and 0 <= value <= 100
        assert sample(silent, "DiskAvailable{") is None
    finally:
        metrics.stop()
