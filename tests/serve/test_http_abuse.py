"""Clients that break HTTP, stall, flood and lie, beside a healthy model under load.

Groups E and G9 of the fault plan. After every test the same process answers, a good model predicts,
no worker has been replaced, and no file descriptor is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.live import LiveServer, build_archive, descendants, poll, running

HEAD_TIMEOUT_S = TRANSFER_TIMEOUT_S = 1.0
KEEP_ALIVE_S = 4.0
LIMIT = 4_000_000
CONFIG = f"""\
head_timeout_s: {HEAD_TIMEOUT_S}
transfer_timeout_s: {TRANSFER_TIMEOUT_S}
keep_alive_s: {KEEP_ALIVE_S}
max_request_bytes: {LIMIT}
"""
SWEEP_S = 1.0
SLACK_S = 3.0
"""For a machine under load."""
PAUSE_S = 0.02
"""Of a client of the load between two requests: without one, tests that wait would fill a core."""
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    build_archive(store, "echo", config="minWorkers: 1\n")
    build_archive(store, "mortal", config="minWorkers: 1\nbatchSize: 1\n")
    return store


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("abuse")
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    options = ("--models=echo,mortal", f"--config={folder / 'config.yaml'}")
    with running(folder / "state", store, *options) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left(server: LiveServer) -> Iterator[None]:
    children = descendants(server.pid)
    before = poll(lambda: settled(server), "the connections of the test before are gone")
    yield
    poll(lambda: descriptors(server) <= before, "every descriptor is given back", 10)
    assert request(server, b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 200
    assert predict(server, "mortal", b"well")["body"] == "well"
    assert descendants(server.pid) == children


def descriptors(server: LiveServer) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))  # noqa: PTH208 - counted only


def settled(server: LiveServer) -> int:
    """Return the number of descriptors once it stands still; 0 while it moves."""
    first = descriptors(server)
    time.sleep(0.05)
    return first if descriptors(server) == first else 0


def sleeps(server: LiveServer) -> bool:
    """Return whether the server process is asleep at each of 20 looks."""
    for _ in range(20):
        state = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state != "S":
            return False
        time.sleep(0.01)
    return True


def peak_bytes(server: LiveServer) -> int:
    """Return the largest resident size since `forget_peak`."""
    status = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def forget_peak(server: LiveServer) -> None:
    Path(f"/proc/{server.pid}/clear_refs").write_text("5", encoding="utf-8")


def connect(server: LiveServer, timeout_s: float = 20) -> socket.socket:
    return socket.create_connection(server.address, timeout_s)


def read_all(client: socket.socket) -> bytes:
    """Return everything until the server closes; a reset ends it too."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := client.recv(1 << 16):
            received += data
    return received


def answers(received: bytes) -> list[tuple[int, dict[bytes, bytes], bytes]]:
    """Take apart what a server sent: status, headers and body of every answer in it."""
    found = []
    while received:
        head, end, received = received.partition(b"\r\n\r\n")
        assert end, head
        first, *lines = head.split(b"\r\n")
        headers = {name.lower(): value for name, _, value in (x.partition(b": ") for x in lines)}
        length = int(headers.get(b"content-length", b"0"))
        assert len(received) >= length, "an answer is cut short"
        found.append((int(first.split()[1]), headers, received[:length]))
        received = received[length:]
    return found


