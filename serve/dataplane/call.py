"""A call: a request for a model's answer that knows no protocol, and where its reply goes.

A face (HTTP's routes, TorchServe's dialect) makes a `Call` when the head of a request has come, and
submits it with the body; from there on it is a job in the queue of its model version. The reply, or
the error, goes to the call's sink.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.wire import Buffer, Payload
from modelyard.serve.errors import StreamBroken

if TYPE_CHECKING:
    from modelyard.serve.dataplane.batcher import Batcher
    from modelyard.serve.dataplane.cache import Lookup
    from modelyard.serve.dataplane.tracing import Trace

PREDICT, EXPLAIN = 0, 1
"""Kinds of call; a batch has one."""
HIGH, NORMAL, LOW = 0, 1, 2
CLASSES = ("high", "normal", "low")
"""Names of the classes of calls, by number: whose turn it is."""

HasLeft = Callable[[], bool]


class Target(NamedTuple):
    """What a request asks a model for."""

    kind: int
    path: list[str]
    """Model, version (optional), rest (optional)."""
    flags: int = 0
    """Flags of `wire`, for the worker."""
    form: Any = None
    """How the protocol's face writes the answer; None as the worker has it."""

    @property
    def version(self) -> str | None:
        """The version, None for the default one."""
        return self.path[1] if len(self.path) > 1 and self.path[1] else None


MOST_UNREAD_BYTES = 64 << 20
"""Chunks that a client may leave unread before its stream is broken."""


class Stream:
    """The chunks of a streamed answer, on their way from a worker to one client.

    Args:
        has_left: tells whether the client has left.
        cancel: called once when nobody reads the rest.
        budget: counts what is unread.
    """

    def __init__(
        self, has_left: HasLeft | None, cancel: Callable[[], None], budget: AnswerBudget
    ) -> None:
        self._budget = budget
        self._has_left = has_left
        self._cancel = cancel
        self._chunks: deque[Payload] = deque()
        self._size = 0
        self._arrived = asyncio.Event()
        self._is_complete = False
        self._is_closed = False
        self.error: Exception | None = None
        """Why the rest will not come."""
        self.on_close: Callable[[], None] | None = None
        """Called once when nobody reads on: it has all, or does not want the rest."""

    def put(self, chunk: Payload, is_last: bool = False) -> None:
        """Add what the worker sent."""
        self._is_complete |= is_last
        if not self._is_closed:
            self._chunks.append(chunk)
            self._size += len(chunk)
            self._budget.add(len(chunk))
            if self._size > MOST_UNREAD_BYTES:
                self.fail(StreamBroken(f"the client leaves {self._size} bytes unread"))
                self._drop()
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """End the stream early; the client must not take what it has for the whole answer."""
        if not self._is_complete and self.error is None:
            self.error = error
        self._arrived.set()

    def close(self) -> None:
        """Drop what is left, and tell the worker when it still sends."""
        if not self._is_closed:
            self._is_closed = True
            self._drop()
            if not self._is_complete:
                self._cancel()
            on_close, self.on_close = self.on_close, None
            if on_close is not None:
                on_close()

    def _drop(self) -> None:
        self._chunks.clear()
        size, self._size = self._size, 0
        self._budget.give_back(size)

    async def read(self) -> AsyncGenerator[Payload]:
        """Yield the chunks as they come, until the last one or until the client has left.

        Raises:
            StreamBroken, WorkerDied: the rest will not come.
        """
        while True:
            while self._chunks:
                if self._has_left is not None and self._has_left():
                    return
                chunk = self._chunks.popleft()
                self._size -= len(chunk)
                self._budget.give_back(len(chunk))
                yield chunk
            if self.error is not None:
                raise self.error
            if self._is_complete:
                return
            self._arrived.clear()
            await self._arrived.wait()


class Note(NamedTuple):
    """How an answer came about that was looked for among those that are kept."""

    outcome: str
    """`hit`, `miss`, `joined` or `bypass`."""
    headers: tuple[tuple[bytes, bytes], ...]
    """Headers that the answer has beside its own."""


class Reply(NamedTuple):
    """A worker's answer to one call: HTTP status, packed headers (`wire.pack_meta`), body."""

    status: int
    headers: bytes
    body: Payload | Stream
    queue_us: int = 0
    """How long the call waited at the worker before its batch began; 0 in a streamed answer."""
    handler_us: int = 0
    """How long the handler's call took that answered it; 0 in a streamed answer."""
    note: Note | None = None
    """None where no answers are kept."""


class ReplySink(Protocol):
    """Where a reply goes: a future that a task awaits, or what sends it on at once."""

    def done(self) -> bool:
        """Return whether it has its reply, or nobody waits for it any more."""

    def set_result(self, reply: Reply, /) -> None:
        """Take the reply."""

    def set_exception(self, error: Exception, /) -> None:
        """Take the error that there is instead."""

    def cancel(self) -> bool:
        """Note that nobody waits for it any more."""


