"""Open-loop load: requests leave when a Poisson process says so, whatever becomes of the others.

    python -m benchmarks.open_loop URL --deadline 0.2 --phase 1200:5 [--phase 600:3] [--seed 1]
    python -m benchmarks.open_loop URL --closed 64 --phase 0:3

A closed loop slows down with the server and so never shows an overload. There are as many clients
as are needed, up to a limit, and each waits for its answer before it asks again: where all of them
wait, what is due is not sent. Every request is accounted for, and its time counts from when it was
due, not from when it was sent: a generator that falls behind must not flatter the server. Prints
one JSON object with the figures of each phase.

This file plans and counts; `open_loop.c` sends, because a fast server refuses more requests per
second than Python can send. It is compiled when it is needed first, and kept in
$XDG_CACHE_HOME/modelyard.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import hashlib
import json
import os
import random
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

SOURCE = Path(__file__).with_suffix(".c")
COMPILER, FLAGS = "cc", ("-O2",)
"""The environment variable CC names another compiler."""
CONNECTIONS = 256
"""Opened before the first request; more follow as they are needed."""
MOST_CONNECTIONS = 8192
"""Clients that there are. None of them has a queue of its own: what waited in one would come too
late to any server."""
GRACE_S = 5.0
"""After the last request, for its answer; what has none then has failed."""
OK, REFUSED, EXPIRED, UNSENT = 200, 503, 504, -1
SUMMARY = struct.Struct("=QQdd")
RECORD = struct.Struct("=dddii")
"""As in the source: due, noticed, answered, status, Retry-After."""


class GeneratorFailed(Exception):
    """The load could not be sent, or not all of it."""


class Phase(NamedTuple):
    """Requests per second, for so many seconds."""

    rate: float
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Phase:
        """Read `RATE:SECONDS`."""
        rate, _, seconds = text.partition(":")
        return cls(float(rate), float(seconds))


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of times, in milliseconds."""

    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        """Return zeros where there are none."""
        found = sorted(seconds) or [0.0]
        p50, p99 = (found[min(len(found) - 1, int(share * len(found)))] for share in (0.5, 0.99))
        return cls(round(1e3 * p50, 3), round(1e3 * p99, 3), round(1e3 * found[-1], 3))


@dataclass(frozen=True)
class Figures:
    """What became of the requests of one phase; every one is in exactly one of the counts."""

    offered: int
    seconds: float
    good: int
    """Answered 200 within the deadline."""
    late: int
    """Answered 200 after it."""
    refused: int
    """Answered 503."""
    expired: int
    """Answered 504."""
    failed: int
    """Answered anything else, or not at all."""
    unsent: int
    """All clients waited for an answer."""
    refused_without_retry_after: int
    """Or with one that is not a number of seconds above 0."""
    good_after: int
    """Good ones of a closed loop, or of a load without a limit, that were answered when the phase
    was over: they are not in its rate."""
    answered_ms: Percentiles
    """Latencies of what was answered 200."""
    accepted_ms: Percentiles
    """Latencies of all that was not refused."""
    refused_ms: Percentiles
    last_not_good_s: float
    """When the last request was due that was not answered well in time, from the phase's start."""
    lateness_ms: Percentiles
    """From due to when a client had it: the generator's own."""
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def goodput(self) -> float:
        """Requests per second that were answered well in time."""
        return (self.good - self.good_after) / self.seconds


class Outcome(NamedTuple):
    """One request: when it was due, sent and answered (seconds), and with what."""

    due: float
    sent: float
    """Or given to a client that had to connect first."""
    answered: float
    status: int
    """0 where the connection ended without an answer, or with one that cannot be read; UNSENT."""
    retry_after: int
    """Seconds; -1 where the answer names none."""


@dataclass(frozen=True)
class Report:
    """What one load found."""

    phases: list[Figures]
    connections: int
    """Most of them open at a time."""
    cpu_s: float
    """Processor time of the sending half."""
    wall_s: float
    """From the first request to the last answer, or until the rest was given up."""

    @property
    def cores(self) -> float:
        """Return how many cores the sending half kept busy."""
        return round(self.cpu_s / self.wall_s, 3) if self.wall_s else 0.0


