"""A frontend process: HTTP for the server process, which answers. `python -P -m serve.frontend`.

It is handed connections that the server process has accepted, reads requests from them, sends them
on in frames (`link.py`) and writes the answers. It knows nothing of models, tokens or metrics, and
loads neither torch nor the web framework.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from collections import deque
from typing import Any

import uvloop

from serve import wire
from serve.body import ClientLeft, Receive, Scope, Send, linger, read_body
from serve.errors import BodyTooLarge
from serve.link import LEFT, PAUSE, RESUME, STOP, TOO_LARGE, WHOLE, Link
from serve.listener import ANSWER, QUIET_S, SPELLING, Connection, Connections

PR_SET_PDEATHSIG = 1
CONNECTION = "modelyard.connection"
"""ASGI extension: the connection that a request came by."""
UNREAD_BYTES = 1 << 18
"""Of a streamed answer may wait here for the client; beyond that the server keeps the rest."""
FLUSH_S = 2.0
"""For the last answers to reach their clients when the server process has closed the link."""


BROKEN_OFF = wire.Item(0, 0, wire.BROKEN, b"", b"")
"""Stands for the parts of an answer that will not come."""


class Handed(Connection):
    """A connection that the server process has accepted."""

    answer: Answer | None = None
    """Of the request that the server has."""

    def on_headers_complete(self) -> None:
        """Offer the application this connection."""
        super().on_headers_complete()
        extensions: dict[str, Any] = self.scope["extensions"]
        extensions[CONNECTION] = self

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the server when a client leaves before its answer."""
        super().connection_lost(exc)
        if self.answer is not None:
            self.answer.leave()


class Answer:
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
        """Tell the server that nobody waits any more."""
        self._link.add(self._id, 0, LEFT, b"", (b"",))
        self.put(BROKEN_OFF)


class Forwarder(Link):
    """This process's end of the link, and the ASGI application of its connections.

    Args:
        handed: where connections come from, a descriptor with each message.
    """

    def __init__(self, handed: socket.socket) -> None:
        super().__init__()
        self._handed = handed
        self._connections = Connections(self, protocol=Handed)
        self._opening: set[asyncio.Task[Any]] = set()
        self._answers: dict[int, Answer] = {}
        self._next_id = 0
        self._max_request_bytes = 0
        self._stopping = asyncio.Event()
        self._closed_at: float | None = None
        """When the server process has closed the link."""

    # -- life ----------------------------------------------------------------------------------

    async def run(self, link: socket.socket) -> None:
        """Serve until the server process says that it stops, or has gone."""
        self._connections.sweep()
        await self.loop.connect_accepted_socket(lambda: self, link)
        await self._stopping.wait()
        self._open_connections()
        self.loop.remove_reader(self._handed)
        while self._opening or self._connections.close_idle(self._quiet_s):
            await asyncio.sleep(0.01)
            if self._closed_at is not None and self.loop.time() - self._closed_at > FLUSH_S:
                break

    @property
    def _quiet_s(self) -> float:
        return QUIET_S if self._closed_at is None else 0

    def _open_connections(self) -> None:
        """Take all connections that have been handed over."""
        while True:
            try:
                _, descriptors, _, _ = socket.recv_fds(self._handed, 1, 1)
            except BlockingIOError:
                return
            if not descriptors:  # the server process has gone, or this one has no room for more
                self.loop.remove_reader(self._handed)
                return
            connection = socket.socket(fileno=descriptors[0])
            opening: asyncio.Task[Any] = self.loop.create_task(self._open(connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self.loop.connect_accepted_socket(self._connections.connect, connection)
        except OSError:  # the client has gone
            connection.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Answer what has come, break off the rest, and end."""
        super().connection_lost(error)
        self._closed_at = self.loop.time()
        for answer in self._answers.values():
            answer.put(BROKEN_OFF)
        self._stopping.set()

    # -- items ---------------------------------------------------------------------------------

    def take(self, item: wire.Item) -> None:
        """Pass on a part of an answer, or do as the server says."""
        if item.id:
            if (answer := self._answers.get(item.id)) is not None:  # else its client has left
                answer.put(item)
        elif item.code == wire.LOAD:
            self._max_request_bytes = wire.decode_control(item)["max_request_bytes"]
            self.loop.add_reader(self._handed, self._open_connections)
            self.control(wire.READY, {"protocol": wire.PROTOCOL})
        elif item.code == STOP:
            self._stopping.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the server process answer one request."""
        flags = 0
        try:
            parts = await read_body(scope, receive, self._max_request_bytes)
        except ClientLeft:
            return
        except BodyTooLarge:
            flags, parts = TOO_LARGE, [b""]
        connection: Handed = scope["extensions"][CONNECTION]
        self._next_id = id = self._next_id % 0xFFFFFFFF + 1
        answer = connection.answer = self._answers[id] = Answer(self, id)
        self.add(id, 0, flags, pack_request(scope), parts)
        try:
            await self._answer(answer, scope, receive, send, is_cut=bool(flags))
        finally:
            connection.answer = None
            del self._answers[id]

    async def _answer(
        self, answer: Answer, scope: Scope, receive: Receive, send: Send, is_cut: bool
    ) -> None:
        """Write the answer as it comes; return without its end when that will not come.

        Then the connection is closed, after status 500 where nothing was written.
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
