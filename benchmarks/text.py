"""Texts of mixed length: one at a time, in batches as they arrive, in batches of like length.

    python -m benchmarks.text [--rounds 3] [--seconds 4] [-c 64] [--format onnx] [--mix queries]

A MiniLM-size encoder (6 layers of width 384, random weights) is exported, and archived once per
setting. All servers stand side by side, one worker of one thread each, and are loaded in turns.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks import procfs, wrk
from benchmarks.archives import ROOT, Subject, modelyard
from benchmarks.results import BUSY_NEIGHBOUR, SERVED, Cell, Results, Row, Sample, spread, summarise
from benchmarks.rounds import run_served
from benchmarks.server import Server
from benchmarks.table import show_spread
from examples.minilm.make import PAGES, make

LOCAL_RESULTS = ROOT / "benchmarks" / "results" / "local"
LIBRARIES = ("torch", "onnxruntime", "transformers", "tokenizers", "uvicorn", "uvloop")
TEXTS, SEED = 512, 7
MOST_WORDS, MOST_TOKENS = 180, 256
BATCH = 8
# Requests that the end of one run leaves behind must not make the next one's queue full.
SETTINGS = {
    "alone": "batchSize: 1\nbatchBy: arrival\njobQueueSize: 1000\n",
    "arrival": f"batchSize: {BATCH}\nbatchBy: arrival\njobQueueSize: 1000\n",
    "length": f"batchSize: {BATCH}\nbatchBy: length\njobQueueSize: 1000\n",
}
SHOWN = {"alone": "one at a time", "arrival": "as they arrive", "length": "of like length"}


@dataclass(frozen=True)
class Mix:
    """Texts whose numbers of words are log-normal."""

    median_words: int
    sigma: float


MIXES = {"queries": Mix(6, 0.6), "sentences": Mix(12, 0.8), "passages": Mix(40, 0.7)}
"""What people search for; sentences, short and long; paragraphs."""


@dataclass(frozen=True)
class Plan:
    """What to measure, and for how long."""

    rounds: int
    seconds: int
    """Of each run."""
    connections: list[int]
    formats: list[str]
    mixes: list[str]


out = Console(highlight=False)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def text(
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of every run.")] = 3,
    seconds: Annotated[int, typer.Option(min=1, max=60, help="Length of every run.")] = 4,
    connections: Annotated[
        list[int], typer.Option("-c", "--connections", min=1, max=90, help="Repeatable.")
    ] = [8, 64],  # noqa: B006 - Typer never changes it
    formats: Annotated[
        list[str], typer.Option("--format", help="onnx, pt2 or torchscript; repeatable.")
    ] = ["onnx", "pt2"],  # noqa: B006
    mixes: Annotated[
        list[str], typer.Option("--mix", help="queries, sentences or passages; repeatable.")
    ] = ["queries", "sentences", "passages"],  # noqa: B006
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for the .json and .txt.")
    ] = LOCAL_RESULTS,
    name: Annotated[str | None, typer.Option(help="Of the files; default: date and time.")] = None,
) -> None:
    """Measure what batches of like length gain over requests one at a time.

    Example: python -m benchmarks.text --rounds 5 --format onnx
    """
    if shutil.which("wrk") is None:
        raise typer.BadParameter("wrk is missing; install it with: apt-get install wrk")
    if unknown := set(mixes) - set(MIXES):
        raise typer.BadParameter(f"{unknown.pop()}: expected one of {', '.join(MIXES)}")
    # An end by SIGTERM must stop the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    plan = Plan(rounds, seconds, connections, formats, mixes)
    with tempfile.TemporaryDirectory(prefix="modelyard-text-") as folder:
        results = _measure(Path(folder), plan)
    output.mkdir(parents=True, exist_ok=True)
    stem = output / (name or time.strftime("%Y-%m-%dT%H%M%S-text"))
    results.write(stem.with_name(f"{stem.name}.json"))
    with stem.with_name(f"{stem.name}.txt").open("w") as file:
        for console in (out, Console(file=file, width=100)):
            _show(results, plan, console)
    out.print(f"wrote {stem}.json and .txt", soft_wrap=True)
    if failures := sum(sample.failures for sample in results.samples):
        out.print(f"[bold red]{failures} requests failed[/]")
        raise typer.Exit(1)


def _measure(folder: Path, plan: Plan) -> Results:
    out.print("exporting and archiving")
    subjects = _build(folder, plan)
    texts = {mix: _write_texts(folder / mix, MIXES[mix]) for mix in plan.mixes}
    tokenizer = Tokenizer.from_file(str(folder / "minilm" / "tokenizer.json"))
    about = _describe(plan) | {"texts": {mix: _count(tokenizer, texts[mix]) for mix in texts}}
    samples: list[Sample] = []
    batches: dict[str, list[float]] = {}
    with ExitStack() as stack:
        servers = {
            (format, setting): stack.enter_context(Server(subject, 1, folder / subject.name))
            for (format, setting), subject in subjects.items()
        }
        runs = [
            Cell(_subject(mix, format, setting), SERVED, 1, count)
            for mix in plan.mixes
            for format in plan.formats
            for count in plan.connections
            for setting in SETTINGS
        ]
        for round in range(plan.rounds):
            for at, cell in enumerate(runs):
                out.print(f"{round * len(runs) + at + 1}/{plan.rounds * len(runs)} {cell.subject}, "
                          f"c={cell.connections}")  # fmt: skip
                mix, format, setting = cell.subject.split(" ")
                server = servers[format, setting]
                before = _calls(server)
                loaded = replace(subjects[format, setting], requests=texts[mix])
                samples.append(run_served(cell, loaded, server, round, plan.seconds))
                requests, calls = (
                    now - then for now, then in zip(_calls(server), before, strict=True)
                )
                batches.setdefault(_key(cell), []).append(requests / calls)
    return Results(about | {"requests_per_call": batches}, samples, [])


def _build(folder: Path, plan: Plan) -> dict[tuple[str, str], Subject]:
    """Export the encoder, and archive each format with each setting."""
    source = folder / "minilm"
    make(source)
    size = f"int64[batch=1..{BATCH},length=1..{MOST_TOKENS}]"
    inputs = (f"--input={name}:{size}" for name in ("input_ids", "attention_mask"))
    modelyard("export", source, *inputs, *(f"--format={each}" for each in plan.formats),
              "-o", folder / "artifacts")  # fmt: skip
    subjects = {}
    for format in plan.formats:
        artifact = next(
            (folder / "artifacts").glob(
                "minilm.pt" if format == "torchscript" else f"minilm.{format}"
            )
        )
        alone = folder / format  # else every archive would hold the pt2 artifact as a twin
        alone.mkdir()
        for file in (artifact, artifact.with_name(f"{artifact.name}.report.json")):
            shutil.copy(file, alone)
        for setting, config in SETTINGS.items():
            name = f"{format}-{setting}"
            (alone / "model-config.yaml").write_text(config)
            modelyard("archive", name, "--artifact", alone / artifact.name, "--handler",
                      "text_encoder", "--version", "1.0", "--extra-files",
                      source / "tokenizer.json", "--config-file", alone / "model-config.yaml",
                      "-o", folder / "store" / name)  # fmt: skip
            archive = folder / "store" / name / f"{name}.mar"
            subjects[format, setting] = Subject(name, archive, "text/plain", ())
    return subjects


def _write_texts(folder: Path, mix: Mix) -> tuple[Path, ...]:
    """Write texts of consecutive words of our own pages, one per file; the seed decides."""
    chance = random.Random(SEED)
    words = " ".join(page.read_text() for page in sorted(PAGES.glob("*.md"))).split()
    folder.mkdir()
    files = []
    for at in range(TEXTS):
        count = round(chance.lognormvariate(math.log(mix.median_words), mix.sigma))
        begin = chance.randrange(len(words) - MOST_WORDS)
        file = folder / f"{at}.txt"
        file.write_text(" ".join(words[begin : begin + min(max(1, count), MOST_WORDS)]))
        files.append(file)
    return tuple(files)


def _count(tokenizer: Tokenizer, files: tuple[Path, ...]) -> dict[str, float]:
    """Say how long the texts of a mix are."""
    texts = [file.read_text() for file in files]
    tokens = sorted(min(MOST_TOKENS, len(each)) for each in tokenizer.encode_batch(texts))
    return {
        "median_tokens": statistics.median(tokens),
        "mean_tokens": round(statistics.mean(tokens), 1),
        "p90_tokens": tokens[int(0.9 * len(tokens))],
        "most_tokens": tokens[-1],
        "mean_bytes": round(statistics.mean(len(each.encode()) for each in texts), 1),
    }


def _calls(server: Server) -> tuple[float, float]:
    """Return how many requests have been predicted so far, in how many calls of the handler."""
    with urllib.request.urlopen(server.metrics_url) as answer:
        shown = answer.read().decode()
    found = (
        re.search(rf'^modelyard_batch_size_{end}{{.*kind="predict".*}} (\S+)$', shown, re.M)
        for end in ("sum", "count")
    )
    requests, calls = (float(each[1]) if each else 0.0 for each in found)
    return requests, calls


def _describe(plan: Plan) -> dict[str, object]:
    """Say on what, with what and how the figures were measured."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["python -m benchmarks.text", *sys.argv[1:]]),
        "machine": procfs.describe_machine(),
        "versions": {
            "python": platform.python_version(),
            "wrk": wrk.version(),
            **{library: importlib.metadata.version(library) for library in LIBRARIES},
        },
        "settings": {"rounds": plan.rounds, "seconds": plan.seconds, "batch": BATCH},
    }


