"""What `modelyard tune` chooses beside the best of all that it could choose.

    python -m benchmarks.tuned digits bert --model-store DIR [--artifacts] [--repeats 5] [--quick]

Of each model, every setting (workers, threads, batch size and, with --artifacts, artifact) has
turns through the real server in alternating order: the grid. Then the search of `tune` runs
--repeats times. At last its choices and the three best of the grid have turns beside each other,
and only these are compared: what a choice reaches, by the median over the rounds, over the best of
them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from modelyard.archiver import open_archive
from modelyard.plugins.tune.tune import (
    BATCH_SIZES,
    Setting,
    Trial,
    Turn,
    golden_bodies,
    on_own_ports,
    search,
    shapes,
)
from modelyard.plugins.tune.tune_cli import find_artifacts
from modelyard.serve.explain_plan import plan_start
from modelyard.serve.settings import load_settings

WITHIN = 0.95
BEST = 3
BESIDE = 8
"""Settings that have their turns beside each other, as long as memory lasts."""

Turns = dict[Setting, list[Turn]]


def main() -> None:
    """Measure each model, and print what was chosen how often, and what it reaches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--model-store", type=Path, required=True)
    parser.add_argument("--artifacts", action="store_true")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="half a second, one round and repeat")
    given = parser.parse_args()
    if given.quick:
        given.seconds, given.rounds, given.repeats = 0.5, 1, 1
    for name in given.models:
        with tempfile.TemporaryDirectory(prefix="modelyard-tuned-") as folder:
            _compare(name, given, Path(folder))


def _compare(name: str, given: argparse.Namespace, folder: Path) -> None:
    settings = load_settings({"model_store": given.model_store, "device": "cpu"}, None)
    plan = plan_start(settings := on_own_ports(settings, (name,), folder))
    (planned,), cores = plan.models, plan.machine.cores
    with open_archive(settings.model_store / planned.file) as archive:
        bodies = golden_bodies(archive)
        artifacts = list(find_artifacts(archive)) if given.artifacts else []
    trial = Trial(settings, name, f"/predictions/{name}", bodies, given.connections, given.seconds)
    start = Setting(
        planned.allocation.workers, planned.allocation.threads, planned.config.batch_size
    )
    largest = min(given.connections, planned.config.proven_batch or given.connections)
    grid = [
        replace(shape, batch_size=size, artifact=artifact)
        for artifact in ("", *artifacts)
        for shape in shapes(start, cores, 0)
        for size in BATCH_SIZES
        if size <= largest
    ]
    began = time.perf_counter()
    every = _turns(trial, grid, given.rounds)
    grid_s = time.perf_counter() - began
    chosen: list[Setting] = []
    took: list[float] = []
    for _ in range(given.repeats):
        began = time.perf_counter()
        outcome = search(
            start, cores=cores, gpus=0, largest_batch=largest, slo=None, rounds=given.rounds,
            measure=trial.measure, artifacts=artifacts,
        )  # fmt: skip
        took.append(time.perf_counter() - began)
        if outcome.best:
            chosen.append(outcome.best.setting)
    top = sorted(every, key=lambda each: -_rate(every[each]))[:BEST]
    beside = _turns(trial, dict.fromkeys([*top, *chosen]), 2 * given.rounds + 1)
    best = max(beside, key=lambda each: _rate(beside[each]))
    good = 0
    print(f"{name}: {len(grid)} settings, grid {grid_s:.0f} s, tune {median(took):.0f} s")
    for setting, count in Counter(chosen).most_common():
        share = _ratio(beside[setting], beside[best])
        good += count * (share >= WITHIN)
        print(f"  {count} x {setting}: {_rate(beside[setting]):.4g}/s, {share:.2f} of the best")
    rates = [turn.rate for turn in beside[best]]
    print(f"  best of the grid: {best}: {_rate(beside[best]):.4g}/s, "
          f"rounds {min(rates):.4g} to {max(rates):.4g}")  # fmt: skip
    print(f"  within 5 %: {good} of {len(chosen)}", flush=True)


def _turns(trial: Trial, settings: Iterable[Setting], rounds: int) -> Turns:
    found: Turns = {each: [] for each in settings}
    for _ in range(rounds):
        for at in range(0, len(found), BESIDE):
            some = list(found)[at : at + BESIDE]
            for each, turn in zip(some, trial.measure(some), strict=True):
                found[each].append(turn)
    return found


def _rate(turns: Sequence[Turn]) -> float:
    return median(turn.rate for turn in turns)


def _ratio(ours: Sequence[Turn], best: Sequence[Any]) -> float:
    pairs = zip(ours, best, strict=True)
    return median(one.rate / other.rate if other.rate else 0.0 for one, other in pairs)


if __name__ == "__main__":
    main()
