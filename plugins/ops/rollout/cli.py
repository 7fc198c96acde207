"""The commands `modelyard rollout …`: a new version beside the one that answers, step by step."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.markup import escape

from modelyard.base.terminal import err, out
from modelyard.plugins.ops.text import print_text
from modelyard.serve.cli import asks
from modelyard.serve.tools.models_cli import ask

if TYPE_CHECKING:
    from modelyard.serve.tools.client import Endpoint

rollout_app = typer.Typer(
    help="Compare a new version with the one that answers, and let it answer step by step.",
    no_args_is_help=True,
    add_completion=False,
)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="The name that is served.")]
POLL_S = 1.0
SAID_EVERY_S = 10.0
SHOWN = 5
"""Differences and events that are printed."""
ENDS = ("default", "returned", "aborted", "failed")
"""States in which nothing more happens by itself."""


def _ask(
    at: "Endpoint", model: str, method: str, verb: str = "", query: dict[str, Any] | None = None
) -> dict[str, Any]:
    path = f"/models/{quote(model, safe='')}/rollout" + (f"/{verb}" if verb else "")
    found: dict[str, Any] = ask(at, method, path, query)
    return found


def _print(found: dict[str, Any], json_output: bool) -> None:
    if json_output:
        out.print_json(json.dumps(found))
    else:
        values = {**found, "shown": SHOWN}
        print_text(Path(__file__).with_name("status.txt"), values)


@asks(rollout_app)
def start(
    at: "Endpoint",
    json_output: bool,
    model: ModelArgument,
    archive: Annotated[
        str, typer.Argument(metavar="FILE", help="File name of an archive in the model store.")
    ],
    shadow: Annotated[
        str | None, typer.Option(help="Share of the requests that is copied to it. Default: 5%.")
    ] = None,
    for_: Annotated[
        str | None,
        typer.Option("--for", help="How long a step lasts, then the next; else none does: 10m."),
    ] = None,
    canary: Annotated[
        str | None, typer.Option(help="Percentages that it answers. Default: 1,10,50.")
    ] = None,
    rule: Annotated[
        str | None, typer.Option(help="What must hold: 'disagreement<=1%, p99<=1.2, least 200'.")
    ] = None,
    expect: Annotated[
        str | None, typer.Option(help="It is meant to differ, in no more than: labels=95%.")
    ] = None,
    keep_inputs: Annotated[
        bool, typer.Option("--keep-inputs", help="Show the requests of the worst differences.")
    ] = False,
    header: Annotated[
        str | None,
        typer.Option(help="Whose value decides who gets the new version. Default: request id."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when it has ended; 0 when it is the default.")
    ] = False,
) -> None:
    """Load a new version beside the one that answers, and begin.

    Returns when its golden requests pass. Nobody gets its answers until it is promoted, or, with
    --for, until it was judged good for so long.

    Example: modelyard rollout start digits digits-2.mar --shadow 5% --for 10m --canary 1,10,50
    """
    if wait and for_ is None:
        raise typer.BadParameter("--wait needs --for: without it no step begins by itself")
    said = {"shadow": shadow, "for": for_, "canary": canary, "rule": rule, "expect": expect}
    query = {**said, "url": archive, "keep_inputs": keep_inputs or None, "header": header}
    found = _ask(at, model, "POST", "", query)
    if wait:
        found = _wait(at, model, found, json_output)
    _print(found, json_output)
    if wait and found["state"] != "default":
        raise typer.Exit(1)


@asks(rollout_app)
def status(at: "Endpoint", json_output: bool, model: ModelArgument) -> None:
    """Show where a roll-out is, what was compared, how it is judged, what differs.

    Example: modelyard rollout status digits
    """
    _print(_ask(at, model, "GET"), json_output)


@asks(rollout_app)
def promote(
    at: "Endpoint",
    json_output: bool,
    model: ModelArgument,
    to: Annotated[
        str | None, typer.Option(help="shadow, a step such as 10%, or default. Default: the next.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Whatever the judgement is, or without one.")
    ] = False,
) -> None:
    """Take the new version one step on, once it is judged good.

    Example: modelyard rollout promote digits
    """
    to = to or _ask(at, model, "GET")["next"]  # so that asking twice is one step
    _print(_ask(at, model, "POST", "promote", {"to": to, "force": force or None}), json_output)


@asks(rollout_app)
def abort(at: "Endpoint", json_output: bool, model: ModelArgument) -> None:
    """End a roll-out and remove the new version; the one before answers everything.

    Example: modelyard rollout abort digits
    """
    _print(_ask(at, model, "POST", "abort"), json_output)


@asks(rollout_app)
def back(at: "Endpoint", json_output: bool, model: ModelArgument) -> None:
    """Have the version before answer everything again, at once; the new one stays loaded.

    Example: modelyard rollout back digits
    """
    _print(_ask(at, model, "POST", "back"), json_output)


def _wait(at: "Endpoint", model: str, found: dict[str, Any], is_quiet: bool) -> dict[str, Any]:
    """Return a roll-out when it has ended, and print what happens until then."""
    seen, said_at = "", 0.0
    while True:
        now = time.monotonic()
        if not is_quiet and (now - said_at >= SAID_EVERY_S or found["label"] != seen):
            seen, said_at = found["label"], now
            err.print(escape(f"{seen}: {_progress(found)}"), soft_wrap=True)
        if found["state"] in ENDS:
            return found
        time.sleep(POLL_S)
        found = _ask(at, model, "GET")


def _progress(found: dict[str, Any]) -> str:
    differs, judged = found["verdicts"].get("differs", 0), found["judgement"]
    text = f"{found['compared']} compared, {differs} differ, {judged['verdict']}"
    return ": ".join((text, *judged["reasons"][:1]))
