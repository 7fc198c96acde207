"""The command `modelyard plan`."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.terminal import err, out, plain_table, step_bar
from modelyard.serve.errors import ServeError

if TYPE_CHECKING:
    from modelyard.serve.settings import Settings
    from modelyard.serve.simulation.arrivals import Arrivals
    from modelyard.serve.simulation.run import Outcome, Scenario, Tally
    from modelyard.serve.tools.plan import KnownModel, Plan
    from modelyard.serve.tools.tune import Slo

plan_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

LEAST_CELLS, LEAST_S = 100, 1.0
"""Simulated, where there are more: with more cells a router's choice hardly changes."""

_HELP = """Say how many workers, cells and how much memory a load needs, from what `tune` measured.

A cell is a server with its workers on so many cores. The times come from the archives that hold a
tuned model-config.yaml, or from such files (--costs). With --simulate the server's own admission
and batching then run on a virtual clock, in cells behind a router.

Example:

    modelyard plan --rps 2000 --slo p99=50ms --mix digits=0.9,resnet=0.1 --simulate

Exit codes: 0 planned, and kept in the simulation; 1 no plan keeps the limit, the simulation does
not, or a model cannot be read; 2 wrong usage.
"""


@dataclass(frozen=True)
class Trouble:
    """What goes wrong in a simulation."""

    fail: str | None
    slow: str | None
    hot: str | None
    repeats: bool


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
    from modelyard.serve.tools.tune import QUANTILES, WrongUsage, parse_slo

    try:
        limit = parse_slo(slo)
        if not 0 < rps < math.inf:
            raise WrongUsage(f"--rps {rps:g}: expected a number above 0")
        _check_picture(output)
        shares = parse_mix(mix)
        settings = load_settings({"model_store": model_store}, config)
        models = read_models(shares, costs or [], settings)
        of_cell = cores or max(model.costs.cores for model in models)
        is_split = _check_router(router) == "archive"
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
        raise typer.Exit(2 if isinstance(error, WrongUsage) else 1) from error
    except KeyboardInterrupt as error:
        err.print("stopped")
        raise typer.Exit(1) from error
    kept = _is_kept(planned, limit, share, outcome)
    if json_output:
        report = _report(planned, rps, limit, share, outcome, scenario, took_s)
        out.print_json(json.dumps({**report, "kept": kept}, allow_nan=False))
    else:
        _print_plan(planned, models, rps, limit, share, is_split)
        if outcome is not None and scenario is not None:
            _print_outcome(planned, limit, share, outcome, scenario, took_s)
        if output is not None:
            out.print(f"drawn in {escape(str(output))}")
    if not kept:
        raise typer.Exit(1)


# -- what is given ---------------------------------------------------------------------------------


def parse_mix(text: str) -> dict[str, float]:
    """Read `a=0.9,b=0.1`; one name alone has all.

    Raises:
        WrongUsage: it cannot be read, or is not of 1.
    """
    from modelyard.serve.tools.tune import WrongUsage

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


def parse_time(option: str, text: str) -> float:
    """Read `200ms`, in seconds.

    Raises:
        WrongUsage: it is something else.
    """
    from modelyard.serve.tools.tune import UNITS_S, WrongUsage

    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-zµ]+)", text.strip())
    if not match or match[2] not in UNITS_S:
        units = ", ".join(UNITS_S)
        raise WrongUsage(f"{option} {text!r}: expected a number with one of {units}, as 200ms")
    return float(match[1]) * UNITS_S[match[2]]


def _check_router(router: str) -> str:
    from modelyard.serve.simulation.router import RULES
    from modelyard.serve.tools.tune import WrongUsage

    if router not in RULES:
        raise WrongUsage(f"--router {router!r}: expected {' or '.join(RULES)}")
    return router


def _check_picture(file: Path | None) -> None:
    from modelyard.archiver.extras import what_is_missing
    from modelyard.serve.tools.tune import WrongUsage

    if file is None:
        return
    if file.suffix not in (".svg", ".png", ".pdf"):
        raise WrongUsage(f"--output {file}: expected a name that ends with .svg, .png or .pdf")
    if not file.parent.is_dir():
        raise WrongUsage(f"--output {file}: there is no folder {file.parent}")
    if missing := what_is_missing("matplotlib"):
        raise WrongUsage(f"--output: {missing}")


