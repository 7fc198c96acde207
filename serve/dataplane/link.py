"""What travels between the server process and a frontend: frames of `wire`, over a Unix socket.

A request is one item: its head is the `meta`, its body the body. So is an answer; its `code` is the
status and its `meta` the headers, name after value. A streamed answer is several items, all but the
last with MORE; status and headers are those of the first, the others have status 0. BROKEN says
that the rest will not come. Everything that one turn of the loop has made goes in one frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from modelyard.serve.dataplane import wire

# Control codes, beside LOAD and READY of `wire`.
STOP = 6
"""Server → frontend: no more connections are handed over; end when none is left."""
REFUSED = 7
"""Frontend → server: something that was not a request got an answer of this `status`."""

# Flags of a request's item.
TOO_LARGE = 1
"""The body is over the limit; none of it is here."""
LEFT = 2
"""Nobody waits for the answer any more. This item, as the next two, has neither head nor body."""
PAUSE = 4
"""The client reads more slowly than its streamed answer comes."""
RESUME = 8
"""It has caught up."""

# Flags of an answer's item, beside MORE and BROKEN of `wire`.
WHOLE = 4
"""The application sent it by the extension ANSWER, so the frontend may too."""

FRAME_BYTES = 1 << 18
"""A frame is sent as soon as it is this large, so that a sender soon learns to wait."""
NO_LIMIT = 0xFFFF_FFFF
"""Of an item: both ends are ours, and a request's body has had its limit."""


class Link(asyncio.Protocol):
    """One end; lives on the event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._decoder = wire.Decoder(NO_LIMIT)
        self._frame = wire.Frame()
        self._count = self._size = 0
        self._flusher: asyncio.Handle | None = None
        self.transport: asyncio.Transport | None = None
        self.has_room = asyncio.Event()
        """Whether the other end takes what is sent."""
        self.has_room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take what the other end has sent."""
        for frame in self._decoder.feed(data):
            for item in frame:
                self.take_item(item)

    def take_item(self, item: wire.Item) -> None:
        """Take one item."""
        raise NotImplementedError

    def add(self, id: int, code: int, flags: int, meta: bytes, parts: Sequence[bytes]) -> None:
        """Send an item with the others of this turn of the loop; arguments as of `wire.Frame`."""
        if self._count == wire.MAX_ITEMS or self._size > FRAME_BYTES:
            self._flush()
        if self._flusher is None:
            self._flusher = self.loop.call_soon(self._flush)
        self._frame.add(id, code, flags, meta, parts)
        self._count += 1
        self._size += sum(map(len, parts))

    def control(self, code: int, message: dict[str, Any]) -> None:
        """Send a control message, after all that was added before it."""
        self._flush()
        if (transport := self._writable()) is not None:
            transport.write(wire.encode_control(code, message))

    def _writable(self) -> asyncio.Transport | None:
        """Return the transport while it takes anything."""
        if self.transport is None or self.transport.is_closing():
            return None
        return self.transport

    def _flush(self) -> None:
        if self._flusher is not None:
            self._flusher.cancel()
            self._flusher = None
        if self._count and (transport := self._writable()) is not None:
            transport.writelines(self._frame.buffers())
        self._frame, self._count, self._size = wire.Frame(), 0, 0

    def close(self) -> None:
        """Send what was added, and close this end."""
        self._flush()
        if self.transport is not None:
            self.transport.close()

    def pause_writing(self) -> None:
        """Note that the other end is behind."""
        self.has_room.clear()

    def resume_writing(self) -> None:
        """Note that it has caught up."""
        self.has_room.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Let nobody wait for room."""
        self.has_room.set()
