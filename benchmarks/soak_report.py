"""Samples of a soak → trends with a verdict, a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

JUDGED_FROM_S = 1500.0
"""After the warm-up; what grows in a shorter time says nothing about a day."""
MOST_MB_PER_HOUR = 1.0
PER_S = 600.0
"""Slopes are per ten minutes."""
MOST_POINTS = 200
"""Most points that the slope looks at, in pairs."""
COLOURS = ("#1f6fb2", "#e08214", "#86b6dd", "#777777")


@dataclass(frozen=True)
class Sample:
    """What was seen at one moment."""

    at_s: float
    """Since the load began."""
    server_rss_mb: float
    server_pss_mb: float
    server_descriptors: int
    server_threads: int
    worker_rss_mb: float
    """Memory of the echo model's worker, which nobody kills or reloads."""
    worker_pss_mb: float
    worker_descriptors: int
    worker_threads: int
    processes: int
    """All that the server has started."""
    rate: float
    """Predictions per second since the sample before."""
    p50_ms: float | None
    """None where nothing came back."""
    p99_ms: float | None


@dataclass(frozen=True)
class Limit:
    """How much a figure may change.

    Args:
        slope: growth per ten minutes.
        ratio: ratio of the last third's median to the first third's.
    """

    slope: float | None = None
    ratio: float | None = None


LIMITS: dict[str, Limit] = {
    "server_rss_mb": Limit(slope=MOST_MB_PER_HOUR * PER_S / 3600),
    "server_pss_mb": Limit(),
    "server_descriptors": Limit(slope=1.0),
    "server_threads": Limit(slope=1.0),
    "worker_rss_mb": Limit(slope=MOST_MB_PER_HOUR * PER_S / 3600),
    "worker_pss_mb": Limit(),
    "worker_descriptors": Limit(slope=0.5),
    "worker_threads": Limit(slope=0.5),
    "processes": Limit(slope=0.5),
    "p50_ms": Limit(ratio=1.5),
    "p99_ms": Limit(ratio=2.0),
}
"""Figure → what is allowed. PSS moves between processes when one that shares the pages ends."""


@dataclass(frozen=True)
class Trend:
    """How one figure went after the warm-up."""

    name: str
    first: float
    """Median of the first third."""
    last: float
    """Median of the last third."""
    slope: float
    """Per ten minutes: the median of the slopes between all pairs (Theil 1950, Sen 1968)."""
    limit: str
    is_within: bool


