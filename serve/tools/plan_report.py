"""What `modelyard plan` prints: tables for people, and JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from modelyard.archiver.terminal import out, plain_table
from modelyard.serve.simulation.router import RULES
from modelyard.serve.simulation.run import Outcome, Scenario, Tally
from modelyard.serve.tools.plan import KnownModel, Plan, best_cell
from modelyard.serve.tools.tune import Slo


def is_kept(planned: Plan, limit: Slo, share: float, outcome: Outcome | None) -> bool:
    """Return whether all was answered and every model keeps the limit."""
    if outcome is None:
        return all(cell.worst_s(share) <= limit.limit_s for _, cell in planned.groups)
    return all(
        tally.offered == tally.good + tally.late and tally.quantile_s(share) <= limit.limit_s
        for tally in outcome.models.values()
        if tally.offered
    )


def _ms(seconds: float) -> str:
    return "never" if math.isinf(seconds) else f"{seconds * 1e3:.3g} ms"


def print_plan(
    planned: Plan,
    models: Sequence[KnownModel],
    rps: float,
    limit: Slo,
    share: float,
    is_split: bool,
) -> None:
    """Print the table of a plan."""
    columns = ["share", "a second", "cells", "workers", "threads", "batch", "busy", "p50"]
    table = plain_table(
        ("model", "left"), *((name, "right") for name in (*columns, limit.quantile))
    )
    for (number, _), own in _rows(planned):
        table.add_row(
            own.model.name,
            f"{own.rate * number / rps:.3g}",
            f"{own.rate * number:.4g}",
            str(number),
            str(own.workers),
            str(own.model.threads),
            f"{own.mean_batch:.1f} of {own.model.batch_size}",
            f"{own.busy:.0%}",
            _ms(own.quantile_s(0.5)),
            _ms(own.quantile_s(share)),
        )
    out.print(table)
    of = planned.groups[0][1].cores
    memory = max(cell.memory_mb for _, cell in planned.groups)
    out.print(
        f"{planned.cells} {'cell' if planned.cells == 1 else 'cells'} of {of} "
        f"{'core' if of == 1 else 'cores'}: {planned.cores} cores, "
        f"{planned.memory_mb / 1e3:.3g} GB, {memory:.0f} MB a cell; the server process is busy for "
        f"{max(cell.server_busy for _, cell in planned.groups):.0%} of a core in each"
    )
    if planned.cells > 1 and not is_split:
        fewer = best_cell(models, rps / (planned.cells - 1), share, of)
        said = f"{limit.quantile} is {_ms(fewer.worst_s(share))}"
        if not fewer.keeps_up:
            said = "a queue grows without end"
        out.print(f"with one cell less, {said}")
    out.print(
        "the model: Poisson arrivals, spread evenly; a birth-death chain of jobs in a cell, whose "
        "batches take what was measured (docs/plan.md)",
        style="dim",
    )


def _rows(planned: Plan) -> list[Any]:
    return [((number, cell), own) for number, cell in planned.groups for own in cell.models]


def print_outcome(
    planned: Plan, limit: Slo, share: float, outcome: Outcome, scenario: Scenario, took_s: float
) -> None:
    """Print the table of a simulation."""
    out.print()
    columns = ["a second", "in time", "late", "503", "504", "lost", "p50", limit.quantile, "plan"]
    table = plain_table(("simulated", "left"), *((name, "right") for name in columns))
    expected = {own.model.name: own.quantile_s(share) for _, own in _rows(planned)}
    tallies: list[tuple[str, Tally]] = list(outcome.models.items())
    if len(tallies) > 1:
        tallies.append(("all", outcome.all))
    for name, tally in tallies:
        counts = (tally.late, tally.refused, tally.expired, tally.lost)
        table.add_row(
            name,
            f"{outcome.per_second(tally.offered):.4g}",
            f"{tally.good / max(1, tally.offered):.2%}",
            *(f"{count / max(1, tally.offered):.2%}" if count else "0" for count in counts),
            _ms(tally.quantile_s(0.5)),
            _ms(tally.quantile_s(share)),
            _ms(expected[name]) if name in expected else "",
        )
    out.print(table)
    cells = f"all {planned.cells}" if outcome.cells == planned.cells else (
        f"{outcome.cells} of {planned.cells}, with the same load each"
    )  # fmt: skip
    out.print(
        f"cells simulated: {cells}; {outcome.requests} requests in {scenario.seconds:g} s, the "
        f"first {scenario.warm_s:g} s not counted; arrivals: {scenario.arrivals}; router: "
        f"{RULES[scenario.rule]}; batches of {outcome.mean_batch:.2f}; servers busy "
        f"{outcome.server_busy:.0%}, the busiest {outcome.busiest_server:.0%}; "
        f"it took {took_s:.1f} s"
    )
    if outcome.all.repeated:
        out.print(f"{outcome.all.repeated} requests of dying cells were sent to another one")
    if is_kept(planned, limit, share, outcome):
        out.print(f"[green]kept:[/green] {limit}")
    else:
        more = math.ceil(planned.cells * 1.1)
        out.print(f"[red]not kept:[/red] {limit}, or not all were answered; try --cells {more}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def report(
    planned: Plan,
    rps: float,
    limit: Slo,
    share: float,
    outcome: Outcome | None,
    scenario: Scenario | None,
    took_s: float,
) -> dict[str, Any]:
    """Return everything, for JSON."""

    def of(tally: Tally) -> dict[str, Any]:
        counts = ("offered", "good", "late", "refused", "expired", "lost", "repeated")
        return {
            **{name: getattr(tally, name) for name in counts},
            "p50_ms": _finite(tally.quantile_s(0.5) * 1e3),
            "p99_ms": _finite(tally.quantile_s(0.99) * 1e3),
            f"{limit.quantile}_ms": _finite(tally.quantile_s(share) * 1e3),
        }

    simulated = None
    if outcome is not None and scenario is not None:
        simulated = {
            "cells": outcome.cells,
            "requests": outcome.requests,
            "seconds": scenario.seconds,
            "counted_s": outcome.seconds,
            "arrivals": str(scenario.arrivals),
            "router": scenario.rule,
            "routers": scenario.routers,
            "seed": scenario.seed,
            "mean_batch": outcome.mean_batch,
            "server_busy": outcome.server_busy,
            "cores_busy": outcome.cores_busy,
            "models": {name: of(tally) for name, tally in outcome.models.items()},
            "all": of(outcome.all),
            "took_s": took_s,
        }
    return {
        "rps": rps,
        "slo": str(limit),
        "cells": planned.cells,
        "cores": planned.cores,
        "memory_mb": planned.memory_mb,
        "models": [
            {
                "name": own.model.name,
                "share": own.rate * number / rps,
                "rps": own.rate * number,
                "cells": number,
                "cell_cores": cell.cores,
                "cell_memory_mb": cell.memory_mb,
                "workers": own.workers,
                "threads": own.model.threads,
                "batch_size": own.model.batch_size,
                "mean_batch": own.mean_batch,
                "busy": own.busy,
                "server_busy": cell.server_busy,
                "p50_ms": _finite(own.quantile_s(0.5) * 1e3),
                f"{limit.quantile}_ms": _finite(own.quantile_s(share) * 1e3),
            }
            for (number, cell), own in _rows(planned)
        ],
        "simulated": simulated,
    }
