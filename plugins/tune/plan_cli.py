"""The command `modelyard plan`: what it is given, what it prints, a cell that it tries."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from modelyard.base.terminal import out
from modelyard.plugins.ops.text import print_text
from modelyard.plugins.tune.costs import KEY, BadCosts, parse_costs
from modelyard.plugins.tune.load import Load, make_request, run_open_load
from modelyard.plugins.tune.tune import (
    QUANTILES,
    Setting,
    Slo,
    golden_bodies,
    on_own_ports,
    parse_slo,
    running,
    stoppable,
)
from modelyard.serve.errors import WrongUsage
from modelyard.serve.settings import Settings, load_settings

if TYPE_CHECKING:
    from modelyard.plugins.tune.plan import KnownModel, Plan

HERE = Path(__file__).parent
WARM_S = 1.0
"""Seconds of a trial that are not counted."""
plan_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@plan_app.command("plan")
def plan(
    rps: Annotated[float, typer.Option("--rps", help="Requests per second, to all cells.")],
    slo: Annotated[str, typer.Option(help="Limit of each model's latency, as p99=50ms.")],
    mix: Annotated[
        str, typer.Option(help="Models with their shares of the requests: a=0.9,b=0.1, or just a.")
    ],
    model_store: Annotated[Path | None, typer.Option(help="Folder of the archives.")] = None,
    costs: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="A model-config.yaml that tune wrote; repeatable."),
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Cores of a cell. Default: as many as tune saw."),
    ] = None,
    cells: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Default: as few as keep the limit.")
    ] = None,
    try_s: Annotated[
        float | None,
        typer.Option("--try", metavar="SECONDS", min=1, max=3600, help="Measure one cell so long."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with settings, as for serve start.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how many workers, cells and how much memory a load needs, from what `tune` measured.

    A cell is a server with its workers on so many cores. The times come from the archives that hold
    a tuned model-config.yaml, or from such files (--costs). With --try one such cell is then
    started on this machine and gets its part of the load, and what it did is printed beside what
    was planned.

    For example:

        modelyard plan --rps 2000 --slo p99=50ms --mix digits=0.9,resnet=0.1 --try 10

    Exit codes: 0 planned, and kept where it was tried; 1 no plan keeps the limit, the cell that was
    tried does not, or a model cannot be read; 2 wrong usage.
    """
    from modelyard.plugins.tune.plan import best_cell, make_plan

    with stoppable("stopped"):
        limit = parse_slo(slo)
        if not 0 < rps < math.inf:
            raise WrongUsage(f"--rps {rps:g}: expected a number above 0")
        settings = load_settings({"model_store": model_store}, config)
        shares = parse_mix(mix)
        models = read_models(shares, costs or [], settings)
        of_cell = cores or max(model.costs.cores for model in models)
        level = QUANTILES[limit.quantile]
        planned = make_plan(models, rps, limit.limit_s, level, of_cell, cells)
        shown = {"quantile": limit.quantile, "level": level, "width": max(5, *map(len, shares))}
        if not json_output:
            fewer = planned.cells - 1 and best_cell(
                models, rps / (planned.cells - 1), level, of_cell
            )
            print_text(
                HERE / "plan.txt", {**report(planned, rps, limit, None), **shown, "fewer": fewer}
            )
        measured = None if try_s is None else try_cell(planned, settings, try_s)
    kept = is_kept(planned, limit, measured)
    found = {**report(planned, rps, limit, measured), "kept": kept}
    if json_output:
        out.print_json(json.dumps(found, allow_nan=False))
    elif measured is not None:
        print_text(HERE / "tried.txt", {**found, **shown})
    if not kept:
        raise typer.Exit(1)


# -- what is given -------------------------------------------------------------------------------


def parse_mix(text: str) -> dict[str, float]:
    """Read `a=0.9,b=0.1`; one name alone has all.

    Raises:
        WrongUsage: it cannot be read, or is not of 1.
    """
    shares: dict[str, float] = {}
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        name, equals, number = part.partition("=")
        try:
            share = float(number) if equals or len(parts) > 1 else 1.0
        except ValueError:
            share = math.nan
        if not name or not 0 < share <= 1:
            raise WrongUsage(
                f"--mix: {part!r}: expected NAME=SHARE with a share above 0 and up to 1, such as "
                "digits=0.9,resnet=0.1"
            )
        if name in shares:
            raise WrongUsage(f"--mix: {name} is named twice")
        shares[name] = share
    if abs((total := sum(shares.values())) - 1) > 1e-3:
        raise WrongUsage(f"--mix: the shares add up to {total:g}; they are parts of 1")
    return {name: share / total for name, share in shares.items()}


def read_models(
    shares: Mapping[str, float], given: Sequence[str], settings: Settings
) -> list[KnownModel]:
    """Return the models of the mix with what was measured of them.

    Raises:
        ArchiveError, ServeError: one is not there, or was not measured.
    """
    files: dict[str, Path] = {}
    for text in given:
        name, equals, file = text.partition("=")
        if not equals or name not in shares:
            raise WrongUsage(
                f"--costs {text!r}: expected NAME=FILE with a name of the mix: {', '.join(shares)}"
            )
        files[name] = Path(file)
    return [_read_model(name, share, files.get(name), settings) for name, share in shares.items()]


