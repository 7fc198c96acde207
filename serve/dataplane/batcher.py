"""Jobs of one model version and one kind → batches.

Batching is work-conserving: what waits goes out as soon as a replica has room for it, and a replica
has room for two batches, the one it runs and the one it runs next. Only a batch delay above 0 makes
a job wait for company.

Nothing waits in vain: a job is refused at once when its answer is not to be expected in time, and
leaves the queue when its client does.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from itertools import islice
from time import monotonic
from typing import Any, NamedTuple, Protocol

from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.lengths import NEIGHBOURS, choose_alike
from modelyard.serve.dataplane.metrics import KindMetrics
from modelyard.serve.errors import DeadlinePassed, QueueFull, StreamBroken, TooLate, Unavailable

PREDICT, EXPLAIN = 0, 1
"""Kinds of job; a batch has one."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
HasLeft = Callable[[], bool]

POLL_AFTER_S = 0.005
"""A job that waited longer is checked for a client that has left before it is handed over."""


EXPECTED_SHARE = 0.75
"""Of a job's time, that its answer may be expected to take: half of all answers take longer than
expected, and at saturation every job waits as long as it may."""
UNHURRIED_S = 5.0
"""Of a job with more time than that, no more is asked than whether one replica could do it all."""
LOOKED_AT = 256
"""Jobs whose clients are looked at in one go, half a millisecond of work."""
LOOK_AGAIN_S = 0.02
"""From one look to the next, so that a flood of refusals costs little."""

MOST_UNREAD_BYTES = 64 << 20
"""Chunks that a client may leave unread before its stream is broken."""


class Stream:
    """The chunks of a streamed answer, on their way from a worker to one client.

    Args:
        has_left: tells whether the client has left.
        cancel: called once when nobody reads the rest.
    """

    def __init__(self, has_left: HasLeft | None, cancel: Callable[[], None]) -> None:
        self._has_left = has_left
        self._cancel = cancel
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._arrived = asyncio.Event()
        self._is_complete = False
        self._is_closed = False
        self._error: Exception | None = None

    def put(self, chunk: bytes, is_last: bool = False) -> None:
        """Add what the worker sent."""
        self._is_complete |= is_last
        if not self._is_closed:
            self._chunks.append(chunk)
            self._size += len(chunk)
            if self._size > MOST_UNREAD_BYTES:
                self._chunks.clear()
                self.fail(StreamBroken(f"the client leaves {self._size} bytes unread"))
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """End the stream early; the client must not take what it has for the whole answer."""
        if not self._is_complete and self._error is None:
            self._error = error
        self._arrived.set()

    def close(self) -> None:
        """Drop what is left, and tell the worker when it still sends."""
        if not self._is_closed:
            self._is_closed = True
            self._chunks.clear()
            if not self._is_complete:
                self._cancel()

    async def read(self) -> AsyncIterator[bytes]:
        """Yield the chunks as they come, until the last one or until the client has left.

        Raises:
            StreamBroken, WorkerDied: the rest will not come.
        """
        while True:
            while self._chunks:
                if self._has_left is not None and self._has_left():
                    return
                chunk = self._chunks.popleft()
                self._size -= len(chunk)
                yield chunk
            if self._error is not None:
                raise self._error
            if self._is_complete:
                return
            self._arrived.clear()
            await self._arrived.wait()


class Reply(NamedTuple):
    """A worker's answer to one job: HTTP status, packed headers (`wire.pack_meta`), body."""

    status: int
    headers: bytes
    body: bytes | Stream


class Promise(Protocol):
    """Where an answer goes: a future that a task awaits, or what sends it on at once."""

    def done(self) -> bool:
        """Return whether it has its answer, or nobody waits for it any more."""

    def set_result(self, reply: Reply, /) -> None:
        """Answer the request."""

    def set_exception(self, error: Exception, /) -> None:
        """Answer the request with an error."""

    def cancel(self) -> bool:
        """Note that nobody waits for it any more."""


