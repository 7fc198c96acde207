"""Child processes: started, watched, ended and described, in one place; what forks some of them.

To import torch takes a worker two seconds of a core and 150 MB. A fork of a process that has done
it, the fork server, takes milliseconds, and shares the memory. What is forked becomes this
process's own child, so that it is watched, and ends, as any other: the fork server may die without
a worker noticing.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from modelyard.base.exits import describe_exit
from modelyard.serve.dataplane import wire
from modelyard.serve.walls.kernel import PR_SET_CHILD_SUBREAPER, children, prctl

logger = logging.getLogger(__name__)

_watched: set[int] = set()
"""Process ids that a `ChildProcess` waits for."""
_expected = 0
"""Children that somebody else forks for this process, and that it does not know yet."""


class ChildProcess:
    """A child of this process, in a session of its own, which the running event loop watches.

    Args:
        pid: id of a child that nobody else waits for.
        niceness: 0 to 19, the higher the sooner other processes go first; at least this process's.
        end: signal that ends it and whatever it started; with another than SIGKILL it does that.

    Raises:
        OSError: it cannot be watched, and was ended.
    """

    def __init__(self, pid: int, niceness: int = 0, end: int = signal.SIGKILL) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        """Its exit code, negative for a signal, once it has been reaped."""
        self.pid = pid
        self._end = end
        self.exit_code: int | None = None
        """The exit code, negative for a signal; None while it runs."""
        try:
            if niceness:
                os.setpriority(os.PRIO_PROCESS, pid, max(niceness, os.nice(0)))
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        _watched.add(pid)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def how_it_ended(self) -> str:
        """How it ended, for people."""
        how = "" if self.exit_code is None else f" with {describe_exit(self.exit_code)}"
        return f"ended{how}".replace("with signal", "by")

    def kill(self) -> None:
        """End the process and whatever it started, at once."""
        if self.exit_code is None:
            if self._end == signal.SIGKILL:
                self._kill_group()
            os.kill(self.pid, self._end)  # one that was just forked leads no group yet

    async def end(self, grace_s: float) -> None:
        """Wait until the process has ended by itself; kill it when the time is over."""
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.shield(self.ended)
        except TimeoutError:
            self.kill()
            await self.ended

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # What it started and left behind; once it is reaped, its number may be another group's.
        self._kill_group()
        self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        _watched.discard(self.pid)
        self.ended.set_result(self.exit_code)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: int,
    stderr: int,
    pass_fds: Sequence[int] = (),
    niceness: int = 0,
    end: int = signal.SIGKILL,
) -> ChildProcess:
    """Start a program as a child of this process.

    Args:
        command: the program and its arguments.
        environment: all of its variables.
        stdout, stderr: descriptors; the caller closes its own copies.
        pass_fds: further descriptors that the process keeps.
        niceness, end: niceness and end as a `ChildProcess` takes them.

    Raises:
        OSError: it cannot be started.
    """
    started = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        start_new_session=True,
    )
    started.returncode = 0  # it is not for this object to wait for the process
    return ChildProcess(started.pid, niceness, end)


SWEEP_EVERY_S = 1.0
"""Time between two looks for orphans."""
ROUND_S = 0.001
"""The same while there are some."""
LAST_LOOKS = 1000


async def adopt_orphans() -> None:
    """End what outlives all that should have ended it, until this is cancelled, which looks again.

    A worker's reaper may have been killed: this process inherits what that one had below it.

    Raises:
        OSError: the kernel has no such thing.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        while True:
            await asyncio.sleep(ROUND_S if end_orphans() else SWEEP_EVERY_S)
    finally:
        for _ in range(LAST_LOOKS):
            if not end_orphans():
                break
            time.sleep(ROUND_S)


def end_orphans() -> int:
    """End and reap the children of this process that are nobody's, if it is one that has such.

    What is watched is somebody's, and what runs in this process's group. What those have started
    that are ended here is found by the next call.

    Returns:
        How many there were.
    """
    if _expected:
        return 0
    count = 0
    for pid in children():
        with contextlib.suppress(ProcessLookupError, ChildProcessError, PermissionError):
            if pid not in _watched and os.getpgid(pid) != os.getpgrp():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
                count += 1
    return count


def expect(count: int) -> None:
    """Leave unknown children alone while others fork some for this process.

    Args:
        count: number of those to come, negative once they are known, or will not come.
    """
    global _expected
    _expected += count


class Backoff:
    """Ever longer pauses between attempts, from 50 ms to 30 s."""

    FIRST_S = 0.05
    LONGEST_S = 30.0

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew, after an attempt that was worth something."""
        self.pause_s = self.FIRST_S

    def grow(self, longest_s: float = LONGEST_S) -> None:
        """Make the next pause twice as long, up to a length."""
        self.pause_s = min(2 * self.pause_s, longest_s)


# -- the fork server ---------------------------------------------------------------------------


REPLY_S = 120.0
"""Time for the imports and the fork; one that takes longer is replaced."""
EXIT_GRACE_S = 2.0
MAX_REPLY_BYTES = 1 << 16


@dataclass(frozen=True)
class Preload:
    """What the fork server imports before it forks the workers of an archive."""

    modules: tuple[str, ...]
    """Keys of the worker's `forks.MODULES`."""
    own: tuple[str, ...]
    """Modules and packages of the archive, none of which may be imported from elsewhere before."""
    later: tuple[str, ...] = ()
    """Keys of what it imports once nobody waits for a worker: what those that explain will need."""

    @property
    def whole(self) -> "Preload":
        """What is imported before workers are forked that explain, too."""
        return Preload((*self.modules, *self.later), self.own)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a worker's process is started."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """All of its variables."""
    niceness: int = 0
    """0 to 19, the higher the sooner others go first."""
    fork_server: "ForkServer | None" = None
    """What forks it, where there is one."""
    preload: Preload | None = None
    """What is imported before; None starts it afresh."""


