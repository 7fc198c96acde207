"""The command `modelyard plan`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from modelyard.archiver.errors import ArchiveError
from modelyard.base.terminal import err, out
from modelyard.serve.errors import ServeError, WrongUsage, exit_code

plan_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_HELP = """Say how many workers, cells and how much memory a load needs, from what `tune` measured.

A cell is a server with its workers on so many cores. The times come from the archives that hold a
tuned model-config.yaml, or from such files (--costs). With --try one such cell is then started on
this machine and gets its part of the load, and what it did is printed beside what was planned.

Example:

    modelyard plan --rps 2000 --slo p99=50ms --mix digits=0.9,resnet=0.1 --try 10

Exit codes: 0 planned, and kept where it was tried; 1 no plan keeps the limit, the cell that was
tried does not, or a model cannot be read; 2 wrong usage.
"""


@plan_app.command("plan", help=_HELP)
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
        int | None, typer.Option(min=1, max=1024, help="Of a cell. Default: as many as tune saw.")
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
    """Read, plan, try, print."""
    from modelyard.plugins.ops.tune.plan import make_plan
    from modelyard.plugins.ops.tune.plan_input import parse_mix, read_models
    from modelyard.plugins.ops.tune.plan_report import is_kept, print_measured, print_plan, report
    from modelyard.plugins.ops.tune.plan_trial import try_cell
    from modelyard.plugins.ops.tune.tune import QUANTILES, parse_slo
    from modelyard.serve.settings import load_settings

    try:
        limit = parse_slo(slo)
        if not 0 < rps < math.inf:
            raise WrongUsage(f"--rps {rps:g}: expected a number above 0")
        settings = load_settings({"model_store": model_store}, config)
        models = read_models(parse_mix(mix), costs or [], settings)
        of_cell = cores or max(model.costs.cores for model in models)
        planned = make_plan(models, rps, limit.limit_s, QUANTILES[limit.quantile], of_cell, cells)
        if not json_output:
            print_plan(planned, models, rps, limit)
        measured = None if try_s is None else try_cell(planned, settings, try_s)
    except (ServeError, ArchiveError) as error:
        err.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(exit_code(error)) from error
    except KeyboardInterrupt as error:
        err.print("stopped")
        raise typer.Exit(1) from error
    kept = is_kept(planned, limit, measured)
    if json_output:
        found = {**report(planned, rps, limit, measured), "kept": kept}
        out.print_json(json.dumps(found, allow_nan=False))
    elif measured is not None:
        print_measured(planned, limit, measured)
    if not kept:
        raise typer.Exit(1)
