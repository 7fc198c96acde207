"""`scripts/bench`: the server's ceiling, its overhead beside other servers, its share of a model.

All in one run on one machine; benchmarks/README.md says what is measured and how.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import procfs, wrk
from benchmarks.archives import ROOT, build_echo, build_resnet, build_tiny
from benchmarks.peer import ALL, Peer, peer_version
from benchmarks.plot import draw
from benchmarks.results import OURS, Results, read_results, summarise
from benchmarks.rounds import Plan, Rounds
from benchmarks.table import tables

LOCAL_RESULTS = ROOT / "benchmarks" / "results" / "local"
LIBRARIES = ("torch", "onnxruntime", "fastapi", "uvloop", "httptools", "numpy", "pillow")
QUICK = {"rounds": 1, "seconds": 1, "compute_seconds": 3}

TEXT_WIDTH = 100
out = Console(highlight=False, width=None if sys.stdout.isatty() else TEXT_WIDTH)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Artifact(StrEnum):
    """A format of the tiny network."""

    TORCHSCRIPT = "torchscript"
    ONNX = "onnx"


class Section(StrEnum):
    """A part of the benchmark."""

    CEILING = "ceiling"
    OVERHEAD = "overhead"
    COMPUTE = "compute"


@app.command()
def bench(
    only: Annotated[
        list[Section], typer.Option("--only", help="Run these parts; repeatable.")
    ] = list(Section),  # noqa: B006 - Typer never changes it
    peers: Annotated[
        Path | None,
        typer.Option(envvar="MODELYARD_PEERS", help="Folder of the other servers' environments."),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", help="Beside each other, these only; repeatable."),
    ] = None,
    artifact: Annotated[
        Artifact, typer.Option(help="What all servers load in the part `overhead`.")
    ] = Artifact.TORCHSCRIPT,
    quick: Annotated[
        bool, typer.Option("--quick", help="One short round, to see that everything runs.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of every run.")] = 3,
    seconds: Annotated[
        int, typer.Option(min=1, max=60, help="Length of a run of a fast model, in seconds.")
    ] = 5,
    compute_seconds: Annotated[
        int, typer.Option(min=2, max=120, help="Length of a run of the large model, in seconds.")
    ] = 20,
    connections: Annotated[
        list[int], typer.Option("-c", "--connections", min=1, max=90, help="Repeatable.")
    ] = [1, 8, 64],  # noqa: B006 - Typer never changes it
    workers: Annotated[int, typer.Option("-w", "--workers", min=1, max=64)] = 1,
    compute_workers: Annotated[
        int,
        typer.Option(min=1, max=64, help="Workers of the large model, and bare loops beside them."),
    ] = 2,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for the .json, .txt and .png.")
    ] = LOCAL_RESULTS,
    name: Annotated[
        str | None, typer.Option(help="Name of the files; default: date and time.")
    ] = None,
) -> None:
    """Measure rate, latency, CPU and memory of the server, and of others beside it.

    Example: scripts/bench --only overhead --peers DIR --server modelyard --server mosec
    """
    if shutil.which("wrk") is None:
        raise typer.BadParameter("wrk is missing; install it with: apt-get install wrk")
    if unknown := set(server or ()) - {OURS, *(peer.name for peer in ALL)}:
        raise typer.BadParameter(f"no server is called {', '.join(sorted(unknown))}")
    plan = Plan(
        QUICK["rounds"] if quick else rounds,
        QUICK["seconds"] if quick else seconds,
        QUICK["compute_seconds"] if quick else compute_seconds,
        tuple(sorted(set(connections))),
        workers,
        compute_workers,
    )
    # An end by SIGTERM must stop the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    there = _find_peers(peers, server) if {Section.CEILING, Section.OVERHEAD} & set(only) else {}
    ours = not server or OURS in server
    results, problems = _measure(plan, set(only), there, peers, ours, artifact)
    output.mkdir(parents=True, exist_ok=True)
    _keep(results, output / (name or time.strftime("%Y-%m-%dT%H%M%S")))
    if failures := sum(row.failures for row in summarise(results.samples)):
        problems.append(f"{failures} requests failed")
    for problem in problems:
        out.print(problem, style="bold red", markup=False)
    if problems:
        raise typer.Exit(1)


def _find_peers(envs: Path | None, chosen: list[str] | None) -> dict[Peer, str]:
    """Return the peers that are installed, with their versions; say which are not."""
    found = {}
    for first in {peer.name: peer for peer in reversed(ALL)}.values():
        name = first.name
        if chosen and name not in chosen:
            continue
        if envs is None and not first.is_ours:
            out.print(f"{name}: skipped, --peers names no folder of environments")
        elif (version := peer_version(first, envs)) is None:
            out.print(f"{name}: skipped, not in {first.bin(envs).parent}; see benchmarks/peers")
        else:
            found.update({peer: version for peer in ALL if peer.name == name})
    return found


def _measure(
    plan: Plan,
    sections: set[Section],
    peers: dict[Peer, str],
    envs: Path | None,
    ours: bool,
    artifact: Artifact,
) -> tuple[Results, list[str]]:
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with (
        # Short: Ray's sockets lie far below, and their paths may have 107 characters.
        tempfile.TemporaryDirectory(prefix="bench-") as temporary,
        Progress(*columns, console=out, transient=True) as bar,
    ):
        folder = Path(temporary)
        steps = {
            Section.CEILING: plan.steps(len(peers) + ours),
            Section.OVERHEAD: plan.steps(len(peers) + ours),
            Section.COMPUTE: plan.compute_steps,
        }
        task = bar.add_task("", total=sum(steps[section] + 1 for section in sections))

        def progress(text: str) -> None:
            bar.update(task, description=text, advance=1)
            if not out.is_terminal:
                done, total = bar.tasks[task].completed, bar.tasks[task].total
                out.print(f"{done:.0f}/{total:.0f} {text}", soft_wrap=True)

        rounds = Rounds(plan, folder, progress)
        if Section.CEILING in sections:
            progress("archiving a handler that answers at once")
            rounds.measure_beside(build_echo(folder), list(peers), ours, envs)
        if Section.OVERHEAD in sections:
            progress("exporting and archiving a tiny network")
            rounds.measure_beside(build_tiny(folder, artifact), list(peers), ours, envs)
        if Section.COMPUTE in sections:
            progress("exporting and archiving ResNet-50")
            rounds.measure_compute(build_resnet(folder))
        versions = {peer.name: version for peer, version in peers.items() if not peer.is_ours}
        about = _describe(plan, versions, artifact)
        return rounds.results(about), rounds.problems


def _describe(plan: Plan, peers: dict[str, str], artifact: Artifact) -> dict[str, object]:
    """Return on what, with what and how the figures were measured."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["scripts/bench", *sys.argv[1:]]),
        "machine": procfs.describe_machine(),
        "versions": {
            "python": platform.python_version(),
            "wrk": wrk.version(),
            "modelyard": importlib.metadata.version("modelyard"),
            **{library: importlib.metadata.version(library) for library in LIBRARIES},
        },
        "peers": peers,
        "settings": {
            "rounds": plan.rounds,
            "seconds": plan.seconds,
            "compute_seconds": plan.compute_seconds,
            "connections": plan.connections,
            "workers": plan.workers,
            "compute_workers": plan.compute_workers,
            "artifact": artifact.value,
        },
    }


def _keep(results: Results, stem: Path) -> None:
    """Write the figures, print them, draw them."""
    data, text, picture = (stem.with_name(stem.name + end) for end in (".json", ".txt", ".png"))
    results.write(data)
    kept = read_results(data)
    with text.open("w") as file:
        for console in (out, Console(file=file, width=TEXT_WIDTH)):
            console.print(tables(kept))
    draw(kept, picture)
    for file_name in (data, text, picture):
        shown = file_name.relative_to(ROOT) if file_name.is_relative_to(ROOT) else file_name
        out.print(f"wrote {shown}", soft_wrap=True)


if __name__ == "__main__":
    app()
