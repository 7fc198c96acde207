"""Connections of a listener in this process to an application of this file: bytes in and out."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import uvloop

from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.wire import Buffer
from modelyard.serve.http.connection import (
    FRAMING_BYTES,
    JOIN_BYTES,
    LEFT,
    LINGER_S,
    MIN_RATE,
    PIPELINED,
    SHORT_RATE,
    SHORT_S,
    TARGET_BYTES,
    UNCOUNTED_BYTES,
    Answer,
    Answered,
    Connection,
    Pace,
    RequestResponseCycle,
)
from modelyard.serve.http.listener import Listener
from modelyard.serve.http.turns import REFUSALS
from modelyard.serve.settings import Address, Settings

HOST = b"host: localhost\r\n"
SETTINGS = Settings(max_request_bytes=100_000, max_header_bytes=20_000)
LARGE = b"x" * (JOIN_BYTES + 1)


class Answers:
    """Answers each path in a way of its own; requests that wait do so until `go`."""

    def __init__(self) -> None:
        self.cycles: list[RequestResponseCycle] = []
        self.go = asyncio.Event()
        self.turns = 0
        """Turns of the loop, where somebody counts them."""
        self.were_idle: list[bool] = []
        """Whether the connections of refused requests seemed to be idle after it."""

    def accept(self, cycle: RequestResponseCycle) -> None:
        self.cycles.append(cycle)
        answering: Callable[[RequestResponseCycle], Awaitable[None]] | None
        answering = getattr(self, cycle.path.strip("/"), None)
        if answering is not None:
            cycle.run(answering(cycle))
        else:
            cycle.read_body(lambda parts: self.echo(cycle, parts))

    def refuse(self, error: Exception, cycle: RequestResponseCycle | None) -> Answer:
        return 400, [(b"x-length", b"0")], type(error).__name__.encode()

    def echo(self, cycle: RequestResponseCycle, parts: Sequence[Buffer]) -> None:
        query = b"?" + cycle.query if cycle.query else b""
        body = b"%s %s%s %s" % (
            cycle.method.encode(), cycle.path.encode(), query, b"".join(parts),
        )  # fmt: skip
        assert cycle.send_whole(200, [(b"content-length", b"%d" % len(body))], body)

    async def wait(self, cycle: RequestResponseCycle) -> None:
        await self.go.wait()
        assert cycle.send_whole(200, [(b"content-length", b"6")], b"waited")

    async def turn(self, cycle: RequestResponseCycle) -> None:
        """Answer with the number of the loop's turn."""
        await cycle.start(200, [(b"content-length", b"9")])
        await cycle.write(b"%09d" % self.turns)

    async def chunks(self, cycle: RequestResponseCycle) -> None:
        await cycle.start(200, [(b"X-Note", b"close")])
        assert not cycle.send_whole(200, [], b"a second answer")
        await cycle.write(b"one", is_more=True)
        await cycle.write(b"two")

    async def exact(self, cycle: RequestResponseCycle) -> None:
        await cycle.start(200, [(b"content-length", b"4")])
        await cycle.write(b"ab", is_more=True)
        await cycle.write(b"cd")

    async def last(self, cycle: RequestResponseCycle) -> None:
        await cycle.start(200, [(b"Connection", b"Close"), (b"content-length", b"0")])
        await cycle.write(b"")

    async def nothing(self, cycle: RequestResponseCycle) -> None:
        await cycle.start(204, [])
        await cycle.write(b"")

    async def elsewhere(self, cycle: RequestResponseCycle) -> None:
        await cycle.start(303, [(b"location", b"/")])
        await cycle.write(b"")

    async def short(self, cycle: RequestResponseCycle) -> None:
        await cycle.start(200, [(b"content-length", b"9")])
        await cycle.write(b"ab")

    async def long(self, cycle: RequestResponseCycle) -> None:
        await cycle.start(200, [(b"content-length", b"1")])
        await cycle.write(b"ab")

    async def split(self, cycle: RequestResponseCycle) -> None:
        await cycle.start(200, [(b"x-note", b"a\r\nset-cookie: b")])

    async def silent(self, cycle: RequestResponseCycle) -> None:
        """Return without an answer."""

    async def busy(self, cycle: RequestResponseCycle) -> None:
        """Refuse it for too much work, and have its client wait."""
        connection = cycle.connection
        connection.turns._refused = REFUSALS
        connection.turns.put_off(connection)
        cycle.is_refused = True
        assert cycle.send_whole(503, [(b"content-length", b"0")], b"")
        self.were_idle.append(connection.is_idle)

    async def large(self, cycle: RequestResponseCycle) -> None:
        assert cycle.send_whole(200, [(b"content-length", b"%d" % len(LARGE))], LARGE)

    async def endless(self, cycle: RequestResponseCycle) -> None:
        await cycle.start(200, [])
        while not cycle.has_left:
            await cycle.write(LARGE, is_more=True)


