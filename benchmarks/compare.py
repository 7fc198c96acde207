"""`scripts/compare`: Modelyard beside other servers that do the same work (peers/README.md)."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import procfs, wrk
from benchmarks.archives import DIGITS, ROOT, modelyard
from benchmarks.bare import ONE_THREAD

PEERS = ROOT / "benchmarks" / "peers"
OURS = "modelyard"
PORT = 18300
READY_S = 120
END_S = 20
WARM_UP_S = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
WIDTH = 140
out = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


@dataclass(frozen=True)
class Peer:
    """How a server is started, and what its requests look like."""

    name: str
    command: Callable[[Path, Path], list[str]]
    """(environment's bin folder, work folder) → what to run."""
    path: str
    content_type: str = "application/octet-stream"
    body: Callable[[bytes], bytes] = bytes
    prepare: Callable[[Path, Path, int], None] | None = None
    """(bin folder, work folder, workers): files that the command needs."""


@dataclass(frozen=True)
class Run:
    """One run of wrk against one server."""

    server: str
    connections: int
    round: int
    rate: float
    p50_ms: float
    p99_ms: float
    failures: int
    cpu_us: float
    """CPU of all the server's processes per request."""


@dataclass(frozen=True)
class Start:
    """One start of a server."""

    server: str
    round: int
    ready_s: float
    pss_mb: float
    """All its processes together, after the load."""


def _json(make: Callable[[str], Any]) -> Callable[[bytes], bytes]:
    return lambda body: json.dumps(make(base64.b64encode(body).decode())).encode()


def _prepare_mlserver(bin: Path, work: Path, workers: int) -> None:
    settings = {
        "http_port": PORT, "grpc_port": PORT + 1, "metrics_port": PORT + 2, "host": "127.0.0.1",
        "parallel_workers": 0 if workers == 1 else workers, "debug": False,
    }  # fmt: skip
    model = {
        "name": "tiny", "implementation": "serve_mlserver.Tiny", "max_batch_size": 8,
        "max_batch_time": 0.001,
    }  # fmt: skip
    (work / "settings.json").write_text(json.dumps(settings))
    (work / "model-settings.json").write_text(json.dumps(model))


def _prepare_torchserve(bin: Path, work: Path, workers: int) -> None:
    (work / "config.yaml").write_text(
        f"minWorkers: {workers}\nmaxWorkers: {workers}\nbatchSize: 8\nmaxBatchDelay: 1\n"
    )
    properties = [
        f"inference_address=http://127.0.0.1:{PORT}",
        f"management_address=http://127.0.0.1:{PORT + 1}",
        f"metrics_address=http://127.0.0.1:{PORT + 2}",
        "disable_token_authorization=true",
        "enable_metrics_api=false",
        "disable_system_metrics=true",
        "async_logging=true",
        "job_queue_size=1000",
    ]
    (work / "config.properties").write_text("\n".join(properties) + "\n")
    (work / "store").mkdir(exist_ok=True)
    files = f"{PEERS / 'work.py'},{work / 'tiny.onnx'}"
    subprocess.run(
        [bin / "torch-model-archiver", "--model-name", "tiny", "--version", "1.0", "--handler",
         PEERS / "modelyard_handler.py", "--extra-files", files,
         "--config-file", work / "config.yaml", "--export-path", work / "store", "--force"],
        check=True, capture_output=True,
    )  # fmt: skip


def _prepare_ours(bin: Path, work: Path, workers: int) -> None:
    (work / "config.yaml").write_text("batchSize: 8\n")
    modelyard("archive", "tiny", "--artifact", work / "tiny.onnx", "--handler",
              PEERS / "modelyard_handler.py", "--version", "1.0", "--extra-files",
              PEERS / "work.py", "--config-file", work / "config.yaml", "--force",
              "-o", work / "store")  # fmt: skip


SERVERS = (
    Peer(
        OURS,
        lambda bin, work: [
            str(bin / "modelyard"), "serve", "start", "--foreground", "--model-store",
            str(work / "store"), "--models", "tiny", "--workers", os.environ["BENCH_WORKERS"],
            "--state-dir", str(work / "state"), "--device", "cpu", "--port", str(PORT),
            "--management-port", "0", "--metrics-port", "0",
        ],
        "/predictions/tiny",
        prepare=_prepare_ours,
    ),
    Peer("mosec", lambda bin, work: [str(bin / "python"), "serve_mosec.py"], "/inference"),
    Peer(
        "litserve",
        lambda bin, work: [str(bin / "python"), "serve_litserve.py"],
        "/predict",
        "application/json",
        _json(lambda text: {"image": text}),
    ),
    Peer(
        "bentoml",
        lambda bin, work: [
            str(bin / "bentoml"), "serve", "serve_bentoml:Tiny", "--host", "127.0.0.1",
            "--port", str(PORT),
        ],
        "/predict",
        "application/json",
        _json(lambda text: {"images": [text]}),
    ),
    Peer("ray", lambda bin, work: [str(bin / "python"), "serve_ray.py"], "/"),
    Peer(
        "mlserver",
        lambda bin, work: [str(bin / "mlserver"), "start", str(work)],
        "/v2/models/tiny/infer",
        "application/json",
        _json(
            lambda text: {
                "inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": [text]}]
            }
        ),
        _prepare_mlserver,
    ),
    Peer(
        "torchserve",
        lambda bin, work: [
            str(bin / "torchserve"), "--start", "--foreground", "--ncs", "--model-store",
            str(work / "store"), "--models", "tiny=tiny.mar", "--ts-config",
            str(work / "config.properties"),
        ],
        "/predictions/tiny",
        prepare=_prepare_torchserve,
    ),
)  # fmt: skip


