"""The commands `modelyard export`, `inspect` and `bench`."""

import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from modelyard.base.terminal import described_arguments, format_bytes, out, plain_table, step_bar
from modelyard.base.threads import thread_environment
from modelyard.exporter.errors import ExportError, PartialExportError, UsageError, reason
from modelyard.exporter.request import FLAGS, export

if TYPE_CHECKING:
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
                tell = partial(typer.echo, err=True)
                reports = export(**given, tell=tell, progress=progress)
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


def _table(reports: "list[ExportReport]") -> Table:
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


# -- modelyard inspect -----------------------------------------------------------------------------

inspect_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_PIPE_COLUMNS = 500
_TEXT_SHOWN = 160


@inspect_app.command("inspect")
def inspect_command(
    path: Annotated[
        Path, typer.Argument(metavar="FILE|FOLDER", help="Checkpoint, artifact or archive.")
    ],
    weights_key: Annotated[
        str | None, option("Path of the weights to list, where there are several, as in ema.model.")
    ] = None,
    ema: Annotated[bool, option("List the averaged weights.", "--ema")] = False,
    top: Annotated[int, option("How many tensors to list, the largest; 0 is all.", min=0)] = 20,
    as_json: Annotated[bool, option("Print everything as one JSON object.", "--json")] = False,
    graph: Annotated[
        bool, option("Open its graph in Netron or Model Explorer, until Ctrl-C.", "--graph")
    ] = False,
) -> None:
    """Describe a checkpoint, an artifact or an archive; none of its code runs.

    Checkpoints: files of torch.save, safetensors, and the folders of Lightning, Hugging Face,
    Determined, DeepSpeed, torch.distributed and others. Artifacts: pt2, ONNX, TorchScript.
    Archives: .mar.

    For example:

        modelyard inspect runs/last.ckpt --top 5

    Exit codes: 0 described; 1 it cannot be read, and why; 2 wrong usage.
    """
    # Here, not above: importing torch takes a second that `modelyard --help` need not wait.
    from modelyard.exporter.inspection import describe, show_graph
    from modelyard.handlers.errors import LoadError

    with exit_codes():
        description = describe(path, weights_key, ema=ema)
    if as_json:
        typer.echo(json.dumps(description, indent=2, allow_nan=False))
    else:
        _print(description, top)
    if graph:
        with exit_codes("--graph: ", LoadError):
            show_graph(path, partial(typer.echo, err=True))


def _print(description: Mapping[str, Any], top: int) -> None:
    # Rich takes 80 columns for what is not a terminal and would fold names.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    for part in (_summary(description), *_details(description), *_tensor_tables(description, top)):
        console.print(part)
    for name in description.get("refused", []):
        console.print(f"[red]refused[/red] {escape(name)}: not imported")
    for note in description.get("notes", []):
        console.print(f"[yellow]note[/yellow] {escape(note)}")


def _summary(description: Mapping[str, Any]) -> Table:
    weights, model = description.get("weights") or {}, description.get("model") or {}
    hint = description.get("class")
    signed = "yes; `modelyard verify --public-key` checks it" if model.get("is_signed") else None
    pins = [str(pin).partition(" ")[0] for pin in model.get("requirements", ())]
    others = (weights.get("alternatives") or {}).items()
    rows: Mapping[str, Any] = {
        "file": description["file"],
        description["what"]: description["kind"],
        "writer": _joined(" ", description.get("writer"), description.get("writer_version")),
        "read by": description.get("loader"),
        "model": _joined(" ", model.get("name"), model.get("version")),
        "digest": model.get("digest"),
        "signed": signed,
        "handler": model.get("handler"),
        "artifact": (description.get("serialized") or {}).get("name"),
        "explained by": model.get("explained_by"),
        "golden requests": model.get("golden_requests"),
        "requires": _joined(", ", *pins),
        "class": hint and f"{hint['name']} ({hint['source']})",
        "weights at": weights.get("key"),
        "other weights": _joined(", ", *(f"{key} ({n:,} parameters)" for key, n in others)),
        "averaged weights": weights.get("ema_key"),
        "parameters": f"{weights['parameters']:,}" if weights else None,
        "size": format_bytes(weights.get("size_bytes") or None),
        "dtypes": _joined(", ", *(f"{k} × {n}" for k, n in description.get("dtypes", {}).items())),
        "stripped": _joined(", ", *weights.get("prefixes_stripped", ())),
        "tied": _joined("; ", *(" = ".join(names) for names in weights.get("tied", ()))),
        "not finite": _joined(", ", *weights.get("non_finite", ())),
        "takes": _joined(", ", *description.get("takes", ())),
        "batches": description.get("batching"),
        "operators": description.get("operators"),
        "opset": _joined(", ", *description.get("opset", ())),
    }
    table = plain_table(("", "left"), ("", "left"), show_header=False)
    for name, value in rows.items():
        if value not in (None, "", []):
            style = "bold red" if name == "not finite" else "bold"
            table.add_row(f"[{style}]{name}[/{style}]", _cell(value))
    return table


def _details(description: Mapping[str, Any]) -> Iterable[Table]:
    for key in ("hyper_parameters", "training", "labels", "dims"):
        if description.get(key):
            table = plain_table((key.replace("_", "-"), "left"), ("", "left"))
            for name, value in list(description[key].items())[:40]:
                table.add_row(escape(str(name)), _cell(value))
            yield table
    for key in ("inputs", "outputs"):
        if description.get(key):
            table = plain_table((key, "left"), ("dtype", "left"), ("shape", "left"))
            for value in description[key]:
                table.add_row(escape(str(value["name"])), value["dtype"], _shape(value["shape"]))
            yield table
    if description["what"] == "archive" or len(description.get("files", ())) > 1:
        table = plain_table(("file", "left"), ("bytes", "right"), ("sha256", "left"))
        for file in description["files"]:
            table.add_row(escape(file["name"]), f"{file['size_bytes']:,}", file["sha256"][:12])
        yield table


