"""Whose turn it is: classes of requests, their shares, and deadlines within a class."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from modelyard.serve.dataplane.batcher import Batcher
from modelyard.serve.dataplane.call import HIGH, LOW, NORMAL, PREDICT, Call, Reply
from modelyard.serve.dataplane.metrics import Metrics, VersionMetrics
from modelyard.serve.dataplane.poison import Poison
from modelyard.serve.dataplane.queue import HURRIED_S, SHARES, Classes, Line
from modelyard.serve.errors import DeadlinePassed, QueueFull, TooLate
from tests.serve.test_batcher import RUN


class Sink:
    """What became of a call."""

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self.error: Exception | None = None
        self.is_cancelled = False

    def done(self) -> bool:
        return self.is_cancelled or self.reply is not None or self.error is not None

    def set_result(self, reply: Reply) -> None:
        self.reply = reply

    def set_exception(self, error: Exception) -> None:
        self.error = error

    def cancel(self) -> bool:
        self.is_cancelled = True
        return True


class Model:
    """A model version, as far as a call looks at it."""

    batchers: tuple[Batcher, ...] = ()
    request_timeout_s = 1e9


def job(
    priority: int = NORMAL,
    timeout_s: float = 60,
    now: float = 0.0,
    rows: int = 1,
    has_left: bool = False,
    must_fit: bool = True,
) -> Call:
    call = Call(
        Model(), PREDICT, b"", Sink(), timeout_s, lambda: has_left, must_fit=must_fit,
        priority=priority,
    )  # fmt: skip
    call.rows = rows
    call.arrived([b"x" * max(rows, 20)], now)
    return call


PER_S = 100.0
"""Rows that the one server of this file serves."""


def classes(jobs: Iterable[Call] = (), shares: tuple[int, ...] = SHARES) -> Classes:
    queue = Classes(shares, Line(), lambda: PER_S)
    for each in jobs:
        queue.append(each)
    return queue


def taken(queue: Classes, rows: int) -> list[int]:
    """Return the classes of the jobs that are taken next, each as often as it has rows."""
    found: list[int] = []
    while len(found) < rows:
        peeked = queue[0]
        assert queue.popleft() is peeked
        found += [peeked.priority] * peeked.rows
    return found


def test_each_class_has_its_share_while_it_waits() -> None:
    queue = classes(job(priority) for priority in (LOW, NORMAL, HIGH) for _ in range(300))
    for _ in range(5):
        assert taken(queue, 21) == [HIGH] * 16 + [NORMAL] * 4 + [LOW]


def test_what_one_class_does_not_use_goes_to_the_others() -> None:
    queue = classes(job(priority) for priority in (LOW, NORMAL) for _ in range(100))
    assert Counter(taken(queue, 100)) == {NORMAL: 80, LOW: 20}
    assert taken(queue, 100)[-70:] == [LOW] * 70
    assert not queue and queue.rows == 0


def test_a_request_of_many_rows_is_paid_back() -> None:
    queue = classes([job(LOW, rows=50), *(job(HIGH) for _ in range(900)), job(LOW)])
    order = taken(queue, 16 + 50 + 50 * 16 + 1)
    assert order[16:66] == [LOW] * 50
    assert LOW not in order[66:-1] and order[-1] == LOW


def test_who_was_alone_owes_nothing_and_has_saved_nothing() -> None:
    queue = classes(job(LOW) for _ in range(200))
    taken(queue, 150)
    for _ in range(40):
        queue.append(job(HIGH))
    order = taken(queue, 42)
    assert Counter(order) == {HIGH: 40, LOW: 2}
    assert order[0] == HIGH


def test_a_high_request_goes_first_though_a_round_of_others_has_begun() -> None:
    queue = classes([job(NORMAL) for _ in range(50)] + [job(LOW) for _ in range(50)])
    taken(queue, 2)
    queue.append(job(HIGH))
    assert queue.popleft().priority == HIGH


def test_within_a_class_the_nearest_deadline_is_first() -> None:
    line = Line()
    for now, timeout_s in ((0.0, 60), (0.1, 2), (0.2, 1), (0.3, 2), (0.4, 30), (4.9, 0.2)):
        line.append(job(timeout_s=timeout_s, now=now))
    order = [(each.queued_at, each.timeout_s) for each in line]
    assert order == [(0.2, 1), (0.1, 2), (0.3, 2), (0.0, 60), (4.9, 0.2), (0.4, 30)]
    assert line.rows == 6


def test_nobody_is_overtaken_for_longer_than_so_long() -> None:
    line = Line()
    line.append(job(timeout_s=3600, now=0.0))
    for step in range(200):
        line.append(job(timeout_s=0.5, now=step / 10))
    place = [each.timeout_s for each in line].index(3600)
    assert line[place - 1].queued_at < HURRIED_S - 0.5 <= line[place + 1].queued_at


@pytest.mark.parametrize(
    ("loads", "own"),
    [((0.7, 0.0, 0.0), LOW), ((0.4, 0.3, 0.0), LOW), ((1.5, 0.0, 0.0), LOW),
     ((0.6, 0.0, 0.9), NORMAL), ((0.0, 0.5, 1.5), HIGH)],
    ids=str,
)  # fmt: skip
def test_what_is_expected_before_a_job_comes_true(loads: tuple[float, ...], own: int) -> None:
    """One server of 100 rows/s, the others' jobs as they come, twenty of the class at once."""
    draws, queue, per_s, end_s = random.Random(19), classes(), PER_S, 120.0
    arrivals = sorted(
        (draws.uniform(0, end_s), priority)
        for priority, load in enumerate(loads)
        for _ in range(int(load * per_s * end_s))
    )
    queue.append(job(own, now=0.0))
    found: list[float] = []
    marked: list[tuple[Call, int, int]] = []
    served, at = 0, 0
    while at < len(arrivals) or queue:
        now = served / per_s
        while at < len(arrivals) and arrivals[at][0] <= now:
            if queue.held(arrivals[at][1], 2) < 150:
                queue.append(job(arrivals[at][1], now=now))
            at += 1
        if served % 300 == 299 and not queue.held(own, 2):
            for _ in range(20):
                queue.append(job(own, now=now))
            last = job(own, now=now)
            marked.append((last, served, queue.rows_before(own, now, 60, 1)))
            queue.append(last)
        served += 1
        if queue:
            done = queue.popleft()
            for last, since, expected in marked:
                if last is done:
                    found.append(expected / (served - 1 - since))
    assert len(found) >= 4
    assert 0.8 < sum(found) / len(found) < 1.25, found


