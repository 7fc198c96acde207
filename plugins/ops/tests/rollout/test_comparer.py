"""Answers are compared in a process beside the server, which may die or be behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import orjson
import psutil
import pytest

from modelyard.plugins.ops.rollout import comparer as module
from modelyard.plugins.ops.rollout.comparer import (
    Comparer,
    Comparison,
    NotCompared,
    Tolerance,
    Verdict,
)
from modelyard.serve.dataplane.call import Reply

JSON = b"content-type\0application/json"
Ask = Callable[[Reply, Reply], Awaitable[Comparison | NotCompared]]


def said(value: object) -> Reply:
    return Reply(200, JSON, orjson.dumps(value))


LARGE = [at / 7 for at in range(2000)]


def processes() -> list[psutil.Process]:
    """Return those that compare; other tests leave children of their own."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if module.PROCESS in child.cmdline():
                found.append(child)
    return found


@asynccontextmanager
async def comparing() -> AsyncIterator[tuple[Comparer, Ask]]:
    comparer = Comparer()

    async def ask(live: Reply, candidate: Reply) -> Comparison | NotCompared:
        found: asyncio.Future[Comparison | NotCompared] = asyncio.get_running_loop().create_future()
        comparer.compare(live, candidate, Tolerance(), found.set_result)
        return await found

    try:
        yield comparer, ask
    finally:
        await comparer.stop()
        assert not processes()


def test_the_same_bytes_are_equal_at_once_and_others_go_to_a_process_that_lives_on() -> None:
    async def trip() -> None:
        async with comparing() as (comparer, ask):
            found: list[Comparison | NotCompared] = []
            comparer.compare(said([1.0, 2.0]), said([1.0, 2.0]), Tolerance(), found.append)
            failed = Reply(500, b"", b"no")
            comparer.compare(said([1.0, 2.0]), failed, Tolerance(), found.append)
            assert [each.verdict for each in found if isinstance(each, Comparison)] == [
                Verdict.EQUAL, Verdict.CANDIDATE_FAILED
            ]  # fmt: skip
            assert not processes()

            near = await ask(said(LARGE), said([each * (1 + 1e-6) for each in LARGE]))
            assert isinstance(near, Comparison)
            assert near.verdict is Verdict.WITHIN_TOLERANCE
            (process,) = processes()
            assert process.nice() == module.NICENESS
            other = await ask(said(LARGE), said([*LARGE[:-1], None]))
            assert other == Comparison(
                Verdict.DIFFERS,
                False,
                f"answer[1999]: expected {LARGE[-1]}, got None",
                float("inf"),
            )
            assert processes() == [process]

    asyncio.run(trip())


def test_a_process_that_dies_is_replaced_and_a_slow_one_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def trip() -> None:
        async with comparing() as (_, ask):
            other = [each + 1 for each in LARGE]
            await ask(said(LARGE), said(other))
            (process,) = processes()
            os.kill(process.pid, signal.SIGSTOP)
            monkeypatch.setattr(module, "LONGEST_S", 0.2)
            slow = await ask(said(LARGE), said(other))
            assert isinstance(slow, NotCompared)
            assert str(slow) == "comparing slow"
            monkeypatch.undo()
            assert isinstance(await ask(said(LARGE), said(other)), Comparison)
            (process,) = processes()
            process.kill()
            dead = await ask(said(LARGE), said(other))
            assert isinstance(dead, NotCompared)
            assert str(dead) == "comparing failed"
            assert isinstance(await ask(said(LARGE), said(other)), Comparison)

    asyncio.run(trip())


def test_pairs_that_come_together_are_compared_together_each_by_its_tolerance() -> None:
    async def trip() -> None:
        async with comparing() as (comparer, _):
            found: dict[int, Comparison | NotCompared] = {}
            ended = asyncio.Event()

            def done(number: int, comparison: Comparison | NotCompared) -> None:
                found[number] = comparison
                if number == 1:
                    raise RuntimeError("whoever waits for another one is told all the same")
                if len(found) == 600:
                    ended.set()

            for number in range(600):
                tolerance = Tolerance(scaled=1e-6 if number % 2 else 1e-2)
                live, other = said([0.5]), said([0.5 + 1e-4])
                comparer.compare(live, other, tolerance, partial(done, number))
            assert not found
            async with asyncio.timeout(20):
                await ended.wait()
            verdicts = [each.verdict for number, each in sorted(found.items())
                        if isinstance(each, Comparison) and number >= 20]  # fmt: skip
            assert verdicts == [Verdict.WITHIN_TOLERANCE, Verdict.DIFFERS] * 290

    asyncio.run(trip())


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def trip() -> None:
        async with comparing() as (comparer, _):
            large, body = said(LARGE), orjson.dumps(LARGE)
            monkeypatch.setattr(module, "MOST_WAITING_BYTES", 3 * len(body))
            found: list[Comparison | NotCompared] = []
            for change in (1, 2):
                other = large._replace(body=body + b" " * change)
                comparer.compare(large, other, Tolerance(), found.append)
            assert [str(each) for each in found] == ["comparing is behind"]
            monkeypatch.setattr(module, "MOST_BYTES", 100)
            comparer.compare(large, large._replace(body=b" "), Tolerance(), found.append)
            assert str(found[-1]) == "too large"

    asyncio.run(trip())
