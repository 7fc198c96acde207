"""What hostile clients cost a server, and the innocent client beside them.

    python -m benchmarks.floods                # every flood, about three minutes
    python -m benchmarks.floods PING SETTINGS  # those whose name contains one of these

One process floods a server that serves one small model, for so many seconds or bytes, whichever
ends first; this one meanwhile asks for a prediction every 20 ms, from another address, by HTTP and
by gRPC in turns. Shown are

* the innocent's median and slowest hundredth, and the slowest hundredth in the server's own
  processor time: what all its threads ran while the client waited. So long it would have waited on
  a machine that does nothing else, which can be compared where others share the machine.
* the server's processor time beyond what it takes without a flood, and for each MB that was sent. A
  segment counts with 66 bytes of headers and a connection with five segments, for that is what they
  cost who sends them; so a flood of single bytes is not free.
* what its memory grew by.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from modelyard.archiver import write_archive
from modelyard.plugins.grpc.protos import message

PACE_S = 0.02
"""Time from one question of the innocent client to the next."""
HOSTILE = "127.0.0.66"
"""Address of the flood; the innocent client has another one."""
SEGMENT_BYTES = 66
CONNECTION_SEGMENTS = 5
MOST_CPU_PER_MB = 0.2
"""Processor seconds for each hostile MB that a flood may cost."""
HANDLER = """
def handle(data, context):
    if data is None:
        return None
    return [{name: x for name, x in row.items() if name != "body"} or "fine" for row in data]
"""

# -- floods ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flood:
    """One kind of hostile client."""

    name: str
    face: str
    """`inference`, `management` or `grpc`."""
    opening: bytes
    """What each connection begins with."""
    unit: Callable[[int], bytes]
    """Returns what comes then, again and again, by its number on the connection."""
    units: int = 1 << 30
    """Units of a connection; then it is closed and another one opened."""
    connections: int = 1
    joined: int = 1 << 16
    """Bytes that are sent at once, at least; 1 sends each unit by itself."""
    pause_s: float = 0.0
    """Pause between two sends on a connection."""
    reads: bool = True
    """Whether it reads what is answered."""
    waits: bool = False
    """Whether it waits for an answer to a connection's units before it closes it."""


@dataclass
class _Client:
    socket: socket.socket
    data: memoryview
    sent_units: int = 0
    next_at: float = 0.0
    ends_at: float = 0.0


def pour(flood: Flood, address: tuple[str, int], seconds: float, most_bytes: int) -> int:
    """Flood an address, and return how many bytes were sent, headers of segments counted."""
    until, sent = time.monotonic() + seconds, 0
    clients: list[_Client] = []
    while (now := time.monotonic()) < until and sent < most_bytes:
        while len(clients) < flood.connections:
            made = socket.socket()
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.settimeout(0.5)
            made.bind((HOSTILE, 0))
            try:
                made.connect(address)
            except OSError:
                made.close()
                time.sleep(0.005)
                break
            made.setblocking(False)
            clients.append(_Client(made, memoryview(flood.opening)))
            sent += SEGMENT_BYTES * CONNECTION_SEGMENTS
        has_moved = False
        for client in list(clients):
            moved = _move(flood, client, now)
            has_moved |= moved is not None and moved > 0
            if moved is None:
                clients.remove(client)
                client.socket.close()
            elif moved:
                sent += moved + SEGMENT_BYTES * (-(-moved // 1448))
        if not has_moved:
            time.sleep(0.001)
    sent -= _unread([client.socket.getsockname()[1] for client in clients])
    for client in clients:
        client.socket.close()
    return sent


def _unread(ports: Sequence[int]) -> int:
    """Return what the connections of these ports have sent and the server has not read."""
    count, mine = 0, set(ports)
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        sending, received = (int(each, 16) for each in queues.split(":"))
        if int(remote.partition(":")[2], 16) in mine:
            count += received
        elif int(local.partition(":")[2], 16) in mine:
            count += sending
    return count


def _move(flood: Flood, client: _Client, now: float) -> int | None:
    """Send and read what can be; return the bytes sent, or None where the connection is over."""
    if flood.reads:
        with contextlib.suppress(BlockingIOError):
            try:
                while True:
                    data = client.socket.recv(1 << 18)
                    if not data or client.ends_at:
                        return None
            except ConnectionError:
                return None
    if client.ends_at:
        return None if now > client.ends_at else 0
    if not client.data:
        if now < client.next_at:
            return 0
        units = []
        size = 0
        while size < flood.joined and client.sent_units < flood.units:
            unit = flood.unit(client.sent_units)
            client.sent_units += 1
            size += len(unit)
            units.append(unit)
        if not units:
            if not flood.waits:
                return None
            client.ends_at = now + 1
            return 0
        client.data = memoryview(b"".join(units))
    try:
        moved = client.socket.send(client.data)
    except BlockingIOError:
        return 0
    except OSError:
        return None
    client.data = client.data[moved:]
    client.next_at = now + flood.pause_s
    return moved


# -- what they send --------------------------------------------------------------------------------

HOST = b"Host: localhost\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INFER = "/inference.GRPCInferenceService/"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def fields(*pairs: tuple[str, str]) -> bytes:
    """Return headers as HPACK has them, without its tables."""
    texts = [[text.encode() for text in pair] for pair in pairs]
    return b"".join(b"\0" + b"".join(bytes([len(text)]) + text for text in pair) for pair in texts)


def call(path: str, *more: tuple[str, str]) -> bytes:
    """Return the headers of a gRPC call."""
    return fields(
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"),
        ("te", "trailers"), ("content-type", "application/grpc"), *more,
    )  # fmt: skip


def begun(*settings: tuple[int, int]) -> bytes:
    """Return how a client begins."""
    return PREFACE + frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in settings))


