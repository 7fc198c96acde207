"""A child process: started, watched, ended and described, in one place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from modelyard.archiver.exits import describe_exit


class ChildProcess:
    """A process in a session of its own, which the running event loop watches.

    Args:
        command: the program and its arguments.
        environment: all of its variables.
        stdout, stderr: descriptors; the caller closes its own copies.
        pass_fds: further descriptors that the process keeps.
        niceness: 0 to 19, the higher the sooner other processes go first.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
        niceness: int = 0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        """Its exit code, negative for a signal, once it has been reaped."""
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        self.pid = self._process.pid
        try:
            if niceness:
                os.setpriority(os.PRIO_PROCESS, self.pid, niceness)
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    @property
    def how_it_ended(self) -> str:
        """Its exit code or signal, for people."""
        code = self._process.returncode
        return "no exit code" if code is None else describe_exit(code)

    def kill(self) -> None:
        """End the process and whatever it started, at once."""
        if self._process.returncode is None:
            self._kill_group()

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
        self._process.wait()
        self._kill_group()  # what it started and left behind
        self.ended.set_result(self._process.returncode)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


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