@dataclass(frozen=True)
class Soak:
    """Everything that one soak found."""

    about: dict[str, Any]
    warm_up_s: float
    samples: list[Sample]
    events: list[tuple[float, str]]
    """Seconds, and what was done."""
    outcomes: dict[str, dict[str, Any]]
    """Kind of request → counts."""
    tracebacks: int = 0
    """Tracebacks in the server's log: nothing that is done here may lead to one."""

    @property
    def settled(self) -> list[Sample]:
        """The samples after the warm-up."""
        return [sample for sample in self.samples if sample.at_s >= self.warm_up_s]

    @property
    def is_judged(self) -> bool:
        """Whether it was long enough for its slopes to count."""
        settled = self.settled
        return bool(settled) and settled[-1].at_s - settled[0].at_s >= JUDGED_FROM_S

    @property
    def lost(self) -> int:
        """Requests without an answer of status 200."""
        return sum(kind["lost"] + kind["failed"] for kind in self.outcomes.values())

    def faults(self) -> list[str]:
        """Return what is wrong, one line each."""
        found = [
            f"{kind}: {counts['lost']} requests without an answer, {counts['failed']} with an error"
            for kind, counts in self.outcomes.items()
            if counts["lost"] + counts["failed"]
        ]
        if self.tracebacks:
            found.append(f"{self.tracebacks} tracebacks in the server's log")
        if self.is_judged:
            found += [
                f"{trend.name} went from {trend.first:.4g} to {trend.last:.4g}, "
                f"{trend.slope:+.3g} per ten minutes; {trend.limit} is allowed"
                for trend in trends(self.settled)
                if not trend.is_within
            ]
        return found

    def content(self) -> dict[str, Any]:
        """Return what is kept as JSON."""
        return {
            "schema": 1,
            **self.about,
            "warm_up_s": self.warm_up_s,
            "outcomes": self.outcomes,
            "tracebacks": self.tracebacks,
            "faults": self.faults(),
            "trends": [asdict(trend) for trend in trends(self.settled)],
            "events": self.events,
            "samples": [asdict(sample) for sample in self.samples],
        }


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median slope between all pairs of points, which single spikes do not move."""
    thin = points[:: -(-len(points) // MOST_POINTS)] if points else []
    found = [(y - x) / (t - s) for (s, x), (t, y) in combinations(thin, 2) if t > s]
    return statistics.median(found) if found else 0.0


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """Return the trend of every figure that has a limit; none where next to nothing was seen."""
    if sum(sample.p50_ms is not None for sample in samples) < 3:
        return []
    found = []
    for name, limit in LIMITS.items():
        points = [
            (sample.at_s, float(value))
            for sample in samples
            if (value := getattr(sample, name)) is not None
        ]
        values = [value for _, value in points]
        third = max(1, len(values) // 3)
        first, last = statistics.median(values[:third]), statistics.median(values[-third:])
        growth = PER_S * slope(points)
        words, is_within = "", True
        if limit.slope is not None:
            words, is_within = f"{limit.slope:+.2g}/10 min", growth <= limit.slope
        elif limit.ratio is not None:
            words, is_within = f"×{limit.ratio:g}", last <= limit.ratio * first
        found.append(Trend(name, first, last, growth, words, is_within))
    return found


def table(soak: Soak) -> RenderableType:
    """Return the trends, the counts and the faults for a terminal."""
    figures = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    figures.add_column("after the warm-up")
    for name in ("first third", "last third", "per 10 min", "allowed"):
        figures.add_column(name, justify="right", no_wrap=True)
    for trend in trends(soak.settled):
        style = "" if trend.is_within or not soak.is_judged else "bold red"
        cells = f"{trend.first:.4g}", f"{trend.last:.4g}", f"{trend.slope:+.3g}", trend.limit
        figures.add_row(trend.name.replace("_", " "), *cells, style=style)
    counts = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    counts.add_column("requests")
    for name in ("sent", "answered", "failed", "lost"):
        counts.add_column(name, justify="right")
    for kind, found in soak.outcomes.items():
        counts.add_row(
            kind, *(f"{found[name]:,}" for name in ("sent", "answered", "failed", "lost"))
        )
    done = [event for _, event in soak.events]
    happened = ", ".join(f"{done.count(event)} × {event}" for event in dict.fromkeys(done))
    parts: list[RenderableType] = [figures, counts, Text(f"meanwhile: {happened or 'nothing'}")]
    if not soak.is_judged:
        parts.append(
            Text(f"slopes are judged from {JUDGED_FROM_S / 60:g} minutes after the warm-up")
        )
    parts += [Text(fault, style="bold red") for fault in soak.faults()]
    return Group(*parts)


def draw(soak: Soak, file: Path) -> None:
    """Draw memory, descriptors, latency and rate over time as PNG."""
    figure, ((memory, files), (latency, rate)) = pyplot.subplots(
        2, 2, figsize=(13, 7.5), sharex=True, layout="constrained"
    )
    _lines(memory, soak, "resident memory, MB", "server_rss_mb", "worker_rss_mb")
    memory.set_ylim(bottom=0)
    names = "server_descriptors", "server_threads", "worker_descriptors", "processes"
    _lines(files, soak, "descriptors, threads, processes", *names)
    files.set_ylim(bottom=0)
    _lines(latency, soak, "latency of predictions, ms", "p50_ms", "p99_ms")
    latency.set_yscale("log")
    _lines(rate, soak, "predictions per second", "rate")
    rate.set_ylim(bottom=0)
    for axes in (latency, rate):
        axes.set_xlabel("minutes")
    about = soak.about
    figure.suptitle(
        f"A soak of {soak.samples[-1].at_s / 60:.0f} min · {about['machine']['cores']} cores · "
        f"{soak.lost} of {sum(kind['sent'] for kind in soak.outcomes.values()):,} requests lost · "
        f"{about['date'][:10]}; dotted: reload, red: a worker killed, grey: warm-up",
        fontsize=11, x=0.01, ha="left",
    )  # fmt: skip
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _lines(axes: Any, soak: Soak, title: str, *names: str) -> None:
    minutes = [sample.at_s / 60 for sample in soak.samples]
    for name, colour in zip(names, COLOURS, strict=False):
        values = [getattr(sample, name) for sample in soak.samples]
        label = name.removesuffix("_mb").removesuffix("_ms").replace("_", " ")
        axes.plot(minutes, values, color=colour, linewidth=1.3, label=label)
    for at_s, event in soak.events:
        is_kill = event == "kill"
        axes.axvline(
            at_s / 60, color="#c0392b" if is_kill else "#bbbbbb", linewidth=0.7,
            linestyle="-" if is_kill else ":", zorder=0,
        )  # fmt: skip
    axes.axvspan(0, soak.warm_up_s / 60, color="#f2f2f2", zorder=-1)
    axes.set_title(title, loc="left", fontsize=10, weight="bold")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower right", ncols=len(names))


assert set(LIMITS) <= {field.name for field in fields(Sample)}
