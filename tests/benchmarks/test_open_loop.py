"""The open-loop generator against a server of this file, whose answers are known."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.open_loop import (
    GeneratorFailed,
    Percentiles,
    Phase,
    Report,
    compiled,
    count_outcomes,
    has_compiler,
    run,
    schedule,
)
from benchmarks.open_loop import Outcome as Request

pytestmark = pytest.mark.nightly

HEAD, CHUNKS = b"HTTP/1.1 200 OK\r\n%b\r\n\r\n", b"2\r\nok\r\n0\r\n\r\n"
Answer = Callable[[int], Awaitable[bytes | None]]
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="there is no C compiler")


def response(status: int, header: str = "") -> bytes:
    return f"HTTP/1.1 {status} Some\r\n{header}Content-Length: 2\r\n\r\nok".encode()


async def load(
    answer: Answer,
    phases: list[Phase],
    closed: int | None = None,
    body: bytes = b"body",
    **options: Any,
) -> Report:
    """Send a load to a server that answers its n-th request as told, or hangs up for None."""
    seen = 0
    deadline_s = None if closed or "limit_s" in options else 0.25

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                received = await reader.readexactly(len(body))
            except (asyncio.IncompleteReadError, ConnectionResetError):
                break
            assert head.startswith(b"POST /predictions/m HTTP/1.1\r\n")
            assert (b"X-Request-Timeout: 0.25\r\n" in head) == (deadline_s is not None)
            assert (b"Connection: close\r\n" in head) == options.get("is_fresh", False)
            assert received == body
            seen += 1
            said = await answer(seen)
            if said is None:
                break
            # In two pieces, as a network may deliver it.
            writer.write(said[:20])
            await asyncio.sleep(0)
            writer.write(said[20:])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/predictions/m"
    options = {"connections": 8, **options}
    found = await run(url, body, phases, deadline_s, 7, closed, **options)
    server.close()
    assert sum(figures.offered - figures.unsent for figures in found.phases) == seen
    return found


async def answer_well(number: int) -> bytes:
    return response(200)


@needs_compiler
def test_every_request_is_in_one_count() -> None:
    async def answer(number: int) -> bytes | None:
        if number % 5 == 1:
            return response(503, "Retry-After: 1\r\n")
        if number % 5 == 2:
            return response(503)
        if number % 5 == 3:
            return response(504)
        return None if number % 5 == 4 else response(200)

    (figures,) = asyncio.run(load(answer, [Phase(500, 0.5)])).phases
    counts = (figures.good + figures.late, figures.refused, figures.expired, figures.failed)
    assert sum(counts) == figures.offered > 150
    assert counts == pytest.approx([share * figures.offered / 5 for share in (1, 2, 1, 1)], abs=2)
    assert figures.refused_without_retry_after == pytest.approx(figures.refused / 2, abs=1)
    assert set(figures.statuses) == {"0", "200", "503", "504"}


@needs_compiler
def test_a_slow_server_does_not_slow_the_load_and_waiting_counts() -> None:
    gate = asyncio.Event()

    async def answer(number: int) -> bytes:
        if number == 1:
            asyncio.get_running_loop().call_later(1.0, gate.set)
        await gate.wait()
        return response(200)

    (figures,) = asyncio.run(load(answer, [Phase(600, 0.5)])).phases
    expected = sum(1 for _ in schedule([Phase(600, 0.5)], random.Random(7)))
    assert figures.offered == expected
    assert figures.late == figures.offered
    assert figures.answered_ms.p50 > 400


@needs_compiler
def test_phases_are_counted_apart() -> None:
    phases = [Phase(400, 0.2), Phase(100, 0.4)]
    first, second = asyncio.run(load(answer_well, phases)).phases
    times = list(schedule(phases, random.Random(7)))
    assert first.offered == sum(phase == 0 for phase, _ in times)
    assert second.offered == sum(phase == 1 for phase, _ in times)


@needs_compiler
def test_a_closed_loop_asks_again_when_it_is_answered() -> None:
    async def answer(number: int) -> bytes:
        await asyncio.sleep(0.01)
        return response(200)

    (figures,) = asyncio.run(load(answer, [Phase(0, 0.5)], closed=4)).phases
    assert figures.good == figures.offered > 8
    assert 0 < figures.good_after <= 4
    assert figures.goodput == (figures.good - figures.good_after) / 0.5


@needs_compiler
def test_each_request_may_have_a_connection_of_its_own() -> None:
    connections = 0

    async def answer(number: int) -> bytes:
        nonlocal connections
        connections += 1
        return response(200, "Connection: close\r\n")

    report = asyncio.run(load(answer, [Phase(0, 0.3)], closed=3, is_fresh=True))
    (figures,) = report.phases
    assert figures.good == figures.offered == connections > 8
    assert report.connections == 3


@needs_compiler
def test_what_is_due_while_every_client_waits_is_not_sent() -> None:
    async def answer(number: int) -> bytes:
        await asyncio.sleep(0.05)
        return response(200)

    report = asyncio.run(load(answer, [Phase(200, 0.5)], connections=1, most_connections=2))
    (figures,) = report.phases
    assert report.connections == 2
    assert figures.good + figures.late + figures.unsent == figures.offered
    assert figures.unsent > figures.offered // 2  # 40 a second of 200 can be answered
    assert figures.answered_ms.p50 < 100  # nobody waits before the request is sent


@needs_compiler
@pytest.mark.parametrize(
    ("said", "good"),
    [
        pytest.param(HEAD % b"Content-Length: 2000" + 2000 * b"7", True, id="of some length"),
        pytest.param(HEAD % b"Content-Length: 1000000" + 1_000_000 * b"7", True, id="long"),
        pytest.param(HEAD % b"Transfer-Encoding: chunked" + CHUNKS, True, id="in chunks"),
        pytest.param(HEAD % b"Content-Length: 1" + b"ok", False, id="too long"),
        pytest.param(HEAD % b"Server: x" + b"ok", False, id="of no length"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2 Debian-2\r\n\r\n", False, id="not HTTP"),
        pytest.param((HEAD % b"X: ")[:-4] + 5000 * b"x", False, id="a head without an end"),
    ],
)
def test_what_cannot_be_read_has_failed(said: bytes, good: bool) -> None:
    async def answer(number: int) -> bytes:
        return said

    (figures,) = asyncio.run(load(answer, [Phase(200, 0.2)])).phases
    assert (figures.good, figures.failed) == (
        (figures.offered, 0) if good else (0, figures.offered)
    )


@needs_compiler
@pytest.mark.parametrize("value", ["soon", "0", "-1", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_retry_after_that_is_not_a_number_of_seconds_is_none(value: str) -> None:
    async def answer(number: int) -> bytes:
        return response(503, f"Retry-After: {value}\r\n")

    (figures,) = asyncio.run(load(answer, [Phase(200, 0.2)])).phases
    assert figures.refused_without_retry_after == figures.refused == figures.offered


@needs_compiler
def test_a_limit_is_not_sent_and_divides_good_from_late() -> None:
    async def answer(number: int) -> bytes:
        await asyncio.sleep(0.15 if number % 2 else 0)
        return response(200)

    (figures,) = asyncio.run(load(answer, [Phase(100, 0.4)], limit_s=0.14)).phases
    assert figures.late >= figures.offered // 2
    assert figures.good + figures.late == figures.offered


@needs_compiler
def test_bodies_that_no_socket_takes_at_once_arrive() -> None:
    big = 1_000_000 * b"body"
    (figures,) = asyncio.run(load(answer_well, [Phase(0, 0.3)], closed=2, body=big)).phases
    assert figures.good == figures.offered > 0


@needs_compiler
def test_a_server_that_is_not_there_is_said() -> None:
    with pytest.raises(GeneratorFailed, match="cannot connect"):
        asyncio.run(run("http://127.0.0.1:9/x", b"", [Phase(10, 0.1)]))


def test_without_a_compiler_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(GeneratorFailed, match=r"no compiler no-such-compiler; install .* gcc"):
        compiled()
    assert not list(tmp_path.iterdir())


def test_the_same_seed_gives_the_same_schedule_at_the_rate_that_was_asked_for() -> None:
    phases = [Phase(1000, 2.0), Phase(50, 2.0)]
    one, again = (list(schedule(phases, random.Random(1))) for _ in range(2))
    assert one == again
    assert one != list(schedule(phases, random.Random(2)))
    dues = [due for _, due in one]
    assert dues == sorted(dues)
    assert all(0 < due < 2 for phase, due in one if phase == 0)
    assert sum(phase == 0 for phase, _ in one) == pytest.approx(2000, rel=0.1)
    assert sum(phase == 1 for phase, _ in one) == pytest.approx(100, rel=0.4)


def test_the_deadline_divides_good_from_late_and_the_last_bad_one_is_told() -> None:
    outcomes = [
        Request(1.0, 1.0, 1.1, 200, -1),
        Request(2.0, 2.1, 2.3, 200, -1),
        Request(3.0, 3.0, 3.001, 503, 1),
        Request(4.0, 4.0, 4.2, 200, -1),
    ]
    figures = count_outcomes(outcomes, 4.0, 0.25, began=0.5)
    assert (figures.good, figures.late, figures.refused) == (2, 1, 1)
    assert figures.last_not_good_s == 2.5
    assert figures.lateness_ms.max == pytest.approx(100)
    assert figures.goodput == 0.5


def test_percentiles_of_nothing_are_zero() -> None:
    assert Percentiles.of([]) == Percentiles(0, 0, 0)
    assert Percentiles.of([0.001 * at for at in range(100)]) == Percentiles(50, 99, 99)