class Job:
    """One request waiting or being run.

    Args:
        kind: PREDICT or EXPLAIN.
        meta: packed request head, as `worker.request` reads it.
        parts: the body as it arrived.
        has_left: tells whether the client has left; None where there is none.
        now: `time.monotonic()`; the event loop's own clock counts whole milliseconds.
        timeout_s: from now to the deadline.
        flags: of `wire`, beside what the kind says.
        must_fit: whether it is refused as soon as its answer cannot be expected by the deadline.
    """

    __slots__ = (
        "deadline",
        "flags",
        "future",
        "has_left",
        "kind",
        "meta",
        "must_fit",
        "parts",
        "queued_at",
        "retried",
        "stream",
        "taken_at",
    )

    def __init__(
        self,
        kind: int,
        meta: bytes,
        parts: list[bytes],
        has_left: HasLeft | None,
        now: float,
        timeout_s: float,
        future: Promise,
        flags: int = 0,
        must_fit: bool = True,
    ) -> None:
        self.kind = kind
        self.flags = flags
        self.meta = meta
        self.parts = parts
        self.has_left = has_left
        self.queued_at = now
        self.deadline = now + timeout_s
        self.future = future
        self.must_fit = must_fit
        self.retried = False
        self.stream: Stream | None = None
        """Once the first chunk of its answer has come."""
        self.taken_at = now
        """When a worker got it, last."""

    def fail(self, error: Exception) -> None:
        """Answer with an error, or break the answer whose first chunk has been given out."""
        if self.stream is not None:
            self.stream.fail(error)
        elif not self.future.done():
            self.future.set_exception(error)

    def drop_if_left(self) -> bool:
        """Return whether nobody waits for it any more, its client having left."""
        if self.has_left is None or not self.has_left():
            return False
        self.future.cancel()
        return True


class Replica(Protocol):
    """What runs batches, seen from above the pool."""

    def room(self, kind: int) -> int:
        """Return how many more jobs of this kind it takes now."""

    def run(self, jobs: list[Job]) -> None:
        """Run the jobs and answer each one's future exactly once, whatever happens."""

    def rest_s(self, now: float) -> float:
        """Return in how many seconds it will have answered what it holds; 0 when it is idle."""


class Engine(Protocol):
    """The replicas of one model version. `pool.py` is one; a cluster would be another."""

    @property
    def ready_count(self) -> int:
        """How many replicas can run batches now."""

    @property
    def why_none(self) -> str | None:
        """Why no replica will come up soon, or None."""

    @property
    def idle_count(self) -> int:
        """How many replicas would start a job at once."""

    def pick(self, kind: int) -> Replica | None:
        """Return the least loaded replica with room for this kind, if any has."""

    def handed_over(self) -> int:
        """Return how many jobs replicas hold without running them, where these count as queued."""

    def batch_s(self, kind: int) -> float:
        """Return how long a batch takes of late, in seconds; 0 while unknown."""

    def job_s(self, kind: int) -> float:
        """Return what a job costs one replica of late, in seconds; 0 while unknown."""

    def expected_s(self, kind: int, queued: int) -> float:
        """Return in how many seconds one more job will be answered, behind `queued` others.

        0 while that is unknown, and where an idle replica waits for it: what was measured before
        must not keep a job from being measured.
        """


def client_left(receive: Receive) -> bool:
    """Return whether the client has hung up, in one synchronous step of ASGI's `receive`.

    The whole body must have been read: then the only message left is the disconnect. Costs 2 µs,
    a twentieth of `Request.is_disconnected`, and leaves no task behind.
    """
    step: Any = receive()
    try:
        step.send(None)
    except StopIteration as stop:
        return bool(stop.value["type"] == "http.disconnect")
    step.close()
    return False


