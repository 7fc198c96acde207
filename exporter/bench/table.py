"""A bench's figures → tables for the terminal, and how each figure is written."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from modelyard.base.terminal import format_bytes
from modelyard.exporter.bench.report import BenchReport, Cell, Footprint

_BUSY = 0.5
_OPERATORS = 15
"""Shown of a profile; JSON has all."""


def bench_table(report: BenchReport) -> RenderableType:
    """Return everything a reader of the terminal should see."""
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    head = (
        f"{machine.cpu}, {machine.cores} cores, {format_bytes(machine.memory_bytes)}, "
        f"{machine.instructions}{''.join(f', {device}' for device in machine.devices)}; {versions}"
    )
    parts: list[RenderableType] = [Text(head, style="dim"), Text(), _cells(report.cells)]
    parts += [_footprints(report.footprints), *map(_operators, report.footprints), *_notes(report)]
    return Group(*parts)


def _operators(one: Footprint) -> RenderableType:
    """Return what a profile saw; nothing where none was asked for."""
    if not one.operators:
        return Group()
    table = _table(f"operator of {one.subject}", "calls", "self ms", "total ms", "net memory")
    for each in one.operators[:_OPERATORS]:
        table.add_row(
            each["operator"],
            str(each["calls"]),
            milliseconds(each["self_ms"]),
            milliseconds(each["total_ms"]),
            "-" * (each["own_bytes"] < 0) + format_bytes(abs(each["own_bytes"])),
        )
    return table


def _cells(cells: Sequence[Cell]) -> Table:
    table = _table("subject", "threads", "batch", "p50 ms", "p99 ms", "items/s", "spread")
    for name in ("max_abs", "before", "after", "in/out ms", "J/item"):
        table.add_column(name, justify="right")
    for threads in dict.fromkeys(cell.threads for cell in cells):
        for batch in dict.fromkeys(cell.batch for cell in cells):
            group = [cell for cell in cells if (cell.threads, cell.batch) == (threads, batch)]
            fastest = max((cell.items_per_s or 0.0 for cell in group), default=0.0)
            for cell in group:
                table.add_row(*_row(cell, fastest))
            table.add_section()
    return table


def _row(cell: Cell, fastest: float) -> list[str | Text]:
    head: list[str | Text] = [cell.subject, str(cell.threads), str(cell.batch)]
    if cell.error is not None:
        return [*head, Text("failed", style="red")]
    best = cell.items_per_s == fastest
    return [
        *head,
        milliseconds(cell.p50_ms),
        milliseconds(cell.p99_ms),
        Text(rate(cell.items_per_s), style="bold green" if best else ""),
        spread(cell),
        "reference" if cell.max_abs is None else f"{cell.max_abs:.1e}",
        format_bytes(cell.before_bytes),
        format_bytes(cell.after_bytes),
        "none"
        if cell.to_device_ms is None
        else f"{milliseconds(cell.to_device_ms)}/{milliseconds(cell.from_device_ms)}",
        "" if cell.joules_per_item is None else f"{cell.joules_per_item:.3g}",
    ]


def _footprints(footprints: Sequence[Footprint]) -> Table:
    table = _table("subject", "threads", "load", "memory", "own", "file", "parameters")
    table.add_column("FLOPs/item", justify="right")
    for one in footprints:
        if one.error is not None:
            table.add_row(one.subject, str(one.threads), Text("failed", style="red"))
            continue
        table.add_row(
            one.subject,
            str(one.threads),
            seconds(one.load_s),
            format_bytes(one.peak_bytes),
            format_bytes(one.own_bytes),
            format_bytes(one.file_bytes),
            count(one.parameters),
            count(one.flops_per_item) or "unknown",
        )
    return table


def _notes(report: BenchReport) -> list[RenderableType]:
    failures = {f"{cell.subject}: {cell.error}": None for cell in report.cells if cell.error}
    notes = [
        f"{one.subject} took {seconds(one.compile_s)} for its first calls with "
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
    if report.machine.load > _BUSY * report.machine.cores:
        notes.append(
            f"the machine was busy before the start (load {report.machine.load}): "
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


def milliseconds(value: float | None) -> str:
    """Write a latency with three significant digits."""
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def seconds(value: float | None) -> str:
    """Write a time that a person waits."""
    return "" if value is None else f"{value:.2f} s"


def rate(value: float | None) -> str:
    """Write items per second."""
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(cell: Cell) -> str:
    """Write how far the rounds' medians lie apart, in per cent of their middle."""
    low, high = min(cell.round_p50_ms), max(cell.round_p50_ms)
    return f"±{(high - low) / (high + low):.0%}"


def count(value: int | None) -> str:
    """Write a large count with its unit."""
    if value is None:
        return ""
    for unit, one in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= one:
            return f"{value / one:.3g} {unit}"
    return str(value)
