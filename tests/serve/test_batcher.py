"""The batcher against an engine of this file, which holds its jobs until the test answers them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from modelyard.serve.dataplane.batcher import LOOK_AGAIN_S, LOOKED_AT, Batcher
from modelyard.serve.dataplane.call import PREDICT, Call, HasLeft, Reply
from modelyard.serve.dataplane.metrics import Metrics, VersionMetrics
from modelyard.serve.dataplane.poison import Poison
from modelyard.serve.dataplane.worker import RunConfig
from modelyard.serve.errors import DeadlinePassed, Draining, QueueFull, TooLate, Unavailable
from tests.serve.collectors import value_of

Scenario = Callable[[], Awaitable[None]]


class Replica:
    """Takes jobs as long as it has room."""

    def __init__(self, room: int) -> None:
        self.free = room
        self.busy_s = 0.0
        self.batches: list[list[int]] = []

    def capacity(self, kind: int) -> int:
        return self.free

    def rest_s(self, now: float) -> float:
        return self.busy_s

    def run(self, jobs: list[Call]) -> None:
        self.free -= len(jobs)
        self.batches.append([number(job) for job in jobs])
        for job in jobs:
            job.sink.set_result(Reply(200, b"", job.head))


class Engine:
    """Hands out its replicas, the one with most room first."""

    def __init__(self, *rooms: int) -> None:
        self.replicas = [Replica(room) for room in rooms]
        self.why_none: str | None = None
        self.idle_count = 0
        self.cost_s = 0.0

    @property
    def ready_count(self) -> int:
        return len(self.replicas)

    def pick(self, kind: int) -> Replica | None:
        able = [replica for replica in self.replicas if replica.free > 0]
        return max(able, key=lambda replica: replica.free, default=None)

    poison = Poison()

    def handed_over(self) -> int:
        return 0

    def batch_s(self, kind: int) -> float:
        return self.cost_s

    def job_s(self, kind: int) -> float:
        return self.cost_s

    def expected_s(self, kind: int, queued: int) -> float:
        return 0.0 if queued < self.idle_count else (queued + 1) * self.cost_s


class Model:
    """A model version, as far as a call looks at it."""

    batchers: tuple[Batcher, ...] = ()
    request_timeout_s = math.inf


RUN = RunConfig(
    batch_size=8, batch_delay_ms=0, queue_size=100, startup_timeout_s=60, response_timeout_s=60,
    retry=True,
)  # fmt: skip


def make(engine: Engine, metrics: Metrics | None = None, **options: Any) -> Batcher:
    own = {name: options.pop(name) for name in ("call_bytes", "shares") if name in options}
    kind = VersionMetrics(metrics or Metrics(), "m", "1").kinds[PREDICT]
    return Batcher(engine, PREDICT, kind, replace(RUN, **options), **own)


def job(
    at: int,
    timeout_s: float = 60,
    has_left: HasLeft | None = None,
    age_s: float = 0,
    must_fit: bool = True,
    length: int = 0,
    rows: int = 1,
) -> Call:
    future = asyncio.get_running_loop().create_future()
    parts = [b"x" * (length // 2), b"x" * (length - length // 2)]
    call = Call(Model(), PREDICT, b"%d" % at, future, timeout_s, has_left, must_fit=must_fit)
    call.rows = rows
    call.arrived(parts, monotonic() - age_s)
    return call


def submit(batcher: Batcher, job: Call) -> asyncio.Future[Reply]:
    batcher.submit(job)
    assert isinstance(job.sink, asyncio.Future)
    return job.sink


def gone() -> bool:
    return True


def there() -> bool:
    return False


def refusals(metrics: Metrics, reason: str) -> float | None:
    labels = {"model": "m", "version": "1", "kind": "predict", "reason": reason}
    return value_of(metrics, "modelyard_refused_requests_total", labels) or 0


def number(one: Call) -> int:
    return int(one.head)


async def turn() -> None:
    """Let the loop run what is due."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_jobs_that_arrive_together_go_out_together_and_in_order() -> None:
    async def scenario() -> None:
        engine = Engine(16)
        batcher = make(engine)
        futures = [submit(batcher, job(at)) for at in range(5)]
        assert batcher.waiting == 5
        await turn()
        assert engine.replicas[0].batches == [[0, 1, 2, 3, 4]]
        assert [(await future).body for future in futures] == [b"%d" % at for at in range(5)]
        assert batcher.waiting == 0

    asyncio.run(scenario())


