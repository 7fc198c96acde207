"""The command `modelyard export`."""

import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelyard.base.terminal import described_arguments, format_bytes, out, plain_table, step_bar
from modelyard.base.threads import thread_environment
from modelyard.exporter.errors import ExportError, PartialExportError, UsageError, reason
from modelyard.exporter.request import FLAGS, export

if TYPE_CHECKING:
    from rich.table import Table

    from modelyard.exporter import ExportReport

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_PARTIAL = 3
_GARBAGE_AFTER = 10_000
"""New objects after which the youngest are looked through: 700 in Python before 3.14."""


_SAID = described_arguments(export)


def option(text: str, *names: str, **limits: Any) -> Any:
    """Return an option with its help."""
    return typer.Option(*names, help=text, **limits)


def _option(field: str, *names: str, metavar: str | None = None, more: str = "") -> Any:
    """Return an option with the words of `export`, in which a bracket is not markup."""
    said = _SAID.get(field, "").replace("[", r"\[")
    return option(f"{said}{more}", *(names or (FLAGS[field],)), metavar=metavar)


_Texts = list[str] | None
_Text = str | None
_AGAIN = " May be repeated."
_TRUST = "Let the checkpoint run its own code; says first what it will import."
_JSON = "Print the reports as one JSON array, with the error of each format not written."


@app.command("export")
def export_command(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help=_SAID.get("checkpoint"))],
    output_dir: Annotated[Path, _option("output_dir", "--output-dir", "-o")] = Path("build"),
    inputs: Annotated[_Texts, _option("inputs", more=_AGAIN)] = None,
    model: Annotated[_Text, _option("model")] = None,
    model_args: Annotated[str, _option("model_args", more=" A JSON object.")] = "{}",
    task: Annotated[_Text, _option("task")] = None,
    weights_key: Annotated[_Text, _option("weights_key")] = None,
    ema: Annotated[bool, _option("ema")] = False,
    trust: Annotated[bool, option(_TRUST, "--trust")] = False,
    generate: Annotated[bool, _option("generate")] = False,
    submodule: Annotated[_Text, _option("submodule")] = None,
    output_names: Annotated[_Texts, _option("output_names", more=_AGAIN)] = None,
    formats: Annotated[_Texts, _option("formats", more=_AGAIN)] = None,
    name: Annotated[_Text, _option("name")] = None,
    device: Annotated[str, _option("device")] = "cpu",
    tf32: Annotated[bool, _option("tf32")] = False,
    tolerance: Annotated[float | None, _option("tolerance")] = None,
    dtype: Annotated[_Text, _option("dtype")] = None,
    quantize: Annotated[_Text, _option("quantize")] = None,
    max_loss: Annotated[float | None, _option("max_loss")] = None,
    exact_labels: Annotated[bool, _option("exact_labels")] = False,
    samples: Annotated[list[Path] | None, _option("samples", more=_AGAIN)] = None,
    quick: Annotated[bool, _option("quick")] = False,
    sample_only: Annotated[bool, _option("sample_only")] = False,
    as_json: Annotated[bool, option(_JSON, "--json")] = False,
) -> None:
    r"""Write artifacts that are proven to agree with a checkpoint.

    Each artifact is compared with the checkpoint on many inputs, in a fresh process, and written
    only when they agree; `<artifact>.report.json` beside it holds the proof. A format that cannot
    be written keeps no other from it.

    For example:

        modelyard export digits.pt --model net.py:DigitsNet \
            --input 'image:float32\[batch,1,8,8]' --output logits -o build

    Exit codes: 0 written; 1 nothing written, and why; 2 wrong usage; 3 some formats written, others
    not, and why.
    """
    given: dict[str, Any] = {key: value for key, value in locals().items() if value is not None}
    del given["as_json"], given["trust"]
    os.environ |= thread_environment()
    failures: Mapping[str, ExportError] = {}
    with exit_codes():
        given |= {
            "model_args": read_model_args(model_args),
            "announce": _announce if trust else None,
        }
        _prepare()
        # What the author's code prints must not end up in the JSON.
        with step_bar() as progress, redirect_stdout(sys.stderr):
            try:
                reports = export(**given, tell=_tell, progress=progress)
            except PartialExportError as error:
                reports, failures = error.reports, error.failures
    for line in _notes(reports):
        typer.echo(f"warning: {line}", err=True)
    if as_json:
        missing = [{"format": format, "error": str(why)} for format, why in failures.items()]
        typer.echo(json.dumps([*(report.to_json() for report in reports), *missing], indent=2))
    else:
        out.print(_table(reports))
    for format, why in failures.items():
        typer.echo(f"error: {format} is not written: {reason(format, why)}", err=True)
    if failures:
        raise typer.Exit(_PARTIAL)