def _subject(mix: str, format: str, setting: str) -> str:
    return f"{mix} {format} {setting}"


def _key(cell: Cell) -> str:
    return f"{cell.subject} {cell.connections}"


def _show(results: Results, plan: Plan, console: Console) -> None:
    """Print the table: every setting beside one request at a time, in the same round."""
    machine = procfs.describe_machine()
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores · 1 worker of 1 thread · medians of "
        f"{plan.rounds} rounds of {plan.seconds} s · {results.about['date']}", soft_wrap=True,
    )  # fmt: skip
    rows = {(row.cell.subject, row.cell.connections): row for row in summarise(results.samples)}
    for mix, lengths in results.about["texts"].items():
        console.print(
            f"\n[bold]{mix}[/], tokens: median {lengths['median_tokens']:g}, "
            f"mean {lengths['mean_tokens']:g}, most {lengths['most_tokens']:g}"
        )
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
        table.add_column("", no_wrap=True)
        for title in ("req/s", "±", "×", "p50 ms", "p99 ms", "per call", "CPU ms", "×"):
            table.add_column(title, justify="right", no_wrap=True)
        for format in plan.formats:
            for count in plan.connections:
                for setting in SETTINGS:
                    row = rows[_subject(mix, format, setting), count]
                    alone = rows[_subject(mix, format, "alone"), count]
                    label = f"{format}, c={count}, {SHOWN[setting]}"
                    table.add_row(label, *_cells(row, alone, results))
        console.print(table)
    if any(row.other_cores > BUSY_NEIGHBOUR for row in rows.values()):
        console.print("* other work kept more than a quarter of a core busy: trust CPU, not rates")


