"""TorchServe's metrics: its names, labels and text, beside those of `serve/dataplane/metrics.py`.

A metric that the configuration does not declare is not kept. In `log` mode each value is a line of
a log instead, which is made of the value by the thread that writes it.
"""

from __future__ import annotations

import logging
import math
import shutil
import socket
import subprocess
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from modelyard.serve.dataplane.exposition import KINDS, Family, HandlerMetrics, Record, text
from modelyard.serve.errors import StartError
from modelyard.serve.torchserve.log_config import MODEL_METRICS, TS_METRICS
from modelyard.serve.torchserve.logs import Logs
from modelyard.serve.torchserve.settings import TorchServeSettings

logger = logging.getLogger(__name__)

DEFAULT_CONFIG = Path(__file__).with_name("metrics.yaml")
LEGACY = frozenset(
    {
        "ts_inference_requests_total",
        "ts_inference_latency_microseconds",
        "ts_queue_latency_microseconds",
    }
)
"""In `legacy` mode these are Prometheus metrics and all others are logged."""
MEGABYTE, GIGABYTE = 1 << 20, 1 << 30
CPU_SAMPLE_S = 0.2
SMI_TIMEOUT_S = 10


ANSWERS = (
    ("ts_inference_latency_microseconds", "%.1f"),
    ("ts_queue_latency_microseconds", "%.1f"),
    ("QueueTime", "%.3f"),
)
"""What an answer is measured by, and how much of a value is written."""


class Meter:
    """One of the server's own metrics with the values of its labels.

    Args:
        family: what it is exposed in, None where it is a line of a log.
        values: of the labels, in the family's order.
        line: made into text with a value and a second.
    """

    def __init__(self, family: Family | None, values: tuple[str, ...], line: str) -> None:
        self.family = family
        self.values = values
        self.line = line
        self._one = line % (1.0, 0)

    def form(self, second: int, value: float) -> Sequence[str]:
        """Return a line as TorchServe's log parsers know it."""
        return (self.line % (value, second),)

    def form_one(self, second: int) -> Sequence[str]:
        """Return the line of a counter."""
        return (f"{self._one[:-1]}{second}",)


class Inferences:
    """The metrics of one model and the version that its clients ask for.

    Args:
        requests: counts them.
        answers: as `ANSWERS`; None is not kept.
    """

    def __init__(self, requests: Meter | None, answers: Sequence[Meter | None]) -> None:
        self.requests = requests
        kept = [(at, meter) for at, meter in enumerate(answers) if meter is not None]
        self.logged = [(at, meter.line) for at, meter in kept if meter.family is None]
        self.exposed = [(at, m.family, m.values) for at, m in kept if m.family is not None]

    def form(self, second: int, *values: float) -> Sequence[str]:
        """Return the lines of one answer."""
        return [line % (values[at], second) for at, line in self.logged]


