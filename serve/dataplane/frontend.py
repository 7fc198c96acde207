"""A frontend process: HTTP for the server process, which answers.

`python -P -m modelyard.serve.dataplane.frontend`.

It is handed connections that the server process has accepted, reads requests from them, sends them
on in frames (`link.py`) and writes the answers. It knows nothing of models, tokens or metrics, and
loads neither torch nor the web framework.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections import deque
from typing import Any

import uvloop

from modelyard.serve.address import Address
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.link import (
    LEFT,
    PAUSE,
    REFUSED,
    RESUME,
    STOP,
    TOO_LARGE,
    WHOLE,
    Link,
)
from modelyard.serve.errors import BodyTooLarge
from modelyard.serve.http.answers import COMMON_HEADERS, Answer, error_answer, request_id
from modelyard.serve.http.body import ClientLeft, linger, read_body
from modelyard.serve.http.connection import (
    ANSWER,
    EXCHANGE,
    SPELLING,
    Exchange,
    Limits,
    Receive,
    Scope,
    Send,
    WholeRequest,
)
from modelyard.serve.http.listener import QUIET_S, Listener

PR_SET_PDEATHSIG = 1
UNREAD_BYTES = 1 << 18
"""Of a streamed answer may wait here for the client; beyond that the server keeps the rest."""
FLUSH_S = 2.0
"""For the last answers to reach their clients when the server process has closed the link."""


BROKEN_OFF = wire.Item(0, 0, wire.BROKEN, b"", b"")
"""Stands for the parts of an answer that will not come."""


class HandedOver:
    """Accepts what the server process has accepted.

    Args:
        channel: brings a descriptor with each message; does not block.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def accept(self) -> tuple[socket.socket, None]:
        """Return the next connection.

        Raises:
            BlockingIOError: there is none.
            ConnectionAbortedError: the server process has gone.
            OSError: no descriptor is left for it; it is lost.
        """
        message, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        if descriptors:
            return socket.socket(fileno=descriptors[0]), None
        if message:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise ConnectionAbortedError

    def fileno(self) -> int:
        """Return the channel's descriptor."""
        return self._channel.fileno()

    def close(self) -> None:
        """Accept no more."""
        self._channel.close()


class Reply:
    """What has come of the answer to one request."""

    __slots__ = ("_arrived", "_id", "_is_paused", "_items", "_link", "_size")

    def __init__(self, link: Link, id: int) -> None:
        self._link = link
        self._id = id
        self._items: deque[wire.Item] = deque()
        self._size = 0
        self._is_paused = False
        self._arrived: asyncio.Future[None] | None = None

    def put(self, item: wire.Item) -> None:
        """Take the next part; ask for a pause when the client is far behind."""
        self._items.append(item)
        if item.flags & wire.MORE:
            self._size += len(item.body)
            if self._size > UNREAD_BYTES and not self._is_paused:
                self._is_paused = True
                self._link.add(self._id, 0, PAUSE, b"", (b"",))
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def next(self) -> wire.Item:
        """Return the next part as soon as it is there."""
        while not self._items:
            self._arrived = self._link.loop.create_future()
            await self._arrived
        item = self._items.popleft()
        if item.flags & wire.MORE:
            self._size -= len(item.body)
            if self._is_paused and not self._items:
                self._is_paused = False
                self._link.add(self._id, 0, RESUME, b"", (b"",))
        return item

    def leave(self) -> None:
        """Notify the server that nobody waits any more."""
        self._link.add(self._id, 0, LEFT, b"", (b"",))
        self.put(BROKEN_OFF)