def request(server: LiveServer, data: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """Send a request on a connection of its own, and return its answer."""
    with connect(server) as client:
        client.sendall(data.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        (answer,) = answers(read_all(client))
    return answer


def predict(server: LiveServer, model: str, body: bytes, *headers: bytes) -> dict[str, Any]:
    fields = b"".join(header + b"\r\n" for header in headers)
    head = b"POST /predictions/%s HTTP/1.1\r\nHost: localhost\r\n%s" % (model.encode(), fields)
    status, _, content = request(
        server, b"%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body)
    )
    assert status == 200, content
    answer: dict[str, Any] = json.loads(content)
    return answer


def refusal(received: bytes, status: int) -> dict[str, Any]:
    """Check that this is one answer, an error in our form that ends the connection."""
    ((found, headers, body),) = answers(received)
    error: dict[str, Any] = json.loads(body)
    assert (found, error["code"]) == (status, status), body
    assert headers[b"connection"] == b"close"
    assert headers[b"x-request-id"].decode() == error["request_id"]
    return error


class Load:
    """Clients of the healthy model, each on a connection that it keeps."""

    def __init__(self, server: LiveServer) -> None:
        self.outcomes: Counter[str] = Counter()
        self._server = server
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(4)]

    def _ask(self) -> None:
        with connect(self._server) as client:
            while not self._is_over.is_set():
                client.sendall(
                    b"POST /predictions/mortal HTTP/1.1\r\nHost: localhost\r\n"
                    b"Content-Length: 4\r\n\r\nwell"
                )
                data = client.recv(1 << 16)
                self.outcomes[data[:12].decode()] += 1
                if not data:
                    return
                self._is_over.wait(PAUSE_S)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        poll(lambda: sum(self.outcomes.values()) > 12, "the load runs")
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        assert set(self.outcomes) == {"HTTP/1.1 200"}, self.outcomes


@pytest.fixture
def load(server: LiveServer) -> Iterator[Load]:
    """Run the healthy model beside the test; each of its requests is answered."""
    with Load(server) as load:
        yield load


# -- E4: one request must not hide in another -------------------------------------------------

BODY = b"\r\n0\r\n\r\n"
BROKEN = {
    "length and chunked": CHUNKED + b"Content-Length: 6\r\n" + BODY,
    "chunked and length": POST + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n" + BODY,
    "two lengths": POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "one length twice": POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nab",
    "a list of lengths": POST + b"Content-Length: 2, 2\r\n\r\nab",
    "length +2": POST + b"Content-Length: +2\r\n\r\nab",
    "length -1": POST + b"Content-Length: -1\r\n\r\n",
    "length 0x2": POST + b"Content-Length: 0x2\r\n\r\nab",
    "length of 80 bits": POST + b"Content-Length: 999999999999999999999999\r\n\r\nab",
    "empty length": POST + b"Content-Length:\r\n\r\nab",
    "xchunked": POST + b"Transfer-Encoding: xchunked\r\n" + BODY,
    "chunked twice": CHUNKED + b"Transfer-Encoding: chunked\r\n" + BODY,
    "gzip, chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n" + BODY,
    "chunked, gzip": POST + b"Transfer-Encoding: chunked, gzip\r\n" + BODY,
    "identity": POST + b"Transfer-Encoding: identity\r\nContent-Length: 2\r\n\r\nab",
    "quoted coding": POST + b'Transfer-Encoding: "chunked"\r\n' + BODY,
    "coding after VT": POST + b"Transfer-Encoding: \x0bchunked\r\n" + BODY,
    "folded coding": POST + b"Transfer-Encoding:\r\n chunked\r\n" + BODY,
    "space before the colon": POST + b"Transfer-Encoding : chunked\r\n" + BODY,
    "chunked under 1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n" + BODY,
    "bare LF": b"POST /predictions/echo HTTP/1.1\nHost: x\n\n",
    "bare LF after a header": POST + b"A: b\n\r\n",
    "bare CR": POST + b"A: b\rC: d\r\n\r\n",
    "folded header": POST + b"A: b\r\n c\r\n\r\n",
    "NUL in a value": POST + b"A: b\0c\r\n\r\n",
    "NUL in a name": POST + b"A\0: c\r\n\r\n",
    "space in a name": POST + b"A b: c\r\n\r\n",
    "no name": POST + b": c\r\n\r\n",
    "no colon": POST + b"Abc\r\n\r\n",
    "space after the first line": b"POST / HTTP/1.1\r\n Host: localhost\r\n\r\n",
    "bad end of a chunk": CHUNKED + b"\r\n2\r\nabX\r\n0\r\n\r\n",
    "chunk ends with LF": CHUNKED + b"\r\n2\r\nab\n0\r\n\r\n",
    "chunk size ends with LF": CHUNKED + b"\r\n2\nab\r\n0\r\n\r\n",
    "chunk size 0x2": CHUNKED + b"\r\n0x2\r\nab\r\n0\r\n\r\n",
    "chunk size -2": CHUNKED + b"\r\n-2\r\nab\r\n0\r\n\r\n",
    "chunk size of 68 bits": CHUNKED + b"\r\n10000000000000002\r\nab\r\n0\r\n\r\n",
    "space after the chunk size": CHUNKED + b"\r\n2 \r\nab\r\n0\r\n\r\n",
    "LF in a chunk extension": CHUNKED + b"\r\n2;a\nb\r\nab\r\n0\r\n\r\n",
    "length in a trailer": CHUNKED + b"\r\n2\r\nab\r\n0\r\nContent-Length: 99\r\n\r\n",
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nHost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "CONNECT": b"CONNECT a:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "lower-case method": b"post / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "space in the target": b"GET /a b HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "target is not ASCII": b"GET /\xc3\xa9 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "target is not a path": b"GET a:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_what_is_no_http_gets_one_400_and_hides_nothing(server: LiveServer, data: bytes) -> None:
    for step in (len(data) + len(SMUGGLED), 7):
        whole = data + SMUGGLED
        with connect(server) as client:
            with contextlib.suppress(ConnectionError):
                for at in range(0, len(whole), step):
                    client.sendall(whole[at : at + step])
            error = refusal(read_all(client), 400)
        assert error["type"] == "BadRequestException"
        assert error["message"].startswith("this is not an HTTP/1.1 request: ")


GOOD = POST + b"Content-Length: 4\r\n\r\nwell"


def test_answers_before_a_broken_request_come_first(server: LiveServer, load: Load) -> None:
    with connect(server) as client:
        client.sendall(GOOD + GOOD + b"GET / HTTP/1.1\r\n\r\n" + SMUGGLED)
        found = answers(read_all(client))
    assert [status for status, _, _ in found] == [200, 200, 400]


def test_a_broken_body_takes_the_place_of_the_answer(server: LiveServer, load: Load) -> None:
    with connect(server) as client:
        client.sendall(GOOD + CHUNKED + b"\r\n2\r\nab\r\n")
        client.sendall(b"broken\r\n" + SMUGGLED)
        found = answers(read_all(client))
    assert [status for status, _, _ in found] == [200, 400]


@pytest.mark.parametrize(
    "offer",
    [b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n",
     b"Connection: Upgrade\r\nUpgrade: websocket\r\nX-Spelling: kept\r\n"],
    ids=["h2c, as Java's client offers", "websocket"],
)  # fmt: skip
@pytest.mark.parametrize("step", [1, 1 << 16], ids=["bytewise", "at once"])
def test_an_offer_to_change_the_protocol_is_passed_over(
    server: LiveServer, offer: bytes, step: int
) -> None:
    for framed in (b"Content-Length: 4\r\n\r\nwell", b"Transfer-Encoding: chunked\r\n\r\n"
                   b"4\r\nwell\r\n0\r\n\r\n"):  # fmt: skip
        data = POST + offer + framed + GOOD.replace(b"Host", b"Connection: close\r\nHost")
        with connect(server) as client:
            for at in range(0, len(data), step):
                client.sendall(data[at : at + step])
            found = answers(read_all(client))
        assert [json.loads(body)["body"] for _, _, body in found] == ["well", "well"]
        if b"X-Spelling" in offer:
            assert json.loads(found[0][2])["headers"]["X-Spelling"] == "kept"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET http://other.host/ping?a=b HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        (b"GET http://other.host HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        (b"POST * HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET /ping#part HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        (b"GET /ping HTTP/1.0\r\n\r\n", 200),
        (b"\r\n\r\nGET /ping HTTP/1.0\r\n\r\n", 200),
        (b"HEAD /predictions/echo HTTP/1.0\r\n\r\n", 405),
    ],
    ids=["absolute", "host alone", "asterisk", "fragment", "1.0", "empty lines", "HEAD"],
)
def test_what_looks_odd_and_is_http_is_answered(
    server: LiveServer, data: bytes, status: int
) -> None:
    with connect(server) as client:
        client.sendall(data)
        if b"HTTP/1.1" in data:
            client.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 %d " % status)