def schedule(phases: Sequence[Phase], chance: random.Random) -> Iterator[tuple[int, float]]:
    """Yield the phase and the moment of each request: a Poisson process for each phase."""
    start = 0.0
    for number, (rate, seconds) in enumerate(phases):
        due = start + chance.expovariate(rate)
        while due < start + seconds:
            yield number, due
            due += chance.expovariate(rate)
        start += seconds


def count_outcomes(
    outcomes: Sequence[Outcome],
    seconds: float,
    deadline_s: float,
    began: float = 0.0,
    ended: float = float("inf"),
) -> Figures:
    """Count what became of the requests of one phase.

    Args:
        outcomes: outcomes of this phase.
        seconds: length of the phase.
        deadline_s: divides good from late.
        began: the phase's start, as outcomes count time.
        ended: what is answered later has no part in the rate.
    """
    took = {status: [o.answered - o.due for o in outcomes if o.status == status]
            for status in (OK, REFUSED, EXPIRED, UNSENT)}  # fmt: skip
    good = [o for o in outcomes if o.status == OK and o.answered - o.due <= deadline_s]
    not_good = [o.due - began for o in outcomes
                if o.status != OK or o.answered - o.due > deadline_s]  # fmt: skip
    statuses = {str(status): sum(o.status == status for o in outcomes)
                for status in sorted({o.status for o in outcomes})}  # fmt: skip
    return Figures(
        offered=len(outcomes),
        seconds=seconds,
        good=len(good),
        late=len(took[OK]) - len(good),
        refused=len(took[REFUSED]),
        expired=len(took[EXPIRED]),
        failed=len(outcomes) - sum(map(len, took.values())),
        unsent=len(took[UNSENT]),
        refused_without_retry_after=sum(
            o.status == REFUSED and o.retry_after < 1 for o in outcomes
        ),
        good_after=sum(o.answered > ended for o in good),
        answered_ms=Percentiles.of(took[OK]),
        accepted_ms=Percentiles.of(
            [o.answered - o.due for o in outcomes if o.status not in (REFUSED, UNSENT)]
        ),
        refused_ms=Percentiles.of(took[REFUSED]),
        last_not_good_s=round(max(not_good, default=0.0), 3),
        lateness_ms=Percentiles.of([o.sent - o.due for o in outcomes]),
        statuses=statuses,
    )


async def run(
    url: str,
    body: bytes,
    phases: Sequence[Phase],
    deadline_s: float | None = None,
    seed: int = 1,
    closed: int | None = None,
    *,
    limit_s: float | None = None,
    is_fresh: bool = False,
    content_type: str | None = None,
    connections: int = CONNECTIONS,
    most_connections: int = MOST_CONNECTIONS,
) -> Report:
    """Send the load and return the figures of each phase.

    Args:
        url: URL of one model's predictions.
        body: body of every request.
        phases: one after the other.
        deadline_s: sent as X-Request-Timeout; None sends none.
        seed: seed of the schedule.
        closed: clients that each ask again once they are answered, in place of a schedule; one
            phase, whose rate does not count.
        limit_s: what is answered later is not good; `deadline_s` where it is None.
        is_fresh: each request has a connection of its own.
        content_type: Content-Type of the body; None sends none.
        connections: opened before the first request.
        most_connections: open at a time; as many as a closed loop has clients.

    Raises:
        GeneratorFailed: there is no compiler, or the server cannot be reached.
    """
    parts = urlsplit(url)
    headers = [f"POST {parts.path} HTTP/1.1", f"Host: {parts.netloc}"]
    if deadline_s is not None:
        headers.append(f"X-Request-Timeout: {deadline_s:g}")
    if content_type is not None:
        headers.append(f"Content-Type: {content_type}")
    if is_fresh:
        headers.append("Connection: close")
    request = "\r\n".join([*headers, f"Content-Length: {len(body)}", "", ""]).encode() + body
    plan = [] if closed else list(schedule(phases, random.Random(seed)))
    dues = array.array("d", (due for _, due in plan))
    seconds = sum(phase.seconds for phase in phases)
    address = socket.gethostbyname(parts.hostname or "127.0.0.1"), str(parts.port or 80)
    arguments = [
        *address, *map(str, (closed or connections, closed or most_connections, GRACE_S,
                             closed or 0, seconds, int(is_fresh))),
    ]  # fmt: skip
    content = b"".join(
        (struct.pack("=Q", len(request)), request, struct.pack("=Q", len(dues)), dues.tobytes())
    )
    summary, outcomes = await _play(arguments, content)
    _, most, cpu_s, wall_s = summary
    if not closed and len(outcomes) != len(plan):
        raise GeneratorFailed(f"{len(plan)} requests were due, {len(outcomes)} are accounted for")
    limit_s = limit_s or deadline_s or float("inf")
    figures, began, first = [], 0.0, 0
    for number, phase in enumerate(phases):
        # Both are in the order in which requests are due.
        size = len(outcomes) if closed else sum(of == number for of, _ in plan)
        is_timed = not closed and limit_s < float("inf")
        ended = float("inf") if is_timed else began + phase.seconds
        own = outcomes[first : first + size]
        figures.append(count_outcomes(own, phase.seconds, limit_s, began, ended))
        began, first = began + phase.seconds, first + size
    return Report(figures, most, cpu_s, wall_s)


