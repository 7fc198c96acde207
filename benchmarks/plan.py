"""What `modelyard plan --simulate` predicts, beside what one server does.

    python -m benchmarks.plan [--model sleep] [--seconds 12] [--output FILE.json]

Three models: `sleep` takes 2 ms a request and leaves the cores to others; `digits` is the network
of that example in ONNX, for which the server process is what limits; `digits-1` is the same one
request at a time, for which the worker is. Of each the costs are measured as `modelyard tune` does,
then a server with one worker is loaded in an open loop with 0.5, 0.9 and 1.5 times its capacity,
which is what 64 clients get. Every request names a deadline. The simulation gets the moments of the
same requests, and how long the generator, which runs on the same cores, worked on each. What comes
in the first second, while the server accepts connections, is not counted in either. Prints p50 and
p99 of the answers, goodput and refusals, measured and predicted, with their ratio, and the pace of
the machine: what a fixed piece of work took during the load over what it took during the costs. A
virtual machine is slower for seconds where others use its cores' siblings; a load under another
pace is tried again, and the nearest is kept. Within fifteen minutes.

With --url the load goes there instead, to --cells behind a router, each with one worker of the same
model and deadlines, on this machine; what a request alone takes more is the router's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import procfs
from benchmarks.archives import Subject, archive_digits, build_bare, build_digits, scan_files
from benchmarks.open_loop import GeneratorFailed, Phase, Report, compiled, run, schedule
from benchmarks.server import Server
from modelyard.serve.settings import load_settings
from modelyard.serve.simulation.arrivals import Recorded
from modelyard.serve.simulation.costs import Costs
from modelyard.serve.simulation.run import Scenario, simulate
from modelyard.serve.tools.measure_costs import measure_costs
from modelyard.serve.tools.plan import KnownModel
from modelyard.serve.tools.tune import Setting, Trial, on_own_ports

TIMES = (0.5, 0.9, 1.5)
DEEP = "jobQueueSize: 10000\nbatchSize: 8\n"
MORE = {"digits": "", "digits-1": "batchSize: 1\n"}
QUEUE_SIZE = 10_000
COSTS_S, WARM_S, REST_S = 1.5, 1.0, 1.0
"""For each measurement of the costs; of each load, not counted; after it."""
CAPACITY_CLIENTS = 64
NEAR_PACE, TRIES = 0.05, 3
"""Loads until the machine's pace is as near as that to what it was for the costs."""
PIECE = """
import time
while True:
    at, began = time.monotonic(), time.thread_time()
    for number in range(20_000):
        number * number
    print(at, time.thread_time() - began, flush=True)
    time.sleep(0.05)
"""
"""About a millisecond of work, in CPU time, which is longer where a core is shared below us."""
GOAL = 0.15
SLEEP_HANDLER = '''\
"""Take {ms} ms for each row."""

import time


def handle(data, context):
    if data is None:
        return None
    until = time.perf_counter() + {ms} / 1000 * len(data)
    while (left := until - time.perf_counter()) > 0:
        time.sleep(left)
    return ["ok"] * len(data)
'''


@dataclass(frozen=True)
class Row:
    """One figure at one load."""

    model: str
    times: float
    what: str
    measured: float
    predicted: float
    pace: float
    """Of the machine under this load: the time of a piece of work, over that during the costs."""

    @property
    def ratio(self) -> float | None:
        """Predicted over measured; None where nothing was measured."""
        return self.predicted / self.measured if self.measured else None

    @property
    def is_near(self) -> bool:
        """Whether it is within the goal."""
        if self.ratio is None:
            return self.predicted == 0
        return abs(self.ratio - 1) <= GOAL


