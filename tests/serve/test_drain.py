"""The end of a server under load: no connection that was accepted closes without an answer."""

from __future__ import annotations

import json
import signal
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serve.live import (
    LiveServer,
    build_archive,
    descendants,
    is_alive,
    poll,
    start_server,
)

ANSWERED, REFUSED, DROPPED = "answered", "refused at connect", "closed without an answer"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("drain")
    build_archive(store, "mortal", config="batchSize: 4\n")
    return store


@pytest.fixture
def options() -> tuple[str, ...]:
    return "--workers=1", "--models=mortal"


def request(body: bytes, *, keep_alive: bool) -> bytes:
    connection = b"keep-alive" if keep_alive else b"close"
    return (
        b"POST /predictions/mortal HTTP/1.1\r\nHost: localhost\r\nConnection: %s\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (connection, len(body), body)
    )


def read_answer(client: socket.socket) -> tuple[bytes, bytes]:
    """Return head and body of one answer; an empty head means that none came."""
    received = b""
    try:
        while b"\r\n\r\n" not in received:
            if not (data := client.recv(65536)):
                return b"", b""
            received += data
        head, _, body = received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        while len(body) < length:
            if not (data := client.recv(65536)):
                return b"", b""
            body += data
    except ConnectionError:
        return b"", b""
    return head, body


def one_shot(server: LiveServer, outcomes: Counter[str]) -> None:
    """Open a connection per request, until there is nobody to connect to."""
    while True:
        try:
            client = socket.create_connection(server.address, 20)
        except ConnectionRefusedError:
            outcomes[REFUSED] += 1
            return
        with client:
            client.sendall(request(b"sleep 0.01", keep_alive=False))
            outcomes[ANSWERED if is_good(*read_answer(client)) else DROPPED] += 1


def keep_alive(server: LiveServer, outcomes: Counter[str]) -> None:
    """Use one connection until an answer says that it closes, then open the next."""
    while True:
        try:
            client = socket.create_connection(server.address, 20)
        except ConnectionRefusedError:
            outcomes[REFUSED] += 1
            return
        with client:
            head = b""
            while b"connection: close" not in head:
                try:
                    client.sendall(request(b"sleep 0.01", keep_alive=True))
                except ConnectionError:
                    outcomes[DROPPED] += 1
                    break
                head, body = read_answer(client)
                outcomes[ANSWERED if is_good(head, body) else DROPPED] += 1
                if not head:
                    break


def is_good(head: bytes, body: bytes) -> bool:
    return head.startswith(b"HTTP/1.1 200 ") and b'"body":"sleep 0.01"' in body


@pytest.mark.parametrize("client", [one_shot, keep_alive])
def test_sigterm_under_load_closes_no_connection_without_an_answer(
    store: Path, tmp_path: Path, client: object, options: tuple[str, ...]
) -> None:
    assert callable(client)
    server = start_server(tmp_path / "state", store, *options)
    outcomes: Counter[str] = Counter()
    with ThreadPoolExecutor(16) as threads:
        clients = [threads.submit(client, server, outcomes) for _ in range(16)]
        poll(lambda: outcomes[ANSWERED] > 50, "the load runs")
        server.stop()
        for each in clients:
            each.result()
    assert outcomes[DROPPED] == 0, outcomes
    assert outcomes[REFUSED] == 16


def hold(server: LiveServer) -> socket.socket:
    """Send a request that never ends by itself, and return when a worker holds it."""
    client = socket.create_connection(server.address, 20)
    client.sendall(request(b"hang", keep_alive=True))
    poll(
        lambda: server.metric("modelyard_queue_time_seconds_count", model="mortal") == 1,
        "the request is handed over",
    )
    return client


def test_a_second_sigterm_ends_at_once_and_answers_what_is_held(
    store: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    server = start_server(tmp_path / "state", store, *options)
    children = descendants(server.pid)
    with hold(server) as client, socket.create_connection(server.address, 20) as idle:
        server.close_clients()
        server.signal(signal.SIGTERM)
        assert idle.recv(1) == b""  # the first signal has taken effect
        assert is_alive(server.pid)
        server.signal(signal.SIGTERM)
        head, body = read_answer(client)
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body)["type"] == "ServiceUnavailableException"
        assert server.wait(10) == 0
    assert not any(map(is_alive, children))
    assert not (server.state_dir / "server.json").exists()


def test_a_server_that_drains_is_not_ready_serves_on_and_answers_503_at_the_end(
    store: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    config = tmp_path / "modelyard.yaml"
    config.write_text("drain_delay_s: 3\ndrain_timeout_s: 0.5\n", encoding="utf-8")
    server = start_server(tmp_path / "state", store, *options, f"--config={config}")
    url = server.about["inference"]
    assert server.about["drain_timeout_s"] == 3.5
    with hold(server) as client, ThreadPoolExecutor(1) as threads:
        ended = threads.submit(server.stop)
        poll(
            lambda: httpx.get(f"{url}/health/ready", verify=False).status_code == 503,
            "it is not ready",
        )
        models = ("/v1/models/mortal", "/v2/models/mortal/ready")
        for path in ("/health/ready", "/v2/health/ready", *models):
            asked = httpx.get(f"{url}{path}", verify=False)
            assert (asked.status_code, asked.headers["retry-after"]) == (503, "1")
        served = httpx.get(f"{url}/v2/models/mortal", verify=False)  # by a connection of its own
        assert (served.status_code, served.headers["connection"]) == (200, "close")
        ended.result()
        head, body = read_answer(client)
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body)["type"] == "ServiceUnavailableException"