@app.command()
def compare(
    envs: Annotated[Path, typer.Option(help="Folder of the servers' environments.")],
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[int, typer.Option(min=1, max=60, help="Of each run.")] = 5,
    connections: Annotated[list[int], typer.Option("-c", min=1)] = [1, 8, 64],  # noqa: B006
    workers: Annotated[int, typer.Option("-w", min=1)] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Names of servers; repeatable.")] = None,
    output: Annotated[Path | None, typer.Option("-o", help="Stem of .json and .txt to keep.")] = (
        None
    ),
) -> None:
    """Measure rate and latency of every server that is installed, in turns."""
    os.environ["BENCH_WORKERS"] = str(workers)
    runs: list[Run] = []
    starts: list[Start] = []
    chosen = [peer for peer in SERVERS if not only or peer.name in only]
    bins = {peer.name: _bin(peer, envs) for peer in chosen}
    for peer in chosen:
        if bins[peer.name] is None:
            out.print(f"{peer.name}: not installed, see benchmarks/peers/README.md")
    there = [peer for peer in chosen if bins[peer.name] is not None]
    with tempfile.TemporaryDirectory(prefix="modelyard-compare-") as name:
        folder = Path(name)
        onnx, scans = _make_inputs(folder)
        for round in range(rounds):
            for at in range(len(there)):
                peer = there[(at + round) % len(there)]
                bin = bins[peer.name]
                assert bin is not None
                out.print(f"round {round + 1}/{rounds}: {peer.name}")
                work = folder / f"{peer.name}-{round}"
                work.mkdir()
                shutil.copy(onnx, work / "tiny.onnx")
                bodies = _write_bodies(peer, scans, work)
                with _running(peer, bin, work, workers, bodies[0]) as (process, ready_s):
                    for count in sorted(set(connections)):
                        runs.append(_measure(peer, process, bodies, count, round, seconds))
                    pids = _tree(process.pid)
                    pss = sum(procfs.memory(pid).pss_mb for pid in pids)
                    starts.append(Start(peer.name, round, ready_s, pss))
    about = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": procfs.describe_machine(),
        "workers": workers,
        "seconds": seconds,
        "versions": {peer.name: _version(peer, bins[peer.name]) for peer in there},
        "python": platform.python_version(),
        "wrk": wrk.version(),
    }
    table = _table(runs, starts, about)
    out.print(table)
    if output is not None:
        content = {
            **about,
            "runs": [asdict(r) for r in runs],
            "starts": [asdict(s) for s in starts],
        }
        output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
        with output.with_suffix(".txt").open("w") as file:
            Console(file=file, width=WIDTH).print(table)
    if any(run.failures for run in runs):
        raise typer.Exit(1)


def _bin(peer: Peer, envs: Path) -> Path | None:
    bin = Path(sys.executable).parent if peer.name == OURS else envs.absolute() / peer.name / "bin"
    return bin if (bin / "python").exists() else None


