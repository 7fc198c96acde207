"""A request of a page to a model: the way of every client's request, its answer for a page."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic

from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane.call import EXPLAIN, Stream, Target
from modelyard.serve.dataplane.tracing import Attributes
from modelyard.serve.errors import StreamBroken
from modelyard.serve.front.begin import (
    AwaitedReply,
    Front,
    Headers,
    Served,
    check_options,
    pack_fields,
    unpack_headers,
)

MOST_STREAMED_BYTES = 1 << 20
"""Of an answer that comes in pieces; a page shows it when it is whole."""


@dataclass(frozen=True)
class Answered:
    """What a model answered, and how long that took."""

    status: int
    kind: str
    """The Content-Type."""
    body: bytes
    took_s: float
    """From the time that the request was queued."""
    waited_s: float
    """Of that, for a worker, and there for its turn; None in a streamed answer."""
    handled_s: float
    """Of that, in the handler's call that answered it."""


async def ask(
    front: Front, target: Target, query: bytes, body: bytes, kind: str, id: str
) -> Answered:
    """Ask a model as a client does that says nothing of itself.

    Args:
        front: of the server.
        target: what is asked of which version.
        query: the options of an explanation.
        body: the input.
        kind: its Content-Type.
        id: of the request, for the log.

    Raises:
        ServeError: it is refused, or there is no answer.
    """
    began = monotonic()
    page = _Page(id)
    reply = _PageReply(front, page, target, query, kind)

    def check(model: ModelVersion) -> None:
        if target.kind == EXPLAIN and query and model.takes_our_options:
            check_options(query)

    call = front.begin(reply, check=check)
    if call is not None:
        call.submit([body])
    try:
        answer = await reply.wait()
    except asyncio.CancelledError:
        page.has_left = True
        raise
    whole = await _gather(answer.body) if isinstance(answer.body, Stream) else answer.body
    headers = dict(unpack_headers(answer.headers))
    return Answered(
        answer.status,
        headers.get(b"content-type", b"").decode("latin-1"),
        bytes(whole),
        monotonic() - began,
        answer.queue_us / 1e6,
        answer.handler_us / 1e6,
    )


class _Page:
    """A request of a page, as the front wants it."""

    served: Served = None
    trace_id = ""
    has_left = False

    def __init__(self, id: str) -> None:
        self.id = id
        self.headers: Headers = []

    def is_left(self) -> bool:
        """Return whether nobody waits any more: the browser has gone."""
        return self.has_left


class _PageReply(AwaitedReply):
    __slots__ = ("_kind", "_query")

    def __init__(self, front: Front, page: _Page, target: Target, query: bytes, kind: str) -> None:
        super().__init__(front, page, target)
        self._query = query
        self._kind = kind.encode("latin-1", "replace")

    def head(self) -> bytes:
        """Return what a worker needs beside the body."""
        return pack_fields(b"", self._query, self.asked.id, [b"content-type", self._kind])

    def describe(self) -> tuple[str, Attributes]:
        """Return name and attributes of the request's span."""
        return "console", self.describe_call()

    def describe_status(self, status: int) -> Attributes:
        """Return what the span says of an answer."""
        return {"http.response.status_code": status}


async def _gather(stream: Stream) -> bytes:
    whole = bytearray()
    try:
        async for chunk in stream.read():
            whole += chunk
            if len(whole) > MOST_STREAMED_BYTES:
                raise StreamBroken(f"the answer has more than {MOST_STREAMED_BYTES} bytes")
    finally:
        stream.close()
    return bytes(whole)
