"""The command `modelyard export`."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelyard.base.terminal import format_bytes, out, plain_table, step_bar
from modelyard.base.threads import thread_environment
from modelyard.exporter.errors import ExportError, PartialExportError, UsageError, reason

if TYPE_CHECKING:
    from rich.table import Table

    from modelyard.exporter import ExportReport

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_HELP = """Write artifacts that are proven to agree with a checkpoint.

Each artifact is compared with the checkpoint on many inputs, in a fresh process, and written only
when they agree; `<artifact>.report.json` beside it holds the proof. A format that cannot be written
keeps no other from it.

Example:

    modelyard export digits.pt --model net.py:DigitsNet \\
        --input 'image:float32\\[batch,1,8,8]' --output logits -o build

Exit codes: 0 written; 1 nothing written, and why; 2 wrong usage; 3 some formats written, others
not, and why.
"""
_PARTIAL = 3


@app.command("export", help=_HELP)
def export_command(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="File or folder that a training run left; `modelyard inspect` says what it is.",
        ),
    ],
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Where the artifacts go; made if need be.")
    ] = Path("build"),
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help=r"name:dtype\[dims]; a dim is a number, or a name for any size, or name=lo..hi "
            "with the sizes to prove (1..8 when absent); behind it the values, where not all are "
            "valid: <nodes, =1..length, =0,3,7. Repeat it for each tensor: by the name of "
            "forward()'s argument or by place; batch.image for a key of a dict, pair.0 for a place "
            "in a tuple or list. Not needed where the model says what it takes: Hugging Face and "
            "diffusers folders, timm, Lightning's example_input_array.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="file.py:Class, package.module:Class or package.module:factory. Not needed for a "
            "Hugging Face folder, nor for pickled modules of torch.nn's own layers."
        ),
    ] = None,
    model_args: Annotated[
        str,
        typer.Option(
            help="Keyword arguments of the class, a JSON object; they replace those of the "
            "checkpoint's hyper-parameters, and values of a folder's config.json."
        ),
    ] = "{}",
    task: Annotated[
        str | None,
        typer.Option(
            help="What a Hugging Face folder is for, instead of --model: text-classification, "
            "feature-extraction, image-classification … Its head's weights must be there."
        ),
    ] = None,
    weights_key: Annotated[
        str | None,
        typer.Option(help="Path of the weights in the checkpoint, as in ema.model."),
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Take the averaged weights.")] = False,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Let the checkpoint run its own code; says first what it will import."
        ),
    ] = False,
    generate: Annotated[
        bool,
        typer.Option(
            "--generate",
            help="Write a Hugging Face decoder (GPT-2, Llama …) with its cache, for the handler "
            "generate; --input is needed for other ranges only.",
        ),
    ] = False,
    submodule: Annotated[
        str | None,
        typer.Option(
            help="A part of the model to export alone, such as encoder.layers.0; --input is then "
            "that part's."
        ),
    ] = None,
    output_names: Annotated[
        list[str] | None,
        typer.Option(
            "--output",
            help="An output of the model to keep; the others are left out. Or a new name for each, "
            "in order. May be repeated.",
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="pt2, onnx, torchscript or aoti (native code, needs g++); may be repeated. "
            "Default: pt2 and onnx.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the artifacts, without suffix. Default: the checkpoint's."),
    ] = None,
    device: Annotated[
        str, typer.Option(help=r"cpu or cuda\[:N]: where to trace and check.")
    ] = "cpu",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest difference of one output value, over its row's largest where that is "
            "above 1. Default: 1e-4 for float32 and float64, 1e-2 for float16, 3e-2 for bfloat16."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32, bf16 or fp16 for weights and inputs. Default: the model's own."),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            help="For --format onnx: int8-dynamic (8-bit weights) or int8-static (activations too, "
            "in the ranges that the rows of --sample reach)."
        ),
    ] = None,
    samples: Annotated[
        list[Path] | None,
        typer.Option(
            "--sample",
            help="Real inputs to compare on: .npz, .npy, .pt, .json or a picture; may be repeated.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Compare on few inputs, for a first look; report and archive say so."
        ),
    ] = False,
    sample_only: Annotated[
        bool,
        typer.Option(
            "--sample-only",
            help="Make no inputs up, where none would be valid: trace with the samples and compare "
            "on them alone, their rows in batches of several sizes.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the reports as one JSON array, with the error of each format not written.",
        ),
    ] = False,
) -> None:
    """Parse, call `modelyard.exporter.export` once, print."""
    os.environ |= thread_environment()
    # Here, not above: importing torch takes a second that `modelyard --help` need not wait.
    from modelyard.exporter.request import export

    failures: Mapping[str, ExportError] = {}
    with exit_codes():
        arguments = read_model_args(model_args)
        # What the author's code prints must not end up in the JSON.
        with step_bar() as progress, redirect_stdout(sys.stderr):
            try:
                reports = export(
                    checkpoint,
                    model,
                    inputs or (),
                    output_dir=output_dir,
                    formats=formats,
                    model_args=arguments,
                    task=task,
                    weights_key=weights_key,
                    ema=ema,
                    announce=_announce if trust else None,
                    generate=generate,
                    submodule=submodule,
                    output_names=output_names or (),
                    name=name,
                    device=device,
                    tolerance=tolerance,
                    dtype=dtype,
                    quantize=quantize,
                    samples=samples or (),
                    quick=quick,
                    tell=_tell,
                    sample_only=sample_only,
                    progress=progress,
                )
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


def _notes(reports: "list[ExportReport]") -> list[str]:
    """Gather what the user should know though the artifacts are proven; each once."""
    notes = [line for report in reports for line in report.warnings]
    for report in reports:
        batching = report.signature.batching
        # A fixed batch is what was asked for; rows that mix are not.
        if batching and not batching.batchable and not isinstance(report.signature.batch, int):
            notes.append(f"not batchable, served one request at a time: {batching.reason}")
        plan = report.parity.scope["plan"]
        if plan["extent"] == "quick":
            notes.append(
                f"compared on {report.parity.cases} inputs only; export it again without --quick "
                "before it is served"
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
def exit_codes() -> Iterator[None]:
    """Turn an error that is known into one line, and exit code 2 for wrong usage, else 1."""
    try:
        yield
    except (ExportError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from error


def read_model_args(text: str) -> dict[str, Any]:
    """Read `--model-args`."""
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"--model-args {text} is not valid JSON ({error}); "
            "expected an object such as '{\"classes\": 10}'"
        ) from error
    if not isinstance(arguments, dict):
        raise UsageError(
            f"--model-args {text} is not a JSON object, it is a JSON {type(arguments).__name__}; "
            "expected such as '{\"classes\": 10}'"
        )
    return arguments


def _table(reports: "list[ExportReport]") -> "Table":
    table = plain_table(
        *(("format", "left"), ("file", "left"), ("size", "right")),
        *(("max_abs", "right"), ("batches", "right"), ("verdict", "left")),
    )
    for report in reports:
        how = report.details.get("torchscript")
        table.add_row(
            f"{report.format} ({how})" if how else report.format,
            str(report.artifact),
            format_bytes(report.artifact_bytes),
            f"{report.parity.max_abs:.1e}",
            _span(report.parity.batches),
            "agrees",
        )
    return table


def _span(batches: tuple[int, ...]) -> str:
    return str(batches[0]) if len(batches) == 1 else f"{batches[0]}–{batches[-1]}"
