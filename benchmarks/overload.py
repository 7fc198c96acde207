"""What a server answers in time when more is asked of it than it can do.

    python -m benchmarks.overload [--deadline 200] [--seconds 5] [--rounds 3] [--work sleep|spin]
    python -m benchmarks.overload --load 10 --seconds 60

Serves a handler of known cost with one worker, measures its capacity in a closed loop, and offers
multiples of that in an open loop, each request with the deadline in X-Request-Timeout. After each
load follows one of 0.75 times the capacity: how long until every request is answered in time again?

Goals: goodput at least 0.9 of the capacity, p99 of what was accepted at most the deadline, p99 of
the refusals under 5 ms, recovered within 2 s. `--work sleep` leaves the cores to the server and the
generator, so on a small machine it measures the queue; `spin` competes with them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import procfs
from benchmarks.archives import ROOT, Subject, modelyard
from benchmarks.server import Server

matplotlib.use("Agg")

from matplotlib import pyplot

LOCAL_RESULTS = ROOT / "benchmarks" / "results" / "local"
LOADS = (0.75, 1.5, 3.0)
AFTERWARDS, AFTERWARDS_S = 0.75, 4.0
"""The load after each load, as a share of the capacity, and its length."""
CLOSED, CLOSED_S = 64, 3.0
"""Connections that measure the capacity."""
GENERATOR_TIMEOUT_S = 60
GOODPUT, REFUSED_MS, RECOVERED_S = 0.9, 5.0, 2.0
"""The goals: of the capacity, p99, and after the load."""

PACED = "paced"
PACED_HANDLER = '''\
"""Take a known time for each row."""

import time

ROW_S = {row_s}


def handle(data, context):
    if data is None:
        return None
    until = time.perf_counter() + ROW_S * len(data)
    while (left := until - time.perf_counter()) > 0:
        {wait}
    return ["ok"] * len(data)
'''
WORK = {"sleep": "time.sleep(left)", "spin": "pass"}


@dataclass(frozen=True)
class Run:
    """One load and what followed it."""

    load: float
    """Offered, as a multiple of the capacity."""
    capacity: float
    """Requests per second."""
    figures: dict[str, Any]
    """As `open_loop` prints them."""
    afterwards: dict[str, Any]
    generator_cores: float
    server_us: float
    """CPU of the server process per request offered, in microseconds."""
    other_cores: float
    """Busy with neither server, worker nor generator."""

    @property
    def share(self) -> float:
        """Goodput over the capacity."""
        return float(self.figures["goodput"]) / self.capacity


def main() -> None:
    """Measure, print a table, and keep it with the figures and a picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deadline", type=float, default=200, help="milliseconds")
    parser.add_argument("--seconds", type=float, default=5, help="length of each load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", type=float, action="append", help="multiple of the capacity")
    parser.add_argument("--work", choices=WORK, default="sleep")
    parser.add_argument("--row-ms", type=float, default=1.25, help="cost of a request")
    parser.add_argument("--output", type=Path, default=LOCAL_RESULTS)
    parser.add_argument("--name", default=time.strftime("%Y-%m-%dT%H%M%S-overload"))
    given = parser.parse_args()
    loads = tuple(given.load or LOADS)
    with tempfile.TemporaryDirectory(prefix="modelyard-overload-") as name:
        subject = build_paced(Path(name), given.row_ms / 1000, given.work)
        with Server(subject, 1, Path(name) / "state") as server:
            runs = measure(
                server, loads, given.rounds, given.seconds, given.deadline / 1000,
                lambda text: print(text, file=sys.stderr, flush=True),
            )  # fmt: skip
    about = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["python -m benchmarks.overload", *sys.argv[1:]]),
        "machine": procfs.describe_machine(),
        "settings": {
            "deadline_ms": given.deadline, "seconds": given.seconds, "rounds": given.rounds,
            "row_ms": given.row_ms, "work": given.work, "workers": 1,
        },
    }  # fmt: skip
    given.output.mkdir(parents=True, exist_ok=True)
    keep(about, runs, given.output / given.name)
    if any(run.figures["failed"] or run.afterwards["failed"] for run in runs):
        sys.exit("some requests failed")