class Served:
    """A listener and what its connections did."""

    def __init__(self, settings: Settings = SETTINGS, budget: AnswerBudget | None = None) -> None:
        self.app = Answers()
        self.log: list[Answered] = []
        self.budget = budget or AnswerBudget()
        self.listener = Listener(
            self.app, Address("127.0.0.1", 0), settings, access=self.log.append, budget=self.budget
        )

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Connection]:
        before = set(self.listener.connections)
        address = self.listener.address
        reader, writer = await asyncio.open_connection(address.host, address.port)
        await until(lambda: self.listener.connections - before)
        (connection,) = self.listener.connections - before
        return reader, writer, connection

    async def exchange(self, pieces: Sequence[bytes], size: int) -> bytes:
        """Send, and return what comes: so many bytes, and what else there is at the end."""
        reader, writer, _ = await self.open()
        received = b""
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            async with asyncio.timeout(20):
                for piece in pieces:
                    writer.write(piece)
                    await asyncio.sleep(0.02)
                while len(received) < size and (data := await reader.read(1 << 16)):
                    received += data
                writer.write_eof()
                received += await reader.read()
        return received


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def run(
    scenario: Callable[[Served], Awaitable[None]],
    settings: Settings = SETTINGS,
    budget: AnswerBudget | None = None,
) -> Served:
    """Run a scenario with a listener that is up."""

    async def main() -> Served:
        served = Served(settings, budget)
        await served.listener.start()
        await scenario(served)
        await served.listener.stop_accepting()
        return served

    return uvloop.run(main())


def get(target: bytes, more: bytes = b"", method: bytes = b"GET") -> bytes:
    return b"%s %s HTTP/1.1\r\n%s%s\r\n" % (method, target, HOST, more)


def post(target: bytes, body: bytes, more: bytes = b"") -> bytes:
    return get(target, b"content-length: %d\r\n%s" % (len(body), more), b"POST") + body


def chunked(*chunks: bytes) -> tuple[bytes, ...]:
    return (get(b"/e", b"Transfer-Encoding: chunked\r\n", b"POST"), *chunks)


