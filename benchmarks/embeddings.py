"""Texts of mixed length to vectors: ours beside FastAPI and mosec, the same ONNX file in all.

    python -m benchmarks.embeddings --envs FOLDER [--rounds 3] [--seconds 3] [-c 1] [-c 8] [-c 64]
                                    [--texts 1] [--mix sentences] [--model FOLDER]

FOLDER holds the environments `fastapi` (fastapi, uvicorn[standard]) and `mosec`, each with the same
onnxruntime, tokenizers, numpy and orjson. --model is a folder of Hugging Face's with the weights
of all-MiniLM-L6-v2; without it `examples.minilm.make` makes one of that size. One process computes
in each server, with one thread; all stand side by side, and are loaded in turns. Prints medians,
and of pairs of the same round how many times ours answers as many, and how many times the other's
processor time an answer of ours takes; on a machine with other work only the latter means much.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
import numpy as np
import typer

from benchmarks import procfs
from benchmarks.archives import PEERS, Subject, modelyard
from benchmarks.bare import ONE_THREAD
from benchmarks.server import Server
from benchmarks.text import MIXES, MOST_TOKENS, _write_texts
from benchmarks.wrk import Load, run_wrk
from examples.minilm.make import make

BATCH, TOLERANCE, READY_S = 32, 1e-5, 60
OURS, OURS_TEI = "modelyard /v1/embeddings", "modelyard /embed"
PEERS_OF = {
    "FastAPI": ("fastapi", "embed_fastapi.py", {"BENCH_BATCHER": "0"}),
    "FastAPI, batches": ("fastapi", "embed_fastapi.py", {"BENCH_BATCHER": "1"}),
    "mosec": ("mosec", "embed_mosec.py", {}),
}
JSON = "application/json"
SETTLE_S = 0.5


class Place(NamedTuple):
    """A server that runs."""

    url: str
    files: tuple[Path, ...]
    pids: tuple[int, ...]


class Sample(NamedTuple):
    """One run."""

    load: Load
    rate: float
    cpu_ms: float
    """Processor time of all its processes, per answer."""


def main(
    envs: Annotated[Path, typer.Option(help="Folder of the peers' environments.")],
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[int, typer.Option(min=1)] = 3,
    connections: Annotated[list[int], typer.Option("-c", "--connections")] = [1, 8, 64],  # noqa: B006
    texts: Annotated[int, typer.Option(min=1, help="Texts of each request.")] = 1,
    mix: Annotated[str, typer.Option(help="queries, sentences or passages.")] = "sentences",
    model: Annotated[Path | None, typer.Option(help="Folder of Hugging Face's.")] = None,
    artifact: Annotated[Path | None, typer.Option(help="ONNX of that, exported before.")] = None,
) -> None:
    """Measure the rates of requests for vectors.

    Example: python -m benchmarks.embeddings --envs ../envs --rounds 5
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="modelyard-embeddings-") as name:
        folder = Path(name)
        artifact, tokenizer = _export(folder, model, artifact)
        subject = _archive(folder, artifact, tokenizer)
        bodies = {
            field: _bodies(folder / field, field, texts, mix) for field in ("input", "inputs")
        }
        (alike := folder / "peers").mkdir()
        shutil.copy(artifact, alike / "minilm.onnx")
        shutil.copy(tokenizer, alike / "tokenizer.json")
        with contextlib.ExitStack() as stack:
            ours = stack.enter_context(Server(subject, 1, folder / "state"))
            base = ours.url.partition("/predictions")[0]
            pids = (ours.pid, *ours.worker_pids)
            places = {
                OURS: Place(f"{base}/v1/embeddings", bodies["input"], pids),
                OURS_TEI: Place(f"{base}/embed", bodies["inputs"], pids),
            }
            for peer, (env, script, more) in PEERS_OF.items():
                python = envs.absolute() / env / "bin" / "python"
                if not python.exists():
                    typer.echo(f"{peer}: {python} is not there; left out")
                    continue
                url, pid = stack.enter_context(_peer(python, script, alike, more))
                places[peer] = Place(url, bodies["input"], (pid, *procfs.descendants(pid)))
            _check_alike(places)
            _measure(places, rounds, seconds, connections)


def _export(folder: Path, source: Path | None, artifact: Path | None) -> tuple[Path, Path]:
    if source is not None and artifact is not None:
        return artifact, source / "tokenizer.json"
    if source is None:
        make(source := folder / "minilm")
    size = f"int64[batch=1..{BATCH},length=1..{MOST_TOKENS}]"
    inputs = (f"--input={name}:{size}" for name in ("input_ids", "attention_mask"))
    modelyard("export", source, *inputs, "--format=onnx", "-o", folder / "artifacts")
    return next((folder / "artifacts").glob("*.onnx")), source / "tokenizer.json"


