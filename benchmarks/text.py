"""Texts of mixed length: one at a time, in batches as they arrive, in batches of like length.

    python -m benchmarks.text [--rounds 3] [--seconds 4] [-c 64] [--format onnx] [--mix queries]

A MiniLM-size encoder (6 layers of width 384, random weights) is exported, and archived once per
setting. All servers stand side by side, one worker of one thread each, and are loaded in turns.
"""

from __future__ import annotations

import importlib.metadata
import json
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks import procfs, wrk
from benchmarks.archives import ROOT, Subject, modelyard
from benchmarks.results import BUSY_NEIGHBOUR
from benchmarks.server import Server
from benchmarks.wrk import run_wrk
from examples.minilm.make import PAGES, make

LOCAL_RESULTS = ROOT / "benchmarks" / "results" / "local"
LIBRARIES = ("torch", "onnxruntime", "transformers", "tokenizers", "uvloop")
TEXTS, SEED = 512, 7
MOST_WORDS, MOST_TOKENS = 180, 256
BATCH = 8
WARM_UP_S, SETTLE_S = 1, 0.2
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
    """Length of each run."""
    connections: list[int]
    formats: list[str]
    mixes: list[str]


@dataclass(frozen=True)
class Cell:
    """What is measured, once in every round."""

    mix: str
    format: str
    setting: str
    connections: int


@dataclass(frozen=True)
class Run:
    """One run of one cell."""

    cell: Cell
    round: int
    requests: int
    failures: int
    rate: float
    """Well answered requests per second."""
    p50_ms: float
    p99_ms: float
    cpu_ms: float
    """Processor time of server and worker, per request."""
    per_call: float
    """Requests in one call of the handler."""
    other_cores: float
    """Cores that were busy with what does not belong to the benchmark."""


@dataclass(frozen=True)
class Results:
    """Everything that was found."""

    about: dict[str, Any]
    runs: list[Run]


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
    name: Annotated[
        str | None, typer.Option(help="Name of the files; default: date and time.")
    ] = None,
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
    content = {**results.about, "runs": [asdict(run) for run in results.runs]}
    stem.with_name(f"{stem.name}.json").write_text(json.dumps(content, indent=1) + "\n")
    with stem.with_name(f"{stem.name}.txt").open("w") as file:
        for console in (out, Console(file=file, width=100)):
            _show(results, plan, console)
    out.print(f"wrote {stem}.json and .txt", soft_wrap=True)
    if failures := sum(run.failures for run in results.runs):
        out.print(f"[bold red]{failures} requests failed[/]")
        raise typer.Exit(1)


def _measure(folder: Path, plan: Plan) -> Results:
    out.print("exporting and archiving")
    texts = {mix: _write_texts(folder / mix, MIXES[mix]) for mix in plan.mixes}
    subjects = _build(folder, plan, next(iter(texts.values())))
    tokenizer = Tokenizer.from_file(str(folder / "minilm" / "tokenizer.json"))
    about = _describe(plan) | {"texts": {mix: _count(tokenizer, texts[mix]) for mix in texts}}
    cells = [
        Cell(mix, format, setting, count)
        for mix in plan.mixes
        for format in plan.formats
        for count in plan.connections
        for setting in SETTINGS
    ]
    runs: list[Run] = []
    with ExitStack() as stack:
        servers = {
            key: stack.enter_context(Server(subject, 1, folder / f"state-{subject.name}"))
            for key, subject in subjects.items()
        }
        for round in range(plan.rounds):
            for cell in cells:
                out.print(f"{len(runs) + 1}/{plan.rounds * len(cells)} {cell.mix}, "
                          f"{_label(cell)}")  # fmt: skip
                server = servers[cell.format, cell.setting]
                state = folder / f"state-{cell.format}-{cell.setting}"
                runs.append(_run(cell, round, plan.seconds, server, state, texts[cell.mix]))
    return Results(about, runs)


def _run(
    cell: Cell, round: int, seconds: int, server: Server, state: Path, files: tuple[Path, ...]
) -> Run:
    """Load a server that runs, after a second to warm up."""
    run_wrk(server.url, cell.connections, WARM_UP_S, "text/plain", files)
    calls, requests = _calls(state)
    before, busy, began = server.usage(), procfs.busy_s(), time.perf_counter()
    load = run_wrk(server.url, cell.connections, seconds, "text/plain", files)
    elapsed, after = time.perf_counter() - began, server.usage()
    cpu_s = after.server_s + after.workers_s - before.server_s - before.workers_s
    others = (procfs.busy_s() - busy - cpu_s - load.cpu_s) / elapsed
    more_calls, more_requests = _calls(state)
    _settle(server)
    return Run(
        cell, round, load.requests, load.failures, (load.requests - load.failures) / load.seconds,
        load.p50_ms, load.p99_ms, 1000 * cpu_s / max(1, load.requests),
        (more_requests - requests) / max(1, more_calls - calls), max(0.0, others),
    )  # fmt: skip


