"""What a bench found, as values, JSON, tables and one HTML page; and the machine it ran on."""

import json
import math
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from modelyard.archiver.signature import Signature
from modelyard.base.terminal import format_bytes


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


# -- the figures as tables for the terminal --------------------------------------------------------

_BUSY = 0.5
_FAILED: Any = Text("failed", style="red")
_OPERATORS = 15
"""Shown of a profile; JSON has all."""


def bench_table(report: BenchReport) -> RenderableType:
    """Return everything a reader of the terminal should see."""
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    parts = (machine["cpu"], f"{machine['cores']} cores", format_bytes(machine["memory_bytes"]))
    head = ", ".join([*parts, machine["instructions"], *machine["devices"]]) + f"; {versions}"
    profiles = [_operators(one) for one in report.footprints if one.operators]
    tables = [_cells(report), _footprints(report), *profiles]
    return Group(Text(head, style="dim"), Text(), *tables, *_notes(report))


def _operators(one: Footprint) -> Table:
    """Return what a profile saw."""
    table = _table(f"operator of {one.subject}", "calls", "self ms", "total ms", "net memory")
    for each in one.operators[:_OPERATORS]:
        times = [_number(each[name]) for name in ("self_ms", "total_ms")]
        sign = "-" * (each["own_bytes"] < 0)
        memory = f"{sign}{format_bytes(abs(each['own_bytes']))}"
        table.add_row(each["operator"], str(each["calls"]), *times, memory)
    return table


def _cells(report: BenchReport) -> Table:
    table = _table("subject", "threads", "batch", *_CELL)
    groups: dict[tuple[int, int], list[Cell]] = {}
    for cell in report.cells:
        groups.setdefault((cell.threads, cell.batch), []).append(cell)
    for group in groups.values():
        fastest = max(cell.items_per_s or 0.0 for cell in group)
        for cell in group:
            best = "bold green" if cell.items_per_s == fastest else ""
            figures = [
                Text(write(cell), style=best if name == "items/s" else "")
                for name, write in _CELL.items()
                if cell.error is None
            ]
            head = (cell.subject, str(cell.threads), str(cell.batch))
            table.add_row(*head, *(figures or [_FAILED]))
        table.add_section()
    return table


def _footprints(report: BenchReport) -> Table:
    table = _table("subject", "threads", *_FOOTPRINT)
    for one in report.footprints:
        figures = [write(one) for write in _FOOTPRINT.values() if one.error is None]
        table.add_row(one.subject, str(one.threads), *(figures or [_FAILED]))
    return table


def _notes(report: BenchReport) -> list[RenderableType]:
    failures = {f"{cell.subject}: {cell.error}": None for cell in report.cells if cell.error}
    notes = [
        f"{one.subject} took {_seconds(one.compile_s)} for its first calls with "
        f"{one.threads} threads"
        for one in report.footprints
        if one.compile_s
    ]
    notes += sorted({f"FLOPs {one.flops_note}" for one in report.footprints if one.flops_note})
    notes.append(
        "spread: between the medians of the rounds; max_abs: largest difference of an output to "
        f"{report.reference}; before, after: memory in use around the calls; in/out: moving inputs "
        "to a device and outputs back, which on the CPU there is none of"
    )
    if all(cell.joules_per_item is None for cell in report.cells):
        notes.append("energy is not available: no counter of RAPL or NVML that can be read here")
    if report.machine["load"] > _BUSY * report.machine["cores"]:
        notes.append(
            f"the machine was busy before the start (load {report.machine['load']}): "
            "compare within this table only"
        )
    shown = [Text(failure, style="red") for failure in failures]
    return [*shown, *(Text(note, style="dim") for note in notes)]


def _table(first: str, *rest: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in rest:
        table.add_column(name, justify="right")
    return table


def _number(value: float | None, most: int = 1000) -> str:
    """Write a number with three significant digits, from `most` on whole."""
    return "" if value is None else f"{value:.3g}" if value < most else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _spread(cell: Cell) -> str:
    """Write how far the rounds' medians lie apart, in per cent of their middle."""
    low, high = min(cell.round_p50_ms), max(cell.round_p50_ms)
    return f"±{(high - low) / (high + low):.0%}"


def _moves(cell: Cell) -> str:
    if cell.to_device_ms is None:
        return "none"
    return f"{_number(cell.to_device_ms)}/{_number(cell.from_device_ms)}"


def _count(value: int | None) -> str:
    """Write a large count with its unit."""
    if value is None:
        return ""
    for unit, one in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= one:
            return f"{value / one:.3g} {unit}"
    return str(value)


_CELL: Mapping[str, Callable[[Any], str]] = {
    "p50 ms": lambda cell: _number(cell.p50_ms),
    "p99 ms": lambda cell: _number(cell.p99_ms),
    "items/s": lambda cell: _number(cell.items_per_s, 100),
    "spread": _spread,
    "max_abs": lambda cell: "reference" if cell.max_abs is None else f"{cell.max_abs:.1e}",
    "before": lambda cell: format_bytes(cell.before_bytes),
    "after": lambda cell: format_bytes(cell.after_bytes),
    "in/out ms": _moves,
    "J/item": lambda cell: _number(cell.joules_per_item),
}
_FOOTPRINT: Mapping[str, Callable[[Footprint], str]] = {
    "load": lambda one: _seconds(one.load_s),
    "memory": lambda one: format_bytes(one.peak_bytes),
    "own": lambda one: format_bytes(one.own_bytes),
    "file": lambda one: format_bytes(one.file_bytes),
    "parameters": lambda one: _count(one.parameters),
    "FLOPs/item": lambda one: _count(one.flops_per_item) or "unknown",
}
"""Heading → how the figure is written."""
