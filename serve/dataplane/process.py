"""A child process: started, watched, ended and described, in one place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from modelyard.base.exits import describe_exit
from modelyard.serve.walls.kernel import PR_SET_CHILD_SUBREAPER, prctl

_watched: set[int] = set()
"""Process ids that a `ChildProcess` waits for."""
_expected = 0
"""Children that somebody else forks for this process, and that it does not know yet."""
_adopts = False


class ChildProcess:
    """A child of this process, in a session of its own, which the running event loop watches.

    Args:
        pid: id of a child that nobody else waits for.
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
        # What it started and left behind; once it is reaped, its number may be another group's.
        self._kill_group()
        self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        _watched.discard(self.pid)
        end_orphans()
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
        niceness: niceness as a `ChildProcess` takes it.

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


class Orphans:
    """Ends what outlives the worker that started it, in whatever session it is.

    A worker inherits what its own children leave behind, and this process what workers do.

    Raises:
        OSError: the kernel has no such thing.
    """

    SWEEP_EVERY_S = 1.0
    """Time between two looks for orphans; at a worker's end they are looked for without waiting."""
    LAST_LOOKS = 100

    def __init__(self) -> None:
        global _adopts
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        _adopts = True
        self._sweep()

    def _sweep(self) -> None:
        end_orphans()
        self._timer = asyncio.get_running_loop().call_later(self.SWEEP_EVERY_S, self._sweep)

    async def stop(self) -> None:
        """Look for the last time, and for what those have started that are found."""
        self._timer.cancel()
        for _ in range(self.LAST_LOOKS):
            if not end_orphans():
                break
            await asyncio.sleep(0.01)


def end_orphans() -> int:
    """End and reap the children of this process that are nobody's, if it is one that has such.

    What is watched is somebody's, and what runs in this process's group. What those have started
    that are ended here is found by the next call.

    Returns:
        How many there were.
    """
    if _expected or not _adopts:
        return 0
    count = 0
    for pid in _children():
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if pid not in _watched and os.getpgid(pid) != os.getpgrp():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
                count += 1
    return count


def _children() -> list[int]:
    """Return the process ids of the children of this thread, to which all that is adopted comes."""
    try:
        return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]
    except FileNotFoundError:  # the kernel was built without
        return [child.pid for child in psutil.Process().children()]


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
