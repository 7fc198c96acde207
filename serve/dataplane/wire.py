"""Frames between the server process and a worker process, the same both ways.

    frame = u32 count | count × head | count × (meta | body)
    head  = u32 id | u16 code | u16 flags | u32 queue | u32 handler | u32 batch
          | u32 meta length | u32 body length

Little-endian; builtin types only, never pickle. A job's item carries the job's id (from 1 up); id 0
marks a control item, whose `code` is one of the control codes and whose body is JSON. `meta` is a
list of byte strings joined by NUL, which no HTTP header may contain. All heads come first, so that
a reader knows the size of a frame before its payloads arrive.

From server to worker a job's `code` is its number of rows, 0 for one, and `flags` says what kind
of job it is. From worker
to server `code` is the HTTP status and `meta` the response headers, name after value. A streamed
answer is several replies to one job, all but the last with MORE; status and headers are those of
the first. `queue`, `handler` and `batch` are microseconds: how long the job waited at the worker
before its batch began, how long the handler's call took that answered it, and how long the worker
was busy with the batch; 0 where it does not know. In a job `queue` is when it was sent (`now_us`).
Everywhere else they are 0.
"""

import json
import signal
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from time import monotonic
from typing import Any, NamedTuple

from modelyard.serve.dataplane.heap import make_room

PROTOCOL = 4
"""Version of this format; a worker's READY says it."""

COUNT = struct.Struct("<I")
HEAD = struct.Struct("<IHHIIIII")
PART = struct.Struct("<II")

RECEIVE_BYTES = 1 << 18
"""Size of one receive."""
LONG_BYTES = 1 << 15
"""Size from which a payload is received in its own place, and sent without joining it to others."""
MAX_ITEMS = 4096
"""Items in one frame; more is a broken or hostile peer."""
FRAME_BYTES = 1 << 23
"""Size of the payloads of one frame: what is longer goes out in several, but for an item that is
longer by itself."""
MAX_CONTROL = 1 << 20
"""Size of a worker's control item, and of what stands around an answer's body."""
MAX_RECORDS = 1000
"""Size of what a handler measured, in one METRICS item."""

MOST_ROWS = 0xFFFF
"""Most rows that a job can say; one of more counts as so many."""

END = signal.SIGTERM
"""Signal to a worker's process: end with all that you have started. None is sent to its handler."""

# Control codes.
LOAD = 1
"""Server → worker, first frame: what to load and how."""
READY = 2
"""Worker → server: loaded, and the golden requests were answered right."""
FAILED = 3
"""Worker → server: could not load, and why. The worker ends."""
METRICS = 4
"""Worker → server, at the end of any frame after READY: what the handler measured."""
CANCEL = 5
"""Server → worker: nobody waits for these jobs any more; `ids` lists them."""

# Flags of a job.
EXPLAIN = 1
"""The job asks for an explanation, not a prediction."""
ALONE = 2
"""The job is run in a batch of one: a worker died while it held this job."""
DESCRIBE = 4
"""A request for the handler to describe itself; run in a batch of one, without a body."""
LEGACY = 8
"""The job comes from one of TorchServe's oldest routes: the query's parameters are the handler's
too, and the headers `explain` and `url_path` are not made."""
KSERVE = 16
"""The job comes from a route of KServe's: the header `url_path` is not made."""
SHARES = 32
"""Nobody asked: the job is a prediction that was answered, and whose reasons are to be counted."""
TENSORS = 64
"""The body holds tensors by name, in the form of the Open Inference Protocol; `code` says how many
rows, as far as the server can see it, where that is not 1."""
INSTANCES = 128
"""The body holds the bodies of as many requests as `code` says, as far as the server can see it, in
the form of KServe's first protocol; their answers are one."""
PARTS = 256
"""The body holds named values (`pack_parts`), which the handler gets as they are."""
STREAM = 512
"""What the handler streams is sent on (beside TENSORS), each chunk an answer of its own, behind the
length of its JSON (u32). Without it all of them are one answer."""

