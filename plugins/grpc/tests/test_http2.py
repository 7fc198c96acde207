"""HTTP/2 frame by frame: what a client may do, and what it may not cost."""

from __future__ import annotations

import asyncio
import gc
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from hpack import Decoder, Encoder

from modelyard.plugins.grpc import http2
from modelyard.plugins.grpc.http2 import (
    ACK,
    ALLOWANCE,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PIECES,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    STREAMS,
    WINDOW_UPDATE,
    Code,
    frame,
)
from modelyard.plugins.grpc.rpc import Rpc, RpcError, Services, Status
from modelyard.serve.http.connection import PREFACE, Answer, Limits, RequestResponseCycle
from modelyard.serve.http.listener import Listener
from modelyard.serve.settings import Address

ECHO = "/x.Y/Echo"
HANG = "/x.Y/Hang"
COUNT = "/x.Y/Count"
"""Answers with the number of pieces that its message has."""
LIMIT = 1 << 20


class App:
    """Answers gRPC by HTTP/2, and nothing else."""

    def __init__(self) -> None:
        self.left: list[Rpc] = []
        self.begun: list[Rpc] = []
        self.streams = Services(
            {ECHO: self._echo, HANG: self._hang, COUNT: self._count}, _pass, LIMIT
        )

    def _count(self, rpc: Rpc) -> None:
        rpc.unary(lambda message: rpc.reply(b"%d" % len(message.pieces)))

    def _echo(self, rpc: Rpc) -> None:
        rpc.unary(lambda message: rpc.reply(bytes(message)))

    def _hang(self, rpc: Rpc) -> None:
        self.begun.append(rpc)
        rpc.on_left = lambda: self.left.append(rpc)

    def accept(self, cycle: RequestResponseCycle) -> None:
        """Answer HTTP/1.1."""
        cycle.send_whole(200, [(b"content-length", b"2")], b"ok")

    def refuse(self, error: Exception, cycle: RequestResponseCycle | None) -> Answer:
        """Say what is wrong."""
        return 400, [], str(error).encode()


def _pass(rpc: Rpc) -> None:
    pass


class Client:
    """One connection, frame by frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.encoder, self.decoder = Encoder(), Decoder()
        self.headers: dict[int, list[dict[str, str]]] = {}
        self.data: dict[int, bytes] = {}
        self.resets: dict[int, int] = {}
        self.goaways: list[tuple[int, int]] = []
        self.pings = self.acks = 0
        self.windows: dict[int, int] = {}
        self.is_closed = False

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    def block(self, path: str = ECHO, **more: str) -> bytes:
        """Return a request's header block."""
        fields = {
            ":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost",
            "content-type": "application/grpc", "te": "trailers", **more,
        }  # fmt: skip
        return bytes(self.encoder.encode([(k.replace("_", "-"), v) for k, v in fields.items()]))

    def open(self, id: int, path: str = ECHO, flags: int = 0, **more: str) -> None:
        self.send(frame(HEADERS, END_HEADERS | flags, id, self.block(path, **more)))

    def ask(self, id: int, message: bytes = b"hello", path: str = ECHO) -> None:
        self.open(id, path)
        self.send(frame(DATA, END_STREAM, id, grpc(message)))

    async def read(self) -> bool:
        """Take one frame; return False at the end."""
        try:
            head = await self.reader.readexactly(9)
            length, kind, flags, id = (
                int.from_bytes(head[:3]), head[3], head[4], int.from_bytes(head[5:])
            )  # fmt: skip
            payload = await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_closed = True
            return False
        if kind == HEADERS:
            self.headers.setdefault(id, []).append(
                {str(name): str(value) for name, value in self.decoder.decode(payload)}
            )
        elif kind == DATA:
            self.data[id] = self.data.get(id, b"") + payload
        elif kind == RST_STREAM:
            self.resets[id] = struct.unpack(">I", payload)[0]
        elif kind == GOAWAY:
            self.goaways.append(struct.unpack(">II", payload[:8]))
        elif kind == PING:
            self.pings += 1
        elif kind == SETTINGS and flags & ACK:
            self.acks += 1
        elif kind == WINDOW_UPDATE:
            self.windows[id] = self.windows.get(id, 0) + struct.unpack(">I", payload)[0]
        return True

    async def until(self, is_met: Callable[[], object]) -> None:
        """Take frames until something is met."""
        async with asyncio.timeout(10):
            while not is_met():
                assert await self.read(), f"closed: {self.goaways} {self.resets}"

    async def end(self) -> None:
        """Take frames until the server closes."""
        async with asyncio.timeout(10):
            while await self.read():
                pass

    def status(self, id: int) -> str | None:
        """Return the status of a call, None as long as it is not there."""
        for headers in self.headers.get(id, ()):
            if "grpc-status" in headers:
                return headers["grpc-status"]
        return None

    async def answer(self, id: int) -> bytes:
        """Return the message that answers a call."""
        await self.until(lambda: self.status(id) is not None)
        assert self.status(id) == "0", self.headers[id]
        return self.data[id][5:]


