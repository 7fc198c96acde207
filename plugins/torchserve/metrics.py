"""TorchServe's metrics: its names, labels and text, beside those of `serve/dataplane/metrics.py`.

A metric that the configuration does not declare is not kept. In `log` mode each value is a line of
a log instead, which is made of the value by the thread that writes it.
"""

import logging
import math
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from modelyard.archiver.untrusted.yaml import parse_yaml
from modelyard.plugins.torchserve.logs import MODEL_METRICS, TS_METRICS, Logs
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve.dataplane.exposition import HandlerMetrics, Record, Recorded, read_records
from modelyard.serve.dataplane.metrics import TYPES, Family
from modelyard.serve.errors import StartError

logger = logging.getLogger(__name__)

DEFAULT_CONFIG = Path(__file__).with_name("metrics.yaml")
LEGACY = ("ts_inference_requests_total", "ts_inference_latency_microseconds",
          "ts_queue_latency_microseconds")  # fmt: skip
"""Metrics that are Prometheus' in `legacy` mode, in which all others are logged."""
MEGABYTE, GIGABYTE = 1 << 20, 1 << 30
CPU_SAMPLE_S = 0.2
SMI_TIMEOUT_S = 10


ANSWERS = (
    ("ts_inference_latency_microseconds", "%.1f"),
    ("ts_queue_latency_microseconds", "%.1f"),
    ("QueueTime", "%.3f"),
)
"""What an answer is measured by, and how much of a value is written."""


Inferences = tuple[Callable[[float], None], Sequence[Callable[..., None]]]
"""What counts requests of one model and the version that its clients ask for, and what takes all
three values of an answer."""


