"""Open-loop load: requests leave when a Poisson process says so, whatever becomes of the others.

    python -m benchmarks.open_loop URL --deadline 0.2 --phase 1200:5 [--phase 600:3] [--seed 1]
    python -m benchmarks.open_loop URL --closed 64 --phase 0:3

A closed loop slows down with the server and so never shows an overload. Every request is accounted
for, and its time counts from when it was due, not from when it was sent: a generator that falls
behind must not flatter the server. Prints one JSON object with the figures of each phase.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import uvloop

CONNECTIONS = 256
"""Opened before the first request; more follow as they are needed."""
MOST_CONNECTIONS = 8192
GRACE_S = 5.0
"""After the last request, for its answer; what has none then has failed."""
SENDS_IN_A_ROW = 16
"""After which answers are read, even where the next request is due."""
OK, REFUSED, EXPIRED = 200, 503, 504


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
    """Of times, in milliseconds."""

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
    refused_without_retry_after: int
    answered_ms: Percentiles
    """Of what was answered 200."""
    accepted_ms: Percentiles
    """Of all that was not refused."""
    refused_ms: Percentiles
    last_not_good_s: float
    """When the last request was due that was not answered well in time, from the phase's start."""
    lateness_ms: Percentiles
    """From due to sent: the generator's own."""
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def goodput(self) -> float:
        """Requests per second that were answered well in time."""
        return self.good / self.seconds


class Outcome(NamedTuple):
    """One request: when it was due, sent and answered (seconds), and with what."""

    phase: int
    due: float
    sent: float
    answered: float
    status: int
    """0 where the connection ended without an answer."""
    has_retry_after: bool


class Connection(asyncio.Protocol):
    """One connection with at most one request on its way."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._asked: tuple[int, float, float] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take work."""
        self._transport = cast(asyncio.Transport, transport)
        self._load.free(self)

    def ask(self, phase: int, due: float) -> None:
        """Send the request."""
        assert self._transport is not None
        self._asked = phase, due, time.perf_counter()
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        """Take a whole answer; all of ours say how long they are."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end].lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(self._buffer) < end + 4 + length:
            return
        self._buffer = b""
        self._end(int(head[9:12]), b"retry-after:" in head)
        self._load.free(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Count the request on its way as failed."""
        self._load.lost(self)
        self._end(0, False)

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    def _end(self, status: int, has_retry_after: bool) -> None:
        if self._asked is not None:
            outcome = Outcome(*self._asked, time.perf_counter(), status, has_retry_after)
            self._asked = None
            self._load.outcomes.append(outcome)


class Load:
    """The connections to one server and what is sent over them.

    Args:
        url: of one model's predictions.
        body: of every request.
        deadline_s: sent as X-Request-Timeout; None sends none.
    """

    def __init__(self, url: str, body: bytes, deadline_s: float | None) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "127.0.0.1", parts.port or 80
        header = "" if deadline_s is None else f"X-Request-Timeout: {deadline_s:g}\r\n"
        self.request = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{header}"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self.outcomes: list[Outcome] = []
        self._connections: set[Connection] = set()
        self._opening = 0
        self._free: list[Connection] = []
        self._due: deque[tuple[int, float]] = deque()
        """Requests without a connection yet."""
        self._repeats_until = 0.0

    async def open(self, count: int) -> None:
        """Open connections."""
        for _ in range(count):
            await self._open()

    async def _open(self) -> None:
        self._opening += 1
        try:
            loop = asyncio.get_running_loop()
            _, made = await loop.create_connection(lambda: Connection(self), *self._address)
            self._connections.add(made)
        except OSError:
            if self._due:
                now = time.perf_counter()
                phase, due = self._due.popleft()
                self.outcomes.append(Outcome(phase, due, now, now, 0, False))
        finally:
            self._opening -= 1

    def free(self, connection: Connection) -> None:
        """Hand a connection the next request, or keep it."""
        if self._due:
            connection.ask(*self._due.popleft())
        elif time.perf_counter() < self._repeats_until:
            connection.ask(0, time.perf_counter())
        else:
            self._free.append(connection)

    def lost(self, connection: Connection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)
        if connection in self._free:
            self._free.remove(connection)

    async def send(self, phases: Sequence[Phase], seed: int) -> int:
        """Send each request when it is due; return how many there were."""
        count = in_a_row = 0
        opening: set[asyncio.Task[None]] = set()
        for phase, due in schedule(phases, random.Random(seed), time.perf_counter()):
            wait_s = due - time.perf_counter()
            in_a_row = 0 if wait_s > 0 else in_a_row + 1
            if wait_s > 0 or in_a_row % SENDS_IN_A_ROW == 0:
                await asyncio.sleep(max(0.0, wait_s))
            count += 1
            if self._free:
                self._free.pop().ask(phase, due)
                continue
            self._due.append((phase, due))
            if len(self._connections) + self._opening < MOST_CONNECTIONS:
                task = asyncio.create_task(self._open())
                opening.add(task)
                task.add_done_callback(opening.discard)
        return count

    async def repeat(self, connections: int, seconds: float) -> int:
        """Keep every connection busy; return how many requests that made."""
        self._repeats_until = time.perf_counter() + seconds
        for _ in range(connections):
            self._free.pop().ask(0, time.perf_counter())
        await asyncio.sleep(seconds)
        while len(self._free) < len(self._connections):
            await asyncio.sleep(0.01)
        return len(self.outcomes)

    async def settle(self, count: int) -> None:
        """Wait for the answers to so many requests, for a while, and hang up."""
        until = time.perf_counter() + GRACE_S
        while len(self.outcomes) < count and time.perf_counter() < until:
            await asyncio.sleep(0.01)
        now = time.perf_counter()
        self.outcomes += (Outcome(phase, due, now, now, 0, False) for phase, due in self._due)
        self._due.clear()
        for connection in [*self._connections]:
            connection.close()
        while self._connections:
            await asyncio.sleep(0.01)


