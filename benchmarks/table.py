"""Results → tables for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.results import (
    BARE,
    BUSY_NEIGHBOUR,
    Cell,
    Footprint,
    Results,
    Row,
    Spread,
    spread,
    summarise,
)


def tables(results: Results) -> RenderableType:
    """Return everything a reader of the terminal should see."""
    rows = summarise(results.samples)
    parts: list[RenderableType] = [_rates(rows), Text(), _footprints(results.footprints)]
    if any(row.other_cores > BUSY_NEIGHBOUR for row in rows):
        typical = statistics.median(row.other_cores for row in rows)
        note = (
            f"* more than {BUSY_NEIGHBOUR} cores were busy with other work (median {typical:.2f})"
        )
        parts += [Text(), Text(f"{note}: trust CPU per request, not rates")]
    return Group(*parts)


def _rates(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("", no_wrap=True)
    for name in ("req/s", "±", "p50", "p99", "×bare", "server", "worker"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("", "", "", "ms", "ms", "", "CPU µs", "CPU µs", style="dim")
    for subject in dict.fromkeys(row.cell.subject for row in rows):
        table.add_section()
        table.add_row(Text(subject, style="bold"))
        for row in rows:
            if row.cell.subject == subject:
                table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> list[str | Text]:
    is_bare = row.cell.kind == BARE
    mark = "*" if row.other_cores > BUSY_NEIGHBOUR else " "
    label = describe(row.cell)
    if row.failures:
        return [Text(f"{label}: {row.failures} requests failed", style="bold red")]
    return [
        label,
        f"{row.rate.median:,.0f}{mark}",
        show_spread(row.rate),
        f"{row.p50_ms.median:.2f}",
        f"{row.p99_ms.median:.2f}",
        f"{row.ratio.median:.2f}" if row.ratio else "",
        "" if is_bare else f"{row.server_us.median:.0f}",
        f"{row.workers_us.median:.0f}",
    ]


def describe(cell: Cell) -> str:
    """Say how a cell ran, in a few words."""
    workers = "1 worker" if cell.workers == 1 else f"{cell.workers} workers"
    processes = "1 process" if cell.workers == 1 else f"{cell.workers} processes"
    if cell.kind == BARE:
        return f"bare, {processes}, batch {cell.batch}"
    return f"served, {workers}, c={cell.connections}"


def show_spread(values: Spread) -> str:
    """Show half the distance from lowest to highest, relative to the median."""
    if values.low == values.high:
        return ""
    return f"{50 * (values.high - values.low) / values.median:.0f}%"


def _footprints(footprints: Sequence[Footprint]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("server of")
    for name in ("workers", "ready s", "server RSS MB", "PSS", "each worker RSS", "PSS"):
        table.add_column(name, justify="right", no_wrap=True)
    for subject, workers in sorted({(each.subject, each.workers) for each in footprints}):
        own = [f for f in footprints if (f.subject, f.workers) == (subject, workers)]
        columns = [
            [f.start_s for f in own],
            [f.server_rss_mb for f in own],
            [f.server_pss_mb for f in own],
            [f.worker_rss_mb for f in own],
            [f.worker_pss_mb for f in own],
        ]
        start, *sizes = (spread(column).median for column in columns)
        table.add_row(subject, str(workers), f"{start:.1f}", *(f"{size:.0f}" for size in sizes))
    return table
