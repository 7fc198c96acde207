"""One client connection of HTTP/2: frames ↔ streams, as gRPC needs them.

RFC 9113, without push and priorities; header blocks by the library hpack (RFC 7541). Bytes of a
body are handed on as they were received, and those of an answer are taken as they are.

What a client may cost is bounded: streams at a time, bytes of a header block and pieces that it
comes in, and frames that ask for work and bring none (`ALLOWANCE`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple, Protocol

from hpack import Decoder, HPACKError, OversizedHeaderListError

from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.wire import Buffer
from modelyard.serve.errors import Forbidden
from modelyard.serve.http.connection import UNCOUNTED_BYTES, AnyConnection, Headers, Limits, Pace
from modelyard.serve.http.site import SiteCheck
from modelyard.serve.http.turns import Turns

logger = logging.getLogger(__name__)

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20
ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, MAX_HEADER_LIST = 2, 3, 4, 5, 6

STREAMS = 128
"""Requests at a time on one connection; a client has those beyond wait."""
STREAM_WINDOW, CONNECTION_WINDOW = 1 << 22, 1 << 24
"""Bytes that a client may send before it hears that they were taken."""
FRAME_BYTES = 1 << 20
"""Longest frame that a client may send; of those that are not data a header block's limit holds."""
DEFAULT_WINDOW, DEFAULT_FRAME = 65_535, 16_384
LARGEST_WINDOW = (1 << 31) - 1
LARGEST_FRAME = (1 << 24) - 1
LAST_ID = (1 << 31) - 1
PIECES = 32
"""CONTINUATION frames of one header block."""
BLOCKS, BLOCK_BYTES, BLOCK_HEADERS = 32, 512, 32
"""Header blocks whose meaning is kept, and their size."""
SMALL_BYTES = 1024
"""A frame of fewer bytes is one that brings no work, where nobody waits for them any more."""
ALLOWANCE = 1000
"""Frames that bring no work (pings, settings, resets, empty ones): so many, and one more for each
request, and `ALLOWANCE_PER_S` a second. grpcio pings with every few messages."""
ALLOWANCE_PER_S = 200

_FRAME = struct.Struct(">IBI")
_PAIR = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_FORBIDDEN = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})


class Code(IntEnum):
    """Error codes of RFC 9113, section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class _ConnectionFailed(Exception):
    """The connection cannot go on."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class _StreamFailed(Exception):
    """One stream cannot go on."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class _Block(NamedTuple):
    """What a header block means."""

    headers: Headers
    fields: Mapping[bytes, bytes]
    length: int | None = None
    """Of the body, where they say it."""
    error: str | None = None
    """Why they are not those of a request."""
    refusal: str | None = None
    """Why a request by this name, or of this web page, is not taken."""


class AcceptsStreams(Protocol):
    """What answers requests."""

    def accept(self, stream: Stream) -> None:
        """Begin to answer a request, whose headers are there; it raises nothing.

        It sets the stream's `take`, `finished` and, where it wants to know, `gone`.
        """


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame's bytes."""
    return _FRAME.pack(len(payload) << 8 | kind, flags, stream) + payload