def _cells(row: Row, alone: Row, results: Results) -> list[str]:
    mark = "*" if row.other_cores > BUSY_NEIGHBOUR else " "
    faster, cheaper = _gains(row.cell, alone.cell, results)
    per_call = statistics.median(results.about["requests_per_call"][_key(row.cell)])
    return [
        f"{row.rate.median:,.0f}{mark}",
        show_spread(row.rate),
        f"{faster:.2f}",
        f"{row.p50_ms.median:.0f}",
        f"{row.p99_ms.median:.0f}",
        f"{per_call:.1f}",
        f"{(row.server_us.median + row.workers_us.median) / 1000:.2f}",
        f"{cheaper:.2f}",
    ]


def _gains(cell: Cell, alone: Cell, results: Results) -> tuple[float, float]:
    """Return how many times as fast, and as cheap in CPU, a cell is as the other: by round."""
    pairs = [
        (own, other)
        for own in results.samples
        for other in results.samples
        if own.cell == cell and other.cell == alone and own.round == other.round
    ]
    faster = spread(own.rate / other.rate for own, other in pairs)
    cheaper = spread(
        (other.server_us + other.workers_us) / (own.server_us + own.workers_us)
        for own, other in pairs
    )
    return faster.median, cheaper.median


if __name__ == "__main__":
    app()
