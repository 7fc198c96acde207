"""One way for every request: no task, no garbage, whoever sends it and however it arrives."""

from __future__ import annotations

import asyncio
import gc
import http.client
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
import uvloop

from modelyard.serve.api.inference import Calls, right_of
from modelyard.serve.api.routes import Routes
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import Registry
from modelyard.serve.control.state import StateDir
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.front.begin import Front, ServerState
from modelyard.serve.http.application import Answers, Application, TokenCheck
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
]
COUNT = 100
OURS = ("archiver", "base", "plugins", "serve")
"""Folders of what a server imports."""


@asynccontextmanager
async def inference(folder: Path) -> AsyncIterator[Address]:
    """Serve the model `picky` in this process."""
    store, state_dir = folder / "store", folder / "state"
    build_archive(store, "picky")
    settings = load_settings(
        {"model_store": store, "state_dir": state_dir, "device": "cpu"}, None, {}
    )
    StateDir(state_dir).create()
    registry, metrics, state = Registry(), Metrics(), ServerState()
    lifecycle = Lifecycle(Policy(settings), registry, metrics)
    state.is_starting = False
    answers = Answers(state)
    calls = Calls(Front(registry, metrics, state), answers)
    routes = Routes("", "", answers)
    listener = Listener(
        Application(TokenCheck(None, right_of), answers, routes, calls), Address("127.0.0.1", 0)
    )
    try:
        await lifecycle.register("picky", None, 1)
        await listener.start()
        yield listener.address
    finally:
        await listener.stop_accepting()
        listener.close_idle(0)
        await lifecycle.stop(0)


# -- no task -----------------------------------------------------------------------------------


def by_socket(*cuts: int) -> Callable[[Address, str], None]:
    """Return a client that sends each request in pieces, cut at these places from its body."""

    def send(address: Address, path: str) -> None:
        start, body = head(path, 5), b"hello"
        request = start + body
        places = [0, *(len(start) + cut for cut in cuts), len(request)]
        with socket.create_connection((address.host, address.port), 20) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(COUNT):
                for begin, end in pairwise(places):
                    client.sendall(request[begin:end])
                answer = b""
                while not answer.endswith(b"fine: hello"):
                    answer += client.recv(4096)
                assert answer.startswith(b"HTTP/1.1 200 ")

    return send


def by_http_client(address: Address, path: str) -> None:
    client = http.client.HTTPConnection(address.host, address.port, timeout=20)
    for _ in range(COUNT):
        client.request("POST", path, b"hello")
        assert client.getresponse().read() == b"fine: hello"
    client.close()


def by_httpx(address: Address, path: str) -> None:
    with httpx.Client(base_url=str(address), timeout=20, verify=False) as client:
        for _ in range(COUNT):
            assert client.post(path, content=b"hello").text == "fine: hello"


def in_chunks(address: Address, path: str) -> None:
    with httpx.Client(base_url=str(address), timeout=20, verify=False) as client:
        for _ in range(COUNT):
            assert client.post(path, content=iter([b"he", b"llo"])).text == "fine: hello"


WAYS = {
    "at once": by_socket(),
    "body apart": by_socket(0),
    "in three": by_socket(-10, 2),
    "http.client": by_http_client,
    "httpx": by_httpx,
    "chunked": in_chunks,
}


def test_no_request_needs_a_task(tmp_path: Path) -> None:
    tasks: list[str] = []
    found: dict[tuple[str, str], list[str]] = {}

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        tasks.append(coroutine.__qualname__)
        return asyncio.Task(coroutine, loop=loop, **more)

    async def scenario() -> None:
        async with inference(tmp_path) as address:
            loop = asyncio.get_running_loop()
            for path in ("/predictions/picky", "/explanations/picky"):
                # Those that explain start with the first.
                await loop.run_in_executor(None, WAYS["at once"], address, path)
                for way, send in WAYS.items():
                    tasks.clear()
                    loop.set_task_factory(factory)
                    await loop.run_in_executor(None, send, address, path)
                    loop.set_task_factory(None)
                    found[way, path] = [task for task in tasks if task != "Listener._adopt"]

    uvloop.run(scenario())
    assert len(found) == 2 * len(WAYS)
    assert not any(found.values()), found


@pytest.mark.parametrize("apart", [False, True], ids=["at once", "body apart"])
def test_requests_leave_nothing_to_the_collector(tmp_path: Path, apart: bool) -> None:
    """Objects in a circle are found by going through all there are, and that stops the process."""
    start, body = head("/predictions/picky", 5), b"hello"

    async def scenario() -> int:
        async with inference(tmp_path) as address:
            reader, writer = await asyncio.open_connection(address.host, address.port)

            async def send(count: int) -> None:
                for _ in range(count):
                    writer.write(start if apart else start + body)
                    if apart:
                        await asyncio.sleep(0.001)
                        writer.write(body)
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
            return found

    assert uvloop.run(scenario()) < 200


MOST_FILES, MOST_CALLS = 14, 91
"""Of ours that a prediction passes through in the server; docs/concepts.md says the same."""


def test_a_prediction_passes_through_few_files_and_calls(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    seen: list[list[tuple[str, str]]] = []
    """Of each request; what timers do now and then comes on top of some, of most under load."""

    @cache
    def resolve(name: str) -> Path:
        """A worker whose answers take this process long is given rests: to look may not be slow."""
        return Path(name).resolve()

    def note(frame: FrameType, event: str, argument: object) -> None:
        file = resolve(frame.f_code.co_filename)
        if event == "call" and any(file.is_relative_to(root / each) for each in OURS):
            seen[-1].append((str(file.relative_to(root)), frame.f_code.co_name))

    async def scenario() -> None:
        async with inference(tmp_path) as address:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            request = head("/predictions/picky", 5) + b"hello"
            for sent in range(1020):
                if sent >= 20:  # all is warm
                    seen.append([])
                    sys.setprofile(note)
                writer.write(request)
                assert (await reader.readuntil(b"fine: hello")).startswith(b"HTTP/1.1 200 ")
                if seen and len(seen[-1]) <= MOST_CALLS:
                    break
            sys.setprofile(None)
            writer.close()

    uvloop.run(scenario())
    fewest = min(seen, key=len)
    files = sorted({file for file, _ in fewest})
    assert len(files) <= MOST_FILES, files
    assert len(fewest) <= MOST_CALLS, Counter(fewest).most_common()


def test_the_page_says_so() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text(encoding="utf-8")
    said = f"at most {MOST_FILES} files of the server, in {MOST_CALLS} calls"
    assert said in " ".join(page.split())


# -- however it arrives, a request gets the same answer -----------------------------------------


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
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "X-Request-Id: one",
        f"Content-Length: {length}",
    ]
    return "\r\n".join((*lines, *more, "", "")).encode()


@pytest.mark.parametrize(
    ("path", "body", "more"),
    [
        *((path, body, ()) for path, body in REQUESTS),
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
    chunked = start.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
    chunks = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
    assert at_once == talk(server, chunked, chunks + b"0\r\n\r\n")


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
