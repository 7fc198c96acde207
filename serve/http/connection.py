"""One client connection: bytes → requests for the application → its answers, in their order.

httptools parses; nothing else does, for a lenient parser lets one request hide in another's body.
What it lets pass and RFC 9112 does not is refused here, and so is what costs more than it should.
Nothing is timed on the way of a request: the listener asks each connection now and then, by
`check`, whether its client is too slow.
"""

import asyncio
import contextlib
import logging
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import unquote

from modelyard.serve import errors
from modelyard.serve.dataplane.tracing import trace_id_of
from modelyard.serve.dataplane.wire import Buffer, Payload
from modelyard.serve.front.begin import BAD_NAME, BAD_VALUE, Release, Served
from modelyard.serve.front.begin import Headers as Headers
from modelyard.serve.http.heads import END, Again, Head, Heads

if TYPE_CHECKING:
    from modelyard.serve.http.listener import Listener

try:
    import httptools
except ImportError:
    HAS_PARSER = False
else:
    HAS_PARSER = True
"""No other parser is as strict; `Listener` refuses to start without this one."""

logger = logging.getLogger(__name__)

UNCOUNTED_BYTES = 1 << 14
"""Bytes of an answer that a client has not taken, and of a body, that do not count against the
budget; more do."""
JOIN_BYTES = 1 << 16
"""Bodies below this are copied behind their head: uvloop's write of one buffer is the fast one."""
SLICE_BYTES = 8192
"""Heads and chunks are parsed in pieces of this size, so that limits are seen before the end of
what was received: uvloop reads 256 KB at once."""
TARGET_BYTES = 16384
"""Longest request target; TorchServe takes a request line of 4096 bytes."""
BODILESS = (204, 205, 304)
"""Statuses of answers that end with their head, whatever a handler says (RFC 9110, 6.4.1)."""
HEADER_COUNT = 1000
"""A head of this many fields costs 1 ms; browsers and proxies send fewer than 100."""
FRAMING_BYTES = 16384
"""What chunk sizes, their extensions and trailers may take beyond half of the body's own size:
chunks of 12 bytes pass, a body of single bytes and a long extension do not."""
PIPELINED = 64
"""Requests that may wait on one connection for the answer before theirs."""
MIN_RATE = 500
"""Bytes per second, over `transfer_timeout_s`, below which a client is too slow; Apache's value."""
SHORT_RATE = 1 << 16
"""The same over `SHORT_S`, for clients whose answers take the memory that workers wait for."""
SHORT_S = 2.0
_LAST_RECEIVED = slice(52, 56)
"""Place in the kernel's `struct tcp_info` of the milliseconds since the last bytes came, a u32."""
LINGER_S = 2.0
"""How long a client may go on sending after the last answer, so that it can read that answer: a
socket that is closed with bytes unread resets the connection."""

Answer = tuple[int, Headers, bytes]
"""Status, headers and body."""


class Answered(NamedTuple):
    """What an access log may say of one answer: nothing of what came, or of what went back."""

    client: tuple[str, int] | None
    """Host and port; None on a Unix socket."""
    method: str
    """`gRPC` for its calls."""
    target: str
    """Path and query as the client wrote them; the full name of gRPC's method."""
    status: int
    """LEFT where the client left before it; gRPC's own for its calls."""
    seconds: float
    """Time from the request's last header to the end of the answer."""
    id: str
    """Id of the request."""
    size: int
    """Bytes of the answer's body."""
    served: Served
    trace_id: str
    outcome: str = ""
    """Outcome of looking for an answer that is kept; empty where none are."""


Access = Callable[[Answered], None]
"""Called with each answer."""
LEFT = 499
"""Status of a client that left, as nginx has it."""


class Pace:
    """How fast something comes, or goes."""

    __slots__ = ("_progress", "_since", "what")

    def __init__(self) -> None:
        self.what: object = None
        self._since, self._progress = 0.0, 0

    def stop(self) -> None:
        """Begin anew with the next thing."""
        self.what = None

    def is_slow(
        self, what: object, now: float, progress: int, timeout_s: float, is_short: bool
    ) -> bool:
        """Return whether less than the rate has come, or gone, in the time that ends now.

        Args:
            what: is measured; another thing than before begins anew.
            progress: bytes so far.
            timeout_s: over which `MIN_RATE` is kept.
            is_short: workers wait for the memory that it takes.
        """
        rate = MIN_RATE
        if is_short:
            rate, timeout_s = SHORT_RATE, min(SHORT_S, timeout_s)
        if self.what is what and now - self._since < timeout_s:
            return False
        is_new, moved = self.what is not what, progress - self._progress
        self.what, self._since, self._progress = what, now, progress
        return not is_new and moved < rate * timeout_s


