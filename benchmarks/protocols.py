"""One model by several protocols: what a request costs by each.

    python -m benchmarks.protocols [--rounds 3] [--seconds 3] [--peers DIR]

602 KB through an identity model, by binary REST and by raw gRPC, beside the same bytes through
`/predictions`; the digits model by REST and gRPC, beside MLServer's and Ray's gRPC where --peers
names the folder of their environments (peers/README.md). h2load (Debian's nghttp2-client) asks;
servers and rows are loaded in turns. Processor time is the figure to compare on a machine that
others use, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import orjson
import psutil

from benchmarks import procfs
from benchmarks.archives import PEERS, ROOT, build_bare, build_digits, modelyard, modelyard_json
from benchmarks.bare import ONE_THREAD
from modelyard.plugins.grpc.protos import COMPILED, message

LOCAL_RESULTS = ROOT / "benchmarks" / "results" / "local"
SHAPE = (1, 3, 224, 224)
NETWORK = """\
import torch


class Identity(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x.view(x.shape)
"""
ECHO = """\
def handle(data, context):
    return None if data is None else [row["body"] for row in data]
"""
READY_S = 90
INFER = "/inference.GRPCInferenceService/ModelInfer"
OCTETS = "content-type: application/octet-stream"
GRPC = ("content-type: application/grpc", "te: trailers")


@dataclass(frozen=True)
class Row:
    """One way to ask one server."""

    name: str
    server: str
    path: str
    body: Path
    headers: tuple[str, ...]
    connections: int
    least: int
    """Bytes of a right answer's body."""

    @property
    def is_grpc(self) -> bool:
        """Whether it is asked by HTTP/2."""
        return self.headers == GRPC


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    name: str
    url: str
    pid: int
    """Process that answers clients; its descendants are the workers."""
    grpc: str = ""
    """Where gRPC is, if not at `url`."""


@dataclass(frozen=True)
class Measured:
    """One run; microseconds of processor time are for each request."""

    row: str
    rate: float
    server_us: float
    workers_us: float
    client_us: float
    other_cores: float
    """Kept busy by what takes no part in it."""


def main() -> None:
    """Measure, print a table and keep it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=8, help="of the small requests")
    parser.add_argument("--peers", type=Path, help="folder of the other servers' environments")
    parser.add_argument("-o", "--output", type=Path, default=LOCAL_RESULTS)
    parser.add_argument("--name", default=time.strftime("%Y-%m-%dT%H%M%S-protocols"))
    given = parser.parse_args()
    if shutil.which("h2load") is None:
        parser.error("h2load is missing; install it with: apt-get install nghttp2-client")
    with tempfile.TemporaryDirectory(prefix="modelyard-protocols-") as name, \
            contextlib.ExitStack() as stack:  # fmt: skip
        folder = Path(name)
        rows = build(folder, given.connections)
        servers = [stack.enter_context(ours(folder))]
        if given.peers is not None:
            model = folder / "artifacts" / "digits.onnx"
            for start in (mlserver, ray):
                servers.append(stack.enter_context(start(given.peers.absolute(), folder, model)))
                row = next(row for row in rows if row.name == "digits gRPC")
                rows.append(Row(f"digits gRPC, {servers[-1].name}", servers[-1].name, INFER,
                                row.body, GRPC, row.connections, row.least))  # fmt: skip
        by_name = {server.name: server for server in servers}
        taken = [
            measure(row, by_name[row.server], given.seconds)
            for _ in range(given.rounds)
            for row in rows
        ]
    machine = procfs.describe_machine()
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    text = (
        f"{machine['cpu']}, {machine['cores']} cores · medians of {given.rounds} round(s) of "
        f"{given.seconds} s · {date}\n{tabulate(rows, taken)}\n"
    )
    sys.stdout.write(text)
    given.output.mkdir(parents=True, exist_ok=True)
    content = {"date": date, "machine": machine, "taken": [asdict(each) for each in taken]}
    (given.output / f"{given.name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (given.output / f"{given.name}.txt").write_text(text)


def build(folder: Path, connections: int) -> list[Row]:
    """Make the archives, and the bodies of requests."""
    import torch

    (digits,) = build_digits(folder, ("onnx",))
    (folder / "net.py").write_text(NETWORK)
    torch.save({"weight": torch.ones(1)}, folder / "identity.pt")
    modelyard("export", folder / "identity.pt", "--model", f"{folder / 'net.py'}:Identity",
              "--input", f"x:float32[batch=1..8,{','.join(map(str, SHAPE[1:]))}]", "--output", "y",
              "--format", "torchscript", "-o", folder / "made")  # fmt: skip
    modelyard("archive", "identity", "--artifact", folder / "made" / "identity.pt", "--handler",
              "base_handler", "--version", "1.0", "-o", folder / "store")  # fmt: skip
    build_bare(folder, "echo", ECHO, "batchSize: 8\n")
    chance = np.random.default_rng(0)
    large = chance.standard_normal(SHAPE, dtype=np.float32).tobytes()
    small = chance.random((1, 1, 8, 8), dtype=np.float32).tobytes()
    plain, scan = folder / "plain.body", digits.requests[7]
    plain.write_bytes(large)
    rows = [Row("602 KB /predictions", "modelyard", "/predictions/echo", plain, (OCTETS,), 4,
                len(large))]  # fmt: skip
    for model, name, shape, data, count, least in (
        ("identity", "x", list(SHAPE), large, 4, len(large)),
        ("digits-onnx", "image", [1, 1, 8, 8], small, connections, 40),
    ):
        shown = "602 KB" if model == "identity" else "digits"
        head = orjson.dumps({
            "inputs": [{"name": name, "datatype": "FP32", "shape": shape,
                        "parameters": {"binary_data_size": len(data)}}],
            "parameters": {"binary_data_output": True},
        })  # fmt: skip
        rest, called = folder / f"{model}.rest", folder / f"{model}.grpc"
        rest.write_bytes(head + data)
        request = message("inference.ModelInferRequest")(model_name=model)
        request.inputs.add(name=name, datatype="FP32", shape=shape)
        request.raw_input_contents.append(data)
        content = request.SerializeToString()
        called.write_bytes(b"\0" + struct.pack(">I", len(content)) + content)
        length = f"inference-header-content-length: {len(head)}"
        rows += [
            Row(f"{shown} REST", "modelyard", f"/v2/models/{model}/infer", rest, (OCTETS, length),
                count, least),
            Row(f"{shown} gRPC", "modelyard", INFER, called, GRPC, count, least),
        ]  # fmt: skip
    rows.append(Row("digits /predictions", "modelyard", "/predictions/digits-onnx", scan,
                    ("content-type: image/png",), connections, 40))  # fmt: skip
    return rows


@contextlib.contextmanager
def ours(folder: Path) -> Iterator[Server]:
    """Serve the three archives, a worker each."""
    state = folder / "state"
    about = modelyard_json(
        "serve", "start", "--model-store", folder / "store", "--models", "ALL", "--workers", "1",
        "--state-dir", state, "--device", "cpu", "--port", "0", "--management-port", "0",
        "--metrics-port", "0", "--grpc-port", "0",
    )  # fmt: skip
    grpc = about["faces"]["grpc"].replace("grpc://", "http://")
    try:
        yield Server("modelyard", about["inference"], int(about["pid"]), grpc)
    finally:
        modelyard("serve", "stop", "--state-dir", state)


def mlserver(envs: Path, folder: Path, model: Path) -> contextlib.AbstractContextManager[Server]:
    """Serve digits by MLServer."""
    work = folder / "mlserver"
    work.mkdir()
    settings = {"http_port": 18701, "grpc_port": 18700, "metrics_port": 18702, "debug": False,
                "host": "127.0.0.1", "parallel_workers": 0, "metrics_endpoint": None}  # fmt: skip
    (work / "settings.json").write_text(json.dumps(settings))
    (work / "model-settings.json").write_text(
        json.dumps({"name": "digits-onnx", "implementation": "grpc_mlserver.Digits"})
    )
    bin = envs / "mlserver" / "bin"
    return _peer("mlserver", [bin / "mlserver", "start", work], bin, work, model, 18700)


def ray(envs: Path, folder: Path, model: Path) -> contextlib.AbstractContextManager[Server]:
    """Serve digits by Ray Serve."""
    bin, work = envs / "ray" / "bin", folder / "ray"
    work.mkdir()
    return _peer("ray", [bin / "python", PEERS / "grpc_ray.py"], bin, work, model, 18710)


@contextlib.contextmanager
def _peer(
    name: str, command: Sequence[str | Path], bin: Path, work: Path, model: Path, port: int
) -> Iterator[Server]:
    environment = {
        **os.environ, **ONE_THREAD, "PATH": f"{bin}:{os.environ['PATH']}",
        "PYTHONPATH": str(PEERS), "BENCH_MODEL": str(model), "BENCH_PORT": str(port),
        "BENCH_MESSAGES": str(COMPILED), "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    }  # fmt: skip
    with (work / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*map(str, command)], cwd=work, env=environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        _wait(port, process, work / "server.log")
        yield Server(name, f"http://127.0.0.1:{port}", process.pid)
    finally:
        pids = procfs.descendants(process.pid)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for pid in (*pids, process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()


def _wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + READY_S
    body = log.parent.parent / "digits-onnx.grpc"
    row = Row("", "", INFER, body, GRPC, 1, 40)
    while True:
        with contextlib.suppress(RuntimeError):
            ask(row, f"http://127.0.0.1:{port}", "-n", "1")
            return
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"no answer; the log ends: {log.read_text()[-2000:]}")
        time.sleep(1)


def ask(row: Row, url: str, *options: str) -> int:
    """Have h2load ask; return how many requests were answered.

    Raises:
        RuntimeError: there was none, or one that is not right.
    """
    headers = [part for header in row.headers for part in ("-H", header)]
    command = ["h2load", *([] if row.is_grpc else ["--h1"]), "-c", str(row.connections), "-m", "1",
               "-d", str(row.body), *headers, *options, url + row.path]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    counts = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored", done.stdout)
    data = re.search(r"\((\d+)\) data", done.stdout)
    count = int(counts[1]) if counts else 0
    if counts is None or data is None or not count or int(data[1]) < 0.98 * count * row.least:
        raise RuntimeError(f"{row.name}: {done.stdout[-600:]}{done.stderr[-600:]}")
    return count


def measure(row: Row, server: Server, seconds: int) -> Measured:
    """Load a server for so long."""

    def usage() -> tuple[float, ...]:
        workers = sum(_cpu_s(pid) for pid in procfs.descendants(server.pid))
        times = os.times()
        client = times.children_user + times.children_system
        return procfs.cpu_s(server.pid), workers, client, procfs.busy_s(), time.monotonic()

    before = usage()
    count = ask(row, (row.is_grpc and server.grpc) or server.url, "-D", str(seconds))
    of_server, workers, client, busy, took = (
        after - once for after, once in zip(usage(), before, strict=True)
    )
    per = 1e6 / count
    others = (busy - of_server - workers - client) / took
    return Measured(row.name, count / seconds, of_server * per, workers * per, client * per, others)


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        return procfs.cpu_s(pid)
    return 0.0


def tabulate(rows: Sequence[Row], taken: Sequence[Measured]) -> str:
    """Return medians, and how they stand beside the goals."""

    def median(name: str, of: Callable[[Measured], float]) -> float:
        return statistics.median(of(each) for each in taken if each.row == name)

    def cpu(each: Measured) -> float:
        return each.server_us + each.workers_us

    lines = [f"{'':24} {'rate':>8} {'server':>8} {'workers':>8} {'client':>8} {'others':>7}"]
    for row in rows:
        lines.append(
            f"{row.name:24} {median(row.name, lambda m: m.rate):6.0f}/s"
            f" {median(row.name, lambda m: m.server_us):5.0f} us"
            f" {median(row.name, lambda m: m.workers_us):5.0f} us"
            f" {median(row.name, lambda m: m.client_us):5.0f} us"
            f" {median(row.name, lambda m: m.other_cores):7.2f}"
        )
    lines.append("rates beside each other:")
    for one, other, goal in (
        ("602 KB REST", "602 KB /predictions", 0.8), ("602 KB gRPC", "602 KB /predictions", 0.8),
        ("digits gRPC", "digits REST", 0.7), ("digits gRPC", "digits gRPC, mlserver", 2),
        ("digits gRPC", "digits gRPC, ray", 2),
    ):  # fmt: skip
        if any(row.name == other for row in rows):
            found = median(one, lambda m: m.rate) / median(other, lambda m: m.rate)
            cost = median(other, cpu) / median(one, cpu)
            lines.append(
                f"  {one} / {other}: {found:.2f} (goal {goal:g}); by processor time {cost:.2f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