def test_trailers_reach_nobody(server: LiveServer) -> None:
    with connect(server) as client:
        client.sendall(
            POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"2\r\nab\r\n0\r\nAuthorization: Bearer me\r\nX-Trailer: one\r\n\r\n"
        )
        ((status, _, body),) = answers(read_all(client))
    assert status == 200
    names = {name.lower() for name in json.loads(body)["headers"]}
    assert "connection" in names
    assert not names & {"authorization", "x-trailer"}


def test_nothing_is_read_behind_the_last_request(server: LiveServer) -> None:
    with connect(server) as client:
        client.sendall(GOOD.replace(b"Host", b"Connection: close\r\nHost") + SMUGGLED)
        assert [status for status, _, _ in answers(read_all(client))] == [200]


def test_a_body_is_asked_for_by_who_expects_it(server: LiveServer) -> None:
    head = POST + b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    with connect(server) as client:
        client.sendall(head % 4)
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"well")
        assert answers(read_all(client))[0][0] == 200
    with connect(server) as client:
        client.sendall(head % (LIMIT + 1))
        assert client.recv(12) == b"HTTP/1.1 413"


# -- E5: heads and chunks that cost more than they bring --------------------------------------


def chunked(count: int, extension: bytes = b"") -> bytes:
    """Return a body of single bytes."""
    return (b"1" + extension + b"\r\nx\r\n") * count + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (POST + b"A: " + b"a" * 100_000 + b"\r\n\r\n", 431),
        (POST + b"a" * 100_000 + b": a\r\n\r\n", 431),
        (POST + b"".join(b"A%d: a\r\n" % at for at in range(10_000)) + b"\r\n", 431),
        (POST + b"".join(b"A%d: a\r\n" % at for at in range(1000)) + b"\r\n", 431),
        (POST + b"A: a\r\n" * 1000 + b"\r\n", 431),
        (b"GET /" + b"a" * 17_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
        (b"GET /?" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
        (CHUNKED + b"\r\n" + chunked(1, b";" + b"a" * 100_000), 400),
        (CHUNKED + b"\r\n" + chunked(1000, b";" + b"a" * 100), 400),
        (CHUNKED + b"\r\n" + chunked(3_000_000), 400),
        (CHUNKED + b"\r\n0\r\n" + b"A: a\r\n" * 20_000 + b"\r\n", 400),
        (CHUNKED + b"\r\n0\r\nA: " + b"a" * 100_000 + b"\r\n\r\n", 400),
        (b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000, 200),
    ],
    ids=[
        "a header of 100 KB", "a name of 100 KB", "10,000 headers", "1,001 headers",
        "a header 1,000 times", "a path of 17 KB", "a query of 200 KB", "an extension of 100 KB",
        "1,000 extensions", "3 MB of single bytes", "20,000 trailers", "a trailer of 100 KB",
        "5,000 requests at once",
    ],
)  # fmt: skip
def test_what_costs_more_than_it_brings_is_refused(
    server: LiveServer, data: bytes, status: int
) -> None:
    with connect(server) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(data)
        received = read_all(client)
    *_, last = answers(received)
    assert received.startswith(b"HTTP/1.1 %d " % status)
    assert last[0] in (400, 414, 431)
    assert json.loads(last[2])["code"] == last[0]