def grpc(message: bytes) -> bytes:
    """Return a message as gRPC writes it."""
    return b"\0" + struct.pack(">I", len(message)) + message


@asynccontextmanager
async def connected(
    limits: Limits = Limits(),  # noqa: B008 - frozen
    settings: bytes = b"",
    starts: bool = True,
) -> AsyncIterator[tuple[Client, App, Listener]]:
    """Yield a client of a server."""
    app = App()
    listener = Listener(app, Address("127.0.0.1", 0), limits)
    await listener.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.address.port)
    client = Client(reader, writer)
    try:
        if starts:
            client.send(PREFACE, frame(SETTINGS, 0, 0, settings))
        yield client, app, listener
    finally:
        writer.close()
        await listener.stop_accepting()
        listener.close_idle(0)


def run(test: Callable[[], Awaitable[Any]]) -> None:
    """Run an asynchronous test."""
    uvloop.run(asyncio.wait_for(test(), 30))


def test_calls_one_after_another_and_together() -> None:
    async def test() -> None:
        async with connected() as (client, _, _):
            client.ask(1)
            assert await client.answer(1) == b"hello"
            for id in range(3, 203, 2):
                client.ask(id, b"%d" % id)
            for id in range(3, 203, 2):
                assert await client.answer(id) == b"%d" % id

    run(test)


def test_a_preface_byte_by_byte_and_http_1_on_the_same_port() -> None:
    async def test() -> None:
        async with connected(starts=False) as (client, _, listener):
            for byte in PREFACE + frame(SETTINGS, 0, 0):
                client.send(bytes([byte]))
                await client.writer.drain()
                await asyncio.sleep(0)
            client.ask(1)
            assert await client.answer(1) == b"hello"
            for start in (b"P", b"PRI", b""):
                reader, writer = await asyncio.open_connection("127.0.0.1", listener.address.port)
                if start == b"PRI":
                    writer.write(b"PRI")
                    await asyncio.sleep(0.01)
                    writer.write(b"X / HTTP/1.1\r\nhost: x\r\n\r\n")
                    assert (await reader.read(100)).startswith(b"HTTP/1.1 400")
                else:
                    writer.write(start)
                    await asyncio.sleep(0.01)
                    writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\n\r\n"[len(start) :])
                    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
                writer.close()

    run(test)


def test_an_answer_larger_than_the_windows_waits_for_them() -> None:
    async def test() -> None:
        settings = struct.pack(">HI", http2.INITIAL_WINDOW, 10)
        async with connected(settings=settings) as (client, _, _):
            message = bytes(range(256)) * 1000
            client.ask(1, message)
            await client.until(lambda: len(client.data.get(1, b"")) == 10)
            # A larger initial window holds for open streams, too; the connection's is 65,535.
            client.send(frame(SETTINGS, 0, 0, struct.pack(">HI", http2.INITIAL_WINDOW, 1 << 20)))
            await client.until(lambda: len(client.data[1]) == 65_535)
            client.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 20)))
            assert await client.answer(1) == message

    run(test)


def test_a_message_in_many_frames_with_padding_and_continuations() -> None:
    async def test() -> None:
        async with connected() as (client, _, _):
            block = client.block()
            client.send(
                frame(HEADERS, 0, 1, block[:5]),
                frame(CONTINUATION, 0, 1, block[5:9]),
                frame(CONTINUATION, END_HEADERS, 1, block[9:]),
            )
            data = grpc(b"x" * 1000)
            for at in range(0, len(data), 7):
                client.send(frame(DATA, PADDED, 1, b"\x03" + data[at : at + 7] + b"\0\0\0"))
            client.send(frame(DATA, END_STREAM, 1))
            assert await client.answer(1) == b"x" * 1000

    run(test)


