"""Compare answers where nobody waits for it: large ones in a process beside the server.

A classifier's answer is compared in a tenth of a millisecond, on the event loop. A megabyte of JSON
takes half a second of a core, which neither the loop nor a thread of this process can spare. The
process has a low priority, is started for the first answer that needs it, and ends with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import orjson

from modelyard.plugins.ops.rollout.compare import (
    MOST_BYTES,
    Answer,
    Comparison,
    NotCompared,
    Tolerance,
    Verdict,
    compare,
)
from modelyard.serve.dataplane.process import ChildProcess, spawn

logger = logging.getLogger(__name__)

SMALL_BYTES = 4 << 10
"""Of both answers, up to which they are compared on the event loop: half a millisecond at most."""
MOST_WAITING_BYTES = 4 * MOST_BYTES
"""Of all answers that wait to be compared."""
LONGEST_S = 30.0
"""A comparison may take; its process is ended then."""
NICENESS = 15
_MOST_MEMORY = 2 << 30
_LENGTHS = struct.Struct("<III")
"""Of the head and of both bodies."""
Done = Callable[[Comparison | NotCompared], None]


class Comparer:
    """Compares answers, some of them in a process of its own. Lives on the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting = 0
        """Bytes of all answers that wait or are being compared."""
        self._turn = asyncio.Lock()
        self._process: ChildProcess | None = None
        self._socket: socket.socket | None = None

    def compare(self, live: Answer, candidate: Answer, tolerance: Tolerance, done: Done) -> None:
        """Compare two answers.

        Args:
            live: the live version's.
            candidate: the candidate's.
            tolerance: how far they may be apart.
            done: told what was found, at once or later, and once.
        """
        size = len(live.body) + len(candidate.body)
        if size <= 2 * SMALL_BYTES or (live.body == candidate.body and size <= 2 * MOST_BYTES):
            done(_compare(live, candidate, tolerance))
        elif size > 2 * MOST_BYTES:
            done(NotCompared("too large"))
        elif self._waiting + size > MOST_WAITING_BYTES:
            done(NotCompared("comparing is behind"))
        else:
            self._waiting += size
            running = self._compare_aside(live, candidate, tolerance, done)
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

    async def _compare_aside(
        self, live: Answer, candidate: Answer, tolerance: Tolerance, done: Done
    ) -> None:
        async with self._turn:
            try:
                async with asyncio.timeout(LONGEST_S):
                    done(_parse(await self._ask(_frame(live, candidate, tolerance))))
            except (OSError, EOFError, TimeoutError) as error:
                self._lose()
                reason = "slow" if isinstance(error, TimeoutError) else "failed"
                logger.warning("answers of %d and %d bytes are not compared: %s",
                               len(live.body), len(candidate.body), error or reason)  # fmt: skip
                done(NotCompared(f"comparing {reason}"))

    async def _ask(self, frame: bytes) -> bytes:
        """Return the process's answer to a frame; it is started where it is not there.

        Raises:
            OSError, EOFError: it could not be started, or has died.
        """
        loop = asyncio.get_running_loop()
        if self._socket is None:
            self._start()
        ours = self._socket
        assert ours is not None
        try:
            await loop.sock_sendall(ours, frame)
            (length,) = struct.unpack("<I", await _receive(ours, 4))
            return await _receive(ours, length)
        except asyncio.CancelledError:  # the next answer would be this one's
            self._lose()
            raise

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = spawn(
                    [sys.executable, "-P", "-m", __spec__.name, str(theirs.fileno())],
                    os.environ,
                    stdout=2,  # the server's own log
                    stderr=2,
                    pass_fds=[theirs.fileno()],
                    niceness=NICENESS,
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self._socket = ours

    def _lose(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process = None


async def _receive(ours: socket.socket, length: int) -> bytes:
    loop = asyncio.get_running_loop()
    found = bytearray()
    while len(found) < length:
        part = await loop.sock_recv(ours, length - len(found))
        if not part:
            raise EOFError("the process that compares has ended")
        found += part
    return bytes(found)


def _frame(live: Answer, candidate: Answer, tolerance: Tolerance) -> bytes:
    """Return what the process reads: a head, and both bodies."""
    sides = [(each.status, dict(each.headers)) for each in (live, candidate)]
    head = orjson.dumps({"sides": sides, "tolerance": asdict(tolerance)})
    lengths = _LENGTHS.pack(len(head), len(live.body), len(candidate.body))
    return b"".join((lengths, head, live.body, candidate.body))


def _compare(live: Answer, candidate: Answer, tolerance: Tolerance) -> Comparison | NotCompared:
    try:
        return compare(live, candidate, tolerance)
    except NotCompared as reason:
        return reason


def _format(found: Comparison | NotCompared) -> bytes:
    if isinstance(found, NotCompared):
        return orjson.dumps({"reason": str(found)})
    scaled = found.scaled if math.isfinite(found.scaled) else None
    return orjson.dumps({**asdict(found), "scaled": scaled})


def _parse(data: bytes) -> Comparison | NotCompared:
    said: dict[str, Any] = orjson.loads(data)
    if "reason" in said:
        return NotCompared(said["reason"])
    scaled = math.inf if said["scaled"] is None else said["scaled"]
    difference = said["difference"]
    return Comparison(Verdict(said["verdict"]), said["labels_agree"], difference, scaled)


# -- the process ---------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Compare what comes until the server closes its end, which it does when it dies, too."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    with socket.socket(fileno=descriptor) as server, contextlib.suppress(EOFError, OSError):
        reader = server.makefile("rb")
        while True:
            sizes = _LENGTHS.unpack(_read(reader, _LENGTHS.size))
            head, *bodies = (_read(reader, size) for size in sizes)
            said = orjson.loads(head)
            live, candidate = (
                Answer(status, headers, body)
                for (status, headers), body in zip(said["sides"], bodies, strict=True)
            )
            try:
                found = _format(_compare(live, candidate, Tolerance(**said["tolerance"])))
            except MemoryError:
                found = _format(NotCompared("too large"))
            server.sendall(struct.pack("<I", len(found)) + found)


def _read(reader: Any, size: int) -> bytes:
    found: bytes = reader.read(size)
    if len(found) < size:
        raise EOFError
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