class TorchServeMetrics:
    """The metrics of one server in TorchServe's dialect.

    Args:
        settings: of the dialect.
        logs: where lines go; None writes none.

    Raises:
        StartError: the metrics configuration cannot be read.
    """

    def __init__(self, settings: TorchServeSettings, logs: Logs | None = None) -> None:
        config = read_config(settings.metrics_config or DEFAULT_CONFIG)
        self.model_metrics: dict[str, Any] = config.get("model_metrics") or {}
        """As the configuration declares them, for the workers."""
        self.auto_detect = settings.model_metrics_auto_detect
        self.mode = settings.metrics_mode
        self.is_alone = self.mode == "log"
        self._own_lines = logs.lines(TS_METRICS) if logs else None
        self._model_lines = logs.lines(MODEL_METRICS) if logs else None
        self._hostname = socket.gethostname()
        self._families = {f.name: f for f in _families(config.get("ts_metrics") or {})}
        self._host = {"Level": "Host", "Hostname": self._hostname, "hostname": self._hostname}
        declared = list(_families(self.model_metrics, ("Hostname",)))
        self._handlers = HandlerMetrics(
            self._hostname, declared, self.auto_detect, frozenset(self._families)
        )
        self._statuses = {each: self._meter(f"Requests{each}XX", {}) for each in (2, 4, 5)}
        self._thread_time = self._meter("WorkerThreadTime", {})
        self._inferences: dict[tuple[str, str | None], Inferences] = {}
        self._interval_s = settings.metric_time_interval
        self._collects = not settings.disable_system_metrics
        self._is_stopping = threading.Event()

    @property
    def is_wanted(self) -> bool:
        """Whether anybody sees what the server itself measures."""
        return self.mode != "log" or self._own_lines is not None

    # -- what the server measures --------------------------------------------------------------

    def add(self, name: str, value: float, **labels: str) -> None:
        """Count, set or observe a metric of the server's own."""
        if (meter := self._meter(name, labels)) is not None:
            self._add(meter, float(value))

    def _add(self, meter: Meter, value: float) -> None:
        if meter.family is not None:
            meter.family.add(meter.values, value)
        elif self._own_lines is not None:
            self._own_lines.put(meter.form, value)

    def _count(self, meter: Meter | None) -> None:
        if meter is None:
            return
        if meter.family is not None:
            meter.family.add(meter.values, 1.0)
        elif self._own_lines is not None:
            self._own_lines.put(meter.form_one)

    def _meter(self, name: str, labels: Mapping[str, str], digits: str = "%s") -> Meter | None:
        """Return a metric with the values of its labels; None where nobody sees it."""
        family = self._families.get(name)
        if family is None:
            return None
        known = {**self._host, **labels}
        values = tuple(known.get(label, "") for label in family.labels)
        if self.mode == "prometheus" or (self.mode == "legacy" and name in LEGACY):
            return Meter(family, values, "%s%d")
        if self._own_lines is None:
            return None
        start, end = self._around(name, family.unit, zip(family.labels, values, strict=True))
        return Meter(
            None, values, start.replace("%", "%%") + digits + end.replace("%", "%%") + "%d"
        )

    def answered(self, status: int) -> None:
        """Count an answer of the inference or the management API."""
        self._count(self._statuses.get(status // 100))

    def _of(self, model: str, version: str | None) -> Inferences:
        key = model, version
        found = self._inferences.get(key)
        if found is None:
            labels = {"model_name": model, "model_version": version or "default"}
            found = self._inferences[key] = Inferences(
                self._meter("ts_inference_requests_total", labels),
                [self._meter(name, labels, digits) for name, digits in ANSWERS],
            )
        return found

    def accepted(self, model: str, version: str | None) -> None:
        """Count a request for a prediction or an explanation."""
        self._count(self._of(model, version).requests)

    def inferred(self, model: str, version: str | None, queued_s: float, total_s: float) -> None:
        """Take note of one answer: how long it waited, and how long it took altogether."""
        of = self._of(model, version)
        values = total_s * 1e6, queued_s * 1e6, queued_s * 1e3
        if of.logged and self._own_lines is not None:
            self._own_lines.put(of.form, *values)
        for at, family, labels in of.exposed:
            family.add(labels, values[at])

    def worker_loaded(self, worker: str, seconds: float) -> None:
        """Take note of how long a worker took to load."""
        self.add("WorkerLoadTime", seconds * 1e3, WorkerName=worker)

    # -- what handlers measure -----------------------------------------------------------------

    def reported(self, records: Iterable[Record], seconds: float) -> None:
        """Take what a handler measured in one batch, which its worker had for `seconds`."""
        for record in records:
            if self.mode == "prometheus":
                self._handlers.record(record)
            elif self._model_lines is not None:
                self._model_lines.put(self._record_line, record)
            if record.name == "PredictionTime" and self._thread_time is not None:
                self._add(self._thread_time, max(0.0, seconds * 1e3 - record.value))

    def _record_line(self, second: int, record: Record) -> Sequence[str]:
        start, end = self._around(
            record.name, record.unit, record.dimensions.items(), record.request_id
        )
        return (f"{start}{record.value}{end}{second}",)

    def _around(
        self, name: str, unit: str, labels: Iterable[tuple[str, str]], request_id: str = ""
    ) -> tuple[str, str]:
        """Return what stands before and behind the value of a line, but for the second."""
        shown = ",".join([f"{k}:{v}" for k, v in labels if k.lower() != "hostname"])
        of_request = f",requestID:{request_id}" if request_id else ""
        return f"{name}.{unit}:", f"|#{shown}|#hostname:{self._hostname}{of_request},timestamp:"

    def forget(self, model: str) -> None:
        """Drop the series of a model that is removed."""
        self._handlers.forget(model)
        for key in [key for key in self._inferences if key[0] == model]:
            del self._inferences[key]
        for family in self._families.values():
            family.forget("model_name", model)

    # -- the text ------------------------------------------------------------------------------

    def text(self, names: Collection[str] = ()) -> str:
        """Return what is exposed: nothing in log mode, all families of these names otherwise."""
        if self.mode == "log":
            return ""
        if self.mode == "legacy":
            return text((f for f in self._families.values() if f.name in LEGACY), names)
        return text((*self._families.values(), *self._handlers.families.values()), names)

    # -- the machine ---------------------------------------------------------------------------

    def start(self) -> None:
        """Measure the machine now and then, in a thread that ends with the process or `stop`."""
        if self._collects:
            threading.Thread(target=self._collect, name="system-metrics", daemon=True).start()

    def stop(self) -> None:
        """Measure no more."""
        self._is_stopping.set()

    def _collect(self) -> None:
        psutil.cpu_percent()  # the next one is since then
        wait_s = CPU_SAMPLE_S
        while not self._is_stopping.wait(wait_s):
            try:
                self._measure_machine()
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                logger.warning("the system metrics cannot be read: %s", error)
            wait_s = self._interval_s

    def _measure_machine(self) -> None:
        memory = psutil.virtual_memory()
        used = memory.total - memory.available
        disk = shutil.disk_usage("/")
        for name, value in (
            ("CPUUtilization", psutil.cpu_percent()),
            ("MemoryUsed", used / MEGABYTE),
            ("MemoryAvailable", memory.available / MEGABYTE),
            ("MemoryUtilization", 100 * used / memory.total),
            ("DiskUsage", disk.used / GIGABYTE),
            ("DiskUtilization", 100 * disk.used / max(1, disk.used + disk.free)),
            ("DiskAvailable", disk.free / GIGABYTE),
        ):
            self.add(name, round(value, 2))
        for index, *values in _gpu_usage():
            names = ("GPUUtilization", "GPUMemoryUtilization", "GPUMemoryUsed")
            for name, value in zip(names, values, strict=True):
                self.add(name, value, DeviceId=f"{index:g}")


def read_config(file: Path) -> dict[str, Any]:
    """Read a metrics configuration: `ts_metrics` and `model_metrics`, each by type.

    Raises:
        StartError: it cannot be read, or a metric lacks its name, unit or dimensions.
    """
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise StartError(f"cannot read the metrics configuration {file}: {error}") from error
    if not isinstance(config, dict):
        raise StartError(f"the metrics configuration {file} holds no ts_metrics or model_metrics")
    for section in ("ts_metrics", "model_metrics"):
        for kind, metrics in (config.get(section) or {}).items():
            if kind not in KINDS:
                raise StartError(f"{file}: {section}: {kind}: expected {', '.join(KINDS)}")
            for metric in metrics or ():
                if not isinstance(metric, dict) or not {"name", "unit", "dimensions"} <= set(
                    metric
                ):
                    raise StartError(
                        f"{file}: {section}: {kind}: expected name, unit and dimensions, "
                        f"got {metric!r}"
                    )
    return config


def _families(section: Mapping[str, Any], more: tuple[str, ...] = ()) -> Iterable[Family]:
    for kind, metrics in section.items():
        for metric in metrics or ():
            labels = [str(label) for label in metric["dimensions"]]
            labels += [label for label in more if label not in labels]
            yield Family(str(metric["name"]), kind, str(metric["unit"]), labels)


def _gpu_usage() -> list[tuple[float, ...]]:
    """Return index, percent of time busy, percent of time its memory was, and MB used, by GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    fields = "index,utilization.gpu,utilization.memory,memory.used"
    ran = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=SMI_TIMEOUT_S,
        check=True,
    )
    return [tuple(map(_number, line.split(","))) for line in ran.stdout.splitlines() if line]


def _number(field: str) -> float:
    """Read a number; what a device does not support comes as a word."""
    try:
        return float(field)
    except ValueError:
        return math.nan