class ForkServer:
    """A fork server, started when the first worker asks for it, and again when it has died.

    Args:
        environment: its variables; a worker is given all of its own.
        temporary: folder for temporary files, there while it runs; torch makes one when it is
            imported.
    """

    def __init__(self, environment: Mapping[str, str], temporary: Path) -> None:
        self._environment = {**environment, "TMPDIR": str(temporary)}
        self._temporary = temporary
        self._process: ChildProcess | None = None
        self._control: socket.socket | None = None
        self._waiting: deque[tuple[asyncio.Future[ChildProcess | None], int]] = deque()
        """Who waits for a reply, in the order of the requests, and the niceness asked for."""
        self._backoff = Backoff()
        self._not_before = 0.0

    async def fork(self, launch: Launch, descriptors: Sequence[int]) -> ChildProcess | None:
        """Return a new worker, or None where one must be started in another way.

        Args:
            launch: with what is imported before.
            descriptors: its socket, standard output and standard error.
        """
        assert launch.preload is not None
        request = {**asdict(launch.preload), "environment": launch.environment}
        reply: asyncio.Future[ChildProcess | None] = asyncio.get_running_loop().create_future()
        try:
            control = self._control or self._start()
            _send(control, request, descriptors)
        except OSError as error:
            logger.info("a worker is started afresh: %s", error)
            return None
        self._waiting.append((reply, launch.niceness))
        expect(1)
        try:
            async with asyncio.timeout(REPLY_S):
                return await reply
        except TimeoutError:
            if self._control is control:  # else it is gone already
                self._lose(f"no answer for {REPLY_S:g} s")
            return None

    def prepare(self, modules: tuple[str, ...]) -> None:
        """Have it import ahead what workers to come will need; nobody waits."""
        with contextlib.suppress(OSError):  # the next request finds out, and says so
            _send(self._control or self._start(), asdict(Preload((), (), modules)), ())

    async def stop(self) -> None:
        """End it; the workers that it has forked go on."""
        process = self._process
        if self._control is not None:
            self._lose(None)
        if process is not None:
            await process.end(EXIT_GRACE_S)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _start(self) -> socket.socket:
        """Start it and return our end of its socket.

        Raises:
            OSError: it cannot be started, or has died a moment ago.
        """
        loop = asyncio.get_running_loop()
        if loop.time() < self._not_before:
            raise OSError("there is no fork server, or not again yet")
        self._temporary.mkdir(exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = spawn(
                    [*worker_command(), "--fork-server", str(theirs.fileno())],
                    self._environment,
                    stdout=2,  # the server's own log
                    stderr=2,
                    pass_fds=[theirs.fileno()],
                )  # fmt: skip
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        loop.add_reader(ours, self._read)
        self._control = ours
        return ours

    def _read(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(MAX_REPLY_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose("it has ended")
            return
        self._backoff.reset()
        message: dict[str, Any] = json.loads(data)
        reply, niceness = self._waiting.popleft()
        expect(-1)
        process = None
        if (pid := message.get("pid")) is None:
            logger.info("a worker is started afresh: %s", message["refused"])
        else:
            try:
                process = ChildProcess(pid, niceness, wire.END)
            except OSError as error:
                logger.warning("a forked worker cannot be watched: %s", error)
        if not reply.done():
            reply.set_result(process)
        elif process is not None:
            process.kill()  # whoever asked has left
        if message.get("is_final"):
            self._not_before = math.inf
            self._lose(None)
            logger.warning("every worker is started afresh: %s", message["refused"])

    def _lose(self, reason: str | None) -> None:
        """Close the connection and kill the process; None if that is not for a fault of its own."""
        assert self._control is not None and self._process is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._control)
        self._control.close()
        self._control = None
        if reason is not None:
            logger.warning("fork server, pid %d: %s; workers are started afresh for %g s",
                           self._process.pid, reason, self._backoff.pause_s)  # fmt: skip
            self._process.kill()
            self._not_before = loop.time() + self._backoff.pause_s
            self._backoff.grow()
        while self._waiting:
            reply, _ = self._waiting.popleft()
            expect(-1)
            if not reply.done():
                reply.set_result(None)


async def start_process(launch: Launch, descriptors: tuple[int, int, int]) -> ChildProcess:
    """Return a new worker process, forked where that can be.

    Args:
        launch: how it is started.
        descriptors: its socket, standard output and standard error.

    Raises:
        OSError: it cannot be started.
    """
    if launch.fork_server is not None and launch.preload is not None:
        forked = await launch.fork_server.fork(launch, descriptors)
        if forked is not None:
            return forked
    connection, stdout, stderr = descriptors
    return spawn(
        [*worker_command(), str(connection)],
        launch.environment,
        stdout=stdout,
        stderr=stderr,
        pass_fds=[connection],
        niceness=launch.niceness,
        end=wire.END,
    )


def worker_command() -> list[str]:
    """Return what starts our worker module, as a child of this process and of no other."""
    return [sys.executable, "-P", "-m", "modelyard.serve.worker", "--parent", str(os.getpid())]


def _send(control: socket.socket, request: Any, descriptors: Sequence[int]) -> None:
    """Send a request, of any size, in a file that is passed with the other descriptors."""
    file = os.memfd_create("request", os.MFD_CLOEXEC)
    try:
        with os.fdopen(file, "wb", closefd=False) as content:
            content.write(json.dumps(request).encode())
        os.lseek(file, 0, os.SEEK_SET)
        socket.send_fds(control, [b"f"], [file, *descriptors])
    finally:
        os.close(file)
