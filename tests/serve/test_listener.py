"""Addresses: what is bound, what is refused, what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import pytest
import uvloop

from modelyard.serve.dataplane.wire import Buffer
from modelyard.serve.errors import StartError
from modelyard.serve.http.connection import SLICE_BYTES, Answer, Connection, RequestResponseCycle
from modelyard.serve.http.listener import Listener
from modelyard.serve.http.tls import tls_context
from modelyard.serve.settings import Address, Settings


class Digests:
    """Answers with the digest of each body."""

    def accept(self, cycle: RequestResponseCycle) -> None:
        def answer(parts: Sequence[Buffer]) -> None:
            digest = sha256(b"".join(parts)).hexdigest().encode()
            assert cycle.send_whole(200, [(b"content-length", b"64")], digest)

        cycle.read_body(answer)

    def refuse(self, error: Exception, cycle: RequestResponseCycle | None) -> Answer:
        return 400, [], str(error).encode()


class App:
    """Nobody asks it."""

    def accept(self, cycle: object) -> None:
        raise AssertionError

    def refuse(
        self, error: Exception, cycle: object
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        raise AssertionError


app = App()


@pytest.fixture
def left(tmp_path: Path) -> Iterator[tuple[Path, socket.socket]]:
    """A Unix socket that somebody listens on."""
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        listening.listen()
        yield path, listening


@pytest.mark.parametrize("piece", [1000, SLICE_BYTES - 1, SLICE_BYTES, 50_000, 1 << 20])
def test_a_long_body_in_any_pieces_is_whole_and_so_is_what_follows_it(piece: int) -> None:
    bodies = [bytes([at]) * size for at, size in enumerate((100_000, 3, 20_000, 0, 9000))]
    sent = b"".join(
        b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        for body in bodies
    )

    async def scenario() -> None:
        listener = Listener(Digests(), Address("127.0.0.1", 0))
        await listener.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.address.port)
        for at in range(0, len(sent), piece):
            writer.write(sent[at : at + piece])
            await asyncio.sleep(0)
        for body in bodies:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            assert head.startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(64) == sha256(body).hexdigest().encode()
        writer.close()
        await listener.stop_accepting()

    uvloop.run(scenario())


def test_the_socket_of_a_killed_server_is_taken_over(left: tuple[Path, socket.socket]) -> None:
    path, listening = left
    listening.close()
    listener = Listener(app, Address(path=path))
    assert listener.url == f"unix:{path}"
    listener.abandon()
    assert not path.exists()


def test_a_socket_that_answers_is_refused(left: tuple[Path, socket.socket]) -> None:
    path, _ = left
    with pytest.raises(StartError, match="is in use; choose another path"):
        Listener(app, Address(path=path))
    assert path.is_socket()


def test_a_file_is_never_taken_for_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(StartError, match="notes"):
        Listener(app, Address(path=path))
    assert path.read_text() == "mine"


def test_a_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="AF_UNIX path too long"):
        Listener(app, Address(path=tmp_path / ("x" * 120)))


def test_without_httptools_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.serve.http.listener.HAS_PARSER", False)
    with pytest.raises(StartError, match="pip install httptools"):
        Listener(app, Address())


def test_the_module_without_httptools_can_be_imported() -> None:
    """Else the server would end with a traceback in its log, not with a word on the terminal."""
    code = (
        "import sys; sys.modules['httptools'] = None\n"
        "import modelyard.serve.server, modelyard.serve.http.connection as c\n"
        "assert not c.HAS_PARSER"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


async def is_closed(address: Address, data: bytes = b"") -> None:
    """Send something, and return when the server closes the connection."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(data)
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):
                pass
    writer.close()


def test_a_tls_handshake_that_does_not_end_is_closed() -> None:
    async def scenario() -> None:
        context = tls_context(())
        address = Address("127.0.0.1", 0, is_tls=True)
        listener = Listener(app, address, Settings(head_timeout_s=0.2), lambda: context)
        await listener.start()
        for data in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"):
            await is_closed(listener.address, data)
        await listener.stop_accepting()

    uvloop.run(scenario())


class Counting(Listener):
    """Counts the connections that it opens."""

    opened = 0

    def _open(self, accepted: socket.socket) -> None:
        self.opened += 1
        super()._open(accepted)


HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize("is_unix", [False, True])
@pytest.mark.parametrize(
    ("sent", "is_refused"),
    [
        (b"\x16\x03\x01nonsense\r\n\r\n", True),
        (HEAD + b"A b: c\r\n\r\n", True),
        (HEAD + b"Host: another\r\n\r\n", True),
        (HEAD + b"content-length: 99999999999\r\n\r\n", True),
        (HEAD + b"content-length: 5\r\n\r\nhel", False),
        (HEAD + b"content-length: 0\r\n\r\n" + HEAD + b"A b: c\r\n\r\n", False),
        (HEAD + b"content-le", False),
    ],
    ids=["no HTTP", "header", "two hosts", "long", "half a body", "the second is", "half a head"],
)
def test_who_floods_is_answered_the_same_without_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_unix: bool, sent: bytes, is_refused: bool
) -> None:
    """Good requests of the same address are still taken, and so are those of others."""

    monkeypatch.setattr("modelyard.serve.http.listener.FLOOD", 3)
    monkeypatch.setattr("modelyard.serve.http.listener.NOTE_S", 60.0)  # a second may be over soon

    async def scenario() -> None:
        path = tmp_path / "api.sock" if is_unix else None
        listener = Counting(Digests(), Address("127.0.0.1", 0, path))
        await listener.start()

        async def ask(*parts: bytes, own: str = "127.0.0.66") -> bytes:
            """Send the first part while the loop stands still, as it does under a flood."""
            family = socket.AF_UNIX if is_unix else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as client:
                client.settimeout(20)
                if not is_unix:
                    client.bind((own, 0))
                address = listener.address
                client.connect(str(path) if is_unix else (address.host, address.port))
                client.sendall(parts[0])
                for part in parts[1:]:
                    await asyncio.sleep(0.05)
                    client.sendall(part)
                client.shutdown(socket.SHUT_WR)
                return await asyncio.to_thread(client.makefile("rb").read)

        whole = HEAD + b"content-length: 5\r\n\r\nhello"
        digest = sha256(b"hello").hexdigest().encode()
        wanted = await ask(sent)
        for _ in range(4):
            await ask(b"nonsense\r\n\r\n")
        before = listener.opened
        assert await ask(sent) == wanted
        assert (listener.opened == before) == is_refused
        assert digest in await ask(whole)
        assert digest in await ask(whole[:20], whole[20:])
        if not is_unix:
            opened = listener.opened
            assert await ask(sent, own="127.0.0.67") == wanted
            assert listener.opened == opened + 1
        await listener.stop_accepting()

    uvloop.run(scenario())


def test_while_somebody_floods_clients_are_accepted_with_their_first_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or later, without: who says nothing at first is answered all the same."""
    monkeypatch.setattr("modelyard.serve.http.listener.FLOOD", 3)
    monkeypatch.setattr("modelyard.serve.http.listener.NOTE_S", 60.0)
    monkeypatch.setattr("modelyard.serve.http.listener.SWEEP_S", 60.0)

    async def scenario() -> None:
        listener = Counting(Digests(), Address("127.0.0.1", 0))
        await listener.start()

        async def ask(sent: bytes, after_s: float) -> tuple[int, bytes]:
            """Return how many connections were open before it was sent, and the answer."""
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.address.port)
            await asyncio.sleep(after_s)
            opened = listener.opened
            writer.write(sent)
            writer.write_eof()
            answer = await reader.read()
            writer.close()
            return opened, answer

        nonsense = b"nonsense\r\n\r\n"
        for _ in range(4):
            await ask(nonsense, 0)
        before = listener.opened
        assert (await ask(nonsense, 0.05))[0] == listener.opened == before
        whole = HEAD + b"content-length: 5\r\n\r\nhello"
        for after_s in (0.05, 3.5):
            opened, answer = await ask(whole, after_s)
            assert sha256(b"hello").hexdigest().encode() in answer
        assert opened == before + 2, "who says nothing for seconds is accepted"
        listener._sweep()
        assert (await ask(whole, 0.05))[0] == opened + 1, "at once, once nobody floods"
        await listener.stop_accepting()
        listener._sweep()  # which goes on while requests are answered still

    uvloop.run(scenario())


def test_what_is_refused_leaves_nothing_that_only_a_search_for_cycles_finds() -> None:
    """Of a flood's, such a search took 60 ms at once, in which nobody was answered."""

    async def scenario() -> None:
        listener = Listener(Digests(), Address("127.0.0.1", 0))
        await listener.start()
        for sent in (b"nonsense\r\n\r\n", HEAD + b"content-length: 99999999999\r\n\r\n"):
            await is_closed(listener.address, sent)
        while listener.connections:
            await asyncio.sleep(0.01)
        assert not [each for each in gc.get_objects() if isinstance(each, Connection)]
        await listener.stop_accepting()

    gc.collect()
    gc.disable()
    try:
        uvloop.run(scenario())
    finally:
        gc.enable()


def test_one_more_than_the_most_connections_closes_the_oldest() -> None:
    async def scenario() -> None:
        listener = Listener(app, Address("127.0.0.1", 0), Settings(max_connections=8))
        await listener.start()
        ended: list[int] = []

        async def wait(number: int, reader: asyncio.StreamReader) -> None:
            await reader.read()
            ended.append(number)

        writers, tasks = [], []
        for number in range(12):
            host, port = listener.address.host, listener.address.port
            reader, writer = await asyncio.open_connection(host, port)
            writers.append(writer)
            tasks.append(asyncio.create_task(wait(number, reader)))
            await asyncio.sleep(0.01)  # so that one is older than the other
        async with asyncio.timeout(20):
            while len(ended) < 4:
                await asyncio.sleep(0.01)
            assert sorted(ended) == [0, 1, 2, 3]
            while len(ended) < 12:
                listener.close_idle(0)
                await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        for writer in writers:
            writer.close()
        await listener.stop_accepting()

    uvloop.run(scenario())


@pytest.mark.parametrize(
    ("address", "is_loopback", "text"),
    [
        (Address("127.0.0.2", 1), True, "http://127.0.0.2:1"),
        (Address("localhost", 1, is_tls=True), True, "https://localhost:1"),
        (Address("::1", 1), True, "http://[::1]:1"),
        (Address("0.0.0.0", 1), False, "http://0.0.0.0:1"),
        (Address("some.host", 1), False, "http://some.host:1"),
        (Address(path=Path("/a")), True, "unix:/a"),
    ],
    ids=str,
)
def test_what_an_address_is(address: Address, is_loopback: bool, text: str) -> None:
    assert (address.is_loopback, str(address)) == (is_loopback, text)
