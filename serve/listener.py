"""One listening address: sockets, connections, and an orderly end.

uvicorn's HTTP protocol on httptools does the parsing; its `Server` is not used, because it closes
idle connections and the listening socket the moment it is told to stop, and a request that is on
its way then is lost without an answer.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.protocols.utils import get_path_with_query_string
from uvicorn.server import ServerState

from serve.address import Address
from serve.errors import StartError

BACKLOG = 2048
KEEP_ALIVE_S = 75
SWEEP_S = 5.0
QUIET_S = 0.5
"""A connection without a request for this long is idle, not about to send one."""


ANSWER = "modelyard.answer"
"""ASGI extension: sends a whole answer at once, see `send_at_once`."""
SPELLING = "modelyard.spelling"
"""ASGI extension: the names of `scope["headers"]` as the client spelled them, a list of bytes."""


JOIN_BYTES = 1 << 16
"""Bodies below this are copied behind their head: uvloop's write of one buffer is the fast one."""


Access = Callable[[object, str, str, int, float], None]
"""Called with each answer: client, method, target, status, seconds since the request's head."""


class AccessLine:
    """Takes uvicorn's call for an access log, and ours, of one answer."""

    def __init__(self, access: Access, client: object) -> None:
        self._access = access
        self._client = client
        self._began = monotonic()

    def info(self, _format: str, _client: str, method: str, target: str, *rest: Any) -> None:
        """Be a logger to uvicorn; the last value is the status."""
        self._access(self._client, method, target, rest[-1], monotonic() - self._began)


class Connection(HttpToolsProtocol):
    """One client connection that knows since when it has been quiet."""

    quiet_since = 0.0
    access: Access | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to count."""
        super().connection_made(transport)
        self.quiet_since = self.loop.time()

    def on_message_begin(self) -> None:
        """Start to collect the names of headers."""
        super().on_message_begin()
        self._spelling: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep the name as it came beside ASGI's lower-case one."""
        self._spelling.append(name)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Offer the application to send its answer in one piece."""
        super().on_headers_complete()
        if self.access is not None:
            self.cycle.access_log = True
            self.cycle.access_logger = AccessLine(self.access, self.client)  # type: ignore[assignment]
        answer: Any = partial(send_at_once, self.cycle)
        spelling: Any = self._spelling
        self.scope["extensions"] = {ANSWER: answer, SPELLING: spelling}

    def on_response_complete(self) -> None:
        """Start to count again; the listener closes what stays idle, uvicorn would set a timer."""
        self.quiet_since = self.loop.time()
        if self.pipeline:
            super().on_response_complete()
        elif not self.transport.is_closing():
            self.flow.resume_reading()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being read or answered."""
        return self.cycle is not None and not self.cycle.response_complete


def send_at_once(
    cycle: RequestResponseCycle,
    status: int,
    headers: Sequence[tuple[bytes, bytes]],
    body: bytes,
) -> bool:
    """Write head and body in one system call; return False where only ASGI's way will do.

    uvicorn writes them apart, and checks every header by two patterns: a quarter of what the server
    process spends on a small request.
    """
    if cycle.flow.write_paused or cycle.response_started or cycle.scope["method"] == "HEAD":
        return False
    if cycle.disconnected:
        return True
    lines = [STATUS_LINE[status]]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    if not cycle.keep_alive:
        lines.append(b"connection: close\r\n")
    lines.append(b"\r\n")
    head = b"".join(lines)
    line_count = len(headers) + 2 + (not cycle.keep_alive)
    if head.count(b"\n") != line_count or head.count(b"\r") != line_count:
        return False  # a line break inside a header; uvicorn refuses it
    if len(body) < JOIN_BYTES:
        cycle.transport.write(head + body)
    else:
        cycle.transport.writelines((head, body))
    cycle.response_started = cycle.response_complete = True
    if cycle.access_log:
        target = get_path_with_query_string(cycle.scope)
        cycle.access_logger.info("", "", cycle.scope["method"], target, status)
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
    return True