@pytest.mark.parametrize(
    "data",
    [
        POST + b"A: " + b"a" * 60_000 + b"\r\nContent-Length: 4\r\n\r\nwell",
        b"POST /predictions/echo?" + b"a" * 15_000 + b" HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: 4\r\n\r\nwell",
        CHUNKED + b"\r\n4;" + b"a" * 8192 + b"\r\nwell\r\n0\r\n\r\n",
        CHUNKED + b"\r\n" + b"c\r\nwell known..\r\n" * 50_000 + b"0\r\n\r\n",
        CHUNKED + b"\r\n" + chunked(1000),
    ],
    ids=["a header of 60 KB", "a query of 15 KB", "an extension of 8 KB", "short chunks", "bytes"],
)
def test_what_is_large_and_within_the_limits_is_answered(server: LiveServer, data: bytes) -> None:
    status, _, body = request(server, data)
    assert status == 200, body


# -- E1, E2: clients that stall ---------------------------------------------------------------


def test_heads_that_do_not_end_are_closed_and_nobody_notices(
    server: LiveServer, load: Load
) -> None:
    before = load.outcomes["HTTP/1.1 200"]
    began = time.monotonic()
    clients = [connect(server) for _ in range(200)]
    for client in clients:
        client.sendall(b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nX-")
    for client in clients:
        with client:
            error = refusal(read_all(client), 408)
            assert error["type"] == "RequestTimeoutException"
    assert time.monotonic() - began >= HEAD_TIMEOUT_S
    assert load.outcomes["HTTP/1.1 200"] > before + 20


def test_a_head_that_comes_byte_by_byte_has_no_more_time(server: LiveServer) -> None:
    with connect(server) as client:
        client.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\nA: ")
        client.settimeout(0.1)
        received = b""
        deadline = time.monotonic() + HEAD_TIMEOUT_S + SWEEP_S + SLACK_S
        while not received and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                client.sendall(b"a")
                received = client.recv(1 << 16)
        client.settimeout(20)
        refusal(received + read_all(client), 408)


def handed_over(server: LiveServer) -> str:
    """Return how many requests for `echo` its workers have been given, as the metrics say it."""
    text = httpx.get(f"{server.about['metrics']}/metrics", verify=False).text
    name = "modelyard_queue_time_seconds_count{"
    return next(line for line in text.splitlines() if line.startswith(name) and "echo" in line)


@pytest.mark.parametrize(
    "head", [POST + b"Content-Length: 1000\r\n\r\n", CHUNKED + b"\r\n"], ids=["length", "chunked"]
)
@pytest.mark.parametrize("drip", [b"", b"1\r\nx\r\n"], ids=["nothing", "drops"])
def test_a_body_that_does_not_come_is_answered_408(
    server: LiveServer, load: Load, head: bytes, drip: bytes
) -> None:
    before = handed_over(server)
    began = time.monotonic()
    with connect(server) as client:
        client.sendall(head)
        client.settimeout(0.2)
        received = b""
        while not received and time.monotonic() - began < 2 * TRANSFER_TIMEOUT_S + 3 + SLACK_S:
            with contextlib.suppress(TimeoutError):
                client.sendall(drip)
                received = client.recv(1 << 16)
        client.settimeout(20)
        error = refusal(received + read_all(client), 408)
    assert "500 bytes/s" in error["message"]
    assert time.monotonic() - began >= TRANSFER_TIMEOUT_S
    assert handed_over(server) == before


def test_a_body_that_comes_fast_enough_may_take_its_time(server: LiveServer) -> None:
    with connect(server) as client:
        client.sendall(POST + b"Connection: close\r\nContent-Length: 30000\r\n\r\n")
        for _ in range(30):
            client.sendall(b"x" * 1000)
            time.sleep(0.1)
        assert answers(read_all(client))[0][0] == 200


def test_connections_without_a_request_are_closed(server: LiveServer) -> None:
    with connect(server) as fresh, connect(server) as used:
        used.sendall(GOOD)
        assert used.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert fresh.recv(1) == used.recv(1) == b""


# -- E3: bodies over the limit ----------------------------------------------------------------


def test_a_body_that_is_declared_too_large_is_refused_before_it_is_sent(
    server: LiveServer, load: Load
) -> None:
    with connect(server) as client:
        client.sendall(POST + b"Content-Length: %d\r\n\r\n" % (LIMIT + 1))
        assert client.recv(12) == b"HTTP/1.1 413"


def test_a_body_without_an_end_is_refused_as_it_crosses_the_limit(
    server: LiveServer, load: Load
) -> None:
    forget_peak(server)
    before = peak_bytes(server)
    piece = b"%x\r\n%s\r\n" % (1 << 20, bytes(1 << 20))
    began = time.monotonic()
    with connect(server) as client:
        client.sendall(CHUNKED + b"\r\n" + piece * 4)
        assert client.recv(12) == b"HTTP/1.1 413"
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < 20:
                client.sendall(piece)
    assert peak_bytes(server) - before < 2 * LIMIT


def test_a_body_that_crosses_the_limit_by_little_is_refused_as_it_does(
    server: LiveServer, load: Load
) -> None:
    size = LIMIT + 1000
    with connect(server) as client:
        client.sendall(CHUNKED + b"\r\n%x\r\n%s\r\n" % (size, bytes(size)))
        assert client.recv(12) == b"HTTP/1.1 413"


# -- E7: clients that leave, or read nothing --------------------------------------------------


def test_an_answer_that_is_not_read_is_given_up(server: LiveServer, load: Load) -> None:
    before = descriptors(server)
    body = b"x" * (LIMIT - 1000)
    data = POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.address)
        client.settimeout(0.5)
        with contextlib.suppress(TimeoutError, ConnectionError):
            for _ in range(20):  # the kernel takes a few answers; then nothing moves
                client.sendall(data)
        poll(lambda: descriptors(server) < before + 1, "it is given up", 20)
        client.settimeout(5)
        with pytest.raises(ConnectionResetError):
            while client.recv(1 << 20):
                pass


