"""One gRPC call: a stream of HTTP/2 ↔ messages, a status, a deadline.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import struct
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache, partial
from time import monotonic
from typing import Any
from urllib.parse import quote

from modelyard.plugins.grpc.http2 import DATA, HEADERS, Stream, header_block
from modelyard.serve.dataplane.tracing import trace_id_of
from modelyard.serve.dataplane.wire import VERSION_HEADER, Buffer
from modelyard.serve.http.application import REQUEST_ID, request_id
from modelyard.serve.http.connection import Access, Answered, Headers, Served

logger = logging.getLogger(__name__)

PREFIX = struct.Struct(">BI")
"""Before each message: whether it is compressed, and its length."""
PIECE_BYTES = 1 << 14
"""Shorter pieces of a message are put together: each would keep alive all that it came with."""
JOIN_BYTES = 1 << 14
"""Messages below this are sent in one piece."""
MESSAGE_BYTES = 1500
"""Longest text of a status; grpcio refuses trailers of more than 8 KB, each byte may become 3."""
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
"""Compressions that are read, by zlib; answers are sent as they are."""
_ACCEPTED = (b"grpc-accept-encoding", b"identity,deflate,gzip")
_HEAD = [(b":status", b"200"), (b"content-type", b"application/grpc"), _ACCEPTED]
_OK = header_block([(b"grpc-status", b"0")])
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


@lru_cache(maxsize=256)
def _head(served: Served, outcome: str) -> bytes:
    """Return what an answer's metadata begin with, by the model that gives it, and how."""
    version = [] if served is None else [(VERSION_HEADER, served[1].encode())]
    cache = [(b"x-cache", outcome.encode())] if outcome else []
    return header_block([*_HEAD, *version, *cache])


class Status(IntEnum):
    """https://grpc.io/docs/guides/status-codes/."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


STATUSES: Mapping[int, Status] = {
    400: Status.INVALID_ARGUMENT,
    401: Status.UNAUTHENTICATED,
    403: Status.PERMISSION_DENIED,
    404: Status.NOT_FOUND,
    409: Status.ABORTED,
    413: Status.RESOURCE_EXHAUSTED,
    416: Status.OUT_OF_RANGE,
    429: Status.RESOURCE_EXHAUSTED,
    499: Status.CANCELLED,
    501: Status.UNIMPLEMENTED,
    503: Status.UNAVAILABLE,
    504: Status.DEADLINE_EXCEEDED,
}
"""By HTTP status, as TorchServe's gRPC has them."""


HTTP_STATUSES: Mapping[Status, int] = {
    **{status: code for code, status in reversed(list(STATUSES.items()))}, Status.INTERNAL: 500
}  # fmt: skip


def status_of(http_status: int) -> Status:
    """Return what an HTTP status is in gRPC."""
    known = STATUSES.get(http_status)
    if known is not None:
        return known
    if http_status < 300:
        return Status.OK
    return Status.FAILED_PRECONDITION if http_status < 500 else Status.INTERNAL