def test_a_replica_gets_no_more_than_it_has_room_for() -> None:
    async def scenario() -> None:
        engine = Engine(3)
        batcher = make(engine)
        for at in range(5):
            submit(batcher, job(at))
        await turn()
        assert engine.replicas[0].batches == [[0, 1, 2]]
        assert batcher.waiting == 2
        engine.replicas[0].free = 8
        batcher.pump()
        assert engine.replicas[0].batches == [[0, 1, 2], [3, 4]]

    asyncio.run(scenario())


def test_idle_replicas_share_what_waits() -> None:
    async def scenario() -> None:
        engine = Engine(16, 16)
        batcher = make(engine)
        for at in range(8):
            submit(batcher, job(at))
        await turn()
        assert [sum(map(len, replica.batches)) for replica in engine.replicas] == [4, 4]

    asyncio.run(scenario())


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.cost_s = 1.5
        batcher = make(engine, queue_size=2)
        for at in range(2):
            submit(batcher, job(at))
        with pytest.raises(QueueFull, match="2 requests wait") as caught:
            submit(batcher, job(2))
        assert caught.value.retry_after_s == 3
        assert batcher.remaining == 0
        assert batcher.waiting == 2

    asyncio.run(scenario())


def test_the_wait_after_a_refusal_is_at_least_a_second() -> None:
    async def scenario() -> None:
        batcher = make(Engine(), queue_size=1)
        submit(batcher, job(0))
        with pytest.raises(QueueFull) as caught:
            submit(batcher, job(1))
        assert caught.value.retry_after_s == 1

    asyncio.run(scenario())


def test_without_hope_of_a_replica_a_job_is_refused_at_once() -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.why_none = "m 1 has no workers; scale it up"
        with pytest.raises(Unavailable, match="scale it up") as caught:
            submit(make(engine), job(0))
        assert caught.value.retry_after_s == 5

    asyncio.run(scenario())


def test_a_job_whose_deadline_passes_in_the_queue_is_answered_by_the_sweep() -> None:
    async def scenario() -> None:
        batcher = make(Engine())
        late, later = submit(batcher, job(0, timeout_s=5)), submit(batcher, job(1, timeout_s=50))
        batcher.sweep(monotonic() + 10)
        with pytest.raises(DeadlinePassed):
            await late
        assert not later.done()
        assert batcher.waiting == 1

    asyncio.run(scenario())


def test_a_job_over_its_deadline_is_never_handed_over() -> None:
    async def scenario() -> None:
        engine = Engine(8)
        batcher = make(engine)
        late, good = submit(batcher, job(0, timeout_s=1, age_s=2)), submit(batcher, job(1))
        await turn()
        with pytest.raises(DeadlinePassed):
            await late
        await good
        assert engine.replicas[0].batches == [[1]]

    asyncio.run(scenario())


def test_a_client_that_has_left_is_not_handed_over() -> None:
    async def scenario() -> None:
        engine = Engine(8)
        batcher = make(engine)
        left = submit(batcher, job(0, has_left=gone, age_s=1))
        submit(batcher, job(1, has_left=there, age_s=1))
        await turn()
        assert left.cancelled()
        assert engine.replicas[0].batches == [[1]]

    asyncio.run(scenario())


def test_an_answered_job_is_not_handed_over_again() -> None:
    async def scenario() -> None:
        engine = Engine(8)
        batcher = make(engine)
        submit(batcher, job(0)).cancel()
        submit(batcher, job(1))
        await turn()
        assert engine.replicas[0].batches == [[1]]

    asyncio.run(scenario())


