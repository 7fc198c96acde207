"""The command `modelyard plan`."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.terminal import err, out, step_bar
from modelyard.serve.errors import ServeError, WrongUsage, exit_code

if TYPE_CHECKING:
    from modelyard.serve.simulation.run import Outcome, Scenario

plan_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_HELP = """Say how many workers, cells and how much memory a load needs, from what `tune` measured.

A cell is a server with its workers on so many cores. The times come from the archives that hold a
tuned model-config.yaml, or from such files (--costs). With --simulate the server's own admission
and batching then run on a virtual clock, in cells behind a router.

Example:

    modelyard plan --rps 2000 --slo p99=50ms --mix digits=0.9,resnet=0.1 --simulate

Exit codes: 0 planned, and kept in the simulation; 1 no plan keeps the limit, the simulation does
not, or a model cannot be read; 2 wrong usage.
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
    router: Annotated[
        str,
        typer.Option(
            help="least (in flight), two (the lesser of two at random), random, or archive (each "
            "model has cells of its own)."
        ),
    ] = "least",
    simulate: Annotated[bool, typer.Option("--simulate", help="Simulate what is planned.")] = False,
    arrivals: Annotated[
        str, typer.Option(help="poisson, bursty, or a file: an access log in JSON.")
    ] = "poisson",
    burst: Annotated[
        str,
        typer.Option(
            metavar="FACTOR:SHARE:TIME",
            help="Of bursty arrivals: times the rate, share of the time, mean length.",
        ),
    ] = "2:0.1:1s",
    seconds: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="Simulated; a fifth of it is not counted.")
    ] = 20.0,
    timeout: Annotated[
        str | None, typer.Option(help="That each client gives, as 200ms. Default: none.")
    ] = None,
    routers: Annotated[
        int, typer.Option(min=1, max=1000, help="Each knows only what it has sent itself.")
    ] = 1,
    hop: Annotated[str, typer.Option(help="That a router adds to a request, as 0.3ms.")] = "0ms",
    fail: Annotated[
        str | None,
        typer.Option(
            metavar="CELLS:TIME",
            help="So many simulated cells die after a third of the time, and come back after this.",
        ),
    ] = None,
    slow: Annotated[
        str | None,
        typer.Option(
            metavar="CELLS:FACTOR", help="In so many simulated cells all takes so much longer."
        ),
    ] = None,
    hot: Annotated[
        str | None,
        typer.Option(metavar="NAME=SHARE", help="A model's share in the middle third of the time."),
    ] = None,
    repeats: Annotated[
        bool,
        typer.Option(
            "--repeat/--no-repeat", help="Whether routers send to another what a dying cell held."
        ),
    ] = True,
    requests: Annotated[
        int,
        typer.Option(
            min=1000,
            max=100_000_000,
            help="Simulated, about; of more: fewer cells with the same load, a shorter time.",
        ),
    ] = 300_000,
    seed: Annotated[int, typer.Option(help="Of what is drawn at random.")] = 1,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with settings, as for serve start.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A picture to write: .svg, .png or .pdf.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read, plan, simulate, print."""
    from modelyard.serve.settings import load_settings
    from modelyard.serve.tools.plan import make_plan
    from modelyard.serve.tools.plan_input import (
        Trouble,
        check_picture,
        check_router,
        make_scenario,
        parse_mix,
        parse_time,
        read_arrivals,
        read_models,
    )
    from modelyard.serve.tools.plan_report import is_kept, print_outcome, print_plan, report
    from modelyard.serve.tools.tune import QUANTILES, parse_slo

    try:
        limit = parse_slo(slo)
        if not 0 < rps < math.inf:
            raise WrongUsage(f"--rps {rps:g}: expected a number above 0")
        check_picture(output)
        shares = parse_mix(mix)
        settings = load_settings({"model_store": model_store}, config)
        models = read_models(shares, costs or [], settings)
        of_cell = cores or max(model.costs.cores for model in models)
        is_split = check_router(router) == "archive"
        share = QUANTILES[limit.quantile]
        trouble = Trouble(fail, slow, hot, repeats)
        source = read_arrivals(arrivals, burst)
        planned = make_plan(models, rps, limit.limit_s, share, of_cell, is_split, cells)
        outcome = scenario = None
        took_s = 0.0
        if simulate:
            scenario = make_scenario(
                planned, models, rps, limit, source, seconds, requests, router, trouble
            )
            scenario = replace(
                scenario,
                routers=routers,
                hop_s=parse_time("--hop", hop),
                timeout_s=math.inf if timeout is None else parse_time("--timeout", timeout),
                seed=seed,
            )
            began = time.perf_counter()
            outcome = _simulate(scenario)
            took_s = time.perf_counter() - began
        if output is not None:
            from modelyard.serve.tools.plan_plot import draw

            draw(output, planned, limit, outcome, scenario)
    except (ServeError, ArchiveError) as error:
        err.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(exit_code(error)) from error
    except KeyboardInterrupt as error:
        err.print("stopped")
        raise typer.Exit(1) from error
    kept = is_kept(planned, limit, share, outcome)
    if json_output:
        found = report(planned, rps, limit, share, outcome, scenario, took_s)
        out.print_json(json.dumps({**found, "kept": kept}, allow_nan=False))
    else:
        print_plan(planned, models, rps, limit, share, is_split)
        if outcome is not None and scenario is not None:
            print_outcome(planned, limit, share, outcome, scenario, took_s)
        if output is not None:
            out.print(f"drawn in {escape(str(output))}")
    if not kept:
        raise typer.Exit(1)


def _simulate(scenario: Scenario) -> Outcome:
    from modelyard.serve.simulation.run import simulate

    with step_bar() as show:
        return simulate(scenario, show)
