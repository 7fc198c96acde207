"""What `modelyard plan` prints: tables for people, and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from modelyard.base.terminal import out, plain_table
from modelyard.plugins.ops.tune.load import Load
from modelyard.plugins.ops.tune.plan import KnownModel, Plan, best_cell
from modelyard.plugins.ops.tune.tune import QUANTILES, Slo


def is_kept(plan: Plan, limit: Slo, measured: Mapping[str, Load] | None) -> bool:
    """Return whether every model keeps the limit: as measured, else as planned."""
    share = QUANTILES[limit.quantile]
    if measured is None:
        return plan.cell.worst_s(share) <= limit.limit_s
    return all(
        not load.failed and load.latencies_s and load.quantile_s(share) <= limit.limit_s
        for load in measured.values()
    )


def _ms(seconds: float) -> str:
    return "never" if math.isinf(seconds) else f"{seconds * 1e3:.3g} ms"


def print_plan(plan: Plan, models: Sequence[KnownModel], rps: float, limit: Slo) -> None:
    """Print the table of a plan."""
    columns = ["share", "a second", "workers", "threads", "batch", "busy", "p50", limit.quantile]
    table = plain_table(("model", "left"), *((name, "right") for name in columns))
    share, cell = QUANTILES[limit.quantile], plan.cell
    for each in cell.models:
        table.add_row(
            each.model.name,
            f"{each.model.share:.3g}",
            f"{each.rate * plan.cells:.4g}",
            str(each.workers),
            str(each.model.threads),
            f"{each.mean_batch:.1f} of {each.model.batch_size}",
            f"{each.busy:.0%}",
            _ms(each.quantile_s(0.5)),
            _ms(each.quantile_s(share)),
        )
    out.print(table)
    out.print(
        f"{plan.cells} {'cell' if plan.cells == 1 else 'cells'} of {cell.cores} "
        f"{'core' if cell.cores == 1 else 'cores'}: {plan.cores} cores, "
        f"{plan.memory_mb / 1e3:.3g} GB, {cell.memory_mb:.0f} MB a cell; the server process is "
        f"busy for {cell.server_busy:.0%} of a core in each"
    )
    if plan.cells > 1:
        fewer = best_cell(models, rps / (plan.cells - 1), share, cell.cores)
        outlook = f"{limit.quantile} is {_ms(fewer.worst_s(share))}"
        if not fewer.keeps_up:
            outlook = "a queue grows without end"
        out.print(f"with one cell less, {outlook}")
    out.print(
        "planned by a queueing model, whose p99 is too low, by ten times for models under a "
        "millisecond (docs/plan.md); --try SECONDS measures one cell",
        style="dim",
    )


def print_measured(plan: Plan, limit: Slo, measured: Mapping[str, Load]) -> None:
    """Print what a cell did under its part of the load, beside what was planned."""
    share = QUANTILES[limit.quantile]
    quantiles = dict.fromkeys(("p50", limit.quantile))
    columns = ["sent a second", "answered", *(f"{name} (planned)" for name in quantiles)]
    table = plain_table(("tried", "left"), *((name, "right") for name in columns))
    for each in plan.cell.models:
        load = measured[each.model.name]
        sent = load.failed + len(load.latencies_s)
        table.add_row(
            each.model.name,
            f"{sent / load.seconds:.4g}",
            f"{len(load.latencies_s) / max(1, sent):.2%}",
            *(
                f"{_ms(load.quantile_s(QUANTILES[name])) if load.latencies_s else 'none'} "
                f"({_ms(each.quantile_s(QUANTILES[name]))})"
                for name in quantiles
            ),
        )
    out.print(table)
    any_load = next(iter(measured.values()))
    out.print(
        f"one cell on this machine, for {any_load.seconds:g} s; the load took "
        f"{any_load.cpu_s / any_load.seconds:.2f} cores itself, which clients elsewhere would "
        "leave to the cell"
    )
    for name, load in measured.items():
        if load.failed:
            out.print(f"{name}: {load.failed} were not answered, the first: {load.first_failure}")
    kept = is_kept(plan, limit, measured)
    worst = max(
        (load.quantile_s(share) for load in measured.values() if load.latencies_s), default=math.inf
    )
    out.print(f"{'[green]kept' if kept else '[red]not kept'}:[/] {limit}, measured {_ms(worst)}")


def _finite_ms(seconds: float) -> float | None:
    return seconds * 1e3 if math.isfinite(seconds) else None


def report(
    plan: Plan, rps: float, limit: Slo, measured: Mapping[str, Load] | None
) -> dict[str, Any]:
    """Return everything, for JSON; times are in milliseconds, null where a queue grows."""
    quantiles = dict.fromkeys(("p50", limit.quantile))

    def tried(load: Load) -> dict[str, Any]:
        return {
            "seconds": load.seconds,
            "answered": len(load.latencies_s),
            "failed": load.failed,
            "first_failure": load.first_failure or None,
            **{
                f"{name}_ms": load.quantile_s(QUANTILES[name]) * 1e3 if load.latencies_s else None
                for name in quantiles
            },
        }

    return {
        "rps": rps,
        "slo": str(limit),
        "cells": plan.cells,
        "cores": plan.cores,
        "cell_cores": plan.cell.cores,
        "memory_mb": plan.memory_mb,
        "cell_memory_mb": plan.cell.memory_mb,
        "server_busy": plan.cell.server_busy,
        "models": [
            {
                "name": each.model.name,
                "share": each.model.share,
                "rps": each.rate * plan.cells,
                "workers": each.workers,
                "threads": each.model.threads,
                "batch_size": each.model.batch_size,
                "mean_batch": each.mean_batch,
                "busy": each.busy,
                **{
                    f"{name}_ms": _finite_ms(each.quantile_s(QUANTILES[name])) for name in quantiles
                },
                "tried": tried(measured[each.model.name]) if measured else None,
            }
            for each in plan.cell.models
        ],
    }
