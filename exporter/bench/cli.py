"""The command `modelyard bench`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from modelyard.base.terminal import out, step_bar
from modelyard.exporter.cli import exit_codes, option, read_model_args
from modelyard.exporter.errors import UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


_Texts = list[str] | None


@app.command("bench")
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
    from modelyard.exporter.bench.report import write_bench_page
    from modelyard.exporter.bench.table import bench_table
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
