"""One address served by several processes: they speak HTTP, this process answers.

The server process accepts connections and hands them out in turn (`socket.send_fds`), so each
frontend has as many as the others. What their clients ask comes over the links and goes through the
same ASGI application as without frontends: there is one queue, one registry and one set of metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, replace
from itertools import chain
from typing import Any
from urllib.parse import unquote

from modelyard.serve.address import Address
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.link import (
    LEFT,
    PAUSE,
    REFUSED,
    RESUME,
    STOP,
    TOO_LARGE,
    WHOLE,
    Link,
)
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.errors import BodyTooLarge, StartError
from modelyard.serve.http.answers import Answer
from modelyard.serve.http.connection import ANSWER, SPELLING, Application, Limits, Scope
from modelyard.serve.http.listener import QUIET_S, bind

logger = logging.getLogger(__name__)

STARTUP_TIMEOUT_S = 60.0
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 30.0
EXIT_GRACE_S = 3.0
"""From the closed link to SIGKILL; a frontend itself takes less for its last answers."""
RETRY_S = 0.01
"""After which a connection that no frontend could take is offered again."""
ASGI = {"version": "3.0", "spec_version": "2.3"}


class Exchange:
    """One request of a frontend's client on its way through the application."""

    __slots__ = (
        "_body",
        "_changed",
        "_head",
        "_id",
        "_is_begun",
        "_is_over",
        "_is_paused",
        "_limit",
        "_link",
        "received",
        "scope",
        "task",
    )

    def __init__(
        self, link: Frontend, id: int, scope: Scope, body: bytes | None, limit: int
    ) -> None:
        self._link = link
        self.scope = scope
        self.received = len(body or b"")
        self._id = id
        self._body = body
        self._limit = limit
        self._head: tuple[int, bytes] | None = None
        self._is_begun = False
        self._is_over = False
        """Answered, or left by its client."""
        self._is_paused = False
        self._changed: asyncio.Event | None = None
        self.task: asyncio.Task[None] | None = None

    def change(self, flags: int) -> None:
        """Take what the frontend says about the client."""
        if flags & LEFT:
            self._is_over = True
        else:
            self._is_paused = bool(flags & PAUSE)
        if self._changed is not None:
            self._changed.set()

    async def _wait(self) -> None:
        """Wait until the client has left, paused or resumed."""
        if self._changed is None:
            self._changed = asyncio.Event()
        self._changed.clear()
        await self._changed.wait()

    def begin(self, app: Application) -> None:
        """Have the application answer."""
        if self._limit or not app.take(self):
            self.scope["extensions"][ANSWER] = self.send_at_once
            self.run(app(self.scope, self.receive, self.send))

    def run(self, answering: Awaitable[None]) -> None:
        """Have a task answer; close the connection of a client whose answer it breaks."""
        self.task = self._link.loop.create_task(self._run(answering))

    async def _run(self, answering: Awaitable[None]) -> None:
        try:
            await answering
        except Exception as error:
            logger.exception("%s %s failed", self.scope["method"], self.scope["path"])
            if self._head is None and not self._is_begun:
                status, fields, body = self._link.refuse(error)
                fields = [
                    *fields,
                    (b"content-length", b"%d" % len(body)),
                    (b"connection", b"close"),
                ]
                self._head = status, wire.pack_meta(chain(*fields))
                await self.send({"type": "http.response.body", "body": body})
        finally:
            self.scope.pop("extensions", None)  # they hold this object: no work for the collector
            self._link.exchanges.pop(self._id, None)
        if not self._is_over:
            status, headers = self._head or (0, b"")
            self._link.add(self._id, status, wire.BROKEN, headers, (b"",))

    async def receive(self) -> dict[str, Any]:
        """Return the whole body, and after it only that the client has left.

        Raises:
            BodyTooLarge: the frontend has not sent it.
        """
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._limit:
            limit, self._limit = self._limit, 0
            raise BodyTooLarge(limit)
        while not self._is_over:
            await self._wait()
        return {"type": "http.disconnect"}

    def take_body(self) -> list[bytes]:
        """Return the whole body; `receive` has none of it then."""
        body, self._body = self._body, None
        return [body or b""]

    def is_left(self) -> bool:
        """Return whether nobody waits for the answer any more."""
        return self._is_over

    def send_at_once(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> bool:
        """Send a whole answer; see `connection.ANSWER`."""
        self._link.exchanges.pop(self._id, None)
        if not self._is_over:
            self._is_over = True
            self._link.add(self._id, status, WHOLE, wire.pack_meta(chain(*headers)), (body,))
        return True

    async def send(self, message: Any) -> None:
        """Send what ASGI's messages say; the head goes with the first part of the body."""
        if message["type"] == "http.response.start":
            self._head = message["status"], wire.pack_meta(chain(*message.get("headers", ())))
            return
        if self._is_over:
            return
        status, headers = self._head or (0, b"")
        self._head, self._is_begun = None, True
        self._limit = 0  # who goes on reading now only waits for the client
        has_more = message.get("more_body", False)
        flags = wire.MORE if has_more else 0
        self._link.add(self._id, status, flags, headers, (message.get("body", b""),))
        self._is_over = not has_more
        if has_more:
            await self._link.has_room.wait()
            while self._is_paused and not self._is_over:
                await self._wait()


class Frontend(Link):
    """One frontend process and the server's end of its link."""

    def __init__(self, owner: Frontends) -> None:
        super().__init__()
        self._owner = owner
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._handed: socket.socket | None = None
        self.exchanges: dict[int, Exchange] = {}
        self.is_ready = False
        self.ready: asyncio.Future[None] = self.loop.create_future()
        self.ended: asyncio.Future[None] = self.loop.create_future()

    async def start(self) -> None:
        """Start the process and wait until it takes connections.

        Raises:
            StartError: it does not.
        """
        try:
            link = self._spawn()
        except OSError as error:
            self.ended.set_result(None)
            raise StartError(f"no frontend process can be started: {error.strerror}") from error
        await self.loop.connect_accepted_socket(lambda: self, link)
        self.control(wire.LOAD, self._owner.load)
        await asyncio.wait(
            [self.ready, self.ended],
            timeout=STARTUP_TIMEOUT_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not self.is_ready:
            self.kill()
            raise StartError(
                f"a frontend process is not ready after {STARTUP_TIMEOUT_S:g} s"
                if self._process is None or self._process.returncode is None
                else f"a frontend process {self.how_it_ended} before it was ready; see the log"
            )

    def _spawn(self) -> socket.socket:
        """Start the process, watch for its end, and return our end of the link."""
        link, their_link = socket.socketpair()
        self._handed, their_handed = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._handed.setblocking(False)
        with their_link, their_handed:
            descriptors = their_link.fileno(), their_handed.fileno()
            try:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "modelyard.serve.dataplane.frontend",
                        *map(str, descriptors),
                    ],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
                self._pidfd = os.pidfd_open(self._process.pid)
            except OSError:
                link.close()
                self._handed.close()
                if self._process is not None:
                    self._process.kill()
                    self._process.wait()
                raise
        self.loop.add_reader(self._pidfd, self._exited)
        return link

    @property
    def pid(self) -> int:
        """Process id; -1 before the start."""
        return self._process.pid if self._process else -1

    @property
    def how_it_ended(self) -> str:
        """For the log."""
        code = self._process.returncode if self._process else None
        if code is None:
            return "could not be started"
        return f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _exited(self) -> None:
        """The process has ended: reap it. Its connections are gone, so nobody waits any more."""
        assert self._process is not None and self._handed is not None
        self.is_ready = False
        self.loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._handed.close()
        if self.transport is not None:
            self.transport.abort()
        self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """Drop what its clients wait for, and end the process if it does not end by itself."""
        super().connection_lost(error)
        self.is_ready = False
        for exchange in self.exchanges.values():
            exchange.change(LEFT)
        self.loop.call_later(EXIT_GRACE_S, self.kill)

    def refuse(self, error: Exception) -> Answer:
        """Return the answer to a request whose answer failed."""
        return self._owner.app.refuse(error)

    def hand_over(self, connection: socket.socket) -> bool:
        """Pass an accepted connection on; tell whether that was possible."""
        assert self._handed is not None
        try:
            socket.send_fds(self._handed, [b"c"], [connection.fileno()])
        except OSError:  # its queue is full, or it has just died
            return False
        return True

    def data_received(self, data: bytes) -> None:
        """Take requests; a frontend that talks nonsense is replaced."""
        try:
            super().data_received(data)
        except wire.WireError as error:
            logger.error("frontend %d: %s; ending it", self.pid, error)
            self.kill()

    def take_item(self, item: wire.Item) -> None:
        """Run a request, or take what is said of one that runs."""
        id, code, flags, meta, body = item
        if id == 0:
            if code == wire.READY and not self.is_ready:
                self.is_ready = True
                self.ready.set_result(None)
            elif code == REFUSED:
                self._owner.count_refusal(wire.decode_control(item)["status"])
        elif flags & (LEFT | PAUSE | RESUME):
            if (exchange := self.exchanges.get(id)) is not None:  # else it is answered already
                exchange.change(flags)
        else:
            limit = self._owner.max_request_bytes if flags & TOO_LARGE else 0
            scope = self._owner.scope(meta)
            exchange = Exchange(self, id, scope, None if limit else body, limit)
            self.exchanges[id] = exchange
            exchange.begin(self._owner.app)


class Frontends:
    """The processes of one address, in the place of a `Listener`.

    Args:
        app: the ASGI application that answers.
        address: where to listen.
        count: how many processes.
        limits: of all connections.
        max_request_bytes: a larger body is not read.
        metrics: of the server.

    Raises:
        StartError: the address cannot be bound; the message says why and what to do.
    """

    def __init__(
        self,
        app: Application,
        address: Address,
        count: int,
        limits: Limits,
        max_request_bytes: int,
        metrics: Metrics,
    ) -> None:
        self._socket, self.address = bind(address)
        self.app = app
        self.max_request_bytes = max_request_bytes
        self._count = count
        self._metrics = metrics
        share = replace(limits, connections=math.ceil(limits.connections / count))
        self.load = {
            "address": (self.address.host, self.address.port),
            "limits": asdict(share),
            "max_request_bytes": max_request_bytes,
        }
        """What each process is told first."""
        self._frontends: list[Frontend] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._turn = 0
        self._held: socket.socket | None = None
        """Accepted, and not taken by any frontend yet."""
        self._is_accepting = self._is_stopping = False
        self.on_change: Callable[[], None] = lambda: None
        """Called when a process has been replaced."""

    @property
    def url(self) -> str:
        """The address as a client writes it."""
        return str(self.address)

    @property
    def pids(self) -> list[int]:
        """Of the processes that take connections."""
        return [frontend.pid for frontend in self._frontends if frontend.is_ready]

    def scope(self, meta: bytes) -> Scope:
        """Return a request's ASGI scope; `frontend.pack_request` packed its head."""
        method, raw_path, query, version, host, port, *pairs = meta.split(b"\0")
        path = raw_path.decode("ascii")
        names, values = pairs[::2], pairs[1::2]
        return {
            "type": "http",
            "asgi": ASGI,
            "http_version": version.decode(),
            "server": (self.address.host, self.address.port),
            "client": (host.decode(), int(port)),
            "scheme": "http",
            "root_path": "",
            "headers": [(n.lower(), v) for n, v in zip(names, values, strict=True)],
            "state": {},
            "method": method.decode(),
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "extensions": {SPELLING: names},
        }

    def count_refusal(self, status: int) -> None:
        """Count what a frontend has refused by itself."""
        self._metrics.unrouted.labels(str(status)).inc()

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the processes, and begin to accept when all of them are ready.

        Raises:
            StartError: one of them cannot be started.
        """
        loop = asyncio.get_running_loop()
        self._frontends = [Frontend(self) for _ in range(self._count)]
        await asyncio.gather(*(frontend.start() for frontend in self._frontends))
        self._keepers = [loop.create_task(self._keep(place)) for place in range(self._count)]
        self._begin()

    async def _keep(self, place: int) -> None:
        """Replace the process in this place whenever it ends."""
        backoff_s = 0.0
        while True:
            await asyncio.shield(self._frontends[place].ended)
            if self._is_stopping:
                return
            ended = self._frontends[place]
            logger.error("frontend %d %s; replacing it", ended.pid, ended.how_it_ended)
            self._metrics.frontend_restarts.inc()
            await asyncio.sleep(backoff_s)
            if self._is_stopping:
                return
            frontend = self._frontends[place] = Frontend(self)
            try:
                await frontend.start()
            except StartError as error:
                logger.error("%s", error)
                backoff_s = min(max(FIRST_BACKOFF_S, 2 * backoff_s), LONGEST_BACKOFF_S)
            else:
                backoff_s = 0.0
                self.on_change()

    async def stop_accepting(self) -> None:
        """Close the listening socket, after handing over every connection that is complete."""
        if self._is_stopping:
            return
        while self._is_accepting and not self._accept() and self.pids:
            await asyncio.sleep(RETRY_S)
        self._is_stopping = True
        self.abandon()
        for frontend in self._frontends:
            frontend.control(STOP, {})

    def abandon(self) -> None:
        """Release the address."""
        if self._is_accepting:
            asyncio.get_running_loop().remove_reader(self._socket)
        self._is_accepting = False
        self._socket.close()
        if self._held is not None:
            self._held.close()

    @property
    def busy_count(self) -> int:
        """Requests in progress."""
        return sum(len(frontend.exchanges) for frontend in self._frontends)

    def close_idle(self, quiet_s: float = QUIET_S) -> int:
        """Return how many processes still have connections.

        They close idle ones by themselves; `quiet_s` of 0 ends them after what they have to send.
        """
        if not quiet_s:
            for frontend in self._frontends:
                frontend.close()
        return sum(not frontend.ended.done() for frontend in self._frontends)

    async def ended(self) -> None:
        """Wait until all processes have ended, after `close_idle(0)`; kill those that do not."""
        for frontend in self._frontends:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(frontend.ended), EXIT_GRACE_S)
            frontend.kill()
            await frontend.ended

    # -- connections ---------------------------------------------------------------------------

    def _begin(self) -> None:
        """Accept as soon as there is something to accept."""
        if not self._is_stopping:
            self._is_accepting = True
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> bool:
        """Hand over what the kernel holds; return False when no frontend takes more just now."""
        while True:
            try:
                connection = self._held or self._socket.accept()[0]
            except (BlockingIOError, ConnectionAbortedError):
                return True
            except OSError as error:
                logger.error("cannot accept a connection: %s", error.strerror)
                break
            if not self._hand_over(connection):
                self._held = connection
                break
            self._held = None
            connection.close()
        # What is left waits in the kernel.
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.call_later(RETRY_S, self._begin)
        return False

    def _hand_over(self, connection: socket.socket) -> bool:
        """Pass a connection to the frontend whose turn it is, or to the next one that takes it."""
        ready = [frontend for frontend in self._frontends if frontend.is_ready]
        for _ in ready:
            self._turn += 1
            if ready[self._turn % len(ready)].hand_over(connection):
                return True
        return False