def ok(body: bytes, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n%s\r\n%s" % (len(body), more, body)


def refused(error: bytes) -> bytes:
    return b"HTTP/1.1 400 Bad Request\r\nx-length: 0\r\ncontent-length: %d\r\nconnection: " % len(
        error
    ) + (b"close\r\n\r\n" + error)


CLOSE = b"connection: close\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"


@pytest.mark.parametrize(
    ("pieces", "answer"),
    [
        pytest.param((get(b"/e"),), ok(b"GET /e "), id="no body"),
        pytest.param((get(b"/%65?a=%20"),), ok(b"GET /e?a=%20 "), id="an escape and a query"),
        pytest.param((get(b"http://x/e?q"),), ok(b"GET /e?q "), id="a proxy's form"),
        pytest.param((get(b"http://x"),), ok(b"GET / "), id="a proxy's form without a path"),
        pytest.param((get(b"e"),), refused(b"BadMessage"), id="no path"),
        pytest.param(
            (post(b"/e", b"abc"), get(b"/f")), ok(b"POST /e abc") + ok(b"GET /f "), id="two"
        ),
        pytest.param(
            (post(b"/e", b"z")[:30], post(b"/e", b"z")[30:]), ok(b"POST /e z"), id="a head in two"
        ),
        pytest.param(
            (b"GET /e HTTP/1.0\r\n\r\n",), ok(b"GET /e ", CLOSE), id="1.0 names no host"
        ),
        pytest.param((b"GET /e HTTP/1.1\r\n\r\n",), refused(b"BadMessage"), id="1.1 must"),
        pytest.param((get(b"/e", HOST),), refused(b"BadMessage"), id="two hosts"),
        pytest.param((get(b"/e", CLOSE) + get(b"/f"),), ok(b"GET /e ", CLOSE), id="asks to close"),
        pytest.param(
            (post(b"/e", b"abc", UPGRADE) + get(b"/f"),),
            ok(b"POST /e abc") + ok(b"GET /f "),
            id="offers another protocol",
        ),
        pytest.param(
            (post(b"/e", b"abc", b"Expect: 100-continue\r\n")[:-3], b"abc"),
            b"HTTP/1.1 100 Continue\r\n\r\n" + ok(b"POST /e abc"),
            id="waits to be asked",
        ),
        pytest.param(
            (post(b"/e", b"abc", b"Expect: 100-continue\r\n"),),
            ok(b"POST /e abc"),
            id="does not wait to be asked",
        ),
        pytest.param(
            chunked(b"3\r\nabc\r\n", b"2;x=y\r\nde\r\n", b"0\r\na: b\r\n\r\n"),
            ok(b"POST /e abcde"),
            id="chunks",
        ),
        pytest.param(
            chunked(b"1;" + b"x" * (FRAMING_BYTES - 2), b"\r\na\r\n0\r\n\r\n"),
            ok(b"POST /e a"),
            id="as much framing as may be",
        ),
        pytest.param(
            chunked(b"1;" + b"x" * (FRAMING_BYTES - 1), b"\r\na\r\n0\r\n\r\n"),
            refused(b"BadMessage"),
            id="more framing",
        ),
        pytest.param(
            (get(b"/" + b"e" * TARGET_BYTES),), refused(b"TargetTooLong"), id="a long target"
        ),
        pytest.param(
            (get(b"/e", b"a: %b\r\n" % (b"b" * 20_000)),),
            refused(b"HeadTooLarge"),
            id="a long head",
        ),
        pytest.param(
            (get(b"/e", b"a: b\r\n" * 1001),), refused(b"HeadTooLarge"), id="too many fields"
        ),
        pytest.param(
            (get(b"/e", b"content-length: 100001\r\n", b"POST"),),
            refused(b"BodyTooLarge"),
            id="a length over the limit",
        ),
        pytest.param(
            chunked(b"186a1\r\n" + b"x" * 100_001), refused(b"BodyTooLarge"), id="a body over it"
        ),
        pytest.param(
            (get(b"/e", b"Transfer-Encoding: gzip, chunked\r\n", b"POST"),),
            refused(b"BadMessage"),
            id="another coding",
        ),
        pytest.param((get(b"x:1", b"", b"CONNECT"),), refused(b"BadMessage"), id="a tunnel"),
        pytest.param(
            (get(b"/e") + b"nonsense\r\n\r\n",),
            ok(b"GET /e ") + refused(b"BadMessage"),
            id="nonsense after a request",
        ),
        pytest.param(
            (get(b"/e") * (PIPELINED + 1),), ok(b"GET /e ") * (PIPELINED + 1), id="pipelined"
        ),
        pytest.param(
            (get(b"/chunks") + get(b"/e"),),
            b"HTTP/1.1 200 OK\r\nx-note: close\r\ntransfer-encoding: chunked\r\n\r\n"
            b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n" + ok(b"GET /e "),
            id="answered in chunks",
        ),
        pytest.param((get(b"/exact") + get(b"/e"),), ok(b"abcd") + ok(b"GET /e "), id="in parts"),
        pytest.param((get(b"/last") + get(b"/e"),), ok(b"", CLOSE), id="the last answer"),
        pytest.param(
            (get(b"/nothing") + get(b"/e"),),
            b"HTTP/1.1 204 No Content\r\n\r\n" + ok(b"GET /e "),
            id="no content",
        ),
        pytest.param(
            (get(b"/elsewhere"),),
            b"HTTP/1.1 303 See Other\r\nlocation: /\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            id="another status without a length",
        ),
        pytest.param((get(b"/exact", b"", b"HEAD"),), ok(b"abcd")[:-4], id="a head alone"),
        pytest.param((get(b"/short"),), ok(b"x" * 9)[:-9], id="shorter than was said"),
        pytest.param((get(b"/long"),), ok(b"x")[:-1], id="longer than was said"),
        pytest.param((get(b"/split"),), refused(b"RuntimeError"), id="a header of two lines"),
        pytest.param((get(b"/silent"),), refused(b"RuntimeError"), id="no answer"),
        pytest.param((get(b"/large"),), ok(LARGE), id="a large answer"),
    ],
)  # fmt: skip
def test_what_is_answered(pieces: tuple[bytes, ...], answer: bytes) -> None:
    async def scenario(served: Served) -> None:
        assert await served.exchange(pieces, len(answer)) == answer

    run(scenario)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_body_is_the_same_however_it_is_split(seed: int) -> None:
    rng = random.Random(seed)
    bodies = [rng.randbytes(size) for size in rng.sample((0, 100, 70_000, 300_000, 900_000), 5)]
    sent = b"".join(post(b"/e", body) for body in bodies)
    answer = b"".join(ok(b"POST /e " + body) for body in bodies)
    cuts = sorted(rng.randrange(len(sent)) for _ in range(12))
    pieces = [sent[start:end] for start, end in pairwise([0, *cuts, len(sent)])]

    async def scenario(served: Served) -> None:
        for parts in ([sent], pieces):
            assert await served.exchange(parts, len(answer)) == answer
        assert served.budget.bodies == 0

    run(scenario, Settings(max_request_bytes=1_000_000))


def test_a_pace_is_slow_that_keeps_less_than_its_rate_over_its_time() -> None:
    pace, what = Pace(), object()

    def is_slow(now: float, progress: int, is_short: bool = False, what: object = what) -> bool:
        return pace.is_slow(what, now, progress, 10.0, is_short)

    assert not is_slow(100, 0)  # the first look only begins
    assert not is_slow(109, 0)  # its time is not over
    assert not is_slow(110, 10 * MIN_RATE)
    assert not is_slow(120, 20 * MIN_RATE)
    assert is_slow(130, 30 * MIN_RATE - 1)
    assert not is_slow(140, 40 * MIN_RATE, is_short=False)
    assert is_slow(150, 50 * MIN_RATE, is_short=True)  # workers wait
    assert not is_slow(150 + SHORT_S, 50 * MIN_RATE + int(SHORT_S * SHORT_RATE), is_short=True)
    assert not is_slow(200, 0, what="another thing")
    assert is_slow(211, 0, what="another thing")
    pace.stop()
    assert not is_slow(300, 0, what="another thing")


async def settle(connection: Connection) -> None:
    """Let what is on its way be read."""
    for _ in range(5):
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("sent", "within", "answer"),
    [
        pytest.param(b"", "keep_alive_s", b"", id="no request"),
        pytest.param(get(b"/e"), "keep_alive_s", ok(b"GET /e "), id="no further request"),
        pytest.param(b"GET /", "head_timeout_s", refused(b"RequestTooSlow"), id="half a head"),
    ],
)
def test_who_sends_nothing_is_closed_when_its_time_is_over(
    sent: bytes, within: str, answer: bytes
) -> None:
    settings = SETTINGS.model_copy(
        update={"keep_alive_s": 50.0, "head_timeout_s": 70.0, within: 30.0}
    )

    async def scenario(served: Served) -> None:
        reader, writer, connection = await served.open()
        writer.write(sent)
        await settle(connection)
        connection.check(connection.since + 29.9)
        assert connection.is_idle and not connection.is_busy
        connection.check(connection.since + 30.1)
        async with asyncio.timeout(20):
            assert await reader.read() == answer
        writer.close()

    run(scenario, settings)


