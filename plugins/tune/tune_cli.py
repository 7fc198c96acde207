"""The command `modelyard tune`."""

from __future__ import annotations

import json
import mimetypes
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
import yaml

from modelyard.archiver import Archive, open_archive
from modelyard.archiver.report import find_alternatives
from modelyard.archiver.untrusted.names import MANIFEST_NAME
from modelyard.base.terminal import out, step_bar
from modelyard.plugins.ops.text import print_text
from modelyard.plugins.tune.costs import KEY
from modelyard.plugins.tune.tune import (
    Setting,
    Slo,
    Trial,
    config_changes,
    golden_bodies,
    merge_config,
    on_own_ports,
    parse_slo,
    search,
    stoppable,
)
from modelyard.serve.errors import StartError, WrongUsage
from modelyard.serve.settings import Settings, load_settings

COSTS_S = 1.0
"""Time for each batch size, and for each load, of what `plan` reckons with."""

tune_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@tune_app.command("tune")
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
    """Find workers, threads and batch size of a model on this machine, through the real server.

    Each setting is served on free ports of the loopback address and loaded by connections that each
    have one request in flight. The one with the highest rate whose latency keeps the limit is
    written as a model-config.yaml, with everything that the archive's own says. The archive is not
    changed.

    For example:

        modelyard tune digits --model-store model_store --slo p99=50ms

    Exit codes: 0 the best is written; 1 no setting keeps the limit, or the model cannot be
    measured; 2 wrong usage.
    """
    with stoppable("stopped; nothing was written"):
        limit = parse_slo(slo) if slo is not None else None
        if output.exists() and not force:
            raise StartError(f"{output} exists; --force replaces it, --output names another file")
        if not output.parent.is_dir():
            raise StartError(f"--output {output}: there is no folder {output.parent}")
        settings = load_settings({"model_store": model_store, "device": device}, config)
        with tempfile.TemporaryDirectory(prefix="modelyard-tune-") as state_dir:
            load = connections, seconds, rounds
            found, text = _measure(
                settings, model, inputs or [], Path(state_dir), limit, load, artifacts
            )
        if found["best"] is not None:
            try:
                output.write_text(text, encoding="utf-8")
            except OSError as error:
                raise StartError(f"cannot write {output}: {error.strerror}") from error
            found["file"] = str(output)
    if json_output:
        out.print_json(json.dumps(found, allow_nan=False))
    else:
        quantile = limit.quantile if limit else ""
        print_text(Path(__file__).with_name("tune.txt"), {**found, "quantile": quantile})
    if found["best"] is None:
        raise typer.Exit(1)


def _measure(
    settings: Settings,
    model: str,
    inputs: Sequence[Path],
    state_dir: Path,
    slo: Slo | None,
    load: tuple[int, float, int],
    tries_artifacts: bool,
) -> tuple[dict[str, Any], str]:
    """Read the archive and search; return what was found, and the model-config.yaml of the best.

    Args:
        load: connections, seconds of a turn, and turns of each setting that may win.

    Raises:
        ServeError, ArchiveError: the model cannot be measured.
    """
    from modelyard.plugins.tune.measure_costs import measure_costs
    from modelyard.serve.control.sizing import is_on_gpu
    from modelyard.serve.explain_plan import plan_start

    if model.upper() == "ALL":
        raise WrongUsage("one model is tuned at a time; name it")
    settings = on_own_ports(settings, (model,), state_dir)
    plan = plan_start(settings)
    (planned,), machine = plan.models, plan.machine
    with open_archive(settings.model_store / planned.file) as archive:
        bodies = _read_inputs(inputs) if inputs else golden_bodies(archive)
        file = archive.manifest.config_file
        text = archive.read(file).decode() if file else ""
        others = list(find_artifacts(archive)) if tries_artifacts else []
    if tries_artifacts and not others:
        raise StartError(
            f"--artifacts: {planned.file} holds no other artifact of the same checkpoint with "
            "its report; pack both with `modelyard archive --extra-files`"
        )
    if not bodies:
        raise StartError(f"{planned.file} holds no golden request; give a request with --input")
    name, (connections, seconds, rounds) = planned.name, load
    path = f"/predictions/{quote(name)}"
    trial = Trial(settings, name, path, bodies, connections, seconds)
    gpus = 0
    if is_on_gpu(machine, planned.config.device):
        gpus = machine.gpus if planned.config.device in ("auto", "cuda") else 1
    start = Setting(
        planned.allocation.workers, planned.allocation.threads, planned.config.batch_size
    )
    with step_bar() as show:
        outcome = search(
            start,
            cores=machine.cores,
            gpus=gpus,
            largest_batch=min(connections, planned.config.proven_batch or connections),
            slo=slo,
            rounds=rounds,
            measure=trial.measure,
            artifacts=others,
            on_turn=show,
        )
        best, costs = outcome.best, None
        if best is not None:
            shortly = replace(trial, seconds=min(seconds, COSTS_S))
            measured = measure_costs(shortly, best.setting, planned.file, machine.cores, show)
            costs = measured.as_dict()
            changes = config_changes(yaml.safe_load(text) or {}, best.setting, best.rate)
            text = merge_config(text, {**changes, KEY: costs})
    every = (*outcome.finals, *outcome.others)
    return {
        "name": name,
        "version": planned.version,
        "slo": str(slo) if slo else None,
        "cores": machine.cores,
        "connections": connections,
        "load_cores": max((turn.load_share for each in every for turn in each.turns), default=0.0),
        "plan": vars(start),
        "finals": [each.to_json(slo) for each in outcome.finals],
        "others": [each.to_json(slo) for each in outcome.others],
        "best": best.to_json(slo) if best else None,
        "nearest": outcome.nearest.to_json(slo) if outcome.nearest else None,
        "file": None,
        "costs": costs,
    }, text


def _read_inputs(files: Sequence[Path]) -> list[tuple[bytes, str]]:
    try:
        return [
            (file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream")
            for file in files
        ]
    except OSError as error:
        raise StartError(f"--input {error.filename}: {error.strerror}") from error


def find_artifacts(archive: Archive) -> Iterator[str]:
    """Yield an archive's other artifacts, any of which could predict."""
    if archive.manifest.modelyard is None:
        return iter(())
    return find_alternatives(json.loads(archive.read(MANIFEST_NAME)), archive.names, archive.read)