class Accepts(Protocol):
    """What answers requests: an application, or several on one port."""

    def accept(self, cycle: "RequestResponseCycle") -> None:
        """Begin to answer a request, whose head is there and whose body may come later.

        It raises nothing. The answer comes now or later, by `send_whole` or from a task (`run`).
        """

    def refuse(self, error: Exception, cycle: "RequestResponseCycle | None") -> Answer:
        """Return the last answer on a connection, to what is not a request, or to its body."""


IDLE, HEAD, BODY, ENDING = range(4)
"""What a connection reads: nothing, a request's head, its body; or it only waits for its end."""

_FETCH_SITE = b"sec-fetch-site"


STATUS_LINES = {status: f"HTTP/1.1 {status} \r\n".encode() for status in range(100, 600)}
STATUS_LINES |= {each: f"HTTP/1.1 {each} {each.phrase}\r\n".encode() for each in HTTPStatus}


def write_head(status: int, headers: Headers, keeps_alive: bool) -> bytes | None:
    """Return an answer's head; None where a header has a line break inside, for `start` to refuse.

    Args:
        headers: all but `Connection`.
        keeps_alive: whether the connection stays open.
    """
    lines = [STATUS_LINES[status]]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    lines.append(b"\r\n" if keeps_alive else b"connection: close\r\n\r\n")
    head = b"".join(lines)
    line_count = len(headers) + 2 + (not keeps_alive)
    return head if head.count(b"\n") == line_count == head.count(b"\r") else None


