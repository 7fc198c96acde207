"""What a bench found, as values, as JSON and as one HTML page; and the machine that it ran on."""

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from modelyard.archiver.signature import Signature


def describe_machine() -> dict[str, Any]:
    """Describe the hardware and versions that a measurement depends on.

    `cores` are those that this process may use, `instructions` the vector instructions that torch
    uses here, and `load` the mean number of busy processes over the last minute.
    """
    info, count = Path("/proc/cpuinfo"), torch.cuda.device_count()
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    versions = {"python": platform.python_version()}
    for name in ("torch", "onnxruntime", "modelyard"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # the server's image may have one of the two backends only
            continue
    return {
        "cpu": next(named, platform.processor() or platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "devices": [torch.cuda.get_device_name(index) for index in range(count)],
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
        "load": round(os.getloadavg()[0], 2),
    }


@dataclass(frozen=True)
class Cell:
    """One subject at one batch size and thread count; `error` says why there is no figure."""

    subject: str
    threads: int
    batch: int
    calls: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None
    items_per_s: float | None = None
    round_p50_ms: tuple[float, ...] = ()
    """The median of each round: how far they spread is how quiet the machine was."""
    max_abs: float | None = None
    """Largest difference of an output value to the reference; None for the reference itself."""
    max_rel: float | None = None
    """max_abs over the largest value of the reference."""
    to_device_ms: float | None = None
    """Time to move the inputs there; None on the CPU, where nothing is moved."""
    from_device_ms: float | None = None
    before_bytes: int | None = None
    """Memory in use before the first timed call: that of the device, else of the process."""
    after_bytes: int | None = None
    """The same after the last."""
    joules_per_item: float | None = None
    """Energy of the whole CPU or GPU during the calls; None where no counter can be read."""
    error: str | None = None


@dataclass(frozen=True)
class Footprint:
    """What one subject costs before and beside its calls, at one thread count."""

    subject: str
    threads: int
    kind: str
    file: str
    file_bytes: int
    load_s: float | None = None
    peak_bytes: int | None = None
    """Most memory of its process, with Python and torch."""
    own_bytes: int | None = None
    """The part that came after torch was imported: the model and its work space."""
    cuda_peak_bytes: int | None = None
    parameters: int | None = None
    flops_per_item: int | None = None
    flops_note: str = ""
    compile_s: float | None = None
    """Time of the first calls, all batch sizes together, where they compile."""
    operators: tuple[Mapping[str, Any], ...] = ()
    """A profile's rows: name, calls, milliseconds alone and in all, bytes; the longest first."""
    error: str | None = None


@dataclass(frozen=True)
class BenchReport:
    """Everything that a bench found."""

    machine: Mapping[str, Any]
    """The machine that it ran on, as `describe_machine` gives it."""
    signature: Signature
    reference: str
    """The subject that the others' outputs are compared with."""
    footprints: tuple[Footprint, ...]
    cells: tuple[Cell, ...]
    settings: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the form that `--json` prints; no number in it is NaN or infinite."""
        found = {"schema": 1, **asdict(self), "signature": self.signature.to_json()}
        plain: dict[str, Any] = _finite(found)
        return plain


def _finite(value: Any) -> Any:
    """Replace what JSON has no number for by null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_bench_page(report: BenchReport, html: Path) -> None:
    """Write a page that needs nothing else: sortable table, bars, plot, the machine.

    In one step: a reader finds the old page or the new one.
    """
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    html.parent.mkdir(parents=True, exist_ok=True)
    draft = html.with_name(f".{html.name}.{os.getpid()}")
    try:
        draft.write_text(template.replace("/*DATA*/", script_data(report)), encoding="utf-8")
        draft.replace(html)
    finally:
        draft.unlink(missing_ok=True)


def script_data(report: BenchReport) -> str:
    """Return the report as JSON that cannot end the script element around it."""
    text = json.dumps(report.to_json(), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")
