"""A light load on a server, over connections that are kept: a closed loop, and an open one.

It runs on the cores of the server that it measures, so it does little: the bytes of a request are
made once, answers are parsed in C, and only their status and time are kept.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from random import Random
from typing import cast
from urllib.parse import urlsplit

import httptools
import uvloop

from modelyard.base.quantile import nearest_rank
from modelyard.serve.errors import StartError

LONGEST_WAIT_S = 120.0
"""Longest wait for the first answer of every connection, beyond the time of the measurement."""
SHOWN_BYTES = 300
"""Bytes that are kept of the body of an answer that is an error."""
MOST_CONNECTIONS = 1000
"""An open loop opens; while all have a request in flight, further ones wait, and that counts."""


@dataclass
class Load:
    """What a load saw of one kind of request after its warm-up."""

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    """Times of answers with status 200, at last sorted; from sending a request to its answer's
    end."""
    failed: int = 0
    first_failure: str = ""
    """Status and body of the first other answer."""
    cpu_s: float = 0.0
    """Processor time of this process, which the load itself took of the cores."""
    parts: list[float] = field(default_factory=list)
    """Rates of the loads that it took in."""
    broken: str = ""
    """Why there is nothing to measure."""

    @property
    def rate(self) -> float:
        """Answers with status 200 per second."""
        return len(self.latencies_s) / self.seconds

    def quantile_s(self, q: float) -> float:
        """Return the latency that a share `q` of the answers did not exceed."""
        return nearest_rank(self.latencies_s, q)

    def count(self, status: int, latency_s: float, body: bytes) -> None:
        """Count an answer."""
        if status == 200:
            self.latencies_s.append(latency_s)
            return
        self.failed += 1
        text = body.decode("utf-8", "replace").strip()
        self.first_failure = self.first_failure or f"{status}: {text}"

    def add(self, later: Load) -> None:
        """Take in what another load saw of the same."""
        self.latencies_s = sorted(self.latencies_s + later.latencies_s)
        self.parts.append(later.rate)
        self.failed += later.failed
        self.first_failure = self.first_failure or later.first_failure
        self.seconds += later.seconds
        self.cpu_s += later.cpu_s

    def end(self, seconds: float, cpu_s: float) -> Load:
        """Return it with its time, sorted."""
        self.seconds, self.cpu_s = seconds, cpu_s
        self.latencies_s.sort()
        return self


def make_request(url: str, path: str, body: bytes, content_type: str | None) -> bytes:
    """Return the bytes of one POST on a connection that stays open."""
    lines = [f"POST {path} HTTP/1.1", f"host: {urlsplit(url).netloc}"]
    if content_type:
        lines.append(f"content-type: {content_type}")
    lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def run_load(
    url: str,
    requests: Sequence[bytes],
    connections: int,
    seconds: float,
    warm_s: float,
) -> Load:
    """Send the requests in turn over every connection: `warm_s` unseen, then `seconds` measured.

    Both go on past their time until every connection has had an answer. Answers count when they
    come, whenever their request was sent.

    Raises:
        StartError: the server closed a connection, or did not answer.
    """

    async def run() -> Load:
        async with _Connections(url) as clients:
            load = Load()

            def go_on(client: _Client) -> None:
                client.send(next(client.turns), load)

            for at in range(connections):
                client = await clients.open()
                client.turns = islice(cycle(requests), at % len(requests), None)
                client.go_on = go_on
                go_on(client)
            for phase_s in (warm_s, seconds):
                load = Load()
                for client in clients.all:
                    client.answered, client.load = 0, load
                began, cpu_began = clients.answered_at, time.process_time()
                await clients.wait(phase_s)
                await clients.until(lambda: all(client.answered for client in clients.all))
            # From answer to answer: batches come together, and a part of one is none.
            return load.end(clients.answered_at - began, time.process_time() - cpu_began)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def run_open_load(
    url: str,
    mix: Mapping[str, tuple[float, Sequence[bytes]]],
    seconds: float,
    warm_s: float,
    seed: int = 1,
) -> dict[str, Load]:
    """Send requests at random moments (Poisson), answered or not; return what each kind saw.

    Args:
        url: the server's.
        mix: mix by kind: requests per second, and the requests, sent in turn.
        seconds: measured, after `warm_s` unseen.
        seed: seed of what is drawn.

    Raises:
        StartError: the server closed a connection, or did not answer.
    """
    random = Random(seed)
    turns = {name: cycle(requests) for name, (_, requests) in mix.items()}
    names, rates = list(mix), [rate for rate, _ in mix.values()]
    warm, measured = ({name: Load() for name in mix} for _ in range(2))
    idle: list[_Client] = []
    waiting: deque[Callable[[_Client], None]] = deque()

    def go_on(client: _Client) -> None:
        if waiting:
            waiting.popleft()(client)
        else:
            idle.append(client)

    async def run() -> dict[str, Load]:
        async with _Connections(url) as clients:
            opening = 0

            async def open_one() -> None:
                nonlocal opening
                client = await clients.open()
                client.go_on = go_on
                opening -= 1
                go_on(client)

            began, cpu_began = time.perf_counter(), time.process_time()
            due, tasks = began, set[asyncio.Task[None]]()
            while (due := due + random.expovariate(sum(rates))) < began + warm_s + seconds:
                await clients.wait(due - time.perf_counter())
                (name,) = random.choices(names, rates)
                load = (warm if due < began + warm_s else measured)[name]
                request, since = next(turns[name]), time.perf_counter()
                if idle:
                    idle.pop().send(request, load, since)
                    continue
                waiting.append(partial(_Client.send, request=request, load=load, since=since))
                if len(clients.all) + opening < MOST_CONNECTIONS:
                    opening += 1
                    tasks.add(asyncio.create_task(open_one()))
            cpu_s = time.process_time() - cpu_began
            await clients.until(
                lambda: not waiting and not opening and len(idle) == len(clients.all)
            )
            return {name: load.end(seconds, cpu_s) for name, load in measured.items()}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


class _Connections:
    """Connections to one server, closed at the end of a block."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self.all: list[_Client] = []

    @property
    def answered_at(self) -> float:
        """When the last answer came."""
        return max(client.answered_at for client in self.all)

    async def __aenter__(self) -> _Connections:
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return self

    async def __aexit__(self, *error: object) -> None:
        for client in self.all:
            client.close()
        if not self._broken.cancel():
            self._broken.exception()  # somebody else has said it

    async def open(self) -> _Client:
        """Return a new one, which does nothing yet."""
        host, port = self._parts.hostname or "", self._parts.port or 80
        loop = asyncio.get_running_loop()
        try:
            _, client = await loop.create_connection(partial(_Client, self._broken), host, port)
        except OSError as error:
            if not self._broken.done():
                self._broken.set_exception(StartError(f"no connection to the server: {error}"))
            raise
        self.all.append(client)
        return client

    async def wait(self, seconds: float) -> None:
        """Let them work.

        Raises:
            StartError: one is broken.
        """
        if seconds > 0:
            await asyncio.wait([self._broken], timeout=seconds)
        if self._broken.done():
            self._broken.result()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Let them work until something is so.

        Raises:
            StartError: one is broken, or it takes too long.
        """
        until = time.perf_counter() + LONGEST_WAIT_S
        while not is_so():
            if time.perf_counter() > until:
                raise StartError(f"a request was not answered within {LONGEST_WAIT_S:g} s")
            await self.wait(0.01)


class _Client(asyncio.Protocol):
    """One connection, with one request in flight.

    Args:
        broken: fails when nothing more can be measured.
    """

    def __init__(self, broken: asyncio.Future[None]) -> None:
        self._broken = broken
        self.load = Load()
        self.answered_at = self._sent_at = 0.0
        self._body = b""
        self._is_closing = False
        self._parser = httptools.HttpResponseParser(self)
        self.answered = 0
        self.turns: Iterator[bytes] = iter(())
        self.go_on: Callable[[_Client], None] = lambda client: None
        """Called after each answer."""

    def close(self) -> None:
        """Close the connection, whatever is in flight."""
        self._is_closing = True
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what requests are written to."""
        self._transport = cast("asyncio.Transport", transport)

    def send(self, request: bytes, load: Load, since: float | None = None) -> None:
        """Send a request, whose answer is counted in `load`, its time from `since` or now."""
        if self._is_closing:
            return
        self.load = load
        self._sent_at = time.perf_counter() if since is None else since
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, which calls `on_body` and `on_message_complete`."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._break(f"the server's answer is not HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        """Keep the start of what an error says."""
        if self._parser.get_status_code() != 200 and len(self._body) < SHOWN_BYTES:
            self._body += body[:SHOWN_BYTES]

    def on_message_complete(self) -> None:
        """Count the answer, and go on."""
        self.answered_at = time.perf_counter()
        latency_s = self.answered_at - self._sent_at
        self.load.count(self._parser.get_status_code(), latency_s, self._body)
        self._body = b""
        self.answered += 1
        self.go_on(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Report that nothing more can be measured."""
        if not self._is_closing:
            self._break(f"the server closed a connection {self.load.first_failure}".rstrip())

    def _break(self, text: str) -> None:
        if not self._broken.done():
            self._broken.set_exception(StartError(text))