class RequestResponseCycle:
    """One request and its answer, as an application sees them.

    Attributes:
        head: what its head says, of which the next attributes are parts.
        received: bytes of the body so far.
        framing: bytes that came with them and are not part of the body.
        has_left: nobody waits for the answer.
    """

    received = 0
    framing = 0
    is_chunked = False
    is_received = False
    expects_continue = False
    has_left = False
    is_started = False
    is_complete = False
    is_begun = False
    again: Again | None = None
    """When the same may be refused again, and what counts it then."""
    keeps_alive = True
    is_refused = False
    """Whether it was refused for too much work; its client may have to wait before it is read
    again."""
    is_usual = False
    """Whether its Content-Length alone says where it ends, and no page of a browser sent it."""
    began = 0.0
    status = LEFT
    sent = 0
    """Bytes of the answer's body so far."""
    id = ""
    served: Served = None
    trace_id = ""
    outcome = ""
    release: Release | None = None
    is_logged = False
    task: asyncio.Task[None]
    _then: Callable[[Sequence[Buffer]], None] | None = None
    """What gets the body."""
    _is_answer_chunked: bool | None = None
    _counted = 0
    """Bytes of the body that the budget knows of."""
    _missing = 0
    """Bytes of the answer that its Content-Length still promises."""

    def __init__(self, connection: "Connection", head: Head) -> None:
        self.connection = connection
        self.transport = connection.transport
        self.head = head
        self.method = head.method
        self.path = head.path
        self.query = head.query
        self.headers = head.headers
        self.spelled = head.spelled
        self.coding = head.coding
        self.length = head.length
        self.parts: list[Buffer] = []

    # -- the request -----------------------------------------------------------------------------

    def read_body(self, then: Callable[[Sequence[Buffer]], None]) -> None:
        """Call `then`, which raises nothing, with the body as it came in parts, once it is whole.

        Where it does not come, or is too large, the connection answers.
        """
        if self.is_received:
            parts, self.parts = self.parts, []
            then(parts or [b""])
            return
        self._then = then
        if self.expects_continue and not self.is_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def deliver(self) -> None:
        """Hand the body, which is whole, to who waits for it."""
        if self._then is not None:
            then, self._then = self._then, None
            parts, self.parts = self.parts, []
            then(parts or [b""])

    def put(self, body: Buffer) -> None:
        """Take a piece of the body.

        Raises:
            BodyTooLarge: it crosses the limit.
            Unavailable: all bodies together cross theirs.
        """
        self.received += len(body)
        if self.is_complete or self.has_left:
            return
        if self.received > self.connection.settings.max_request_bytes:
            raise errors.BodyTooLarge(self.connection.settings.max_request_bytes)
        self.parts.append(body)
        if self.received > UNCOUNTED_BYTES:
            self._count_body(self.received)

    def _count_body(self, size: int) -> None:
        """Count this much of the body among those that the server holds."""
        budget = self.connection.budget
        budget.bodies += size - self._counted
        self._counted = size
        if size and budget.bodies > budget.body_limit:
            raise errors.Unavailable(
                f"the bodies of requests take {budget.bodies} bytes; {budget.body_limit} are "
                "allowed (request_memory_bytes)",
                retry_after_s=1,
            )

    @property
    def client(self) -> tuple[str, int] | None:
        """Address and port of who sent it; None of a Unix socket."""
        return self.connection.client

    def is_left(self) -> bool:
        """Return whether nobody waits for the answer any more."""
        return self.has_left

    def leave(self) -> None:
        """Note that nobody waits for the answer any more."""
        self.has_left = True
        self._then = None
        self.let_go()

    def let_go(self) -> None:
        """Count it no more among what is held, and what its token has at once."""
        if self._counted:
            self._count_body(0)
        if self.release is not None:
            self.release()
            self.release = None

    # -- the answer ------------------------------------------------------------------------------

    def run(self, answering: Awaitable[None]) -> None:
        """Have a task answer."""
        # The loop keeps no strong reference to a task.
        self.task = self.connection.loop.create_task(self._run(answering))

    async def _run(self, answering: Awaitable[None]) -> None:
        try:
            if self.served is None:  # by no worker: what it costs is this process's
                async with self.connection.turns.one:
                    await asyncio.sleep(0)
            await answering
            if self.is_complete or self.has_left or self.task is not asyncio.current_task():
                return
            if not self.is_started:
                raise RuntimeError("the application returned without an answer")
        except Exception as error:
            logger.exception("%s %s failed", self.method, self.path)
            if not self.is_started and not self.has_left:
                status, headers, body = self.connection.app.refuse(error, self)
                headers = [*headers, (b"content-length", b"%d" % len(body))]
                self.keeps_alive = False
                await self.start(status, headers)
                await self.write(body)
        if not self.is_complete and not self.has_left:
            self.transport.close()  # without its end, so that no part is taken for the whole

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head of an answer; where it names no length, the body goes in chunks.

        Raises:
            RuntimeError: it is not HTTP.
        """
        await self.connection.drain()
        if self.has_left:
            return
        if self.is_started:
            raise RuntimeError("a second head")
        own: Headers = []
        for name, value in headers:
            if BAD_NAME.search(name) or BAD_VALUE.search(value):
                raise RuntimeError(f"the header {name!r}: {value!r} is not HTTP")
            name = name.lower()
            if name == b"connection" and b"close" in value.lower():
                self.keeps_alive = False
                continue
            if status in BODILESS and name in (b"content-length", b"transfer-encoding"):
                continue
            if name == b"content-length" and self._is_answer_chunked is None:
                self._missing = int(value)
                self._is_answer_chunked = False
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self._is_answer_chunked = True
            own.append((name, value))
        self.is_started = True
        if self.method == "HEAD" or status in BODILESS:
            self._missing, self._is_answer_chunked = 0, self._is_answer_chunked or False
            own += [(b"content-length", b"0")] if status == 205 else []
        elif self._is_answer_chunked is None:
            self._is_answer_chunked = True
            own.append((b"transfer-encoding", b"chunked"))
        head = write_head(status, own, self.keeps_alive)
        assert head is not None, "every header has been looked at"
        self._write(head)
        self.status = status

    async def write(self, body: Payload, is_more: bool = False) -> None:
        """Send a part of the body.

        Raises:
            RuntimeError: the body is not as long as the head says, or over.
        """
        await self.connection.drain()
        if self.has_left:
            return
        if not self.is_started or self.is_complete:
            raise RuntimeError("a part of a body before its head, or after its end")
        if self.method == "HEAD" or self.status in BODILESS:
            pass  # a client would take it for its next answer
        elif self._is_answer_chunked:
            self.sent += len(body)
            lines = (b"%x\r\n" % len(body), body, b"\r\n") if body else ()
            self._write(b"".join((*lines, b"" if is_more else b"0\r\n\r\n")))
        else:
            self._missing -= len(body)
            if self._missing < 0 or (self._missing and not is_more):
                raise RuntimeError("the answer's body is not as long as its Content-Length says")
            if body:
                self.sent += len(body)
                self._write(body)
        if not is_more:
            self._complete()

    def _write(self, data: Payload) -> None:
        self.connection.written += len(data)
        self.connection.last_write = len(data)
        self.transport.write(data)

    def send_whole(self, status: int, headers: Headers, body: Payload) -> bool:
        """Write an answer in one system call; return False where only `start`, `write` will do."""
        head = write_head(status, headers, self.keeps_alive)
        return head is not None and self.send_ready(status, head, body)

    def send_ready(self, status: int, head: bytes, body: Payload) -> bool:
        """Write an answer whose head is of `write_head`, as `send_whole` does."""
        if self.connection.writable is not None or self.is_started:
            return False
        if self.has_left:
            return True
        if self.method == "HEAD" or (body and status in BODILESS):
            return False
        self.connection.written += len(head) + len(body)
        if len(body) < JOIN_BYTES:
            self.transport.write(head + body)
        else:
            self.connection.last_write = len(body)
            self.transport.writelines((head, body))
        self.is_started = True
        self.status, self.sent = status, len(body)
        self._complete()
        return True

    def _complete(self) -> None:
        self.is_complete = True
        if self.connection.access is not None:
            self.log(self.status)
        if self._counted or self.release is not None:
            self.let_go()
        self.connection.answered(self)

    def log(self, status: int) -> None:
        """Write the answer into the access log, where there is one, once."""
        access = self.connection.access
        if access is None or self.is_logged:
            return
        self.is_logged = True
        took_s = monotonic() - self.began
        access(
            Answered(
                self.connection.client, self.method, target_of(self.head), status, took_s, self.id,
                self.sent,
                self.served, self.trace_id or trace_id_of(self.headers), self.outcome,
            )
        )  # fmt: skip


def find_known(heads: Heads, data: bytes) -> tuple[Head | None, bytes]:
    """Return head and body of what came, if it is one request, whole, and its head is known."""
    known, end, body = data.partition(END)
    head = (heads.get(known) or heads.find_alike(known)) if end else None
    return (head if head is not None and head.length == len(body) else None), body


def target_of(head: Head) -> str:
    """Return path and query of a request as its client wrote them."""
    query = b"?" + head.query if head.query else b""
    return (head.raw_path + query).decode("latin-1")


class Untried(asyncio.Transport):
    """What stands for a transport while a client's first bytes are tried, before it has one."""

    def __init__(self, accepted: socket.socket) -> None:
        self._accepted = accepted
        self.is_over = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send an answer, or as much as the kernel takes at once."""
        with contextlib.suppress(OSError):  # the client may have left
            self._accepted.send(data)

    def is_closing(self) -> bool:
        """Return that nothing is waited for."""
        return True

    def close(self) -> None:
        """Note that the client has its last answer."""
        self.is_over = True


class Connection(asyncio.Protocol):
    """One client connection.

    Args:
        listener: listener of its address, which says what answers and what is refused.
        accepted: the client's socket.

    Attributes:
        since: time of the loop; of its beginning, of the first byte of the head that is being
            read, or of its last answer.
        answering: the request that the application has.
        reading: the request whose body is being read.
        written: bytes of answers so far.
        last_write: how many of them were written at last.
        writable: None, or what is set as soon as the client has taken enough of its answers.
        waited_s: how long, at most, what is being parsed waited to be read or parsed.
    """

    transport: asyncio.Transport
    phase = IDLE
    since = 0.0
    url = b""
    head_bytes = 0
    written = last_write = 0
    answering: RequestResponseCycle | None = None
    reading: RequestResponseCycle | None = None
    writable: asyncio.Event | None = None
    client: tuple[str, int] | None = None
    waited_s = 0.0
    _is_reading_paused = False
    _is_held = False
    """It reads nothing, and begins nothing, until `release`."""
    _was_unread = True
    """What comes next may have waited in the kernel: to be accepted, or to be read again."""
    _put_off: list[tuple[float, bytes | memoryview]] | None = None
    """What was received and is to be parsed in a later turn, each with its time."""
    _refusal: tuple[Exception, RequestResponseCycle | None] | None = None
    _unread = 0
    """Bytes of answers that the budget knows of."""
    _host = ""
    """Address of the client, whose connections take their turns together."""
    _is_bare = False
    """Whether what is refused asked for a head alone."""

    def __init__(self, listener: "Listener", accepted: socket.socket) -> None:
        self._listener = listener
        self._socket = accepted
        self.app, self.access, self.turns = listener.app, listener.access, listener.turns
        self.settings, self.budget = listener.settings, listener.budget
        self._site, self.heads = listener.check_site, listener.heads
        self.loop = asyncio.get_running_loop()
        self._time = self.loop.time
        self._queue: deque[RequestResponseCycle] = deque()
        self._headers: Headers = []
        self._spelled: list[bytes] = []
        self._pace = Pace()
        self.parser: Any = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to count."""
        self.transport = transport
        transport.set_write_buffer_limits(UNCOUNTED_BYTES)
        self._listener.connections.add(self)
        self.since = self._time()
        self.client = _endpoint(transport, "peername")
        self._host = self.client[0] if self.client else ""
        self.endpoints = {
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
            "server": _endpoint(transport, "sockname"),
            "client": self.client,
        }

    def refuses_first(self, data: bytes, client: tuple[str, int] | None, is_flood: bool) -> bool:
        """Answer what a client sent first, if it is refused and the connection then closed.

        Args:
            is_flood: whatever is refused is looked for, not only what is as the last of the same
                head was.

        Returns:
            Whether all is over; else nothing has happened, and a new connection has to take it.
        """
        self.transport = untried = Untried(self._socket)
        self._is_reading_paused = True  # there is nothing that could be paused
        self.client = client
        head, _ = find_known(self.heads, data)
        if head is None:
            if is_flood:
                self._feed(data)
        elif head.memo.refusal is not None and not head.memo.refusal.keeps_alive:
            self.waited_s = unread_s(self._socket)
            self._refuse_again(head)
        return untried.is_over

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify who waits for this client."""
        self._listener.connections.discard(self)
        self.parser = None
        for cycle in (self.answering, self.reading, *self._queue):
            if cycle is not None:
                cycle.leave()
                cycle.log(cycle.status)
        self.answering = self.reading = None  # they hold this one
        self._queue.clear()
        self.resume_writing()
        self._listener.resume()

    def data_received(self, data: bytes) -> None:
        """Parse, or put it off where this turn of the loop has no more time for clients."""
        if self.phase == ENDING:  # it is only read so that the client can read its last answer
            if len(data) > SLICE_BYTES and not self.turns.has_time():
                self.pause_reading()
                self._leave()
            return
        waited_s = 0.0
        if self._was_unread:
            self._was_unread = False
            waited_s = self.turns.late_s(unread_s(self._socket))
        if not self.turns.has_time():
            head = find_known(self.heads, data)[0] if self._is_first else None
            if head is None or not head.is_wanted:
                # Who will wait for its turn for a third of what would be too long is refused now.
                self.waited_s = waited_s + 3 * self.turns.behind_s
                if head is None or not self._refuse_again(head):
                    self._leave((monotonic() - waited_s, data))
                self.waited_s = 0.0
                return
        self.waited_s = waited_s
        self._receive(data)
        self.waited_s = 0.0

    def _leave(self, *received: tuple[float, bytes | memoryview]) -> None:
        """Leave what was received, and what waits for an answer before its own, to a later turn."""
        if self._put_off is None:
            self._put_off = []
            self.turns.put_off(self, self._host)
        self._put_off += received
        if any(len(data) > SLICE_BYTES for _, data in received):
            self.pause_reading()  # a loop reads 32 of them before it looks at others

    def take_put_off(self) -> None:
        """Parse what was put off."""
        received, self._put_off = self._put_off or [], None
        if self.transport.is_closing():
            return
        if self._queue and self.answering is None and not self._is_held:
            self._go_on()
        for came_at, data in received:
            if self._put_off is not None:  # there is no time for all of it
                self._leave((came_at, data))
                continue
            self.waited_s = monotonic() - came_at
            self._receive(data)
        self.waited_s = 0.0
        if self._put_off is None:
            self.resume_reading()

    def _receive(self, data: bytes | memoryview) -> None:
        if len(data) <= SLICE_BYTES and self.reading is None:
            if not self._is_first or not isinstance(data, bytes):
                self._feed(data)
            elif not self._take_known(data):
                self._feed(data)
                self._keep_head(data)
        else:
            rest = memoryview(data)
            while rest:
                reading = self.reading
                missing = reading.length - reading.received if reading is not None else 0
                if reading is not None and missing > 0:
                    size = min(len(rest), missing)
                    try:
                        self._put(reading, rest[:size])
                    except errors.ServeError as error:
                        self.refuse(error)
                else:
                    size = SLICE_BYTES
                    self._feed(rest[:size])
                rest = rest[size:]
                if rest and (self.turns.is_over or self._put_off is not None):
                    self._leave((monotonic() - self.waited_s, rest))
                    break
        answering = self.answering
        if answering is None:
            return
        if not answering.is_begun:
            self._begin(answering)  # most bodies are there by now
        elif answering.is_received:
            answering.deliver()

    @property
    def _is_first(self) -> bool:
        """Whether what comes now is the beginning of a request, and none is before it."""
        return self.phase == IDLE and self.answering is None and self._put_off is None

    def _take_known(self, data: bytes) -> bool:
        """Take a whole request whose head was parsed before; return whether that is what came."""
        head, body = find_known(self.heads, data)
        if head is None or self.parser is None:
            return False
        if head.memo.refusal is not None and self._refuse_again(head):
            return True
        cycle = self.answering = RequestResponseCycle(self, head)
        cycle.is_received = True
        if body:
            cycle.parts.append(body)
            cycle.received = len(body)
        if self.access is not None:
            cycle.began = monotonic()
        return True

    def _keep_head(self, data: bytes) -> None:
        """Keep the head of what was parsed, if it is one request, whole, and nothing unusual."""
        cycle = self.answering
        if cycle is not None and cycle.is_usual and self.phase == IDLE and not self._queue:
            self.heads.keep(data, cycle.head)

    def _refuse_again(self, head: Head) -> bool:
        """Refuse a request as the last of the same head was; return False where it may be taken."""
        refusal = head.find_refusal(self.waited_s)
        if refusal is None or self.writable is not None:
            return False
        refusal.again.note()
        id = refusal.make_id(head.headers)
        if self.access is not None:
            self.access(
                Answered(self.client, head.method, target_of(head), refusal.status, 0.0, id,
                         refusal.size, refusal.served, trace_id_of(head.headers))
            )  # fmt: skip
        answer = id.encode().join(refusal.pieces)
        self.written += len(answer)
        self.transport.write(answer)
        self.since = self._time()
        if not refusal.keeps_alive:
            self._end()
        elif self.turns.must_hold():
            self._hold()
        return True

    def _put(self, reading: RequestResponseCycle, data: memoryview) -> None:
        """Take a piece of a body whose length is known, which the parser would only copy."""
        reading.put(data)
        if reading.received == reading.length:
            self.parser = httptools.HttpRequestParser(self)  # the old one waits for that body
            self.on_message_complete()

    def _feed(self, data: bytes | memoryview) -> None:
        if self.parser is None:
            return  # the rest of what was refused
        reading = self.reading
        received = reading.received if reading is not None else 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            cause, said = error.__context__, str(error)
            if isinstance(cause, errors.ServeError):
                # The parser keeps it, and it this connection, which keeps the parser: a flood of
                # such circles takes as long to find as 60 ms.
                self.refuse(cause.with_traceback(None))
                return
            if "PRI/" in said:
                said = "HTTP/2; gRPC has a port of its own (grpc_port)"
            self.refuse(errors.BadMessage(said))
            return
        if self.phase == HEAD:
            self.head_bytes += len(data)
            if self.head_bytes > self.settings.max_header_bytes:
                self.refuse(self._head_error())
        elif reading is not None and reading is self.reading and reading.is_chunked:
            reading.framing += len(data) - (reading.received - received)
            if reading.framing > FRAMING_BYTES + reading.received // 2:
                self.refuse(
                    errors.BadMessage(
                        f"{reading.framing} bytes of chunk sizes, extensions and trailers around "
                        f"{reading.received} bytes of body; send larger chunks"
                    )
                )

    def _head_error(self) -> errors.ServeError:
        """Return why a head is too long."""
        if len(self.url) > TARGET_BYTES:
            return errors.TargetTooLong(TARGET_BYTES)
        return errors.HeadTooLarge(f"{self.settings.max_header_bytes} bytes (max_header_bytes)")

    def _stay(self, rest: bytes | memoryview) -> None:
        """Go on with HTTP/1.1 where a client offers to change the protocol, as RFC 9110 allows.

        Java's client offers HTTP/2 with every first request. The parser has given up by now and
        would lose the body, so a new one reads the head again without the offer.
        """
        start = b"%s %s HTTP/1.1\r\n" % (self.parser.get_method(), self.url)
        fields = zip(self._spelled[::2], self._spelled[1::2], strict=True)
        lines = [b"%s: %s\r\n" % field for field in fields if field[0].lower() != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"".join((start, *lines, b"\r\n")))
        if rest:
            self._receive(bytes(rest))

    # -- what the parser calls, in this order -------------------------------------------------

    def on_message_begin(self) -> None:
        """Start a head."""
        if len(self._queue) >= PIPELINED:
            raise errors.BadMessage(
                f"more than {PIPELINED} requests before the answer to the first"
            )
        self.phase = HEAD
        self.since = self._time()
        self.url = b""
        self.head_bytes = 0
        self._headers = []
        self._spelled = []

    def on_url(self, url: bytes) -> None:
        """Take the target, or a piece of it."""
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a name as it came beside ASGI's lower-case one."""
        self._spelled += (name, value)
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Check the head; `data_received` hands the request to the application.

        Raises:
            BadMessage, BodyTooLarge, Forbidden: it is refused.
        """
        parser = self.parser
        headers = self._headers
        fields = dict(headers)
        if b"upgrade" in fields and parser.should_upgrade():
            return  # `_stay` comes next
        version = parser.get_http_version()
        method = parser.get_method().decode()
        self._check_head(version, method, fields)
        raw_path, query = self._split_target()
        path = raw_path.decode()
        decoded = unquote(path) if "%" in path else path
        coding = fields.get(b"content-encoding", b"")
        length = int(fields.get(b"content-length", 0))
        head = Head(
            method, decoded, raw_path, query, headers, self._spelled, coding, length
        )  # fmt: skip
        cycle = RequestResponseCycle(self, head)
        if version == "1.0" or not parser.should_keep_alive():
            cycle.keeps_alive = False
        if b"transfer-encoding" in fields:
            cycle.is_chunked = True
        if b"expect" in fields and fields[b"expect"].lower() == b"100-continue":
            cycle.expects_continue = version == "1.1"  # before, it would be the answer
        if self.access is not None:
            cycle.began = monotonic()
        # What the parser takes for headers from here on are trailers, and never looked at.
        self._headers, self._spelled = [], []
        self.phase = BODY
        self.reading = cycle
        if self.answering is None:
            self.answering = cycle
        else:
            self._queue.append(cycle)
            self.pause_reading()
        limit = self.settings.max_request_bytes
        if length > limit:
            raise errors.BodyTooLarge(limit)
        site = self._site
        if fields.get(b"host") not in site.known or b"origin" in fields or _FETCH_SITE in fields:
            site(method, fields, path)
        elif cycle.keeps_alive and not cycle.is_chunked and b"expect" not in fields:
            cycle.is_usual = True

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        assert self.reading is not None
        self.reading.put(body)

    def on_message_complete(self) -> None:
        """Note that the body is whole."""
        cycle = self.reading
        if cycle is None:
            return  # an offer to change the protocol
        cycle.is_received = True
        self.reading = None
        self.phase = IDLE

    # ------------------------------------------------------------------------------------------

    def _check_head(self, version: str, method: str, fields: dict[bytes, bytes]) -> None:
        headers = self._headers
        if len(fields) != len(headers) or b"host" not in fields:
            hosts = sum(name == b"host" for name, _ in headers)
            if hosts > 1 or (hosts == 0 and version == "1.1"):
                raise errors.BadMessage(f"{hosts} Host headers; HTTP/1.1 has exactly one")
        if version != "1.1" and version != "1.0":
            raise errors.BadMessage(f"HTTP/{version} is not spoken here; send HTTP/1.1")
        if method == "CONNECT":
            raise errors.BadMessage("CONNECT asks for a proxy; this server is none")
        coding = fields.get(b"transfer-encoding")
        if coding is not None and (version == "1.0" or coding.lower() != b"chunked"):
            raise errors.BadMessage("a Transfer-Encoding other than chunked, or under HTTP/1.0")
        if len(headers) > HEADER_COUNT:
            raise errors.HeadTooLarge(f"{HEADER_COUNT} fields")
        size = len(self.url)
        if self.head_bytes:  # it came in several pieces
            size += sum(len(name) + len(value) + 4 for name, value in headers)
        if len(self.url) > TARGET_BYTES or size > self.settings.max_header_bytes:
            raise self._head_error()

    def _split_target(self) -> tuple[bytes, bytes]:
        """Return path, not decoded, and query of the target.

        A proxy's form, with scheme and host before the path, is taken as RFC 9112 asks; there is
        one site here, so the host does not matter.
        """
        url = self.url
        if not url.startswith(b"/") or b"#" in url:
            try:
                parsed = httptools.parse_url(url)
            except httptools.HttpParserError:
                raise errors.BadMessage(
                    "the target of the request is neither a path nor a URL"
                ) from None
            path = parsed.path or b"/"
            return (path if path.startswith(b"/") else b"/"), parsed.query or b""
        path, _, query = url.partition(b"?")
        return path, query

    def _begin(self, cycle: RequestResponseCycle) -> None:
        """Have the application answer."""
        cycle.is_begun = True
        self.app.accept(cycle)
        if self._is_reading_paused:
            self.resume_reading()

    def answered(self, cycle: RequestResponseCycle) -> None:
        """Go on after an answer: with the next request, or with the end."""
        self.answering = None
        self.since = self._time()
        if not cycle.keeps_alive:
            self._end()
        elif cycle.is_refused and cycle.is_received and self.turns.must_hold():
            self._hold()
        elif self._queue and not self.turns.has_time():
            self._leave()
        elif self._queue or self._refusal is not None or self._is_reading_paused:
            self._go_on()

    def _hold(self) -> None:
        """Take nothing more from a client that asks for more than can be done."""
        self._is_held = self._was_unread = True
        self.pause_reading()
        self.turns.hold(self)

    def release(self) -> None:
        """Go on with a client that was held back."""
        if not self.transport.is_closing():
            self._is_held = False
            self._go_on()

    def _go_on(self) -> None:
        """Begin with the next request, or read on."""
        if self._queue:
            self.answering = self._queue.popleft()
            self._begin(self.answering)
        elif self._refusal is not None:
            self._send_refusal(*self._refusal)
        else:
            self.resume_reading()

    def refuse(self, error: Exception) -> None:
        """Answer what is not a request, after the requests before it, and close."""
        reading = self.reading
        self._is_bare = self.parser is not None and self.parser.get_method() == b"HEAD"
        self.parser = self.reading = None
        self.phase = ENDING
        if reading is not None:  # its body is what is wrong: it gets this answer, not its own
            reading.leave()
            if reading is self.answering:
                self.answering = None
            elif not reading.is_complete:
                self._queue.remove(reading)
            if reading.is_started:
                reading.let_go()
                self.phase = BODY
                self._end()
                return
        if self.answering is None and not self._is_held:
            self._send_refusal(error, reading)
        else:
            self._refusal = error, reading

    def _send_refusal(self, error: Exception, cycle: RequestResponseCycle | None) -> None:
        self._refusal = None
        status, headers, body = self.app.refuse(error, cycle)
        self._listener.note(self.client, "refused, %d: %s", status, error)
        head = write_head(status, [*headers, (b"content-length", b"%d" % len(body))], False)
        assert head is not None, "no error of ours has a line break in a header"
        if self._is_bare:
            body = b""
        answer = head + body
        self.written += len(answer)
        self.transport.write(answer)
        if cycle is not None:
            cycle.sent = len(body)
            cycle.leave()
            cycle.log(status)
        self.phase = BODY
        self._end()

    def _end(self) -> None:
        """Close; a client that is still sending gets the time to read its last answer."""
        is_sending = self.phase == BODY
        self.parser = self.reading = None
        self.phase = ENDING
        self._queue.clear()
        if is_sending and not self.transport.is_closing():
            self.since = self._time()
            if self.transport.can_write_eof():  # not under TLS, which ends both ways at once
                self.transport.write_eof()
            self.resume_reading()
        else:
            self.transport.close()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered, or waits for it."""
        return self.answering is not None or bool(self._queue)

    @property
    def is_idle(self) -> bool:
        """Whether it could be closed without anybody losing an answer."""
        return not self.is_busy and not self._is_held and not self.transport.is_closing()

    def check(self, now: float) -> None:
        """Close what its client has left alone, or feeds or empties too slowly."""
        settings, transport = self.settings, self.transport
        if left := transport.get_write_buffer_size():
            if self._is_slow("answer", now, self.written - left):
                self._listener.note(self.client, "takes its answer too slowly")
                transport.abort()
            return
        if self._pace.what == "answer":
            self._pace.stop()  # the client has taken all
        if self._is_reading_paused and self.phase != ENDING:  # we are slow, not the client
            self.since = now
            self._pace.stop()
        elif self.phase == BODY and (reading := self.reading) is not None:
            if reading.is_complete and now - self.since > settings.transfer_timeout_s:
                transport.abort()  # it still sends what was answered long ago
            elif self._is_slow(reading, now, reading.received):
                self.refuse(errors.RequestTooSlow("body", MIN_RATE, settings.transfer_timeout_s))
        elif self.phase == HEAD:
            if now - self.since > settings.head_timeout_s:
                self.refuse(errors.RequestTooSlow("head", 0, settings.head_timeout_s))
        elif self.phase == ENDING:
            if not self.is_busy and now - self.since > LINGER_S:
                transport.abort()
        elif not self.is_busy and now - self.since > settings.keep_alive_s:
            transport.close()

    def _is_slow(self, what: object, now: float, progress: int) -> bool:
        is_short = what == "answer" and bool(self._unread) and self.budget.is_short
        return self._pace.is_slow(what, now, progress, self.settings.transfer_timeout_s, is_short)

    # -- back-pressure ---------------------------------------------------------------------------

    def pause_reading(self) -> None:
        """Take no more from the client for now."""
        if not self._is_reading_paused:
            self._is_reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Take what the client sends again."""
        if self._is_reading_paused and not self._queue and not self._is_held:
            self._is_reading_paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        """Have the application wait: the client takes less than it is sent."""
        if self.writable is None:
            self.writable = asyncio.Event()
            # A buffer that is sent in part is still there as a whole.
            self._unread = max(self.last_write, self.transport.get_write_buffer_size())
            self.budget.add(self._unread)

    def resume_writing(self) -> None:
        """Let the application go on."""
        if self.writable is not None:
            self.writable.set()
            self.writable = None
            unread, self._unread = self._unread, 0
            self.budget.give_back(unread)

    async def drain(self) -> None:
        """Wait until the client has taken enough."""
        while self.writable is not None:
            await self.writable.wait()
        if self.transport.is_closing():
            await asyncio.sleep(0)  # whoever writes on is to learn that the client has left


def unread_s(connection: socket.socket) -> float:
    """Return how long ago the last bytes came; 0 where the kernel does not tell, as of no TCP."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_RECEIVED.stop)
    except OSError:
        return 0.0
    return int.from_bytes(info[_LAST_RECEIVED], sys.byteorder) / 1000


def _endpoint(transport: asyncio.Transport, name: str) -> tuple[str, int] | None:
    address = transport.get_extra_info(name)
    is_internet = isinstance(address, tuple | list) and len(address) >= 2
    return (str(address[0]), int(address[1])) if is_internet else None