class Connections:
    """The client connections of one process.

    Args:
        app: the ASGI application that answers.
        access: called with each answer, for an access log.
        protocol: of one connection.
    """

    def __init__(
        self, app: Any, access: Access | None = None, protocol: type[Connection] = Connection
    ) -> None:
        self._access = access
        self._protocol = protocol
        self._config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._config.load()
        self._state = ServerState()
        self._sweeper: asyncio.TimerHandle | None = None

    def connect(self) -> Connection:
        """Return the protocol of a new connection."""
        connection = self._protocol(self._config, self._state, {})
        connection.access = self._access
        return connection

    def sweep(self) -> None:
        """Close the connections that have been idle for long, now and then."""
        self.close_idle(KEEP_ALIVE_S)
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self.sweep)

    @property
    def busy_count(self) -> int:
        """Connections with a request in progress."""
        return sum(connection.is_busy for connection in self._connections())

    def close_idle(self, quiet_s: float = QUIET_S) -> int:
        """Close the connections that are neither busy nor just opened; return how many remain.

        One whose client still has to read its last answer is closed, and remains.
        """
        now = asyncio.get_running_loop().time()
        remain = 0
        for connection in self._connections():
            if connection.is_busy or now - connection.quiet_since < quiet_s:
                remain += 1
            else:
                connection.transport.close()
                remain += connection.transport.get_write_buffer_size() > 0
        return remain

    def _connections(self) -> list[Connection]:
        return [c for c in self._state.connections if isinstance(c, Connection)]


class Listener(Connections):
    """A bound socket and the connections that it accepted.

    Args:
        app: the ASGI application that answers.
        address: where to listen.
        tls: certificate and key, for an address that asks for TLS.
        access: called with each answer, for an access log.

    Raises:
        StartError: the address cannot be bound; the message says why and what to do.
    """

    def __init__(
        self,
        app: Any,
        address: Address,
        tls: ssl.SSLContext | None = None,
        access: Access | None = None,
    ) -> None:
        super().__init__(app, access)
        self._socket, self.address = bind(address)
        self._tls = tls if address.is_tls else None
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The address as a client writes it."""
        return str(self.address)

    async def start(self) -> None:
        """Begin to accept."""
        loop = asyncio.get_running_loop()
        create = loop.create_server if self.address.path is None else loop.create_unix_server
        self._server = await create(self.connect, sock=self._socket, backlog=BACKLOG, ssl=self._tls)
        self.sweep()

    def abandon(self) -> None:
        """Give the address back without having accepted anything."""
        self._close_socket()

    def _close_socket(self) -> None:
        self._socket.close()
        if self.address.path is not None:
            self.address.path.unlink(missing_ok=True)

    async def stop_accepting(self) -> None:
        """Close the listening socket, after taking every connection that is already complete."""
        if self._server is None:
            self.abandon()
            return
        loop = asyncio.get_running_loop()
        accepted = []
        while True:
            try:
                accepted.append(self._socket.accept()[0])
            except OSError:
                break
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._server.close()
        self._close_socket()
        for connection in accepted:
            await loop.connect_accepted_socket(self.connect, connection, ssl=self._tls)


def bind(address: Address) -> tuple[socket.socket, Address]:
    """Return a socket that listens, and its address with the port that it got.

    Raises:
        StartError: the address cannot be bound; the message says why and what to do.
    """
    if address.path is not None:
        return _bind_unix(address.path), address
    host, port = address.host, address.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCP_NODELAY reaches accepted connections only through a socket that names its protocol:
    # without it every keep-alive answer waits 40 ms for the client's delayed acknowledgement.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            reason = "is in use: stop the process that holds it, or choose another port"
        elif error.errno == errno.EACCES:
            reason = "needs more rights: choose a port from 1024 up"
        else:
            reason = f"cannot be bound: {error.strerror}"
        raise StartError(f"port {port} on {host} {reason}") from error
    listening.setblocking(False)
    return listening, replace(address, port=listening.getsockname()[1])


def _bind_unix(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()  # a server that was killed left it
        listening.bind(str(path))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        in_use = error.errno == errno.EADDRINUSE
        reason = "is in use" if in_use else f"cannot be bound: {error.strerror or error}"
        raise StartError(f"the Unix socket {path} {reason}; choose another path") from error
    listening.setblocking(False)
    return listening


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0
