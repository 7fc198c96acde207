"""The commands `modelyard serve start | stop | status | token`."""

import inspect
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.markup import escape

from modelyard.archiver.errors import ArchiveError
from modelyard.base.terminal import described_arguments, err, out
from modelyard.serve.errors import ServeError, StartError, WrongUsage, exit_code
from modelyard.serve.tools.handle import serve, start_detached

if TYPE_CHECKING:
    from modelyard.serve.control.state import StateDir
    from modelyard.serve.policy import Policy
    from modelyard.serve.settings import Settings

_F = TypeVar("_F", bound=Callable[..., None])

serve_app = typer.Typer(
    help="Start, stop and look at the server.", no_args_is_help=True, add_completion=False
)

StateDirOption = Annotated[
    Path | None,
    typer.Option("--state-dir", help="Folder of pid file, keys and logs; one server each."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
UrlOption = Annotated[
    str | None, typer.Option(help="Base URL of the API; default: the one of the state folder.")
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        envvar="MODELYARD_TOKEN", help="Token for --url; in the state folder it is found."
    ),
]
CaOption = Annotated[
    Path | None,
    typer.Option(
        envvar="MODELYARD_CA", help="Certificates (PEM) to trust, for https; default: the system's."
    ),
]
STOP_GRACE_S = 10.0
"""Beyond the server's own drain time."""


@contextmanager
def known_errors() -> Iterator[None]:
    """Turn a known error into one line and an exit code."""
    try:
        yield
    except (ServeError, ArchiveError) as error:
        err.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(exit_code(error)) from error


def show(content: Any, json_output: bool, write: Callable[[Any], object]) -> None:
    """Print what a command has found: as JSON, or as `write` prints it."""
    if json_output:
        out.print_json(json.dumps(content))
    else:
        write(content)


def warn(warnings: Iterable[str]) -> None:
    """Print what whoever starts a server should know."""
    for warning in warnings:
        err.print(f"[yellow]warning:[/yellow] {escape(warning)}")


def state_folder(state_dir: Path | None) -> "StateDir":
    """Return the state folder that is meant: the one named, else the one of the settings."""
    # Here, as in every command: `--help` does not wait for what it does not use.
    from modelyard.serve.control.state import StateDir
    from modelyard.serve.settings import load_settings

    return StateDir(load_settings({"state_dir": state_dir}).state_dir)


_SERVER_OPTIONS: Mapping[str, Any] = {
    "url": UrlOption,
    "token": TokenOption,
    "ca": CaOption,
    "state_dir": StateDirOption,
    "json_output": JsonOption,
}
"""The options of every command that asks a running server."""


def asks(app: typer.Typer, api: str = "management", name: str | None = None) -> Callable[[_F], _F]:
    """Return a decorator that makes a function a command which asks a running server.

    The function is called with the `Endpoint` that the options of every such command mean, the one
    of a URL, else that of the state folder's server, with whether JSON is to be printed, and with
    what it declares besides; an error that is known ends the command with one line.

    Args:
        app: where the command is registered.
        api: which API it asks: management or inference.
        name: the command's; by default the function's.
    """

    def register(function: _F) -> _F:
        def command(
            *, url: str | None, token: str | None, ca: Path | None, state_dir: Path | None,
            json_output: bool, **given: Any,
        ) -> None:  # fmt: skip
            from modelyard.serve.tools.client import find_endpoint

            with known_errors():
                at = find_endpoint(api, state_folder(state_dir), url, token, ca)
                function(at, json_output, **given)

        own = list(inspect.signature(function).parameters.values())[2:]
        by_name = inspect.Parameter.KEYWORD_ONLY
        parameters = [each.replace(kind=by_name) for each in own]
        for option, kind in _SERVER_OPTIONS.items():
            absent = False if option == "json_output" else None
            parameters.append(inspect.Parameter(option, by_name, default=absent, annotation=kind))
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        setattr(command, "__signature__", inspect.Signature(parameters))  # noqa: B010 - for typer
        app.command(name)(command)
        return function

    return register


def start(
    models: Annotated[
        list[str] | None,
        typer.Option("--models", help="NAME or NAME=FILE of the model store, or ALL; repeatable."),
    ] = None,
    more_models: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME[=FILE]", help="What to serve; the same as --models."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with any of the settings.")] = None,
    reload: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Serve edits of this folder's files when they are saved; stays attached.",
        ),
    ] = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay attached.")] = False,
    explain_plan: Annotated[
        bool,
        typer.Option("--explain-plan", help="Report what would be started and why; start nothing."),
    ] = False,
    json_output: JsonOption = False,
    **given: Any,
) -> None:
    """Start the server and return when its models are ready.

    Example: modelyard serve start --model-store model_store --models digits
    """
    from modelyard.serve.control.state import StateDir
    from modelyard.serve.settings import load_settings, unknown_variables

    named = [name for option in models or [] for name in option.split(",") if name]
    given["models"] = (*named, *(more_models or ())) or None
    given["reload"] = tuple(reload) if reload else None
    with known_errors():
        settings = load_settings(given, config)
        warn(unknown_variables())
        if explain_plan:
            _print_plan(settings, json_output)
            return
        state = StateDir(settings.state_dir)
        if foreground or settings.reload:  # whoever edits wants to read what is wrong
            raise typer.Exit(run_attached(settings))
        with err.status("starting") as status:
            _, about = start_detached(
                settings, state, lambda model, text: status.update(f"{model}: {text}")
            )
    show(about, json_output, _print_ready)