def test_a_call_that_is_over_leaves_nothing_to_the_collector() -> None:
    async def test() -> None:
        async with connected() as (client, app, _):
            client.ask(1)
            await client.answer(1)
            gc.collect()
            gc.disable()
            try:
                for id in range(3, 203, 2):
                    client.ask(id)
                    await client.answer(id)
                client.open(203, HANG, END_STREAM)
                client.send(frame(RST_STREAM, 0, 203, struct.pack(">I", Code.CANCEL)))
                client.ask(205)
                await client.answer(205)
                app.left.clear()
                app.begun.clear()
                assert gc.collect() < 100
            finally:
                gc.enable()

    run(test)


def test_short_pieces_are_put_together_and_long_ones_kept() -> None:
    async def test() -> None:
        async with connected() as (client, _, _):
            data = grpc(bytes(50_000))
            for id, step, count in ((1, 10, 1), (3, 20_000, 3), (5, len(data), 1)):
                client.open(id, COUNT)
                for at in range(0, len(data), step):
                    flags = END_STREAM if at + step >= len(data) else 0
                    client.send(frame(DATA, flags, id, data[at : at + step]))
                assert int(await client.answer(id)) <= count

    run(test)


def test_a_crowd_of_requests_leaves_turns_to_others() -> None:
    """What one client sends at once is put off while others wait; nothing of it is lost."""

    async def test() -> None:
        async with connected() as (client, _, listener):
            client.ask(1)
            await client.answer(1)
            listener.turns._until = 0.0
            listener.turns._is_armed = True  # this turn has no time, until the next begins
            for id in range(3, 203, 2):
                client.ask(id, b"%d" % id)
            await client.writer.drain()
            await asyncio.sleep(0.05)
            assert client.status(3) is None
            assert listener.turns.is_behind
            listener.turns._next()
            for id in range(3, 203, 2):
                assert await client.answer(id) == b"%d" % id

    run(test)


def test_windows_are_given_back() -> None:
    async def test() -> None:
        async with connected() as (client, _, _):
            message = b"x" * (LIMIT - 100)
            for id in range(1, 41, 2):
                client.ask(id, message)
                client.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", LIMIT)))
                client.send(frame(WINDOW_UPDATE, 0, id, struct.pack(">I", LIMIT)))
                assert await client.answer(id) == message
            assert client.windows[0] > http2.CONNECTION_WINDOW

    run(test)


def test_a_client_that_gives_up_is_told_to_the_application() -> None:
    async def test() -> None:
        async with connected() as (client, app, _):
            client.open(1, HANG, END_STREAM)
            client.open(3, HANG, END_STREAM)
            client.ask(5)
            assert await client.answer(5) == b"hello"
            client.send(frame(RST_STREAM, 0, 1, struct.pack(">I", Code.CANCEL)))
            client.ask(7)
            await client.answer(7)
            assert app.left == app.begun[:1]
            assert app.begun[0].has_left
            client.writer.close()
            async with asyncio.timeout(5):
                while len(app.left) < 2:
                    await asyncio.sleep(0.01)

    run(test)


def test_more_streams_than_allowed_are_refused_and_the_others_answered() -> None:
    async def test() -> None:
        async with connected() as (client, _, _):
            ids = list(range(1, 2 * STREAMS + 3, 2))
            for id in ids:
                client.open(id, HANG, END_STREAM)
            await client.until(lambda: client.resets)
            assert client.resets == {ids[-1]: Code.REFUSED_STREAM}
            client.send(frame(RST_STREAM, 0, 1, struct.pack(">I", Code.CANCEL)))
            client.ask(ids[-1] + 2)
            assert await client.answer(ids[-1] + 2) == b"hello"

    run(test)


def test_a_drained_connection_answers_what_it_took() -> None:
    async def test() -> None:
        async with connected() as (client, app, listener):
            client.open(1, HANG, END_STREAM)
            client.ask(3)
            await client.answer(3)
            await listener.stop_accepting()
            await client.until(lambda: client.goaways)
            assert client.goaways == [(http2.LAST_ID, 0)]
            client.ask(5)  # it did not know yet
            assert await client.answer(5) == b"hello"
            await asyncio.sleep(0.3)
            app.begun[0].reply(b"late")
            assert await client.answer(1) == b"late"
            await client.end()
            assert client.goaways[-1] == (5, 0)

    run(test)