def schedule(
    phases: Sequence[Phase], chance: random.Random, start: float
) -> Iterator[tuple[int, float]]:
    """Yield the phase and the moment of each request: a Poisson process for each phase."""
    for number, (rate, seconds) in enumerate(phases):
        due = start + chance.expovariate(rate)
        while due < start + seconds:
            yield number, due
            due += chance.expovariate(rate)
        start += seconds


def count_outcomes(
    outcomes: Sequence[Outcome], seconds: float, deadline_s: float, began: float
) -> Figures:
    """Count what became of the requests of one phase.

    Args:
        outcomes: of this phase.
        began: the phase's start, as outcomes count time.
    """
    took = {status: [o.answered - o.due for o in outcomes if o.status == status]
            for status in (OK, REFUSED, EXPIRED)}  # fmt: skip
    good = sum(each <= deadline_s for each in took[OK])
    not_good = [o.due - began for o in outcomes
                if o.status != OK or o.answered - o.due > deadline_s]  # fmt: skip
    statuses = {str(status): sum(o.status == status for o in outcomes)
                for status in sorted({o.status for o in outcomes})}  # fmt: skip
    return Figures(
        offered=len(outcomes),
        seconds=seconds,
        good=good,
        late=len(took[OK]) - good,
        refused=len(took[REFUSED]),
        expired=len(took[EXPIRED]),
        failed=len(outcomes) - sum(map(len, took.values())),
        refused_without_retry_after=sum(
            o.status == REFUSED and not o.has_retry_after for o in outcomes
        ),
        answered_ms=Percentiles.of(took[OK]),
        accepted_ms=Percentiles.of([o.answered - o.due for o in outcomes if o.status != REFUSED]),
        refused_ms=Percentiles.of(took[REFUSED]),
        last_not_good_s=round(max(not_good, default=0.0), 3),
        lateness_ms=Percentiles.of([o.sent - o.due for o in outcomes]),
        statuses=statuses,
    )


async def run(
    url: str,
    body: bytes,
    phases: Sequence[Phase],
    deadline_s: float | None,
    seed: int,
    closed: int | None = None,
) -> list[Figures]:
    """Send the load and return the figures of each phase.

    Args:
        closed: connections that each ask again once they are answered, in place of a schedule; one
            phase, whose rate does not count.
    """
    load = Load(url, body, deadline_s)
    await load.open(closed or CONNECTIONS)
    began = time.perf_counter()
    if closed:
        count = await load.repeat(closed, phases[0].seconds)
    else:
        count = await load.send(phases, seed)
    await load.settle(count)
    assert len(load.outcomes) == count, f"{count} requests, {len(load.outcomes)} outcomes"
    figures = []
    for number, phase in enumerate(phases):
        own = [outcome for outcome in load.outcomes if outcome.phase == number]
        figures.append(count_outcomes(own, phase.seconds, deadline_s or 1e9, began))
        began += phase.seconds
    return figures


def main() -> None:
    """Run one load and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--body", default="x")
    parser.add_argument("--deadline", type=float, help="seconds; sent with each request")
    parser.add_argument("--phase", type=Phase.parse, action="append", required=True)
    parser.add_argument("--closed", type=int, help="connections of a closed loop")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    began = time.perf_counter()
    figures = uvloop.run(
        run(given.url, given.body.encode(), given.phase, given.deadline, given.seed, given.closed)
    )
    cores = time.process_time() / (time.perf_counter() - began)
    phases = [{**asdict(each), "goodput": round(each.goodput, 1)} for each in figures]
    print(json.dumps({"phases": phases, "cores": round(cores, 3)}))


if __name__ == "__main__":
    main()
