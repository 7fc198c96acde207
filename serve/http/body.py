"""Reading the bodies of requests, up to a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from modelyard.serve.errors import BodyTooLarge

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LINGER_S = 1.0
LINGER_BYTES = 64 << 20


class ClientLeft(Exception):
    """The connection closed before the body was read; nobody waits for an answer."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> list[bytes]:
    """Return the body in the parts in which it came; they are never joined.

    Raises:
        BodyTooLarge: before reading when the length is declared, else as soon as it is crossed.
        ClientLeft: the client closed the connection.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > limit:
            raise BodyTooLarge(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        if body := message.get("body", b""):
            parts.append(body)
            size += len(body)
            if size > limit:
                raise BodyTooLarge(limit)
        if not message.get("more_body", False):
            return parts or [b""]


async def linger(receive: Receive) -> None:
    """Read on for a moment, so that a client still sending its body can read an early answer."""
    size = 0
    try:
        async with asyncio.timeout(LINGER_S):
            while size < LINGER_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    break
    except TimeoutError:
        pass