BROKEN: dict[str, tuple[list[bytes], Code]] = {
    "no settings": ([frame(PING, 0, 0, b"12345678")], Code.PROTOCOL_ERROR),
    "data on a stream that is idle": ([frame(DATA, 0, 5, b"x")], Code.PROTOCOL_ERROR),
    "data on stream 0": ([frame(DATA, 0, 0, b"x")], Code.PROTOCOL_ERROR),
    "headers on an even stream": ([frame(HEADERS, END_HEADERS, 2, b"\x82")], Code.PROTOCOL_ERROR),
    "a broken block": ([frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff")],
                       Code.COMPRESSION_ERROR),
    "an index beyond the table": ([frame(HEADERS, END_HEADERS, 1, b"\xfe")],
                                  Code.COMPRESSION_ERROR),
    "a continuation alone": ([frame(CONTINUATION, END_HEADERS, 1)], Code.PROTOCOL_ERROR),
    "a frame within a block": ([frame(HEADERS, 0, 1), frame(PING, 0, 0, b"12345678")],
                               Code.PROTOCOL_ERROR),
    "a block in many pieces": ([frame(HEADERS, 0, 1), *[frame(CONTINUATION, 0, 1)] * PIECES],
                               Code.ENHANCE_YOUR_CALM),
    "a ping of 7 bytes": ([frame(PING, 0, 0, b"1234567")], Code.FRAME_SIZE_ERROR),
    "a ping on a stream": ([frame(PING, 0, 1, b"12345678")], Code.PROTOCOL_ERROR),
    "settings on a stream": ([frame(SETTINGS, 0, 1)], Code.PROTOCOL_ERROR),
    "half a setting": ([frame(SETTINGS, 0, 0, b"123")], Code.FRAME_SIZE_ERROR),
    "an acknowledgement with settings": ([frame(SETTINGS, ACK, 0, b"123456")],
                                         Code.FRAME_SIZE_ERROR),
    "a window too large": ([frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 31))],
                           Code.FLOW_CONTROL_ERROR),
    "frames too small": ([frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 100))], Code.PROTOCOL_ERROR),
    "push": ([frame(SETTINGS, 0, 0, struct.pack(">HI", 2, 2))], Code.PROTOCOL_ERROR),
    "a promise": ([frame(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2\x82")], Code.PROTOCOL_ERROR),
    "no window": ([frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 0))], Code.PROTOCOL_ERROR),
    "a sum of windows too large": (
        [frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", (1 << 31) - 1))], Code.FLOW_CONTROL_ERROR),
    "a window of 3 bytes": ([frame(WINDOW_UPDATE, 0, 0, b"123")], Code.FRAME_SIZE_ERROR),
    "a reset of an idle stream": ([frame(RST_STREAM, 0, 9, b"\0\0\0\0")], Code.PROTOCOL_ERROR),
    "a long frame": ([struct.pack(">IBI", (1 << 21) << 8 | DATA, 0, 1)], Code.FRAME_SIZE_ERROR),
    "a long ping": ([struct.pack(">IBI", (1 << 17) << 8 | PING, 0, 0)], Code.FRAME_SIZE_ERROR),
    "a flood of pings": ([frame(PING, 0, 0, b"12345678")] * (ALLOWANCE + 100),
                         Code.ENHANCE_YOUR_CALM),
    "a flood of settings": ([frame(SETTINGS, 0, 0)] * (ALLOWANCE + 100), Code.ENHANCE_YOUR_CALM),
    "a flood of priorities": ([frame(PRIORITY, 0, 1, b"\0\0\0\3\0")] * (ALLOWANCE + 100),
                              Code.ENHANCE_YOUR_CALM),
    "a flood of unknown frames": ([frame(0x42, 0, 0, b"x")] * (ALLOWANCE + 100),
                                  Code.ENHANCE_YOUR_CALM),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_no_client_may_do_ends_the_connection(what: str) -> None:
    frames, code = BROKEN[what]

    async def test() -> None:
        async with connected(starts=False) as (client, _, _):
            client.send(PREFACE, b"" if what == "no settings" else frame(SETTINGS, 0, 0), *frames)
            await client.end()
            assert [code for _, code in client.goaways] == [code]

    run(test)


def test_a_block_means_what_the_table_says_now() -> None:
    async def test() -> None:
        async with connected() as (client, app, _):
            # All of them without a trace in the table: POST, http, the path, the content type.
            start = b"\x83\x86\x04" + bytes([len(HANG)]) + HANG.encode()
            start += b"\x0f\x10\x10application/grpc"

            def add(value: bytes) -> bytes:
                return start + b"\x40\x01a\x01" + value

            newest, second, untouched = start + b"\xbe", start + b"\xbf", start + b"\x00\x01b\x01c"
            empty = b"\x20\x3f\xe1\x1f"  # the table: to 0 bytes, and to 4,096 again
            blocks = [
                (add(b"1"), b"1"), (newest, b"1"), (newest, b"1"), (untouched, None),
                (untouched, None), (newest, b"1"), (add(b"2"), b"2"), (newest, b"2"),
                (second, b"1"), (second, b"1"), (add(b"2"), b"2"), (second, b"2"),
                (empty + add(b"3"), b"3"), (newest, b"3"), (empty + add(b"4"), b"4"),
                (newest, b"4"), (untouched, None),
            ]  # fmt: skip
            for at, (block, _) in enumerate(blocks):
                client.send(frame(HEADERS, END_HEADERS | END_STREAM, 2 * at + 1, block))
            client.ask(301)
            await client.answer(301)
            seen = [dict(rpc.metadata).get(b"a") for rpc in app.begun]
            assert seen == [value for _, value in blocks]

    run(test)


def test_a_rapid_reset_ends_the_connection() -> None:
    async def test() -> None:
        async with connected() as (client, app, _):
            for id in range(1, 10 * ALLOWANCE, 2):
                client.open(id, HANG, END_STREAM)
                client.send(frame(RST_STREAM, 0, id, struct.pack(">I", Code.CANCEL)))
            await client.end()
            assert client.goaways[-1][1] == Code.ENHANCE_YOUR_CALM
            assert len(app.begun) <= 2 * ALLOWANCE

    run(test)


def test_a_table_bomb_is_bounded() -> None:
    async def test() -> None:
        async with connected() as (client, _, _):
            large = client.encoder.encode([("x", "y" * 4000)])
            index = b"\xbe"  # the newest entry of the table, again and again
            client.send(frame(HEADERS, END_HEADERS, 1, client.block() + large + index * 1000))
            await client.end()
            assert client.goaways[-1][1] in (Code.ENHANCE_YOUR_CALM, Code.COMPRESSION_ERROR)

    run(test)


HEADERS_REFUSED: dict[str, list[tuple[str, str]]] = {
    "no path": [(":method", "POST"), (":scheme", "http")],
    "an empty path": [(":method", "POST"), (":scheme", "http"), (":path", "")],
    "two methods": [(":method", "POST"), (":method", "GET"), (":scheme", "h"), (":path", "/")],
    "a pseudo-header behind a header": [
        (":method", "POST"), (":scheme", "http"), ("a", "b"), (":path", "/")],
    "an unknown pseudo-header": [
        (":method", "POST"), (":scheme", "http"), (":path", "/"), (":status", "200")],
    "upper case": [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("Ab", "c")],
    "a connection header": [
        (":method", "POST"), (":scheme", "http"), (":path", "/"), ("connection", "close")],
    "another te": [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("te", "gzip")],
    "a line break": [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("a", "b\r\nc: d")],
    "two lengths": [(":method", "POST"), (":scheme", "http"), (":path", "/"),
                    ("content-length", "1"), ("content-length", "2")],
}  # fmt: skip


@pytest.mark.parametrize("what", HEADERS_REFUSED)
def test_a_head_that_is_none_resets_its_stream_only(what: str) -> None:
    async def test() -> None:
        async with connected() as (client, _, _):
            block = bytes(client.encoder.encode(HEADERS_REFUSED[what]))
            client.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, block))
            await client.until(lambda: client.resets)
            assert set(client.resets) == {1}
            client.ask(3)
            assert await client.answer(3) == b"hello"

    run(test)


def test_a_connection_of_some_age_takes_no_more_and_ends_with_its_calls() -> None:
    async def test() -> None:
        async with connected(Limits(age_s=0.0)) as (client, app, _):
            client.open(1)
            await client.until(lambda: client.goaways)
            assert client.goaways == [(http2.LAST_ID, 0)]
            client.send(frame(DATA, END_STREAM, 1, grpc(b"hello")))
            assert await client.answer(1) == b"hello"
            await client.end()
            assert client.goaways[-1] == (1, 0)
        async with connected(Limits(age_s=0.0, age_grace_s=0.5)) as (client, app, _):
            client.open(1, HANG, END_STREAM)
            await client.end()
            assert client.goaways[-1] == (1, 0)
            assert app.left

    run(test)


def test_a_foreign_name_is_answered_403() -> None:
    async def test() -> None:
        async with connected() as (client, _, _):
            head = [(":method", "POST"), (":scheme", "http"), (":path", "/"),
                    (":authority", "evil.example")]  # fmt: skip
            block = bytes(client.encoder.encode(head))
            client.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, block))
            await client.until(lambda: client.data.get(1))
            assert client.headers[1][0][":status"] == "403"
            assert b"evil.example" in client.data[1]

    run(test)