class Pace:
    """How long a fixed piece of work takes, in CPU time, on this machine again and again."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "pace"

    def __enter__(self) -> Self:
        """Begin."""
        with self._file.open("w") as out:
            self._process = subprocess.Popen([sys.executable, "-c", PIECE], stdout=out)
        return self

    def __exit__(self, *error: object) -> None:
        """End."""
        self._process.kill()
        self._process.wait()

    def since(self, moment: float) -> float:
        """Return the mean from a moment of `time.monotonic()` up to now, in seconds."""
        pieces = [tuple(map(float, line.split())) for line in self._file.read_text().splitlines()]
        return fmean(took for at, took in pieces if at >= moment)


def build(folder: Path, model: str, sleep_ms: float) -> Subject:
    """Archive one of the models."""
    if model == "sleep":
        handler = SLEEP_HANDLER.format(ms=sleep_ms)
        return build_bare(folder, model, handler, DEEP, scan_files())
    if not (folder / "artifacts").exists():
        build_digits(folder, ())
    return archive_digits(folder, "onnx", model, f"jobQueueSize: {QUEUE_SIZE}\n" + MORE[model])


def costs_of(subject: Subject, folder: Path, batch_size: int) -> Costs:
    """Measure what a request costs."""
    settings = load_settings({"model_store": subject.archive.parent, "device": "cpu"}, None)
    settings = on_own_ports(settings, subject.name, folder)
    bodies = [(subject.requests[0].read_bytes(), subject.content_type)]
    trial = Trial(settings, subject.name, f"/predictions/{subject.name}", bodies, 8, COSTS_S)
    return measure_costs(trial, Setting(1, 1, batch_size), subject.archive.name, cores())


def cores() -> int:
    """Return the cores of this machine."""
    return len(os.sched_getaffinity(0))


@contextmanager
def served(subject: Subject, folder: Path, given: argparse.Namespace) -> Iterator[str]:
    """Yield the URL of the predictions: of a server of our own, or the one that is given."""
    if given.url:
        yield given.url
        return
    with Server(subject, 1, folder / f"state-{subject.name}") as server:
        yield server.url


def compare(model: str, folder: Path, given: argparse.Namespace, pace: Pace) -> Iterator[Row]:
    """Measure one model, and predict."""
    subject = build(folder, model, given.sleep_ms)
    batch_size = 1 if model == "digits-1" else 8
    began = time.monotonic()
    costs = costs_of(subject, folder / f"costs-{model}", batch_size)
    piece_s = pace.since(began)
    say(f"{model}: {json.dumps(costs.as_dict())}")
    known = KnownModel(model, 1.0, costs, batch_size, 1, QUEUE_SIZE, 60.0)
    body, kind = subject.requests[0].read_bytes(), subject.content_type

    def load(url: str, phases: list[Phase], **how: Any) -> Report:
        report = asyncio.run(run(url, body, phases, content_type=kind, **how))
        time.sleep(REST_S)
        return report

    with served(subject, folder, given) as url:
        alone = load(url, [Phase(0, 2)], closed=1).phases[0].answered_ms.p50
        capacity = load(url, [Phase(0, 3)], closed=CAPACITY_CLIENTS).phases[0].goodput
        expected_ms = costs.times_s(1)[1000] * 1e3 + costs.server_ms + 2 * costs.turn_ms
        hop_s = max(0.0, alone - expected_ms - costs.wait_ms) / 1e3 if given.url else 0.0
        say(f"{model}: one client {alone:.3g} ms, capacity {capacity:.0f}/s, hop {hop_s * 1e3:.3g}")
        for times in given.times or TIMES:
            phases = [Phase(times * capacity, seconds) for seconds in (WARM_S, given.seconds)]
            deadline_s = given.deadline / 1e3
            tried: list[tuple[float, Report]] = []
            while len(tried) < TRIES and (not tried or abs(tried[-1][0] - 1) > NEAR_PACE):
                began = time.monotonic()
                report = load(url, phases, deadline_s=deadline_s, seed=given.seed)
                tried.append((pace.since(began) / piece_s, report))
            at_pace, report = min(tried, key=lambda each: abs(each[0] - 1))
            figures = report.phases[1]
            dues = [due for _, due in schedule(phases, random.Random(given.seed))]
            recorded = Recorded(tuple(dues), (None,) * len(dues), "the same requests")
            found = simulate(
                Scenario(
                    groups=[(given.cells, [known.shape(1)])],
                    cores=cores(),
                    rate=recorded.rate,
                    mix={model: 1.0},
                    arrivals=recorded,
                    seconds=WARM_S + given.seconds,
                    warm_s=WARM_S,
                    timeout_s=deadline_s,
                    limit_s=deadline_s,
                    hop_s=hop_s,
                    client_s=report.cpu_s / len(dues),
                )
            )
            tally = found.all
            say(
                f"{model} {times:g} × {capacity:.0f}/s: pace {[round(at, 3) for at, _ in tried]}, "
                f"generator {report.cores} cores, "
                f"{asdict(figures)}"
            )
            say(
                f"simulated {tally.offered} offered, {tally.good} good, {tally.late} late, "
                f"{tally.refused} refused, {tally.expired} expired; batches of "
                f"{found.mean_batch:.2f}, server busy {found.server_busy:.2f}"
            )
            pairs = [
                ("p50 ms", figures.answered_ms.p50, tally.quantile_s(0.5) * 1e3),
                ("p99 ms", figures.answered_ms.p99, tally.quantile_s(0.99) * 1e3),
                ("goodput /s", figures.goodput, tally.good / given.seconds),
                ("refused /s", figures.refused / given.seconds, tally.refused / given.seconds),
            ]
            for what, measured, predicted in pairs:
                yield Row(model, times, what, measured, predicted, round(at_pace, 3))


def say(text: str) -> None:
    """Write a line for whoever waits."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, predict, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("sleep", *MORE), action="append")
    parser.add_argument("--times", type=float, action="append", help="of the capacity; repeatable")
    parser.add_argument("--seconds", type=float, default=12, help="length of each load")
    parser.add_argument("--deadline", type=float, default=100, help="milliseconds")
    parser.add_argument("--sleep-ms", type=float, default=2.0, help="of `sleep`, for a request")
    parser.add_argument("--url", help="of the model's predictions, behind a router")
    parser.add_argument("--cells", type=int, default=1, help="behind that URL")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, help="the rows, in JSON")
    given = parser.parse_args()
    began = time.perf_counter()
    rows: list[Row] = []
    try:
        compiled()
        with (
            tempfile.TemporaryDirectory(prefix="modelyard-plan-") as name,
            Pace(Path(name)) as pace,
        ):
            for model in given.model or ("sleep", *MORE):
                rows += compare(model, Path(name), given, pace)
    except GeneratorFailed as error:
        sys.exit(str(error))
    table = Table("model", "load", "figure", box=box.SIMPLE)
    for name in ("measured", "predicted", "ratio", "pace", ""):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            f"{row.times:g} ×",
            row.what,
            f"{row.measured:.4g}",
            f"{row.predicted:.4g}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            f"{row.pace:.2f}",
            "" if row.is_near else f"off by more than {GOAL:.0%}",
        )
    Console(width=120).print(table)
    print(f"{sum(row.is_near for row in rows)} of {len(rows)} within {GOAL:.0%}; "
          f"{time.perf_counter() - began:.0f} s on {procfs.describe_machine()}")  # fmt: skip
    if given.output:
        about: dict[str, Any] = {
            "command": " ".join(["python -m benchmarks.plan", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": procfs.describe_machine(),
            "rows": [asdict(row) for row in rows],
        }
        given.output.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
