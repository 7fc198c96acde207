"""One listening address: its socket, its connections, and an orderly end.

Connections are accepted here and not by the loop: uvloop closes those that it has no descriptor
for, without an answer, and has no way to leave them in the kernel's queue for a while.
"""

import asyncio
import contextlib
import errno
import heapq
import logging
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import psutil

from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.errors import StartError
from modelyard.serve.http.connection import HAS_PARSER, SLICE_BYTES, Accepts, Access, Connection
from modelyard.serve.http.heads import Heads
from modelyard.serve.http.site import SiteCheck
from modelyard.serve.http.turns import Turns
from modelyard.serve.settings import Address, Settings

if TYPE_CHECKING:
    from modelyard.serve.http.tls import TlsContext

logger = logging.getLogger(__name__)

BACKLOG = 2048
SWEEP_S = 1.0
"""How often each connection checks whether its client is too slow; 2,000 idle ones take 1.5 ms."""
QUIET_S = 0.5
"""A connection without a request for this long is idle, not about to send one."""
ACCEPTS_PER_TURN = 16
"""Connections that one turn of the loop accepts, so that requests are not held up by them."""
ACCEPTS_WHILE_BEHIND = 8
"""The same while there is no time for those that are open."""
NOTE_S = 1.0
FLOOD = 100
"""Refusals of one address in a second, after which its connections are not opened to be refused."""
MOST_NOTED = 1024
"""Addresses whose last line in the log is remembered."""
FRESH_S = 0.1
"""A connection that did something since is about to send a request, and not closed to make room."""
LOOK_S = 12e-6
"""Time for each connection from one look for an idle one to the next: a look takes a fiftieth of
it."""
SPARE_DESCRIPTORS = 64
"""What the inference API leaves for operators, and for workers that are started; a quarter of all,
where there are fewer than 256."""


Tls = Callable[[], "TlsContext"]
"""Returns certificate and key for the next client."""