def test_a_body_that_comes_too_slowly_is_refused_and_the_last_answer_can_be_read() -> None:
    settings = SETTINGS.model_copy(update={"transfer_timeout_s": 10.0})

    async def scenario(served: Served) -> None:
        reader, writer, connection = await served.open()
        writer.write(get(b"/e", b"content-length: 50000\r\n", b"POST"))
        await settle(connection)
        now = connection.since
        connection.check(now)
        writer.write(b"x" * (10 * MIN_RATE))
        await settle(connection)
        connection.check(now + 10)
        assert connection.is_busy
        writer.write(b"x" * (10 * MIN_RATE - 1))
        await settle(connection)
        connection.check(now + 20)
        async with asyncio.timeout(20):
            assert await reader.read() == refused(b"RequestTooSlow")
        assert not connection.is_busy and connection.writable is None
        connection.check(connection.since + LINGER_S - 0.1)
        assert not connection.transport.is_closing()
        connection.check(connection.since + LINGER_S + 0.1)
        assert connection.transport.is_closing()
        writer.close()

    served = run(scenario, settings)
    assert served.budget.bodies == 0


def test_what_goes_on_sending_after_its_answer_is_closed() -> None:
    settings = SETTINGS.model_copy(update={"transfer_timeout_s": 10.0})

    async def scenario(served: Served) -> None:
        reader, writer, connection = await served.open()
        writer.write(get(b"/exact", b"content-length: 50000\r\n", b"POST"))
        await settle(connection)
        assert await reader.readexactly(len(ok(b"abcd"))) == ok(b"abcd")
        connection.check(connection.since + 9.9)
        assert not connection.transport.is_closing()
        connection.check(connection.since + 10.1)
        assert connection.transport.is_closing()
        writer.close()

    run(scenario, settings)