def build_paced(folder: Path, row_s: float, work: str) -> Subject:
    """Archive a handler that takes `row_s` for each row; its artifact is never opened."""
    sources = folder / PACED
    sources.mkdir()
    (sources / "paced.py").write_text(PACED_HANDLER.format(row_s=row_s, wait=WORK[work]))
    (sources / "nothing.bin").write_bytes(b"nothing")
    # The deadline decides, not the queue's length.
    (sources / "model-config.yaml").write_text("batchSize: 8\njobQueueSize: 1000\n")
    modelyard("archive", PACED, "--artifact", sources / "nothing.bin", "--handler",
              sources / "paced.py", "--version", "1.0", "--config-file",
              sources / "model-config.yaml", "-o", folder / "store")  # fmt: skip
    return Subject(PACED, folder / "store" / f"{PACED}.mar", "text/plain", ())


def measure(
    server: Server,
    loads: Sequence[float],
    rounds: int,
    seconds: float,
    deadline_s: float,
    progress: Callable[[str], None],
) -> list[Run]:
    """Run every load once per round, after measuring the capacity of that round."""
    runs = []
    for round in range(rounds):
        closed = _generate(
            server.url, CLOSED_S, "--closed", str(CLOSED), "--phase", f"0:{CLOSED_S}"
        )
        capacity = float(closed["phases"][0]["goodput"])
        progress(f"round {round + 1}: capacity {capacity:.0f}/s")
        for load in loads:
            phases = (f"{load * capacity}:{seconds}", f"{AFTERWARDS * capacity}:{AFTERWARDS_S}")
            before, busy_s, began = server.usage(), procfs.busy_s(), time.perf_counter()
            found = _generate(
                server.url, seconds + AFTERWARDS_S, "--deadline", str(deadline_s), "--seed",
                str(round + 1), *(word for phase in phases for word in ("--phase", phase)),
            )  # fmt: skip
            used, took_s = server.usage(), time.perf_counter() - began
            server_s = used.server_s - before.server_s
            own_s = server_s + used.workers_s - before.workers_s
            figures, afterwards = found["phases"]
            offered = figures["offered"] + afterwards["offered"]
            others = (procfs.busy_s() - busy_s - own_s) / took_s - found["cores"]
            run = Run(load, capacity, figures, afterwards, found["cores"],
                      round_to(1e6 * server_s / offered), round_to(max(0.0, others)))  # fmt: skip
            runs.append(run)
            progress(f"round {round + 1}: {load:g} times: goodput {run.share:.2f} of capacity")
    return runs


def round_to(value: float) -> float:
    """Round a figure for people."""
    return round(value, 2)


def _generate(url: str, seconds: float, *arguments: str) -> Any:
    """Run the generator in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.open_loop", url, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=seconds + GENERATOR_TIMEOUT_S
    )
    if done.returncode:
        sys.exit(f"the generator ended with code {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def tabulate(runs: Sequence[Run], deadline_ms: float) -> Table:
    """Return one line per load: medians over the rounds, and sums of what should not happen."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    names = (
        "load", "offered", "good", "of cap.", "p50", "p99", "refused", "p50", "p99", "late",
        "expired", "failed", "recovered", "server", "generator", "due→sent", "goals",
    )  # fmt: skip
    units = (
        "× cap.", "/s", "/s", "", "ms", "ms", "/s", "ms", "ms", "", "", "", "s", "CPU µs", "cores",
        "p99 ms", "",
    )  # fmt: skip
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(*units, style="dim")
    for load in dict.fromkeys(run.load for run in runs):
        own = [run for run in runs if run.load == load]

        def middle(value: Callable[[Run], float], own: Sequence[Run] = own) -> float:
            return statistics.median(map(value, own))

        def sum_of(count: str, own: Sequence[Run] = own) -> str:
            return str(sum(run.figures[count] for run in own))

        share = middle(lambda run: run.share)
        accepted = middle(lambda run: run.figures["accepted_ms"]["p99"])
        refused = middle(lambda run: run.figures["refused_ms"]["p99"])
        recovered = middle(lambda run: run.afterwards["last_not_good_s"])
        meets = (
            share >= GOODPUT * min(1, load),
            accepted <= deadline_ms,
            refused < REFUSED_MS,
            recovered < RECOVERED_S,
        )
        table.add_row(
            f"{load:g}",
            f"{middle(lambda run: run.figures['offered'] / run.figures['seconds']):.0f}",
            f"{middle(lambda run: run.figures['goodput']):.0f}",
            f"{share:.2f}",
            f"{middle(lambda run: run.figures['accepted_ms']['p50']):.0f}",
            f"{accepted:.0f}",
            f"{middle(lambda run: run.figures['refused'] / run.figures['seconds']):.0f}",
            f"{middle(lambda run: run.figures['refused_ms']['p50']):.1f}",
            f"{refused:.1f}",
            sum_of("late"),
            sum_of("expired"),
            sum_of("failed"),
            f"{recovered:.2f}",
            f"{middle(lambda run: run.server_us):.0f}",
            f"{middle(lambda run: run.generator_cores):.2f}",
            f"{middle(lambda run: run.figures['lateness_ms']['p99']):.1f}",
            "met" if all(meets) else "missed",
        )
    return table


