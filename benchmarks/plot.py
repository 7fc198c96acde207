"""Results → one picture: rates beside the bare loop, latency, and where the CPU goes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.archives import ECHO
from benchmarks.results import BARE, BUSY_NEIGHBOUR, SERVED, Results, Row, summarise

COLOURS = {1: "#86b6dd", 2: "#1f6fb2"}
OTHER_COLOUR = "#12406b"
SERVER_COLOUR, WORKER_COLOUR = "#e08214", "#9ecae1"
BARE_COLOUR = "#333333"
SUBTLE = "#777777"


def draw(results: Results, file: Path) -> None:
    """Draw the results as PNG: a row of three charts per model."""
    rows = summarise(results.samples)
    subjects = sorted({row.cell.subject for row in rows if row.cell.subject != ECHO})
    layout = ConstrainedLayoutEngine(rect=(0.005, 0.03, 0.985, 0.925), wspace=0.05, hspace=0.06)
    figure, axes = pyplot.subplots(
        len(subjects), 3, figsize=(14, 4.1 * len(subjects)), squeeze=False, layout=layout,
        gridspec_kw={"width_ratios": (1.05, 1.05, 1)},
    )  # fmt: skip
    for line, subject in zip(axes, subjects, strict=True):
        own = [row for row in rows if row.cell.subject == subject]
        _draw_rates(line[0], subject, own)
        _draw_latency(line[1], own)
        _draw_cpu(line[2], own, [row for row in rows if row.cell.subject == ECHO])
    figure.suptitle(_title(results), fontsize=12, x=0.012, y=0.985, ha="left", weight="bold")
    figure.text(0.012, 0.008, _footnote(results), fontsize=8, color=SUBTLE)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _title(results: Results) -> str:
    machine = results.about["machine"]
    return f"Modelyard: the digits model, served and bare · {machine['cores']} cores"


def _footnote(results: Results) -> str:
    about = results.about
    others = statistics.median(row.other_cores for row in summarise(results.samples))
    busy = f" · beside other work on {others:.1f} cores" if others > BUSY_NEIGHBOUR else ""
    return (
        f"{about['machine']['cpu']} · wrk -t1 on the same cores · PNG in, JSON out · median of "
        f"{about['settings']['rounds']} rounds of {about['settings']['seconds']:g} s, "
        f"lines from lowest to highest · {about['date'][:10]}{busy}"
    )


def _served(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Return the served rows by number of workers, in the order of connections."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        if row.cell.kind == SERVED:
            found.setdefault(row.cell.workers, []).append(row)
    return found


def _workers(count: int) -> str:
    return f"{count} worker" if count == 1 else f"{count} workers"


def _positions(groups: int, bars: int, bar: int) -> tuple[list[float], float]:
    """Return where the bars of one series stand, and their width."""
    width = 0.8 / bars
    return [group + (bar - (bars - 1) / 2) * width for group in range(groups)], width


def _draw_rates(axes: Any, subject: str, rows: Sequence[Row]) -> None:
    """Bars: requests per second. Ticks across them: the bare loop that each is held against."""
    series = _served(rows)
    for at, (workers, own) in enumerate(series.items()):
        places, width = _positions(len(own), len(series), at)
        heights = [row.rate.median for row in own]
        errors = [
            [row.rate.median - row.rate.low for row in own],
            [row.rate.high - row.rate.median for row in own],
        ]
        axes.bar(
            places, heights, 0.92 * width, yerr=errors, color=COLOURS.get(workers, OTHER_COLOUR),
            label=_workers(workers), error_kw={"elinewidth": 1, "ecolor": SUBTLE},
        )  # fmt: skip
        for place, row in zip(places, own, strict=True):
            _draw_bare(axes, place, width, row)
    axes.plot([], [], color=BARE_COLOUR, linewidth=2, label="bare loop")
    _name_groups(axes, next(iter(series.values())))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylim(0, 1.18 * max(_top(row) for own in series.values() for row in own))
    _finish(axes, f"{subject}, requests/s")


def _draw_bare(axes: Any, place: float, width: float, row: Row) -> None:
    if row.ratio is None:
        return
    bare = row.rate.median / row.ratio.median
    axes.plot([place - 0.48 * width, place + 0.48 * width], [bare, bare], BARE_COLOUR, linewidth=2)
    axes.annotate(
        f"×{row.ratio.median:.2f}", (place, _top(row)), (0, 4), textcoords="offset points",
        ha="center", fontsize=8, color=BARE_COLOUR,
    )  # fmt: skip


def _top(row: Row) -> float:
    """Return the highest point that is drawn for a row."""
    bare = row.rate.median / row.ratio.median if row.ratio else 0.0
    return max(row.rate.high, bare)


def _draw_latency(axes: Any, rows: Sequence[Row]) -> None:
    """Dots: p50, joined to p99, on a logarithmic axis."""
    series = _served(rows)
    for at, (workers, own) in enumerate(series.items()):
        colour = COLOURS.get(workers, OTHER_COLOUR)
        places, _ = _positions(len(own), len(series), at)
        p50, p99 = [row.p50_ms.median for row in own], [row.p99_ms.median for row in own]
        axes.vlines(places, p50, p99, color=colour, linewidth=3)
        axes.plot(places, p50, "o", color=colour, markersize=8, label=_workers(workers))
        axes.plot(places, p99, "_", color=colour, markersize=13, markeredgewidth=3)
        for place, value in [*zip(places, p50, strict=True), *zip(places, p99, strict=True)]:
            axes.annotate(
                f"{_short(value)}", (place, value), (8, -3), textcoords="offset points", fontsize=8
            )
    axes.plot([], [], "_", color=SUBTLE, markersize=13, markeredgewidth=3, label="up to p99")
    bare = [row.p50_ms.median for row in rows if row.cell.kind == BARE and row.cell.batch == 1]
    if bare:
        axes.axhline(min(bare), color=BARE_COLOUR, linewidth=1, linestyle="--")
        axes.annotate(
            f"one bare call {min(bare):.2g}", (0.99, min(bare)), (0, -11), fontsize=8,
            xycoords=("axes fraction", "data"), textcoords="offset points", ha="right",
        )  # fmt: skip
    axes.set_yscale("log")
    axes.margins(y=0.2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _name_groups(axes, next(iter(series.values())))
    _finish(axes, "p50 to p99, ms")


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _draw_cpu(axes: Any, rows: Sequence[Row], echo: Sequence[Row]) -> None:
    """Stacked bars: CPU per request in the server process and in the workers."""
    bare = [row for row in rows if row.cell.kind == BARE and row.cell.workers == 1]
    served = [row for row in rows if row.cell.kind == SERVED and row.cell.workers == 1]
    chosen = [*bare, *served, *(row for row in echo if row.cell.kind == SERVED)]
    names = [_cpu_name(row) for row in chosen]
    workers = [row.workers_us.median for row in chosen]
    servers = [row.server_us.median for row in chosen]
    axes.barh(names, workers, color=WORKER_COLOUR, label="worker or bare loop")
    axes.barh(names, servers, left=workers, color=SERVER_COLOUR, label="server process")
    for at, (worker, server) in enumerate(zip(workers, servers, strict=True)):
        text = f"{worker:.0f} + {server:.0f}" if server else f"{worker:.0f}"
        axes.annotate(
            text, (worker + server, at), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.invert_yaxis()
    axes.margins(x=0.18)
    _finish(axes, "CPU µs/request", grid="x")


def _cpu_name(row: Row) -> str:
    cell = row.cell
    if cell.kind == BARE:
        return f"bare, batch {cell.batch}"
    name = "nothing to do" if cell.subject == ECHO else "served"
    return f"{name}, c={cell.connections}"


def _name_groups(axes: Any, rows: Sequence[Row]) -> None:
    names = [row.cell.connections for row in rows]
    axes.set_xticks(range(len(names)), [f"c={count}" for count in names])
    axes.set_xlim(-0.6, len(names) - 0.4)


def _finish(axes: Any, title: str, grid: str = "y") -> None:
    axes.set_title(title, loc="left", fontsize=10, pad=22, weight="bold")
    axes.grid(axis=grid, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=9, length=0)
    axes.legend(
        fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1.02, 0.985), ncols=3,
        handlelength=1.2, columnspacing=1.0, handletextpad=0.5, borderaxespad=0.1,
    )  # fmt: skip
