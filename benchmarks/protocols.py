"""One model by several protocols: what a request costs by each.

    python -m benchmarks.protocols [--rounds 3] [--seconds 3] [--peers DIR] [--bodies]

602 KB through an identity model, by binary REST and by raw gRPC, beside the same bytes through
`/predictions`; the digits model by REST and gRPC, beside MLServer's and Ray's gRPC where --peers
names the folder of their environments (peers/README.md). With --bodies instead: 100 KB to 10 MB as
request, as answer and as both, one at a time, beside mosec. h2load (Debian's nghttp2-client) asks;
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
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import orjson
import psutil

from benchmarks import procfs
from benchmarks.archives import PEERS, ROOT, build_bare, build_digits, modelyard, modelyard_json
from benchmarks.bare import ONE_THREAD
from modelyard.plugins.grpc.protos import COMPILED, message
from modelyard.serve.dataplane.worker import SEND_BYTES

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
SIZES = """\
KEPT = {}


def answer(body):
    if len(body) > 16:
        return str(len(body))
    size = int(body)
    if size not in KEPT:
        KEPT[size] = b"x" * size
    return KEPT[size]


def handle(data, context):
    return None if data is None else [answer(row["body"]) for row in data]
"""
"""Answers a long body with its length, a number with as many bytes."""
BODIES = {"100 KB": 2, "602 KB": 12, "2.4 MB": 48, "10 MB": 200}
"""Rows of 224 × 56 numbers."""
MOST_BYTES = 16 << 20
HUNG_S = 60
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

    megabytes: float = 0.0
    """Size of the request's body and of the answer's together."""

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
    parser.add_argument("--bodies", action="store_true", help="bodies of 100 KB to 10 MB")
    parser.add_argument("-o", "--output", type=Path, default=LOCAL_RESULTS)
    parser.add_argument("--name", default=time.strftime("%Y-%m-%dT%H%M%S-protocols"))
    given = parser.parse_args()
    if shutil.which("h2load") is None:
        parser.error("h2load is missing; install it with: apt-get install nghttp2-client")
    with tempfile.TemporaryDirectory(prefix="modelyard-protocols-") as name, \
            contextlib.ExitStack() as stack:  # fmt: skip
        folder = Path(name)
        rows = build_bodies(folder) if given.bodies else build(folder, given.connections)
        servers = [stack.enter_context(ours(folder))]
        if given.bodies and given.peers is not None:
            servers.append(stack.enter_context(mosec(given.peers.absolute(), folder)))
            rows += [replace(row, name=f"{row.name}, mosec", server="mosec", path=MOSEC[row.path])
                     for row in rows if row.path in MOSEC]  # fmt: skip
        elif given.peers is not None:
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
    table = (tabulate_bodies if given.bodies else tabulate)(rows, taken)
    text = (
        f"{machine['cpu']}, {machine['cores']} cores · medians of {given.rounds} round(s) of "
        f"{given.seconds} s · {date}\n{table}\n"
    )
    sys.stdout.write(text)
    given.output.mkdir(parents=True, exist_ok=True)
    content = {"date": date, "machine": machine, "taken": [asdict(each) for each in taken]}
    (given.output / f"{given.name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (given.output / f"{given.name}.txt").write_text(text)


def build(folder: Path, connections: int) -> list[Row]:
    """Make the archives, and the bodies of requests."""
    (digits,) = build_digits(folder, ("onnx",))
    build_identity(folder, f"8,{','.join(map(str, SHAPE[1:]))}")
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
        head = tensor_head(name, shape, len(data))
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


def build_identity(folder: Path, sizes: str) -> None:
    """Export and archive a network that answers with its input, of so many rows at most."""
    import torch

    (folder / "net.py").write_text(NETWORK)
    torch.save({"weight": torch.ones(1)}, folder / "identity.pt")
    modelyard("export", folder / "identity.pt", "--model", f"{folder / 'net.py'}:Identity",
              "--input", f"x:float32[batch=1..{sizes}]", "--output", "y",
              "--format", "torchscript", "-o", folder / "made")  # fmt: skip
    modelyard("archive", "identity", "--artifact", folder / "made" / "identity.pt", "--handler",
              "base_handler", "--version", "1.0", "-o", folder / "store")  # fmt: skip


def tensor_head(name: str, shape: Sequence[int], size: int) -> bytes:
    """Return what stands before so many bytes of a tensor, whose answer is to be bytes, too."""
    return orjson.dumps({
        "inputs": [{"name": name, "datatype": "FP32", "shape": shape,
                    "parameters": {"binary_data_size": size}}],
        "parameters": {"binary_data_output": True},
    })  # fmt: skip


def build_bodies(folder: Path) -> list[Row]:
    """Make the archives, and bodies of each size as request, as answer and as both."""
    build_identity(folder, "8,rows=2..200,224,56")
    build_bare(folder, "echo", ECHO, "batchSize: 8\n")
    build_bare(folder, "sizes", SIZES, "batchSize: 8\n")
    rows = []
    for name, count in BODIES.items():
        size = count * 224 * 56 * 4
        plain, number, rest = (folder / f"{count}.{end}" for end in ("body", "number", "rest"))
        plain.write_bytes(data := bytes(size))
        number.write_text(f"{size}")
        head = tensor_head("x", [1, count, 224, 56], size)
        rest.write_bytes(head + data)
        length = f"inference-header-content-length: {len(head)}"
        for way, path, body, headers, least in (
            ("request", "/predictions/sizes", plain, (OCTETS,), 6),
            ("answer", "/predictions/sizes", number, (OCTETS,), size),
            ("both", "/predictions/echo", plain, (OCTETS,), size),
            ("both, binary OIP", "/v2/models/identity/infer", rest, (OCTETS, length), size),
        ):
            moved = (body.stat().st_size + least) / 1e6
            rows.append(Row(f"{name} {way}", "modelyard", path, body, headers, 4, least, moved))
    return rows


MOSEC = {"/predictions/sizes": "/sizes", "/predictions/echo": "/echo"}
"""Paths here → those of `peers/bodies_mosec.py`."""


@contextlib.contextmanager
def ours(folder: Path) -> Iterator[Server]:
    """Serve the three archives, a worker each."""
    state, config = folder / "state", folder / "server.yaml"
    config.write_text(f"max_request_bytes: {MOST_BYTES}\n")
    about = modelyard_json(
        "serve", "start", "--model-store", folder / "store", "--models", "ALL", "--workers", "1",
        "--state-dir", state, "--device", "cpu", "--port", "0", "--management-port", "0",
        "--metrics-port", "0", "--grpc-port", "0", "--config", config,
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


def mosec(envs: Path, folder: Path) -> contextlib.AbstractContextManager[Server]:
    """Serve bytes by mosec."""
    bin, work = envs / "mosec" / "bin", folder / "mosec"
    work.mkdir()
    first = Row("", "", "/sizes", folder / "2.body", (OCTETS,), 1, 6)
    command = [bin / "python", PEERS / "bodies_mosec.py"]
    return _peer("mosec", command, bin, work, folder, 18720, first)


@contextlib.contextmanager
def _peer(
    name: str, command: Sequence[str | Path], bin: Path, work: Path, model: Path, port: int,
    first: Row | None = None,
) -> Iterator[Server]:  # fmt: skip
    if first is None:
        first = Row("", "", INFER, work.parent / "digits-onnx.grpc", GRPC, 1, 40)
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
        _wait(first, port, process, work / "server.log")
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


def _wait(row: Row, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + READY_S
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_S)
    counts = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored", done.stdout)
    data = re.search(r"\((\d+)\) data", done.stdout)
    count = int(counts[1]) if counts else 0
    failed = counts is None or counts[2] != "0" or counts[3] != "0"
    if failed or data is None or not count or int(data[1]) < 0.98 * count * row.least:
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


def hop_ms(size: int, is_shared: bool, moved: int = 1 << 29) -> float:
    """Return the processor time of both ends, for each MB that goes from process to process.

    Args:
        size: bytes of one body.
        is_shared: through memory that both have, copied out of it once, instead of a socket pair
            as between server and worker.
        moved: bytes of all bodies.
    """
    body, taken = os.urandom(1 << 16) * (size >> 16), bytearray(size >> 16 << 16)
    times = moved // len(body)
    before = sum(os.times()[:4])
    if is_shared:
        for _ in range(times):
            memoryview(taken)[:] = body
    else:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        if (child := os.fork()) == 0:
            for _ in range(times):
                theirs.recv_into(taken, 0, socket.MSG_WAITALL)
                theirs.send(b"x")
            os._exit(0)
        for _ in range(times):
            ours.sendall(body)
            ours.recv(1)
        os.waitpid(child, 0)
    return (sum(os.times()[:4]) - before) / times / len(body) * 1e9


def tabulate_bodies(rows: Sequence[Row], taken: Sequence[Measured]) -> str:
    """Return medians: what a request costs, and what a megabyte of it, both ways counted."""
    columns = ("rate", "server ms", "workers ms", "client ms", "ms/MB", "others")
    lines = [f"{'':32}" + "".join(f"{column:>11}" for column in columns)]
    for row in rows:
        own = [each for each in taken if each.row == row.name]
        rate, *each_us, others = (
            statistics.median(of)
            for of in zip(*(tuple(asdict(one).values())[1:] for one in own), strict=True)
        )
        server, workers, client = (us / 1e3 for us in each_us)
        values = rate, server, workers, client, (server + workers) / row.megabytes, others
        places = 1, 3, 3, 3, 2, 2
        lines.append(f"{row.name:32}" + "".join(
            f"{value:11,.{place}f}" for value, place in zip(values, places, strict=True)
        ))  # fmt: skip
    lines.append("from process to process alone, ms/MB: by a socket pair, by shared memory")
    for name, count in BODIES.items():
        pair, shared = (hop_ms(count * 224 * 56 * 4, is_shared) for is_shared in (False, True))
        lines.append(f"{name:32}{pair:11.2f}{shared:11.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
