"""Have answers compared in a process beside the server, where nobody waits for it.

A megabyte of JSON takes half a second of a core, which neither the loop nor a thread of the server
can spare, and numpy is not to be imported there. The process has a low priority, is started for the
first two answers that are not the same bytes, and ends with the server. What comes within some
milliseconds goes to it as one frame.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import orjson

from modelyard.base.threads import thread_environment
from modelyard.plugins.ops.rollout.answers import (
    MOST_BYTES,
    SAME,
    Comparison,
    NotCompared,
    Tolerance,
    Verdict,
    compare_statuses,
)
from modelyard.serve.dataplane.call import Reply, Stream
from modelyard.serve.dataplane.process import ChildProcess, spawn
from modelyard.serve.dataplane.wire import Payload

logger = logging.getLogger(__name__)

MOST_WAITING_BYTES = 4 * MOST_BYTES
"""All answers that wait to be compared have at most so many."""
LONGEST_S = 60.0
"""Time that a frame may take; its process is ended then."""
NICENESS = 15
GATHER_S = 0.02
"""Time in which pairs gather that are compared together."""
MOST_PAIRS = 64
LONGEST_LINE = MOST_PAIRS << 12
"""Longest line that says what was found: of each pair a few words."""
PROCESS = "modelyard.plugins.ops.rollout.compare"
"""The module that it runs."""
Done = Callable[[Comparison | NotCompared], None]


class Pair(NamedTuple):
    """Two answers that wait to be compared."""

    live: Reply
    candidate: Reply
    tolerance: Tolerance
    done: Done
    size: int


class Comparer:
    """Compares answers, in a process of its own. Lives on the event loop."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._pairs: list[Pair] = []
        self._waiting = 0
        """Bytes of all answers that wait or are being compared."""
        self._process: ChildProcess | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def compare(self, live: Reply, candidate: Reply, tolerance: Tolerance, done: Done) -> None:
        """Compare two answers.

        Args:
            live: the live version's.
            candidate: the candidate's.
            tolerance: how far they may be apart.
            done: told what was found, at once or later, and once.
        """
        if isinstance(live.body, Stream) or isinstance(candidate.body, Stream):
            done(NotCompared("stream"))
            return
        size = len(live.body) + len(candidate.body)
        if (failure := compare_statuses(live.status, candidate.status)) is not None:
            done(failure)
        elif live.headers == candidate.headers and live.body == candidate.body:
            done(SAME)
        elif size > 2 * MOST_BYTES:
            done(NotCompared("too large"))
        elif self._waiting + size > MOST_WAITING_BYTES:
            done(NotCompared("comparing is behind"))
        else:
            self._waiting += size
            self._pairs.append(Pair(live, candidate, tolerance, done, size))
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._work())

    async def stop(self) -> None:
        """End the process; what still waits is not compared, and nobody is told."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        process = self._process
        self._lose()
        if process is not None:
            await process.ended

    async def _work(self) -> None:
        """Compare what waits, many in a frame, until nothing does."""
        try:
            while self._pairs:
                await asyncio.sleep(GATHER_S)
                pairs, self._pairs = self._pairs[:MOST_PAIRS], self._pairs[MOST_PAIRS:]
                for pair, found in zip(pairs, await self._compare(pairs), strict=True):
                    self._waiting -= pair.size
                    asyncio.get_running_loop().call_soon(pair.done, found)
        finally:
            self._task = None

    async def _compare(self, pairs: Sequence[Pair]) -> list[Comparison | NotCompared]:
        try:
            async with asyncio.timeout(LONGEST_S):
                return await self._ask(_frame(pairs))
        except asyncio.CancelledError:  # the next answer would be this one's
            self._lose()
            raise
        except (OSError, EOFError, TimeoutError) as error:
            self._lose()
            reason = "slow" if isinstance(error, TimeoutError) else "failed"
            logger.warning("%d pairs of answers are not compared: %s", len(pairs), error or reason)
            return [NotCompared(f"comparing {reason}") for _ in pairs]

    async def _ask(self, frame: bytes) -> list[Comparison | NotCompared]:
        """Return the process's answer to a frame; it is started where it is not there.

        Raises:
            OSError, EOFError: it could not be started, or has died.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._start(), limit=LONGEST_LINE)
        reader, writer = self._streams
        writer.write(frame)
        await writer.drain()
        if not (line := await reader.readline()):
            raise EOFError("the process that compares has ended")
        return list(map(_read, orjson.loads(line)))

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


def _frame(pairs: Sequence[Pair]) -> bytes:
    """Return a line of JSON that says how long each part is, and the parts."""
    sides = [side for pair in pairs for side in (pair.live, pair.candidate)]
    head = {
        "tolerances": [pair.tolerance for pair in pairs],
        "sides": [
            (side.status, len(side.headers), len(cast("Payload", side.body))) for side in sides
        ],
    }
    parts = [part for side in sides for part in (side.headers, cast("Payload", side.body))]
    return b"".join((orjson.dumps(head), b"\n", *parts))


def _read(found: dict[str, Any]) -> Comparison | NotCompared:
    if "reason" in found:
        return NotCompared(found["reason"])
    scaled = math.inf if found["scaled"] is None else found["scaled"]
    return Comparison(Verdict(found["verdict"]), found["labels_agree"], found["difference"], scaled)
