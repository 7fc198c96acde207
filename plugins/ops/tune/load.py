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
"""For the first answer of every connection, beyond the time of the measurement."""
SHOWN_BYTES = 300
"""Bytes that are kept of the body of an answer that is an error."""
MOST_CONNECTIONS = 1000
"""An open loop opens; while all have a request in flight, further ones wait, and that counts."""


@dataclass(frozen=True)
class Load:
    """What a load saw after its warm-up."""

    seconds: float
    latencies_s: Sequence[float]
    """Times of answers with status 200, sorted; from sending a request to its answer's end."""
    failed: int
    first_failure: str
    """Status and body of the first other answer."""
    cpu_s: float
    """Processor time of this process, which the load itself took of the cores."""

    @property
    def rate(self) -> float:
        """Answers with status 200 per second."""
        return len(self.latencies_s) / self.seconds

    def quantile_s(self, q: float) -> float:
        """Return the latency that a share `q` of the answers did not exceed."""
        return nearest_rank(self.latencies_s, q)


@dataclass
class Tally:
    """The answers of one kind of request, as they come."""

    latencies_s: list[float] = field(default_factory=list)
    failed: int = 0
    first_failure: str = ""

    def count(self, status: int, latency_s: float, body: bytes) -> None:
        """Count an answer."""
        if status == 200:
            self.latencies_s.append(latency_s)
            return
        self.failed += 1
        text = body.decode("utf-8", "replace").strip()
        self.first_failure = self.first_failure or f"{status}: {text}"

    def forget(self) -> None:
        """Start counting anew."""
        self.latencies_s.clear()
        self.failed, self.first_failure = 0, ""

    def load(self, seconds: float, cpu_s: float) -> Load:
        """Return what was counted in so many seconds."""
        return Load(seconds, sorted(self.latencies_s), self.failed, self.first_failure, cpu_s)


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
    pause_s: float = 0.0,
) -> Load:
    """Send the requests in turn over every connection: `warm_s` unseen, then `seconds` measured.

    Both go on past their time until every connection has had an answer. Each pauses between an
    answer and the next request.

    Raises:
        StartError: the server closed a connection, or did not answer.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_closed(url, requests, connections, seconds, warm_s, pause_s))


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
        mix: by kind: requests per second, and the requests, sent in turn.
        seconds: measured, after `warm_s` unseen.
        seed: of what is drawn.

    Raises:
        StartError: the server closed a connection, or did not answer.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_open(url, mix, seconds, warm_s, Random(seed)))


async def _closed(
    url: str,
    requests: Sequence[bytes],
    connections: int,
    seconds: float,
    warm_s: float,
    pause_s: float,
) -> Load:
    loop = asyncio.get_running_loop()
    broken: asyncio.Future[None] = loop.create_future()
    tally = Tally()

    def go_on(turns: Iterator[bytes], client: _Client) -> None:
        send = partial(client.send, next(turns), tally)
        if pause_s and client.answered.is_set():
            loop.call_later(pause_s, send)
        else:
            send()

    clients: list[_Client] = []
    try:
        for at in range(connections):
            turns = islice(cycle(requests), at % len(requests), None)
            clients.append(await _connect(url, partial(go_on, turns), broken))
        await _run_for(clients, broken, warm_s)
        tally.forget()
        for client in clients:
            client.answered.clear()
        began, cpu_began = time.perf_counter(), time.process_time()
        await _run_for(clients, broken, seconds)
        took, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    finally:
        for client in clients:
            client.close()
    return tally.load(took, cpu_s)


async def _open(
    url: str,
    mix: Mapping[str, tuple[float, Sequence[bytes]]],
    seconds: float,
    warm_s: float,
    random: Random,
) -> dict[str, Load]:
    loop = asyncio.get_running_loop()
    broken: asyncio.Future[None] = loop.create_future()
    idle: list[_Client] = []
    waiting: deque[Callable[[_Client], None]] = deque()
    clients: list[_Client] = []
    opening: set[asyncio.Task[None]] = set()

    def go_on(client: _Client) -> None:
        if waiting:
            waiting.popleft()(client)
        else:
            idle.append(client)

    async def open_one() -> None:
        try:
            clients.append(await _connect(url, go_on, broken))
        except OSError as error:
            if not broken.done():
                broken.set_exception(StartError(f"no connection to the server: {error}"))

    def issue(request: bytes, tally: Tally) -> None:
        issued_at = time.perf_counter()
        if idle:
            idle.pop().send(request, tally, issued_at)
            return
        waiting.append(lambda client: client.send(request, tally, issued_at))
        if len(clients) + len(opening) < MOST_CONNECTIONS:
            task = loop.create_task(open_one())
            opening.add(task)
            task.add_done_callback(opening.discard)

    turns = {name: cycle(requests) for name, (_, requests) in mix.items()}
    names, rates = list(mix), [rate for rate, _ in mix.values()]
    warm, measured = ({name: Tally() for name in mix} for _ in range(2))
    began, cpu_began = time.perf_counter(), time.process_time()
    due = began
    try:
        while (due := due + random.expovariate(sum(rates))) < began + warm_s + seconds:
            if (ahead_s := due - time.perf_counter()) > 0:
                await asyncio.wait([broken], timeout=ahead_s)
            if broken.done():
                broken.result()
            (name,) = random.choices(names, rates)
            issue(next(turns[name]), (warm if due < began + warm_s else measured)[name])
        cpu_s = time.process_time() - cpu_began
        until = time.perf_counter() + LONGEST_WAIT_S
        while waiting or opening or len(idle) < len(clients):
            if time.perf_counter() > until:
                raise StartError(f"a request was not answered within {LONGEST_WAIT_S:g} s")
            await asyncio.wait([broken], timeout=0.01)
            if broken.done():
                broken.result()
    finally:
        for client in clients:
            client.close()
        for task in opening:
            task.cancel()
    return {name: tally.load(seconds, cpu_s) for name, tally in measured.items()}


async def _run_for(
    clients: Sequence[_Client], broken: asyncio.Future[None], seconds: float
) -> None:
    """Let the clients work; after `seconds` and an answer for each, or at a broken connection."""
    await asyncio.wait([broken], timeout=seconds)
    answered = asyncio.create_task(_wait_for_answers(clients))
    either: list[asyncio.Future[None]] = [broken, answered]
    await asyncio.wait(either, timeout=LONGEST_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    is_answered = answered.done()
    answered.cancel()
    if broken.done():
        broken.result()
    if not is_answered:
        raise StartError(f"a request was not answered within {seconds + LONGEST_WAIT_S:g} s")


async def _wait_for_answers(clients: Sequence[_Client]) -> None:
    for client in clients:
        await client.answered.wait()


async def _connect(
    url: str, go_on: Callable[[_Client], None], broken: asyncio.Future[None]
) -> _Client:
    parts = urlsplit(url)
    _, client = await asyncio.get_running_loop().create_connection(
        partial(_Client, go_on, broken), parts.hostname or "", parts.port or 80
    )
    return client


class _Client(asyncio.Protocol):
    """One connection, with one request in flight.

    Args:
        go_on: called when it is open, and after each answer.
        broken: fails when nothing more can be measured.
    """

    def __init__(self, go_on: Callable[[_Client], None], broken: asyncio.Future[None]) -> None:
        self._go_on = go_on
        self._broken = broken
        self._tally = Tally()
        self._sent_at = 0.0
        self._body = b""
        self._is_closing = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.answered = asyncio.Event()

    def close(self) -> None:
        """Close the connection, whatever is in flight."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)
        self._go_on(self)

    def send(self, request: bytes, tally: Tally, since: float | None = None) -> None:
        """Send a request, whose answer is counted in `tally`, its time from `since` or now."""
        assert self._transport is not None
        if self._is_closing:
            return
        self._tally = tally
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
        latency_s = time.perf_counter() - self._sent_at
        self._tally.count(self._parser.get_status_code(), latency_s, self._body)
        self._body = b""
        self.answered.set()
        self._go_on(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Report that nothing more can be measured."""
        if not self._is_closing:
            self._break(f"the server closed a connection {self._tally.first_failure}".rstrip())

    def _break(self, text: str) -> None:
        if not self._broken.done():
            self._broken.set_exception(StartError(text))
