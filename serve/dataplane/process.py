"""A child process: started, watched, ended and described, in one place."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from modelyard.archiver.exits import describe_exit

_PR_SET_CHILD_SUBREAPER = 36
_watched: set[int] = set()
"""Process ids that a `ChildProcess` waits for."""


class ChildProcess:
    """A child of this process, in a session of its own, which the running event loop watches.

    Args:
        pid: of a child that nobody else waits for.
        niceness: 0 to 19, the higher the sooner other processes go first.

    Raises:
        OSError: it cannot be watched, and was ended.
    """

    def __init__(self, pid: int, niceness: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        """Its exit code, negative for a signal, once it has been reaped."""
        self.pid = pid
        self.exit_code: int | None = None
        """The exit code, negative for a signal; None while it runs."""
        try:
            if niceness:
                os.setpriority(os.PRIO_PROCESS, pid, niceness)
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        _watched.add(pid)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def how_it_ended(self) -> str:
        """Its exit code or signal, for people."""
        return "no exit code" if self.exit_code is None else describe_exit(self.exit_code)

    def kill(self) -> None:
        """End the process and whatever it started, at once."""
        if self.exit_code is None:
            self._kill_group()
            os.kill(self.pid, signal.SIGKILL)  # one that was just forked leads no group yet

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
        self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        _watched.discard(self.pid)
        self._kill_group()  # what it started and left behind
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
) -> ChildProcess:
    """Start a program as a child of this process.

    Args:
        command: the program and its arguments.
        environment: all of its variables.
        stdout, stderr: descriptors; the caller closes its own copies.
        pass_fds: further descriptors that the process keeps.
        niceness: as a `ChildProcess` takes it.

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
    return ChildProcess(started.pid, niceness)


def adopt_orphans() -> None:
    """Become the parent of all processes below this one whose own parent ends.

    Whoever does that must call `reap_orphans` when a child has ended.

    Raises:
        OSError: the kernel has no such thing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def reap_orphans() -> None:
    """Reap what has ended and is nobody's: neither watched nor started in this process's group.

    Where the first child that has ended is somebody's, what ended after it waits for the next call.
    """
    with contextlib.suppress(ChildProcessError, ProcessLookupError):  # no children; no such child
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            pid = ended.si_pid
            if pid in _watched or os.getpgid(pid) == os.getpgrp():
                return
            os.waitpid(pid, os.WNOHANG)


class Backoff:
    """Ever longer pauses between attempts, from 50 ms to 30 s."""

    FIRST_S = 0.05
    LONGEST_S = 30.0

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew, after an attempt that was worth something."""
        self.pause_s = self.FIRST_S

    def grow(self) -> None:
        """Make the next pause twice as long."""
        self.pause_s = min(2 * self.pause_s, self.LONGEST_S)