def begins(at: int) -> int:
    """Return the id of a connection's stream."""
    return 2 * at + 1


def unary(path: str, body: bytes = b"") -> Callable[[int], bytes]:
    """Return what makes a whole call."""
    head, data = call(path), b"\0" + struct.pack(">I", len(body)) + body
    return lambda at: (
        frame(HEADERS, END_HEADERS, begins(at), head) + frame(DATA, END_STREAM, begins(at), data)
    )


def same(data: bytes) -> Callable[[int], bytes]:
    """Return what makes the same again and again."""
    return lambda at: data


def reset(at: int) -> bytes:
    """Return a call that is given up at once."""
    head = frame(HEADERS, END_HEADERS, begins(at), call(READY))
    return head + frame(RST, 0, begins(at), b"\0\0\0\x08")


EMPTY = frame(DATA, 0, 1, b"\0\0\0\0\0")
"""An empty message on the first stream."""
READY = f"{INFER}ServerReady"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
PROBE = b"GET /ping HTTP/1.1\r\n" + HOST
POST = b"POST /predictions/model HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
FIELD = b"\x40\x01a\x7f\x80\x1e" + b"v" * 3967
"""A field that goes into HPACK's table."""
STREAMED = begun() + frame(HEADERS, END_HEADERS, 1, call(f"{INFER}ModelStreamInfer"))
WITHHELD = begun((4, 0)) + b"".join(map(unary(READY), range(100)))
"""A hundred answers that may not be sent."""