def _print_ready(about: dict[str, Any]) -> None:
    warn(about["warnings"])
    out.print(f"[green]ready[/green], pid {about['pid']}")
    _print_addresses(about)


def _start_parameters() -> Iterator[inspect.Parameter]:
    """Yield the parameters of `start`, with the settings of the function `serve` for `given`."""
    own = dict(inspect.signature(start, eval_str=True).parameters)
    del own["given"]
    yield from own.values()
    texts = described_arguments(serve)
    for name, parameter in inspect.signature(serve).parameters.items():
        if name not in own:
            kinds = {"Path": Path, "int": int, "float": float, "bool": bool, "str": str}
            kind = next(kinds[each] for each in kinds if each in str(parameter.annotation))
            option = typer.Option(None, f"--{name.replace('_', '-')}", help=texts.get(name))
            yield parameter.replace(
                kind=parameter.KEYWORD_ONLY, annotation=kind | None, default=option
            )


start.__signature__ = inspect.Signature(list(_start_parameters()))  # type: ignore[attr-defined]
serve_app.command()(start)


def _print_plan(settings: "Settings", json_output: bool) -> None:
    from modelyard.serve.explain_plan import explain, plan_start, plan_table

    plan = plan_start(settings)
    if json_output:
        out.print_json(json.dumps(explain(plan)))
        return
    for line in plan_table(plan):
        out.print(line)
    warn(plan.warnings)


def run_attached(settings: "Settings", policy: "Callable[[Settings], Policy] | None" = None) -> int:
    """Run a server in this process until it is told to stop; return its exit code.

    Args:
        policy: makes its decisions, where they are not ours.
    """
    from modelyard.serve.log import log_to_stderr
    from modelyard.serve.policy import Policy
    from modelyard.serve.server import run_ours

    access = log_to_stderr(settings)

    def report(event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            err.print("[green]ready[/green]; stop with Ctrl-C")
            _print_addresses(event)

    return run_ours(settings, report, access, policy=policy or Policy)


def _print_addresses(about: dict[str, Any]) -> None:
    more = {**about["faces"], "docs": f"{about['inference']}/docs", "log": about["log"]}
    for name in ("inference", "management", "metrics", *more):
        out.print(f"{name:<12}{escape(more.get(name) or about[name])}", soft_wrap=True)


@serve_app.command()
def stop(state_dir: StateDirOption = None, json_output: JsonOption = False) -> None:
    """Answer what was accepted, then end the server.

    Example: modelyard serve stop
    """
    with known_errors():
        state = state_folder(state_dir)
        running = state.running()
        if running is None:
            text = state.how_it_died() or "no server is running"
            show({"stopped": None}, json_output, lambda _: out.print(text, soft_wrap=True))
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
    show({"stopped": pid}, json_output, lambda _: out.print(f"stopped, pid {pid}"))


@serve_app.command()
def status(state_dir: StateDirOption = None, json_output: JsonOption = False) -> None:
    """Show models, versions, workers and queues. Exit code 1 when no server runs.

    Example: modelyard serve status
    """
    from modelyard.serve.tools.client import find_endpoint
    from modelyard.serve.tools.models_cli import all_versions, print_models

    with known_errors():
        state = state_folder(state_dir)
        running = state.running()
        if not running:
            none = state.how_it_died() or "no server is running"
            text = none if running is None else "a server is starting"
            show({"running": False}, json_output, lambda _: out.print(text, soft_wrap=True))
            raise typer.Exit(1)
        models = all_versions(find_endpoint("management", state))
    if json_output:
        out.print_json(json.dumps({"running": True, **running, "models": models}))
        return
    out.print(f"running, pid {running['pid']}, since {running['started']}")
    _print_addresses(running)
    warn(
        f"no wall for {name}: {measure['found']}"
        for name, measure in running["sandbox"].items()
        if measure["status"] == "lacking"
    )
    print_models(models)


@serve_app.command()
def token(
    api: Annotated[
        str, typer.Argument(metavar="API", help="management or inference.")
    ] = "management",
    state_dir: StateDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Print the running server's bearer token of one API.

    Example: curl -H "Authorization: Bearer $(modelyard serve token)" http://127.0.0.1:8081/models
    """
    from modelyard.serve.control.state import APIS, read_key

    with known_errors():
        if api not in APIS:
            raise WrongUsage(f"{api!r} has no token; expected {' or '.join(APIS)}")
        key = read_key(state_folder(state_dir).key_file, api)
    show({"api": api, "token": key}, json_output, lambda _: typer.echo(key))