def _settle(server: Server) -> None:
    """Wait until a server has done what the load left behind: the next one needs the core."""
    used = -1.0
    while used != (used := sum(asdict(server.usage()).values())):
        time.sleep(SETTLE_S)


def _build(folder: Path, plan: Plan, requests: tuple[Path, ...]) -> dict[tuple[str, str], Subject]:
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
            subjects[format, setting] = Subject(name, archive, "text/plain", requests)
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
    """Return how long the texts of a mix are."""
    texts = [file.read_text() for file in files]
    tokens = sorted(min(MOST_TOKENS, len(each)) for each in tokenizer.encode_batch(texts))
    return {
        "median_tokens": statistics.median(tokens),
        "mean_tokens": round(statistics.mean(tokens), 1),
        "p90_tokens": tokens[int(0.9 * len(tokens))],
        "most_tokens": tokens[-1],
        "mean_bytes": round(statistics.mean(len(each.encode()) for each in texts), 1),
    }


def _calls(state: Path) -> tuple[float, float]:
    """Return how many calls the handler has had so far, and how many requests were in them."""
    address = json.loads((state / "server.json").read_text())["metrics"]
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        shown = answer.read().decode()
    found = (
        re.search(rf'^modelyard_batch_size_{end}{{.*kind="predict".*}} (\S+)$', shown, re.M)
        for end in ("count", "sum")
    )
    calls, requests = (float(each[1]) if each else 0.0 for each in found)
    return calls, requests


def _describe(plan: Plan) -> dict[str, object]:
    """Return on what, with what and how the figures were measured."""
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


def _label(cell: Cell) -> str:
    return f"{cell.format}, c={cell.connections}, {SHOWN[cell.setting]}"


def _show(results: Results, plan: Plan, console: Console) -> None:
    """Print the tables: every setting beside one request at a time, in the same round."""
    machine = procfs.describe_machine()
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores · 1 worker of 1 thread · medians of "
        f"{plan.rounds} rounds of {plan.seconds} s · {results.about['date']}", soft_wrap=True,
    )  # fmt: skip
    for mix, lengths in results.about["texts"].items():
        console.print(
            f"\n[bold]{mix}[/], tokens: median {lengths['median_tokens']:g}, "
            f"mean {lengths['mean_tokens']:g}, most {lengths['most_tokens']:g}"
        )
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
        table.add_column("", no_wrap=True)
        for title in ("req/s", "±", "×", "p50 ms", "p99 ms", "per call", "CPU ms", "×"):
            table.add_column(title, justify="right", no_wrap=True)
        for cell in dict.fromkeys(run.cell for run in results.runs if run.cell.mix == mix):
            table.add_row(_label(cell), *_cells(cell, results.runs))
        console.print(table)
    if any(run.other_cores > BUSY_NEIGHBOUR for run in results.runs):
        console.print("* other work kept more than a quarter of a core busy: trust CPU, not rates")


def _cells(cell: Cell, runs: list[Run]) -> list[str]:
    own = [run for run in runs if run.cell == cell]
    alone = [run for run in runs if run.cell == replace(cell, setting="alone")]
    rates = [run.rate for run in own]
    mark = "*" if statistics.median(run.other_cores for run in own) > BUSY_NEIGHBOUR else " "
    pairs = list(zip(own, alone, strict=True))
    return [
        f"{statistics.median(rates):,.0f}{mark}",
        f"{50 * (max(rates) - min(rates)) / statistics.median(rates):.0f}%",
        f"{statistics.median(run.rate / other.rate for run, other in pairs):.2f}",
        f"{statistics.median(run.p50_ms for run in own):.0f}",
        f"{statistics.median(run.p99_ms for run in own):.0f}",
        f"{statistics.median(run.per_call for run in own):.1f}",
        f"{statistics.median(run.cpu_ms for run in own):.2f}",
        f"{statistics.median(other.cpu_ms / run.cpu_ms for run, other in pairs):.2f}",
    ]


if __name__ == "__main__":
    app()