def _prepare() -> None:
    """Import the exporter, and fork the process that checks before anything of an author is here.

    Nothing of what is imported is garbage; looking for some takes a fifth of a small export. In a
    process that others have used, both are left alone: a fork takes no threads along.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    from modelyard.exporter import trip  # noqa: F401 - imported for what follows
    from modelyard.exporter.child import fork_ahead
    from modelyard.exporter.prove import checker

    gc.freeze()
    gc.set_threshold(_GARBAGE_AFTER)
    gc.enable()
    fork_ahead(checker.__name__, checker.check_artifacts)


def _notes(reports: "list[ExportReport]") -> list[str]:
    """Gather what the user should know though the artifacts are proven; each once."""
    notes = [line for report in reports for line in report.warnings]
    for report in reports:
        batching, plan = report.signature.batching, report.parity.scope["plan"]
        # A fixed batch is what was asked for; rows that mix are not.
        if batching and not batching.batchable and not isinstance(report.signature.batch, int):
            notes.append(f"not batchable, served one request at a time: {batching.reason}")
        if plan["extent"] == "quick":
            notes.append(
                f"compared on {report.parity.cases} inputs only; export it again without --quick "
                "before it is served"
            )
        if limits := report.parity.unusual.limits:
            where = ", or ".join(f'"{name}" holds {each}' for name, each in limits.items())
            notes.append(
                f"{report.format}: its answers are not the checkpoint's where {where}; the server "
                "refuses such a request (400)"
            )
        if ill := report.parity.ill_conditioned:
            worst = max(ill, key=lambda case: case.moved)
            cases = len({case.case for case in ill})
            notes.append(
                f"{report.format}: the checkpoint is ill-conditioned in {cases} of "
                f'{report.parity.cases} cases: at {worst.case} its own "{worst.output}" moves by '
                f"{worst.moved:.1e} when sums are rounded otherwise; the artifact is "
                f"{worst.found:.1e} apart there"
            )
        if left_out := plan.get("left_out"):
            notes.append(
                f"not compared at {len(left_out)} sizes where one case holds over "
                f"{format_bytes(plan['budget_bytes'])}, up to {left_out[-1]}"
            )
        if branches := _branches(report):
            notes.append(
                f"{report.format}: what forward() chose at {', '.join(branches)} for one input is "
                "done for every other"
            )
        if "deprecated" in report.details:
            notes.append(str(report.details["deprecated"]))
        if "native_code" in report.details:
            notes.append(f"{report.artifact.name} is {report.details['native_code']}")
    return list(dict.fromkeys(notes))


def _announce(name: str, imports: Sequence[str]) -> None:
    """Report what a trusted checkpoint will import, before it does."""
    typer.echo(f'trusted: "{name}" will import and may run {", ".join(imports)}', err=True)


def _tell(line: str) -> None:
    typer.echo(line, err=True)


@contextmanager
def exit_codes(where: str = "", *others: type[Exception]) -> Iterator[None]:
    """Turn an error that is known into one line, and exit code 2 for wrong usage, else 1.

    Args:
        where: what the line begins with.
        others: classes of errors that are known, beside those of this package and the system's.
    """
    known: tuple[type[Exception], ...] = (ExportError, OSError, *others)
    try:
        yield
    except known as error:
        typer.echo(f"error: {where}{error}", err=True)
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from error


def read_model_args(text: str) -> dict[str, Any]:
    """Read `--model-args`."""
    expected = "expected an object such as '{\"classes\": 10}'"
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--model-args {text} is not valid JSON ({error}); {expected}") from error
    if isinstance(arguments, dict):
        return arguments
    seen = f"it is a JSON {type(arguments).__name__}"
    raise UsageError(f"--model-args {text} is not a JSON object, {seen}; {expected}")


def _table(reports: "list[ExportReport]") -> "Table":
    table = plain_table(
        *(("format", "left"), ("file", "left"), ("size", "right")),
        *(("max_abs", "right"), ("batches", "right"), ("verdict", "left")),
    )
    for report in reports:
        how, batches = report.details.get("torchscript"), report.parity.batches
        table.add_row(
            f"{report.format} ({how})" if how else report.format,
            str(report.artifact),
            format_bytes(report.artifact_bytes),
            f"{report.parity.max_abs:.1e}",
            "–".join(map(str, dict.fromkeys((batches[0], batches[-1])))),
            _verdict(report),
        )
    return table


def _verdict(report: "ExportReport") -> str:
    lost = f", loses {report.parity.loss:.2%}" if report.parity.losses else ""
    if branches := len(_branches(report)):
        plural = "es" * (branches > 1)
        return f"agrees on what was tried{lost}; traced with {branches} branch{plural}"
    return f"agrees{lost}"


def _branches(report: "ExportReport") -> list[str]:
    """Return the author's lines at which a trace kept one way of several."""
    found: Any = report.details.get("warnings", ())
    return list(dict.fromkeys(":".join(text.split(":")[:2]) for text in found))