@pytest.mark.parametrize("is_reset", [False, True], ids=["half-close", "reset"])
@pytest.mark.parametrize("part", [b"", b"ab"], ids=["mid-body", "waiting for the answer"])
def test_a_client_that_leaves_frees_its_place(
    server: LiveServer, load: Load, is_reset: bool, part: bytes
) -> None:
    with connect(server) as client:
        client.sendall(POST + b"Content-Length: 2\r\n\r\n" + part)
        if is_reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            client.shutdown(socket.SHUT_WR)
            assert len(answers(read_all(client))) <= len(part)


# -- E8: bodies that lie ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [(b"[" * 100_000, 400), (b'{"a":' * 100_000, 400), (b"1" * 1_000_000, 400),
     (b"[" + b"9" * 1_000_000 + b"]", 400), (b"[1e400]", 400), (b"NaN", 400),
     (b'{"a": Infinity}', 400), (b'{"a": 1, "a": 2}', 400), (b'"\\ud800"', 400),
     # `echo` takes everything; what is not valid JSON comes as bytes.
     (b'"\xff"', 200), (b"\0", 200), (b"\xef\xbb\xbf{}", 200)],
    ids=["deep list", "deep object", "long number", "long number in a list", "infinite number",
         "NaN", "Infinity", "duplicate keys", "lone surrogate", "not UTF-8", "NUL", "BOM"],
)  # fmt: skip
def test_json_that_lies_ends_in_one_answer(
    server: LiveServer, load: Load, body: bytes, expected: int
) -> None:
    head = POST + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    status, _, content = request(server, head + body)
    assert status == expected, content