def test_a_body_of_another_length_resets_its_stream() -> None:
    async def test() -> None:
        async with connected() as (client, _, _):
            client.open(1, content_length="3")
            client.send(frame(DATA, END_STREAM, 1, grpc(b"hello")))
            client.open(3, content_length="300")
            client.send(frame(DATA, END_STREAM, 3, grpc(b"hello")))
            await client.until(lambda: len(client.resets) == 2)
            assert set(client.resets.values()) == {Code.PROTOCOL_ERROR}

    run(test)


@pytest.mark.parametrize(
    ("path", "data", "status"),
    [
        ("/x.Y/Nothing", grpc(b""), Status.UNIMPLEMENTED),
        (ECHO, b"", Status.UNIMPLEMENTED),
        (ECHO, grpc(b"a") + grpc(b"b"), Status.UNIMPLEMENTED),
        (ECHO, grpc(b"hello")[:-1], Status.INTERNAL),
        (ECHO, b"\1" + grpc(b"hello")[1:], Status.INTERNAL),
        (ECHO, b"\0" + struct.pack(">I", LIMIT + 1), Status.RESOURCE_EXHAUSTED),
    ],
)
def test_a_call_that_is_none_gets_its_status(path: str, data: bytes, status: Status) -> None:
    async def test() -> None:
        async with connected() as (client, _, _):
            client.open(1, path)
            client.send(frame(DATA, END_STREAM, 1, data))
            await client.until(lambda: client.status(1))
            assert client.status(1) == str(int(status))
            client.ask(3)
            assert await client.answer(3) == b"hello"

    run(test)


