"""Several frontend processes: to clients, to management and to metrics they are one server."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from modelyard.serve.errors import StartError
from modelyard.serve.settings import load_settings
from tests.serve.live import (
    LiveServer,
    build_archive,
    descendants,
    is_alive,
    modelyard,
    poll,
    running,
    start_arguments,
    start_server,
)

CORES = len(os.sched_getaffinity(0))
needs_two_cores = pytest.mark.skipif(CORES < 2, reason="each frontend takes a core")
LIMIT = 100_000
MODELS = ("picky", "streamer", "echo", "slow")


class Pair(NamedTuple):
    """The same store, served by the server process itself and by two frontends."""

    one: LiveServer
    two: LiveServer


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("frontends") / "store"
    for name in ("picky", "streamer", "echo"):
        build_archive(store, name)
    build_archive(store, "slow", config="batchSize: 1\n")
    build_archive(store, "slow", name="wide", config="batchSize: 8\n")
    return store


@pytest.fixture(scope="module")
def pair(store: Path) -> Iterator[Pair]:
    config = store.parent / "modelyard.yaml"
    config.write_text(f"max_request_bytes: {LIMIT}\nworkers: 1\n", encoding="utf-8")

    def arguments(count: int) -> tuple[str, ...]:
        models = (f"--models={name}" for name in MODELS)
        return f"--config={config}", f"--frontends={count}", *models

    states = [store.parent / f"state-{count}" for count in (1, 2)]
    with (
        running(states[0], store, *arguments(1)) as one,
        running(states[1], store, *arguments(2)) as two,
    ):
        yield Pair(one, two)


@pytest.fixture
def two(pair: Pair) -> LiveServer:
    return pair.two


def frontends(server: LiveServer) -> list[int]:
    """Return the process ids that the server reports."""
    about = (server.state_dir / "server.json").read_text(encoding="utf-8")
    pids: list[int] = json.loads(about)["frontends"]
    return pids


def socket_count(pid: int) -> int:
    """Return how many sockets a process holds."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(descriptor.readlink()))
    return sum(link.startswith("socket:") for link in links)


