"""HTTP/2 and time: who may be slow, and who not. Nothing waits here; the clock is given."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

from hpack import Encoder

from modelyard.plugins.grpc import http2
from modelyard.plugins.grpc.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Http2Connection,
    frame,
)
from modelyard.plugins.grpc.rpc import Message, Rpc
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.http.connection import Limits
from modelyard.serve.http.site import SiteCheck
from modelyard.serve.settings import Address
from plugins.grpc.tests.test_http2 import ECHO, App, grpc
from plugins.grpc.tests.test_http2_fuzz import Transport, whole_frames

STREAM = "/x.Y/Stream"


class Peer:
    """A client without a socket, of a connection whose time is given."""

    def __init__(self, window: int = 1 << 20) -> None:
        self.budget, self.transport, self.rpcs = AnswerBudget(), Transport(), list[Rpc]()
        self.messages: list[Message] = []
        app = App()
        app.streams._methods = {**app.streams._methods, STREAM: self._stream}
        self.connection = Http2Connection(
            app.streams, Limits(), SiteCheck(Address("127.0.0.1", 0)), self.budget, set(),
            lambda: None, None,
        )  # fmt: skip
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        self.say(frame(SETTINGS, 0, 0, struct.pack(">HI", http2.INITIAL_WINDOW, window)))
        self.now = self.connection.now()

    def _stream(self, rpc: Rpc) -> None:
        self.rpcs.append(rpc)
        rpc.keeps_messages = rpc.may_rest = True
        rpc.on_message = self.messages.append

    def say(self, *frames: bytes) -> None:
        for each in frames:
            self.connection.data_received(each)

    def open(self, id: int, path: str, flags: int = 0) -> None:
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path),
                  (":authority", "localhost"), ("content-type", "application/grpc")]  # fmt: skip
        self.say(frame(HEADERS, END_HEADERS | flags, id, bytes(Encoder().encode(fields))))

    def wait(self, seconds: int, each: Callable[[], Any] = lambda: None) -> None:
        for _ in range(seconds):
            each()
            self.now += 1
            self.connection.check(self.now)

    def resets(self) -> int:
        """Return how many streams the server has given up."""
        self.connection._flush()
        return whole_frames(bytes(self.transport.sent)).count(RST_STREAM)


def run(test: Callable[[], None]) -> None:
    async def loop() -> None:
        test()

    asyncio.run(loop())


def test_an_answer_that_is_taken_drop_by_drop_is_given_up() -> None:
    def test() -> None:
        peer = Peer(window=1)
        peer.open(1, ECHO)
        peer.say(frame(DATA, END_STREAM, 1, grpc(bytes(100_000))))
        more = frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 20))
        peer.wait(15, lambda: peer.say(more))
        assert peer.resets() == 0
        assert peer.budget.held > 90_000
        peer.wait(10, lambda: peer.say(more))
        assert peer.resets() == 1
        assert peer.budget.held == 0

    run(test)


def test_while_workers_wait_for_memory_a_slow_client_has_two_seconds() -> None:
    def test() -> None:
        for is_short in (False, True):
            peer = Peer(window=1)
            peer.open(1, ECHO)
            peer.say(frame(DATA, END_STREAM, 1, grpc(bytes(100_000))))
            if is_short:
                peer.connection._flush()
                assert not peer.budget.take(peer.budget.limit, lambda: None)
            more = frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 10_000))
            peer.wait(5, lambda more=more, peer=peer: peer.say(more))  # type: ignore[misc]
            assert peer.resets() == is_short

    run(test)


def test_a_stream_may_rest_between_messages_and_not_within_one() -> None:
    def test() -> None:
        peer = Peer()
        peer.open(1, STREAM)
        peer.open(3, ECHO)
        peer.wait(30)
        assert peer.resets() == 1  # who announces one message owes it
        assert peer.connection.is_idle
        peer.say(frame(DATA, 0, 1, grpc(b"hello")))
        assert not peer.connection.is_idle  # it waits for an answer
        peer.wait(100)
        peer.rpcs[0].send(b"world")
        peer.rpcs[0].release(peer.messages.pop())
        assert peer.connection.is_idle
        peer.wait(100)
        assert peer.resets() == 1
        peer.say(frame(DATA, 0, 1, grpc(b"hello")[:-1]))
        assert not peer.connection.is_idle
        peer.wait(30)
        assert peer.resets() == 2

    run(test)


def test_a_refused_body_may_go_on_for_a_while() -> None:
    """Its frames were under way when the answer came; they are no flood."""

    def test() -> None:
        peer = Peer()
        for id in range(1, 81, 2):
            peer.open(id, "/x.Y/Nothing")  # is answered at once
            for _ in range(60):
                peer.say(frame(DATA, 0, id, bytes(16_384)))
        assert not peer.transport.is_closed
        for _ in range(http2.ALLOWANCE + 100):
            peer.say(frame(DATA, 0, 1, b"x"))
        assert peer.transport.is_closed

    run(test)
