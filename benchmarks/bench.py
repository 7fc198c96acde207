"""`scripts/bench`: the served digits model beside the bare loop, in one run on one machine."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import procfs, wrk
from benchmarks.archives import ROOT, build_digits, build_echo
from benchmarks.plot import draw
from benchmarks.results import Results, read_results, summarise
from benchmarks.rounds import Plan, Rounds
from benchmarks.table import tables

LOCAL_RESULTS = ROOT / "benchmarks" / "results" / "local"
LIBRARIES = ("torch", "onnxruntime", "fastapi", "uvicorn", "uvloop", "httptools", "numpy", "pillow")

out = Console(highlight=False)
TEXT_WIDTH = 100
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="One short round, to see that everything runs.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of every run.")] = 3,
    seconds: Annotated[int, typer.Option(min=1, max=60, help="Length of every run.")] = 4,
    connections: Annotated[
        list[int], typer.Option("-c", "--connections", min=1, max=90, help="Repeatable.")
    ] = [1, 8, 64],  # noqa: B006 - Typer never changes it
    workers: Annotated[
        list[int], typer.Option("-w", "--workers", min=1, max=64, help="Repeatable.")
    ] = [1, 2],  # noqa: B006 - Typer never changes it
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for the .json, .txt and .png.")
    ] = LOCAL_RESULTS,
    name: Annotated[str | None, typer.Option(help="Of the files; default: date and time.")] = None,
) -> None:
    """Measure rate, latency, CPU and memory of the digits model: bare, and served.

    Example: scripts/bench --rounds 5
    """
    if shutil.which("wrk") is None:
        raise typer.BadParameter("wrk is missing; install it with: apt-get install wrk")
    plan = Plan(
        1 if quick else rounds, 1 if quick else seconds,
        tuple(sorted(set(connections))), tuple(sorted(set(workers))),
    )  # fmt: skip
    # An end by SIGTERM must stop the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = _measure(plan)
    output.mkdir(parents=True, exist_ok=True)
    _keep(results, output / (name or time.strftime("%Y-%m-%dT%H%M%S")))
    if failures := sum(row.failures for row in summarise(results.samples)):
        out.print(f"[bold red]{failures} requests failed[/]")
        raise typer.Exit(1)


def _measure(plan: Plan) -> Results:
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with (
        tempfile.TemporaryDirectory(prefix="modelyard-bench-") as temporary,
        Progress(*columns, console=out, transient=True) as bar,
    ):
        folder = Path(temporary)
        task = bar.add_task("exporting and archiving")
        subjects = [*build_digits(folder), build_echo(folder)]
        measuring = Rounds(plan, subjects, folder)
        bar.update(task, total=measuring.count)

        def progress(text: str) -> None:
            bar.update(task, description=text, advance=1)
            if not out.is_terminal:
                out.print(f"{bar.tasks[task].completed:.0f}/{measuring.count} {text}")

        return measuring.run(_describe(plan), progress)


def _describe(plan: Plan) -> dict[str, object]:
    """Say on what, with what and how the figures were measured."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["scripts/bench", *sys.argv[1:]]),
        "machine": procfs.describe_machine(),
        "versions": {
            "python": platform.python_version(),
            "wrk": wrk.version(),
            "modelyard": importlib.metadata.version("modelyard"),
            **{library: importlib.metadata.version(library) for library in LIBRARIES},
        },
        "settings": {
            "rounds": plan.rounds,
            "seconds": plan.seconds,
            "connections": plan.connections,
            "workers": plan.workers,
        },
    }


def _keep(results: Results, stem: Path) -> None:
    """Write the figures, print them, draw them."""
    data, text, picture = (stem.with_name(stem.name + end) for end in (".json", ".txt", ".png"))
    results.write(data)
    draw(read_results(data), picture)
    machine, settings = procfs.describe_machine(), results.about["settings"]
    heading = (
        f"{machine['cpu']}, {machine['cores']} cores · wrk -t1 · medians of "
        f"{settings['rounds']} rounds of {settings['seconds']} s · {results.about['date']}"
    )
    with text.open("w") as file:
        for console in (out, Console(file=file, width=TEXT_WIDTH)):
            console.print(heading, soft_wrap=True)
            console.print(tables(results))
    for file_name in (data, text, picture):
        shown = file_name.relative_to(ROOT) if file_name.is_relative_to(ROOT) else file_name
        out.print(f"wrote {shown}", soft_wrap=True)


if __name__ == "__main__":
    app()
