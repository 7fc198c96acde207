"""The commands `modelyard predict` and `modelyard explain`, which call a running server."""

from __future__ import annotations

import inspect
import mimetypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.markup import escape
from rich.table import Table

from modelyard.archiver.explain_options import EXPLAIN_OPTIONS
from modelyard.archiver.terminal import out
from modelyard.serve.cli import JsonOption, StateDirOption, known_errors, state_folder
from modelyard.serve.errors import StartError

if TYPE_CHECKING:
    from modelyard.serve.tools.client import Answer

predict_app = typer.Typer(add_completion=False)
explain_app = typer.Typer(add_completion=False)

UrlOption = Annotated[
    str | None, typer.Option(help="Base URL of the server; default: the one of the state folder.")
]
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
    with known_errors():
        answer = _ask("predictions", model, file, url, state_dir, {}, {})
    if json_output or not _print_labels(answer):
        _print_answer(answer)


def explain(
    model: ModelArgument,
    file: FileArgument,
    picture: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Heat map (.png), coloured text (.html) or .json."),
    ] = None,
    url: UrlOption = None,
    state_dir: StateDirOption = None,
    json_output: JsonOption = False,
    **options: Any,
) -> None:
    """Ask the running server which input values made the answer, and how sure that is.

    Example: modelyard explain digits examples/digits/scans/7.png -o heatmap.png
    """
    from modelyard.serve.control.state import write_file

    # A flag that is not given leaves the server its default.
    query = {name: None if value is False else value for name, value in options.items()}
    query |= {name: "true" for name, value in options.items() if value is True}
    if picture is not None:
        query["format"] = _PICTURES.get(picture.suffix.lower())
    accept = {"Accept": "application/json"}
    with known_errors():
        answer = _ask("explanations", model, file, url, state_dir, query, accept)
        if picture is not None:
            try:
                write_file(picture, answer.body, mode=0o644)
            except OSError as error:
                raise StartError(f"cannot write {picture}: {error.strerror}") from error
            out.print(f"wrote {picture}", soft_wrap=True)
    if picture is None and (json_output or not _print_explanation(answer)):
        _print_answer(answer)


def _explain_parameters() -> Iterator[inspect.Parameter]:
    """Yield the parameters of `explain`, with those of the table in place of `options`."""
    by_name = inspect.Parameter.KEYWORD_ONLY
    for parameter in inspect.signature(explain, eval_str=True).parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            yield parameter.replace(kind=by_name)
    for name, option in EXPLAIN_OPTIONS.items():
        if name == "format":  # the suffix of -o says it
            continue
        flag = "--output-kind" if name == "output" else f"--{name.replace('_', '-')}"
        default = False if option.type is bool else None
        said = (
            f"{option.text} One of {', '.join(option.choices)}." if option.choices else option.text
        )
        yield inspect.Parameter(
            name,
            by_name,
            annotation=option.type if option.type is bool else option.type | None,
            default=typer.Option(default, flag, help=said),
        )


explain.__signature__ = inspect.Signature(list(_explain_parameters()))  # type: ignore[attr-defined]
explain_app.command()(explain)


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
    from modelyard.serve.control.state import read_key
    from modelyard.serve.tools.client import call

    try:
        body = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise StartError(f"cannot read {file}: {error.strerror}") from error
    media_type, _ = mimetypes.guess_type(file.name)
    key = None
    if url is None:
        state = state_folder(state_dir)
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
    """Print label → probability as bars; return whether the answer is of that form."""
    scores = answer.json() if answer.content_type.startswith("application/json") else None
    if not isinstance(scores, dict) or not scores:
        return False
    if not all(isinstance(value, float) and 0 <= value <= 1 for value in scores.values()):
        return False
    grid = Table.grid(padding=(0, 2))
    for label, value in scores.items():
        grid.add_row(escape(label), f"{value:.4f}", "█" * round(40 * value) or "▏")
    out.print(grid)
    return True


def _print_explanation(answer: Answer) -> bool:
    """Print what explanations say of themselves; return whether the answer holds any."""
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
                grid.add_row(name, escape(show(each[name])))
        quality = each.get("quality", {})
        for name in ("infidelity", "sensitivity"):
            if quality.get(name) is not None:
                grid.add_row(name, f"{quality[name]:.3g}")
        for name in ("deletion", "insertion"):
            if name in quality:
                grid.add_row(name, f"{quality[name]['area']:.4g}, the mean of its curve")
        out.print(grid)
        for sentence in (each.get("check", {}).get("summary"), *each.get("warnings", ())):
            if sentence:
                out.print(escape(sentence))
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
    "output_name": str,
    "target": str,
    "against": str,
    "probability": "{:.4f}".format,
    "method": str,
    "layer": str,
    "output": str,
    "baseline": str,
    "baseline_label": str,
    "baseline_probability": "{:.4f}".format,
    "f_input": "{:.6g}".format,
    "f_baseline": "{:.6g}".format,
    "sum_attributions": "{:.6g}".format,
    "convergence_delta": "{:.3g}".format,
    "relative_delta": "{:.2%}".format,
    "error": "{:.2%}".format,
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
        grid.add_row(escape(name), f"{value:+.4g}", f"[{colour}]{bar}[/{colour}]")
    out.print(grid)