FLOODS = (
    Flood(
        "http: not HTTP", "inference", b"", same(b"\x16\x03\x01nonsense\r\n\r\n"), 1, 8, waits=True
    ),
    Flood(
        "http: a malformed header",
        "inference",
        b"",
        same(PROBE + b"A b : c\r\n\r\n"),
        1,
        8,
        waits=True,
    ),
    Flood("http: pipelined probes", "inference", b"", same(PROBE + b"\r\n"), 1 << 30, 4),
    Flood(
        "http: pipelined probes that nobody reads",
        "inference",
        b"",
        same(PROBE + b"\r\n"),
        1 << 30,
        4,
        reads=False,
    ),
    Flood(
        "http: pipelined requests for no model",
        "inference",
        b"",
        same(b"POST /predictions/nobody HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\n\r\n"),
        1 << 30,
        4,
    ),
    Flood(
        "http: wrong tokens",
        "inference",
        b"",
        same(POST + b"Authorization: Bearer abcd1234\r\nContent-Length: 0\r\n\r\n"),
        1 << 30,
        4,
    ),
    Flood(
        "http: wrong tokens for management",
        "management",
        b"",
        same(b"GET /models HTTP/1.1\r\n" + HOST + b"Authorization: Bearer abcd1234\r\n\r\n"),
        1 << 30,
        4,
    ),
    Flood(
        "http: sign-ins",
        "management",
        b"",
        same(
            b"POST /console/sign-in HTTP/1.1\r\n" + HOST + b"Content-Length: 10\r\nContent-Type: "
            b"application/x-www-form-urlencoded\r\n\r\ntoken=abcd"
        ),
        1 << 30,
        4,
    ),
    Flood("http: slow heads", "inference", PROBE + b"X: ", same(b"a"), 1 << 30, 200, 1, 0.05),
    Flood("http: half heads", "inference", PROBE, same(b"X: aaaa\r\n"), 200, 300, 1, 0.1),
    Flood("http: chunks of one byte", "inference", CHUNKED, same(b"1\r\na\r\n"), 1 << 30, 4),
    Flood(
        "http: chunks with extensions",
        "inference",
        CHUNKED,
        same(b"1;" + b"x" * 200 + b"\r\na\r\n"),
        1 << 30,
        4,
    ),
    Flood(
        "http: heads of 900 fields",
        "inference",
        b"",
        same(PROBE + b"a: b\r\n" * 900 + b"\r\n"),
        1 << 30,
        4,
    ),
    Flood(
        "http: heads too long", "inference", PROBE, same(b"X: " + b"a" * 8000 + b"\r\n"), 1 << 30, 4
    ),
    Flood(
        "http: too long bodies",
        "inference",
        b"",
        same(POST + b"Content-Length: 99999999999\r\n\r\n"),
        1,
        8,
        waits=True,
    ),
    Flood("http: new connections", "inference", b"", same(b""), 0, 8),
    Flood("grpc: not HTTP/2", "grpc", b"", same(b"GET / HTTP/1.1\r\n\r\n"), 1, 8, waits=True),
    Flood("grpc: empty messages of a stream", "grpc", STREAMED, same(EMPTY)),
    Flood(
        "grpc: messages of reflection",
        "grpc",
        begun() + frame(HEADERS, END_HEADERS, 1, call(REFLECTION)),
        same(frame(DATA, 0, 1, b"\0\0\0\0\2\x3a\0")),
    ),
    Flood("grpc: calls", "grpc", begun(), unary(READY)),
    Flood("grpc: calls that are refused", "grpc", begun(), unary("/a.B/C")),
    Flood("grpc: calls that are reset", "grpc", begun(), reset),
    Flood("grpc: resets over new connections", "grpc", begun(), reset, 480, 4),
    Flood("grpc: SETTINGS", "grpc", begun(), same(frame(SETTINGS, 0, 0))),
    Flood(
        "grpc: SETTINGS that move the window",
        "grpc",
        WITHHELD,
        lambda at: frame(SETTINGS, 0, 0, struct.pack(">HI", 4, at % 2)),
    ),
    Flood("grpc: PING", "grpc", begun(), same(frame(PING, 0, 0, b"12345678"))),
    Flood(
        "grpc: WINDOW_UPDATE, answers withheld",
        "grpc",
        WITHHELD,
        same(frame(WINDOW, 0, 0, b"\0\0\0\1")),
    ),
    Flood(
        "grpc: PRIORITY",
        "grpc",
        begun(),
        lambda at: frame(PRIORITY, 0, begins(at % 1000), b"\0\0\0\0\x10"),
    ),
    Flood("grpc: unknown frames", "grpc", begun(), same(frame(99, 0, 0))),
    Flood(
        "grpc: CONTINUATION",
        "grpc",
        begun() + frame(HEADERS, 0, 1, call(READY)),
        same(frame(CONTINUATION, 0, 1, b"")),
    ),
    Flood("grpc: empty DATA", "grpc", STREAMED, same(frame(DATA, 0, 1))),
    Flood("grpc: DATA of one byte", "grpc", STREAMED, same(frame(DATA, 0, 1, b"\0"))),
    Flood(
        "grpc: large heads",
        "grpc",
        begun(),
        lambda at: frame(
            HEADERS,
            END_HEADERS | END_STREAM,
            begins(at),
            call(READY, *((f"x-{n}", "v" * 100) for n in range(60))),
        ),
    ),
    Flood(
        "grpc: references into HPACK's table",
        "grpc",
        begun() + frame(HEADERS, END_HEADERS, 1, call(READY) + FIELD),
        lambda at: frame(
            HEADERS, END_HEADERS | END_STREAM, begins(at + 1), call(READY) + b"\xbe" * 200
        ),
    ),
)
"""The rows of the table."""

