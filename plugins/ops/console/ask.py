"""A request of a page to a model: the way of every client's request, its answer for a page."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic

from modelyard.serve.api.inference import (
    CallReply,
    Calls,
    check_options,
    pack_fields,
    unpack_headers,
)
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane.call import EXPLAIN, PREDICT, Call, Reply, Stream, Target
from modelyard.serve.errors import BadRequest, StreamBroken, Unavailable

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
    calls: Calls, target: Target, query: bytes, body: bytes, kind: str, id: str
) -> Answered:
    """Ask a model as a client does that says nothing of itself.

    Args:
        calls: of the server.
        target: what is asked of which version.
        query: the options of an explanation.
        body: the input.
        kind: its Content-Type.
        id: of the request, for the log.

    Raises:
        ServeError: it is refused, or there is no answer.
    """
    model = calls.find(target, id, [])
    sink = _Awaited(calls, model, target)
    try:
        if target.kind == EXPLAIN and query and model.takes_our_options:
            check_options(query)
        if target.kind == PREDICT:
            model.batchers[PREDICT].check(model.request_timeout_s, False, monotonic())
    except (BadRequest, Unavailable) as error:
        sink.fail(error, 0.0)
    else:
        head = pack_fields(b"", query, id, [b"content-type", kind.encode("latin-1", "replace")])
        left = sink.is_left
        call = Call(
            model, target.kind, head, sink, has_left=left, flags=target.flags, must_fit=False
        )
        sink.call = call
        call.submit([body])
    return await sink.wait()


class _Awaited(CallReply):
    """Keeps the reply to a call for the task that waits for it."""

    __slots__ = ("_began", "_future")

    def __init__(self, calls: Calls, model: ModelVersion, target: Target) -> None:
        super().__init__(calls, model, target)
        self._began = monotonic()
        self._future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def answer(self, reply: Reply) -> None:
        """Hand a worker's reply on."""
        if not self._future.done():
            self._future.set_result(reply)
        elif isinstance(reply.body, Stream):
            reply.body.close()

    def refuse(self, error: Exception) -> None:
        """Hand an error on."""
        if not self._future.done():
            self._future.set_exception(error)

    def is_left(self) -> bool:
        """Return whether nobody waits any more: the browser has gone."""
        return self._future.cancelled()

    async def wait(self) -> Answered:
        """Return the answer when it is whole.

        Raises:
            ServeError: there is none.
        """
        reply = await self._future
        body = reply.body
        if isinstance(body, Stream):
            body = await _gather(body)
        headers = dict(unpack_headers(reply.headers))
        return Answered(
            reply.status,
            headers.get(b"content-type", b"").decode("latin-1"),
            bytes(body),
            monotonic() - self._began,
            reply.queue_us / 1e6,
            reply.handler_us / 1e6,
        )


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
