"""What a server answers in time when more is asked of it than it can do.

    python -m benchmarks.overload --quick
    python -m benchmarks.overload [--rounds 3] [--seconds 3] [--deadline 100]
    python -m benchmarks.overload --handler digits --setting deadline --times 10 --seconds 60

Three handlers, one worker each: `echo` answers at once, `digits` is the network of that example in
ONNX, `sleep` takes 1.25 ms a request and leaves the cores to the others. Three settings: `default`,
with a queue of 100 requests and no deadline; `deadline`, where a deep queue leaves the choice to
the deadline that each request names; `patient`, a deep queue and no deadline. Each is loaded by 64
to 4,000 clients that ask again as soon as they are answered, and by 1.5, 3 and 10 times its
capacity in an open loop. The capacity is what 64 clients get; it is measured before and after every
load, because the machine drifts. After a load with a deadline follows one of 0.75 times the
capacity: how long until every request is answered in time again?

Goals: goodput at least 0.9 of the capacity; p99 of what was accepted at most the deadline; p99 of
the refusals at most 5 ms, up to 3 times the capacity; recovered within 2 s.

Server, worker and generator share the machine's cores. An open loop sends no more than --most-rate,
which is what the generator can do beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import procfs
from benchmarks.archives import (
    ECHO_BATCH_SIZE,
    ECHO_HANDLER,
    ROOT,
    Subject,
    archive_digits,
    build_bare,
    build_digits,
    scan_files,
)
from benchmarks.open_loop import Figures, GeneratorFailed, Phase, Report, compiled, run
from benchmarks.server import Server, wait_idle

matplotlib.use("Agg")

from matplotlib import pyplot

LOCAL_RESULTS = ROOT / "benchmarks" / "results" / "local"
CLIENTS, TIMES = (64, 512, 2000, 4000), (1.5, 3.0, 10.0)
QUICK_CLIENTS, QUICK_TIMES, QUICK_S = (512, 4000), (3.0,), 1.0
AFTERWARDS, AFTERWARDS_S = 0.75, 2.5
"""The load after each load, as a share of the capacity, and its length."""
CAPACITY_CLIENTS = 64
MOST_RATE = 40_000.0
GOODPUT, REFUSED_MS, RECOVERED_S = 0.9, 5.0, 2.0
"""The goals: of the capacity, p99, and after the load."""
REFUSALS_UP_TO = 3.0
"""Times the capacity, for the goal of refusals."""
WIDTH = 220

DEEP = "jobQueueSize: 10000\n"
SLEEP_MS = 1.25
SLEEP_HANDLER = f'''\
"""Take {SLEEP_MS} ms for each row."""

import time


def handle(data, context):
    if data is None:
        return None
    until = time.perf_counter() + {SLEEP_MS / 1000} * len(data)
    while (left := until - time.perf_counter()) > 0:
        time.sleep(left)
    return ["ok"] * len(data)
'''


@dataclass(frozen=True)
class Setting:
    """How a model is configured and asked."""

    name: str
    has_deep_queue: bool
    has_deadline: bool


HANDLERS = ("echo", "digits", "sleep")
SETTINGS = (
    Setting("default", False, False),
    Setting("deadline", True, True),
    Setting("patient", True, False),
)


@dataclass(frozen=True)
class Cell:
    """One handler, setting and load."""

    handler: str
    setting: str
    clients: int | None
    """Clients of a closed loop."""
    times: float | None
    """Rate of an open loop over the capacity."""

    @property
    def load(self) -> str:
        """The load, for people."""
        return f"{self.clients} clients" if self.clients else f"{self.times:g} ×"


@dataclass(frozen=True)
class Run:
    """One load and what followed it."""

    cell: Cell
    deadline_ms: float | None
    capacity: float
    """Requests per second, the mean of the runs before and after."""
    figures: Figures
    recovered_s: float | None
    """When the last request was due that was not answered in time, after the load."""
    server_cores: float
    worker_cores: float
    generator_cores: float
    other_cores: float
    """Busy with none of these."""
    connections: int

    @property
    def share(self) -> float:
        """Goodput over the capacity."""
        return self.figures.goodput / self.capacity


def main() -> None:
    """Measure, print a table, and keep it with the figures and a picture."""
    given = _parse()
    try:
        compiled()
        with tempfile.TemporaryDirectory(prefix="modelyard-overload-") as name:
            runs = measure(given, Path(name))
    except GeneratorFailed as error:
        sys.exit(str(error))
    about = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["python -m benchmarks.overload", *sys.argv[1:]]),
        "machine": procfs.describe_machine(),
        "settings": {
            "deadline_ms": given.deadline, "seconds": given.seconds, "rounds": given.rounds,
            "workers": 1,
        },
    }  # fmt: skip
    given.output.mkdir(parents=True, exist_ok=True)
    keep(about, runs, given.output / given.name)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a few loads of a second each: two to four minutes")
    add("--handler", choices=HANDLERS, action="append", help="repeatable")
    names = [setting.name for setting in SETTINGS]
    add("--setting", choices=names, action="append", help="repeatable")
    add("--clients", type=int, action="append", help="of a closed loop; repeatable")
    add("--times", type=float, action="append", help="the capacity, in an open loop; repeatable")
    add("--deadline", type=float, default=100, help="milliseconds")
    add("--seconds", type=float, help="length of each load (3)")
    add("--rounds", type=int, help="(3)")
    add("--most-rate", type=float, default=MOST_RATE, help="requests per second, in an open loop")
    add("-o", "--output", type=Path, default=LOCAL_RESULTS)
    add("--name", default=time.strftime("%Y-%m-%dT%H%M%S-overload"))
    given = parser.parse_args()
    if given.clients is None and given.times is None:
        given.clients, given.times = (
            (QUICK_CLIENTS, QUICK_TIMES) if given.quick else (CLIENTS, TIMES)
        )
    given.clients, given.times = given.clients or (), given.times or ()
    given.seconds = given.seconds or (QUICK_S if given.quick else 3.0)
    given.rounds = given.rounds or (1 if given.quick else 3)
    given.handler = given.handler or HANDLERS
    given.setting = given.setting or (names[:2] if given.quick else names)
    return given


def build(folder: Path, handler: str, is_deep: bool) -> Subject:
    """Archive one of the handlers, with a deep queue or with the one that is the default."""
    name = f"{handler}-deep" if is_deep else handler
    config = DEEP if is_deep else ""
    if handler == "digits":
        if not (folder / "artifacts").exists():
            build_digits(folder, ())
        return archive_digits(folder, "onnx", name, config)
    code, batch = (ECHO_HANDLER, ECHO_BATCH_SIZE) if handler == "echo" else (SLEEP_HANDLER, 8)
    return build_bare(folder, name, code, f"batchSize: {batch}\n{config}", scan_files())


def measure(given: argparse.Namespace, folder: Path) -> list[Run]:
    """Run every load of every handler and setting, round by round."""
    runs = []
    loads = [*((each, None) for each in given.clients), *((None, each) for each in given.times)]
    settings = [each for each in SETTINGS if each.name in given.setting]
    for handler in given.handler:
        for is_deep, group in groupby(settings, lambda each: each.has_deep_queue):
            own = list(group)
            subject = build(folder, handler, is_deep)
            with Server(subject, 1, folder / f"state-{subject.name}") as server:
                for _ in range(given.rounds):
                    cells = [(Cell(handler, each.name, *load), each.has_deadline)
                             for each in own for load in loads]  # fmt: skip
                    for run in _round(server, cells, given):
                        print(
                            f"{run.cell.handler}, {run.cell.setting}, {run.cell.load}: capacity "
                            f"{run.capacity:,.0f}/s, goodput {run.share:.2f} of it",
                            file=sys.stderr, flush=True,
                        )  # fmt: skip
                        runs.append(run)
    return runs


def _round(
    server: Server, cells: Sequence[tuple[Cell, bool]], given: argparse.Namespace
) -> Iterator[Run]:
    """Run each load once, between two measurements of the capacity."""
    body = server.subject.requests[0].read_bytes()
    kind = server.subject.content_type
    capacity_s = min(2.0, given.seconds)

    def capacity() -> float:
        wait_idle(server.usage)
        phase = Phase(0, capacity_s)
        found = asyncio.run(
            run(server.url, body, [phase], closed=CAPACITY_CLIENTS, content_type=kind)
        )
        wait_idle(server.usage)
        return found.phases[0].goodput

    before = capacity()
    for cell, has_deadline in cells:
        deadline_s = given.deadline / 1000 if has_deadline else None
        rate = min((cell.times or 0) * before, given.most_rate)
        phases = [Phase(rate, given.seconds)]
        if cell.times and has_deadline:
            phases.append(Phase(AFTERWARDS * before, AFTERWARDS_S))
        meter = _Meter(server)
        report = asyncio.run(
            run(server.url, body, phases, deadline_s, closed=cell.clients, content_type=kind)
        )
        cores = meter.cores(report)
        after = capacity()
        recovered = report.phases[1].last_not_good_s if len(phases) > 1 else None
        yield Run(cell, deadline_s and 1000 * deadline_s, (before + after) / 2, report.phases[0],
                  recovered, *cores, report.connections)  # fmt: skip
        before = after


class _Meter:
    """What was busy since it was made."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = self._read()

    def cores(self, report: Report) -> tuple[float, float, float, float]:
        """Return the cores that server, worker, generator and others kept busy."""
        now = self._read()
        took_s, busy_s, own_s, server_s, worker_s = (
            after - before for after, before in zip(now, self._before, strict=True)
        )
        others = (busy_s - own_s - server_s - worker_s - report.cpu_s) / took_s
        # This process plans before the load and counts after it; the server has nothing to do then.
        cores = server_s / report.wall_s, worker_s / report.wall_s, report.cores, max(0.0, others)
        return cores[0], cores[1], cores[2], cores[3]

    def _read(self) -> tuple[float, ...]:
        usage = self._server.usage()
        return (time.perf_counter(), procfs.busy_s(), time.process_time(),
                usage.server_s, usage.workers_s)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One cell over all rounds: medians, but counts of what should not happen are sums."""

    cell: Cell
    deadline_ms: float | None
    runs: Sequence[Run]

    def middle(self, read: Callable[[Run], float]) -> float:
        """Return the median."""
        return statistics.median(map(read, self.runs))

    @property
    def share(self) -> float:
        """Goodput over the capacity."""
        return self.middle(lambda run: run.share)

    @property
    def recovered_s(self) -> float | None:
        """When all was well again; None where nothing came after the load."""
        found = [run.recovered_s for run in self.runs if run.recovered_s is not None]
        return statistics.median(found) if found else None

    @property
    def missed(self) -> list[str]:
        """The goals that were not met: rate, time of what was accepted, recovery, refusals."""
        times, missed = self.cell.times, []
        if self.share < GOODPUT * min(1, times or 1):
            missed.append("rate")
        if self.deadline_ms is not None:
            if self.middle(lambda run: run.figures.accepted_ms.p99) > self.deadline_ms:
                missed.append("time")
            if self.recovered_s is not None and self.recovered_s >= RECOVERED_S:
                missed.append("recovery")
        refused_ms = self.middle(lambda run: run.figures.refused_ms.p99)
        if times and times <= REFUSALS_UP_TO and refused_ms > REFUSED_MS:
            missed.append("refusals")
        return missed


def lines(runs: Sequence[Run]) -> list[Line]:
    """Return one line per cell."""
    cells = dict.fromkeys(run.cell for run in runs)
    found = {cell: [run for run in runs if run.cell == cell] for cell in cells}
    return [Line(cell, own[0].deadline_ms, own) for cell, own in found.items()]


def tabulate(runs: Sequence[Run]) -> Table:
    """Return the table of all lines."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for name in ("handler", "setting", "load"):
        table.add_column(name, no_wrap=True)
    names = (
        "capacity\n/s", "offered\n/s", "good\n/s", "of\ncap.", "p50\nms", "p99\nms", "refused\n/s",
        "p50\nms", "p99\nms", "late", "504", "failed", "unsent", "well\nafter s", "server\ncores",
        "worker\ncores", "gener.\ncores", "conn.", "due→\nsent ms", "goals",
    )  # fmt: skip
    for name in names:
        table.add_column(name, justify="left" if name == "goals" else "right", no_wrap=True)
    last = None
    for line in lines(runs):
        middle, cell = line.middle, line.cell
        if last not in (None, (cell.handler, cell.setting)):
            table.add_section()
        is_new, last = last != (cell.handler, cell.setting), (cell.handler, cell.setting)

        def sum_of(count: str, runs: Sequence[Run] = line.runs) -> str:
            return str(sum(getattr(run.figures, count) for run in runs) or "")

        table.add_row(
            cell.handler if is_new else "",
            cell.setting if is_new else "",
            cell.load,
            f"{middle(lambda run: run.capacity):,.0f}",
            f"{middle(lambda run: run.figures.offered / run.figures.seconds):,.0f}",
            f"{middle(lambda run: run.figures.goodput):,.0f}",
            f"{line.share:.2f}",
            _ms(middle(lambda run: run.figures.answered_ms.p50)),
            _ms(middle(lambda run: run.figures.accepted_ms.p99)),
            f"{middle(lambda run: run.figures.refused / run.figures.seconds):,.0f}",
            _ms(middle(lambda run: run.figures.refused_ms.p50)),
            _ms(middle(lambda run: run.figures.refused_ms.p99)),
            sum_of("late"),
            sum_of("expired"),
            sum_of("failed"),
            sum_of("unsent"),
            "" if line.recovered_s is None else f"{line.recovered_s:.2f}",
            f"{middle(lambda run: run.server_cores):.2f}",
            f"{middle(lambda run: run.worker_cores):.2f}",
            f"{middle(lambda run: run.generator_cores):.2f}",
            f"{middle(lambda run: run.connections):.0f}",
            f"{middle(lambda run: run.figures.lateness_ms.p99):.1f}",
            " ".join(line.missed) or "met",
        )  # fmt: skip
    return table


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def keep(about: dict[str, Any], runs: Sequence[Run], stem: Path) -> None:
    """Write the figures, the table and the picture, and print the table."""
    data, text, picture = (stem.with_name(stem.name + end) for end in (".json", ".txt", ".png"))
    data.write_text(json.dumps({**about, "runs": [asdict(run) for run in runs]}, indent=1) + "\n")
    settings, machine = about["settings"], about["machine"]
    others = statistics.median(run.other_cores for run in runs)
    heading = (
        f"{machine['cpu']}, {machine['cores']} cores, shared by server, one worker and generator · "
        f"deadline {settings['deadline_ms']:g} ms · medians of {settings['rounds']} round(s) of "
        f"{settings['seconds']:g} s · other work on {others:.1f} cores · {about['date']}"
    )
    found = lines(runs)
    met = sum(not line.missed for line in found)
    draw(found, heading, picture)
    with text.open("w") as file:
        for console in (Console(highlight=False, width=WIDTH), Console(file=file, width=WIDTH)):
            console.print(heading, soft_wrap=True)
            console.print(tabulate(runs))
            console.print(f"{met} of {len(found)} lines meet every goal", soft_wrap=True)
    for written in (data, text, picture):
        print("wrote", written.relative_to(ROOT) if written.is_relative_to(ROOT) else written)


