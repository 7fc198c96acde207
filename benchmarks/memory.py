"""Memory of the server and of 1 and more workers of ResNet-50, and the time until they are ready.

    python -m benchmarks.memory [--format pt2] [--workers 4] [--artifacts DIR] [-o DIR]

Exports the model (weights are random, from a fixed seed; 102 MB) into every format, archives it,
and serves it with one worker, then with several. Memory is read after every worker has answered:

    server     PSS of the server process
    worker     PSS of the one worker; PSS counts a page that n processes share as 1/n
    further    PSS of all workers and the server, with several: how much each further one adds
    own        of a worker's memory, what lies in no file: no process can share it
    mapped     of a worker's memory, what is mapped from the version's unpacked files
    ready      from calling `serve start` to its return

Artifacts are kept in `--artifacts`, and not made again if they are there. An ONNX or AOTInductor
archive also holds the exported program, for explanations, where that was made before.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import procfs
from benchmarks.archives import ROOT, Subject, modelyard
from benchmarks.server import Server

NETWORKS = ROOT / "tests" / "networks.py"
LOCAL_RESULTS = ROOT / "benchmarks" / "results" / "local"
ARTIFACTS = {
    "pt2": "resnet50.pt2",
    "torchscript": "resnet50.pt",
    "onnx": "resnet50.onnx",
    "aoti": "resnet50.aoti.pt2",
}
CHECKPOINT = "checkpoint"
"""An archive for TorchServe: a state dict, a model file, and TorchServe's BaseHandler."""
REQUESTS_PER_WORKER = 4
MAX_TRIES = 50
HANDLER = """\
import os, time, torch
from {base} import BaseHandler

class Grey(BaseHandler):
    def handle(self, data, context):
        time.sleep(0.05)  # requests that come together reach different workers
        with torch.inference_mode():
            scores = self.model(torch.full((1, 3, 224, 224), 0.5))
        return [f"{{os.getpid()}} {{scores.double().sum().item()!r}}"] * len(data)
"""
MODEL_FILE = "from networks import ResNet50\n\n\nclass Net(ResNet50):\n    pass\n"


@dataclass(frozen=True)
class Taken:
    """What one started server takes; MB are 10^6 bytes."""

    format: str
    workers: int
    ready_s: float
    server_mb: float
    workers_mb: list[float]
    """PSS of each."""
    own_mb: list[float]
    mapped_mb: list[float]
    server_holds_torch: bool
    answers: list[str]
    """Different ones; there should be one."""