# -- the innocent client ---------------------------------------------------------------------------


class Innocent:
    """Asks for a prediction now and then, by HTTP and gRPC in turns."""

    def __init__(self, http: tuple[str, int], grpc_at: str | None) -> None:
        self._http = http
        self._client = http_client(http)
        self._channel = grpc.insecure_channel(grpc_at) if grpc_at else None
        self._infer: Any = None
        if self._channel is not None:
            self._request = message("inference.ModelInferRequest")(model_name="model")
            tensor = self._request.inputs.add(name="x", datatype="FP32", shape=[1])
            tensor.contents.fp32_contents.append(1.0)
            self._infer = self._channel.unary_unary(
                f"{INFER}ModelInfer", lambda given: given.SerializeToString()
            )

    def by_http(self) -> bool:
        """Ask once, and return whether the answer is right."""
        try:
            self._client.request("POST", "/predictions/model", b"x")
            answer = self._client.getresponse()
            return answer.status == 200 and answer.read() == b"fine"
        except (OSError, http.client.HTTPException):
            self._client.close()
            self._client = http_client(self._http)
            return False

    def by_grpc(self) -> bool:
        """Ask once, and return whether there is an answer."""
        try:
            return bool(self._infer(self._request, timeout=30))
        except grpc.RpcError:
            return False

    def ask(
        self, goes_on: Callable[[], bool], ran_s: Callable[[], float]
    ) -> tuple[list[float], list[float], int]:
        """Ask for as long as it goes on.

        Returns:
            The seconds of each answer, what `ran_s` went on by meanwhile, and how many went wrong.
        """
        ways = itertools.cycle((self.by_http, self.by_grpc) if self._infer else (self.by_http,))
        took, own, wrong = [], [], 0
        due = time.monotonic()
        while goes_on():
            before = ran_s()
            is_right = next(ways)()
            took.append(time.monotonic() - due)
            own.append(ran_s() - before)
            wrong += not is_right
            # Who was late asks on at once, as many clients would; but each counts once.
            due = max(due + PACE_S, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
        return took, own, wrong

    def close(self) -> None:
        """Close its connections."""
        self._client.close()
        if self._channel is not None:
            self._channel.close()


def http_client(address: tuple[str, int]) -> http.client.HTTPConnection:
    """Return a client of one connection."""
    return http.client.HTTPConnection(*address, timeout=30)


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What one flood did."""

    name: str
    p50_ms: float
    p99_ms: float
    own_p99_ms: float
    """The slowest hundredth in the server's own processor time."""
    asked: int
    wrong: int
    sent_mb: float
    cpu_s: float
    """Beyond what the server takes for the innocent client alone."""
    grown_mb: float
    load: float
    """Load of the machine meanwhile."""

    @property
    def cpu_per_mb(self) -> float:
        """Processor seconds for each hostile MB."""
        return self.cpu_s / max(self.sent_mb, 1e-6)


@dataclass
class Target:
    """A server: where it listens, and its process."""

    addresses: dict[str, tuple[str, int]]
    pid: int
    rates: list[float] = field(default_factory=list)
    """Processor seconds a second without a flood."""

    def measure(self, flood: Flood | None, seconds: float, most_bytes: int) -> Row:
        """Return what a flood does, or none."""
        process = psutil.Process(self.pid)
        where = self.addresses.get("grpc")
        innocent = Innocent(
            self.addresses["inference"], f"{where[0]}:{where[1]}" if where else None
        )
        innocent.by_http()
        if where:
            innocent.by_grpc()
        sent: Any = multiprocessing.Value("q", 0)

        def run() -> None:
            assert flood is not None
            sent.value = pour(flood, self.addresses[flood.face], seconds, most_bytes)

        before, memory, began = _cpu_s(process), process.memory_info().rss, time.monotonic()
        hostile = multiprocessing.get_context("fork").Process(target=run) if flood else None
        if hostile is not None:
            hostile.start()
        took, own, wrong = innocent.ask(
            lambda: hostile.is_alive() if hostile else time.monotonic() < began + seconds,
            lambda: _ran_s(self.pid),
        )
        if hostile is not None:
            hostile.join()
            _settle(process)  # what it has sent may wait in the server yet
        elapsed = time.monotonic() - began
        used = _cpu_s(process) - before
        grown = process.memory_info().rss - memory
        innocent.close()
        if flood is None:
            self.rates.append(used / elapsed)
        beyond = used - elapsed * (sum(self.rates) / len(self.rates))
        return Row(
            flood.name if flood else "no flood",
            _at(took, 0.5),
            _at(took, 0.99),
            _at(own, 0.99),
            len(took),
            wrong,
            sent.value / 1e6,
            max(0.0, beyond),
            grown / 1e6,
            os.getloadavg()[0],
        )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _ran_s(pid: int) -> float:
    """Return what all threads of a process have run, in seconds."""
    count = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            count += int((thread / "schedstat").read_text().split()[0])
    return count / 1e9


def _at(seconds: Sequence[float], share: float) -> float:
    """Return a quantile, in milliseconds."""
    return 1000 * sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]


