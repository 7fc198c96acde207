"""Results → one picture: rate and p50 of every server, and the share of the bare loop."""

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

from benchmarks.archives import ECHO, RESNET, TINY
from benchmarks.results import (
    BARE,
    BUSY_NEIGHBOUR,
    COMPUTE_GOAL,
    OURS,
    Results,
    Row,
    Spread,
    best,
    family,
    is_ours,
    summarise,
)

OUR_COLOUR, OTHER_COLOUR = "#1f6fb2", "#b9c4cd"
LINE_COLOUR, SUBTLE = "#333333", "#777777"
GOAL_COLOUR = "#e08214"


def draw(results: Results, file: Path) -> None:
    """Draw the results as PNG: rates and p50 beside other servers; bare loop and ceiling below.

    A part that was not measured is left out.
    """
    rows = {
        subject: [row for row in summarise(results.samples) if row.cell.subject == subject]
        for subject in (TINY, RESNET, ECHO)
    }
    counts = sorted({row.cell.connections for row in rows[TINY]})
    lower = {"compute": rows[RESNET], "p50 bare": rows[RESNET], "ceiling": rows[ECHO]}
    lines: list[Any] = [
        [f"{kind}{count}" for count in counts] for kind in ("rate", "p50_ms") if counts
    ]
    if below := [name for name, own in lower.items() if own]:
        # As many columns as both lines can be cut into.
        lines = [[panel for panel in line for _ in below] for line in lines]
        lines.append([panel for panel in below for _ in counts or below[:1]])
    servers = len({family(row.cell.server) for row in rows[TINY]})
    upper = 0.8 + 0.3 * servers
    heights = [*([upper] * (len(lines) - bool(below))), *([2.6] if below else [])]
    height = sum(heights) + 0.9
    figure, axes = pyplot.subplot_mosaic(
        lines, figsize=(13, height),
        layout=ConstrainedLayoutEngine(
            rect=(0.005, 0.25 / height, 0.985, 1 - 0.65 / height), wspace=0.05, hspace=0.07
        ),
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for count in counts:
        _draw_servers(axes, rows[TINY], count, counts)
    if rows[RESNET]:
        _draw_shares(axes["compute"], rows[RESNET])
        _draw_calls(axes["p50 bare"], rows[RESNET])
    if rows[ECHO]:
        _draw_ceiling(axes["ceiling"], rows[ECHO])
    machine = results.about["machine"]
    figure.suptitle(
        f"Modelyard on {machine['cores']} cores, wrk -t1 on the same ones",
        fontsize=13, x=0.012, y=1 - 0.1 / height, va="top", ha="left", weight="bold",
    )  # fmt: skip
    busy = any(row.other_cores > BUSY_NEIGHBOUR for own in rows.values() for row in own)
    colour = GOAL_COLOUR if busy else SUBTLE
    figure.text(0.012, 0.06 / height, _footnote(results), fontsize=8, color=colour)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _footnote(results: Results) -> str:
    about, given = results.about, results.about["settings"]
    others = statistics.median(sample.other_cores for sample in results.samples)
    return (
        f"{about['machine']['cpu']} · other work on {others:.1f} cores · medians over "
        f"{given['rounds']} round(s), lines from "
        f"lowest to highest · each server at its best setting for the load; drop-in: Modelyard's "
        f"torchserve · tiny network: {given['workers']} worker(s), ResNet-50: "
        f"{given['compute_workers']} × 1 thread · {about['date'][:10]}"
    )


def _draw_servers(axes: Any, rows: Sequence[Row], count: int, counts: Sequence[int]) -> None:
    """Bars of one number of connections: rates, and p50 below, both the best first."""
    own = [row for row in rows if row.cell.connections == count]
    first = count == counts[0]
    for kind, title, form in (
        ("rate", "tiny network, requests/s", "{:,.0f}"),
        ("p50_ms", "tiny network, p50 ms", "{:.2f}"),
    ):
        panel = axes[f"{kind}{count}"]
        # Each server at its best setting for this load.
        values: dict[str, Spread] = {
            row.cell.server: getattr(row, kind) for row in best(own).values()
        }
        names = sorted(values, key=lambda name: values[name].median, reverse=kind == "rate")
        draw = _draw_bars if kind == "rate" else _draw_dots
        draw(panel, names, [values[name] for name in names], form)
        _finish(panel, f"{title}, c={count}" if first else f"c={count}")


def _draw_bars(
    axes: Any, names: Sequence[str], values: Sequence[Spread], form: str, ours: str = OURS
) -> None:
    """Horizontal bars with their figures, the first on top; `ours` is coloured."""
    places = range(len(names))
    axes.barh(places, [value.median for value in values], 0.72, color=_colours(names, ours))
    lows, highs = [value.low for value in values], [value.high for value in values]
    axes.hlines(places, lows, highs, color=SUBTLE, linewidth=1)
    _name_lines(axes, names, values, form)


def _draw_dots(axes: Any, names: Sequence[str], values: Sequence[Spread], form: str) -> None:
    """Dots with their figures on a logarithmic axis, which has no zero to draw a bar from."""
    places, colours = range(len(names)), _colours(names, OURS)
    lows, highs = [value.low for value in values], [value.high for value in values]
    axes.hlines(places, lows, highs, color=colours, linewidth=2)
    axes.scatter([value.median for value in values], places, color=colours, s=55, zorder=3)
    _name_lines(axes, names, values, form)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _colours(names: Sequence[str], ours: str) -> list[str]:
    return [OUR_COLOUR if is_ours(name) or ours in (name, "") else OTHER_COLOUR for name in names]


def _name_lines(axes: Any, names: Sequence[str], values: Sequence[Spread], form: str) -> None:
    """Write the names at the axis and the figures behind the highest value."""
    for place, value in enumerate(values):
        axes.annotate(
            form.format(value.median), (value.high, place), (7, 0), textcoords="offset points",
            va="center", fontsize=8, color=LINE_COLOUR,
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.2)


def _draw_shares(axes: Any, rows: Sequence[Row]) -> None:
    """Dots: served rate over the bare loop's, with every ratio's range."""
    served = [(row.cell.connections, row.rate_ratio) for row in rows if row.rate_ratio]
    places = range(len(served))
    axes.axhline(1, color=LINE_COLOUR, linewidth=1)
    axes.axhline(COMPUTE_GOAL, color=GOAL_COLOUR, linewidth=1, linestyle="--")
    axes.annotate(
        f"goal {COMPUTE_GOAL}", (0.01, COMPUTE_GOAL), (0, -10), fontsize=8, color=GOAL_COLOUR,
        xycoords=("axes fraction", "data"), textcoords="offset points",
    )  # fmt: skip
    axes.vlines(
        places, [ratio.low for _, ratio in served], [ratio.high for _, ratio in served],
        color=OUR_COLOUR, linewidth=2,
    )  # fmt: skip
    axes.plot(places, [ratio.median for _, ratio in served], "o", color=OUR_COLOUR, markersize=8)
    for place, (_, ratio) in zip(places, served, strict=True):
        axes.annotate(
            f"{ratio.median:.3f}", (place, ratio.median), (9, -3), textcoords="offset points",
            fontsize=9,
        )  # fmt: skip
    axes.set_xticks(places, [_processes(count, rows) for count, _ in served])
    axes.set_xlim(-0.5, len(served) - 0.5)
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(bottom, 0.94), max(top, 1.04))
    _finish(axes, "ResNet-50: served rate over the bare loop's", grid="y")