class TorchServeMetrics(HandlerMetrics):
    """The metrics of one server in TorchServe's dialect.

    Args:
        settings: settings of the dialect.
        logs: where lines go; None writes none.

    Raises:
        StartError: the metrics configuration cannot be read.
    """

    def __init__(self, settings: TorchServeSettings, logs: Logs | None = None) -> None:
        config = read_config(settings.metrics_config or DEFAULT_CONFIG)
        self.model_metrics: dict[str, Any] = config.get("model_metrics") or {}
        """Metrics as the configuration declares them, for the workers."""
        self.mode = settings.metrics_mode
        self._own_lines = logs.lines(TS_METRICS) if logs else None
        model_lines = logs.lines(MODEL_METRICS) if logs else None
        self._log_record = model_lines(self._record_line) if model_lines else None
        hostname = socket.gethostname()
        self._families = {f.name: f for f in _families(config.get("ts_metrics") or {})}
        self._host = {"Level": "Host", "Hostname": hostname, "hostname": hostname}
        declared = list(_families(self.model_metrics, ("Hostname",)))
        auto_detect, families = settings.model_metrics_auto_detect, frozenset(self._families)
        super().__init__(hostname, declared, auto_detect, families)
        self._statuses = {each: self._adder(f"Requests{each}XX", {}) for each in (2, 4, 5)}
        self._thread_time = self._adder("WorkerThreadTime", {})
        self._inferences: dict[tuple[str, str | None], Inferences] = {}
        self._settings = settings
        self._is_stopping = threading.Event()

    @property
    def is_wanted(self) -> bool:
        """Whether anybody sees what the server itself measures."""
        return self.mode != "log" or self._own_lines is not None

    # -- what the server measures --------------------------------------------------------------

    def add(self, name: str, value: float, **labels: str) -> None:
        """Count, set or observe a metric of the server's own."""
        self._adder(name, labels)(float(value))

    def _adder(self, name: str, labels: Mapping[str, str]) -> Callable[[float], None]:
        """Return what takes a metric's values; they go nowhere if nobody sees them."""
        family = self._families.get(name)
        if family is not None and self._is_exposed(name):
            return partial(family.add, self._values(family, labels))
        if family is None or self._own_lines is None:
            return lambda value: None
        line = self._line(family, labels, "%s")
        return self._own_lines(lambda second, value: (line % (value, second),))

    def _answer(self, labels: Mapping[str, str]) -> Iterator[Callable[..., None]]:
        """Yield what takes the values of an answer: one for each that is exposed, for lines one."""
        lines: list[tuple[int, str]] = []
        for at, (name, digits) in enumerate(ANSWERS):
            if (family := self._families.get(name)) is None:
                continue
            if self._is_exposed(name):
                add = partial(family.add, self._values(family, labels))
                yield lambda *values, at=at, add=add: add(values[at])
            else:
                lines.append((at, self._line(family, labels, digits)))

        def form(second: int, *values: float) -> Sequence[str]:
            return [line % (values[at], second) for at, line in lines]

        if lines and self._own_lines is not None:
            yield self._own_lines(form)

    def _is_exposed(self, name: str) -> bool:
        return self.mode == "prometheus" or (self.mode == "legacy" and name in LEGACY)

    def _values(self, family: Recorded, labels: Mapping[str, str]) -> tuple[str, ...]:
        known = {**self._host, **labels}
        return tuple(known.get(label, "") for label in family.labels)

    def _line(self, family: Recorded, labels: Mapping[str, str], digits: str) -> str:
        """Return a line that is made whole by a value and a second."""
        pairs = zip(family.labels, self._values(family, labels), strict=True)
        start, end = self._around(family.name, family.unit, pairs)
        return start.replace("%", "%%") + digits + end.replace("%", "%%") + "%d"

    def answered(self, status: int) -> None:
        """Count an answer of the inference or the management API."""
        if (count := self._statuses.get(status // 100)) is not None:
            count(1.0)

    def _of(self, model: str, version: str | None) -> Inferences:
        labels = {"model_name": model, "model_version": version or "default"}
        counter = self._adder("ts_inference_requests_total", labels)
        found = self._inferences[model, version] = counter, [*self._answer(labels)]
        return found

    def accepted(self, model: str, version: str | None) -> None:
        """Count a request for a prediction or an explanation."""
        count, _ = self._inferences.get((model, version)) or self._of(model, version)
        count(1.0)

    def inferred(self, model: str, version: str | None, queued_s: float, total_s: float) -> None:
        """Take note of one answer: how long it waited, and how long it took altogether."""
        _, answered = self._inferences.get((model, version)) or self._of(model, version)
        for take in answered:
            take(total_s * 1e6, queued_s * 1e6, queued_s * 1e3)

    def worker_loaded(self, worker: str, seconds: float) -> None:
        """Take note of how long a worker took to load."""
        self.add("WorkerLoadTime", seconds * 1e3, WorkerName=worker)

    # -- what handlers measure -----------------------------------------------------------------

    def reported(self, records: object, seconds: float) -> None:
        """Take what a handler measured in one batch, which its worker had for `seconds`."""
        for record in read_records(records):
            if self.mode == "prometheus":
                self.record(record)
            elif self._log_record is not None:
                self._log_record(record)
            if record.name == "PredictionTime":
                self._thread_time(max(0.0, seconds * 1e3 - record.value))

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
        return f"{name}.{unit}:", f"|#{shown}|#hostname:{self.hostname}{of_request},timestamp:"

    def forget(self, model: str) -> None:
        """Drop the series of a model that is removed."""
        super().forget(model)
        self._inferences = {key: of for key, of in self._inferences.items() if key[0] != model}
        for family in self._families.values():
            family.forget_label("model_name", model)

    # -- the text ------------------------------------------------------------------------------

    def exposed(self, own: Iterable[Family] = ()) -> Iterable[Family]:
        """Return nothing in log mode, all families that are not logged otherwise."""
        if self.mode == "log":
            return ()
        handlers = self.families.values() if self.mode == "prometheus" else ()
        theirs = (family for name, family in self._families.items() if self._is_exposed(name))
        return (*theirs, *handlers, *own)

    # -- the machine ---------------------------------------------------------------------------

    def start(self) -> None:
        """Measure the machine now and then, in a thread that ends with the process or `stop`."""
        if not self._settings.disable_system_metrics:
            threading.Thread(target=self._collect, name="system-metrics", daemon=True).start()

    def stop(self) -> None:
        """Measure no more."""
        self._is_stopping.set()

    def _collect(self) -> None:
        psutil.cpu_percent()  # the next one is since then
        wait_s: float = CPU_SAMPLE_S
        while not self._is_stopping.wait(wait_s):
            try:
                self._measure_machine()
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                logger.warning("the system metrics cannot be read: %s", error)
            wait_s = self._settings.metric_time_interval

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
        config = parse_yaml(file.read_bytes())
    except (OSError, ValueError) as error:
        raise StartError(f"cannot read the metrics configuration {file}: {error}") from error
    if not isinstance(config, dict):
        raise StartError(f"the metrics configuration {file} holds no ts_metrics or model_metrics")
    for section in ("ts_metrics", "model_metrics"):
        for kind, metrics in (config.get(section) or {}).items():
            where = f"{file}: {section}: {kind}: expected"
            if kind not in TYPES:
                raise StartError(f"{where} {', '.join(TYPES)}")
            for metric in metrics or ():
                if not isinstance(metric, dict) or {"name", "unit", "dimensions"} - metric.keys():
                    raise StartError(f"{where} name, unit and dimensions, got {metric!r}")
    return config


def _families(section: Mapping[str, Any], more: tuple[str, ...] = ()) -> Iterable[Recorded]:
    for kind, metrics in section.items():
        for metric in metrics or ():
            labels = [str(label) for label in metric["dimensions"]]
            labels += [label for label in more if label not in labels]
            yield Recorded(str(metric["name"]), kind, str(metric["unit"]), labels)


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
    # What a device does not support comes as a word in brackets.
    return [
        tuple(math.nan if "[" in field else float(field) for field in line.split(","))
        for line in ran.stdout.splitlines()
        if line
    ]