def test_a_batch_delay_gathers_jobs_and_is_counted_from_the_first() -> None:
    async def scenario() -> None:
        engine = Engine(16)
        batcher = make(engine, batch_delay_ms=200, batch_size=8)
        first = submit(batcher, job(0))
        await turn()
        assert batcher.waiting == 1
        submit(batcher, job(1))
        await asyncio.wait_for(first, 10)
        assert engine.replicas[0].batches == [[0, 1]]

    asyncio.run(scenario())


def test_a_full_batch_does_not_wait_for_its_delay() -> None:
    async def scenario() -> None:
        engine = Engine(16)
        batcher = make(engine, batch_delay_ms=3600000, batch_size=2)
        for at in range(2):
            submit(batcher, job(at))
        await turn()
        assert engine.replicas[0].batches == [[0, 1]]

    asyncio.run(scenario())


def test_a_burst_is_gathered_and_what_follows_it_goes_at_once() -> None:
    async def scenario() -> None:
        engine = Engine(16)
        batcher = make(engine, batch_delay_ms=3600000, batch_size=2, gathers_bursts=True)
        submit(batcher, job(0))
        await turn()
        assert batcher.waiting == 1
        submit(batcher, job(1))
        await turn()
        submit(batcher, job(2))
        await turn()
        assert engine.replicas[0].batches == [[0, 1], [2]]

    asyncio.run(scenario())


def test_once_a_burst_was_awaited_in_vain_no_job_waits() -> None:
    async def scenario() -> None:
        engine = Engine(16)
        batcher = make(engine, batch_delay_ms=100, batch_size=8, gathers_bursts=True)
        await asyncio.wait_for(submit(batcher, job(0)), 10)
        await asyncio.sleep(0.15)
        submit(batcher, job(1))
        await turn()
        assert engine.replicas[0].batches == [[0], [1]]

    asyncio.run(scenario())


def test_what_waits_can_be_answered_with_an_error() -> None:
    async def scenario() -> None:
        batcher = make(Engine())
        futures = [submit(batcher, job(at)) for at in range(3)]
        batcher.fail(Draining("going"))
        for future in futures:
            with pytest.raises(Draining):
                await future
        assert batcher.waiting == 0

    asyncio.run(scenario())


def test_the_time_in_the_queue_is_measured_for_what_was_handed_over() -> None:
    async def scenario() -> None:
        metrics = Metrics()
        kind = VersionMetrics(metrics, "m", "1").kinds[PREDICT]
        batcher = Batcher(Engine(8), PREDICT, kind, replace(RUN, queue_size=9))
        submit(batcher, job(0, age_s=2))
        submit(batcher, job(1))
        assert value(metrics, "modelyard_queue_length") == 2
        await turn()
        assert value(metrics, "modelyard_queue_length") == 0
        assert value(metrics, "modelyard_queue_time_seconds_count") == 2
        assert value(metrics, "modelyard_queue_time_seconds_sum") >= 2

    def value(metrics: Metrics, name: str) -> float:
        labels = {"model": "m", "version": "1", "kind": "predict"}
        found = value_of(metrics, name, labels)
        assert found is not None
        return found

    asyncio.run(scenario())


def test_where_a_ticket_is_needed_a_job_is_taken_only_for_an_idle_replica() -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.idle_count = 1
        batcher = make(engine, needs_ticket=True)
        submit(batcher, job(0))
        with pytest.raises(QueueFull, match="no worker is idle"):
            submit(batcher, job(1))
        assert batcher.waiting == 1

    asyncio.run(scenario())


# -- jobs that would be answered too late ------------------------------------------------------


def test_a_job_whose_answer_is_expected_too_late_is_refused_at_once() -> None:
    async def scenario() -> None:
        metrics, engine = Metrics(), Engine()
        engine.cost_s = 1.0
        batcher = make(engine, metrics)
        for at in range(5):
            submit(batcher, job(at, timeout_s=4, must_fit=False))
        with pytest.raises(TooLate, match="within the request's 4 s") as caught:
            submit(batcher, job(5, timeout_s=4))
        assert caught.value.retry_after_s == 3
        assert batcher.waiting == 5
        submit(batcher, job(6, timeout_s=9))
        assert (refusals(metrics, "deadline"), refusals(metrics, "full")) == (1, 0)

    asyncio.run(scenario())


