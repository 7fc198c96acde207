"""A request of a page to a model, which waits in the model's queue as every client's does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic
from urllib.parse import parse_qsl

from modelyard.base.explain_options import check_query
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import EXPLAIN, Call, Reply, Stream
from modelyard.serve.errors import BadRequest, StreamBroken, http_status

MOST_STREAMED_BYTES = 1 << 20
"""Longest answer in pieces; a page shows it when it is whole."""


@dataclass(frozen=True)
class Answered:
    """What a model answered, and how long that took."""

    status: int
    kind: str
    """The Content-Type."""
    body: bytes
    took_s: float
    """Time since the request was queued."""
    waited_s: float
    """Time in which it waited for its turn at the worker; 0 in a streamed answer."""
    handled_s: float
    """Time of the handler's call that answered it."""


async def ask(
    model: ModelVersion, kind: int, query: str, body: bytes, media: str, id: str
) -> Answered:
    """Ask a model as a client does that says nothing of itself.

    Args:
        kind: PREDICT or EXPLAIN.
        query: the options of an explanation.
        body: the input.
        media: its Content-Type.
        id: id of the request, for the log.

    Raises:
        ServeError: it is refused, or there is no answer.
    """
    began, status = monotonic(), 500
    try:
        if kind == EXPLAIN and query and model.takes_our_options:
            try:
                check_query(parse_qsl(query, keep_blank_values=True))
            except ValueError as error:
                raise BadRequest(str(error)) from error
        head = (
            b"",
            query.encode(),
            id.encode(),
            b"content-type",
            media.encode("latin-1", "replace"),
        )
        sink: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        # Whose browser has gone waits no more.
        packed = wire.pack_meta(head)
        Call(model, kind, packed, sink, has_left=sink.cancelled, must_fit=False).submit([body])
        reply = await sink
        status = reply.status
    except Exception as error:
        status = http_status(error)[0]
        raise
    finally:
        model.metrics.kinds[kind].answered(status, monotonic() - began)
    fields = wire.unpack_meta(reply.headers)
    headers = dict(zip(map(bytes.lower, fields[::2]), fields[1::2], strict=True))
    return Answered(
        status,
        headers.get(b"content-type", b"").decode("latin-1"),
        await _gather(reply.body) if isinstance(reply.body, Stream) else bytes(reply.body),
        monotonic() - began,
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