class RpcError(Exception):
    """A call ends with this status."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class Message:
    """One message, in pieces as it came; at least one."""

    __slots__ = ("held", "pieces")

    def __init__(self, pieces: list[Buffer]) -> None:
        self.pieces = pieces
        self.held = 0
        """Bytes of it that count among the bodies that the server holds."""

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)


class Rpc:
    """One call, as a service sees it.

    Args:
        stream: which the service's `begin` was called for.
        most_bytes: longest message.
        on_end: called with the call when it is over, once.

    Attributes:
        method: full name, `/package.Service/Method`.
        id: of the request, the client's own where it has one.
        timeout_s: how long the client waits; infinite where it does not say.
        has_left: nobody waits for the answer any more; it may have been given.
        on_message: called with each message.
        keeps_messages: whether they count among the bodies that the server holds until `release`.
        served: model and version that it reached.
        outcome: of looking for an answer that is kept; empty where none are.
        sent: bytes of messages so far.
        may_rest: whether the client may leave the call alone between messages.
        on_whole: called when there are no more.
        on_left: called when the client gives up.
        is_counted: whether it is among the requests of a model, or of none.
    """

    __slots__ = (
        "_encoding",
        "_held",
        "_is_compressed",
        "_is_paused",
        "_is_reading",
        "_is_started",
        "_is_whole",
        "_is_within",
        "_missing",
        "_most_bytes",
        "_on_end",
        "_parts",
        "_prefix",
        "_unread",
        "began",
        "has_left",
        "id",
        "is_counted",
        "is_over",
        "keeps_messages",
        "may_rest",
        "method",
        "on_left",
        "on_message",
        "on_whole",
        "outcome",
        "sent",
        "served",
        "status",
        "stream",
        "timeout_s",
        "trace_id",
    )

    def __init__(self, stream: Stream, most_bytes: int, on_end: Callable[[Rpc], None]) -> None:
        fields = stream.fields
        self.stream = stream
        self.method = fields[b":path"].decode("latin-1")
        self.id = request_id(stream.headers, REQUEST_ID)
        self.began = monotonic()
        self.has_left = self.is_over = self._is_started = False
        self.is_counted = False
        self.status = Status.UNKNOWN
        self.served: Served = None
        self.sent = 0
        self.trace_id = ""
        self.outcome = ""
        self.timeout_s = math.inf
        self.on_message: Callable[[Message], None] | None = None
        self.on_whole: Callable[[], None] | None = None
        self.on_left: Callable[[], None] | None = None
        self._encoding = fields.get(b"grpc-encoding", b"identity")
        self._most_bytes = most_bytes
        self._on_end = on_end
        self._prefix = b""
        """Of a message, as long as it is not whole."""
        self._parts: list[Buffer] = []
        """Of a message that is not whole."""
        self._is_within = self._is_compressed = False
        self._missing = 0
        """Bytes of a message that has begun."""
        self._held = 0
        """Bytes that count among the bodies that the server holds."""
        self.keeps_messages = False
        self._is_paused = self._is_reading = self._is_whole = False
        self._unread: deque[Buffer] = deque()
        """What came since the pause."""
        self.may_rest = False
        stream.take, stream.finished, stream.gone = self._take, self._finished, self._gone
        stream.rests, stream.is_idle = self._rests, self._is_idle

    @property
    def metadata(self) -> Headers:
        """What the client sent with the call, pseudo-headers included."""
        return self.stream.headers

    def is_left(self) -> bool:
        """Return whether nobody waits for the answer any more."""
        return self.has_left

    # -- messages in -----------------------------------------------------------------------------

    def unary(self, then: Callable[[Message], None]) -> None:
        """Call `then` with the one message, when the client has sent it and ended."""
        messages: list[Message] = []
        self.keeps_messages = True

        def finished() -> None:
            if len(messages) == 1:
                self.guard(lambda: then(messages[0]))
            else:
                self.fail(Status.UNIMPLEMENTED, f"{len(messages)} messages; expected one")

        def take(message: Message) -> None:
            messages.append(message)
            if len(messages) > 1:
                finished()

        self.on_message, self.on_whole = take, finished

    def pause(self) -> None:
        """Hand on no more messages, and have the client send no more than it may already."""
        self._is_paused = True
        self.stream.hold()

    def resume(self) -> None:
        """Go on."""
        self._is_paused = False
        if self._is_reading:
            return
        while self._unread and not self._is_paused:
            self._read(self._unread.popleft())
        if not self._is_paused:
            self.stream.release()
            if self._is_whole:
                self._finished()

    def _rests(self) -> bool:
        return self.may_rest and not (self._is_within or self._prefix)

    def _is_idle(self) -> bool:
        return self._held == 0 and self._rests()

    def _take(self, piece: Buffer) -> None:
        self._hold(len(piece))
        if len(piece) < self._missing and not self._is_paused:
            self._missing -= len(piece)
            self._keep(piece)
        elif not self._is_paused:
            self._read(piece)
            if not self._is_paused:
                self.stream.release()  # it may have been paused for a moment
        elif self._unread and isinstance(self._unread[-1], bytearray):
            self._unread[-1] += piece
        else:
            self._unread.append(bytearray(piece))

    def _read(self, data: Buffer) -> None:
        """Take messages out of what came."""
        self._is_reading = True
        piece = memoryview(data)
        while not self.is_over:
            if self._is_paused and piece:
                self._unread.appendleft(piece)
                break
            if not self._is_within:
                prefix: Buffer = piece
                if self._prefix or len(piece) < PREFIX.size:
                    size = PREFIX.size - len(self._prefix)
                    prefix = self._prefix = self._prefix + bytes(piece[:size])
                    if len(prefix) < PREFIX.size:
                        break
                    piece = piece[size:]
                else:
                    piece = piece[PREFIX.size :]
                self._begin_message(*PREFIX.unpack_from(prefix))
                continue
            part = piece[: self._missing]
            piece = piece[self._missing :]
            self._missing -= len(part)
            self._keep(part)
            if self._missing:
                break
            self._end_message()
        self._is_reading = False

    def _begin_message(self, is_compressed: int, length: int) -> None:
        self._prefix = b""
        if length > self._most_bytes:
            self.fail(
                Status.RESOURCE_EXHAUSTED,
                f"a message of {length} bytes; at most {self._most_bytes} are taken",
            )
        self._is_within, self._is_compressed, self._missing = True, bool(is_compressed), length

    def _keep(self, part: Buffer) -> None:
        parts = self._parts
        if len(part) >= PIECE_BYTES or not (parts or self._missing):
            parts.append(part)
        elif parts and isinstance(parts[-1], bytearray):
            parts[-1] += part
        else:
            parts.append(bytearray(part))

    def _end_message(self) -> None:
        """Hand on a message that is whole."""
        message = Message(self._parts)
        self._is_within, self._parts = False, []
        length = len(message)
        if self._is_compressed:
            try:
                message.pieces = [self._decompress(bytes(message))]
            except RpcError as error:
                self.fail(error.status, str(error))
                return
            self._hold(len(message) - length)
            length = len(message)
        message.held = PREFIX.size + length
        if self.on_message is not None and not self.is_over:
            self.on_message(message)
        if not self.keeps_messages:
            self.release(message)

    def release(self, message: Message) -> None:
        """Count a message no more among the bodies that the server holds."""
        if not self.is_over:
            self._hold(-message.held)

    def _hold(self, size: int) -> None:
        """Count so many bytes more among the bodies that the server holds."""
        budget = self.stream.connection.budget
        self._held += size
        budget.bodies += size
        if size > 0 and budget.bodies > budget.body_limit:
            self.fail(
                Status.UNAVAILABLE,
                f"the bodies of requests take {budget.bodies} bytes; {budget.body_limit} are "
                "allowed (request_memory_bytes)",
            )

    def _decompress(self, message: bytes) -> bytes:
        bits = _WINDOW_BITS.get(self._encoding)
        if bits is None:
            encoding = self._encoding.decode("latin-1")
            is_known = encoding == "identity"
            raise RpcError(
                Status.INTERNAL if is_known else Status.UNIMPLEMENTED,
                f"a compressed message under grpc-encoding {encoding}; expected gzip or deflate",
            )
        reader = zlib.decompressobj(bits)
        try:
            data = reader.decompress(message, self._most_bytes + 1)
        except zlib.error as error:
            raise RpcError(Status.INTERNAL, f"a message cannot be decompressed: {error}") from error
        if len(data) > self._most_bytes:
            raise RpcError(
                Status.RESOURCE_EXHAUSTED,
                f"a message of more than {self._most_bytes} bytes, decompressed",
            )
        if not reader.eof:
            raise RpcError(Status.INTERNAL, "a compressed message ends too early")
        return data

    def _finished(self) -> None:
        self._is_whole = True
        if self.is_over or self._is_paused:
            return
        if self._is_within or self._prefix:
            self.fail(Status.INTERNAL, "the call ends within a message")
        elif self.on_whole is not None:
            self.on_whole()

    def _gone(self) -> None:
        on_left = self.on_left
        self._end(Status.CANCELLED)
        if on_left is not None:
            on_left()

    # -- answers ---------------------------------------------------------------------------------

    def guard(self, run: Callable[[], None]) -> None:
        """Run something, and end the call with the error that it raises."""
        try:
            run()
        except RpcError as error:
            self.fail(error.status, str(error))
        except Exception:
            logger.exception("%s failed", self.method)
            self.fail(Status.INTERNAL, "the server failed; its log says why")

    def send(self, *message: Buffer) -> None:
        """Send one message, given in parts."""
        if not self.is_over:
            for kind, payload in self._begun(message):
                self.stream.send(kind, payload)

    def reply(self, *message: Buffer) -> None:
        """Send the one answer, and the end."""
        if not self.is_over:
            self.stream.send_last(*self._begun(message), (HEADERS, _OK))
            self._end(Status.OK)

    def finish(self) -> None:
        """End the call well."""
        if not self.is_over:
            self.stream.send_last(*self._begun(()), (HEADERS, _OK))
            self._end(Status.OK)

    def _begun(self, message: Sequence[Buffer]) -> list[tuple[int, Buffer]]:
        """Return what is to be sent for a message, and before the first."""
        parts: list[tuple[int, Buffer]] = []
        if not self._is_started:
            self._is_started = True
            parts.append((HEADERS, _head(self.served, self.outcome)))
        if message:
            size = sum(map(len, message))
            self.sent += size
            prefix = PREFIX.pack(0, size)
            if size < JOIN_BYTES:
                parts.append((DATA, b"".join((prefix, *message))))
            else:
                parts += ((DATA, part) for part in (prefix, *message))
        return parts

    def fail(self, status: Status, message: str = "") -> None:
        """End the call with an error."""
        if self.is_over:
            return
        text = message.encode()[:MESSAGE_BYTES].decode(errors="ignore")
        trailers = [(b"grpc-status", b"%d" % status)]
        if text:
            trailers.append((b"grpc-message", quote(text, safe=_PRINTABLE).encode()))
        block = header_block(trailers)
        head = b"" if self._is_started else _head(self.served, self.outcome)
        self.stream.send(HEADERS, head + block, ends=True)
        self._end(status)

    def run(self, answering: Coroutine[Any, Any, None]) -> None:
        """Have a task answer; the call ends with the error that it raises."""
        task = asyncio.get_running_loop().create_task(answering)
        _running.add(task)

        def done(task: asyncio.Task[None]) -> None:
            _running.discard(task)
            if not task.cancelled():
                self.guard(task.result)

        task.add_done_callback(done)

    async def drain(self) -> None:
        """Wait until the client has taken most of what was sent."""
        await self.stream.drain()

    def _end(self, status: Status) -> None:
        if not self.is_over:
            self.is_over = self.has_left = True
            self.status = status
            self._hold(-self._held)
            self._parts.clear()
            self._unread.clear()
            # Stream and call hold each other, and the messages: what is left to the collector
            # stays for long.
            self.stream.forget()
            self.on_message = self.on_whole = self.on_left = None
            self._on_end(self)


_running: set[asyncio.Task[None]] = set()
"""The loop holds its tasks weakly."""


def read_timeout(value: bytes) -> float:
    """Return the seconds that a value of grpc-timeout says.

    Raises:
        RpcError: it is not one.
    """
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        seen = value[:40].decode("ascii", "backslashreplace")
        raise RpcError(Status.INVALID_ARGUMENT, f'grpc-timeout is "{seen}"; expected as in 150m')
    return int(match[1]) * _UNITS[match[2]]


Method = Callable[[Rpc], None]
"""Begins to answer a call, whose messages are still to come; it may raise an RpcError."""


class Services:
    """Routes calls to the methods of services: what a connection of HTTP/2 answers with.

    Args:
        methods: by full name.
        check: raises an RpcError unless a call may pass; it comes before everything else.
        most_bytes: longest message.
        access: called with each call, for an access log.
        on_end: called with each call that is over.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        check: Callable[[Rpc], None],
        most_bytes: int,
        access: Access | None = None,
        on_end: Callable[[Rpc], None] | None = None,
    ) -> None:
        self._on_end = on_end
        self._methods = methods
        self._check = check
        self._most_bytes = most_bytes
        self._access = access

    def accept(self, stream: Stream) -> None:
        """Begin to answer a call."""
        fields = stream.fields
        if fields[b":method"] != b"POST":
            _refuse(stream, b"405", b"gRPC's requests are POST")
            return
        kind = fields.get(b"content-type", b"")
        if not kind.startswith(b"application/grpc") or kind[16:17] not in (b"", b"+", b";"):
            _refuse(stream, b"415", b"over HTTP/2 this server speaks gRPC: use HTTP/1.1 for REST")
            return
        rpc = Rpc(stream, self._most_bytes, self._log)
        rpc.guard(partial(self._begin, rpc))

    def _begin(self, rpc: Rpc) -> None:
        if (timeout := rpc.stream.fields.get(b"grpc-timeout")) is not None:
            rpc.timeout_s = read_timeout(timeout)
        self._check(rpc)
        method = self._methods.get(rpc.method)
        if method is None:
            name = rpc.method.removeprefix("/")
            raise RpcError(Status.UNIMPLEMENTED, f"Method not found: {name}")
        method(rpc)

    def _log(self, rpc: Rpc) -> None:
        if self._access is not None:
            client = rpc.stream.connection.client
            took_s = monotonic() - rpc.began
            name = rpc.method.removeprefix("/")
            self._access(
                Answered(
                    client, "gRPC", name, rpc.status, took_s, rpc.id, rpc.sent, rpc.served,
                    rpc.trace_id or trace_id_of(rpc.metadata), rpc.outcome,
                )
            )  # fmt: skip
        if self._on_end is not None:
            self._on_end(rpc)


def _refuse(stream: Stream, status: bytes, text: bytes) -> None:
    """Answer a request that is not gRPC's."""
    headers = [(b":status", status), (b"content-type", b"text/plain"),
               (b"content-length", b"%d" % len(text))]  # fmt: skip
    stream.send(HEADERS, header_block(headers))
    stream.send(DATA, text, ends=True)