# -- G9: no descriptors, no room --------------------------------------------------------------


@pytest.fixture
def small(store: Path, tmp_path: Path) -> Iterator[LiveServer]:
    """A server of its own that may open 128 files."""
    with running(tmp_path / "state", store, "--models=mortal") as server:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (128, 4096))
        yield server


def test_2000_idle_connections_keep_nobody_out(small: LiveServer) -> None:
    predict(small, "mortal", b"well")
    before = descriptors(small)
    idle = [connect(small) for _ in range(2000)]
    poll(lambda: descriptors(small) >= 90, "the descriptors are taken")
    for _ in range(5):
        assert predict(small, "mortal", b"well")["body"] == "well"
    assert small.describe("mortal")["workers"]
    scaled = small.management.put("/models/mortal?min_worker=2")
    assert scaled.is_success, scaled.text
    assert descriptors(small) <= 128
    poll(lambda: len(small.worker_pids("mortal")) == 2, "a worker starts")
    poll(lambda: sleeps(small), "the server waits and does not spin")
    for client in idle:
        client.close()
    small.close_clients()
    poll(lambda: descriptors(small) <= before + 8, "the descriptors are given back")
    assert small.log.count("cannot accept") < 10


def test_while_all_connections_are_busy_new_ones_wait(small: LiveServer, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    body = f"until {gate}".encode()
    data = b"POST /predictions/mortal HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(small)) for _ in range(90)]
        for client in clients:
            client.sendall(data % (len(body), body))
        poll(lambda: descriptors(small) >= 96, "the descriptors are taken")
        assert small.describe("mortal")["workers"]
        poll(lambda: sleeps(small), "the server waits and does not spin")
        gate.touch()
        for client in clients:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