def read_arrivals(text: str, burst: str) -> Arrivals:
    """Return what `--arrivals` names.

    Raises:
        BadArrivals, WrongUsage: there is no such thing, or it says no times.
    """
    from modelyard.serve.simulation.arrivals import Bursty, Poisson, read_recorded
    from modelyard.serve.tools.tune import WrongUsage

    if text == "poisson":
        return Poisson()
    if text != "bursty":
        if not Path(text).exists():
            raise WrongUsage(f"--arrivals {text!r}: expected poisson, bursty or a file that exists")
        return read_recorded(Path(text))
    factor, _, rest = burst.partition(":")
    share, _, mean = rest.partition(":")
    try:
        numbers = float(factor), float(share)
    except ValueError:
        raise WrongUsage(f"--burst {burst!r}: expected FACTOR:SHARE:TIME, as 2:0.1:1s") from None
    return Bursty(*numbers, parse_time("--burst", mean))


def read_models(
    shares: Mapping[str, float], given: Sequence[str], settings: Settings
) -> list[KnownModel]:
    """Return the models of the mix with what was measured of them.

    Raises:
        ArchiveError, ServeError: one is not there, or was not measured.
    """
    from modelyard.serve.tools.tune import WrongUsage

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
    import yaml

    from modelyard.archiver import open_archive
    from modelyard.serve.control.model_config import ModelConfig, load_model_config
    from modelyard.serve.control.store import find_archive
    from modelyard.serve.simulation.costs import KEY, BadCosts, parse_costs
    from modelyard.serve.tools.plan import KnownModel

    text, where = "", str(file)
    config: ModelConfig | None = None
    archived = None
    try:
        archived = find_archive(settings.model_store, name)
    except ServeError:
        if file is None:
            raise
    if archived is not None:
        with open_archive(archived) as archive:
            config = load_model_config(archive, settings, name=name)
            if file is None and archive.manifest.config_file:
                text = archive.read(archive.manifest.config_file).decode()
                where = f"{archived.name}: {archive.manifest.config_file}"
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise BadCosts(f"--costs {name}={file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise BadCosts(f"--costs {name}={file}: not text in UTF-8") from error
    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise BadCosts(f"{where} is not valid YAML: {error}") from error
    if not isinstance(values, dict) or KEY not in values:
        raise BadCosts(
            f"{name}: nothing was measured ({where if file else archived} has no {KEY}); run "
            f"modelyard tune {name} --model-store {settings.model_store} --output {name}.yaml, "
            f"then plan with --costs {name}={name}.yaml, or put that file into the archive"
        )
    found = parse_costs(values[KEY], where)
    return KnownModel(
        name=name,
        share=share,
        costs=found,
        batch_size=found.batch_size,
        threads=found.threads,
        queue_size=config.queue_size if config else settings.queue_size,
        request_timeout_s=config.request_timeout_s if config else settings.request_timeout_s,
        refuses_late=config.refuses_late if config else True,
        batch_delay_s=config.batch_delay_ms / 1e3 if config else 0.0,
        gathers_bursts=config.gathers_bursts if config else False,
        needs_ticket=config.needs_ticket if config else False,
    )


def make_scenario(
    planned: Plan,
    models: Sequence[KnownModel],
    rps: float,
    limit: Slo,
    arrivals: Arrivals,
    seconds: float,
    requests: int,
    router: str,
    trouble: Trouble,
) -> Scenario:
    """Return what is simulated: all cells, or as many as the number of requests allows.

    Raises:
        WrongUsage: an option names more cells than are simulated, or no model.
    """
    from modelyard.serve.simulation.run import Failure, Hot, Scenario
    from modelyard.serve.tools.tune import WrongUsage

    part = min(1.0, requests / (rps * seconds))
    part = max(part, min(1.0, LEAST_CELLS / planned.cells))
    shapes = planned.shapes()
    counts = [max(1, round(number * part)) for number, _ in shapes]
    rates: dict[str, float] = {}
    for (number, cell), count in zip(planned.groups, counts, strict=True):
        for each in cell.models:
            rates[each.model.name] = rates.get(each.model.name, 0.0) + each.rate * count
        assert number >= count
    total, rate = sum(counts), sum(rates.values())
    seconds = min(seconds, max(LEAST_S, requests / rate))
    load_s = max(model.costs.load_s for model in models)
    failures, slow = [], {}
    if trouble.fail:
        count, rest = _cells_of("--fail", trouble.fail, total, "CELLS:TIME, as 1:10s")
        back = parse_time("--fail", rest) + load_s
        failures = [Failure(at, seconds / 3, seconds / 3 + back) for at in range(count)]
    if trouble.slow:
        count, rest = _cells_of("--slow", trouble.slow, total, "CELLS:FACTOR, as 1:3")
        try:
            factor = float(rest)
        except ValueError:
            factor = 0.0
        if not 1 <= factor <= 1000:
            raise WrongUsage(f"--slow {trouble.slow!r}: expected a factor from 1 to 1000")
        slow = {total - 1 - at: factor for at in range(count)}
    heat = None
    if trouble.hot:
        name, _, text = trouble.hot.partition("=")
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if name not in rates or not 0 < share <= 1 or (share < 1 and len(rates) == 1):
            raise WrongUsage(
                f"--hot {trouble.hot!r}: expected NAME=SHARE with a name of the mix, of which "
                "there are two or more, and a share above 0 and up to 1"
            )
        heat = Hot(name, share, seconds / 3, 2 * seconds / 3)
    return Scenario(
        groups=[(count, cell) for count, (_, cell) in zip(counts, shapes, strict=True)],
        cores=planned.groups[0][1].cores,
        rate=rate,
        mix={name: own / rate for name, own in rates.items()},
        arrivals=arrivals,
        seconds=seconds,
        warm_s=seconds / 5,
        rule=router,
        limit_s=limit.limit_s,
        repeats=trouble.repeats,
        failures=failures,
        slow=slow,
        hot=heat,
    )


def _cells_of(option: str, text: str, cells: int, expected: str) -> tuple[int, str]:
    from modelyard.serve.tools.tune import WrongUsage

    number, _, rest = text.partition(":")
    if not number.isdecimal() or not 1 <= int(number) <= cells:
        raise WrongUsage(f"{option} {text!r}: expected {expected}; {cells} cells are simulated")
    return int(number), rest


def _simulate(scenario: Scenario) -> Outcome:
    from modelyard.serve.simulation.run import simulate

    with step_bar() as show:
        return simulate(scenario, show)


# -- what is found ---------------------------------------------------------------------------------


def _is_kept(planned: Plan, limit: Slo, share: float, outcome: Outcome | None) -> bool:
    if outcome is None:
        return all(cell.worst_s(share) <= limit.limit_s for _, cell in planned.groups)
    return all(
        tally.offered == tally.good + tally.late and tally.quantile_s(share) <= limit.limit_s
        for tally in outcome.models.values()
        if tally.offered
    )


def _ms(seconds: float) -> str:
    return "never" if math.isinf(seconds) else f"{seconds * 1e3:.3g} ms"


def _print_plan(
    planned: Plan,
    models: Sequence[KnownModel],
    rps: float,
    limit: Slo,
    share: float,
    is_split: bool,
) -> None:
    from modelyard.serve.tools.plan import best_cell

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
        out.print(f"with one cell less, {limit.quantile} is {_ms(fewer.worst_s(share))}")
    out.print(
        "the model: Poisson arrivals, spread evenly; a birth-death chain of jobs in a cell, whose "
        "batches take what was measured (docs/plan.md)",
        style="dim",
    )


def _rows(planned: Plan) -> list[Any]:
    return [((number, cell), own) for number, cell in planned.groups for own in cell.models]


def _print_outcome(
    planned: Plan, limit: Slo, share: float, outcome: Outcome, scenario: Scenario, took_s: float
) -> None:
    from modelyard.serve.simulation.router import RULES

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
    if _is_kept(planned, limit, share, outcome):
        out.print(f"[green]kept:[/green] {limit}")
    else:
        more = math.ceil(planned.cells * 1.1)
        out.print(f"[red]not kept:[/red] {limit}, or not all were answered; try --cells {more}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _report(
    planned: Plan,
    rps: float,
    limit: Slo,
    share: float,
    outcome: Outcome | None,
    scenario: Scenario | None,
    took_s: float,
) -> dict[str, Any]:
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
