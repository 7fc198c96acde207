"""Which router rule keeps p99, at what cost: simulated, drawn, and printed as the docs have it.

    python -m benchmarks.routers [--requests 16000] [--output docs/images]

Twenty cells, two models: one takes 5 ms, the other 25 ms, each a third more or less at times. They
have half of the work each. Shared: every cell has both models, with four workers for each on its
four cores. By archive: ten cells have one model and ten the other, with four workers. Nothing here
is measured; it is the simulator of `modelyard plan --simulate`, with a seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

from modelyard.serve.simulation.arrivals import Bursty, Poisson
from modelyard.serve.simulation.cell import ModelShape
from modelyard.serve.simulation.costs import Costs
from modelyard.serve.simulation.run import Failure, Hot, Outcome, Scenario, simulate
from modelyard.serve.tools.plan_plot import COLOURS, save

matplotlib.use("Agg")

from matplotlib import pyplot

CELLS, CORES = 20, 4
LIMIT_S = 0.2
MEANS_MS = {"small": 5.0, "large": 25.0}
LOADS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LOAD = 0.7
HOT = 1.7
"""Times its share: all work together is then 0.9 of what the cells can do."""
SPREAD = (0.7, 0.72, 0.78, 0.82, 0.9, 1.0, 1.1, 1.2, 1.25, 1.33, 1.4, 1.6)
"""Of the mean, at the levels of the costs."""
RULES = {
    "least": ("least in flight, one router", "least", 1),
    "least10": ("least in flight, ten routers", "least", 10),
    "two": ("two at random, the lesser", "two", 1),
    "random": ("at random", "random", 1),
    "archive": ("by archive", "archive", 1),
}


def shape(name: str, workers: int) -> ModelShape:
    """Return one of the two models."""
    mean = MEANS_MS[name]
    costs = Costs({1: [mean * each for each in SPREAD]}, 0, 0, {}, 0, 0, 0, 0, 1, 1, CORES)
    return ModelShape(name, costs.times_s, workers, 1, 1, 1e-4, 2e-5, 1e-4, 1000, 60.0)


def scenario(key: str, load: float, requests: int) -> Scenario:
    """Return the calm case of one rule."""
    _, rule, routers = RULES[key]
    half = CELLS // 2
    groups: list[tuple[int, list[ModelShape]]]
    if rule == "archive":
        groups = [(half, [shape("small", CORES)]), (half, [shape("large", CORES)])]
    else:
        groups = [(CELLS, [shape("small", CORES), shape("large", CORES)])]
    rates = {name: load * CELLS * CORES / 2 / (mean / 1e3) for name, mean in MEANS_MS.items()}
    rate = sum(rates.values())
    seconds = requests / rate
    return Scenario(
        groups=groups,
        cores=CORES,
        rate=rate,
        mix={name: own / rate for name, own in rates.items()},
        arrivals=Poisson(),
        seconds=seconds,
        warm_s=seconds / 6,
        rule=rule,
        routers=routers,
        limit_s=LIMIT_S,
    )


def troubles(calm: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Yield the calm case and what may go wrong."""
    seconds = calm.seconds
    yield "calm", calm
    yield "bursts to 0.98", replace(calm, arrivals=Bursty(1.4, 0.25, seconds / 60))
    yield "one cell takes 3 times as long", replace(calm, slow={0: 3.0})
    failure = Failure(0, seconds / 3, 2 * seconds / 3, noticed_s=min(1.0, seconds / 10))
    yield "one cell dies", replace(calm, failures=[failure])
    heat = Hot("large", HOT * calm.mix["large"], seconds / 3, 2 * seconds / 3)
    yield "large is hot", replace(calm, hot=heat)


def p99(outcome: Outcome, model: str) -> float:
    """Return a model's p99 in milliseconds."""
    return outcome.models[model].quantile_s(0.99) * 1e3


def main() -> None:
    """Simulate, draw, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=40_000, help="of each run")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "modelyard"
    figure, axes = pyplot.subplots(1, 2, figsize=(10.4, 3.9), sharey=True)
    for at, (key, (label, _, _)) in enumerate(RULES.items()):
        found = [simulate(scenario(key, load, given.requests)) for load in LOADS]
        for axis, model in zip(axes, MEANS_MS, strict=True):
            axis.plot(LOADS, [p99(each, model) for each in found], "o-", color=COLOURS[at],
                      markersize=3.5, linewidth=1.3, label=label)  # fmt: skip
        print(label, [f"{p99(each, 'large'):.0f}" for each in found], file=sys.stderr)
    for axis, (model, mean) in zip(axes, MEANS_MS.items(), strict=True):
        axis.set(title=f"{model}: {mean:g} ms alone", xlabel="busy workers, share", yscale="log")
    axes[0].set_ylabel("p99, ms")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, given.output / "plan-routers.svg")
    _draw_troubles(given)


def _draw_troubles(given: argparse.Namespace) -> None:
    rows: dict[str, dict[str, Outcome]] = {}
    for key in RULES:
        for name, case in troubles(scenario(key, LOAD, given.requests)):
            rows.setdefault(name, {})[key] = simulate(case)
    names = [label for label, _, _ in RULES.values()]
    print("| | " + " | ".join(names) + " |")
    print("| --- |" + " ---: |" * len(names))
    for name, found in rows.items():
        cells = [_say(found[key]) for key in RULES]
        print(f"| {name} | " + " | ".join(cells) + " |")
    figure, axis = pyplot.subplots(figsize=(10.4, 3.6))
    width = 0.8 / len(RULES)
    for at, (key, (label, _, _)) in enumerate(RULES.items()):
        places = [row + (at - (len(RULES) - 1) / 2) * width for row in range(len(rows))]
        values: list[Any] = [p99(found[key], "large") for found in rows.values()]
        axis.bar(places, values, width * 0.92, color=COLOURS[at], label=label)
    axis.set(yscale="log", ylabel="p99 of large, ms", xticks=range(len(rows)))
    axis.set_xticklabels(rows, fontsize=8.5)
    axis.axhline(LIMIT_S * 1e3, color="black", linewidth=0.8, linestyle=":")
    axis.legend(frameon=False, fontsize=8, ncols=3, loc="upper left")
    axis.set_ylim(top=axis.get_ylim()[1] * 4)
    save(figure, given.output / "plan-trouble.svg")


def _say(outcome: Outcome) -> str:
    tally = outcome.all
    late = 1 - tally.good / max(1, tally.offered)
    return f"{p99(outcome, 'large'):.0f} ms, {late:.1%}"


if __name__ == "__main__":
    main()