async def _play(
    arguments: Sequence[str], content: bytes
) -> tuple[tuple[int, int, float, float], list[Outcome]]:
    """Run the sending half; return its summary and what became of each request."""
    process = await asyncio.create_subprocess_exec(
        compiled(), *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, error = await process.communicate(content)
    except BaseException:
        process.kill()
        raise
    if process.returncode:
        raise GeneratorFailed(
            f"the generator ended with code {process.returncode}: {error.decode().strip()}"
        )
    summary = SUMMARY.unpack_from(out)
    outcomes = [Outcome(*record) for record in RECORD.iter_unpack(out[SUMMARY.size :])]
    if len(outcomes) != summary[0]:
        raise GeneratorFailed(f"the generator names {summary[0]} requests, gave {len(outcomes)}")
    return summary, outcomes


def compiled() -> Path:
    """Return the sending half as a program, compiled if it is not there yet.

    Raises:
        GeneratorFailed: there is no C compiler, or it does not take the source.
    """
    compiler = shlex.split(os.environ.get("CC", COMPILER))
    source = SOURCE.read_bytes()
    mark = hashlib.sha256(source + repr((compiler, FLAGS, os.uname().machine)).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelyard"
    program = folder / f"open_loop-{mark.hexdigest()[:16]}"
    if program.exists():
        return program
    if shutil.which(compiler[0]) is None:
        raise GeneratorFailed(
            f"the load generator is written in C, and there is no compiler {compiler[0]}; install "
            "one (apt-get install gcc), or name one in CC"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary) / "open_loop"
        command = [*compiler, *FLAGS, "-o", str(made), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise GeneratorFailed(f"{shlex.join(command)} failed: {done.stderr.strip()}")
        made.replace(program)
    return program


def has_compiler() -> bool:
    """Return whether the sending half is there or can be made."""
    return shutil.which(shlex.split(os.environ.get("CC", COMPILER))[0]) is not None


def main() -> None:
    """Run one load and print its figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--body", default="x")
    parser.add_argument("--body-file", type=Path, help="in place of --body")
    parser.add_argument("--content-type")
    parser.add_argument("--deadline", type=float, help="seconds; sent with each request")
    parser.add_argument(
        "--limit", type=float, help="seconds; not sent, but what takes longer is late"
    )
    parser.add_argument(
        "--phase", type=Phase.parse, action="append", required=True, metavar="RATE:SECONDS"
    )
    parser.add_argument("--closed", type=int, help="clients of a closed loop")
    parser.add_argument("--fresh", action="store_true", help="a connection for each request")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="opened ahead")
    parser.add_argument("--most", type=int, default=MOST_CONNECTIONS, help="open at a time")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    body = given.body_file.read_bytes() if given.body_file else given.body.encode()
    try:
        report = asyncio.run(
            run(
                given.url,
                body,
                given.phase,
                given.deadline,
                given.seed,
                given.closed,
                limit_s=given.limit,
                is_fresh=given.fresh,
                content_type=given.content_type,
                connections=given.connections,
                most_connections=given.most,
            )
        )
    except (GeneratorFailed, OSError) as error:
        sys.exit(str(error))
    phases = [{**asdict(each), "goodput": round(each.goodput, 1)} for each in report.phases]
    print(json.dumps({"phases": phases, "cores": report.cores, "connections": report.connections}))


if __name__ == "__main__":
    main()