TEXTS = 2048
"""The body is one text and what is wanted of it, in the form of the plug-in that reads it
(`modelyard.texts`); the answer holds the model's own numbers."""
GOLDEN = 1024
"""Nobody asked: the archive's golden requests are answered again. The reply is 200, or what is
wrong."""

# Flags of a reply.
MORE = 1
"""A chunk of a streamed answer; at least one reply to the same job follows."""
BROKEN = 2
"""The handler failed after it had sent chunks; the body is the error, for the log."""
UNREAD = 4
"""Nobody waits for the answer, so the job was not run, or not to its end."""
PARTIAL = 8
"""Flag of a frame's first item: the next frame holds further replies to the same batch."""

VERSION_HEADER = b"x-model-version"
"""Header of every answer of a model: which version gave it."""
FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding", VERSION_HEADER})
"""Headers that are the server's to say; a handler's opinion of them is left out."""
OF_HOST = frozenset(
    b"alt-svc clear-site-data nel public-key-pins report-to reporting-endpoints "
    b"service-worker-allowed strict-transport-security x-cache x-content-type-options "
    b"x-request-id".split()
)
"""More of them: what a browser takes for the whole host's word, and what our clients rely on."""


Payload = bytes | bytearray
Buffer = Payload | memoryview


class WireError(Exception):
    """The peer sent bytes that are not a frame; the connection cannot be used any further."""


class Item(NamedTuple):
    """One job, reply or control message."""

    id: int
    code: int
    flags: int
    meta: bytes
    body: Payload
    """A bytearray is nobody else's."""
    queue_us: int = 0
    handler_us: int = 0
    batch_us: int = 0


class Frame:
    """Collects the items of one frame as buffers; payloads are not copied or joined."""

    __slots__ = ("_cuts", "_heads", "_payloads", "_size")

    def __init__(self) -> None:
        self._heads: list[bytes] = []
        self._payloads: list[Buffer] = []
        self._cuts: list[tuple[int, int]] = [(0, 0)]
        """Heads and payloads before each of the frames that it is split into."""
        self._size = 0
        """Bytes of the last of them."""

    def add(
        self,
        id: int,
        code: int,
        flags: int,
        meta: bytes,
        parts: Sequence[Buffer],
        queue_us: int = 0,
        handler_us: int = 0,
        batch_us: int = 0,
    ) -> None:
        """Add one item; its body may come in several parts."""
        length = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        size = len(meta) + length
        if self._size + size > FRAME_BYTES and id and self._heads:
            self._cuts.append((len(self._heads), len(self._payloads)))
            self._size = 0
        self._size += size
        self._heads.append(
            HEAD.pack(id, code, flags, queue_us, handler_us, batch_us, len(meta), length)
        )
        self._payloads.append(meta)
        if length:
            self._payloads += parts

    def __len__(self) -> int:
        return len(self._heads)

    def buffers(self) -> list[Buffer]:
        """Return the frame's buffers in the order in which they are sent."""
        return [COUNT.pack(len(self._heads)), *self._heads, *self._payloads]

    def split(self) -> Iterator[list[Buffer]]:
        """Yield the buffers of the frame, or of the frames of `FRAME_BYTES` that it is sent as.

        A control item goes with the item before it.
        """
        count = len(self._heads)
        for (first, start), (last, end) in pairwise([*self._cuts, (count, len(self._payloads))]):
            heads = self._heads[first:last]
            if last < count:
                id, code, flags, *rest = HEAD.unpack(heads[0])
                heads[0] = HEAD.pack(id, code, flags | PARTIAL, *rest)
            yield [COUNT.pack(len(heads)), *heads, *self._payloads[start:end]]


def now_us() -> int:
    """Return the time on the machine's monotonic clock, which begins again every 71 minutes."""
    return int(monotonic() * 1e6) & 0xFFFFFFFF


