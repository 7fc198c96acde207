"""HTTP/2 from clients that send anything: what breaks is the connection, never the server.

    python -m plugins.grpc.tests.test_http2_fuzz SECONDS

goes on for that long, each time with another seed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import struct
import sys
import time
from typing import Any

import pytest
from hpack import Encoder

from modelyard.plugins.grpc import http2
from modelyard.plugins.grpc.http2 import Http2Connection, frame
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.http.connection import Limits
from modelyard.serve.http.site import SiteCheck
from modelyard.serve.settings import Address
from plugins.grpc.tests.test_http2 import COUNT, ECHO, HANG, App, grpc

CHANCES = (0, 1, 2, 4, 5, 8, 0x20, 0x25, 0xFF)
LARGE = (0, 1, 2, 65_535, 65_536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


class Transport:
    """Takes what a server writes, and as much as a client would."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def writelines(self, parts: list[bytes]) -> None:
        self.sent += b"".join(parts)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close


class Fuzzer:
    """One connection's frames, most of them almost right."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.encoder = Encoder()
        self.id = 1

    def a_stream(self) -> int:
        return (
            self.chance.choice((0, 1, self.id, self.id, self.id - 2, self.id + 2, 2)) & 0x7FFFFFFF
        )

    def number(self) -> int:
        return self.chance.choice((*LARGE, self.chance.randrange(1 << 16)))

    def block(self) -> bytes:
        path = self.chance.choice((ECHO, HANG, COUNT, "/"))
        fields = [
            (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"),
            ("content-type", "application/grpc"), ("te", "trailers"),
            ("grpc-timeout", f"{self.chance.randrange(100)}S"),
            ("x", "y" * self.chance.randrange(90)),
        ]  # fmt: skip
        if self.chance.random() < 0.03:
            self.chance.shuffle(fields)
        if self.chance.random() < 0.05:
            fields.append(
                (self.chance.choice(("content-length", "connection", "A", ":path", "te")), "3")
            )
        count = self.chance.randrange(3, 9) if self.chance.random() < 0.1 else len(fields)
        return bytes(self.encoder.encode(fields[:count]))

    def request(self) -> bytes:
        """Return a whole request, or a part of one."""
        self.id += 2
        block = self.block()
        cut = self.chance.randrange(len(block) + 1) if self.chance.random() < 0.2 else len(block)
        ends = self.chance.random() < 0.1
        flags = (http2.END_HEADERS if cut == len(block) else 0) | ends
        frames = [frame(http2.HEADERS, flags, self.id, block[:cut])]
        if cut < len(block):
            frames.append(frame(http2.CONTINUATION, http2.END_HEADERS, self.id, block[cut:]))
        data = grpc(self.chance.randbytes(self.chance.choice((0, 5, 300, 20_000))))
        data *= self.chance.choice((1, 1, 1, 2)) if not ends or self.chance.random() < 0.05 else 0
        while data:
            size = self.chance.choice((1, 4, 100, len(data), len(data)))
            size = min(size, len(data))
            is_last = size == len(data) and self.chance.random() < 0.9
            if self.chance.random() < 0.2:
                frames.append(
                    frame(http2.DATA, 8 | is_last, self.id, b"\2" + data[:size] + b"\0\0")
                )
            else:
                frames.append(frame(http2.DATA, is_last, self.id, data[:size]))
            data = data[size:]
            if len(frames) > 40:
                break
        return b"".join(frames)

    def control(self) -> bytes:
        """Return a frame of control, often a wrong one."""
        chance, number = self.chance, self.number()
        four = struct.pack(">I", number)
        kind = chance.randrange(8) if chance.random() < 0.1 else chance.randrange(6)
        if kind == 0:
            pairs = [(http2.INITIAL_WINDOW, chance.choice((0, 1, 65_535, 1 << 20)))]
            if chance.random() < 0.05:
                pairs += [(chance.randrange(8), self.number()) for _ in range(chance.randrange(4))]
            return frame(
                http2.SETTINGS, 0, 0, b"".join(struct.pack(">HI", *each) for each in pairs)
            )
        if kind == 1:
            return frame(http2.PING, chance.choice((0, 1)), 0, b"12345678")
        if kind == 2:
            return frame(http2.RST_STREAM, 0, self.id, four)
        if kind in (3, 4):
            number = chance.choice((1, 100, 65_535, 1 << 20))
            return frame(
                http2.WINDOW_UPDATE, 0, chance.choice((0, self.id)), struct.pack(">I", number)
            )
        if kind == 5:
            return frame(http2.PRIORITY, 0, self.id, b"\0\0\0\0\1")
        if kind == 6:
            return frame(chance.randrange(256), chance.choice(CHANCES), self.a_stream(),
                         chance.randbytes(chance.choice((0, 4, 5, 6, 8, 50))))  # fmt: skip
        return frame(chance.choice((0x42, http2.GOAWAY)), 0, 0, four + four)

    def some(self) -> bytes:
        """Return what one read of the socket brings."""
        frames = [
            self.request() if self.id < 2 or self.chance.random() < 0.6 else self.control()
            for _ in range(self.chance.randrange(1, 6))
        ]
        data = bytearray(b"".join(frames))
        if self.chance.random() < 0.03 and data:
            for _ in range(self.chance.randrange(1, 4)):
                data[self.chance.randrange(len(data))] = self.chance.randrange(256)
        if self.chance.random() < 0.02:
            del data[self.chance.randrange(len(data)) :]
        return bytes(data)


async def talk(seed: int) -> tuple[int, int]:
    """Have one client say what it likes; return how many calls it began, and got answers to."""
    fuzzer, app, transport, budget = Fuzzer(seed), App(), Transport(), AnswerBudget()
    site = SiteCheck(Address("127.0.0.1", 0))
    connections: set[Any] = set()
    ended: list[int] = []
    connection = Http2Connection(
        app.streams, Limits(), site, budget, connections, lambda: ended.append(1), ("client", 1)
    )
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.data_received(frame(http2.SETTINGS, 0, 0))
    for _ in range(fuzzer.chance.randrange(1, 30)):
        data = fuzzer.some()
        step = fuzzer.chance.choice((1 << 18, 1 << 18, 1 << 12, 9))
        for at in range(0, len(data), step):
            connection.data_received(data[at : at + step])
        await asyncio.sleep(0)
        for rpc in app.begun[-3:]:
            if fuzzer.chance.random() < 0.3:
                rpc.reply(bytes(fuzzer.chance.choice((0, 10, 100_000))))
        if fuzzer.chance.random() < 0.1:
            connection.pause_writing()
        if fuzzer.chance.random() < 0.3:
            connection.resume_writing()
        connection.check(connection.now())
        if transport.is_closed:
            break
        assert len(connection._streams) <= http2.STREAMS
        assert connection.unsent == sum(each.unsent for each in connection._streams.values())
        assert connection._window >= 0
    frames = whole_frames(bytes(transport.sent))
    connection.connection_lost(None)
    await asyncio.sleep(0)
    assert ended == [1]
    assert not connections
    # Nothing of it is left: no bytes of bodies or answers are counted, and everybody was told.
    assert (budget.bodies, budget.held, connection.unsent) == (0, 0, 0)
    assert all(rpc.is_over for rpc in app.begun)
    if transport.is_closed:
        assert frames[-1] == http2.GOAWAY
    return len(app.begun), frames.count(http2.DATA)


def whole_frames(sent: bytes) -> list[int]:
    """Return the kinds of the frames that a server sent, all of them whole."""
    kinds, at = [], 0
    while at < len(sent):
        length, kind = int.from_bytes(sent[at : at + 3]), sent[at + 3]
        at += 9 + length
        assert at <= len(sent), "a frame that is cut off"
        kinds.append(kind)
    return kinds


@pytest.mark.parametrize("seed", [0, 1000])
def test_whatever_clients_send(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> list[tuple[int, int]]:
        return [await talk(seed + at) for at in range(25)]

    counts = asyncio.run(test())
    assert min(map(sum, zip(*counts, strict=True))) > 50  # most of it is sense
    assert not [record for record in caplog.records if record.exc_info]


def main(seconds: float) -> None:
    """Go on for long."""
    logging.disable(logging.WARNING)
    seed = first = int(time.time()) * 1000
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            asyncio.run(talk(seed))
        except BaseException:
            sys.stdout.write(f"seed {seed}\n")
            raise
        seed += 1
    sys.stdout.write(f"{seed - first} connections\n")


if __name__ == "__main__":
    main(float(sys.argv[1]))
