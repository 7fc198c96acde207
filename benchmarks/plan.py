"""What `modelyard plan --simulate` predicts, beside what one server does.

    python -m benchmarks.plan [--model sleep] [--model digits] [--seconds 12] [--output FILE.json]

Two models: `sleep` takes 2 ms a request and leaves the cores to others; `digits` is the network of
that example in ONNX. Of each the costs are measured as `modelyard tune` does, then a server with
one worker is loaded in an open loop with 0.5, 0.9 and 1.5 times its capacity, which is what 64
clients get. Every request names a deadline. The simulation gets the moments of the same requests.
Prints p50 and p99 of the answers, goodput and refusals, measured and predicted, with their ratio.
Within six minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import procfs
from benchmarks.archives import Subject, archive_digits, build_bare, build_digits, scan_files
from benchmarks.open_loop import GeneratorFailed, Phase, compiled, run, schedule
from benchmarks.server import Server, wait_idle
from modelyard.serve.settings import load_settings
from modelyard.serve.simulation.arrivals import Recorded
from modelyard.serve.simulation.costs import Costs
from modelyard.serve.simulation.run import Scenario, simulate
from modelyard.serve.tools.measure_costs import measure_costs
from modelyard.serve.tools.plan import KnownModel
from modelyard.serve.tools.tune import Setting, Trial, on_own_ports

TIMES = (0.5, 0.9, 1.5)
DEEP = "jobQueueSize: 10000\nbatchSize: 8\n"
QUEUE_SIZE = 10_000
CAPACITY_CLIENTS = 64
GOAL = 0.15
SLEEP_MS = 2.0
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
class Row:
    """One figure at one load."""

    model: str
    times: float
    what: str
    measured: float
    predicted: float

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


def build(folder: Path, model: str) -> Subject:
    """Archive one of the models."""
    if model == "digits":
        build_digits(folder, ())
        return archive_digits(folder, "onnx", "digits", "jobQueueSize: 10000\n")
    return build_bare(folder, model, SLEEP_HANDLER, DEEP, scan_files())


def costs_of(subject: Subject, folder: Path, seconds: float) -> Costs:
    """Measure what a request costs."""
    settings = load_settings({"model_store": subject.archive.parent, "device": "cpu"}, None)
    settings = on_own_ports(settings, subject.name, folder)
    bodies = [(subject.requests[0].read_bytes(), subject.content_type)]
    trial = Trial(settings, subject.name, f"/predictions/{subject.name}", bodies, 8, seconds)
    return measure_costs(trial, Setting(1, 1, 8), subject.archive.name, procfs_cores())


def procfs_cores() -> int:
    """Return the cores of this machine."""
    import os

    return len(os.sched_getaffinity(0))


def compare(model: str, folder: Path, given: argparse.Namespace) -> Iterator[Row]:
    """Measure one model, and predict."""
    subject = build(folder, model)
    costs = costs_of(subject, folder / f"costs-{model}", 1.5)
    say(f"{model}: {json.dumps(costs.as_dict())}")
    deadline_s = given.deadline / 1e3
    known = KnownModel(model, 1.0, costs, 8, 1, QUEUE_SIZE, 60.0)
    body, kind = subject.requests[0].read_bytes(), subject.content_type
    with Server(subject, 1, folder / f"state-{model}") as server:
        closed = run(server.url, body, [Phase(0, 3)], closed=CAPACITY_CLIENTS, content_type=kind)
        capacity = asyncio.run(closed).phases[0].goodput
        wait_idle(server.usage)
        for times in given.times or TIMES:
            phase = Phase(times * capacity, given.seconds)
            report = asyncio.run(
                run(server.url, body, [phase], deadline_s, given.seed, content_type=kind)
            )
            wait_idle(server.usage)
            figures = report.phases[0]
            dues = [due for _, due in schedule([phase], random.Random(given.seed))]
            recorded = Recorded(tuple(dues), (None,) * len(dues), "the same requests")
            outcome = simulate(
                Scenario(
                    groups=[(1, [known.shape(1)])],
                    cores=procfs_cores(),
                    rate=recorded.rate,
                    mix={model: 1.0},
                    arrivals=recorded,
                    seconds=given.seconds,
                    warm_s=0.0,
                    timeout_s=deadline_s,
                    limit_s=deadline_s,
                )
            )
            found = outcome.all
            say(
                f"{model} {times:g} × {capacity:.0f}/s: measured {asdict(figures)}; simulated "
                f"{found.offered} offered, {found.good} good, {found.late} late, {found.refused} "
                f"refused, {found.expired} expired, batches of {outcome.mean_batch:.2f}"
            )
            pairs = [
                ("p50 ms", figures.answered_ms.p50, found.quantile_s(0.5) * 1e3),
                ("p99 ms", figures.answered_ms.p99, found.quantile_s(0.99) * 1e3),
                ("goodput /s", figures.goodput, found.good / given.seconds),
                ("refused /s", figures.refused / given.seconds, found.refused / given.seconds),
            ]
            for what, measured, predicted in pairs:
                yield Row(model, times, what, measured, predicted)


def say(text: str) -> None:
    """Write a line for whoever waits."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, predict, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("sleep", "digits"), action="append")
    parser.add_argument("--times", type=float, action="append", help="of the capacity; repeatable")
    parser.add_argument("--seconds", type=float, default=12, help="length of each load")
    parser.add_argument("--deadline", type=float, default=100, help="milliseconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, help="the rows, in JSON")
    given = parser.parse_args()
    began = time.perf_counter()
    rows: list[Row] = []
    try:
        compiled()
        with tempfile.TemporaryDirectory(prefix="modelyard-plan-") as name:
            for model in given.model or ("sleep", "digits"):
                rows += compare(model, Path(name), given)
    except GeneratorFailed as error:
        sys.exit(str(error))
    table = Table("model", "load", "figure", box=box.SIMPLE)
    for name in ("measured", "predicted", "ratio", ""):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            f"{row.times:g} ×",
            row.what,
            f"{row.measured:.4g}",
            f"{row.predicted:.4g}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
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