def _settle(process: psutil.Process, most_s: float = 20.0) -> None:
    """Wait until a process takes next to nothing any more."""
    limit = time.monotonic() + most_s
    while time.monotonic() < limit:
        before = _cpu_s(process)
        time.sleep(0.2)
        if _cpu_s(process) - before <= 0.02:
            return


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Target]:
    """Start a server with one small model, for a block."""
    (folder / "handler.py").write_text(HANDLER)
    (folder / "weights.bin").write_bytes(b"none")
    (folder / "config.yaml").write_text("minWorkers: 1\nmaxWorkers: 1\n")
    write_archive(
        "model", version="1.0", artifact=folder / "weights.bin", output_dir=folder,
        handler=str(folder / "handler.py"), config_file=folder / "config.yaml", extra_files=(),
        examples=(),
    )  # fmt: skip
    ports = [f"--{name}=0" for name in ("port", "management-port", "metrics-port", "grpc-port")]
    command = [sys.executable, "-P", "-m", "modelyard", "serve", "start", *ports, "--json"]
    more = ["--models=model", f"--model-store={folder}", f"--state-dir={folder / 'state'}"]
    ran = subprocess.run([*command, *more], capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    about = json.loads(ran.stdout)
    urls = {**about, **about["faces"]}
    places = {name: urls[name].rpartition("/")[2] for name in ("inference", "management", "grpc")}
    addresses = {name: (place.rpartition(":")[0], int(place.rpartition(":")[2]))
                 for name, place in places.items()}  # fmt: skip
    try:
        yield Target(addresses, about["pid"])
    finally:
        os.kill(about["pid"], signal.SIGTERM)
        with contextlib.suppress(psutil.Error):
            psutil.Process(about["pid"]).wait(60)


def text(rows: Sequence[Row]) -> str:
    """Return the table, in Markdown."""
    lines = [
        "| flood | p50 · p99, ms | p99 of own time, ms | asked · wrong | sent, MB | CPU, s | "
        "CPU, s/MB | memory, MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.name} | {row.p50_ms:.1f} · {row.p99_ms:.0f} | {row.own_p99_ms:.0f} | "
        f"{row.asked} · {row.wrong} | {row.sent_mb:.2f} | "
        f"{row.cpu_s:.2f} | {row.cpu_per_mb:.2f} | {row.grown_mb:+.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return how many floods cost more than they may."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="Only floods whose names contain one of these.")
    parser.add_argument("--seconds", type=float, default=3.0, help="Longest time of a flood.")
    parser.add_argument("--megabytes", type=float, default=1000.0, help="Most that a flood sends.")
    given = parser.parse_args(arguments)
    floods = [f for f in FLOODS if not given.words or any(word in f.name for word in given.words)]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as target:
        target.measure(None, 1, 0)
        target.rates.clear()
        rows.append(target.measure(None, given.seconds, 0))
        for flood in floods:
            rows.append(target.measure(flood, given.seconds, int(given.megabytes * 1e6)))
            print(text(rows[-1:]).splitlines()[-1], f"load {rows[-1].load:.1f}", flush=True)
    print(f"\n{text(rows)}")
    return sum(row.cpu_per_mb > MOST_CPU_PER_MB for row in rows[1:])


if __name__ == "__main__":
    sys.exit(main())