def _archive(folder: Path, artifact: Path, tokenizer: Path) -> Subject:
    (config := folder / "model-config.yaml").write_text(
        f"batchSize: {BATCH}\njobQueueSize: 4096\nworkerThreads: 1\n"
    )
    modelyard("archive", "minilm", "--artifact", artifact, "--handler", "text_encoder",
              "--version", "1.0", "--extra-files", tokenizer, "--config-file", config,
              "-o", folder / "store")  # fmt: skip
    return Subject("minilm", folder / "store" / "minilm.mar", JSON, ())


def _bodies(folder: Path, field: str, count: int, mix: str) -> tuple[Path, ...]:
    """Write requests of so many texts each, whose lengths are mixed."""
    folder.mkdir()
    files = [file.read_text() for file in _write_texts(folder / "texts", MIXES[mix])]
    random.Random(1).shuffle(files)
    requests = []
    for at in range(0, len(files) - count + 1, count):
        part = files[at : at + count]
        (file := folder / f"{at}.json").write_text(
            json.dumps({"model": "minilm", field: part[0] if count == 1 else part})
        )
        requests.append(file)
    return tuple(requests)


@contextlib.contextmanager
def _peer(
    python: Path, script: str, model: Path, more: dict[str, str]
) -> Iterator[tuple[str, int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ, **ONE_THREAD, **more, "BENCH_MODEL": str(model), "BENCH_BATCH": str(BATCH),
        "BENCH_PORT": str(port), "PYTHONPATH": str(PEERS),
    }  # fmt: skip
    work = Path(tempfile.mkdtemp(dir=model.parent))
    with (work / "log").open("wb") as log:
        process = subprocess.Popen(
            [python, PEERS / script], cwd=work, env=environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    url, limit = f"http://127.0.0.1:{port}/v1/embeddings", time.monotonic() + READY_S
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.post(url, json={"input": "a"}, timeout=30).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"{script} did not start: {(work / 'log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield url, process.pid
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _check_alike(places: dict[str, Place]) -> None:
    """See that all servers give the same vectors."""
    found = {}
    for name, place in places.items():
        answer = httpx.post(
            place.url, content=place.files[0].read_bytes(), timeout=60
        ).raise_for_status()
        content = answer.json()
        vectors = content if name == OURS_TEI else [each["embedding"] for each in content["data"]]
        found[name] = np.array(vectors, np.float32)
    for name, vectors in found.items():
        difference = float(np.abs(vectors - found[OURS]).max())
        if difference > TOLERANCE:
            raise RuntimeError(f"{name} answers otherwise, by {difference:.2g}")


def _measure(places: dict[str, Place], rounds: int, seconds: int, counts: list[int]) -> None:
    found: dict[tuple[str, int], list[Sample]] = {}
    for round in range(rounds):
        for count in counts:
            names = list(places)
            for name in names[round % len(names) :] + names[: round % len(names)]:
                url, files, pids = places[name]
                run_wrk(url, count, 1, JSON, files)
                before = sum(map(procfs.cpu_s, pids))
                load = run_wrk(url, count, seconds, JSON, files)
                used_s = sum(map(procfs.cpu_s, pids)) - before
                answers = max(1, load.requests - load.failures)
                sample = Sample(load, answers / load.seconds, 1000 * used_s / answers)
                found.setdefault((name, count), []).append(sample)
                time.sleep(SETTLE_S)
    heads = ("req/s", "p50 ms", "p99 ms", "CPU ms", "ours x", "CPU x")
    typer.echo(f"{'':26} {'c':>3} " + " ".join(f"{each:>8}" for each in heads) + " failed")
    for count in counts:
        ours = found[OURS, count]
        for name in places:
            own = found[name, count]
            pairs = list(zip(ours, own, strict=True))
            cells = (
                [each.rate for each in own], [each.load.p50_ms for each in own],
                [each.load.p99_ms for each in own], [each.cpu_ms for each in own],
                [one.rate / other.rate for one, other in pairs],
                [one.cpu_ms / max(1e-6, other.cpu_ms) for one, other in pairs],
            )  # fmt: skip
            shown = " ".join(f"{statistics.median(each):8.2f}" for each in cells)
            failed = sum(each.load.failures for each in own)
            typer.echo(f"{name:26} {count:3} {shown} {failed}")


if __name__ == "__main__":
    typer.run(main)