COLOURS = {"default": "#1f6fb2", "deadline": "#e08214", "patient": "#7a9a3a"}


def draw(found: Sequence[Line], heading: str, file: Path) -> None:
    """Draw goodput over capacity above, and p99 of what was accepted below, for each handler."""
    handlers = list(dict.fromkeys(line.cell.handler for line in found))
    figure, axes = pyplot.subplots(
        2, len(handlers), figsize=(1.5 + 4 * len(handlers), 6.5), layout="constrained",
        squeeze=False, sharex="col",
    )  # fmt: skip
    for column, handler in enumerate(handlers):
        own = [line for line in found if line.cell.handler == handler]
        loads = list(dict.fromkeys(line.cell.load for line in own))
        settings = list(dict.fromkeys(line.cell.setting for line in own))
        above, below = axes[0][column], axes[1][column]
        width = 0.8 / len(settings)
        for at, setting in enumerate(settings):
            of_setting = [line for line in own if line.cell.setting == setting]
            places = [
                loads.index(line.cell.load) + (at - (len(settings) - 1) / 2) * width
                for line in of_setting
            ]
            shares = [line.share for line in of_setting]
            above.bar(places, shares, 0.9 * width, color=COLOURS[setting], label=setting)
            slow = [line.middle(lambda run: run.figures.accepted_ms.p99) for line in of_setting]
            below.plot(places, slow, "o", color=COLOURS[setting], label=setting)
            if (deadline_ms := of_setting[0].deadline_ms) is not None:
                below.axhline(deadline_ms, color=COLOURS[setting], linewidth=1, linestyle="--")
        above.axhline(GOODPUT, color="#333333", linewidth=1, linestyle="--")
        above.set_title(f"{handler}: answered in time, over capacity", loc="left", fontsize=10)
        below.set_title("p99 ms of what was accepted", loc="left", fontsize=10)
        below.set_yscale("log")
        below.set_xticks(range(len(loads)), [load.replace(" ", "\n") for load in loads], fontsize=8)
        for each in (above, below):
            for side in ("top", "right"):
                each.spines[side].set_visible(False)
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.suptitle(heading, fontsize=7, x=0.01, ha="left")
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