def since_us(began_us: int) -> int:
    """Return how long ago that was, by `now_us`."""
    return (now_us() - began_us) & 0xFFFFFFFF


def encode_control(code: int, message: dict[str, Any]) -> bytes:
    """Return a whole frame with one control item."""
    frame = Frame()
    frame.add(0, code, 0, b"", [json.dumps(message).encode()])
    return b"".join(frame.buffers())


def decode_control(item: Item) -> dict[str, Any]:
    """Return a control item's JSON object.

    Raises:
        WireError: it is not a JSON object.
    """
    try:
        message = json.loads(item.body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"control message {item.code} is not JSON") from error
    if not isinstance(message, dict):
        raise WireError(f"control message {item.code} is not a JSON object")
    return message


def pack_meta(fields: Iterable[bytes]) -> bytes:
    """Join byte strings that hold no NUL."""
    return b"\0".join(fields)


def unpack_meta(meta: bytes) -> list[bytes]:
    """Undo `pack_meta`; an empty meta has no fields."""
    return meta.split(b"\0") if meta else []


def pack_parts(values: Mapping[str, Sequence[Buffer]]) -> list[Buffer]:
    """Return a body of named values, which come in pieces.

    Of each: u32 its name's length, u32 its own, name, value.
    """
    parts: list[Buffer] = []
    for name, pieces in values.items():
        encoded = name.encode()
        parts += (PART.pack(len(encoded), sum(map(len, pieces))) + encoded, *pieces)
    return parts or [b""]


def unpack_parts(body: Payload) -> Iterator[tuple[str, bytearray]]:
    """Undo `pack_parts`, whose body is whole."""
    view, at = memoryview(body), 0
    while at < len(body):
        name_length, length = PART.unpack_from(body, at)
        value_at = at + PART.size + name_length
        at, name = value_at + length, str(view[at + PART.size : value_at], "utf-8")
        yield name, bytearray(view[value_at:at])