def header_block(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return headers as literals without indexing, which need no state on either side.

    Names are in lower case; name and value are shorter than 16 KB.
    """
    return b"".join(b"\0" + _length(name) + name + _length(value) + value
                    for name, value in headers)  # fmt: skip


def _length(text: bytes) -> bytes:
    """Return a length as an integer with a prefix of 7 bits, without Huffman coding."""
    left = len(text) - 127
    if left < 0:
        return bytes([len(text)])
    digits = [127]
    while left >= 128:
        digits.append(left & 127 | 128)
        left >>= 7
    return bytes([*digits, left])


class Stream:
    """One request and its answer.

    Attributes:
        headers: pseudo-headers first, names in lower case.
        fields: the same by name, the last of each.
        take: called with each piece of the body.
        finished: called when the body is whole.
        gone: called when the client gives up; nothing is called after it.
        rests: whether the client may leave it alone now, as between messages.
        is_idle: whether it could be closed without anybody losing an answer.
        unsent: bytes of the answer that wait for the client.
    """

    __slots__ = (
        "_drained",
        "_parts",
        "connection",
        "credit",
        "fields",
        "finished",
        "gone",
        "has_ended",
        "has_left",
        "headers",
        "id",
        "is_held",
        "is_idle",
        "is_received",
        "length",
        "pace",
        "received",
        "rests",
        "room",
        "sent",
        "take",
        "unsent",
        "window",
    )

    def __init__(
        self, connection: Http2Connection, id: int, headers: Headers,
        fields: Mapping[bytes, bytes], window: int,
    ) -> None:  # fmt: skip
        self.connection = connection
        self.id = id
        self.headers = headers
        self.fields = fields
        self.take: Callable[[Buffer], None] = _ignore
        self.finished: Callable[[], None] = _nothing
        self.gone: Callable[[], None] = _nothing
        self.window = window
        """Bytes that the client takes."""
        self.room = STREAM_WINDOW
        """Bytes that it may send."""
        self.credit = 0
        """Those taken, of which it was not told yet."""
        self.length: int | None = None
        self.received = 0
        self.is_received = False
        self.has_ended = False
        """The answer is over, as far as the application is concerned."""
        self.has_left = False
        self.is_held = False
        self.unsent = 0
        self.sent = 0
        """Bytes of the answer that went."""
        self.pace = Pace()
        self.rests: Callable[[], bool] = _never
        self.is_idle: Callable[[], bool] = _never
        self._parts: deque[tuple[int, int, Buffer]] = deque()
        self._drained: asyncio.Event | None = None

    def send(self, kind: int, payload: Buffer, ends: bool = False) -> None:
        """Send headers (`header_block`) or data, behind what waits."""
        if not (self.has_left or self.has_ended):
            self._put(kind, payload, ends)
            self.connection.push(self)

    def send_last(self, *parts: tuple[int, Buffer]) -> None:
        """Send headers and data, each with its kind, and the end."""
        if not (self.has_left or self.has_ended):
            for kind, payload in parts[:-1]:
                self._put(kind, payload, False)
            self._put(*parts[-1], True)
            self.connection.push(self)

    def _put(self, kind: int, payload: Buffer, ends: bool) -> None:
        self.has_ended = ends
        flags = (END_HEADERS if kind == HEADERS else 0) | ends  # END_STREAM is 1
        self._parts.append((kind, flags, payload))
        if kind == DATA:
            self.unsent += len(payload)
            self.connection.unsent += len(payload)

    def reset(self, code: Code) -> None:
        """Give the stream up."""
        self.connection.reset(self, code)

    def forget(self) -> None:
        """Tell the application nothing more."""
        self.take, self.finished, self.gone = _ignore, _nothing, _nothing
        self.rests = self.is_idle = _never

    def hold(self) -> None:
        """Let the client send no more than it may already."""
        self.is_held = True

    def release(self) -> None:
        """Let the client go on."""
        if self.is_held:
            self.is_held = False
            self.connection.give_credit(self)

    async def drain(self, most: int = 1 << 16) -> None:
        """Wait until no more than so many bytes are unsent, or the client has left."""
        while self.unsent > most and not self.has_left:
            self._drained = self._drained or asyncio.Event()
            self._drained.clear()
            await self._drained.wait()

    # -- for the connection ----------------------------------------------------------------------

    def pull(self, most: int, longest: int) -> list[bytes | Buffer]:
        """Return frames of at most `most` bytes of data, and take them from what waits."""
        frames: list[bytes | Buffer] = []
        while self._parts:
            kind, flags, payload = self._parts[0]
            size = sent = len(payload)
            if kind == HEADERS:
                if size > longest:
                    raise ValueError(f"a header block of {size} bytes; frames take {longest}")
            else:
                sent = min(size, most)
                if size and not sent:
                    break
                most -= sent
                self.window -= sent
                self.sent += sent
                self.unsent -= sent
                self.connection.unsent -= sent
            if size <= longest and sent == size:
                frames += (_FRAME.pack(size << 8 | kind, flags, self.id), payload)
                self._parts.popleft()
                continue
            view = memoryview(payload)
            full = _FRAME.pack(longest << 8, 0, self.id)
            for at in range(0, sent - longest, longest):
                frames += (full, view[at : at + longest])
            at = (sent - 1) // longest * longest
            if sent == size:
                self._parts.popleft()
            else:
                self._parts[0] = kind, flags, view[sent:]
                flags = 0
            frames += (_FRAME.pack((sent - at) << 8, flags, self.id), view[at:sent])
        if self._drained is not None:
            self._drained.set()
        return frames

    @property
    def is_waiting(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._parts)

    def leave(self) -> None:
        """Note that the client has left."""
        self.has_left = True
        self._parts.clear()
        self.connection.unsent -= self.unsent
        self.unsent = 0
        if self._drained is not None:
            self._drained.set()
        gone = self.gone
        self.forget()
        gone()


def _ignore(piece: Buffer) -> None:
    pass


def _nothing() -> None:
    pass


def _never() -> bool:
    return False


class Http2Connection(asyncio.Protocol):
    """One client connection, from its preface on.

    Args:
        app: what answers.
        limits: `header_bytes`, the timeouts and `keep_alive_s` are looked at.
        site: whose requests are refused.
        budget: of answers, which counts what the client has not taken, and of bodies.
        connections: where it enters itself while it is open.
        closed: called when it has ended.
        client: its address, for logs.
        turns: of all connections of the listener; None takes at once what comes.

    Attributes:
        since: time of the loop, of the last request or answer.
        waited_s: 0; what many requests share is never put off.
    """

    waited_s = 0.0

    def __init__(
        self,
        app: AcceptsStreams,
        limits: Limits,
        site: SiteCheck,
        budget: AnswerBudget,
        connections: set[AnyConnection],
        closed: Callable[[], None],
        client: tuple[str, int] | None,
        turns: Turns | None = None,
    ) -> None:
        self._turns = turns
        self._put_off = b""
        """What this turn of the loop has no time for; nothing is read meanwhile."""
        self._app = app
        self.limits = limits
        self._site = site
        self.budget = budget
        self.unsent = 0
        """Bytes of all answers that wait for the client."""
        self._counted = 0
        self._connections = connections
        self._closed = closed
        self.client = client
        loop = asyncio.get_running_loop()
        self._call_soon = loop.call_soon
        self.now = loop.time
        self.since = self.now()
        self._decoder = Decoder(limits.header_bytes)
        self._blocks: dict[bytes, _Block] = {}
        self._streams: dict[int, Stream] = {}
        self._last_id = 0
        self._rest = b""
        """The beginning of a frame."""
        self._data_left = 0
        """Bytes to come of a frame of data that is being handed on."""
        self._data_flags = 0
        self._data_id = 0
        self._block: list[bytes] | None = None
        """Pieces of a header block that is not whole."""
        self._block_id = self._block_flags = self._block_bytes = 0
        self._block_since = 0.0
        self._has_settings = False
        self._window = DEFAULT_WINDOW
        self._initial_window = DEFAULT_WINDOW
        self._longest = DEFAULT_FRAME
        self._room, self._credit = CONNECTION_WINDOW, 0
        self._allowance = float(ALLOWANCE)
        self._checked_at = self.since
        self._out: list[bytes | Buffer] = []
        self._is_flushing = False
        self._paused_at: float | None = None
        """Since when the client takes less than it is sent."""
        self._drain_until: float | None = None
        """When the last id is told, after the client was told that there will be one."""
        self._opened_at = self.since
        self._is_over = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Greet."""
        self.transport = transport
        self._connections.add(self)
        pairs = ((MAX_STREAMS, STREAMS), (INITIAL_WINDOW, STREAM_WINDOW), (MAX_FRAME, FRAME_BYTES),
                 (MAX_HEADER_LIST, self.limits.header_bytes))  # fmt: skip
        self._write(frame(SETTINGS, 0, 0, b"".join(_PAIR.pack(*pair) for pair in pairs)))
        self._write(frame(WINDOW_UPDATE, 0, 0, _NUMBER.pack(CONNECTION_WINDOW - DEFAULT_WINDOW)))

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify who waits for this client."""
        self._is_over = True
        self._connections.discard(self)
        for stream in tuple(self._streams.values()):
            stream.leave()
        self._streams.clear()
        self._out.clear()
        self._count()
        self._closed()

    def data_received(self, data: bytes) -> None:
        """Take frames, now or in a later turn; the preface has been taken off."""
        if self._turns is not None and (self._put_off or not self._turns.has_time()):
            if not self._put_off:
                self._turns.put_off(self)
                self.transport.pause_reading()
            self._put_off += data
        else:
            self._take_in(data)

    def take_put_off(self) -> None:
        """Take what was put off."""
        data, self._put_off = self._put_off, b""
        self._take_in(data)
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _take_in(self, data: bytes) -> None:
        if self._is_over:
            return
        try:
            self._receive(data)
        except _ConnectionFailed as error:
            self._fail(error)

    def eof_received(self) -> bool:
        """Close: a client that sends no more takes no more, either."""
        return False

    # -- reading ---------------------------------------------------------------------------------

    def _receive(self, data: bytes) -> None:
        if self._rest:
            data, self._rest = self._rest + data, b""
        view = memoryview(data)
        at, end = 0, len(data)
        while True:
            if self._data_left:
                if at == end:
                    return
                size = min(self._data_left, end - at)
                self._data_left -= size
                self._take_data(view[at : at + size], is_last=not self._data_left)
                at += size
                continue
            if end - at < 9:
                break
            length_kind, flags, id = _FRAME.unpack_from(data, at)
            length, kind = length_kind >> 8, length_kind & 0xFF
            id &= LAST_ID
            if length > FRAME_BYTES:
                raise _ConnectionFailed(Code.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            if kind == DATA and not flags & PADDED and self._block is None and length:
                self._begin_data(id, flags, length)
                at += 9
                continue
            if kind != DATA and length > self.limits.header_bytes:
                raise _ConnectionFailed(
                    Code.FRAME_SIZE_ERROR, f"a frame of kind {kind} of {length} bytes"
                )
            if end - at - 9 < length:
                break
            self._take_frame(kind, flags, id, data[at + 9 : at + 9 + length])
            if self._is_over:
                return
            at += 9 + length
        self._rest = data[at:]

    def _take_frame(self, kind: int, flags: int, id: int, payload: bytes) -> None:
        if self._block is not None and (kind != CONTINUATION or id != self._block_id):
            raise _ConnectionFailed(Code.PROTOCOL_ERROR, "another frame within a header block")
        if not self._has_settings and kind != SETTINGS:
            raise _ConnectionFailed(Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        try:
            if kind == DATA:  # padded, or empty
                self._begin_data(id, flags, len(payload))
                self._data_left = 0
                self._take_data(memoryview(_without_padding(payload, flags)), True, len(payload))
            elif kind == HEADERS:
                self._take_headers(flags, id, payload)
            elif kind == CONTINUATION:
                self._take_continuation(flags, payload)
            elif kind == SETTINGS:
                self._take_settings(flags, id, payload)
            elif kind == WINDOW_UPDATE:
                self._take_window_update(id, payload)
            elif kind == PING:
                self._take_ping(flags, id, payload)
            elif kind == RST_STREAM:
                self._take_reset(id, payload)
            elif kind == PRIORITY:
                self._spend()
                _expect(len(payload) == 5, "a PRIORITY frame is not 5 bytes", id)
                _expect(id != 0, "PRIORITY on stream 0")
                _expect(_NUMBER.unpack_from(payload)[0] & LAST_ID != id,
                        "a stream depends on itself", id)  # fmt: skip
            elif kind == PUSH_PROMISE:
                raise _ConnectionFailed(Code.PROTOCOL_ERROR, "a client does not push")
            elif kind == GOAWAY:
                _expect(id == 0, "GOAWAY on a stream")
                self._drain_until = self.now()
                self._close_if_drained()
            else:
                self._spend()  # of an extension
        except _StreamFailed as error:
            self._fail_stream(id, error)

    def _fail_stream(self, id: int, error: _StreamFailed) -> None:
        logger.info("%s: stream %d: %s", self.client or "a client", id, error)
        self._spend()
        stream = self._streams.get(id)
        if stream is not None:
            self.reset(stream, error.code)
        else:
            self._write(frame(RST_STREAM, 0, id, _NUMBER.pack(error.code)))

    # -- bodies ----------------------------------------------------------------------------------

    def _begin_data(self, id: int, flags: int, length: int) -> None:
        if not self._has_settings:
            raise _ConnectionFailed(Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        _expect(id % 2 == 1 and id <= self._last_id, "DATA on a stream that is idle")
        if length > self._room:
            raise _ConnectionFailed(Code.FLOW_CONTROL_ERROR, "more than the connection's window")
        if not length and not flags & END_STREAM:
            self._spend()
        self._data_id, self._data_flags, self._data_left = id, flags, length
        stream = self._streams.get(id)
        if stream is not None and length > stream.room:
            raise _ConnectionFailed(Code.FLOW_CONTROL_ERROR, "more than the stream's window")

    def _take_data(self, piece: memoryview, is_last: bool, length: int | None = None) -> None:
        """Hand on a piece of a frame; its length is more than the piece's where it is padded."""
        size = len(piece) if length is None else length
        self._credit += size
        self._room -= size
        if self._credit > CONNECTION_WINDOW // 2:
            self._write(frame(WINDOW_UPDATE, 0, 0, _NUMBER.pack(self._credit)))
            self._room += self._credit
            self._credit = 0
        stream = self._streams.get(self._data_id)
        ends = is_last and bool(self._data_flags & END_STREAM)
        if stream is None:  # it was reset, or has its answer
            if is_last and size < SMALL_BYTES:
                self._spend()
            return
        if stream.is_received:
            raise _ConnectionFailed(Code.STREAM_CLOSED, "DATA behind the end of its stream")
        stream.received += len(piece)
        stream.room -= size
        stream.credit += size
        if stream.length is not None and (
            stream.received > stream.length or (ends and stream.received < stream.length)
        ):
            self._fail_stream(
                stream.id, _StreamFailed(Code.PROTOCOL_ERROR, "a body of another length")
            )
            return
        if piece:
            stream.take(piece)
        if ends:
            self._finish(stream)
        else:
            self.give_credit(stream)

    def give_credit(self, stream: Stream) -> None:
        """Tell a client that it may send more, once that is worth a frame."""
        if stream.credit > STREAM_WINDOW // 2 and not (stream.has_left or stream.is_held):
            self._write(frame(WINDOW_UPDATE, 0, stream.id, _NUMBER.pack(stream.credit)))
            stream.room += stream.credit
            stream.credit = 0

    def _finish(self, stream: Stream) -> None:
        stream.is_received = True
        stream.finished()
        self._forget_if_over(stream)

    # -- headers ---------------------------------------------------------------------------------

    def _take_headers(self, flags: int, id: int, payload: bytes) -> None:
        _expect(id % 2 == 1, "HEADERS on a stream that no client opens")
        payload = _without_padding(payload, flags)
        if flags & HAS_PRIORITY:
            if len(payload) < 5:
                raise _ConnectionFailed(Code.FRAME_SIZE_ERROR, "HEADERS without its priority")
            depends_on = _NUMBER.unpack_from(payload)[0] & LAST_ID
            payload = payload[5:]
            if depends_on == id:
                self._open(flags, id, payload)  # the table goes on
                raise _StreamFailed(Code.PROTOCOL_ERROR, "a stream depends on itself")
        if flags & END_HEADERS:
            self._open(flags, id, payload)
        else:
            self._block, self._block_id, self._block_flags = [payload], id, flags
            self._block_bytes = len(payload)
            self._block_since = self.now()

    def _take_continuation(self, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise _ConnectionFailed(Code.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._block.append(payload)
        self._block_bytes += len(payload)
        if len(self._block) > PIECES or self._block_bytes > self.limits.header_bytes:
            raise _ConnectionFailed(
                Code.ENHANCE_YOUR_CALM,
                f"a header block of {self._block_bytes} bytes in {len(self._block)} pieces",
            )
        if flags & END_HEADERS:
            block, self._block = b"".join(self._block), None
            self._open(self._block_flags, self._block_id, block)

    def _open(self, flags: int, id: int, block: bytes) -> None:
        """Begin a stream, or end one whose trailers these are."""
        stream = self._streams.get(id)
        if id <= self._last_id and stream is None:
            self._decode(block)
            raise _ConnectionFailed(Code.STREAM_CLOSED, "HEADERS on a stream that is closed")
        headers, fields, length, error, refusal = self._decode(block)
        if stream is not None:
            if stream.is_received:
                raise _ConnectionFailed(Code.STREAM_CLOSED, "HEADERS behind the end of a stream")
            if not flags & END_STREAM or any(name[:1] == b":" for name, _ in headers):
                raise _StreamFailed(Code.PROTOCOL_ERROR, "trailers that do not end their stream")
            if stream.length is not None and stream.received != stream.length:
                raise _StreamFailed(Code.PROTOCOL_ERROR, "a body of another length")
            self._finish(stream)
            return
        self._last_id = id
        self._allowance = min(ALLOWANCE, self._allowance + 1)
        if self._drain_until is not None and self.now() >= self._drain_until:
            return  # after the last id that was told
        if len(self._streams) >= STREAMS:
            raise _StreamFailed(Code.REFUSED_STREAM, f"more than {STREAMS} requests at a time")
        if error is not None:
            raise _StreamFailed(Code.PROTOCOL_ERROR, error)
        self.since = self.now()
        stream = Stream(self, id, headers, fields, self._initial_window)
        stream.length = length
        if length and flags & END_STREAM:
            raise _StreamFailed(Code.PROTOCOL_ERROR, "a body of another length")
        self._streams[id] = stream
        if refusal is None:
            self._app.accept(stream)
        else:
            logger.warning("%s: refused: %s", self.client or "a client", refusal)
            head = [(b":status", b"403"), (b"content-type", b"text/plain")]
            stream.send(HEADERS, header_block(head))
            stream.send(DATA, refusal.encode(), ends=True)
        if flags & END_STREAM:
            self._finish(stream)

    def _decode(self, block: bytes) -> _Block:
        """Return what a header block means.

        Until the table changes, the same bytes mean the same, and most clients' blocks leave it as
        it is from the second on.
        """
        known = self._blocks.get(block)
        if known is not None:
            return known
        table = self._decoder.header_table
        entries = table.dynamic_entries
        before, newest = (len(entries), table.maxsize), entries[0] if entries else None
        try:
            headers: Headers = [(bytes(n), bytes(v)) for n, v in self._decoder.decode(block, True)]
        except OversizedHeaderListError as error:
            raise _ConnectionFailed(Code.ENHANCE_YOUR_CALM, str(error)) from error
        except (HPACKError, ValueError, IndexError, OverflowError) as error:
            raise _ConnectionFailed(Code.COMPRESSION_ERROR, str(error)) from error
        found = self._check(headers)
        now = len(entries), table.maxsize
        is_same = now == before and (not entries or entries[0] is newest)
        if not is_same or len(self._blocks) >= BLOCKS:
            self._blocks.clear()
        if is_same and len(block) <= BLOCK_BYTES and len(headers) <= BLOCK_HEADERS:
            self._blocks[block] = found
        return found

    def _check(self, headers: Headers) -> _Block:
        fields = dict(headers)
        try:
            length = _read_length(headers, fields)
            self._site("POST", {**fields, b"host": fields.get(b":authority", b"")})
        except _StreamFailed as error:
            return _Block(headers, fields, error=str(error))
        except Forbidden as refused:
            return _Block(headers, fields, length, refusal=str(refused))
        return _Block(headers, fields, length)

    # -- control ---------------------------------------------------------------------------------

    def _take_settings(self, flags: int, id: int, payload: bytes) -> None:
        _expect(id == 0, "SETTINGS on a stream")
        self._has_settings = True
        if flags & ACK:
            if payload:
                raise _ConnectionFailed(Code.FRAME_SIZE_ERROR, "an acknowledgement with settings")
            return
        if len(payload) % 6:
            raise _ConnectionFailed(Code.FRAME_SIZE_ERROR, "SETTINGS of a part of a setting")
        self._spend()
        for name, value in _PAIR.iter_unpack(payload):
            if name == ENABLE_PUSH:
                _expect(value <= 1, f"ENABLE_PUSH is {value}")
            elif name == MAX_FRAME:
                _expect(DEFAULT_FRAME <= value <= LARGEST_FRAME, f"MAX_FRAME_SIZE is {value}")
                self._longest = value
            elif name == INITIAL_WINDOW:
                if value > LARGEST_WINDOW:
                    raise _ConnectionFailed(Code.FLOW_CONTROL_ERROR, f"a window of {value}")
                change, self._initial_window = value - self._initial_window, value
                for stream in self._streams.values():
                    stream.window += change
                    if stream.window > LARGEST_WINDOW:
                        raise _ConnectionFailed(Code.FLOW_CONTROL_ERROR, "a window too large")
        self._write(frame(SETTINGS, ACK, 0))
        self._push_all()

    def _take_window_update(self, id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise _ConnectionFailed(Code.FRAME_SIZE_ERROR, "WINDOW_UPDATE is not 4 bytes")
        change = _NUMBER.unpack(payload)[0] & LAST_ID
        if id == 0:
            _expect(change > 0, "WINDOW_UPDATE by 0")
            self._window += change
            if self._window > LARGEST_WINDOW:
                raise _ConnectionFailed(Code.FLOW_CONTROL_ERROR, "a window too large")
            self._push_all()
            return
        _expect(id % 2 == 1 and id <= self._last_id, "WINDOW_UPDATE on a stream that is idle")
        stream = self._streams.get(id)
        if stream is None:
            return
        if not change:
            raise _StreamFailed(Code.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        stream.window += change
        if stream.window > LARGEST_WINDOW:
            raise _StreamFailed(Code.FLOW_CONTROL_ERROR, "a window too large")
        self.push(stream)

    def _take_ping(self, flags: int, id: int, payload: bytes) -> None:
        _expect(id == 0, "PING on a stream")
        if len(payload) != 8:
            raise _ConnectionFailed(Code.FRAME_SIZE_ERROR, "PING is not 8 bytes")
        if not flags & ACK:
            self._spend()
            self._write(frame(PING, ACK, 0, payload))

    def _take_reset(self, id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise _ConnectionFailed(Code.FRAME_SIZE_ERROR, "RST_STREAM is not 4 bytes")
        _expect(id % 2 == 1 and id <= self._last_id, "RST_STREAM on a stream that is idle")
        self._spend()
        stream = self._streams.pop(id, None)
        if stream is not None:
            self._spend()  # more than it brought: it opened, and was given up
            stream.leave()
            self._close_if_drained()

    def _spend(self) -> None:
        """Count a frame that asks for work and brings none.

        Raises:
            _ConnectionFailed: there were too many.
        """
        self._allowance -= 1
        if self._allowance < 0:
            raise _ConnectionFailed(Code.ENHANCE_YOUR_CALM, "too many frames that bring no work")

    # -- writing ---------------------------------------------------------------------------------

    def push(self, stream: Stream) -> None:
        """Send what waits of a stream, as far as the client takes it."""
        if self._is_over or self._paused_at is not None or stream.has_left:
            return
        most = max(0, min(stream.window, self._window))
        before = stream.unsent
        frames = stream.pull(most, self._longest)
        if frames:
            self._window -= before - stream.unsent
            self._out += frames
            self._flush_soon()
            self._forget_if_over(stream)

    def _push_all(self) -> None:
        for stream in tuple(self._streams.values()):
            if stream.is_waiting:
                self.push(stream)

    def _forget_if_over(self, stream: Stream) -> None:
        if not stream.has_ended or stream.is_waiting:
            return
        if not stream.is_received:  # its answer came before its end: the client need not go on
            self._out.append(frame(RST_STREAM, 0, stream.id, _NUMBER.pack(Code.NO_ERROR)))
            self._flush_soon()
        if self._streams.pop(stream.id, None) is not None:
            self.since = self.now()
            self._close_if_drained()

    def reset(self, stream: Stream, code: Code) -> None:
        """Give a stream up."""
        if self._streams.pop(stream.id, None) is not None and not self._is_over:
            self._write(frame(RST_STREAM, 0, stream.id, _NUMBER.pack(code)))
            stream.leave()
            self._close_if_drained()

    def _write(self, data: bytes) -> None:
        self._out.append(data)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self._call_soon(self._flush)

    def _flush(self) -> None:
        """Write what has gathered in this turn of the loop."""
        self._is_flushing = False
        self._count()
        out, self._out = self._out, []
        if out and not self.transport.is_closing():
            if len(out) == 1 or sum(map(len, out)) <= 1 << 16:
                self.transport.write(b"".join(out))
            else:
                self.transport.writelines(out)

    def _count(self) -> None:
        """Have the budget know what the client has not taken."""
        change, self._counted = self.unsent - self._counted, self.unsent
        if change > 0:
            self.budget.add(change)
        elif change:
            self.budget.give_back(-change)

    def pause_writing(self) -> None:
        """Keep what comes: the client takes less than it is sent."""
        self._paused_at = self.now()

    def resume_writing(self) -> None:
        """Go on."""
        self._paused_at = None
        self._push_all()

    # -- the end ---------------------------------------------------------------------------------

    def _fail(self, error: _ConnectionFailed) -> None:
        logger.warning("%s: HTTP/2: %s", self.client or "a client", error)
        reason = str(error).encode("ascii", "replace")[:200]
        payload = _NUMBER.pack(self._last_id) + _NUMBER.pack(error.code) + reason
        self._out.append(frame(GOAWAY, 0, 0, payload))
        self._end()

    def _end(self) -> None:
        self._flush()
        self._is_over = True
        for stream in tuple(self._streams.values()):
            stream.leave()
        self._streams.clear()
        self.transport.close()

    def announce_end(self) -> None:
        """Take no new requests: tell so, and after a while of which the last one is."""
        if self._drain_until is None and not self._is_over:
            self._drain_until = self.now() + 0.2
            self._write(frame(GOAWAY, 0, 0, _NUMBER.pack(LAST_ID) + _NUMBER.pack(0)))

    def _close_if_drained(self) -> None:
        until = self._drain_until
        if until is not None and not self._streams and not self._is_over and self.now() >= until:
            self._close_well()

    def _close_well(self) -> None:
        self._out.append(
            frame(GOAWAY, 0, 0, _NUMBER.pack(self._last_id) + _NUMBER.pack(Code.NO_ERROR))
        )
        self._end()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being received or answered."""
        return bool(self._streams)

    @property
    def is_idle(self) -> bool:
        """Whether it could be closed without anybody losing an answer."""
        streams = self._streams.values()
        return not self.transport.is_closing() and all(each.is_idle() for each in streams)

    def check(self, now: float) -> None:
        """Close what its client has left alone, or feeds or empties too slowly."""
        took_s, self._checked_at = now - self._checked_at, now
        self._allowance = min(ALLOWANCE, self._allowance + ALLOWANCE_PER_S * took_s)
        limits = self.limits
        paused_s = now - self._paused_at if self._paused_at is not None else 0.0
        aged_s = now - self._opened_at - limits.age_s
        if self._is_over or paused_s > limits.transfer_timeout_s:
            self.transport.abort()  # it does not even take what has been written
        elif aged_s > limits.age_grace_s:
            self._close_well()
        elif self._block is not None and now - self._block_since > limits.head_timeout_s:
            self._fail(_ConnectionFailed(Code.ENHANCE_YOUR_CALM, "a header block takes too long"))
        elif not self._streams:
            self._close_if_drained()
            if not self._is_over and (now - self.since > limits.keep_alive_s or aged_s > 0):
                self._drain_until = now
                self._close_if_drained()
        else:
            if aged_s > 0:
                self.announce_end()
            for stream in tuple(self._streams.values()):
                if self._is_slow(stream, now):
                    logger.warning("%s: stream %d is too slow", self.client, stream.id)
                    self.reset(stream, Code.CANCEL)

    def _is_slow(self, stream: Stream, now: float) -> bool:
        """Return whether a client feeds or empties a stream too slowly."""
        timeout_s = self.limits.transfer_timeout_s
        if stream.is_waiting:
            is_short = self.budget.is_short and stream.unsent > UNCOUNTED_BYTES
            return stream.pace.is_slow("answer", now, stream.sent, timeout_s, is_short)
        if stream.is_received or stream.is_held or stream.rests():
            stream.pace.stop()
            return False
        return stream.pace.is_slow("body", now, stream.received, timeout_s, is_short=False)


def _expect(is_met: bool, reason: str, id: int = 0) -> None:
    """Raise unless something is met: for the stream where one is named, else for the connection."""
    if not is_met:
        if id:
            raise _StreamFailed(Code.FRAME_SIZE_ERROR if "bytes" in reason else
                                Code.PROTOCOL_ERROR, reason)  # fmt: skip
        raise _ConnectionFailed(Code.PROTOCOL_ERROR, reason)


def _without_padding(payload: bytes, flags: int) -> bytes:
    """Return what a frame's payload holds beside its padding."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise _ConnectionFailed(Code.PROTOCOL_ERROR, "as much padding as payload")
    return payload[1 : len(payload) - payload[0]]


def _read_length(headers: Headers, fields: Mapping[bytes, bytes]) -> int | None:
    """Return the body's length where the headers say it.

    https://www.rfc-editor.org/rfc/rfc9113#section-8

    Raises:
        _StreamFailed: they are not a request's.
    """
    names = [name for name, _ in headers]
    pseudo = [name for name in names if name[:1] == b":"]
    if any(late[:1] == b":" and early[:1] != b":" for early, late in pairwise(names)):
        raise _malformed("a pseudo-header behind a header")
    if len(set(pseudo)) < len(pseudo) or not _PSEUDO.issuperset(pseudo):
        raise _malformed("pseudo-headers that no request has")
    if not fields.get(b":path") or not fields.get(b":method") or b":scheme" not in fields:
        raise _malformed("a pseudo-header is missing")
    for name, value in headers:
        if name[:1] != b":" and (name in _FORBIDDEN or _NAME.fullmatch(name) is None):
            raise _malformed(f"the header {name[:40]!r}")
        if _VALUE.fullmatch(value) is None:
            raise _malformed(f"the value of the header {name[:40]!r}")
    if fields.get(b"te", b"trailers") != b"trailers":
        raise _malformed("te is not trailers")
    if (length := fields.get(b"content-length")) is None:
        return None
    if names.count(b"content-length") > 1 or not length.isdigit() or len(length) > 18:
        raise _malformed("the header content-length")
    return int(length)


def _malformed(reason: str) -> _StreamFailed:
    return _StreamFailed(Code.PROTOCOL_ERROR, reason)