def _processes(count: int, rows: Sequence[Row]) -> str:
    """Name a group: at one connection one worker is busy, so it stands beside one process."""
    (bare,) = (row for row in rows if (row.cell.server, row.cell.connections) == (BARE, count))
    return f"c={count}" if bare.cell.workers > 1 else f"c={count}, 1 process"


def _draw_calls(axes: Any, rows: Sequence[Row]) -> None:
    """Bars: one bare call, and p50 at one connection."""
    alone = [row for row in rows if row.cell.connections == min(r.cell.connections for r in rows)]
    names = ["one bare call" if row.cell.server == BARE else "served" for row in alone]
    _draw_bars(axes, names, [row.p50_ms for row in alone], "{:.1f}", "served")
    _finish(axes, f"ResNet-50: p50 ms, c={alone[0].cell.connections}")


def _draw_ceiling(axes: Any, rows: Sequence[Row]) -> None:
    """Bars: rates where every answer is there at once, each server at its best setting."""
    most = max(row.cell.connections for row in rows)
    found = best(row for row in rows if row.cell.connections == most).values()
    own = sorted(found, key=lambda row: -row.rate.median)
    _draw_bars(axes, [row.cell.server for row in own], [row.rate for row in own], "{:,.0f}")
    _finish(axes, f"no model, requests/s, c={most}")


def _finish(axes: Any, title: str, grid: str = "x") -> None:
    axes.set_title(title, loc="left", fontsize=10, weight="bold")
    axes.grid(axis=grid, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=9, length=0)