def test_an_answer_that_nobody_takes_is_counted_and_ends_its_connection() -> None:
    settings = SETTINGS.model_copy(update={"transfer_timeout_s": 10.0})

    async def scenario(served: Served) -> None:
        _, writer, connection = await served.open()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(get(b"/endless"))
        await until(lambda: connection.writable)
        held = served.budget.held
        assert held >= len(LARGE) and connection.is_busy
        connection.check(100.0)
        connection.check(109.9)
        assert not connection.transport.is_closing()
        assert not served.budget.take(1 << 40, lambda: None)  # a worker waits for room
        connection.check(100.0 + SHORT_S - 0.1)
        assert not connection.transport.is_closing()
        connection.check(100.0 + SHORT_S + 0.1)
        assert connection.transport.is_closing()
        await until(lambda: not served.listener.connections)
        assert served.app.cycles[0].is_left()
        writer.close()

    served = run(scenario, settings)
    (line,) = served.log
    assert (line.status, line.target) == (200, "/endless") and line.size >= len(LARGE)


def test_a_client_that_reads_again_goes_on_where_it_was() -> None:
    async def scenario(served: Served) -> None:
        reader, writer, connection = await served.open()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(get(b"/endless"))
        await until(lambda: connection.writable)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        seen = len(await reader.readexactly(1 << 20))
        await until(lambda: connection.written > seen)
        writer.close()
        await until(lambda: not served.listener.connections)
        assert served.budget.held == 0

    run(scenario)


