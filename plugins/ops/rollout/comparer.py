"""Have answers compared in a process beside the server, where nobody waits for it.

A megabyte of JSON takes half a second of a core, which neither the loop nor a thread of the server
can spare, and numpy is not to be imported there. The process has a low priority, is started for the
first two answers that are not the same bytes, and ends with the server.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

from modelyard.base.threads import thread_environment
from modelyard.plugins.ops.rollout.answers import (
    MOST_BYTES,
    SAME,
    Answer,
    Comparison,
    NotCompared,
    Tolerance,
    Verdict,
    compare_statuses,
)
from modelyard.serve.dataplane.process import ChildProcess, spawn

logger = logging.getLogger(__name__)

MOST_WAITING_BYTES = 4 * MOST_BYTES
"""All answers that wait to be compared have at most so many."""
LONGEST_S = 30.0
"""A comparison may take; its process is ended then."""
NICENESS = 15
PROCESS = "modelyard.plugins.ops.rollout.compare"
"""The module that it runs."""
Done = Callable[[Comparison | NotCompared], None]


class Comparer:
    """Compares answers, in a process of its own. Lives on the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting = 0
        """Bytes of all answers that wait or are being compared."""
        self._turn = asyncio.Lock()
        self._process: ChildProcess | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def compare(self, live: Answer, candidate: Answer, tolerance: Tolerance, done: Done) -> None:
        """Compare two answers.

        Args:
            live: the live version's.
            candidate: the candidate's.
            tolerance: how far they may be apart.
            done: told what was found, at once or later, and once.
        """
        size = len(live.body) + len(candidate.body)
        if (failure := compare_statuses(live.status, candidate.status)) is not None:
            done(failure)
        elif size > 2 * MOST_BYTES:
            done(NotCompared("too large"))
        elif live.is_same(candidate):
            done(SAME)
        elif self._waiting + size > MOST_WAITING_BYTES:
            done(NotCompared("comparing is behind"))
        else:
            self._waiting += size
            running = self._compare(live, candidate, tolerance, done)
            task = asyncio.get_running_loop().create_task(running)
            self._tasks.add(task)
            task.add_done_callback(partial(self._end, size))

    def _end(self, size: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._waiting -= size

    async def stop(self) -> None:
        """End the process; what still waits is not compared, and nobody is told."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        process = self._process
        self._lose()
        if process is not None:
            await process.ended

    async def _compare(
        self, live: Answer, candidate: Answer, tolerance: Tolerance, done: Done
    ) -> None:
        sides = [(each.status, each.headers, len(each.body)) for each in (live, candidate)]
        head = orjson.dumps({"sides": sides, "tolerance": tolerance})
        async with self._turn:
            try:
                async with asyncio.timeout(LONGEST_S):
                    found = await self._ask(b"".join((head, b"\n", live.body, candidate.body)))
            except asyncio.CancelledError:  # the next answer would be this one's
                self._lose()
                raise
            except (OSError, EOFError, TimeoutError) as error:
                self._lose()
                reason = "slow" if isinstance(error, TimeoutError) else "failed"
                logger.warning("answers of %d and %d bytes are not compared: %s",
                               len(live.body), len(candidate.body), error or reason)  # fmt: skip
                done(NotCompared(f"comparing {reason}"))
            else:
                done(found)

    async def _ask(self, frame: bytes) -> Comparison | NotCompared:
        """Return the process's answer to a frame; it is started where it is not there.

        Raises:
            OSError, EOFError: it could not be started, or has died.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._start())
        reader, writer = self._streams
        writer.write(frame)
        await writer.drain()
        if not (line := await reader.readline()):
            raise EOFError("the process that compares has ended")
        said: dict[str, Any] = orjson.loads(line)
        if "reason" in said:
            return NotCompared(said["reason"])
        scaled = math.inf if said["scaled"] is None else said["scaled"]
        verdict, labels_agree, difference, _ = said.values()
        return Comparison(Verdict(verdict), labels_agree, difference, scaled)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = spawn(
                    [sys.executable, "-P", "-m", PROCESS, str(theirs.fileno())],
                    {**os.environ, **thread_environment(1)},
                    stdout=2,  # the server's own log
                    stderr=2,
                    pass_fds=[theirs.fileno()],
                    niceness=NICENESS,
                )
            except BaseException:
                ours.close()
                raise
        return ours

    def _lose(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
        if self._process is not None:
            self._process.kill()
            self._process = None
