"""The open-loop generator against a server of this file, whose answers are known."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from benchmarks.open_loop import Figures, Percentiles, Phase, count_outcomes, run, schedule
from benchmarks.open_loop import Outcome as Request

Answer = Callable[[int], Awaitable[bytes | None]]


def response(status: int, header: str = "") -> bytes:
    return f"HTTP/1.1 {status} Some\r\n{header}Content-Length: 2\r\n\r\nok".encode()


async def load(answer: Answer, phases: list[Phase], closed: int | None = None) -> list[Figures]:
    """Send a load to a server that answers its n-th request as told, or hangs up for None."""
    seen = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(4)
            except asyncio.IncompleteReadError:
                break
            assert head.startswith(b"POST /predictions/m HTTP/1.1\r\n")
            assert closed or b"X-Request-Timeout: 0.25\r\n" in head
            assert body == b"body"
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
    found = await run(url, b"body", phases, None if closed else 0.25, 7, closed)
    server.close()
    assert sum(figures.offered for figures in found) == seen
    return found


def test_every_request_is_in_one_count() -> None:
    async def answer(number: int) -> bytes | None:
        if number % 5 == 1:
            return response(503, "Retry-After: 1\r\n")
        if number % 5 == 2:
            return response(503)
        if number % 5 == 3:
            return response(504)
        return None if number % 5 == 4 else response(200)

    (figures,) = asyncio.run(load(answer, [Phase(500, 0.5)]))
    counts = (figures.good + figures.late, figures.refused, figures.expired, figures.failed)
    assert sum(counts) == figures.offered > 150
    assert counts == pytest.approx([share * figures.offered / 5 for share in (1, 2, 1, 1)], abs=2)
    assert figures.refused_without_retry_after == pytest.approx(figures.refused / 2, abs=1)
    assert set(figures.statuses) == {"0", "200", "503", "504"}


def test_a_slow_server_does_not_slow_the_load_and_waiting_counts() -> None:
    gate = asyncio.Event()

    async def answer(number: int) -> bytes:
        if number == 1:
            asyncio.get_running_loop().call_later(1.0, gate.set)
        await gate.wait()
        return response(200)

    (figures,) = asyncio.run(load(answer, [Phase(600, 0.5)]))
    expected = sum(1 for _ in schedule([Phase(600, 0.5)], random.Random(7), 0))
    assert figures.offered == expected
    assert figures.late == figures.offered
    assert figures.answered_ms.p50 > 400


def test_phases_are_counted_apart() -> None:
    async def answer(number: int) -> bytes:
        return response(200)

    first, second = asyncio.run(load(answer, [Phase(400, 0.2), Phase(100, 0.4)]))
    times = list(schedule([Phase(400, 0.2), Phase(100, 0.4)], random.Random(7), 0))
    assert first.offered == sum(phase == 0 for phase, _ in times)
    assert second.offered == sum(phase == 1 for phase, _ in times)


def test_a_closed_loop_asks_again_when_it_is_answered() -> None:
    async def answer(number: int) -> bytes:
        await asyncio.sleep(0.01)
        return response(200)

    (figures,) = asyncio.run(load(answer, [Phase(0, 0.5)], closed=4))
    assert figures.good == figures.offered > 8
    assert figures.goodput == figures.good / 0.5


def test_the_same_seed_gives_the_same_schedule_at_the_rate_that_was_asked_for() -> None:
    phases = [Phase(1000, 2.0), Phase(50, 2.0)]
    one, again = (list(schedule(phases, random.Random(1), 10.0)) for _ in range(2))
    assert one == again
    assert one != list(schedule(phases, random.Random(2), 10.0))
    dues = [due for _, due in one]
    assert dues == sorted(dues)
    assert all(10 < due < 12 for phase, due in one if phase == 0)
    assert sum(phase == 0 for phase, _ in one) == pytest.approx(2000, rel=0.1)
    assert sum(phase == 1 for phase, _ in one) == pytest.approx(100, rel=0.4)


def test_the_deadline_divides_good_from_late_and_the_last_bad_one_is_told() -> None:
    outcomes = [
        Request(0, 1.0, 1.0, 1.1, 200, False),
        Request(0, 2.0, 2.1, 2.3, 200, False),
        Request(0, 3.0, 3.0, 3.001, 503, True),
        Request(0, 4.0, 4.0, 4.2, 200, False),
    ]
    figures = count_outcomes(outcomes, 4.0, 0.25, began=0.5)
    assert (figures.good, figures.late, figures.refused) == (2, 1, 1)
    assert figures.last_not_good_s == 2.5
    assert figures.lateness_ms.max == pytest.approx(100)
    assert figures.goodput == 0.5


def test_percentiles_of_nothing_are_zero() -> None:
    assert Percentiles.of([]) == Percentiles(0, 0, 0)
    assert Percentiles.of([0.001 * at for at in range(100)]) == Percentiles(50, 99, 99)
