"""Results → the page of tables that the terminal shows and the .txt keeps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.archives import ECHO, RESNET, TINY, TINY_BATCH_SIZE
from benchmarks.results import (
    BARE,
    BUSY_NEIGHBOUR,
    CEILING_GOAL,
    COMPUTE_GOAL,
    DROP_IN,
    MANY,
    OURS,
    Footprint,
    Results,
    Row,
    best,
    is_ours,
    summarise,
)

SAME_BATCHES = f"{DROP_IN} b={TINY_BATCH_SIZE}"
"""The drop-in with batches as large as those of `modelyard serve`."""
AHEAD = {8: 1.2, MANY: 1.4}
"""Connections → the goal beside the best of the other servers; 1 elsewhere."""


def tables(results: Results) -> RenderableType:
    """Return everything a reader of the terminal should see."""
    rows = summarise(results.samples)
    parts: list[RenderableType] = [Text(line, style="dim") for line in describe(results)]
    for subject, table in ((ECHO, _beside), (TINY, _beside), (RESNET, _compute)):
        if own := [row for row in rows if row.cell.subject == subject]:
            parts += [Text(), *table(own, results)]
    parts += [Text(), *_footprints(results.footprints), Text(), _goals(rows, results.footprints)]
    if any(row.other_cores > BUSY_NEIGHBOUR for row in rows):
        typical = statistics.median(row.other_cores for row in rows)
        note = (
            f"* more than {BUSY_NEIGHBOUR} cores were busy with other work (median {typical:.2f})"
        )
        parts += [Text(), Text(f"{note}: trust ratios and CPU per request, not rates")]
    return Group(*parts)


def describe(results: Results) -> list[str]:
    """Return in a few lines on what, with what, when and how."""
    about, machine, given = results.about, results.about["machine"], results.about["settings"]
    return [
        f"{machine['cpu']}, {machine['cores']} cores · wrk -t1 · medians of "
        f"{_count(given['rounds'], 'round')} · {about['date']}",
        " · ".join(f"{name} {version}" for name, version in about["versions"].items()),
        about["command"],
    ]


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _beside(rows: Sequence[Row], results: Results) -> list[RenderableType]:
    """Return the table of all servers, of one subject: each setting, by its rate."""
    counts = sorted({row.cell.connections for row in rows})
    most, subject = counts[-1], rows[0].cell.subject
    rates, p50s = ([f"{what}\nc={count}" for count in counts] for what in ("req/s", "p50"))
    table = _table("server", *rates, *p50s, f"p99\nc={most}", "CPU\nµs", "ready\ns", "PSS\nMB")
    at = {(row.cell.server, row.cell.connections): row for row in rows}
    # One that failed under load has no more than a line among the problems.
    servers = {name for name, _ in at if all((name, count) in at for count in counts)}
    for server in sorted(servers, key=lambda name: -at[name, most].rate.median):
        own = [at[server, count] for count in counts]
        last = own[-1]
        left = [
            each for each in results.footprints if (each.subject, each.server) == (subject, server)
        ]
        table.add_row(
            server,
            *map(_rate, own), *(_short(row.p50_ms.median) for row in own),
            _short(last.p99_ms.median), f"{_cpu_us(last):.0f}",
            f"{statistics.median(each.ready_s for each in left):.1f}",
            f"{statistics.median(each.pss_mb for each in left):.0f}",
            style="bold" if is_ours(server) else "",
        )  # fmt: skip
    workers = _count(results.about["settings"]["workers"], "worker")
    artifact = results.about["settings"].get("artifact", "onnx")
    name, what = (
        ("CEILING", "an answer that is there at once")
        if subject == ECHO
        else ("OVERHEAD", f"28×28 PNG → tiny network ({artifact}) → JSON")
    )
    note = f"p50, p99 in ms; CPU per request at c={most} and PSS: of all processes"
    ours = "drop-in: our torchserve, TorchServe's own archive, logs as they are by default"
    others = " · ".join(f"{name} {version}" for name, version in results.about["peers"].items())
    notes = [Text(line, style="dim") for line in (note, ours, others) if line]
    return [_title(name, f"{what}; {workers} each", results), table, *notes]


def _compute(rows: Sequence[Row], results: Results) -> list[RenderableType]:
    table = _table(
        "", "bare\nreq/s", "served\nreq/s", "served\n/bare", "lowest–\nhighest", "p50\nms",
        "p50 of one\nbare call", "p99\nms", "CPU\nms", "of\nbare",
    )  # fmt: skip
    bare = {row.cell.connections: row for row in rows if row.cell.server == BARE}
    for row in rows:
        if row.cell.server == BARE or row.rate_ratio is None or row.p50_ratio is None:
            continue
        ratio, alone = row.rate_ratio, row.cell.connections == 1
        table.add_row(
            f"c={row.cell.connections}", _rate(bare[row.cell.connections], 2), _rate(row, 2),
            f"{ratio.median:.3f}", f"{ratio.low:.3f}–{ratio.high:.3f}", _short(row.p50_ms.median),
            f"{row.p50_ratio.median:.3f}" if alone else "", _short(row.p99_ms.median),
            f"{_cpu_us(row) / 1000:.1f}",
            f"{_cpu_us(row) / _cpu_us(bare[row.cell.connections]):.3f}",
        )  # fmt: skip
    given = results.about["settings"]
    workers = _count(given["compute_workers"], "worker")
    what = f"500×375 JPEG → ResNet-50 → JSON; {workers} × 1 thread"
    note = "ratios: medians over the bare runs just before and just after each served one"
    return [
        _title("COMPUTE", what, results, given["compute_seconds"]), table, Text(note, style="dim")
    ]  # fmt: skip


def _footprints(footprints: Sequence[Footprint]) -> list[RenderableType]:
    table = _table(
        "serving", "workers", "ready\ns", "server\nPSS MB", "server\nRSS MB", "torch\nin it",
        "a worker\nPSS MB", "a worker\nRSS MB",
    )  # fmt: skip
    for subject in dict.fromkeys(each.subject for each in footprints if each.server == OURS):
        own = [each for each in footprints if (each.subject, each.server) == (subject, OURS)]

        def median(read: Callable[[Footprint], float | None], own: list[Footprint] = own) -> float:
            return statistics.median(value for each in own if (value := read(each)) is not None)

        table.add_row(
            subject, str(own[0].workers), f"{median(lambda each: each.ready_s):.1f}",
            f"{median(lambda each: each.server_pss_mb):.0f}",
            f"{median(lambda each: each.server_rss_mb):.0f}",
            "yes" if any(each.has_torch for each in own) else "no",
            f"{median(lambda each: each.worker_pss_mb):.0f}",
            f"{median(lambda each: each.worker_rss_mb):.0f}",
        )  # fmt: skip
    what = "ours; ready: command to first answer; memory after load"
    return [Text("START AND MEMORY", style="bold").append(f"  {what}", style="not bold"), table]


def _goals(rows: Sequence[Row], footprints: Sequence[Footprint]) -> RenderableType:
    """Hold what was found against what is promised; a part that did not run has no line."""
    table = _table("goal", "found", "")
    at = {(row.cell.subject, row.cell.server, row.cell.connections): row for row in rows}

    def add(goal: str, found: str, is_met: bool) -> None:
        table.add_row(goal, found, "met" if is_met else Text("not met", style="bold red"))

    if row := at.get((ECHO, OURS, MANY)):
        rate, cpu = row.rate.median, row.server_us.median
        add(f"ceiling ≥ {CEILING_GOAL:,}/s at c={MANY}", f"{rate:,.0f}", rate >= CEILING_GOAL)
        add(f"server CPU ≤ 60 µs a request at c={MANY}", f"{cpu:.0f}", cpu <= 60)
    for subject, name, who, ahead in (
        (ECHO, "ceiling", OURS, {}),
        (TINY, "overhead", DROP_IN, AHEAD),
        (TINY, "overhead", OURS, AHEAD),
    ):
        for count in sorted({row.cell.connections for row in rows}):
            found = best(row for row in rows if row.cell.subject == subject
                         and row.cell.server != BARE
                         and row.cell.connections == count)  # fmt: skip
            others = [row for server, row in found.items() if not is_ours(server)]
            if others and (row := found.get(who)):
                top = max(others, key=lambda other: other.rate.median)
                share, goal = row.rate.median / top.rate.median, ahead.get(count, 1.0)
                add(f"{name}: {who} ≥ {goal:.1f} of every other at c={count}",
                    f"{share:.2f} × {top.cell.server}", share >= goal)  # fmt: skip
    for count in sorted({row.cell.connections for row in rows}):
        row, drop_in = at.get((TINY, OURS, count)), at.get((TINY, SAME_BATCHES, count))
        if row is not None and drop_in is not None:
            share = _cpu_us(drop_in) / _cpu_us(row)
            add(f"drop-in: CPU a request ≤ 1.05 of {OURS}'s at c={count}",
                f"{share:.3f}", share <= 1.05)  # fmt: skip
    for count in sorted({row.cell.connections for row in rows if row.cell.connections > 1}):
        if (row := at.get((RESNET, OURS, count))) and row.rate_ratio:
            share = row.rate_ratio.median
            add(f"compute: ≥ {COMPUTE_GOAL} of bare at c={count}",
                f"{share:.3f}", share >= COMPUTE_GOAL)  # fmt: skip
    if (row := at.get((RESNET, OURS, 1))) and row.p50_ratio:
        share = row.p50_ratio.median
        add("compute: p50 at c=1 ≤ 1.05 of one bare call", f"{share:.3f}", share <= 1.05)
    own = [each for each in footprints if each.server == OURS]
    if own:
        has_torch = any(each.has_torch for each in own)
        add("the server process has no torch", "torch" if has_torch else "none", not has_torch)
    return table


def _title(name: str, what: str, results: Results, seconds: float | None = None) -> Text:
    length = results.about["settings"]["seconds"] if seconds is None else seconds
    return Text(name, style="bold").append(f"  {what}; {length:g} s a run", style="not bold")


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _cpu_us(row: Row) -> float:
    """Return the CPU time of a request in all processes, in microseconds."""
    return row.server_us.median + row.workers_us.median


def _short(value: float) -> str:
    """Show three digits or so."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _rate(row: Row, digits: int = 0) -> str | Text:
    if row.failures:
        return Text(f"{row.failures} failed", style="bold red")
    mark = "*" if row.other_cores > BUSY_NEIGHBOUR else ""
    return f"{row.rate.median:,.{digits}f}{mark}"
