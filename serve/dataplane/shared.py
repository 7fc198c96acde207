"""Processes that workers of several model versions share, as the server sees them.

Each version has its own connection to such a process, and with it its own queue, deadlines, limits
and metrics: its `Worker` is as any other. What they share is the process: its memory, its time, one
batch after the other, and its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modelyard.archiver.exits import describe_exit
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.fork_server import ForkServer, Preload, start_process
from modelyard.serve.dataplane.process import ChildProcess

if TYPE_CHECKING:
    from modelyard.serve.dataplane.worker import Output

logger = logging.getLogger(__name__)

PRELOAD = Preload(("torch",), ())
"""Their artifacts are ONNX, and mostly others explain; a twin's libraries are imported with it."""
EXIT_GRACE_S = 2.0
"""From the last guest's leaving to SIGKILL."""


class Guest:
    """What one worker has of a shared process, in place of a `ChildProcess` of its own."""

    def __init__(self, host: SharedProcess) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The exit code of the process, or 0 once the guest has left."""
        self.exit_code: int | None = None
        self._host = host

    @property
    def pid(self) -> int:
        """Process id of the shared process."""
        return self._host.process.pid

    @property
    def how_it_ended(self) -> str:
        """The process's exit code or signal, for people."""
        return "no exit code" if self.exit_code is None else describe_exit(self.exit_code)

    def kill(self) -> None:
        """End the process, which hangs, and with it the others' work."""
        self._host.process.kill()

    def drop(self) -> None:
        """Leave; the process goes on, and answers nobody here any more."""
        self.end_with(0)

    async def end(self, grace_s: float) -> None:
        """Leave: the connection is closed, and the process drops what it has of it."""
        self.drop()

    def end_with(self, exit_code: int) -> None:
        """Take note of the end."""
        if self.exit_code is None:
            self.exit_code = exit_code
            self.ended.set_result(exit_code)
            self._host.left(self)


class SharedProcess:
    """One process and its guests; it ends after the last of them.

    Args:
        control: our end of its socket, over which it is handed the guests' connections.
    """

    def __init__(self, process: ChildProcess, control: socket.socket, output: Output) -> None:
        self.process = process
        self.output = output
        self._control = control
        self._guests: set[Guest] = set()
        self._ending: asyncio.Task[None] | None = None
        process.ended.add_done_callback(self._ended)

    @property
    def is_open(self) -> bool:
        """Whether it takes guests."""
        return self.process.exit_code is None and self._ending is None

    def admit(self, connection: int) -> Guest:
        """Hand the process one end of a worker's connection.

        Raises:
            OSError: it takes none any more, or is busy with many others.
        """
        socket.send_fds(self._control, [b"g"], [connection])
        guest = Guest(self)
        self._guests.add(guest)
        return guest

    def left(self, guest: Guest) -> None:
        """Take note that a guest has left."""
        self._guests.discard(guest)
        if not self._guests:
            self.end()

    def end(self) -> None:
        """Close its socket, at which it ends."""
        if self._ending is None:
            self._control.close()
            ending = self.process.end(EXIT_GRACE_S)
            self._ending = asyncio.get_running_loop().create_task(ending)

    async def wait(self) -> None:
        """Wait for its end."""
        if self._ending is not None:
            await self._ending

    def _ended(self, ended: asyncio.Future[int]) -> None:
        self.output.finish()
        for guest in tuple(self._guests):
            guest.end_with(ended.result())
        self._control.close()


@dataclass
class SharedWorkers:
    """The shared processes of one server.

    Args:
        fork_server: what forks them, where there is one.
        prepare: returns the variables of a process with so many threads, and what it is told first.
    """

    fork_server: ForkServer | None
    prepare: Callable[[int], tuple[dict[str, str], dict[str, Any]]]
    _hosts: dict[tuple[int, int], SharedProcess] = field(default_factory=dict)
    _locks: dict[tuple[int, int], asyncio.Lock] = field(default_factory=dict)

    async def join(
        self, threads: int, number: int, connection: int, open_output: Callable[[str], Output]
    ) -> tuple[Guest, Output]:
        """Return a worker's part of the process for its number of threads and its own number.

        Args:
            threads: of the worker.
            number: from 1 up within its version.
            connection: its end of the socket.
            open_output: returns where a process of this name writes.

        Raises:
            OSError: there can be none.
        """
        key = threads, number
        async with self._locks.setdefault(key, asyncio.Lock()):
            host = self._hosts.get(key)
            if host is not None and host.is_open:
                with contextlib.suppress(BrokenPipeError, ConnectionError):  # it is just ending
                    return host.admit(connection), host.output
            name = f"shared-{number}" if threads == 1 else f"shared-{number}-threads-{threads}"
            host = self._hosts[key] = await self._start(threads, open_output(name))
            logger.info("%s, pid %d, is shared by workers", name, host.process.pid)
            return host.admit(connection), host.output

    async def _start(self, threads: int, output: Output) -> SharedProcess:
        environment, message = self.prepare(threads)
        # Whole messages: what comes with descriptors is not read with what came before.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            undo.callback(output.finish)
            descriptors = theirs.fileno(), output.stdout, output.stderr
            try:
                process = await start_process(self.fork_server, PRELOAD, environment, descriptors)
            finally:
                output.close()
            undo.pop_all()
        ours.setblocking(False)
        ours.send(wire.encode_control(wire.SHARE, message))
        return SharedProcess(process, ours, output)

    async def stop(self) -> None:
        """End all of them."""
        for host in self._hosts.values():
            host.end()
        await asyncio.gather(*(host.wait() for host in self._hosts.values()))