@dataclass(eq=False)
class Listener:
    """A bound socket and the connections that it accepted.

    A connection more than there may be closes those that have been idle for longest; while all are
    busy, new ones wait in the kernel's queue.

    Raises:
        StartError: the address cannot be bound; the message says why and what to do.
    """

    app: Accepts
    """The application that answers."""
    address: Address
    """Where to listen; with the port that it got, once that is bound."""
    settings: Settings = field(default_factory=Settings)
    tls: Tls | None = None
    """Returns certificate and key for the next client, of an address that asks for TLS."""
    access: Access | None = None
    """Called with each answer, for an access log."""
    site: SiteCheck | None = None
    """Site whose requests are refused; None decides by the address."""
    budget: AnswerBudget = field(default_factory=AnswerBudget)
    spares_descriptors: bool = False
    """Whether it leaves the last file descriptors to the others."""

    def __post_init__(self) -> None:
        if not HAS_PARSER:
            raise StartError(
                "httptools is not installed, and no other parser is strict enough to take its "
                "place; install it: pip install httptools"
            )
        self._socket, self.address = bind(self.address)
        self._tls = self.tls if self.address.is_tls else None
        self.check_site = self.site or SiteCheck(self.address)
        self.connections: set[Connection] = set()
        self.heads = Heads(self.settings.max_request_bytes)
        self._opening: set[asyncio.Task[None]] = set()
        self._room = self.settings.max_connections
        """Connections that there may be: fewer than the limit once descriptors run short."""
        self._look_again_at = 0.0
        self._noted: dict[str, tuple[float, int]] = {}
        self._is_accepting = False
        self._is_stopping = False
        self._sweeper: asyncio.TimerHandle | None = None

    def note(self, client: tuple[str, int] | None, text: str, *values: object) -> None:
        """Write a line about a client into the log: one for each address and second."""
        host, now = client[0] if client else "", self._loop.time()
        said_at, count = self._noted.get(host, (-inf, 0))
        if now - said_at < NOTE_S:
            self._noted[host] = said_at, count + 1
            if count % FLOOD == FLOOD - 1:
                self._defer(1)
            return
        if len(self._noted) >= MOST_NOTED:
            self._noted.clear()
        self._noted[host] = now, 0
        more = f"; {count} more lines about {host} were left out" if count else ""
        logger.warning(f"%s: {text}%s", client or "a client", *values, more)

    @property
    def url(self) -> str:
        """The address as a client writes it."""
        return str(self.address)

    async def start(self) -> None:
        """Begin to accept."""
        self._loop = asyncio.get_running_loop()
        self.turns = Turns()
        if self.address.is_shared:  # earlier ones would wait here while others could answer
            self._socket.listen(BACKLOG)
        self._sweep()

    def _sweep(self) -> None:
        """Close what is idle or slow for long, now and then."""
        now = self._loop.time()
        for connection in tuple(self.connections):
            connection.check(now)
        if self._count < self._room // 2:
            self._room = self.settings.max_connections
        self._defer(0)
        self.resume()
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    def _defer(self, patience_s: int) -> None:
        """Accept a client with its first bytes, or without once it has sent none for that long.

        What is refused for them then needs no connection.
        """
        if self.address.path is None and not self._is_stopping:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, patience_s)

    # -- accepting -------------------------------------------------------------------------------

    def resume(self) -> None:
        """Accept again, after a pause; called when a connection has ended, too."""
        if not self._is_accepting and not self._is_stopping:
            self._is_accepting = True
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _pause(self) -> None:
        """Accept no more until a connection has ended, or the next sweep."""
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._socket.fileno())

    def _accept(self) -> None:
        if self._count >= self._room:
            self._make_room()
            return
        for _ in range(ACCEPTS_WHILE_BEHIND if self.turns.is_behind else ACCEPTS_PER_TURN):
            if self._count >= self._room:
                return  # whether another one waits is not known yet
            try:
                accepted, client = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or no memory is left
                logger.warning("%s: cannot accept a connection: %s", self.url, error.strerror)
                self._make_room()
                return
            if not self._refuses(accepted, client):
                self._open(accepted)
            if self.spares_descriptors and accepted.fileno() >= _descriptors():
                self._room = max(1, self._count - 1)  # all lower numbers are in use

    def _refuses(self, accepted: socket.socket, client: Any) -> bool:
        """Answer a client whose request is refused, and its connection closed, as the last was.

        What came is parsed only of an address that has been refused often in this second: its
        refusals take 0.7 of the CPU that they take over connections that are opened. Such a client
        may not have the time to read why its body is too long.
        """
        is_flood = self._is_flood(client)
        if self._tls or not (is_flood or monotonic() < self.heads.refuses_until):
            return False
        accepted.setblocking(False)
        try:
            data = accepted.recv(SLICE_BYTES, socket.MSG_PEEK)
        except OSError:
            return False
        if not Connection(self, accepted).refuses_first(data, client[:2] or None, is_flood):
            return False
        with accepted, contextlib.suppress(OSError):
            accepted.recv(len(data))  # what is unread at the end would reset the connection
        return True

    def _is_flood(self, client: Any) -> bool:
        """Return whether an address was refused so often in this second that it is one."""
        said_at, count = self._noted.get(client[0] if client else "", (-inf, 0))
        return count >= FLOOD and self._loop.time() - said_at < NOTE_S

    @property
    def _count(self) -> int:
        return len(self.connections) + len(self._opening)

    def _make_room(self) -> None:
        """Close those without a request for longest, at least a 64th of all, and wait for it."""
        self._pause()
        now = self._loop.time()
        if now < self._look_again_at:
            self._loop.call_later(self._look_again_at - now, self.resume)
            return
        self._look_again_at = now + LOOK_S * self._count
        idle = [c for c in self.connections if c.since < now - FRESH_S and c.is_idle]
        share = max(1, self._count // 64, self._count - self._room + 1)
        for connection in heapq.nsmallest(share, idle, key=lambda connection: connection.since):
            connection.transport.close()
        if not idle:
            self._loop.call_later(FRESH_S, self.resume)

    def _open(self, accepted: socket.socket) -> None:
        task = self._loop.create_task(self._adopt(accepted))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _adopt(self, accepted: socket.socket) -> None:
        timeout_s = self.settings.head_timeout_s if self._tls else None
        try:
            await self._loop.connect_accepted_socket(
                partial(Connection, self, accepted),
                accepted,
                ssl=self._tls() if self._tls else None,
                ssl_handshake_timeout=timeout_s,
            )
        except OSError as error:
            self.note(None, "a connection to %s failed: %s", self.url, error)
            accepted.close()
            self.resume()

    # -- the end ---------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Release the address."""
        self._socket.close()
        if self.address.path is not None:
            self.address.path.unlink(missing_ok=True)

    async def stop_accepting(self) -> None:
        """Close the listening socket, after taking every connection that is already complete."""
        if self._sweeper is None:
            self.abandon()
            return
        if not self._is_stopping:
            self._is_stopping = True
            self._pause()
            while True:
                try:
                    self._open(self._socket.accept()[0])
                except OSError:
                    break
            self.abandon()
        if self._opening:
            await asyncio.wait(self._opening, timeout=QUIET_S)

    @property
    def busy_count(self) -> int:
        """Connections with a request in progress."""
        return sum(connection.is_busy for connection in self.connections)

    def close_idle(self, quiet_s: float = QUIET_S) -> int:
        """Close the connections that are neither busy nor just used; return how many remain."""
        now = asyncio.get_running_loop().time()
        remain = 0
        for connection in tuple(self.connections):
            if connection.is_busy or now - connection.since < quiet_s:
                remain += 1
            else:
                connection.transport.close()
                remain += connection.transport.get_write_buffer_size() > 0
        return remain


def _descriptors() -> int:
    """Return how many descriptors clients may take; operators may change the limit meanwhile."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit - min(SPARE_DESCRIPTORS, limit // 4)


def bind(address: Address) -> tuple[socket.socket, Address]:
    """Return a socket that listens, and its address with the port that it got.

    One whose address is shared is only bound; it listens when its listener starts.

    Raises:
        StartError: the address cannot be bound; the message says why and what to do.
    """
    if address.path is not None:
        return _bind_unix(address.path), address
    host, port = address.host, address.port
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # every address that a kernel without IPv6 has
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCP_NODELAY reaches accepted connections only through a socket that names its protocol:
    # without it every keep-alive answer waits 40 ms for the client's delayed acknowledgement.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if address.is_shared:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listening.bind((host, port))
        if not address.is_shared:
            listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            owner = find_listener(port)
            by = f"pid {owner[0]} ({owner[1]})" if owner else "a process of another user"
            reason = (
                f"is in use by {by}: stop it, or choose another {address.option}; 0 is a free one"
            )
        elif error.errno == errno.EACCES:
            reason = "needs more rights: choose a port from 1024 up"
        else:
            reason = f"cannot be bound: {error.strerror}"
        raise StartError(f"port {port} on {host} {reason}") from error
    listening.setblocking(False)
    return listening, replace(address, port=listening.getsockname()[1])


def find_listener(port: int) -> tuple[int, str] | None:
    """Return pid and command of the process that listens on a TCP port, where we may see it."""
    for connection in psutil.net_connections("tcp"):
        is_it = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        if is_it and connection.pid is not None:
            with contextlib.suppress(psutil.Error):
                return connection.pid, " ".join(psutil.Process(connection.pid).cmdline())[:80]
    return None


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