def test_bodies_together_have_a_limit() -> None:
    size = UNCOUNTED_BYTES + 1
    budget = AnswerBudget(body_limit=2 * size)

    async def scenario(served: Served) -> None:
        writers = []
        for _ in range(2):
            _, writer, connection = await served.open()
            writer.write(get(b"/e", b"content-length: 90000\r\n", b"POST") + b"x" * size)
            await settle(connection)
            writers.append(writer)
        assert budget.bodies == 2 * size and len(served.listener.connections) == 2
        small = post(b"/e", b"y" * UNCOUNTED_BYTES)
        answer = ok(b"POST /e " + b"y" * UNCOUNTED_BYTES)
        assert await served.exchange([small], len(answer)) == answer  # too small to count
        large = post(b"/e", b"y" * size)
        assert await served.exchange([large], 1) == refused(b"Unavailable")
        for writer in writers:
            writer.close()
        await until(lambda: not served.listener.connections)
        assert budget.bodies == 0

    run(scenario, budget=budget)


def test_requests_behind_one_that_takes_its_time_wait_and_so_does_a_refusal() -> None:
    async def scenario(served: Served) -> None:
        reader, writer, connection = await served.open()
        writer.write(get(b"/wait") + get(b"/e"))
        await settle(connection)
        writer.write(get(b"/f"))  # read only once it is its turn
        await settle(connection)
        assert [cycle.path for cycle in served.app.cycles] == ["/wait"]
        assert connection.is_busy and not connection.is_idle and served.listener.busy_count == 1
        served.app.go.set()
        expected = ok(b"waited") + ok(b"GET /e ") + ok(b"GET /f ")
        assert await reader.readexactly(len(expected)) == expected
        assert connection.is_idle and served.listener.busy_count == 0
        served.app.go.clear()
        writer.write(get(b"/wait"))
        await settle(connection)
        writer.write(b"nonsense\r\n\r\n")
        await settle(connection)
        served.app.go.set()
        async with asyncio.timeout(20):
            assert await reader.read() == ok(b"waited") + refused(b"BadMessage")
        writer.close()

    run(scenario)


def test_a_client_that_is_held_back_is_read_again_when_it_is_released() -> None:
    async def scenario(served: Served) -> None:
        reader, writer, connection = await served.open()
        writer.write(get(b"/busy") + get(b"/e"))
        async with asyncio.timeout(20):
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(ok(b"GET /e "))) == ok(b"GET /e ")
        connection.release()  # once more: nothing happens
        connection.check(connection.since + SETTINGS.keep_alive_s + 1)
        assert connection.transport.is_closing()
        connection.release()  # too late: nothing happens
        writer.close()

    served = run(scenario)
    assert served.app.were_idle == [False]


def test_each_answer_has_a_line() -> None:
    async def scenario(served: Served) -> None:
        answer = ok(b"GET /e?a=b ") + ok(b"")
        await served.exchange([get(b"/e?a=b") + get(b"/%63hunks") + b"nonsense\r\n\r\n"], 10**6)
        await served.exchange([post(b"/e", b"x" * 100_000) + b"y", b""], len(answer))
        await served.exchange(chunked(b"186a1\r\n" + b"x" * 100_001), 10**6)
        _, writer, _ = await served.open()
        writer.write(get(b"/wait"))
        await until(lambda: served.listener.busy_count)
        writer.close()
        await until(lambda: not served.listener.connections)

    served = run(scenario)
    lines = [(each.method, each.target, each.status, each.size) for each in served.log]
    assert lines == [
        ("GET", "/e?a=b", 200, 11), ("GET", "/%63hunks", 200, 6), ("POST", "/e", 200, 100_008),
        ("POST", "/e", 400, 12), ("GET", "/wait", LEFT, 0),
    ]  # fmt: skip
    assert all(each.seconds >= 0 for each in served.log)


