"""A light load on a server: a few kept connections, each with one request in flight.

It runs on the cores of the server that it measures, so it does little: the bytes of a request are
made once, answers are parsed in C, and only their status and time are kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import httptools
import uvloop

from modelyard.archiver.quantile import nearest_rank
from modelyard.serve.errors import StartError

LONGEST_WAIT_S = 120.0
"""For the first answer of every connection, beyond the time of the measurement."""
SHOWN_BYTES = 300
"""Of the body of an answer that is an error."""


@dataclass(frozen=True)
class Load:
    """What a load saw after its warm-up."""

    seconds: float
    latencies_s: Sequence[float]
    """Of the answers with status 200, sorted; from sending a request to the end of its answer."""
    failed: int
    first_failure: str
    """Status and body of the first other answer."""
    cpu_s: float
    """Of this process, which is what the load itself took of the cores."""

    @property
    def rate(self) -> float:
        """Answers with status 200 per second."""
        return len(self.latencies_s) / self.seconds

    def quantile_s(self, q: float) -> float:
        """Return the latency that a share `q` of the answers did not exceed."""
        return nearest_rank(self.latencies_s, q)


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
        return runner.run(_load(url, requests, connections, seconds, warm_s, pause_s))


async def _load(
    url: str,
    requests: Sequence[bytes],
    connections: int,
    seconds: float,
    warm_s: float,
    pause_s: float,
) -> Load:
    loop = asyncio.get_running_loop()
    parts = urlsplit(url)
    broken: asyncio.Future[None] = loop.create_future()
    clients: list[_Client] = []
    try:
        for at in range(connections):
            make = partial(_Client, requests, at, broken, pause_s)
            _, client = await loop.create_connection(make, parts.hostname or "", parts.port or 80)
            clients.append(client)
        await _run_for(clients, broken, warm_s)
        for client in clients:
            client.forget()
        began, cpu_began = time.perf_counter(), time.process_time()
        await _run_for(clients, broken, seconds)
        took, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    finally:
        for client in clients:
            client.close()
    return Load(
        took,
        sorted(latency for client in clients for latency in client.latencies_s),
        sum(client.failed for client in clients),
        next((client.first_failure for client in clients if client.failed), ""),
        cpu_s,
    )


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


class _Client(asyncio.Protocol):
    """One connection: sends a request, takes its answer, pauses, sends the next."""

    def __init__(
        self,
        requests: Sequence[bytes],
        first: int,
        broken: asyncio.Future[None],
        pause_s: float,
    ) -> None:
        self._pause_s = pause_s
        self._requests = requests
        self._next = first
        self._broken = broken
        self._sent_at = 0.0
        self._body = b""
        self._is_closing = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.answered = asyncio.Event()
        self.forget()

    def forget(self) -> None:
        """Start counting anew."""
        self.latencies_s: list[float] = []
        self.failed = 0
        self.first_failure = ""
        self.answered.clear()

    def close(self) -> None:
        """Close the connection, whatever is in flight."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        if self._is_closing:
            return
        request = self._requests[self._next % len(self._requests)]
        self._next += 1
        self._sent_at = time.perf_counter()
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
        """Count the answer and send the next request, in its time."""
        status = self._parser.get_status_code()
        if status == 200:
            self.latencies_s.append(time.perf_counter() - self._sent_at)
        else:
            self.failed += 1
            text = self._body.decode("utf-8", "replace").strip()
            self.first_failure = self.first_failure or f"{status}: {text}"
            self._body = b""
        self.answered.set()
        if self._pause_s:
            asyncio.get_running_loop().call_later(self._pause_s, self._send)
        else:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        """Report that nothing more can be measured."""
        if not self._is_closing:
            self._break(f"the server closed a connection {self.first_failure}".rstrip())

    def _break(self, text: str) -> None:
        if not self._broken.done():
            self._broken.set_exception(StartError(text))
