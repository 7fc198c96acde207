"""The commands `modelyard predict` and `modelyard explain`, which call a running server."""

import inspect
import json
import mimetypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.markup import escape
from rich.table import Table

from modelyard.base import explain_words as words
from modelyard.base.explain_options import EXPLAIN_OPTIONS
from modelyard.base.terminal import out
from modelyard.serve.cli import asks
from modelyard.serve.errors import StartError

if TYPE_CHECKING:
    from modelyard_client.retries import Answer

    from modelyard.serve.tools.client import Endpoint

predict_app = typer.Typer(add_completion=False)
explain_app = typer.Typer(add_completion=False)

ModelArgument = Annotated[
    str, typer.Argument(metavar="NAME[/VERSION]", help="A model that is served.")
]
FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="The input; - reads standard input.")
]


@asks(predict_app, "inference")
def predict(at: "Endpoint", json_output: bool, model: ModelArgument, file: FileArgument) -> None:
    """Ask the running server for a prediction.

    Example: modelyard predict digits examples/digits/scans/7.png
    """
    answer = _ask(at, "predictions", model, file, {}, {})
    if json_output or not _print_labels(answer):
        _print_answer(answer)


def explain(
    at: "Endpoint",
    json_output: bool,
    model: ModelArgument,
    file: FileArgument,
    picture: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            callback=lambda file: file and _check_suffix(file),
            help="A picture (.png), a page (.html), .json or .npy.",
        ),
    ] = None,
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
        query["format"] = _FORMATS[picture.suffix.lower()]
    answer = _ask(at, "explanations", model, file, query, {"Accept": "application/json"})
    if picture is not None:
        try:
            write_file(picture, answer.body, mode=0o644)
        except OSError as error:
            raise StartError(f"cannot write {picture}: {error.strerror}") from error
        out.print(f"wrote {picture}", soft_wrap=True)
    elif json_output or not _print_explanation(answer):
        _print_answer(answer)


def _explain_parameters() -> Iterator[inspect.Parameter]:
    """Yield the parameters of `explain`, with those of the table in place of `options`."""
    by_name = inspect.Parameter.KEYWORD_ONLY
    for parameter in inspect.signature(explain).parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            yield parameter
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
asks(explain_app, "inference")(explain)


def _ask(
    at: "Endpoint",
    api: str,
    model: str,
    file: Path,
    query: dict[str, Any],
    headers: dict[str, str],
) -> "Answer":
    """Send a file to a server."""
    from modelyard.serve.tools.client import call

    try:
        body = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise StartError(f"cannot read {file}: {error.strerror}") from error
    media_type, _ = mimetypes.guess_type(file.name)
    sent = {"Content-Type": media_type or "application/octet-stream", **headers}
    return call(at, "POST", f"/{api}/{quote(model)}", query=query, body=body, headers=sent)


def _print_answer(answer: "Answer") -> None:
    if answer.content_type == "application/json":
        out.print_json(answer.body.decode())
    else:
        sys.stdout.buffer.write(answer.body)
        sys.stdout.buffer.flush()


def _json_of(answer: "Answer") -> Any:
    return json.loads(answer.body) if answer.content_type == "application/json" else None


def _print_labels(answer: "Answer") -> bool:
    """Print label → probability as bars; return whether the answer is of that form."""
    scores = _json_of(answer)
    if not isinstance(scores, dict) or not scores:
        return False
    if not all(isinstance(value, float) and 0 <= value <= 1 for value in scores.values()):
        return False
    grid = Table.grid(padding=(0, 2))
    for label, value in scores.items():
        grid.add_row(escape(label), f"{value:.4f}", "█" * round(40 * value) or "▏")
    out.print(grid)
    return True


def _print_explanation(answer: "Answer") -> bool:
    """Print what explanations say of themselves; return whether the answer holds any."""
    content = _json_of(answer)
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
        said = [each[name]["summary"] for name in ("check", "change") if name in each]
        for sentence in (*said, *each.get("warnings", ())):
            out.print(escape(sentence), soft_wrap=True)
        if bars := _bars(each):
            _print_bars(bars)
    is_text = "tokens" in explanations[0]
    out.print(f"-o FILE.{'html' if is_text else 'png'} draws it, --json prints the attributions")
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
    "baseline_means": str,
    "baseline_label": str,
    "baseline_probability": "{:.4f}".format,
    "f_input": "{:.6g}".format,
    "f_baseline": "{:.6g}".format,
    "sum_attributions": "{:.6g}".format,
    "convergence_delta": "{:.3g}".format,
    "relative_delta": words.share,
    "error": words.share,
    "n_steps": str,
    "tolerance_met": str,
    "shape": str,
}

_FORMATS = {".png": "png", ".html": "html", ".npy": "npy", ".json": "json"}


def _check_suffix(output: Path) -> Path:
    """Return the file to write, whose name says one of our formats.

    Raises:
        typer.BadParameter: it says none.
    """
    if output.suffix.lower() in _FORMATS:
        return output
    raise typer.BadParameter(
        f"{output}: an explanation is written as {', '.join(_FORMATS)}, and the end of the name "
        f"says which; expected as in -o {output.with_suffix('.png').name}"
    )


MOST_BARS = 20
_SIDE = 24
"""Characters of the longest bar to each side."""


Bar = tuple[str, str, float]
"""Name, the value that was sent, and attribution."""


def _bars(answer: dict[str, Any]) -> list[Bar]:
    """Return the features of a row with their values, or the words of a text; the largest first."""
    values, features = answer.get("values") or {}, answer.get("features") or {}
    bars = [(name, str(values.get(name, "")), share) for name, share in features.items()]
    bars += [(each["word"], "", each["attribution"]) for each in answer.get("words", ())]
    return sorted(bars, key=lambda bar: -abs(bar[2]))


def _print_bars(bars: list[Bar]) -> None:
    """Print bars to both sides: what lowers the output to the left, what raises it to the right."""
    shares = [share for _, _, share in bars]
    most, has_negative = max(map(abs, shares)) or 1.0, min(shares) < 0
    grid = Table.grid(padding=(0, 1))
    for at in range(4 + has_negative):
        grid.add_column(justify="left" if at in (0, 1, 3 + has_negative) else "right", no_wrap=True)
    for name, shown, share in bars[:MOST_BARS]:
        bar = "█" * round(_SIDE * abs(share) / most)
        left = f"[blue]{bar}[/blue]" if share < 0 else ""
        right = f"[red]{bar}[/red]" if share > 0 else ""
        sides = (left, right) if has_negative else (right,)
        grid.add_row(escape(name), escape(shown), words.signed(share), *sides)
    if left_out := shares[MOST_BARS:]:
        grid.add_row(f"{len(left_out)} others", "", words.signed(sum(left_out)))
    out.print(grid)
