"""Pictures of a plan and of its simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.serve.errors import StartError

if TYPE_CHECKING:
    from modelyard.serve.simulation.run import Outcome, Scenario, Tally
    from modelyard.serve.tools.plan import Plan
    from modelyard.serve.tools.tune import Slo

COLOURS = ("#1f5fa8", "#c8501e", "#3a8a4d", "#8a5bb5", "#a88a1f", "#4d4d4d")
LEAST_SHARE = 1e-4
BINS = 60


def draw(
    file: Path, planned: Plan, limit: Slo, outcome: Outcome | None, scenario: Scenario | None
) -> None:
    """Write the share of answers that take longer than a time, and what happens over time.

    Raises:
        StartError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "modelyard"
    panels = 1 if outcome is None else 2
    figure, axes = pyplot.subplots(1, panels, figsize=(5.6 * panels, 3.8), squeeze=False)
    slower = axes[0][0]
    for at, own in enumerate(own for _, cell in planned.groups for own in cell.models):
        colour = COLOURS[at % len(COLOURS)]
        if own.latencies_s:
            survival(slower, own.latencies_s, color=colour, linestyle="--",
                     label=f"{own.model.name}, planned")  # fmt: skip
        if outcome is not None and outcome.models[own.model.name].latencies_s:
            tally = outcome.models[own.model.name]
            survival(slower, tally.ordered, color=colour, label=f"{own.model.name}, simulated")
            over_time(axes[0][1], tally, outcome, scenario, colour, own.model.name)
    slower.axvline(limit.limit_s * 1e3, color="black", linewidth=0.8, linestyle=":")
    slower.set(xscale="log", yscale="log", ylim=(LEAST_SHARE, 1), xlabel="latency, ms",
               ylabel="share of answers that take longer", title=f"limit {limit}")  # fmt: skip
    slower.legend(frameon=False, fontsize=8)
    if outcome is not None:
        axes[0][1].axhline(limit.limit_s * 1e3, color="black", linewidth=0.8, linestyle=":")
        axes[0][1].set(yscale="log", xlabel="time, s", ylabel="p99, ms",
                       title="p99 of the requests that came then")  # fmt: skip
        axes[0][1].legend(frameon=False, fontsize=8)
    save(figure, file)


def survival(axis: Any, ordered: Sequence[float], **style: Any) -> None:
    """Draw which share of the values is above each; as few points as are seen."""
    size = len(ordered)
    step = max(1, size // 2000)
    places = [*range(0, size - size // 50, step), *range(size - size // 50, size)]
    axis.plot([ordered[at] * 1e3 for at in places], [1 - at / size for at in places],
              linewidth=1.3, **style)  # fmt: skip


def over_time(
    axis: Any, tally: Tally, outcome: Outcome, scenario: Scenario | None, colour: str, label: str
) -> None:
    """Draw p99 of the requests that came in each part of the time."""
    from modelyard.archiver.quantile import nearest_rank

    assert scenario is not None
    width = outcome.seconds / BINS
    bins: list[list[float]] = [[] for _ in range(BINS)]
    for came, took in zip(tally.came_at, tally.latencies_s, strict=True):
        bins[min(BINS - 1, int((came - scenario.warm_s) / width))].append(took)
    points = [
        (scenario.warm_s + (at + 0.5) * width, nearest_rank(sorted(each), 0.99) * 1e3)
        for at, each in enumerate(bins)
        if each
    ]
    axis.plot([x for x, _ in points], [y for _, y in points], color=colour, label=label,
              linewidth=1.2)  # fmt: skip


def save(figure: Any, file: Path) -> None:
    """Write a picture without its date, so that the same data make the same file.

    Raises:
        StartError: the file cannot be written.
    """
    from matplotlib import pyplot

    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
    figure.tight_layout()
    metadata = {"Date": None} if file.suffix == ".svg" else None
    try:
        figure.savefig(file, metadata=metadata, dpi=130)
    except OSError as error:
        raise StartError(f"cannot write {file}: {error.strerror}") from error
    finally:
        pyplot.close(figure)
