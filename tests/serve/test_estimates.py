"""What a pool expects of its workers, and what a client says of its time; no process is started."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic, sleep

import pytest

from modelyard.serve.dataplane.batcher import Batcher
from modelyard.serve.dataplane.call import EXPLAIN, NORMAL, PREDICT, Call
from modelyard.serve.dataplane.metrics import Metrics, VersionMetrics
from modelyard.serve.dataplane.pool import Pool, ReplicaSlot, begins_in_s
from modelyard.serve.dataplane.worker import Worker, WorkerPlan, WorkerPolicy
from modelyard.serve.errors import BadRequest
from modelyard.serve.front.begin import parse_timeout, read_terms
from tests.serve.test_batcher import RUN


@pytest.mark.parametrize(
    ("work_s", "rests", "begins_s"),
    [
        (0.0, [], 0.0),
        (3.0, [], 3.0),
        (0.0, [2.0], 2.0),
        (3.0, [2.0], 5.0),
        (0.0, [5.0, 1.0], 1.0),
        (2.0, [5.0, 1.0], 3.0),
        (4.0, [5.0, 1.0], 5.0),
        (6.0, [5.0, 1.0], 6.0),
        (6.0, [0.0, 0.0, 0.0], 2.0),
        (1.0, [9.0, 0.0, 0.5], 0.75),
    ],
)
def test_work_goes_to_whoever_is_idle_first(
    work_s: float, rests: list[float], begins_s: float
) -> None:
    assert begins_in_s(work_s, rests) == begins_s


class Model:
    """A model version, as far as a call looks at it."""

    batchers: tuple[Batcher, ...] = ()
    request_timeout_s = 60.0


class Slots:
    """A pool whose workers hold what a test says, without processes."""

    def __init__(self, workers: int) -> None:
        metrics = VersionMetrics(Metrics(), "m", "1")
        plan = WorkerPlan("m 1", {}, Path("unused"), RUN, 1 << 20)
        self.pool = Pool(plan, metrics, WorkerPolicy())
        for number in range(workers):
            slot = ReplicaSlot(number, worker=Worker(self.pool, number, number))
            assert slot.worker is not None
            slot.worker.is_ready = True
            self.pool.slots.append(slot)

    def hold(self, at: int, jobs: int, for_s: float, kind: int = PREDICT, running: int = 8) -> None:
        """Let a worker have held jobs for some time."""
        worker = self.pool.workers[at]
        future = asyncio.get_running_loop().create_future()
        job = Call(Model(), kind, b"", future)
        for _ in range(jobs):
            worker.flight[len(worker.flight) + 1] = job
        worker.held[kind] += jobs
        worker.running = min(running, len(worker.flight))
        worker.began_at = self.pool.clock.read(monotonic()) - for_s


def in_loop(scenario: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            await scenario()

        asyncio.run(main())

    run.__name__ = scenario.__name__
    return run


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=0.05)


@in_loop
async def test_nothing_is_expected_before_anything_was_measured() -> None:
    slots = Slots(1)
    slots.hold(0, 16, 0)
    assert slots.pool.expected_s(PREDICT, 100) == 0
    assert slots.pool.batch_s(PREDICT) == slots.pool.job_s(PREDICT) == 0


@in_loop
async def test_a_job_waits_for_what_is_held_and_queued_and_for_its_own_batch() -> None:
    slots = Slots(1)
    slots.pool.measured(PREDICT, 8, 0.8)
    slots.hold(0, 16, for_s=0.3)
    assert slots.pool.expected_s(PREDICT, 0) == near(0.5 + 0.8 + 0.8)
    assert slots.pool.expected_s(PREDICT, 10) == near(0.5 + 0.8 + 1.0 + 0.8)


@in_loop
async def test_a_server_that_reads_late_gives_a_worker_no_less_ahead() -> None:
    slots = Slots(1)
    (worker,) = slots.pool.workers
    for _ in range(100):  # a millisecond each, and four until the answers were read
        slots.pool.measured(PREDICT, 8, 0.004, 0.001)
    worker._replied_at = monotonic()
    assert slots.pool.job_s(PREDICT) == pytest.approx(0.0005), "what clients have to expect"
    assert worker.capacity(PREDICT) == 64, "8 ms of work, and no less than two batches"


@in_loop
async def test_a_batch_that_overruns_is_expected_to_do_so_by_as_much_again() -> None:
    slots = Slots(1)
    slots.pool.measured(PREDICT, 8, 0.8)
    slots.hold(0, 16, for_s=1.0)
    assert slots.pool.workers[0].rest_s(monotonic()) == near(0.2 + 0.8)


@in_loop
async def test_an_idle_worker_waits_for_a_job_whatever_was_measured() -> None:
    slots = Slots(2)
    slots.pool.measured(PREDICT, 1, 100.0)
    slots.hold(0, 1, for_s=0)
    assert slots.pool.expected_s(PREDICT, 0) == 0
    assert slots.pool.expected_s(PREDICT, 1) == near(200)


@in_loop
async def test_a_worker_that_hangs_holds_up_only_what_it_holds() -> None:
    slots = Slots(2)
    slots.pool.measured(PREDICT, 1, 0.1)
    slots.hold(0, 1, for_s=50)
    slots.hold(1, 1, for_s=0)
    assert slots.pool.expected_s(PREDICT, 3) == near(0.1 + 0.3 + 0.1)


@in_loop
async def test_a_batch_that_overruns_is_expected_to_overrun_by_as_much_again() -> None:
    slots = Slots(1)
    slots.pool.measured(PREDICT, 1, 0.1)
    slots.hold(0, 1, for_s=2.1)
    assert slots.pool.expected_s(PREDICT, 0) == near(2.0 + 0.1)


@in_loop
async def test_of_a_time_in_which_the_server_stood_still_half_a_second_counts() -> None:
    slots = Slots(1)
    await slots.pool.scale(1, 0)  # it sweeps from now on
    slots.pool.measured(PREDICT, 1, 0.1)
    slots.hold(0, 1, for_s=0)
    sleep(2)
    assert 0.4 < slots.pool.expected_s(PREDICT, 0) < 1
    await asyncio.sleep(0.01)  # it has swept
    assert 0.4 < slots.pool.expected_s(PREDICT, 0) < 1
    await asyncio.sleep(0.3)
    assert 0.7 < slots.pool.expected_s(PREDICT, 0) < 1.3


@in_loop
async def test_explanations_before_a_prediction_count_what_they_cost() -> None:
    slots = Slots(1)
    slots.pool.measured(PREDICT, 1, 0.1)
    slots.pool.measured(EXPLAIN, 2, 4.0)
    slots.hold(0, 3, for_s=0, kind=EXPLAIN, running=3)
    assert slots.pool.expected_s(PREDICT, 0) == near(6.1)


@in_loop
async def test_while_no_worker_is_ready_the_queue_counts_as_one_workers() -> None:
    slots = Slots(1)
    slots.pool.measured(PREDICT, 2, 1.0)
    slots.pool.workers[0].is_ready = False
    assert slots.pool.expected_s(PREDICT, 4) == near(3.0)


@in_loop
async def test_an_old_cost_is_forgotten_within_tens_of_batches() -> None:
    pool = Slots(1).pool
    pool.measured(PREDICT, 1, 100.0)
    for _ in range(120):
        pool.measured(PREDICT, 4, 0.004)
    assert pool.batch_s(PREDICT) == pytest.approx(0.004, abs=1e-3)
    assert pool.job_s(PREDICT) == pytest.approx(0.001, rel=0.3)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"2", 2),
        (b"0.5", 0.5),
        (b".25", 0.25),
        (b"2s", 2),
        (b"1.5s", 1.5),
        (b"150ms", 0.15),
        (b"0.5ms", 0.0005),
        (b"86400", 86400),
    ],
)
def test_a_time_is_seconds_or_has_a_unit(value: bytes, seconds: float) -> None:
    assert parse_timeout(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value",
    [b"", b"0", b"0.0ms", b"-1", b"+1", b"nan", b"inf", b"1e3", b"1 s", b"1m", b"1.", b"1,5", b"s",
     b"86400.1", b"9" * 400, b"0x10", b"\xff1", "١".encode()],
)  # fmt: skip
def test_what_is_no_time_is_refused_and_said(value: bytes) -> None:
    with pytest.raises(BadRequest, match="expected are seconds such as"):
        parse_timeout(value)


def test_without_the_header_there_is_no_limit_and_of_several_the_shortest_counts() -> None:
    assert read_terms([(b"host", b"x")]) == (math.inf, NORMAL)
    several = [(b"x-request-timeout", b"2"), (b"x-request-timeout", b"500ms")]
    assert read_terms(several) == (0.5, NORMAL)