class Forwarder(Link):
    """This process's end of the link, and the application of its connections.

    Args:
        channel: where connections come from.
    """

    def __init__(self, channel: socket.socket) -> None:
        super().__init__()
        self._channel = channel
        self._listener: Listener | None = None
        self._answers: dict[int, Reply] = {}
        self._next_id = 0
        self._max_request_bytes = 0
        self._stopping = asyncio.Event()
        self._closed_at: float | None = None
        """When the server process has closed the link."""

    # -- life ----------------------------------------------------------------------------------

    async def run(self, link: socket.socket) -> None:
        """Serve until the server process says that it stops, or has gone."""
        await self.loop.connect_accepted_socket(lambda: self, link)
        await self._stopping.wait()
        if (listener := self._listener) is None:
            return
        await listener.stop_accepting()
        while listener.close_idle(QUIET_S if self._closed_at is None else 0):
            await asyncio.sleep(0.01)
            if self._closed_at is not None and self.loop.time() - self._closed_at > FLUSH_S:
                break

    async def _begin(self, message: dict[str, Any]) -> None:
        """Take connections, as the server process says."""
        self._max_request_bytes = message["max_request_bytes"]
        address, limits = Address(*message["address"]), Limits(**message["limits"])
        self._listener = Listener(self, address, limits, listening=HandedOver(self._channel))
        await self._listener.start()
        self.control(wire.READY, {"protocol": wire.PROTOCOL})

    def connection_lost(self, error: Exception | None) -> None:
        """Answer what has come, break off the rest, and end."""
        super().connection_lost(error)
        self._closed_at = self.loop.time()
        for answer in self._answers.values():
            answer.put(BROKEN_OFF)
        self._stopping.set()

    # -- items ---------------------------------------------------------------------------------

    def take_item(self, item: wire.Item) -> None:
        """Pass on a part of an answer, or do as the server says."""
        if item.id:
            if (answer := self._answers.get(item.id)) is not None:  # else its client has left
                answer.put(item)
        elif item.code == wire.LOAD:
            self._beginning = self.loop.create_task(self._begin(wire.decode_control(item)))
        elif item.code == STOP:
            self._stopping.set()

    def take(self, exchange: WholeRequest) -> bool:
        """Leave every request to ASGI's call."""
        return False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the server process answer one request."""
        flags = 0
        try:
            parts = await read_body(scope, receive, self._max_request_bytes)
        except ClientLeft:
            return
        except BodyTooLarge:
            flags, parts = TOO_LARGE, [b""]
        exchange: Exchange = scope["extensions"][EXCHANGE]
        self._next_id = id = self._next_id % 0xFFFFFFFF + 1
        answer = self._answers[id] = Reply(self, id)
        exchange.on_leave = answer.leave
        self.add(id, 0, flags, pack_request(scope), parts)
        try:
            await self._answer(answer, scope, receive, send, is_cut=bool(flags))
        finally:
            exchange.on_leave = None
            del self._answers[id]

    def refuse(self, error: Exception) -> Answer:
        """Return the answer to what is not a request; the server process counts it."""
        id = request_id(())
        status, headers, body = error_answer(error, id)
        self.control(REFUSED, {"status": status})
        return status, [*headers, (b"x-request-id", id.encode()), *COMMON_HEADERS], body

    async def _answer(
        self, answer: Reply, scope: Scope, receive: Receive, send: Send, is_cut: bool
    ) -> None:
        """Write the answer as it comes; return without its end when that will not come.

        Then the connection is closed.
        """
        item = await answer.next()
        fields = wire.unpack_meta(item.meta)
        headers = list(zip(fields[::2], fields[1::2], strict=True))
        if item.flags & WHOLE and scope["extensions"][ANSWER](item.code, headers, item.body):
            return
        if not (status := item.code):  # not even a head will come
            return
        await send({"type": "http.response.start", "status": status, "headers": headers})
        while item.flags & wire.MORE:
            await send({"type": "http.response.body", "body": item.body, "more_body": True})
            item = await answer.next()
        if item.flags & wire.BROKEN:
            return
        if is_cut and status == 413:
            await linger(receive)
        await send({"type": "http.response.body", "body": item.body})


def pack_request(scope: Scope) -> bytes:
    """Pack a request's head; `frontends.Exchange` reads it. The path is sent undecoded."""
    host, port = scope["client"] or ("", 0)
    fields = [
        scope["method"].encode(),
        scope["raw_path"],
        scope["query_string"],
        scope["http_version"].encode(),
        host.encode(),
        b"%d" % port,
    ]
    for name, (_, value) in zip(scope["extensions"][SPELLING], scope["headers"], strict=True):
        fields += (name, value)
    return wire.pack_meta(fields)


async def serve(link: int, handed: int) -> None:
    """Run one frontend on the two sockets that the server process made."""
    connections = socket.socket(fileno=handed)
    connections.setblocking(False)
    gc.collect()
    gc.freeze()
    await Forwarder(connections).run(socket.socket(fileno=link))


def main(link: int, handed: int) -> int:
    """Run until the server process stops or dies."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        return 1
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    uvloop.run(serve(link, handed))
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
