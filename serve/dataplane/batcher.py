"""Jobs of one model version and one kind → batches.

Batching is work-conserving: what waits goes out as soon as a replica has room for it, and a replica
has room for two batches, the one it runs and the one it runs next. Only a batch delay above 0 makes
a job wait for company: every job, or only the first ones of a burst.

Nothing waits in vain: a job is refused at once when its answer is not to be expected in time, and
leaves the queue when its client does.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from time import monotonic

from modelyard.serve.dataplane.call import NORMAL, Call
from modelyard.serve.dataplane.lengths import NEIGHBOURS, choose_alike
from modelyard.serve.dataplane.metrics import Histogram, KindMetrics
from modelyard.serve.dataplane.queue import SHARES, Admission, Classes, Engine, Line, Replica
from modelyard.serve.dataplane.worker import RunConfig
from modelyard.serve.errors import DeadlinePassed, QueueFull, TooLate, Unavailable

POLL_AFTER_S = 0.005
"""A job that waited longer is checked for a client that has left before it is handed over."""
BURST_GAP_S = 0.05
"""Longest gap from one job of a burst to the next: above what clients that start together need,
however busy their machine is."""
LOOKED_AT = 256
"""Jobs of a class whose clients are looked at in one go, half a millisecond of work."""
LOOK_AGAIN_S = 0.02
"""Time from one look to the next, so that a flood of refusals costs little."""


@dataclass(eq=False)
class Batcher:
    """The queue of one model version and kind. Lives on the event loop.

    What is counted is rows: a request of several is as many as it has.

    With `gathers_bursts` only a burst waits for company, the first after at least the delay without
    work; once that was in vain no job of this queue waits again.
    """

    engine: Engine
    kind: int
    metrics: KindMetrics
    run: RunConfig
    call_bytes: int | None = None
    """Value of `lengths.CALL_BYTES`, for batches of like length; None takes jobs in order."""
    shares: Sequence[int] = SHARES
    """Shares of the classes of requests, as `Classes` has them."""

    def __post_init__(self) -> None:
        self._delay_s = self.run.batch_delay_ms / 1000
        """How long a job may wait for company; 0 once that was in vain in a queue for bursts."""
        self.handed_over_at = -math.inf
        """Time of `time.monotonic()` when a replica got jobs last."""
        self._queue: Line | Classes = Line()
        """Classes are told apart as soon as a request says that it is of another than most."""
        self._class_metrics: Sequence[Histogram] = ()
        """Class → how long its requests waited."""
        self._loop = asyncio.get_running_loop()
        self._admission = Admission(self.engine, self.kind, self.run.batch_size)
        self._look_again_at = 0.0
        self.changes = 0
        """How often room was made: what was refused before may be taken since."""
        self._armed: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.metrics.watch("queue_length", lambda: self._queue.rows)

    @property
    def waiting(self) -> int:
        """Rows in the queue, those included that were handed over early."""
        return self._queue.rows + self.engine.handed_over()

    @property
    def queued(self) -> int:
        """Rows in the queue alone."""
        return self._queue.rows

    @property
    def is_short(self) -> bool:
        """Whether less waits than the next batch takes."""
        return self._queue.rows < self.run.batch_size

    @property
    def oldest_s(self) -> float:
        """How long the job has waited that waits longest; 0 while none does."""
        now = monotonic()
        return now - min((job.queued_at for job in self._queue), default=now)

    @property
    def remaining(self) -> int:
        """Requests of a row that the queue still takes of the class that most are of."""
        waiting = self._queue.held(NORMAL, 1) + self.engine.handed_over()
        return max(0, self.run.queue_size - waiting)

    @property
    def queued_by_class(self) -> tuple[int, ...]:
        """Rows in the queue, by class."""
        if isinstance(self._queue, Line):
            return 0, self._queue.rows, 0
        return tuple(line.rows for line in self._queue.lines)

    def submit(self, job: Call) -> None:
        """Queue a job.

        Raises:
            QueueFull, TooLate, Unavailable: of `check`.
        """
        self.check(job.timeout_s, job.must_fit, job.queued_at, rows=job.rows, priority=job.priority)
        self.put(job)

    def check(
        self,
        timeout_s: float,
        must_fit: bool,
        now: float,
        waited_s: float = 0.0,
        rows: int = 1,
        priority: int = NORMAL,
    ) -> None:
        """Refuse what could not be answered, were it queued now.

        Args:
            timeout_s: within which it must be answered.
            must_fit: `must_fit` of a `Call`.
            now: time of `time.monotonic()`.
            waited_s: how much of that time has passed.
            rows: rows of the job; an empty queue takes one of any number.
            priority: its class; each has as many places.

        Raises:
            QueueFull, TooLate: with the time after which it is likely to be taken.
            Unavailable: no replica will come up soon.
        """
        if priority != NORMAL and isinstance(self._queue, Line):
            self._tell_classes_apart(self._queue)
        if self._is_full(rows, priority):
            self._drop_left(now)
            if self._is_full(rows, priority):
                text = f"the queue is full ({self.run.queue_size} requests wait); try again later"
                self.metrics.refused_full.inc()
                raise QueueFull(text, self._wait_s(priority, now, timeout_s))
        if (reason := self.engine.why_none) is not None:
            raise Unavailable(reason, retry_after_s=5)
        if self.run.needs_ticket and self.engine.idle_count <= len(self._queue):
            self.metrics.refused_full.inc()
            text = "no worker is idle, and this model lets nobody wait"
            raise QueueFull(text, self._wait_s(priority, now, timeout_s))
        if not must_fit:
            return
        arrived_at = now - waited_s
        before = self._queue.rows_before(priority, arrived_at, timeout_s, rows)
        if (excess_s := self._admission.excess_s(timeout_s, before, waited_s)) > 0:
            if self._drop_left(now):
                before = self._queue.rows_before(priority, arrived_at, timeout_s, rows)
                excess_s = self._admission.excess_s(timeout_s, before, waited_s)
            if excess_s > 0:
                raise self._too_late(timeout_s, excess_s)

    def _is_full(self, rows: int, priority: int) -> bool:
        waiting = self._queue.held(priority, rows) + self.engine.handed_over()
        return waiting > 0 and waiting + rows > self.run.queue_size

    def _tell_classes_apart(self, normal: Line) -> None:
        self._queue = Classes(self.shares, normal, self._rows_per_s)
        self._class_metrics = self.metrics.watch_classes(lambda: self.queued_by_class)

    def _rows_per_s(self) -> float:
        """Return how many rows all replicas serve; infinite while that is unknown."""
        job_s = self.engine.job_s(self.kind)
        return max(1, self.engine.ready_count) / job_s if job_s else math.inf

    def put(self, job: Call) -> None:
        """Queue a job that `check` let pass just now, unless it is known to end workers."""
        if self.engine.poison and self.refuses(job):
            return
        self._queue.append(job)
        self.wake()

    def refuses(self, job: Call) -> bool:
        """Return whether a job, or its client, is known to end workers; it is answered then."""
        if (error := self.engine.poison.refusal(job)) is None:
            return False
        self.metrics.refused_poison.inc()
        job.fail(error)
        return True

    def wake(self) -> None:
        """Hand over what waits at the end of this turn of the loop.

        All requests that are read in it go out in one frame, and no client's that it saw leave.
        """
        if self._armed is None:
            self._armed = self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Hand over what waits while a replica has room."""
        if self._armed is not None:
            self._armed.cancel()
            self._armed = None
        while self._queue:
            if self._must_gather():
                return
            replica = self.engine.pick(self.kind)
            if replica is None:
                return
            share = math.ceil(self._queue.rows / max(1, self.engine.ready_count))
            if jobs := self._take(replica, min(replica.capacity(self.kind), share)):
                self.changes += 1
                replica.run(jobs)
                self.handed_over_at = jobs[0].taken_at

    def sweep(self, now: float) -> None:
        """Answer 504 to jobs whose deadline has passed, and drop those whose clients have left.

        Called a few times a second.
        """
        late: list[Call] = []

        def is_late(job: Call) -> bool:
            if job.deadline <= now:
                late.append(job)
            return job.deadline <= now

        self.changes += self._queue.sift(is_late)
        for job in late:
            self._admission.note(job, now - job.queued_at)
            job.fail(DeadlinePassed("the request waited longer than its time"))
        self._admission.look()
        self._drop_left(now)

    def fail(self, error: Exception) -> None:
        """Answer everything that waits with `error`."""
        while self._queue:
            self._queue.popleft().fail(error)

    def withdraw(self) -> list[Call]:
        """Take everything that waits."""
        jobs = []
        while self._queue:
            jobs.append(self._queue.popleft())
        return jobs

    def _take(self, replica: Replica, count: int) -> list[Call]:
        """Take up to `count` jobs, the oldest always among them."""
        if self.call_bytes is None:
            return self._take_from(self._queue, replica, count)
        jobs = self._take_from(self._queue, replica, 1)
        if jobs:
            alike = self._remove_alike(jobs[0], count, self.call_bytes)
            jobs += self._take_from(alike, replica, count)
        return jobs

    def _remove_alike(self, first: Call, size: int, call_bytes: int) -> Line:
        """Take out of the queue the jobs that run with `first`, in order."""
        seen = [first, *islice(self._queue, NEIGHBOURS)]
        places = choose_alike([sum(map(len, job.parts)) for job in seen], size, call_bytes)[1:]
        for place in reversed(places):
            self._queue.take(place - 1)
        return Line(seen[place] for place in places)

    def _take_from(self, queue: Line | Classes, replica: Replica, count: int) -> list[Call]:
        """Take the first jobs, of up to `count` rows, that still can and need be answered.

        One of more rows is taken by itself.

        An idle replica takes one whatever is expected of it, as in `Engine.expected_s`.
        """
        now = monotonic()
        jobs: list[Call] = []
        rows = 0
        rest_s = replica.rest_s(now)
        batch_s = self.engine.batch_s(self.kind)
        answered_at = now + rest_s + batch_s if batch_s else now
        while queue and (rows + queue[0].rows <= count or (count > 0 and not jobs)):
            job = queue.popleft()
            waited = now - job.queued_at
            if job.sink.done():
                continue
            self._admission.note(job, waited)
            if job.deadline <= now:
                job.fail(DeadlinePassed("the request waited longer than its time"))
                continue
            if waited > POLL_AFTER_S and job.drop_if_left():
                continue
            if job.deadline < answered_at and job.must_fit and (rest_s or jobs):
                job.fail(self._too_late(job.timeout_s, answered_at - job.deadline))
                continue
            job.taken_at = now
            self.metrics.queue_time.observe(waited)
            if self._class_metrics:
                self._class_metrics[job.priority].observe(waited)
            jobs.append(job)
            rows += job.rows
        return jobs

    def _must_gather(self) -> bool:
        """Return whether the first job still waits for company, and wake up when it has waited."""
        if not self._delay_s or self._queue.rows >= self.run.batch_size:
            return False
        gathers_bursts = self.run.gathers_bursts
        if gathers_bursts and self._queue[0].queued_at - self.handed_over_at < self._delay_s:
            return False
        until = min(self._admission.gathers_until(job, self._delay_s) for job in self._queue)
        if gathers_bursts:
            until = min(until, max(job.queued_at for job in self._queue) + BURST_GAP_S)
        left = until - monotonic()
        if left <= 0:
            if gathers_bursts:
                self._delay_s = 0.0
            return False
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(left, self.pump)
        return True

    def _too_late(self, timeout_s: float, excess_s: float) -> TooLate:
        """Count a refusal and return what to say."""
        self.metrics.refused_late.inc()
        return TooLate(
            f"no answer is to be expected within the request's {timeout_s:.3g} s; try again later",
            max(1, math.ceil(excess_s)),
        )

    def _wait_s(self, priority: int, now: float, timeout_s: float) -> int:
        return self._admission.wait_s(self._queue.rows_before(priority, now, timeout_s, 1))

    def _drop_left(self, now: float) -> bool:
        """Take jobs out of the queue whose clients have left, and return whether there were any.

        A long queue is looked through in parts.
        """
        if not self._queue or now < self._look_again_at:
            return False
        self._look_again_at = now + LOOK_AGAIN_S
        has_dropped = self._queue.sift(lambda job: job.sink.done() or job.drop_if_left(), LOOKED_AT)
        self.changes += has_dropped
        return has_dropped