def main() -> None:
    """Measure, print a table and keep it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    formats = (*ARTIFACTS, CHECKPOINT)
    parser.add_argument("--format", action="append", choices=formats, help="default: all")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--artifacts", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=LOCAL_RESULTS)
    parser.add_argument("--name", default=time.strftime("%Y-%m-%dT%H%M%S-memory"))
    given = parser.parse_args()
    taken: list[Taken] = []
    with tempfile.TemporaryDirectory(prefix="modelyard-memory-") as name:
        folder = Path(name)
        for format in given.format or formats:
            subject = _archive(format, given.artifacts or folder / "artifacts", folder)
            for workers in (1, given.workers):
                taken.append(_measure(format, subject, workers, folder))
                print(f"measured {format}, {workers} worker(s)", file=sys.stderr)
    table = _table(taken)
    print(table)
    given.output.mkdir(parents=True, exist_ok=True)
    about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
             "machine": procfs.describe_machine()}  # fmt: skip
    content = {**about, "taken": [asdict(each) for each in taken]}
    (given.output / f"{given.name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (given.output / f"{given.name}.txt").write_text(table + "\n")


def _archive(format: str, artifacts: Path, folder: Path) -> Subject:
    """Archive one artifact, in a store of its own; export it first unless it is there."""
    artifacts.mkdir(parents=True, exist_ok=True)
    checkpoint = artifacts / "weights" / "resnet50.pt"
    if not checkpoint.exists():
        save_checkpoint(checkpoint)
    store = folder / format
    store.mkdir()
    handler = store / "handler.py"
    if format == CHECKPOINT:
        handler.write_text(HANDLER.format(base="ts.torch_handler.base_handler"))
        (store / "net.py").write_text(MODEL_FILE)
        _archive_for_torchserve(store, handler, checkpoint)
    else:
        handler.write_text(HANDLER.format(base="handlers"))
        if not (artifacts / ARTIFACTS[format]).exists():
            modelyard("export", checkpoint, "--model", f"{NETWORKS}:ResNet50",
                      "--input", "image:float32[batch,3,224,224]", "--output", "logits",
                      "--format", format, "-o", artifacts)  # fmt: skip
        modelyard("archive", format, "--artifact", artifacts / ARTIFACTS[format],
                  "--handler", f"{handler}:Grey", "--version", "1.0", "--no-dry-run",
                  "-o", store)  # fmt: skip
    return Subject(format, store / f"{format}.mar", "application/json", ())


def save_checkpoint(path: Path) -> None:
    """Save ResNet-50 with random weights, from a fixed seed."""
    import torch

    torch.manual_seed(0)
    path.parent.mkdir(exist_ok=True)
    torch.save(runpy.run_path(str(NETWORKS))["ResNet50"]().state_dict(), path)


def _archive_for_torchserve(store: Path, handler: Path, checkpoint: Path) -> None:
    from modelyard.plugins.torchserve.archiver.archive import (
        ModelArchiverConfig,
        archive_for_torchserve,
    )

    config = ModelArchiverConfig(CHECKPOINT, str(handler), "1.0", str(checkpoint))
    config.export_path = str(store)
    config.model_file, config.extra_files = str(store / "net.py"), str(NETWORKS)
    archive_for_torchserve(config, warn=print)


def _measure(format: str, subject: Subject, workers: int, folder: Path) -> Taken:
    state = folder / f"state-{format}-{workers}"
    with Server(subject, workers, state) as server:
        answers = _ask_all(server, workers)
        os.sync()  # pages that wait to be written count as private to who maps them
        memory = [procfs.memory(pid) for pid in server.worker_pids]
        inside = [procfs.mapped(pid, state / "unpacked") for pid in server.worker_pids]
        return Taken(
            format,
            workers,
            server.start_s,
            server.server_memory().pss_mb,
            [each.pss_mb for each in memory],
            [each.own_mb for each in memory],
            [each.resident_mb for each in inside],
            "libtorch" in Path(f"/proc/{server.pid}/maps").read_text(),
            answers,
        )


def _ask_all(server: Server, workers: int) -> list[str]:
    """Ask until every worker has answered; return the different answers."""
    seen: set[int] = set()
    answers: set[str] = set()

    def ask(_: int) -> str:
        with urllib.request.urlopen(urllib.request.Request(server.url, b"{}"), timeout=60) as reply:
            text: str = reply.read().decode()
        return text

    with ThreadPoolExecutor(workers * REQUESTS_PER_WORKER) as threads:
        for _ in range(MAX_TRIES):
            for text in threads.map(ask, range(workers * REQUESTS_PER_WORKER)):
                pid, answer = text.split()
                seen.add(int(pid))
                answers.add(answer)
            if seen == set(server.worker_pids):
                return sorted(answers)
    raise RuntimeError(f"{len(seen)} of {workers} workers answered; expected all of them")


def _table(taken: Sequence[Taken]) -> str:
    machine = procfs.describe_machine()
    several = max(each.workers for each in taken)
    columns = ("server", "worker", "further", "own", "mapped", "ready 1", f"ready {several}")
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores; MB, and seconds; 1 and {several} workers",
        f"{'':12}" + "".join(f"{column:>9}" for column in columns),
    ]
    for format in dict.fromkeys(each.format for each in taken):
        one, more = (
            next(each for each in taken if each.format == format and each.workers == count)
            for count in (1, several)
        )
        total = more.server_mb + sum(more.workers_mb) - one.server_mb - sum(one.workers_mb)
        figures = (
            more.server_mb,
            one.workers_mb[0],
            total / max(1, more.workers - one.workers),
            sum(more.own_mb) / more.workers,
            sum(more.mapped_mb) / more.workers,
        )
        notes = ""
        if one.server_holds_torch or more.server_holds_torch:
            notes += "  the server process holds torch"
        if len({*one.answers, *more.answers}) > 1:
            notes += "  workers give different answers"
        lines.append(
            f"{format:12}"
            + "".join(f"{figure:9.0f}" for figure in figures)
            + f"{one.ready_s:9.1f}{more.ready_s:9.1f}{notes}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