class Decoder:
    """Bytes as they arrive → whole frames.

    What arrives whole is cut out of the bytes that came. Of a frame that comes in pieces each body
    is put together in a buffer of its own, of the length that its head says: `room` is where the
    next bytes belong, so that a reader can receive them there and nothing is copied.

    Args:
        max_item: the longest item accepted, in bytes.
        max_control: the same of control items; None takes as much.
        max_frame: the most that all items of a frame may have; None has no limit.
        may_begin: called with the size of a frame that comes in pieces, before there is memory for
            it. While it returns False the frame waits; `feed` with no bytes asks again.
    """

    def __init__(
        self,
        max_item: int,
        max_control: int | None = None,
        max_frame: int | None = None,
        may_begin: Callable[[int], bool] = lambda size: True,
    ) -> None:
        self._may_begin = may_begin
        self._max_item = max_item
        self._max_control = max_item if max_control is None else max_control
        self._max_frame = max_frame
        self._pending = b""
        """The beginning of a frame: up to a part of its heads, or one that waits."""
        self._begun: _Begun | None = None
        """A frame whose heads are there."""
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self.is_direct = False
        """Whether `buffer` is a payload's own place."""

    @property
    def room(self) -> memoryview | None:
        """Where the next bytes belong; None outside of a payload."""
        return self._begun.room if self._begun is not None else None

    def buffer(self) -> memoryview:
        """Return where to receive next: a long payload in its own place."""
        room = self.room
        self.is_direct = room is not None and len(room) >= LONG_BYTES
        return room if room is not None and self.is_direct else self._buffer

    def received(self, count: int) -> list[list[Item]]:
        """Return the frames that so many bytes in `buffer` complete, in order.

        Raises:
            WireError: the bytes are not a frame or exceed a limit.
        """
        return self.filled(count) if self.is_direct else self.feed(self._buffer[:count])

    def forget(self) -> None:
        """Free the buffers, after the last bytes."""
        self._begun, self._buffer = None, memoryview(b"")

    def filled(self, count: int) -> list[list[Item]]:
        """Take note of so many bytes in `room`; return the frame that they complete."""
        begun = self._begun
        assert begun is not None
        if not begun.advance(count):
            return []
        self._begun = None
        return [begun.finish()]

    def feed(self, data: Buffer) -> list[list[Item]]:
        """Return the frames that `data` completes, in order; nothing of it is kept.

        Raises:
            WireError: the bytes are not a frame or exceed a limit.
        """
        frames, start = [], 0
        if self._begun is not None:
            start = self._begun.take(data, 0)
            if self._begun.room:
                return []
            frames.append(self._begun.finish())
            self._begun = None
        elif self._pending:
            data = b"".join((self._pending, data))
            self._pending = b""
        end = len(data)
        while start < end:
            found = self._heads(data, start)
            if found is None:
                self._pending = bytes(data[start:])
                break
            heads, size = found
            at = start + COUNT.size + len(heads) * HEAD.size
            if end - at < size:
                if not self._may_begin(size):
                    self._pending = bytes(data[start:])
                    break
                self._begun = _Begun(heads)
                self._begun.take(data, at)
                break
            items = []
            data = bytes(data)
            for id, code, flags, queue_us, handler_us, batch_us, meta_length, length in heads:
                body_at = at + meta_length
                start = body_at + length
                meta, body = data[at:body_at], data[body_at:start]
                items.append(Item(id, code, flags, meta, body, queue_us, handler_us, batch_us))
                at = start
            frames.append(items)
        return frames

    def _heads(self, data: Buffer, start: int) -> tuple[list[tuple[int, ...]], int] | None:
        """Return heads and size of the frame at `start`, None where they are not there yet."""
        at = start + COUNT.size
        if len(data) < at:
            return None
        (count,) = COUNT.unpack_from(data, start)
        if not 0 < count <= MAX_ITEMS:
            raise WireError(f"a frame of {count} items; 1 to {MAX_ITEMS} are allowed")
        if len(data) < at + count * HEAD.size:
            return None
        heads = list(HEAD.iter_unpack(memoryview(data)[at : at + count * HEAD.size]))
        size = 0
        for id, *_, meta_length, body_length in heads:
            length = meta_length + body_length
            limit = self._max_item if id else self._max_control
            if length > limit:
                raise WireError(f"an item of {length} bytes; {limit} are allowed")
            size += length
        if self._max_frame is not None and size > self._max_frame:
            raise WireError(f"a frame of {size} bytes; {self._max_frame} are allowed")
        return heads, size


class _Begun:
    """A frame whose payloads come in pieces.

    Attributes:
        room: where the next bytes belong; empty once all is there.
    """

    def __init__(self, heads: list[tuple[int, ...]]) -> None:
        self._heads = heads
        self._payloads = [make_room(length) for head in heads for length in head[-2:]]
        self._rooms = (memoryview(payload) for payload in self._payloads if payload)
        self.room = next(self._rooms)

    def advance(self, count: int) -> bool:
        """Take note of so many bytes in `room`, and return whether all is there."""
        self.room = self.room[count:] or next(self._rooms, self.room[:0])
        return not self.room

    def take(self, data: Buffer, start: int) -> int:
        """Copy what belongs here of `data` from `start`; return where that ends."""
        source = memoryview(data)
        while self.room and start < len(data):
            count = min(len(self.room), len(data) - start)
            self.room[:count] = source[start : start + count]
            start += count
            self.advance(count)
        return start

    def finish(self) -> list[Item]:
        """Return the items, all of whose bytes have come."""
        self.room = memoryview(b"")  # who gets a body may change its size
        metas, bodies = self._payloads[::2], self._payloads[1::2]
        return [
            Item(id, code, flags, bytes(meta), body, *times)
            for (id, code, flags, *times, _, _), meta, body in zip(
                self._heads, metas, bodies, strict=True
            )
        ]
