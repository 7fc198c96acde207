"""The commands `modelyard rollout …`: a new version beside the one that answers, step by step."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.markup import escape

from modelyard.base.terminal import err, out, plain_table
from modelyard.serve.cli import (
    CaOption,
    JsonOption,
    StateDirOption,
    TokenOption,
    UrlOption,
    endpoint,
    known_errors,
)
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
    at: Endpoint, model: str, method: str, verb: str = "", query: dict[str, Any] | None = None
) -> dict[str, Any]:
    path = f"/models/{quote(model, safe='')}/rollout" + (f"/{verb}" if verb else "")
    found: dict[str, Any] = ask(at, method, path, query)
    return found


def _print(found: dict[str, Any], json_output: bool) -> None:
    if json_output:
        out.print_json(json.dumps(found))
        return
    print_rollout(found)


@rollout_app.command()
def start(
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
    url: UrlOption = None,
    token: TokenOption = None,
    ca: CaOption = None,
    state_dir: StateDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Load a new version beside the one that answers, and begin.

    Returns when its golden requests pass. Nobody gets its answers until it is promoted, or, with
    --for, until it was judged good for so long.

    Example: modelyard rollout start digits digits-2.mar --shadow 5% --for 10m --canary 1,10,50
    """
    if wait and for_ is None:
        raise typer.BadParameter("--wait needs --for: without it no step begins by itself")
    query = {
        "url": archive,
        "shadow": shadow,
        "for": for_,
        "canary": canary,
        "rule": rule,
        "expect": expect,
        "keep_inputs": keep_inputs or None,
        "header": header,
    }
    with known_errors():
        at = endpoint("management", url, token, ca, state_dir)
        found = _ask(at, model, "POST", "", query)
        if wait:
            found = _wait(at, model, found, json_output)
    _print(found, json_output)
    if wait and found["state"] != "default":
        raise typer.Exit(1)


@rollout_app.command()
def status(
    model: ModelArgument,
    url: UrlOption = None,
    token: TokenOption = None,
    ca: CaOption = None,
    state_dir: StateDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show where a roll-out is, what was compared, how it is judged, what differs.

    Example: modelyard rollout status digits
    """
    with known_errors():
        found = _ask(endpoint("management", url, token, ca, state_dir), model, "GET")
    _print(found, json_output)


@rollout_app.command()
def promote(
    model: ModelArgument,
    to: Annotated[
        str | None, typer.Option(help="shadow, a step such as 10%, or default. Default: the next.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Whatever the judgement is, or without one.")
    ] = False,
    url: UrlOption = None,
    token: TokenOption = None,
    ca: CaOption = None,
    state_dir: StateDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Take the new version one step on, once it is judged good.

    Example: modelyard rollout promote digits
    """
    with known_errors():
        at = endpoint("management", url, token, ca, state_dir)
        to = to or _ask(at, model, "GET")["next"]  # so that asking twice is one step
        found = _ask(at, model, "POST", "promote", {"to": to, "force": force or None})
    _print(found, json_output)


@rollout_app.command()
def abort(
    model: ModelArgument,
    url: UrlOption = None,
    token: TokenOption = None,
    ca: CaOption = None,
    state_dir: StateDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """End a roll-out and remove the new version; the one before answers everything.

    Example: modelyard rollout abort digits
    """
    with known_errors():
        found = _ask(endpoint("management", url, token, ca, state_dir), model, "POST", "abort")
    _print(found, json_output)


@rollout_app.command()
def back(
    model: ModelArgument,
    url: UrlOption = None,
    token: TokenOption = None,
    ca: CaOption = None,
    state_dir: StateDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Have the version before answer everything again, at once; the new one stays loaded.

    Example: modelyard rollout back digits
    """
    with known_errors():
        found = _ask(endpoint("management", url, token, ca, state_dir), model, "POST", "back")
    _print(found, json_output)


def _wait(at: Endpoint, model: str, found: dict[str, Any], is_quiet: bool) -> dict[str, Any]:
    """Return a roll-out when it has ended, and print what happens until then."""
    seen, said_at = "", 0.0
    while True:
        now = time.monotonic()
        if not is_quiet and (now - said_at >= SAID_EVERY_S or _label(found) != seen):
            seen, said_at = _label(found), now
            err.print(escape(f"{seen}: {_progress(found)}"), soft_wrap=True)
        if found["state"] in ENDS:
            return found
        time.sleep(POLL_S)
        found = _ask(at, model, "GET")


def _label(found: dict[str, Any]) -> str:
    state = str(found["state"])
    return f"{state} {_percent(found['canaryShare'])}" if state == "canary" else state


def _progress(found: dict[str, Any]) -> str:
    differs = found["verdicts"].get("differs", 0)
    judged = found["judgement"]
    reasons = "; ".join(judged["reasons"][:1])
    text = f"{found['compared']} compared, {differs} differ, {judged['verdict']}"
    return f"{text}: {reasons}" if reasons else text


def print_rollout(found: dict[str, Any]) -> None:
    """Print a roll-out for people."""
    out.print(f"{escape(found['model'])}: {_label(found)}, since {found['since']}")
    out.print()
    table = plain_table(
        ("", "left"), ("version", "left"), ("file", "left"), ("format", "left"),
        ("answers", "right"), ("requests", "right"), ("failed", "right"), ("p50", "right"),
        ("p99", "right"),
    )  # fmt: skip
    shares = {"live": 1 - found["canaryShare"], "candidate": found["canaryShare"]}
    for side, share in shares.items():
        about, times = found[side], found["latency"][side]
        counted = found.get("answered", {}).get(side, {"requests": 0, "failed": 0})
        table.add_row(
            side, escape(about["version"]), escape(about["file"]), escape(about["format"]),
            _percent(share), str(counted["requests"]), str(counted["failed"]),
            _milliseconds(times["p50"]), _milliseconds(times["p99"]),
        )  # fmt: skip
    out.print(table)
    out.print()
    for line in _findings(found):
        out.print(escape(line), soft_wrap=True)
    events = found["events"][-SHOWN:]
    if events:
        out.print()
        for event in events:
            text = f"{event['at']}  {event['to']}: {event['why']}"
            out.print(escape(text), soft_wrap=True)


def _findings(found: dict[str, Any]) -> Iterator[str]:
    verdicts = ", ".join(
        f"{count} {name.replace('_', ' ')}" for name, count in found["verdicts"].items()
    )
    noise = found["noise"]
    yield (
        f"compared: {found['compared']}" + (f" ({verdicts})" if verdicts else "")
        + f"; the live version with itself: {noise['compared']}, {noise['differs']} differ"
    )  # fmt: skip
    if found["dropped"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in found["dropped"].items())
        yield f"not compared: {reasons}"
    yield f"judgement: {found['judgement']['verdict']}"
    yield from (f"  {reason}" for reason in found["judgement"]["reasons"])
    if found["worst"]:
        yield "worst differences:"
    for each in found["worst"][:SHOWN]:
        yield f"  {each['requestId']}: {each['difference']}"


def _percent(share: float) -> str:
    return f"{share * 100:.4g} %"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.3g} ms"
