"""The command `modelyard tune`."""

from __future__ import annotations

import json
import mimetypes
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from modelyard.archiver.errors import ArchiveError
from modelyard.base.terminal import err, out, step_bar
from modelyard.serve.errors import ServeError, StartError, WrongUsage, exit_code

if TYPE_CHECKING:
    from modelyard.archiver import Archive
    from modelyard.plugins.ops.tune.costs import Costs
    from modelyard.plugins.ops.tune.tune import Outcome, Result, Setting, Slo
    from modelyard.serve.control.restore import StartPlan
    from modelyard.serve.settings import Settings

COSTS_S = 1.0
"""For each batch size, and for each load, of what `plan` reckons with."""

tune_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_HELP = """Find workers, threads and batch size of a model on this machine, through the real server.

Each setting is served on free ports of the loopback address and loaded by connections that each
have one request in flight. The one with the highest rate whose latency keeps the limit is written
as a model-config.yaml, with everything that the archive's own says. The archive is not changed.

Example:

    modelyard tune digits --model-store model_store --slo p99=50ms

Exit codes: 0 the best is written; 1 no setting keeps the limit, or the model cannot be measured;
2 wrong usage.
"""


@tune_app.command("tune", help=_HELP)
def tune(
    model: Annotated[
        str, typer.Argument(metavar="NAME[=FILE]", help="A model of the store, as for serve start.")
    ],
    model_store: Annotated[Path | None, typer.Option(help="Folder of the archives.")] = None,
    slo: Annotated[
        str | None, typer.Option(help="Limit of a latency, as p99=50ms. Default: none.")
    ] = None,
    inputs: Annotated[
        list[Path] | None,
        typer.Option(
            "--input", help="A request's body; repeatable. Default: the archive's golden requests."
        ),
    ] = None,
    artifacts: Annotated[
        bool, typer.Option("--artifacts", help="Try the archive's other artifacts, too.")
    ] = False,
    connections: Annotated[
        int, typer.Option(min=1, max=1000, help="Requests in flight at once.")
    ] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, help="Measured in one turn.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each setting that may win.")] = 3,
    device: Annotated[str | None, typer.Option(help=r"auto, cpu or cuda\[:N].")] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with settings, as for serve start.")
    ] = None,
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("model-config.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure, print, write."""
    from modelyard.plugins.ops.tune.tune import parse_slo
    from modelyard.serve.settings import load_settings

    try:
        limit = parse_slo(slo) if slo is not None else None
        if output.exists() and not force:
            raise StartError(f"{output} exists; --force replaces it, --output names another file")
        if not output.parent.is_dir():
            raise StartError(f"--output {output}: there is no folder {output.parent}")
        settings = load_settings({"model_store": model_store, "device": device}, config)
        with tempfile.TemporaryDirectory(prefix="modelyard-tune-") as state_dir:
            tuned = _measure(
                settings,
                model,
                inputs or [],
                Path(state_dir),
                limit,
                connections,
                seconds,
                rounds,
                artifacts,
            )
        if tuned.outcome.best is not None:
            _write(output, tuned)
    except (ServeError, ArchiveError) as error:
        err.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(exit_code(error)) from error
    except KeyboardInterrupt as error:
        err.print("stopped; nothing was written")
        raise typer.Exit(1) from error
    if json_output:
        out.print_json(json.dumps(_report(tuned, limit, output), allow_nan=False))
    else:
        _print(tuned, limit, output)
    if tuned.outcome.best is None:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Tuned:
    """What was measured, and of what."""

    name: str
    version: str
    config_text: str
    """The archive's own model-config.yaml."""
    cores: int
    connections: int
    plan: Setting
    """What would be started without the file."""
    outcome: Outcome
    costs: Costs | None
    """Of the best setting; None where there is none."""


def _measure(
    settings: Settings,
    model: str,
    inputs: Sequence[Path],
    state_dir: Path,
    slo: Slo | None,
    connections: int,
    seconds: float,
    rounds: int,
    tries_artifacts: bool,
) -> Tuned:
    """Read the archive, search, and return the outcome.

    Raises:
        ServeError, ArchiveError: the model cannot be measured.
    """
    from modelyard.archiver import open_archive
    from modelyard.plugins.ops.tune.measure_costs import measure_costs
    from modelyard.plugins.ops.tune.tune import Setting, Trial, golden_bodies, on_own_ports, search
    from modelyard.serve.control.restore import plan_start
    from modelyard.serve.control.sizing import is_on_gpu

    if model.upper() == "ALL":
        raise WrongUsage("one model is tuned at a time; name it")
    settings = on_own_ports(settings, (model,), state_dir)
    plan: StartPlan = plan_start(settings)
    (planned,) = plan.models
    with open_archive(settings.model_store / planned.file) as archive:
        bodies = _read_inputs(inputs) if inputs else golden_bodies(archive)
        file = archive.manifest.config_file
        config_text = archive.read(file).decode() if file else ""
        others: list[str] = []
        if tries_artifacts and not (others := list(_alternatives(archive))):
            raise StartError(
                f"--artifacts: {planned.file} holds no other artifact of the same checkpoint with "
                "its report; pack both with `modelyard archive --extra-files`"
            )
    if not bodies:
        raise StartError(f"{planned.file} holds no golden request; give a request with --input")
    trial = Trial(
        settings,
        planned.name,
        f"/predictions/{quote(planned.name)}",
        bodies,
        connections,
        seconds,
    )
    gpus = 0
    if is_on_gpu(plan.machine, planned.config.device):
        gpus = plan.machine.gpus if planned.config.device in ("auto", "cuda") else 1
    start = Setting(
        planned.allocation.workers, planned.allocation.threads, planned.config.batch_size
    )
    with step_bar() as show:
        outcome = search(
            start,
            cores=plan.machine.cores,
            gpus=gpus,
            largest_batch=min(connections, planned.config.proven_batch or connections),
            slo=slo,
            rounds=rounds,
            measure=trial.measure,
            artifacts=others,
            on_turn=lambda setting, turn, done, expected: show(
                f"{setting}, turn {turn}", done, expected
            ),
        )
        costs = None
        if outcome.best is not None:
            best, shortly = outcome.best.setting, replace(trial, seconds=min(seconds, COSTS_S))
            costs = measure_costs(shortly, best, planned.file, plan.machine.cores, show)
    cores = plan.machine.cores
    return Tuned(
        planned.name, planned.version, config_text, cores, connections, start, outcome, costs
    )


def _read_inputs(files: Sequence[Path]) -> list[tuple[bytes, str]]:

    try:
        return [
            (file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream")
            for file in files
        ]
    except OSError as error:
        raise StartError(f"--input {error.filename}: {error.strerror}") from error


def _alternatives(archive: Archive) -> Iterator[str]:
    from modelyard.archiver.alternatives import find_alternatives
    from modelyard.archiver.untrusted.names import MANIFEST_NAME

    seal = archive.manifest.modelyard
    if seal is None:
        return iter(())
    return find_alternatives(json.loads(archive.read(MANIFEST_NAME)), archive.names, archive.read)


def _write(file: Path, tuned: Tuned) -> None:
    """Write the archive's configuration with the best setting."""
    import yaml

    from modelyard.plugins.ops.tune.costs import KEY
    from modelyard.plugins.ops.tune.tune import config_changes, merge_config

    best, costs = tuned.outcome.best, tuned.costs
    assert best is not None and costs is not None
    old = yaml.safe_load(tuned.config_text) or {}
    changes = {**config_changes(old, best.setting, best.rate), KEY: costs.as_dict()}
    text = merge_config(tuned.config_text, changes)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StartError(f"cannot write {file}: {error.strerror}") from error


# -- what is printed ---------------------------------------------------------------------------


def _report(tuned: Tuned, slo: Slo | None, output: Path) -> dict[str, Any]:
    outcome = tuned.outcome

    def of(result: Result) -> dict[str, Any]:
        is_measured = not result.failure
        return {
            **vars(result.setting),
            "rate": result.rate if is_measured else None,
            "spread": result.spread if is_measured else None,
            **{
                f"{name}_ms": result.quantile_s(name) * 1e3 if is_measured else None
                for name in result.turns[0].quantiles_s
            },
            "turns": [turn.rate for turn in result.turns],
            "meets": result.meets(slo),
            "failure": result.failure or None,
        }

    return {
        "name": tuned.name,
        "version": tuned.version,
        "slo": str(slo) if slo else None,
        "cores": tuned.cores,
        "connections": tuned.connections,
        "load_cores": _load_share(outcome),
        "plan": vars(tuned.plan),
        "finals": [of(result) for result in outcome.finals],
        "others": [of(result) for result in outcome.others],
        "best": of(outcome.best) if outcome.best else None,
        "nearest": of(outcome.nearest) if outcome.nearest else None,
        "file": str(output) if outcome.best else None,
        "costs": tuned.costs.as_dict() if tuned.costs else None,
    }


def _all(outcome: Outcome) -> list[Result]:
    return [*outcome.finals, *outcome.others]


def _load_share(outcome: Outcome) -> float:
    """Return the largest share of a core that the load took itself."""
    turns = (turn for result in _all(outcome) for turn in result.turns)
    return max((turn.load_share for turn in turns), default=0.0)


def _print(tuned: Tuned, slo: Slo | None, output: Path) -> None:
    outcome = tuned.outcome
    shown = ["p50", "p99"]
    if slo and slo.quantile not in shown:
        shown.append(slo.quantile)
    table = Table("workers", "threads", "batch", "per second", "spread", *shown, "turns", "")
    for column in table.columns[:-1]:
        column.justify = "right"
    for result in _all(outcome):
        setting = result.setting
        row = [str(setting.workers), str(setting.threads), str(setting.batch_size)]
        if result.failure:
            row += ["failed", "", *[""] * len(shown), "", result.failure[:100]]
        else:
            spread = f"±{result.spread:.0%}" if len(result.turns) > 1 else ""
            row += [f"{result.rate:.4g}", spread]
            row += [f"{result.quantile_s(name) * 1e3:.3g} ms" for name in shown]
            row += [str(len(result.turns)), _mark(result, tuned, slo)]
        table.add_row(
            *(Text(cell) for cell in row),
            end_section=bool(outcome.finals) and result is outcome.finals[-1],
        )
    out.print(table)
    share = _load_share(outcome)
    out.print(
        f"{tuned.connections} connections; the load took up to {share:.2f} of {tuned.cores} cores "
        "itself, which a client elsewhere would leave to the server"
    )
    if outcome.best is not None:
        setting = outcome.best.setting
        out.print(f"[green]best:[/green] {setting}, written to {escape(str(output))}. Put it in:")
        out.print(
            f"  modelyard archive {tuned.name} --config-file {escape(str(output))} "
            "--version NEW …   (the other options as before)",
            soft_wrap=True,
        )
    elif outcome.nearest is not None and slo is not None:
        nearest_ms = outcome.nearest.quantile_s(slo.quantile) * 1e3
        out.print(
            f"[red]no setting keeps {slo}[/red]; the nearest is {outcome.nearest.setting} with "
            f"{slo.quantile}={nearest_ms:.3g}ms. Nothing was written. Fewer --connections wait "
            "less for each other"
        )
    else:
        out.print("[red]no setting could be measured[/red]; nothing was written")


def _mark(result: Result, tuned: Tuned, slo: Slo | None) -> str:
    outcome = tuned.outcome
    marks = [
        "best" if result is outcome.best else "",
        "nearest" if result is outcome.nearest else "",
        "the plan" if result.setting == tuned.plan else "",
        "" if result.meets(slo) or result is outcome.nearest else f"over {slo}",
        "" if result in outcome.finals else "left out early",
        result.setting.artifact,
    ]
    return ", ".join(filter(None, marks))