# -- the batcher with classes ------------------------------------------------------------------


class Replica:
    """Takes jobs as long as it has room."""

    def __init__(self) -> None:
        self.free = 0
        self.batches: list[list[Call]] = []

    def capacity(self, kind: int) -> int:
        return self.free

    def rest_s(self, now: float) -> float:
        return 0.0

    def run(self, jobs: list[Call]) -> None:
        self.free = 0
        self.batches.append(jobs)


class Engine:
    """One replica; a row takes it `cost_s`."""

    ready_count, idle_count, why_none = 1, 0, None

    def __init__(self, cost_s: float = 0.0) -> None:
        self.cost_s = cost_s
        self.replica = Replica()

    def pick(self, kind: int) -> Replica | None:
        return self.replica if self.replica.free > 0 else None

    poison = Poison()

    def handed_over(self) -> int:
        return 0

    def batch_s(self, kind: int) -> float:
        return self.cost_s

    def job_s(self, kind: int) -> float:
        return self.cost_s

    def expected_s(self, kind: int, queued: int) -> float:
        return (queued + 1) * self.cost_s


def batcher(engine: Engine, **options: Any) -> Batcher:
    kind = VersionMetrics(Metrics(), "m", "1").kinds[PREDICT]
    own = {name: options.pop(name) for name in ("call_bytes", "shares") if name in options}
    return Batcher(engine, PREDICT, kind, replace(RUN, **options), **own)


def waiting(priority: int, timeout_s: float = 60, rows: int = 1, **more: bool) -> Call:
    return job(priority, timeout_s, monotonic(), rows, **more)


def in_loop(scenario: object) -> None:
    async def run() -> None:
        scenario()  # type: ignore[operator]

    asyncio.run(run())


def test_high_requests_are_not_refused_for_low_ones() -> None:
    def scenario() -> None:
        found = batcher(Engine(cost_s=0.1), queue_size=50)
        for _ in range(50):
            found.submit(waiting(LOW))
        with pytest.raises(QueueFull, match="50 requests wait"):
            found.submit(waiting(LOW))
        found.submit(waiting(HIGH, timeout_s=0.5))
        found.submit(waiting(NORMAL, timeout_s=4))
        assert found.queued_by_class == (1, 1, 50)
        assert found.remaining == 49

    in_loop(scenario)


