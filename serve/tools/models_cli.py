"""The commands `modelyard models …`, which look at and change what a running server serves."""

import json
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.markup import escape

from modelyard.base.terminal import format_bytes, out, plain_table
from modelyard.serve.cli import asks, show
from modelyard.serve.errors import StartError

if TYPE_CHECKING:
    from modelyard.serve.tools.client import Endpoint

models_app = typer.Typer(
    help="List, register, scale and remove models of the running server.",
    no_args_is_help=True,
    add_completion=False,
)

ModelArgument = Annotated[str, typer.Argument(metavar="NAME[/VERSION]", help="What is served.")]
VersionArgument = Annotated[str, typer.Argument(metavar="NAME/VERSION", help="A version of it.")]


def ask(at: "Endpoint", method: str, path: str, query: dict[str, Any] | None = None) -> Any:
    """Return what the management API answers to a request."""
    from modelyard.serve.tools.client import call

    return json.loads(call(at, method, path, query=query).body)


def _path(model: str) -> str:
    name, slash, version = model.partition("/")
    return f"/models/{quote(name, safe='')}" + (f"/{quote(version, safe='')}" if slash else "")


def _print(answer: Any, json_output: bool) -> None:
    show(answer, json_output, lambda said: out.print(escape(said["status"]), soft_wrap=True))


def all_versions(at: "Endpoint") -> list[dict[str, Any]]:
    """Return the description of every version of every model."""
    names: list[str] = []
    page: str | None = "0"
    while page is not None:
        answer = ask(at, "GET", "/models", {"next_page_token": page})
        names += [model["modelName"] for model in answer["models"]]
        page = answer.get("nextPageToken")
    return [model for name in names for model in ask(at, "GET", f"{_path(name)}/all")]


def print_models(models: list[dict[str, Any]]) -> None:
    """Print a line for each version; one that was given no name answers as the default."""
    if not models:
        out.print("no models are served; `modelyard models register FILE.mar` adds one")
        return
    table = plain_table(
        ("model", "left"), ("version", "left"), ("workers", "right"), ("waiting", "right"),
        ("restarts", "right"), ("memory", "right"), ("file", "left"),
    )  # fmt: skip
    for model in models:
        workers, queue = model["workers"], model["jobQueueStatus"]
        ready = sum(worker["status"] == "READY" for worker in workers)
        waiting, count = queue["pendingRequests"], f"{ready}/{len(workers)}"
        if not workers and model["minWorkers"]:
            count = "unloaded" if model["reason"].startswith("unloaded") else model["state"].lower()
        table.add_row(
            escape(model["modelName"]),
            escape(model["modelVersion"]) + ("*" if model["isDefault"] else ""),
            count,
            f"{waiting}/{queue['remainingCapacity'] + waiting}",
            str(sum(worker["restarts"] for worker in workers)),
            format_bytes(sum(worker["memoryUsage"] for worker in workers)),
            escape(model["modelUrl"]),
        )
    out.print(table)
    if len(models) > len({model["modelName"] for model in models}):
        out.print("* answers where no version is named")


@asks(models_app, name="list")
def list_models(at: "Endpoint", json_output: bool) -> None:
    """Show every version of every model; workers are ready/all, waiting is of the queue's room.

    Example: modelyard models list
    """
    show(all_versions(at), json_output, print_models)


@asks(models_app)
def describe(at: "Endpoint", json_output: bool, model: ModelArgument) -> None:
    """Show how a model is run, and each of its workers: the default version, or the one named.

    Example: modelyard models describe digits
    """
    show(ask(at, "GET", _path(model)), json_output, _print_versions)


def _print_versions(found: list[dict[str, Any]]) -> None:
    for each in found:
        grid = plain_table(("", "left"), ("", "left"), show_header=False)
        workers = [*each.pop("workers"), *each.pop("explainWorkers", ())]
        cache = {f"cache {name}": value for name, value in each.pop("cacheStatus", {}).items()}
        for name, value in (each | each.pop("jobQueueStatus", {}) | cache).items():
            if not isinstance(value, dict):
                grid.add_row(name, escape(str(value)))
        out.print(grid)
        table = plain_table(
            ("worker", "left"), ("pid", "right"), ("status", "left"), ("restarts", "right"),
            ("memory", "right"),
        )  # fmt: skip
        for worker in workers:
            table.add_row(
                worker["id"], str(worker["pid"]), worker["status"].lower(),
                str(worker["restarts"]), format_bytes(worker["memoryUsage"]),
            )  # fmt: skip
        out.print()
        out.print(table)


@asks(models_app)
def register(
    at: "Endpoint",
    json_output: bool,
    archive: Annotated[
        str, typer.Argument(metavar="FILE", help="File name of an archive in the model store.")
    ],
    name: Annotated[str | None, typer.Option(help="Default: the archive's own.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Default: as at a start.")] = None,
) -> None:
    """Serve an archive of the model store; returns when its workers are ready.

    Example: modelyard models register digits.mar --workers 2
    """
    query = {"url": archive, "model_name": name, "initial_workers": workers}
    _print(ask(at, "POST", "/models", query), json_output)


@asks(models_app)
def scale(
    at: "Endpoint",
    json_output: bool,
    model: ModelArgument,
    workers: Annotated[int, typer.Argument(metavar="N", min=0, help="How many it should have.")],
) -> None:
    """Give a model this many workers; returns when they are ready.

    Example: modelyard models scale digits 2
    """
    _print(ask(at, "PUT", _path(model), {"min_worker": workers}), json_output)


@asks(models_app)
def default(at: "Endpoint", json_output: bool, model: VersionArgument) -> None:
    """Send the requests that name no version to this one.

    Example: modelyard models default digits/1.0
    """
    if not model.partition("/")[2]:
        raise StartError(f'"{model}" names no version; expected NAME/VERSION')
    _print(ask(at, "PUT", f"{_path(model)}/set-default"), json_output)


@asks(models_app)
def unregister(at: "Endpoint", json_output: bool, model: ModelArgument) -> None:
    """Stop serving a model, after what it has accepted is answered; its archive stays.

    Example: modelyard models unregister digits/1.0
    """
    _print(ask(at, "DELETE", _path(model)), json_output)
