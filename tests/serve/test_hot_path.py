"""The hot path beside the ways to the same answer: its own task, and the documented route."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from modelyard.serve.api.asgi import Api, Phase
from modelyard.serve.api.inference import Inference
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import Registry
from modelyard.serve.control.state import StateDir
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.http.auth import TokenCheck
from modelyard.serve.http.listener import Listener
from modelyard.serve.policy import Policy
from modelyard.serve.settings import Address, load_settings
from tests.serve.live import LiveServer, build_archive

REQUESTS = [
    ("/predictions/picky", b"hello"),
    ("/predictions/picky/1.0", b"hello"),
    ("/predictions/picky", b"own header"),
    ("/predictions/picky", b"status 202"),
    ("/predictions/picky", b"bad"),
    ("/predictions/picky", b"broken"),
    ("/predictions/picky", b""),
    ("/predictions/picky", b"x" * 2000),
    ("/explanations/picky", b"hello"),
    ("/explanations/picky/1.0", b"hello"),
    ("/predictions/cats", b"hello"),
    ("/predictions/picky/2.0", b"hello"),
    ("/predictions/idle", b"hello"),
]
Messages = list[MutableMapping[str, Any]]


async def ask(application: Any, path: str, body: bytes) -> Messages:
    sent: Messages = []
    received = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        return received.pop() if received else await asyncio.get_running_loop().create_future()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"here"), (b"x-request-id", b"one"), (b"content-type", b"x/y")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await application(scope, receive, send)
    return sent


def answer_of(messages: Messages) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Join what an application sent, as a client sees it."""
    start, *parts = messages
    headers = [(bytes(name), bytes(value)) for name, value in start["headers"]]
    return start["status"], headers, b"".join(part.get("body", b"") for part in parts)


@asynccontextmanager
async def inference(folder: Path) -> AsyncIterator[tuple[Inference, Lifecycle]]:
    """Serve the model `picky` in this process, without a port."""
    store, state = folder / "store", folder / "state"
    build_archive(store, "picky")
    settings = load_settings({"model_store": store, "state_dir": state, "device": "cpu"}, None, {})
    StateDir(state).create()
    registry, metrics, phase = Registry(), Metrics(), Phase()
    lifecycle = Lifecycle(Policy(settings), registry, metrics)
    phase.is_starting = False
    try:
        await lifecycle.register("picky", None, 1)
        yield Inference(registry, metrics, TokenCheck(None), phase, 1000), lifecycle
    finally:
        await lifecycle.stop(0)


def test_both_give_the_same_bytes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with inference(tmp_path) as (api, lifecycle):
            await lifecycle.register("picky", "idle", 0)
            for path, body in REQUESTS:
                hot = answer_of(await ask(api, path, body))
                documented = answer_of(
                    await ask(lambda *call: Api.__call__(api, *call), path, body)
                )
                if hot[0] == 413:  # only the hot path must keep the connection readable
                    hot[1].remove((b"connection", b"close"))
                assert (hot[0], sorted(hot[1]), hot[2]) == (
                    documented[0],
                    sorted(documented[1]),
                    documented[2],
                )

    uvloop.run(scenario())


def test_requests_leave_nothing_to_the_collector(tmp_path: Path) -> None:
    """Objects in a circle are found by going through all there are, and that stops the process."""
    request = head("/predictions/picky", 5) + b"hello"

    async def scenario() -> int:
        async with inference(tmp_path) as (api, _):
            listener = Listener(api, Address("127.0.0.1", 0))
            await listener.start()
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.address.port)

            async def send(count: int) -> None:
                for _ in range(count):
                    writer.write(request)
                    assert (await reader.readuntil(b"fine: hello")).startswith(b"HTTP/1.1 200 ")

            await send(20)
            gc.collect()
            gc.disable()
            try:
                await send(200)
                found = gc.collect()
            finally:
                gc.enable()
            writer.close()
            await listener.stop_accepting()
            return found

    assert uvloop.run(scenario()) < 200


# -- a request whose body is there with its head is answered without a task ---------------------


@pytest.fixture(scope="module")
def server(shared_server: LiveServer) -> LiveServer:
    for behaviour in ("picky", "streamer"):
        build_archive(shared_server.store, behaviour, config="minWorkers: 1\n")
    shared_server.register_all("picky", "streamer")
    return shared_server


def talk(server: LiveServer, *pieces: bytes) -> bytes:
    """Send the pieces, each when the server has taken the one before; return all that comes."""
    with socket.create_connection(server.address, 20) as client:
        for piece in pieces:
            client.sendall(piece)
            server.predict("picky", "hello")  # a turn of the loop that comes after this piece
        received = b""
        while data := client.recv(65536):
            received += data
    return received


def head(path: str, length: int, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "X-Request-Id: one", f"Content-Length: {length}"]
    return "\r\n".join((*lines, *more, "", "")).encode()


@pytest.mark.parametrize(
    ("path", "body", "more"),
    [
        *((path, body, ()) for path, body in REQUESTS if path != "/predictions/idle"),
        ("/predictions/streamer", b"count 3", ()),
        ("/predictions/picky", b"hello", ("X-Request-Timeout: soon",)),
        ("/predictions/picky?a=b", b"hello", ("X-Request-Timeout: 10s",)),
        ("/v2/models/picky/infer", b"hello", ()),
        ("/v2/models/nobody/infer", b"{}", ()),
    ],
    ids=str,
)
def test_a_body_that_comes_later_gets_the_same_bytes(
    server: LiveServer, path: str, body: bytes, more: tuple[str, ...]
) -> None:
    start = head(path, len(body), "Connection: close", *more)
    at_once = talk(server, start + body)
    assert at_once.startswith(b"HTTP/1.1 ")
    assert at_once == talk(server, start, body) == talk(server, start + body[:1], body[1:])


def test_answers_of_one_connection_keep_their_order(server: LiveServer) -> None:
    """Whole requests and one whose body is late, a stream, and one that is refused at once."""
    asked = [
        ("/predictions/picky", b"first"),
        ("/predictions/nobody", b"second"),
        ("/predictions/streamer", b"count 2"),
        ("/predictions/picky", b"fourth"),
    ]
    whole = b"".join(head(path, len(body)) + body for path, body in asked)
    last = head("/predictions/picky", 5, "Connection: close")
    received = talk(server, whole + last, b"fifth")
    places = [received.index(text) for text in (b"first", b"nobody", b"2.0", b"fourth", b"fifth")]
    assert places == sorted(places)
    assert received.count(b"HTTP/1.1 ") == 5