@runtime_checkable
class MovableSink(ReplySink, Protocol):
    """A sink whose call another model version may answer."""

    def move(self, call: "Call") -> bool:
        """Take the reply to another call in place of this one's, if its client named no version."""


class Client(Protocol):
    """Who sent a call."""

    @property
    def client(self) -> tuple[str, int] | None:
        """Its address and port; None of a Unix socket."""

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """The headers of its request, names in lower case."""


class _Nobody:
    """The sink of a call that another one was made of: it drops what it is given."""

    def done(self) -> bool:
        return True

    def set_result(self, outcome: object, /) -> None:
        pass

    cancel, set_exception = done, set_result


class Model(Protocol):
    """The model version that a call is for."""

    @property
    def batchers(self) -> "Sequence[Batcher]":
        """Batchers by kind of call."""

    @property
    def request_timeout_s(self) -> float:
        """The longest that a call may take."""


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """One request for a model's answer."""

    model: Model
    """What answers."""
    kind: int
    """PREDICT or EXPLAIN."""
    head: bytes
    """Head of the request, packed as `worker.codec` reads it."""
    sink: ReplySink
    """Where the reply goes."""
    timeout_s: float = math.inf
    """How long the client waits; the model's own limit holds too."""
    has_left: HasLeft | None = None
    """Returns whether the client has left; None where there is none."""
    flags: int = 0
    """Flags of `wire`, beside what the kind says."""
    must_fit: bool = True
    """Whether it is refused as soon as its answer cannot be expected by the deadline."""
    trace: "Trace | None" = None
    """Trace of the request, where it is sampled."""
    priority: int = NORMAL
    """Its class."""
    client: Client | None = None
    """Who sent it; None where no client did."""
    parts: Sequence[Buffer] = field(init=False)
    """The body as it arrived."""
    queued_at: float = field(init=False)
    """Time of `time.monotonic()` when the body was whole; the loop's clock counts milliseconds."""
    deadline: float = field(init=False)
    due: float = field(init=False)
    """The same, as far as it decides over its place in a queue."""
    taken_at: float = field(init=False)
    """Time when a worker got it, last."""
    retried: bool = field(default=False, init=False)
    rows: int = field(default=1, init=False)
    """Rows that it fills of a batch; known when the body is there."""
    lookup: "Lookup | None" = field(default=None, init=False)
    """Lookup in the cache of answers."""
    stream: Stream | None = field(default=None, init=False)
    """Once the first chunk of its answer has come."""

    def __post_init__(self) -> None:
        self.timeout_s = min(self.timeout_s, self.model.request_timeout_s)

    def put(self, parts: Sequence[Buffer]) -> None:
        """Queue it with its body; its queue was asked just now."""
        self.arrived(parts, monotonic())
        self.model.batchers[self.kind].put(self)

    def submit(self, parts: Sequence[Buffer]) -> None:
        """Queue it with its body, unless its answer is there; a refusal is its reply."""
        self.arrived(parts, monotonic())
        if self.lookup is None or not self.lookup.answer(self):
            self.start()

    def start(self) -> None:
        """Queue it; its body is there."""
        try:
            self.model.batchers[self.kind].submit(self)
        except Exception as error:
            self.sink.set_exception(error)

    def arrived(self, parts: Sequence[Buffer], now: float) -> None:
        """Take the body; the time that the client gives begins."""
        self.parts = parts
        if self.rows > 1:  # as the client says; each takes a byte at least
            self.rows = max(1, min(self.rows, sum(map(len, parts))))
        self.queued_at = self.taken_at = now
        self.deadline = now + self.timeout_s

    def fail(self, error: Exception) -> None:
        """Answer with an error, or break the answer whose first chunk has been given out."""
        if self.stream is not None:
            self.stream.fail(error)
        elif not self.sink.done():
            self.sink.set_exception(error)

    def hand_to(self, model: Model) -> bool:
        """Have another version answer it; return whether it may. What this one says is dropped."""
        sink = self.sink
        if sink.done() or self.stream is not None or not isinstance(sink, MovableSink):
            return False
        call = Call(
            model, self.kind, self.head, sink, self.timeout_s, self.has_left, self.flags,
            False, self.trace, self.priority, self.client,
        )  # fmt: skip
        call.rows, call.parts = self.rows, self.parts
        call.queued_at, call.taken_at, call.deadline = self.queued_at, self.taken_at, self.deadline
        if not sink.move(call):
            return False
        self.sink = _Nobody()
        model.batchers[self.kind].put(call)
        return True

    def drop_if_left(self) -> bool:
        """Return whether nobody waits for it any more, its client having left."""
        if self.has_left is None or not self.has_left():
            return False
        self.sink.cancel()
        return True