def _read_model(name: str, share: float, file: Path | None, settings: Settings) -> KnownModel:
    from modelyard.archiver import open_archive
    from modelyard.archiver.untrusted.yaml import parse_yaml
    from modelyard.plugins.tune.plan import KnownModel
    from modelyard.serve.control.store import find_archive

    text = ""
    if file is not None:
        where = str(file)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
            raise BadCosts(f"--costs {name}={file}: {reason}") from error
    else:
        archived = find_archive(settings.model_store, name)
        where = str(archived)
        with open_archive(archived) as archive:
            if archive.manifest.config_file:
                text = archive.read(archive.manifest.config_file).decode()
                where = f"{archived}: {archive.manifest.config_file}"
    try:
        values = parse_yaml(text) or {}
    except ValueError as error:
        raise BadCosts(f"{where} is not valid YAML: {error}") from error
    if not isinstance(values, dict) or KEY not in values:
        raise BadCosts(
            f"{name}: nothing was measured ({where} has no {KEY}); run "
            f"modelyard tune {name} --model-store {settings.model_store} --output {name}.yaml, "
            f"then plan with --costs {name}={name}.yaml, or put that file into the archive"
        )
    costs = parse_costs(values[KEY], where)
    return KnownModel(name, share, costs, costs.batch_size, costs.threads)


# -- a cell that is tried ------------------------------------------------------------------------


def try_cell(plan: Plan, settings: Settings, seconds: float) -> dict[str, Load]:
    """Start one cell as planned, send what it would get for so long, stop it.

    The requests are the archives' golden ones, at random moments.

    Raises:
        WrongUsage: a cell has more cores than this machine, or an archive has no golden request.
        ServeError, ArchiveError: it cannot be started, or does not answer.
    """
    from modelyard.archiver import open_archive
    from modelyard.serve.control.sizing import this_machine
    from modelyard.serve.control.store import find_archive

    if plan.cell.cores > (cores := this_machine().cores):
        raise WrongUsage(
            f"--try runs one of the planned cells, of {plan.cell.cores} cores, and this machine "
            f"has {cores}; plan with --cores {cores}, or try it on such a machine"
        )
    bodies, model_settings = {}, {}
    for each in plan.cell.models:
        name = each.model.name
        with open_archive(find_archive(settings.model_store, name)) as archive:
            bodies[name] = golden_bodies(archive)
        if not bodies[name]:
            raise WrongUsage(f"{name} holds no golden request to try it with; archive --example")
        setting = Setting(each.workers, each.model.threads, each.model.batch_size)
        model_settings[name] = settings.model_settings.get(name, {}) | setting.keys
    with tempfile.TemporaryDirectory(prefix="modelyard-plan-") as folder:
        own = on_own_ports(settings, tuple(bodies), Path(folder))
        own = own.model_copy(update={"model_settings": model_settings})
        with running(own) as (url, _):
            mix = {}
            for each in plan.cell.models:
                path = f"/predictions/{quote(name := each.model.name)}"
                mix[name] = each.rate, [make_request(url, path, *body) for body in bodies[name]]
            return run_open_load(url, mix, seconds, WARM_S)


def is_kept(plan: Plan, limit: Slo, measured: Mapping[str, Load] | None) -> bool:
    """Return whether every model keeps the limit: as measured, else as planned."""
    share = QUANTILES[limit.quantile]
    if measured is None:
        return plan.cell.worst_s(share) <= limit.limit_s
    return all(
        not load.failed and load.latencies_s and load.quantile_s(share) <= limit.limit_s
        for load in measured.values()
    )


# -- what is printed -----------------------------------------------------------------------------


def report(
    plan: Plan, rps: float, limit: Slo, measured: Mapping[str, Load] | None
) -> dict[str, Any]:
    """Return everything, for JSON; times are in milliseconds, null where a queue grows."""

    def times(quantile_s: Any) -> dict[str, float | None]:
        found = {f"{name}_ms": quantile_s(QUANTILES[name]) for name in ("p50", limit.quantile)}
        return {name: s * 1e3 if math.isfinite(s) else None for name, s in found.items()}

    def tried(load: Load) -> dict[str, Any]:
        return {
            "seconds": load.seconds,
            "answered": len(load.latencies_s),
            "failed": load.failed,
            "first_failure": load.first_failure or None,
            "cpu_s": load.cpu_s,
            **times(load.quantile_s),
        }

    return {
        "rps": rps,
        "slo": str(limit),
        "cells": plan.cells,
        "cores": plan.cells * plan.cell.cores,
        "cell_cores": plan.cell.cores,
        "memory_mb": plan.cells * plan.cell.memory_mb,
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
                **times(each.quantile_s),
                "tried": tried(measured[each.model.name]) if measured else None,
            }
            for each in plan.cell.models
        ],
    }