def _tensor_tables(description: Mapping[str, Any], top: int) -> Iterable[Table]:
    tensors = shown = description.get("tensors") or []
    if not tensors:
        return
    heading = f"tensor ({len(tensors)})"
    if top and len(tensors) > top:
        shown = sorted(tensors, key=lambda tensor: -(tensor["size_bytes"] or 0))[:top]
        heading = f"tensor (the {top} largest of {len(tensors)})"
    table = plain_table((heading, "left"), ("dtype", "left"), ("shape", "left"), ("size", "right"))
    for tensor in shown:
        size, name = format_bytes(tensor["size_bytes"]), escape(tensor["name"])
        table.add_row(name, tensor["dtype"], _shape(tensor["shape"]), size)
    total = sum(tensor["size_bytes"] or 0 for tensor in tensors)
    table.add_row("[bold]total[/bold]", "", "", f"[bold]{format_bytes(total)}[/bold]")
    yield table


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return escape(text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}…")


def _shape(shape: Iterable[Any]) -> str:
    return escape(f"[{', '.join(str(size) for size in shape)}]")


def _joined(between: str, *parts: Any) -> str:
    return between.join(str(part) for part in parts if part)


# -- modelyard bench -------------------------------------------------------------------------------

bench_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@bench_app.command("bench")
def bench_command(
    artifacts: Annotated[
        list[Path] | None, typer.Argument(metavar="ARTIFACT", help="Artifacts of any format.")
    ] = None,
    checkpoint: Annotated[Path | None, option("Measure its model too; needs --model.")] = None,
    model: Annotated[str | None, option("Class of the checkpoint, as for export.")] = None,
    model_args: Annotated[str, option("Keyword arguments of the class, a JSON object.")] = "{}",
    inputs: Annotated[
        _Texts, option("As for export. Default: what the last report says.", "--input")
    ] = None,
    batch: Annotated[str | None, option("Batch sizes, as 1,8; default: 1 and most.")] = None,
    threads: Annotated[str, option("Thread counts, as 1,2.")] = "1",
    size: Annotated[_Texts, option("Size of another dim, as length=128; default: most.")] = None,
    rounds: Annotated[int, option("Turns that each subject takes.", min=1)] = 5,
    seconds: Annotated[float, option("Time per subject, threads and batch.", min=0.0)] = 2.0,
    device: Annotated[str, option(r"cpu or cuda\[:N].")] = "cpu",
    compiled: Annotated[
        bool, option("Measure torch.compile too.", "--compile/--no-compile")
    ] = True,
    as_json: Annotated[bool, option("Print the figures as JSON.", "--json")] = False,
    html: Annotated[Path | None, option("Write a page with tables and plots.")] = None,
    profile: Annotated[Path | None, option("Folder for traces, for Perfetto.")] = None,
) -> None:
    r"""Measure artifacts, and the checkpoint they came from, on this machine.

    Each runs in a fresh process of its own per thread count, all in turns. Figures: latency (p50,
    p99), items per second, peak memory, load time, file size, parameters, operations, and the
    largest difference of an output to the first subject.

    For example:

        modelyard bench build/digits.pt2 build/digits.onnx --checkpoint digits.pt \
            --model net.py:DigitsNet --batch 1,8 --threads 1,2 --html bench.html

    Exit codes: 0 measured; 1 nothing could be measured; 2 wrong usage.
    """
    # Here, not above: importing torch takes a second that `--help` need not wait.
    from modelyard.exporter.arguments import read_inputs
    from modelyard.exporter.bench import measure
    from modelyard.exporter.bench.report import bench_table, write_bench_page
    from modelyard.exporter.trip import read_device

    with exit_codes():
        arguments = read_model_args(model_args)
        read_device(device)
        subjects = measure.choose_subjects(
            artifacts or [], checkpoint, model, arguments, compiled=compiled
        )
        if not inputs and not artifacts:
            raise UsageError("--checkpoint alone does not state its inputs; give --input")
        signature = read_inputs(inputs) if inputs else measure.read_signature(subjects[-1].path)
        plan = measure.Plan(
            subjects=subjects,
            signature=measure.fix_sizes(signature, dict(map(_dim_size, size or []))),
            batches=measure.choose_batches(signature, _numbers("--batch", batch)),
            threads=tuple(dict.fromkeys(_numbers("--threads", threads))),
            rounds=rounds,
            cell_s=seconds,
            device=device,
            profile=profile,
        )
        if profile is not None:
            profile.mkdir(parents=True, exist_ok=True)
        with step_bar() as progress:
            report = measure.bench(plan, progress)
        if html is not None:
            write_bench_page(report, html)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        out.print(bench_table(report))
    if all(cell.error for cell in report.cells):
        raise typer.Exit(1)


def _numbers(option: str, text: str | None) -> list[int]:
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    if not all(part.isdecimal() and 0 < int(part) < 10**6 for part in parts):
        raise UsageError(f'{option} "{text}" is not a list of numbers; expected such as 1,8')
    return [int(part) for part in parts]


def _dim_size(text: str) -> tuple[str, int]:
    name, equals, number = text.partition("=")
    if not name or not equals or not number.isdecimal() or int(number) < 1:
        raise UsageError(f'--size "{text}" is not a size of a dim; expected such as length=128')
    return name, int(number)