def test_what_lay_in_the_kernel_has_waited() -> None:
    waited: list[float] = []

    class Watched(Answers):
        def accept(self, cycle: RequestResponseCycle) -> None:
            waited.append(cycle.connection.waited_s)
            super().accept(cycle)

    async def scenario(served: Served) -> None:
        served.listener.app = Watched()
        address = served.listener.address
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(get(b"/e"))
        time.sleep(0.1)  # the loop has no time for it
        await reader.readexactly(len(ok(b"GET /e ")))
        writer.write(get(b"/e"))
        await reader.readexactly(len(ok(b"GET /e ")))
        writer.close()

    run(scenario)
    assert 0.05 < waited[0] < 10 and 0 <= waited[1] < waited[0]


def test_an_address_has_one_line_a_second_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(served: Served) -> None:
        for _ in range(20):
            assert await served.exchange([b"no HTTP\r\n\r\n"], 1)
        served.listener._noted = {host: (0.0, n) for host, (_, n) in served.listener._noted.items()}
        await served.exchange([b"no HTTP\r\n\r\n"], 1)

    run(scenario)
    lines = [record.getMessage() for record in caplog.records if "refused, 400" in record.message]
    assert 2 <= len(lines) < 8, "20 refusals take half a second"
    assert re.search(r"; \d+ more lines about 127\.0\.0\.1 were left out$", lines[-1])


def test_requests_that_wait_on_one_connection_are_not_all_of_one_turn() -> None:
    """Nobody else has a turn while a connection's 60 requests are begun, if each takes its time."""
    began: list[str] = []

    async def scenario(served: Served) -> None:
        accept = served.app.accept

        def slowly(cycle: RequestResponseCycle) -> None:
            began.append(cycle.path)
            until = time.thread_time() + 0.001
            while time.thread_time() < until:
                pass
            accept(cycle)

        served.app.accept = slowly  # type: ignore[method-assign]
        _, many, _ = await served.open()
        _, one, _ = await served.open()
        many.write(get(b"/e") * 60)
        one.write(get(b"/other"))
        await until(lambda: len(began) == 61)
        many.close()
        one.close()
        await until(lambda: not served.listener.connections)

    run(scenario)
    assert began.index("/other") < 30


def test_what_one_connection_sent_is_not_all_of_one_turn() -> None:
    """A turn has a millisecond: 250 KB of heads of 900 fields take 50."""
    head = get(b"/e", b"a: b\r\n" * 900)
    order: list[str] = []

    async def scenario(served: Served) -> None:
        accept = served.app.accept

        def note(cycle: RequestResponseCycle) -> None:
            order.append(cycle.path)
            accept(cycle)

        served.app.accept = note  # type: ignore[method-assign]
        reader, many, _ = await served.open()
        _, one, _ = await served.open()
        many.write(head * 40)
        await asyncio.sleep(0)
        one.write(get(b"/other"))
        await until(lambda: len(order) == 41)
        assert await reader.readexactly(40 * len(ok(b"GET /e "))) == ok(b"GET /e ") * 40
        many.close()
        one.close()
        await until(lambda: not served.listener.connections)

    run(scenario)
    assert order.index("/other") < 30


def test_tasks_of_many_clients_begin_in_as_many_turns() -> None:
    """Sixteen clients that ask for a description of 2 ms would hold the loop for all of it."""
    found: list[int] = []

    async def scenario(served: Served) -> None:
        loop = asyncio.get_running_loop()

        def count() -> None:
            served.app.turns += 1
            loop.call_soon(count)

        opened = [await served.open() for _ in range(8)]
        count()
        for _, writer, _ in opened:
            writer.write(get(b"/turn"))
        for reader, writer, _ in opened:
            found.append(int((await reader.readexactly(47))[-9:]))
            writer.close()

    run(scenario)
    assert len(set(found)) == 8, found
