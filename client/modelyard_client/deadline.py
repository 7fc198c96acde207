"""A time for a whole attempt: httpx's own are for each piece that is read or written."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any

import httpcore
import httpx

_ENDS_AT: ContextVar[float | None] = ContextVar("ends_at", default=None)
PIECE_BYTES = 1 << 16
"""What is written at a time: httpcore gives each send of a longer buffer the whole time again."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Have what is read and written in this block end in time, over connections of `bound`."""
    token = _ENDS_AT.set(monotonic() + seconds)
    try:
        yield
    finally:
        _ENDS_AT.reset(token)


def bound(client: httpx.Client) -> httpx.Client:
    """Have the connections of a client keep to `within`, and return it."""
    # httpx has no way to say which network its own transports and its proxies' use. One that keeps
    # it elsewhere would give each piece the whole time, as it does by itself.
    for transport in (client._transport, *client._mounts.values()):
        pool: Any = getattr(transport, "_pool", None)
        if hasattr(pool, "_network_backend"):
            pool._network_backend = _Network(pool._network_backend)
    return client


def _left(timeout: float | None, late: type[Exception]) -> float | None:
    ends_at = _ENDS_AT.get()
    if ends_at is None:
        return timeout
    left = ends_at - monotonic()
    if left <= 0:
        raise late("the time of the call is over")
    return left if timeout is None else min(left, timeout)


class _Network(httpcore.NetworkBackend):
    """Connects in the time that is left."""

    def __init__(self, network: httpcore.NetworkBackend) -> None:
        self._network = network

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        left = _left(timeout, httpcore.ConnectTimeout)
        return _Stream(self._network.connect_tcp(host, port, left, local_address, socket_options))

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        left = _left(timeout, httpcore.ConnectTimeout)
        return _Stream(self._network.connect_unix_socket(path, left, socket_options))


class _Stream(httpcore.NetworkStream):
    """Reads and writes in the time that is left."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream
        self.close = stream.close  # type: ignore[method-assign]
        self.get_extra_info = stream.get_extra_info  # type: ignore[method-assign]

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for at in range(0, len(buffer), PIECE_BYTES):
            left = _left(timeout, httpcore.WriteTimeout)
            self._stream.write(buffer[at : at + PIECE_BYTES], left)

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        left = _left(timeout, httpcore.ConnectTimeout)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, left))