def test_a_low_request_is_refused_that_high_ones_would_keep_waiting() -> None:
    def scenario() -> None:
        found = batcher(Engine(cost_s=0.1))
        for _ in range(20):
            found.submit(waiting(HIGH, timeout_s=9, must_fit=False))
        found.submit(waiting(LOW, timeout_s=3))  # in the first round
        with pytest.raises(TooLate):
            found.submit(waiting(LOW, timeout_s=3))  # behind all twenty
        found.submit(waiting(HIGH, timeout_s=4))

    in_loop(scenario)


def test_batches_are_filled_from_all_classes_in_their_turn() -> None:
    def scenario() -> None:
        engine = Engine()
        found = batcher(engine, shares=(2, 1, 1))
        for priority in (LOW, LOW, LOW, NORMAL, HIGH, HIGH, HIGH):
            found.submit(waiting(priority))
        engine.replica.free = 6
        found.pump()
        (jobs,) = engine.replica.batches
        assert [each.priority for each in jobs] == [HIGH, HIGH, NORMAL, LOW, HIGH, LOW]
        assert found.queued == 1

    in_loop(scenario)


def test_jobs_of_like_length_are_found_in_all_classes() -> None:
    def scenario() -> None:
        engine = Engine()
        found = batcher(engine, call_bytes=24)
        for priority in (LOW, LOW, HIGH):
            found.submit(waiting(priority))
        found.submit(waiting(HIGH, rows=90))
        engine.replica.free = 8
        found.pump()
        (jobs,) = engine.replica.batches
        assert [each.priority for each in jobs] == [HIGH, LOW, LOW]
        assert found.queued_by_class == (90, 0, 0)

    in_loop(scenario)


def test_what_is_late_or_left_goes_from_every_class() -> None:
    def scenario() -> None:
        found = batcher(Engine())
        late = [waiting(priority, timeout_s=1) for priority in (HIGH, NORMAL, LOW)]
        left = [waiting(priority, has_left=True) for priority in (HIGH, NORMAL, LOW)]
        kept = [waiting(priority) for priority in (HIGH, NORMAL, LOW)]
        for each in (*late, *left, *kept):
            found.submit(each)
        found.sweep(monotonic() + 2)
        assert all(isinstance(each.sink.error, DeadlinePassed) for each in late)  # type: ignore[attr-defined]
        assert all(each.sink.is_cancelled for each in left)  # type: ignore[attr-defined]
        assert found.queued_by_class == (1, 1, 1)
        found.fail(QueueFull("gone", 1))
        assert all(isinstance(each.sink.error, QueueFull) for each in kept)  # type: ignore[attr-defined]
        assert found.queued == 0

    in_loop(scenario)


def test_a_batch_delay_counts_for_every_class() -> None:
    def scenario() -> None:
        engine = Engine()
        found = batcher(engine, batch_delay_ms=10_000, batch_size=3)
        engine.replica.free = 8
        for count, priority in enumerate((LOW, HIGH), 1):
            found.submit(waiting(priority))
            found.pump()
            assert found.queued == count
        found.submit(waiting(NORMAL))
        found.pump()
        assert [each.priority for each in engine.replica.batches[0]] == [HIGH, NORMAL, LOW]

    in_loop(scenario)


class MovingSink(Sink):
    """The sink of a client that named no version."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Call | None = None

    def move(self, call: Call) -> bool:
        self.moved = call
        return True


def test_a_call_that_is_moved_keeps_its_place_and_is_not_refused_for_lack_of_time() -> None:
    """It was accepted once; that another version would be late is not its client's affair."""
    sink, put = MovingSink(), list[Call]()

    class Other(Model):
        batchers: Any = (SimpleNamespace(put=put.append),)

    call = job(LOW, timeout_s=5, now=3.0, rows=7, must_fit=True)
    call.sink = sink
    assert call.hand_to(Other())
    (moved,) = put
    assert sink.moved is moved and not moved.must_fit
    for name in ("priority", "deadline", "queued_at", "rows", "parts", "head", "kind"):
        assert getattr(moved, name) == getattr(call, name), name
    call.sink.set_result(Reply(200, b"", b"of the version that goes"))
    assert sink.reply is None