def request(
    target: str,
    body: bytes = b"",
    *headers: str,
    method: str = "POST",
    version: str = "1.1",
    connection: str = "close",
) -> bytes:
    lines = [
        f"{method} {target} HTTP/{version}", "Host: x", "X-Request-ID: one",
        f"Connection: {connection}", *headers,
    ]  # fmt: skip
    if body and not any(header.startswith("Transfer-Encoding") for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def ask(client: socket.socket, body: str, model: str = "picky") -> bytes:
    """Send one request over a connection that stays open; return head and body."""
    client.sendall(request(f"/predictions/{model}", body.encode(), connection="keep-alive"))
    return read_one(client)


def read_one(client: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        data = client.recv(65536)
        assert data, received
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(65536)
    return head + b"\r\n\r\n" + body


def exchange(server: LiveServer, sent: bytes) -> bytes:
    """Send bytes, and return all that comes until the server closes the connection."""
    received = b""
    with socket.create_connection(server.address, 20) as client:
        client.sendall(sent)
        while data := client.recv(65536):
            received += data
    return received


# -- the same bytes ----------------------------------------------------------------------------

PREDICT = "/predictions/picky"
CHUNKED = "Transfer-Encoding: chunked"
CASES = {
    "post": request(PREDICT, b"hello"),
    "put": request(PREDICT, b"hello", method="PUT"),
    "version": request(f"{PREDICT}/1.0", b"hello"),
    "query": request(f"{PREDICT}?a=1&b=%20", b"hello"),
    "percent": request("/predictions/p%69cky", b"hello"),
    "percent nul": request("/predictions/..%00", b"hello"),
    "HTTP/1.0": request(PREDICT, b"hello", version="1.0"),
    "empty body": request(PREDICT),
    "body of the limit": request(PREDICT, b"x" * LIMIT),
    "body over the limit": request(PREDICT, b"x" * (LIMIT + 1)),
    "declared over the limit": request(PREDICT, b"", f"Content-Length: {LIMIT + 1}"),
    "over the limit, unknown model": request("/predictions/cats", b"x" * (LIMIT + 1)),
    "chunked": request(PREDICT, b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", CHUNKED),
    "chunked over the limit": request(
        PREDICT, b"%x\r\n%s\r\n0\r\n\r\n" % (LIMIT + 1, b"x" * (LIMIT + 1)), CHUNKED
    ),
    "100-continue": request(PREDICT, b"hello", "Expect: 100-continue"),
    "own header": request(PREDICT, b"own header"),
    "own status": request(PREDICT, b"status 202"),
    "split header": request(PREDICT, b"split header"),
    "bad input": request(PREDICT, b"bad"),
    "error": request(PREDICT, b"broken"),
    "unknown model": request("/predictions/cats", b"hello"),
    "unknown version": request(f"{PREDICT}/2.0", b"hello"),
    "unknown route": request("/nothing", b"hello"),
    "wrong method": request(PREDICT, method="GET"),
    "HEAD": request("/ping", method="HEAD"),
    "HEAD of a prediction": request(PREDICT, method="HEAD"),
    "ping": request("/ping", method="GET"),
    "ready": request("/health/ready", method="GET"),
    "docs": request("/docs", method="GET"),
    "protocol": request("/v2/models/picky/infer", b"hello"),
    "stream": request("/predictions/streamer", b"count 3"),
    "broken stream": request("/predictions/streamer", b"fail 2"),
    "no HTTP": b"hello\r\n\r\n",
    "wrong length": request(PREDICT, b"", "Content-Length: ten"),
    "star": request("*", method="OPTIONS"),
    "pipelined": request(PREDICT, b"1", connection="keep-alive")
    + request("/ping", method="GET", connection="keep-alive")
    + request("/predictions/streamer", b"count 2", connection="keep-alive")
    + request("/predictions/cats", connection="keep-alive")
    + request(PREDICT, b"2"),
}


@needs_two_cores
@pytest.mark.parametrize("sent", CASES.values(), ids=CASES.keys())
def test_answers_are_the_same_bytes(pair: Pair, sent: bytes) -> None:
    # What is not a request has no id of its own.
    one, two = (re.sub(rb"[0-9a-f]{8}(-[0-9a-f]{4,12}){4}", b"ID", exchange(s, sent)) for s in pair)
    assert one
    assert two == one


@needs_two_cores
def test_a_handler_is_told_the_same(pair: Pair) -> None:
    sent = request("/predictions/echo/1.0/more/%E2%82%AC?a=1", b"x", "X-Odd-SPELLING: \xe9")
    one, two = (json.loads(exchange(server, sent).partition(b"\r\n\r\n")[2]) for server in pair)
    assert one["headers"]["X-Odd-SPELLING"]
    assert {**one, "pid": 0} == {**two, "pid": 0}


@needs_two_cores
def test_a_client_that_sends_on_can_read_why_its_body_was_refused(two: LiveServer) -> None:
    connection = http.client.HTTPConnection(*two.address, timeout=20)
    connection.request("POST", "/predictions/picky", b"x" * 30_000_000)
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["code"]) == (413, 413)
    connection.close()


# -- one server --------------------------------------------------------------------------------


@contextlib.contextmanager
def connections(server: LiveServer, count: int) -> Iterator[list[socket.socket]]:
    """Open connections; every second one is the same frontend's."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(server.address, 20)) for _ in range(count)
        ]


@needs_two_cores
def test_connections_are_shared_out_evenly(two: LiveServer) -> None:
    pids = frontends(two)
    assert len(set(pids)) == 2 and set(pids) <= descendants(two.pid)
    where = f"--state-dir={two.state_dir}"
    assert json.loads(modelyard("serve", "status", where, "--json").stdout)["frontends"] == pids
    assert f"frontends, pids {pids[0]} {pids[1]}" in modelyard("serve", "status", where).stdout
    before = [socket_count(pid) for pid in pids]
    with connections(two, 8) as clients:
        for client in clients:
            ask(client, "hello")  # it has been handed over
        assert [socket_count(pid) - then for pid, then in zip(pids, before, strict=True)] == [4, 4]


@needs_two_cores
def test_metrics_count_what_comes_by_both(two: LiveServer) -> None:
    labels = {"model": "picky", "kind": "predict", "code": "200"}
    before = two.metric("modelyard_requests_total", **labels)
    ids = set()
    with connections(two, 4) as clients:
        for client in clients * 5:
            client.sendall(b"POST /predictions/picky HTTP/1.1\r\nHost: x\r\n\r\n")
            ids |= set(re.findall(rb"x-request-id: (\S+)", read_one(client)))
    assert two.metric("modelyard_requests_total", **labels) == before + 20
    assert len(ids) == 20


@needs_two_cores
def test_what_management_changes_holds_for_both_at_once(two: LiveServer) -> None:
    with connections(two, 2) as clients:
        assert all(b" 404 " in ask(client, "x", "again") for client in clients)
        assert two.register("picky.mar", model_name="again").status_code == 200
        assert all(b"fine: x" in ask(client, "x", "again") for client in clients)
        assert two.management.delete("/models/again").status_code == 200
        assert all(b" 404 " in ask(client, "x", "again") for client in clients)


@needs_two_cores
def test_requests_of_both_become_one_batch(two: LiveServer, tmp_path: Path) -> None:
    assert two.register("wide.mar").status_code == 200
    name = "modelyard_queue_time_seconds_count"
    gate = tmp_path / "gate"
    with connections(two, 9) as clients:
        first, *others = clients
        first.sendall(request("/predictions/wide", str(gate).encode()))
        poll(lambda: two.metric(name, model="wide") == 1, "the worker is busy")
        for at, client in enumerate(others):
            client.sendall(request("/predictions/wide", str(at).encode()))
        poll(lambda: two.metric(name, model="wide") == 9, "the others wait at the worker")
        gate.touch()
        answers = [json.loads(read_one(client).partition(b"\r\n\r\n")[2]) for client in clients]
    assert [sorted(answer["batch"]) for answer in answers[1:]] == [list("01234567")] * 8


@needs_two_cores
def test_a_client_that_leaves_the_queue_costs_no_work(two: LiveServer, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    name, labels = "modelyard_queue_time_seconds_count", {"model": "slow", "kind": "predict"}
    pids = frontends(two)
    before = two.metric(name, **labels)
    with connections(two, 4) as (first, second, *others):
        for client in (first, second):  # one is run, one is next
            client.sendall(request("/predictions/slow", str(gate).encode()))
        poll(lambda: two.metric(name, **labels) == before + 2, "the worker has all it takes")
        held = [socket_count(pid) for pid in pids]
        with socket.create_connection(two.address, 20) as leaving:
            leaving.sendall(request("/predictions/slow", b"left"))
            poll(lambda: two.metric("modelyard_queue_length", **labels) == 1, "it waits")
        poll(lambda: [socket_count(pid) for pid in pids] == held, "the frontend has noticed")
        for client in others:  # whatever a frontend says comes in order
            ask(client, "hello")
        gate.touch()
        for client in (first, second):
            assert b'"batch"' in read_one(client)
    assert two.metric("modelyard_queue_length", **labels) == 0
    assert two.metric(name, **labels) == before + 2


@needs_two_cores
def test_a_slow_reader_of_a_stream_fills_no_frontend(two: LiveServer, tmp_path: Path) -> None:
    def most_memory_kb() -> int:
        texts = [Path(f"/proc/{pid}/status").read_text(encoding="utf-8") for pid in frontends(two)]
        return max(int(text.partition("VmHWM:")[2].split()[0]) for text in texts)

    count, sent = 600, tmp_path / "sent"
    before = most_memory_kb()
    with socket.create_connection(two.address, 20) as client:
        client.sendall(request("/predictions/streamer", f"flood {count} {sent}".encode()))
        poll(sent.exists, "the handler has sent everything")
        received = bytearray()
        while data := client.recv(1 << 20):
            received += data
    body = bytes(received).partition(b"\r\n\r\n")[2]
    digits = b"".join(b"%x\r\n%s\r\n" % (1 << 16, b"%d" % (at % 10) * (1 << 16))
                      for at in range(count))  # fmt: skip
    assert body == digits + b"0\r\n\r\n"
    assert most_memory_kb() - before < count * 64 / 2


# -- life --------------------------------------------------------------------------------------


@needs_two_cores
def test_a_second_server_on_the_port_is_refused(two: LiveServer, tmp_path: Path) -> None:
    port = two.address[1]
    for count in (1, 2):
        arguments = start_arguments(tmp_path / str(count), two.store)
        second = modelyard(*arguments, f"--port={port}", f"--frontends={count}")
        assert second.returncode == 1
        assert f"port {port} on 127.0.0.1 is in use" in second.stderr
    assert two.predict("picky", "x").status_code == 200


@needs_two_cores
def test_a_killed_frontend_is_replaced_and_the_other_serves_on(two: LiveServer) -> None:
    victim, other = frontends(two)
    before = two.metric("modelyard_frontend_restarts_total")
    with connections(two, 4) as clients:
        for client in clients:
            ask(client, "hello")
        os.kill(victim, signal.SIGKILL)
        poll(lambda: not is_alive(victim), "it ends")
        lost = [client for client in clients if is_closed(client)]
        assert len(lost) == 2
        for client in clients:
            if client not in lost:
                assert b"fine: hello" in ask(client, "hello")
        poll(lambda: victim not in frontends(two), "it is replaced")
    pids = frontends(two)
    assert len(pids) == 2 and other in pids
    assert two.metric("modelyard_frontend_restarts_total") == before + 1
    assert f"frontend {victim} ended with SIGKILL; replacing it" in two.log
    held = [socket_count(pid) for pid in pids]
    with connections(two, 4) as clients:
        assert all(b"fine: hello" in ask(client, "hello") for client in clients)
        assert [socket_count(pid) - then for pid, then in zip(pids, held, strict=True)] == [2, 2]


@needs_two_cores
def test_connections_wait_for_frontends_that_cannot_take_them(two: LiveServer) -> None:
    pids, count = frontends(two), 600
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    with connections(two, count) as clients:  # more than the sockets to the frontends hold
        for client in clients:
            client.sendall(request("/ping", method="GET"))
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert all(read_one(client).startswith(b"HTTP/1.1 200 ") for client in clients)


@needs_two_cores
def test_a_connection_without_any_frontend_gets_the_next_one(two: LiveServer) -> None:
    for pid in frontends(two):
        os.kill(pid, signal.SIGKILL)
        poll(lambda pid=pid: not is_alive(pid), "it ends")  # type: ignore[misc]
    with connections(two, 2) as clients:
        assert all(b"fine: hello" in ask(client, "hello") for client in clients)


def is_closed(client: socket.socket) -> bool:
    """Return whether the peer has gone, of a connection without a request."""
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True
    except BlockingIOError:
        return False
    finally:
        client.settimeout(20)


@needs_two_cores
def test_a_killed_server_takes_its_frontends_along(store: Path, tmp_path: Path) -> None:
    server = start_server(
        tmp_path / "state", store, "--workers=1", "--models=picky", "--frontends=2"
    )
    children = descendants(server.pid)
    assert set(server.about["frontends"]) < children
    with socket.create_connection(server.address, 20) as client:
        ask(client, "hello")
        server.close_clients()
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        poll(lambda: not any(map(is_alive, children)), "every child process ends", 5)
        assert client.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address, 20)


def test_a_number_of_frontends_that_makes_no_sense_is_refused() -> None:
    for count in (0, CORES + 1):
        with pytest.raises(StartError, match=f"frontends: .*got {count}"):
            load_settings({"frontends": count}, None, {})
    with pytest.raises(StartError, match=f"there are {CORES}"):
        load_settings({}, None, {"MODELYARD_FRONTENDS": str(CORES + 1)})