def test_a_job_with_much_time_is_refused_too_when_that_is_not_enough() -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.cost_s = 10.0
        batcher = make(engine)
        accepted = 0
        with pytest.raises(TooLate):
            while accepted < 100:
                submit(batcher, job(accepted, timeout_s=100))
                accepted += 1
        assert accepted == 7

    asyncio.run(scenario())


def test_where_jobs_wait_too_long_fewer_are_let_in_until_they_do_not() -> None:
    async def scenario() -> None:
        engine = Engine(0)
        engine.cost_s = 1.0
        batcher = make(engine)

        def let_in() -> int:
            with pytest.raises(TooLate):
                for at in range(100):
                    submit(batcher, job(at, timeout_s=40))
            return len(batcher.withdraw())

        def begin(age_s: float, must_fit: bool = True) -> None:
            batcher.put(job(0, timeout_s=40, age_s=age_s, must_fit=must_fit))
            engine.replicas[0].free = 1
            batcher.pump()
            assert not batcher.waiting
            batcher.sweep(monotonic())

        assert let_in() == 30
        begin(29)
        assert let_in() == 30  # it has waited less than could be expected
        begin(31, must_fit=False)
        assert let_in() == 30  # it may wait for as long as it likes
        begin(31)
        assert let_in() == 20
        batcher.put(job(0, timeout_s=40, age_s=41))
        batcher.sweep(monotonic())  # it was never begun
        assert let_in() == 14
        for _ in range(9):
            begin(31)
        assert let_in() == 10
        for _ in range(300):
            batcher.sweep(monotonic())
        assert let_in() == 30

    asyncio.run(scenario())


def test_less_than_the_next_batch_takes_is_short() -> None:
    async def scenario() -> None:
        batcher = make(Engine(0), batch_size=4)
        for at in range(5):
            assert batcher.is_short is (at < 4)
            submit(batcher, job(at))

    asyncio.run(scenario())


def test_of_an_unknown_cost_nothing_is_expected() -> None:
    async def scenario() -> None:
        batcher = make(Engine())
        for at in range(50):
            submit(batcher, job(at, timeout_s=0.5))
        assert batcher.waiting == 50

    asyncio.run(scenario())


def test_a_job_that_need_not_fit_waits_until_its_deadline() -> None:
    async def scenario() -> None:
        engine = Engine(4)
        engine.cost_s = 60.0
        batcher = make(engine)
        for at in range(3):
            submit(batcher, job(at, timeout_s=1, must_fit=False))
        await turn()
        assert engine.replicas[0].batches == [[0, 1, 2]]


# -- batches of like length ----------------------------------------------------------------------

MIXED = [20, 400, 22, 25, 410, 900, 18, 390]


def test_jobs_of_like_length_go_out_together_the_oldest_always_among_them() -> None:
    async def scenario() -> None:
        engine = Engine(3)
        batcher = make(engine, call_bytes=48)
        for at, length in enumerate(MIXED):
            submit(batcher, job(at, length=length))
        await turn()
        for _ in range(3):
            engine.replicas[0].free = 3
            batcher.pump()
        assert engine.replicas[0].batches == [[0, 2, 6], [1, 4, 7], [3], [5]]
        assert batcher.waiting == 0

    asyncio.run(scenario())


def test_what_can_no_longer_be_answered_in_time_is_not_handed_over() -> None:
    async def scenario() -> None:
        metrics, engine = Metrics(), Engine(0)
        batcher = make(engine, metrics)
        tight, roomy = submit(batcher, job(0, timeout_s=3)), submit(batcher, job(1, timeout_s=50))
        engine.cost_s = 2.0
        engine.replicas[0].busy_s = 2.0
        engine.replicas[0].free = 8
        batcher.pump()
        with pytest.raises(TooLate):
            await tight
        await roomy
        assert engine.replicas[0].batches == [[1]]
        assert refusals(metrics, "deadline") == 1

    asyncio.run(scenario())


