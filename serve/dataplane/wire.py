"""Frames between the server process and a worker process, the same both ways.

    frame = u32 count | count × head | count × (meta | body)
    head  = u32 id | u16 code | u16 flags | u32 queue | u32 handler
          | u32 meta length | u32 body length

Little-endian; builtin types only, never pickle. A job's item carries the job's id (from 1 up); id 0
marks a control item, whose `code` is one of the control codes and whose body is JSON. `meta` is a
list of byte strings joined by NUL, which no HTTP header may contain. All heads come first, so that
a reader knows the size of a frame before its payloads arrive.

From server to worker a job's `code` is unused and `flags` says what kind of job it is. From worker
to server `code` is the HTTP status and `meta` the response headers, name after value. A streamed
answer is several replies to one job, all but the last with MORE; status and headers are those of
the first. `queue` and `handler` are microseconds: how long the job waited at the worker before its
batch began, and how long the handler's call took that answered it. In a job `queue` is when it was
sent (`now_us`). Everywhere else they are 0.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any, NamedTuple

PROTOCOL = 3
"""Version of this format; a worker's READY says it."""

COUNT = struct.Struct("<I")
HEAD = struct.Struct("<IHHIIII")

MAX_ITEMS = 4096
"""Items in one frame; more is a broken or hostile peer."""

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
"""From one of TorchServe's oldest routes: the query's parameters are the handler's too, and the
headers `explain` and `url_path` are not made."""
KSERVE = 16
"""From a route of KServe's: the header `url_path` is not made."""

# Flags of a reply.
MORE = 1
"""A chunk of a streamed answer; at least one reply to the same job follows."""
BROKEN = 2
"""The handler failed after it had sent chunks; the body is the error, for the log."""
UNREAD = 4
"""Nobody waits for the answer, so the job was not run, or not to its end."""


class WireError(Exception):
    """The peer sent bytes that are not a frame; the connection cannot be used any further."""


class Item(NamedTuple):
    """One job, reply or control message."""

    id: int
    code: int
    flags: int
    meta: bytes
    body: bytes
    queue_us: int = 0
    handler_us: int = 0


class Frame:
    """Collects the items of one frame as buffers; payloads are not copied or joined."""

    __slots__ = ("_count", "_heads", "_payloads")

    def __init__(self) -> None:
        self._count = 0
        self._heads: list[bytes] = []
        self._payloads: list[bytes] = []

    def add(
        self,
        id: int,
        code: int,
        flags: int,
        meta: bytes,
        parts: Sequence[bytes],
        queue_us: int = 0,
        handler_us: int = 0,
    ) -> None:
        """Add one item; its body may come in several parts."""
        length = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        self._count += 1
        self._heads.append(HEAD.pack(id, code, flags, queue_us, handler_us, len(meta), length))
        self._payloads.append(meta)
        self._payloads += parts

    def __len__(self) -> int:
        return self._count

    def buffers(self) -> list[bytes]:
        """Return the frame's buffers in the order in which they are sent."""
        return [COUNT.pack(self._count), *self._heads, *self._payloads]


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


class Decoder:
    """Bytes as they arrive → whole frames.

    Args:
        max_body: the longest body accepted, in bytes.
    """

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._pending = bytearray()
        self._needed = COUNT.size

    def feed(self, data: bytes) -> list[list[Item]]:
        """Return the frames that `data` completes, in order.

        Raises:
            WireError: the bytes are not a frame or exceed a limit.
        """
        source: bytes | bytearray = data
        if self._pending:
            self._pending += data
            if len(self._pending) < self._needed:
                return []
            source = self._pending
        frames, start = [], 0
        while (parsed := self._parse(source, start)) is not None:
            frame, start = parsed
            frames.append(frame)
        if self._pending or start < len(source):
            self._pending = bytearray(source[start:])
        return frames

    def _parse(self, source: bytes | bytearray, start: int) -> tuple[list[Item], int] | None:
        """Return the frame at `start` and its end, or None and note how many bytes it needs."""
        have = len(source) - start
        self._needed = COUNT.size
        if have < self._needed:
            return None
        (count,) = COUNT.unpack_from(source, start)
        if not 0 < count <= MAX_ITEMS:
            raise WireError(f"a frame of {count} items; 1 to {MAX_ITEMS} are allowed")
        self._needed += count * HEAD.size
        if have < self._needed:
            return None
        at = start + self._needed
        heads = [HEAD.unpack_from(source, start + COUNT.size + i * HEAD.size) for i in range(count)]
        for *_, meta_length, body_length in heads:
            if meta_length + body_length > self._max_body:
                raise WireError(
                    f"an item of {meta_length + body_length} bytes; {self._max_body} are allowed"
                )
            self._needed += meta_length + body_length
        if have < self._needed:
            return None
        items = []
        for id, code, flags, queue_us, handler_us, meta_length, body_length in heads:
            body_at = at + meta_length
            end = body_at + body_length
            meta, body = bytes(source[at:body_at]), bytes(source[body_at:end])
            items.append(Item(id, code, flags, meta, body, queue_us, handler_us))
            at = end
        return items, at