def _version(peer: Peer, bin: Path | None) -> str:
    code = f"import importlib.metadata as m; print(m.version({peer.name!r}))"
    done = subprocess.run([f"{bin}/python", "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _make_inputs(folder: Path) -> tuple[Path, list[Path]]:
    """Export the network, and enlarge the digits' scans to 28 x 28."""
    import torch
    from PIL import Image

    sys.path.insert(0, str(PEERS))
    from net import TinyNet

    torch.save(TinyNet().state_dict(), folder / "tiny.pt")
    modelyard("export", folder / "tiny.pt", "--model", f"{PEERS / 'net.py'}:TinyNet", "--input",
              "image:float32[batch,1,28,28]", "--format", "onnx", "-o", folder)  # fmt: skip
    scans = []
    for file in sorted((DIGITS / "scans").glob("*.png")):
        scan = folder / file.name
        Image.open(file).resize((28, 28)).convert("L").save(scan)
        scans.append(scan)
    return folder / "tiny.onnx", scans


def _write_bodies(peer: Peer, scans: Sequence[Path], work: Path) -> list[Path]:
    bodies = []
    for scan in scans:
        file = work / f"{scan.stem}.body"
        file.write_bytes(peer.body(scan.read_bytes()))
        bodies.append(file)
    return bodies


@contextlib.contextmanager
def _running(
    peer: Peer, bin: Path, work: Path, workers: int, body: Path
) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """Start a server, wait until it answers, and end it with everything that it started."""
    if peer.prepare is not None:
        peer.prepare(bin, work, workers)
    environment = {
        **os.environ, **ONE_THREAD, "BENCH_MODEL": str(work / "tiny.onnx"),
        "BENCH_PORT": str(PORT), "PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": str(PEERS),
        "TMPDIR": str(work), "TEMP": str(work), "LOG_LOCATION": str(work / "logs"),
        "RAY_USAGE_STATS_ENABLED": "0", "BENTOML_DO_NOT_TRACK": "true",
    }  # fmt: skip
    began = time.perf_counter()
    with (work / "server.log").open("wb") as log:
        process = subprocess.Popen(
            peer.command(bin, work), cwd=PEERS, env=environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        _wait_ready(peer, process, body, work / "server.log")
        yield process, time.perf_counter() - began
    finally:
        _end(process)


def _wait_ready(peer: Peer, process: subprocess.Popen[bytes], body: Path, log: Path) -> None:
    limit = time.monotonic() + READY_S
    headers = {"Content-Type": peer.content_type}
    while True:
        request = urllib.request.Request(f"{_url(peer)}", body.read_bytes(), headers)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                if answer.status == 200 and answer.read():
                    return
        except (OSError, urllib.error.HTTPError) as error:
            if process.poll() is not None or time.monotonic() > limit:
                tail = log.read_text(errors="replace")[-3000:]
                raise RuntimeError(
                    f"{peer.name} does not answer ({error}); its log: {tail}"
                ) from None
        time.sleep(0.1)


def _url(peer: Peer) -> str:
    return f"http://127.0.0.1:{PORT}{peer.path}"


def _measure(
    peer: Peer,
    process: subprocess.Popen[bytes],
    bodies: Sequence[Path],
    connections: int,
    round: int,
    seconds: int,
) -> Run:
    send = peer.content_type, bodies
    wrk.run_wrk(_url(peer), connections, WARM_UP_S, *send)
    pids = _tree(process.pid)
    before = sum(map(procfs.cpu_s, pids))
    load = wrk.run_wrk(_url(peer), connections, seconds, *send)
    used = sum(map(procfs.cpu_s, pids)) - before
    answered = load.requests - load.failures
    return Run(
        peer.name, connections, round, answered / load.seconds, load.p50_ms, load.p99_ms,
        load.failures, 1e6 * used / max(1, load.requests),
    )  # fmt: skip


def _tree(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(stat[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    pids = _tree(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    for pid in pids:  # what did not follow
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _table(runs: Sequence[Run], starts: Sequence[Start], about: dict[str, Any]) -> Table:
    counts = sorted({run.connections for run in runs})
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
        caption=", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        title=f"{about['machine']['cpu']}, {about['machine']['cores']} cores · "
        f"{about['workers']} worker(s) · medians · {about['date']}",
    )
    table.add_column("server", no_wrap=True)
    for count in counts:
        for column in (f"req/s c={count}", "p50 ms", "p99 ms", "CPU µs"):
            table.add_column(column, justify="right", no_wrap=True)
    table.add_column("ready s", justify="right", no_wrap=True)
    table.add_column("PSS MB", justify="right", no_wrap=True)
    for name in dict.fromkeys(run.server for run in runs):
        cells = [name]
        for count in counts:
            own = [run for run in runs if (run.server, run.connections) == (name, count)]
            failed = sum(run.failures for run in own)
            rate = f"{statistics.median(run.rate for run in own):,.0f}"
            cells += [
                f"{rate} ({failed} failed)" if failed else rate,
                f"{statistics.median(run.p50_ms for run in own):.2f}",
                f"{statistics.median(run.p99_ms for run in own):.2f}",
                f"{statistics.median(run.cpu_us for run in own):.0f}",
            ]
        mine = [start for start in starts if start.server == name]
        cells += [
            f"{statistics.median(start.ready_s for start in mine):.1f}",
            f"{statistics.median(start.pss_mb for start in mine):.0f}",
        ]
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    app()