def keep(about: dict[str, Any], runs: Sequence[Run], stem: Path) -> None:
    """Write the figures, the table and the picture, and print the table."""
    data, text, picture = (stem.with_name(stem.name + end) for end in (".json", ".txt", ".png"))
    data.write_text(json.dumps({**about, "runs": [asdict(run) for run in runs]}, indent=1) + "\n")
    settings, machine = about["settings"], about["machine"]
    others = statistics.median(run.other_cores for run in runs)
    heading = (
        f"{machine['cpu']}, {machine['cores']} cores · {settings['row_ms']:g} ms per row "
        f"({settings['work']}), capacity {statistics.median(run.capacity for run in runs):.0f}/s · "
        f"deadline {settings['deadline_ms']:g} ms · medians of {settings['rounds']} rounds of "
        f"{settings['seconds']:g} s · other work on {others:.1f} cores · {about['date']}"
    )
    draw(runs, settings["deadline_ms"], heading, picture)
    with text.open("w") as file:
        for console in (Console(highlight=False, width=150), Console(file=file, width=150)):
            console.print(heading, soft_wrap=True)
            console.print(tabulate(runs, settings["deadline_ms"]))
    for written in (data, text, picture):
        print("wrote", written.relative_to(ROOT) if written.is_relative_to(ROOT) else written)


def draw(runs: Sequence[Run], deadline_ms: float, heading: str, file: Path) -> None:
    """Draw what became of the requests, and how long the accepted ones took."""
    loads = list(dict.fromkeys(run.load for run in runs))
    names = [f"{load:g}x" for load in loads]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    floor = [0.0] * len(loads)
    for count, colour in (
        ("good", "#1f6fb2"), ("late", "#e08214"), ("expired", "#b2182b"), ("failed", "#333333"),
        ("refused", "#d9d9d9"),
    ):  # fmt: skip
        heights = [
            statistics.median(
                run.figures[count] / run.figures["seconds"] / run.capacity
                for run in runs
                if run.load == load
            )
            for load in loads
        ]
        left.bar(names, heights, bottom=floor, label=count, color=colour)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    left.axhline(GOODPUT, color="#333333", linewidth=1, linestyle="--")
    left.set_title("requests per second, over capacity", loc="left", fontsize=10, weight="bold")
    for quantile, marker in (("p50", "o"), ("p99", "_"), ("max", "x")):
        own = [[run.figures["accepted_ms"][quantile] for run in runs if run.load == load]
               for load in loads]  # fmt: skip
        right.plot(names, list(map(statistics.median, own)), marker, markersize=10, label=quantile)
    right.axhline(deadline_ms, color="#333333", linewidth=1, linestyle="--", label="deadline")
    right.set_ylim(bottom=0)
    right.set_title("accepted requests, ms", loc="left", fontsize=10, weight="bold")
    for axes in (left, right):
        axes.legend(fontsize=8, frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(heading, fontsize=7, x=0.01, ha="left")
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