def test_of_an_unknown_cost_a_busy_replica_takes_all() -> None:
    async def scenario() -> None:
        engine = Engine(8)
        engine.replicas[0].busy_s = 100.0
        batcher = make(engine)
        await submit(batcher, job(0, timeout_s=1))
        assert engine.replicas[0].batches == [[0]]

    asyncio.run(scenario())


def test_an_idle_replica_takes_one_job_however_late_it_is_expected() -> None:
    async def scenario() -> None:
        engine = Engine(8)
        engine.idle_count = 1
        batcher = make(engine)
        first, second = submit(batcher, job(0, timeout_s=1)), submit(batcher, job(1, timeout_s=1))
        engine.cost_s = 100.0
        await turn()
        await first
        with pytest.raises(TooLate):
            await second
        assert engine.replicas[0].batches == [[0]]
        submit(batcher, job(2, timeout_s=1))
        await turn()
        assert engine.replicas[0].batches == [[0], [2]]

    asyncio.run(scenario())


def test_who_sends_many_rows_keeps_no_other_client_out() -> None:
    async def scenario() -> None:
        batcher = make(Engine(), queue_size=3)
        submit(batcher, job(0, rows=100, length=100))  # nothing waits: one of any number
        with pytest.raises(QueueFull):
            submit(batcher, job(1, rows=2, length=2))
        for at in (2, 3):
            submit(batcher, job(at))
        with pytest.raises(QueueFull):  # three requests wait
            submit(batcher, job(4))
        assert batcher.waiting == 102

    asyncio.run(scenario())


def test_a_full_queue_is_counted_as_such() -> None:
    async def scenario() -> None:
        metrics = Metrics()
        batcher = make(Engine(), metrics, queue_size=1)
        submit(batcher, job(0))
        with pytest.raises(QueueFull):
            submit(batcher, job(1))
        assert (refusals(metrics, "deadline"), refusals(metrics, "full")) == (0, 1)

    asyncio.run(scenario())


def test_a_deadline_behind_a_longer_one_is_seen_by_the_sweep() -> None:
    async def scenario() -> None:
        batcher = make(Engine())
        futures = [submit(batcher, job(at, timeout_s=time)) for at, time in enumerate((50, 5, 40))]
        batcher.sweep(monotonic() + 10)
        assert [future.done() for future in futures] == [False, True, False]
        with pytest.raises(DeadlinePassed):
            await futures[1]
        assert batcher.waiting == 2

    asyncio.run(scenario())


def test_a_batch_gathers_no_longer_than_half_of_the_time_of_any_of_its_jobs() -> None:
    async def scenario() -> None:
        engine = Engine(16)
        batcher = make(engine, batch_delay_ms=3600000, batch_size=8)
        first, second = submit(batcher, job(0)), submit(batcher, job(1, timeout_s=1.0))
        await turn()
        assert batcher.waiting == 2
        await asyncio.wait_for(asyncio.gather(first, second), 10)
        assert engine.replicas[0].batches == [[0, 1]]


def test_an_idle_replica_gets_all_that_waits_at_once_whatever_the_lengths() -> None:
    async def scenario() -> None:
        engine = Engine(16)
        batcher = make(engine, call_bytes=48)
        for at, length in enumerate(MIXED):
            submit(batcher, job(at, length=length))
        await turn()
        assert engine.replicas[0].batches == [[0, 2, 3, 6], [1, 4, 7], [5]]

    asyncio.run(scenario())


# -- clients that have left --------------------------------------------------------------------


def test_clients_that_have_left_do_not_fill_the_queue() -> None:
    async def scenario() -> None:
        batcher = make(Engine(), queue_size=4)
        left = [submit(batcher, job(at, has_left=gone)) for at in range(3)]
        stays = submit(batcher, job(3, has_left=there))
        submit(batcher, job(4, has_left=there))
        assert all(future.cancelled() for future in left)
        assert not stays.done()
        assert batcher.waiting == 2

    asyncio.run(scenario())


