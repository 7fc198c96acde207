"""`modelyard serve start | stop | status | token`, `modelyard predict`, `modelyard explain`."""

from __future__ import annotations

import json
import mimetypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table

from modelyard.archiver import ArchiveError
from modelyard.serve.control.state import StateDir, describe_running, read_key
from modelyard.serve.errors import ServeError, StartError
from modelyard.serve.log import log_to_stderr
from modelyard.serve.settings import Settings, load_settings
from modelyard.serve.start import start_detached
from modelyard.serve.tools.client import Answer, call

serve_app = typer.Typer(
    help="Start, stop and look at the server.", no_args_is_help=True, add_completion=False
)
predict_app = typer.Typer(add_completion=False)
explain_app = typer.Typer(add_completion=False)

StateDirOption = Annotated[
    Path | None,
    typer.Option("--state-dir", help="Folder of pid file, keys and logs; one server each."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
UrlOption = Annotated[
    str | None, typer.Option(help="Base URL of the server; default: the one of the state folder.")
]

STOP_GRACE_S = 10.0
"""Beyond the server's own drain time."""

# Where nobody looks, in a file or a pipe, lines are as long as their text.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def _errors() -> Iterator[None]:
    """Turn a known error into one line and exit code 1."""
    try:
        yield
    except (ServeError, ArchiveError) as error:
        err.print(f"[red]error:[/red] {_plain(str(error))}")
        raise typer.Exit(1) from error


def _plain(text: str) -> str:
    """Escape what the console would take for markup."""
    return text.replace("[", "\\[")


# -- serve -------------------------------------------------------------------------------------


@serve_app.command()
def start(
    models: Annotated[
        list[str] | None,
        typer.Option("--models", help="NAME or NAME=FILE of the model store, or ALL; repeatable."),
    ] = None,
    more_models: Annotated[list[str] | None, typer.Argument(metavar="[NAME[=FILE]]...")] = None,
    model_store: Annotated[Path | None, typer.Option(help="Folder of the archives.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with any of the settings.")] = None,
    host: Annotated[str | None, typer.Option(help="Address; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Inference; default 8080.")] = None,
    management_port: Annotated[int | None, typer.Option(help="Management; default 8081.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Metrics; default 8082.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda[:N].")] = None,
    workers: Annotated[int | None, typer.Option(help="Per model; default by cores.")] = None,
    auth: Annotated[
        str | None, typer.Option(help="Tokens: auto (off on loopback), always, never.")
    ] = None,
    trusted_keys: Annotated[
        Path | None, typer.Option(help="File of public keys whose signatures are accepted.")
    ] = None,
    require_signature: Annotated[
        bool | None,
        typer.Option("--require-signature", help="Serve only what a trusted key signed."),
    ] = None,
    install_requirements: Annotated[
        bool | None,
        typer.Option(
            "--install-requirements",
            help="Install what an archive requires, into an environment of its own.",
        ),
    ] = None,
    state_dir: StateDirOption = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay attached.")] = False,
    explain_plan: Annotated[
        bool,
        typer.Option("--explain-plan", help="Say what would be started and why; start nothing."),
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Start the server and return when its models are ready.

    Example: modelyard serve start --model-store model_store --models digits
    """
    named = [name for option in models or [] for name in option.split(",") if name]
    named += more_models or []
    with _errors():
        settings = load_settings(
            {
                "models": tuple(named) or None,
                "model_store": model_store,
                "host": host,
                "port": port,
                "management_port": management_port,
                "metrics_port": metrics_port,
                "device": device,
                "workers": workers,
                "auth": auth,
                "trusted_keys": trusted_keys,
                "require_signature": require_signature,
                "install_requirements": install_requirements,
                "state_dir": state_dir,
            },
            config,
        )
        if explain_plan:
            _print_plan(settings, json_output)
            return
        state = StateDir(settings.state_dir)
        if (running := state.running()) is not None:
            raise StartError(describe_running(running))
        if foreground:
            raise typer.Exit(_run_attached(settings))
        with err.status("starting") as status:
            _, about = start_detached(
                settings, state, lambda model, text: status.update(f"{model}: {text}")
            )
    if json_output:
        out.print_json(json.dumps(about))
    else:
        for warning in about["warnings"]:
            err.print(f"[yellow]warning:[/yellow] {_plain(warning)}")
        out.print(f"[green]ready[/green], pid {about['pid']}")
        _print_addresses(about)


def _print_plan(settings: Settings, json_output: bool) -> None:
    from modelyard.serve.control.lifecycle import Lifecycle
    from modelyard.serve.control.registry import Registry
    from modelyard.serve.dataplane.metrics import Metrics
    from modelyard.serve.tools.explain_plan import explain, plan_table

    plan = Lifecycle(settings, Registry(), Metrics()).plan()
    if json_output:
        out.print_json(json.dumps(explain(plan)))
        return
    for line in plan_table(plan):
        out.print(line)
    if plan.warning:
        err.print(f"[yellow]warning:[/yellow] {_plain(plan.warning)}")


def _run_attached(settings: Settings) -> int:
    from modelyard.serve.server import run

    log_to_stderr()

    def report(event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            err.print("[green]ready[/green]; stop with Ctrl-C")
            _print_addresses(event)

    return run(settings, report)


def _print_addresses(about: dict[str, Any]) -> None:
    grid = Table.grid(padding=(0, 2))
    for name in ("inference", "management", "metrics"):
        grid.add_row(name, about[name])
    grid.add_row("docs", f"{about['inference']}/docs")
    grid.add_row("log", about["log"])
    out.print(grid, soft_wrap=True)


@serve_app.command()
def stop(state_dir: StateDirOption = None) -> None:
    """Answer what was accepted, then end the server.

    Example: modelyard serve stop
    """
    with _errors():
        state = StateDir(load_settings({"state_dir": state_dir}).state_dir)
        running = state.running()
        if running is None:
            out.print("no server is running")
            return
        if not running:
            raise StartError("the server is just starting; try again in a moment")
        pid = int(running["pid"])
        os.kill(pid, signal.SIGTERM)
        limit = time.monotonic() + float(running["drain_timeout_s"]) + STOP_GRACE_S
        with err.status("waiting for requests in progress"):
            while state.is_locked() and time.monotonic() < limit:
                time.sleep(0.02)
        if state.is_locked():
            raise StartError(f"pid {pid} has not ended; `kill -9 {pid}` ends it without answers")
    out.print(f"stopped, pid {pid}")


@serve_app.command()
def status(state_dir: StateDirOption = None, json_output: JsonOption = False) -> None:
    """Show models, versions, workers and queues. Exit code 1 when no server runs.

    Example: modelyard serve status
    """
    with _errors():
        state = StateDir(load_settings({"state_dir": state_dir}).state_dir)
        running = state.running()
        if not running:
            text = "no server is running" if running is None else "a server is starting"
            out.print_json(json.dumps({"running": False})) if json_output else out.print(text)
            raise typer.Exit(1)
        token = read_key(state.key_file, "management")
        names = _all_models(running["management"], token)
        models = [
            model
            for name in names
            for model in call(
                running["management"], "GET", f"/models/{quote(name)}/all", token=token
            ).json()
        ]
    if json_output:
        out.print_json(json.dumps({"running": True, **running, "models": models}))
        return
    out.print(f"running, pid {running['pid']}, since {running['started']}")
    _print_addresses(running)
    table = Table("model", "version", "file", "workers", "pids", "restarts", "memory", "queue")
    for model in models:
        workers = model["workers"]
        ready = sum(worker["status"] == "READY" for worker in workers)
        queue = model["jobQueueStatus"]
        room = queue["remainingCapacity"] + queue["pendingRequests"]
        table.add_row(
            model["modelName"],
            model["modelVersion"] + (" (default)" if model["isDefault"] else ""),
            model["modelUrl"],
            f"{ready}/{len(workers)} ready",
            " ".join(str(worker["pid"]) for worker in workers),
            str(sum(worker["restarts"] for worker in workers)),
            f"{sum(worker['memoryUsage'] for worker in workers) / 1e6:.0f} MB",
            f"{queue['pendingRequests']} of {room}",
        )
    out.print(table)


def _all_models(url: str, token: str) -> list[str]:
    names: list[str] = []
    page: str | None = "0"
    while page is not None:
        answer = call(url, "GET", "/models", query={"next_page_token": page}, token=token).json()
        names += [model["modelName"] for model in answer["models"]]
        page = answer.get("nextPageToken")
    return names


@serve_app.command()
def token(
    api: Annotated[str, typer.Argument(help="management or inference.")] = "management",
    state_dir: StateDirOption = None,
) -> None:
    """Print the running server's bearer token of one API.

    Example: curl -H "Authorization: Bearer $(modelyard serve token)" http://127.0.0.1:8081/models
    """
    with _errors():
        state = StateDir(load_settings({"state_dir": state_dir}).state_dir)
        typer.echo(read_key(state.key_file, api))


# -- predict and explain -----------------------------------------------------------------------

ModelArgument = Annotated[str, typer.Argument(metavar="NAME[/VERSION]")]
FileArgument = Annotated[Path, typer.Argument(help="The input; - reads standard input.")]


@predict_app.command()
def predict(
    model: ModelArgument,
    file: FileArgument,
    url: UrlOption = None,
    state_dir: StateDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Ask the running server for a prediction.

    Example: modelyard predict digits examples/digits/scans/7.png
    """
    with _errors():
        answer = _ask("predictions", model, file, url, state_dir, {}, {})
    if json_output or not _print_labels(answer):
        _print_answer(answer)


@explain_app.command()
def explain(
    model: ModelArgument,
    file: FileArgument,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Heat map (.png), coloured text (.html) or .json."),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="integrated_gradients, occlusion, …; docs/explain.md.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Class index, label, predicted, top-N, or a place as 3,7.")
    ] = None,
    output_kind: Annotated[
        str | None, typer.Option(help="What of the target: logit or probability.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="zero, black, white, mean, blur, noise, pad, or file:NAME."),
    ] = None,
    n_steps: Annotated[int | None, typer.Option(help="Fixed number of steps.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Raise the steps until the sum is this close.")
    ] = None,
    max_steps: Annotated[int | None, typer.Option(help="Where raising ends.")] = None,
    n_samples: Annotated[int | None, typer.Option(help="Random points.")] = None,
    noise: Annotated[
        float | None, typer.Option(help="Deviation, as a share of the input's range.")
    ] = None,
    window: Annotated[int | None, typer.Option(help="Side of what is replaced at once.")] = None,
    stride: Annotated[int | None, typer.Option(help="By which windows move.")] = None,
    layer: Annotated[str | None, typer.Option(help="As the checkpoint names it.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random.")] = None,
    internal_batch_size: Annotated[
        int | None, typer.Option(help="Points that share a pass; by memory without it.")
    ] = None,
    aggregate: Annotated[
        str | None, typer.Option(help="sum or none: channels, or a token's embedding.")
    ] = None,
    quality: Annotated[
        bool, typer.Option("--quality", help="Measure infidelity and sensitivity too.")
    ] = False,
    url: UrlOption = None,
    state_dir: StateDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Ask the running server which input values made the answer, and how sure that is.

    Example: modelyard explain digits examples/digits/scans/7.png -o heatmap.png
    """
    query = {
        "method": method,
        "target": target,
        "output": output_kind,
        "baseline": baseline,
        "n_steps": n_steps,
        "tolerance": tolerance,
        "max_steps": max_steps,
        "n_samples": n_samples,
        "noise": noise,
        "window": window,
        "stride": stride,
        "layer": layer,
        "seed": seed,
        "internal_batch_size": internal_batch_size,
        "aggregate": aggregate,
        "quality": "true" if quality else None,
        "format": _PICTURES.get(output.suffix.lower()) if output is not None else None,
    }
    accept = {"Accept": "application/json"}
    with _errors():
        answer = _ask("explanations", model, file, url, state_dir, query, accept)
        if output is not None:
            _write(output, answer.body)
            out.print(f"wrote {output}", soft_wrap=True)
    if output is None and (json_output or not _print_explanation(answer)):
        _print_answer(answer)


def _ask(
    api: str,
    model: str,
    file: Path,
    url: str | None,
    state_dir: Path | None,
    query: dict[str, Any],
    headers: dict[str, str],
) -> Answer:
    """Send a file to the running server."""
    try:
        body = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise StartError(f"cannot read {file}: {error.strerror}") from error
    media_type, _ = mimetypes.guess_type(file.name)
    key = None
    if url is None:
        state = StateDir(load_settings({"state_dir": state_dir}).state_dir)
        running = state.running()
        if not running:
            raise StartError(
                "no server is running in this state folder; start one with "
                "`modelyard serve start`, or name one with --url"
            )
        url = str(running["inference"])
        key = read_key(state.key_file, "inference")
    sent = {"Content-Type": media_type or "application/octet-stream", **headers}
    path = f"/{api}/{quote(model)}"
    return call(url, "POST", path, query=query, body=body, headers=sent, token=key)


def _print_answer(answer: Answer) -> None:
    if answer.content_type.startswith("application/json"):
        out.print_json(answer.body.decode())
    else:
        sys.stdout.buffer.write(answer.body)
        sys.stdout.buffer.flush()


def _print_labels(answer: Answer) -> bool:
    """Print label → probability as bars; tell whether the answer is of that form."""
    scores = answer.json() if answer.content_type.startswith("application/json") else None
    if not isinstance(scores, dict) or not scores:
        return False
    if not all(isinstance(value, float) and 0 <= value <= 1 for value in scores.values()):
        return False
    grid = Table.grid(padding=(0, 2))
    for label, value in scores.items():
        grid.add_row(_plain(label), f"{value:.4f}", "█" * round(40 * value) or "▏")
    out.print(grid)
    return True


def _print_explanation(answer: Answer) -> bool:
    """Print what explanations say of themselves; tell whether the answer holds any."""
    content = answer.json() if answer.content_type.startswith("application/json") else None
    if not isinstance(content, dict):
        return False
    explanations = content.get("explanations", [content])
    if not all("attributions" in each for each in explanations):
        return False
    for number, each in enumerate(explanations):
        if number:
            out.print()
        grid = Table.grid(padding=(0, 2))
        for name, show in _FIELDS.items():
            if each.get(name) is not None:
                grid.add_row(name, _plain(show(each[name])))
        for name, value in each.get("quality", {}).items():
            grid.add_row(name, f"{value:.3g}")
        out.print(grid)
        shares = each.get("features") or {}
        pairs = [*shares.items(), *((t["token"], t["attribution"]) for t in each.get("tokens", ()))]
        if pairs:
            _print_shares(pairs)
    if "tokens" in explanations[0]:
        out.print("-o FILE.html draws it, --json prints the attributions")
    elif "features" in explanations[0]:
        out.print("--json prints the attributions")
    else:
        out.print("-o FILE.png draws it, --json prints the attributions")
    return True


_FIELDS: dict[str, Callable[[Any], str]] = {
    "label": str,
    "target": str,
    "probability": "{:.4f}".format,
    "method": str,
    "layer": str,
    "output": str,
    "baseline": str,
    "f_input": "{:.6g}".format,
    "f_baseline": "{:.6g}".format,
    "sum_attributions": "{:.6g}".format,
    "convergence_delta": "{:.3g}".format,
    "relative_delta": "{:.2%}".format,
    "n_steps": str,
    "tolerance_met": str,
    "shape": str,
}

_PICTURES = {".png": "png", ".html": "html"}


def _print_shares(pairs: list[tuple[str, float]]) -> None:
    """Print name → attribution as bars, as long as the largest allows."""
    most = max(abs(value) for _, value in pairs) or 1.0
    grid = Table.grid(padding=(0, 2))
    for name, value in pairs:
        colour = "red" if value > 0 else "blue"
        bar = "█" * round(30 * abs(value) / most)
        grid.add_row(_plain(name), f"{value:+.4g}", f"[{colour}]{bar}[/{colour}]")
    out.print(grid)


def _write(file: Path, content: bytes) -> None:
    """Write a whole file or nothing."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
            temporary = Path(new.name)
            new.write(content)
        temporary.chmod(0o644)
        temporary.replace(file)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise StartError(f"cannot write {file}: {error.strerror}") from error