class Batcher:
    """The queue of one model version and kind. Lives on the event loop.

    Args:
        needs_ticket: whether a job is taken only while a replica is idle.
        call_bytes: of `lengths.CALL_BYTES`, for batches of like length; None takes jobs in order.
    """

    def __init__(
        self,
        engine: Engine,
        kind: int,
        metrics: KindMetrics,
        *,
        batch_size: int,
        delay_s: float,
        queue_size: int,
        needs_ticket: bool = False,
        call_bytes: int | None = None,
    ) -> None:
        self._needs_ticket = needs_ticket
        self._call_bytes = call_bytes
        self._engine = engine
        self._kind = kind
        self._metrics = metrics
        self._batch_size = batch_size
        self._delay_s = delay_s
        self._queue_size = queue_size
        self._queue: deque[Job] = deque()
        self._loop = asyncio.get_running_loop()
        self._most_held = 3 * batch_size
        """Jobs of a replica with its own batch behind them."""
        self._looked_at = 0
        self._look_again_at = 0.0
        self._armed: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        metrics.queue_length.set_function(lambda: len(self._queue))

    @property
    def waiting(self) -> int:
        """Jobs in the queue, those included that were handed over early."""
        return len(self._queue) + self._engine.handed_over()

    @property
    def room(self) -> int:
        """Jobs that the queue still takes."""
        return max(0, self._queue_size - self.waiting)

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            QueueFull, TooLate: with the time after which it is likely to be taken.
            Unavailable: no replica will come up soon.
        """
        if self.waiting >= self._queue_size:
            self._drop_left(job.queued_at)
            if self.waiting >= self._queue_size:
                text = f"the queue is full ({self._queue_size} requests wait); try again later"
                self._metrics.refused_full.inc()
                raise QueueFull(text, self._wait_s())
        if (reason := self._engine.why_none) is not None:
            raise Unavailable(reason, retry_after_s=5)
        if self._needs_ticket and self._engine.idle_count <= len(self._queue):
            self._metrics.refused_full.inc()
            raise QueueFull("no worker is idle, and this model lets nobody wait", self._wait_s())
        if job.must_fit and (excess_s := self._excess_s(job)) > 0:
            if self._drop_left(job.queued_at):
                excess_s = self._excess_s(job)
            if excess_s > 0:
                raise self._too_late(job, excess_s)
        self._queue.append(job)
        self.wake()

    def describe(self, meta: bytes, timeout_s: float) -> asyncio.Future[Reply]:
        """Queue a job that asks the handler to describe itself; errors as of `submit`.

        Args:
            meta: packed request head, as of a job.
            timeout_s: from now to the deadline.
        """
        future: asyncio.Future[Reply] = self._loop.create_future()
        job = Job(
            self._kind, meta, [b""], None, monotonic(), timeout_s, future, wire.DESCRIBE, False
        )
        self.submit(job)
        return future

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
            replica = self._engine.pick(self._kind)
            if replica is None:
                return
            share = math.ceil(len(self._queue) / max(1, self._engine.ready_count))
            if jobs := self._take(replica, min(replica.room(self._kind), share)):
                replica.run(jobs)

    def sweep(self, now: float) -> None:
        """Answer 504 to jobs whose deadline has passed, and drop those whose clients have left.

        Called a few times a second.
        """
        if any(job.deadline <= now for job in self._queue):
            jobs = list(self._queue)
            self._queue.clear()
            for job in jobs:
                if job.deadline <= now:
                    job.fail(DeadlinePassed("the request waited longer than its time"))
                else:
                    self._queue.append(job)
        self._drop_left(now)

    def fail(self, error: Exception) -> None:
        """Answer everything that waits with `error`."""
        while self._queue:
            self._queue.popleft().fail(error)

    def _take(self, replica: Replica, count: int) -> list[Job]:
        """Take up to `count` jobs, the oldest always among them."""
        if self._call_bytes is None:
            return self._take_from(self._queue, replica, count)
        jobs = self._take_from(self._queue, replica, 1)
        if jobs:
            alike = self._remove_alike(jobs[0], count, self._call_bytes)
            jobs += self._take_from(alike, replica, count)
        return jobs

    def _remove_alike(self, first: Job, size: int, call_bytes: int) -> deque[Job]:
        """Take out of the queue the jobs that run with `first`, in order."""
        seen = [first, *islice(self._queue, NEIGHBOURS)]
        places = choose_alike([sum(map(len, job.parts)) for job in seen], size, call_bytes)[1:]
        for place in reversed(places):
            del self._queue[place - 1]
        return deque(seen[place] for place in places)

    def _take_from(self, queue: deque[Job], replica: Replica, count: int) -> list[Job]:
        """Take the first `count` jobs that somebody still waits for, and that can be answered.

        An idle replica takes one whatever is expected of it, as in `Engine.expected_s`.
        """
        now = monotonic()
        jobs: list[Job] = []
        rest_s = replica.rest_s(now)
        batch_s = self._engine.batch_s(self._kind)
        answered_at = now + rest_s + batch_s if batch_s else now
        while queue and len(jobs) < count:
            job = queue.popleft()
            waited = now - job.queued_at
            if job.future.done():
                continue
            if job.deadline <= now:
                job.fail(DeadlinePassed("the request waited longer than its time"))
                continue
            if waited > POLL_AFTER_S and job.drop_if_left():
                continue
            if job.deadline < answered_at and job.must_fit and (rest_s or jobs):
                job.fail(self._too_late(job, answered_at - job.deadline))
                continue
            job.taken_at = now
            self._metrics.queue_time.observe(waited)
            jobs.append(job)
        return jobs

    def _must_gather(self) -> bool:
        """Return whether the first job still waits for company, and wake up when it has waited."""
        if not self._delay_s or len(self._queue) >= self._batch_size:
            return False
        until = min(map(self._gathers_until, self._queue))
        left = until - monotonic()
        if left <= 0:
            return False
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(left, self.pump)
        return True

    def _gathers_until(self, job: Job) -> float:
        """Return until when a job may wait for company: half of its time is for its answer."""
        until = job.queued_at + self._delay_s
        if not job.must_fit:
            return until
        answer_s = max(2 * self._engine.batch_s(self._kind), (job.deadline - job.queued_at) / 2)
        return min(until, job.deadline - answer_s)

    def _excess_s(self, job: Job) -> float:
        """Return by how many seconds a job's answer is expected too late; negative: in time."""
        allowed_s = EXPECTED_SHARE * (job.deadline - job.queued_at)
        queued = len(self._queue)
        if allowed_s > UNHURRIED_S:
            most_s = (queued + self._most_held) * self._engine.job_s(self._kind)
            if most_s < allowed_s:
                return most_s - allowed_s
        return self._engine.expected_s(self._kind, queued) - allowed_s

    def _too_late(self, job: Job, excess_s: float) -> TooLate:
        """Count a refusal and return what to say."""
        self._metrics.refused_late.inc()
        return TooLate(
            f"no answer is to be expected within the request's {job.deadline - job.queued_at:.3g} "
            f"s ({len(self._queue)} requests wait); try again later",
            max(1, math.ceil(excess_s)),
        )

    def _wait_s(self) -> int:
        """Return whole seconds until what waits now will have been run, at least 1."""
        before = max(0, len(self._queue) - 1)
        return max(1, math.ceil(self._engine.expected_s(self._kind, before)))

    def _drop_left(self, now: float) -> bool:
        """Take jobs out of the queue whose clients have left, and tell whether there were any.

        A long queue is looked through in parts.
        """
        if not self._queue or now < self._look_again_at:
            return False
        self._look_again_at = now + LOOK_AGAIN_S
        queue, start = self._queue, self._looked_at
        if start >= len(queue):
            start = 0
        count, kept = min(LOOKED_AT, len(queue) - start), 0
        queue.rotate(-start)
        for _ in range(count):
            job = queue.popleft()
            if not (job.future.done() or job.drop_if_left()):
                queue.append(job)
                kept += 1
        queue.rotate(start + kept)
        self._looked_at = start + kept
        return kept < count