def test_what_is_not_grpc_gets_an_http_status() -> None:
    async def test() -> None:
        async with connected() as (client, _, _):
            client.open(1, "/ping", END_STREAM, content_type="application/json")
            await client.until(lambda: client.headers.get(1))
            assert client.headers[1][0][":status"] == "415"

    run(test)


def test_a_connection_that_nobody_uses_is_closed() -> None:
    async def test() -> None:
        async with connected(Limits(keep_alive_s=0.1)) as (client, _, _):
            client.ask(1)
            await client.answer(1)
            await client.end()
            assert client.goaways == [(1, 0)]

    run(test)


def test_a_client_that_stalls_loses_its_stream() -> None:
    async def test() -> None:
        settings = struct.pack(">HI", http2.INITIAL_WINDOW, 0)
        async with connected(Limits(transfer_timeout_s=0.1), settings) as (client, _, _):
            client.open(1)  # and no body
            client.ask(3)  # whose answer it does not take
            await client.until(lambda: len(client.resets) == 2)
            assert set(client.resets.values()) == {Code.CANCEL}

    run(test)


def test_an_error_of_a_service_is_told_in_ascii() -> None:
    async def test() -> None:
        async with connected() as (client, app, _):
            client.open(1, HANG, END_STREAM)
            await asyncio.sleep(0.05)
            app.begun[0].guard(_raise)
            await client.until(lambda: client.status(1))
            assert client.headers[1][-1]["grpc-message"] == "a %25 b %C3%BC%0A"

    run(test)


def _raise() -> None:
    raise RpcError(Status.INVALID_ARGUMENT, "a % b ü\n")


def test_bodies_of_all_calls_share_one_budget() -> None:
    async def test() -> None:
        async with connected() as (client, _, listener):
            listener._budget.body_limit = 500_000
            for id in (1, 3):
                client.open(id)
                client.send(frame(DATA, 0, id, grpc(bytes(300_000))[:-1]))
            await client.until(lambda: client.status(3))
            assert client.status(3) == str(int(Status.UNAVAILABLE))
            assert listener._budget.bodies == 300_004
            client.send(frame(DATA, END_STREAM, 1, b"x"), frame(WINDOW_UPDATE, 0, 0, b"\0\5\0\0"))
            client.send(frame(WINDOW_UPDATE, 0, 1, b"\0\5\0\0"))
            assert len(await client.answer(1)) == 300_000
            assert listener._budget.bodies == 0

    run(test)