def test_clients_that_have_left_do_not_make_others_late() -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.cost_s = 1.0
        batcher = make(engine)
        for at in range(30):
            submit(batcher, job(at, timeout_s=4, has_left=gone, must_fit=False))
        submit(batcher, job(30, timeout_s=4, has_left=there))
        assert batcher.waiting == 1

    asyncio.run(scenario())


def test_a_flood_of_refusals_looks_for_those_who_left_only_now_and_then() -> None:
    async def scenario() -> None:
        looks = 0

        def counted() -> bool:
            nonlocal looks
            looks += 1
            return there()

        batcher = make(Engine(), queue_size=100)
        began = monotonic()
        for at in range(100):
            submit(batcher, job(at, has_left=counted))
        for at in range(1000):
            with pytest.raises(QueueFull):
                submit(batcher, job(at))
        assert looks <= 100 * (1 + (monotonic() - began) / LOOK_AGAIN_S)
        assert looks < 100 * 1000

    asyncio.run(scenario())


def test_the_sweep_drops_those_who_left_and_keeps_the_order_of_the_others() -> None:
    async def scenario() -> None:
        engine = Engine(0)
        batcher = make(engine, queue_size=2000)
        count = 3 * LOOKED_AT + 100
        futures = [
            submit(batcher, job(at, has_left=gone if at % 3 else there)) for at in range(count)
        ]
        now = monotonic()
        for sweep in range(1, 6):
            batcher.sweep(now + sweep)
        stay = [at for at in range(count) if not at % 3]
        assert [at for at, future in enumerate(futures) if not future.cancelled()] == stay
        engine.replicas[0].free = count
        batcher.pump()
        assert engine.replicas[0].batches == [stay]


def test_who_has_left_or_is_late_gets_no_company_and_gives_none() -> None:
    async def scenario() -> None:
        engine = Engine()
        batcher = make(engine, call_bytes=48)
        jobs = [job(at, length=length, timeout_s=at or 0) for at, length in enumerate(MIXED)]
        futures = [submit(batcher, one) for one in jobs]
        await turn()
        futures[1].cancel()
        futures[3].cancel()
        engine.replicas.append(Replica(2))
        batcher.pump()
        assert engine.replicas[0].batches == [[2], [4]], "0 is late, 1 and 3 have left"
        with pytest.raises(DeadlinePassed):
            await futures[0]

    asyncio.run(scenario())


def test_a_request_of_several_rows_counts_as_so_many() -> None:
    async def scenario() -> None:
        engine = Engine(0)
        batcher = make(engine, queue_size=10)
        futures = [submit(batcher, job(0, rows=12, length=12))]  # nothing waits
        assert (batcher.waiting, batcher.remaining) == (12, 9)
        with pytest.raises(QueueFull):
            submit(batcher, job(1, rows=2, length=2))
        engine.replicas[0].free = 8
        batcher.pump()  # longer than a batch: by itself
        assert engine.replicas[0].batches == [[0]]
        engine.replicas[0].free = 0
        futures += [submit(batcher, job(at, rows=3, length=3)) for at in (2, 3, 4)]
        assert (batcher.queued, batcher.remaining) == (9, 7)
        with pytest.raises(QueueFull):
            submit(batcher, job(5, rows=2, length=2))
        futures.append(submit(batcher, job(6)))
        engine.replicas[0].free = 7
        batcher.pump()
        assert engine.replicas[0].batches[1] == [2, 3]
        batcher.fail(Draining("stops"))
        assert batcher.queued == 0
        for future in futures:
            await asyncio.wait([future])

    asyncio.run(scenario())


def test_the_time_of_all_rows_is_expected() -> None:
    async def scenario() -> None:
        engine = Engine(0)
        engine.cost_s = 0.1
        batcher = make(engine)
        submit(batcher, job(0, timeout_s=1))
        with pytest.raises(TooLate):
            submit(batcher, job(1, timeout_s=1, rows=8, length=8))

    asyncio.run(scenario())


def test_a_body_has_no_more_rows_than_bytes() -> None:
    async def scenario() -> None:
        assert job(0, rows=0xFFFF, length=100).rows == 100
        assert job(0, rows=0xFFFF).rows == 1

    asyncio.run(scenario())
