"""Two answers that are to be compared, what comparing them finds, and the process that does it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson

from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.report import ceiling, joint_tolerance, parse_report
from modelyard.base.threads import thread_environment
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import Reply, Stream
from modelyard.serve.dataplane.process import ChildProcess, spawn
from modelyard.serve.dataplane.wire import Payload

MOST_BYTES = 16 << 20
"""Longest answer that is compared otherwise than byte by byte."""
DEFAULT_TOLERANCE = 1e-4
"""Tolerance of an archive whose certificate states none: that of float32."""
MOST_ERROR = 0.15
"""Error of a quantised archive whose certificate states none: the largest that an export takes."""
_ERRORS = 4.0
"""Errors as large as the certificate's that an answer may have: a softmax may enlarge them."""
LENGTH_HEADER = "inference-header-content-length"


class NotCompared(Exception):
    """Two answers that are not compared, and count as neither equal nor different.

    The message is a word or two, which names the reason where they are counted.
    """


class Verdict(StrEnum):
    """What comparing two answers found."""

    EQUAL = "equal"
    WITHIN_TOLERANCE = "within_tolerance"
    DIFFERS = "differs"
    CANDIDATE_FAILED = "candidate_failed"
    LIVE_FAILED = "live_failed"
    BOTH_FAILED = "both_failed"


class Answer(NamedTuple):
    """An answer as a worker sent it, or the error that there was instead."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: Payload

    def is_same(self, other: Answer) -> bool:
        """Return whether both say the very same, byte by byte, in the same form."""
        names = ("content-type", "content-encoding", LENGTH_HEADER)
        are_alike = all(self.headers.get(name) == other.headers.get(name) for name in names)
        return self.status < 300 and other.status < 300 and are_alike and self.body == other.body


@dataclass(frozen=True)
class Tolerance:
    """How far two answers may be apart that mean the same."""

    scaled: float = DEFAULT_TOLERANCE
    """Largest difference of a number over its unit."""
    is_quantized: bool = False
    """One of the two approximates: labels are the same, and `error` decides."""
    error: float = MOST_ERROR
    """Largest error of the numbers of an answer, taken together, where one approximates."""
    subject: str = ""
    """Whose answers they are: scales are learnt for each subject alone."""


@dataclass(frozen=True)
class Comparison:
    """What was found."""

    verdict: Verdict
    labels_agree: bool | None
    """True where the answers are the same; None where they name no label and rank nothing, or have
    not the same structure."""
    difference: str | None = None
    """Difference in words; None where they are equal."""
    scaled: float = 0.0
    """The largest scaled difference; infinite where no tolerance would help."""

    @property
    def agrees(self) -> bool:
        """Whether a client would take one for the other."""
        return self.verdict in (Verdict.EQUAL, Verdict.WITHIN_TOLERANCE)


SAME = Comparison(Verdict.EQUAL, labels_agree=True)


def compare_statuses(live: int, candidate: int) -> Comparison | None:
    """Return what two statuses say; None where both are answers."""
    if live == candidate and live < 300:
        return None
    said = f"status: expected {live}, got {candidate}"
    if live >= 500:
        failed = (Verdict.LIVE_FAILED, Verdict.BOTH_FAILED)[candidate >= 500]
        return Comparison(failed, None, said, math.inf)
    if candidate >= 500 or live < 300 <= candidate:
        return Comparison(Verdict.CANDIDATE_FAILED, None, said, math.inf)
    if live == candidate:  # the same refusal, in whatever words
        return Comparison(Verdict.EQUAL, None)
    return Comparison(Verdict.DIFFERS, None, said, math.inf)


def answer_of(reply: Reply) -> Answer:
    """Return a worker's reply as it is compared.

    Raises:
        NotCompared: it is a stream.
    """
    if isinstance(reply.body, Stream):
        raise NotCompared("stream")
    fields = wire.unpack_meta(reply.headers)
    pairs = zip(fields[::2], fields[1::2], strict=False)
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in pairs}
    return Answer(reply.status, headers, reply.body)


def read_tolerance(folder: Path, manifest: Mapping[str, Any] | None) -> Tolerance:
    """Return what an unpacked archive's certificate allows.

    Args:
        folder: where the archive is unpacked, its digests checked.
        manifest: manifest as its JSON has it; None where there is none.
    """
    name = ((manifest or {}).get("modelyard") or {}).get("report")
    try:
        report = parse_report((folder / name).read_bytes(), Path(name)) if name else None
    except (CannotArchive, OSError):
        report = None
    parity = None if report is None else report.parity
    if report is None or parity is None:
        return Tolerance()
    stated = [
        min(parity.tolerances[spec.name], ceiling(spec.dtype)) for spec in report.signature.outputs
    ]
    scaled = max(stated, default=DEFAULT_TOLERANCE)
    if not parity.is_quantized:
        return Tolerance(scaled)
    error = _ERRORS * max(parity.errors.values(), default=MOST_ERROR)
    return Tolerance(scaled, is_quantized=True, error=min(MOST_ERROR, error))


def both(one: Tolerance, other: Tolerance, subject: str) -> Tolerance:
    """Return how far the answers of two archives may be apart, each as far from its checkpoint."""
    return Tolerance(
        joint_tolerance(one.scaled, other.scaled),
        one.is_quantized or other.is_quantized,
        min(MOST_ERROR, sum(each.error for each in (one, other) if each.is_quantized)),
        subject,
    )


# -- the process beside the server -----------------------------------------------------------------


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
    """Compares answers, in a process of its own. Lives on the event loop.

    A megabyte of JSON takes half a second of a core, which neither the loop nor a thread of the
    server can spare, and numpy is not to be imported there. The process has a low priority, is
    started for the first two answers that are not the same bytes, and ends with the server. What
    comes within some milliseconds goes to it as one frame.
    """

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
