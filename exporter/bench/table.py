"""A bench's figures → tables for the terminal, and how each figure is written."""

from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from modelyard.base.terminal import format_bytes
from modelyard.exporter.bench.report import BenchReport, Cell, Footprint

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
