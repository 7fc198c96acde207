"""Jobs of one model version and one kind → batches.

Batching is work-conserving: what waits goes out as soon as a replica has room for it, and a replica
has room for two batches, the one it runs and the one it runs next. Only a batch delay above 0 makes
a job wait for company.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from time import monotonic
from typing import Any, NamedTuple, Protocol

from serve import wire
from serve.errors import DeadlinePassed, QueueFull, StreamBroken, Unavailable
from serve.metrics import KindMetrics

PREDICT, EXPLAIN = 0, 1
"""Kinds of job; a batch has one."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

POLL_AFTER_S = 0.005
"""A job that waited longer is checked for a client that has left before it is handed over."""


MOST_UNREAD_BYTES = 64 << 20
"""Chunks that a client may leave unread before its stream is broken."""


class Stream:
    """The chunks of a streamed answer, on their way from a worker to one client.

    Args:
        receive: the request's ASGI receive, to learn that the client has left.
        cancel: called once when nobody reads the rest.
    """

    def __init__(self, receive: Receive | None, cancel: Callable[[], None]) -> None:
        self._receive = receive
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
            while self._chunks and self._error is None:
                if self._receive is not None and client_left(self._receive):
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


class Job:
    """One request waiting or being run.

    Args:
        kind: PREDICT or EXPLAIN.
        meta: packed request head, as `worker.request` reads it.
        parts: the body as it arrived.
        receive: the request's ASGI receive, to learn that the client has left.
        now: `time.monotonic()`; the event loop's own clock counts whole milliseconds.
        timeout_s: from now to the deadline.
        flags: of `wire`, beside what the kind says.
    """

    __slots__ = (
        "deadline",
        "flags",
        "future",
        "kind",
        "meta",
        "parts",
        "queued_at",
        "receive",
        "retried",
        "stream",
        "taken_at",
    )

    def __init__(
        self,
        kind: int,
        meta: bytes,
        parts: list[bytes],
        receive: Receive | None,
        now: float,
        timeout_s: float,
        future: asyncio.Future[Reply],
        flags: int = 0,
    ) -> None:
        self.kind = kind
        self.flags = flags
        self.meta = meta
        self.parts = parts
        self.receive = receive
        self.queued_at = now
        self.deadline = now + timeout_s
        self.future = future
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


class Replica(Protocol):
    """What runs batches, seen from above the pool."""

    def room(self, kind: int) -> int:
        """Return how many more jobs of this kind it takes now."""

    def run(self, jobs: list[Job]) -> None:
        """Run the jobs and answer each one's future exactly once, whatever happens."""


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

    def seconds_per_job(self, kind: int) -> float:
        """Return a running mean of what a job costs one replica; 0 while unknown."""


def client_left(receive: Receive) -> bool:
    """Tell whether the client has hung up, in one synchronous step of ASGI's `receive`.

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
    ) -> None:
        self._needs_ticket = needs_ticket
        self._engine = engine
        self._kind = kind
        self._metrics = metrics
        self._batch_size = batch_size
        self._delay_s = delay_s
        self._queue_size = queue_size
        self._queue: deque[Job] = deque()
        self._loop = asyncio.get_running_loop()
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

    def submit(self, job: Job) -> asyncio.Future[Reply]:
        """Queue a job.

        Raises:
            QueueFull: with the time after which a place is likely.
            Unavailable: no replica will come up soon.
        """
        if self.waiting >= self._queue_size:
            raise QueueFull(
                f"the queue is full ({self._queue_size} requests wait); try again later",
                self._estimate_s(),
            )
        if (reason := self._engine.why_none) is not None:
            raise Unavailable(reason, retry_after_s=5)
        if self._needs_ticket and self._engine.idle_count <= len(self._queue):
            raise QueueFull(
                "no worker is idle, and this model lets nobody wait", self._estimate_s()
            )
        self._queue.append(job)
        if self._armed is None:
            # All requests that were read in this turn of the loop go out in one frame.
            self._armed = self._loop.call_soon(self.pump)
        return job.future

    def describe(self, meta: bytes, timeout_s: float) -> asyncio.Future[Reply]:
        """Queue a job that asks the handler to describe itself; errors as of `submit`.

        Args:
            meta: packed request head, as of a job.
            timeout_s: from now to the deadline.
        """
        future: asyncio.Future[Reply] = self._loop.create_future()
        job = Job(
            self._kind, meta, [b""], None, monotonic(), timeout_s, future, flags=wire.DESCRIBE
        )
        return self.submit(job)

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
            if jobs := self._take(min(replica.room(self._kind), share)):
                if self._queue:
                    jobs[-1].flags |= wire.BACKLOG
                replica.run(jobs)

    def sweep(self, now: float) -> None:
        """Answer 504 to the jobs whose deadline has passed; called a few times a second."""
        while self._queue and (self._queue[0].future.done() or self._queue[0].deadline <= now):
            self._queue.popleft().fail(DeadlinePassed("the request waited longer than its time"))

    def fail(self, error: Exception) -> None:
        """Answer everything that waits with `error`."""
        while self._queue:
            self._queue.popleft().fail(error)

    def _take(self, count: int) -> list[Job]:
        """Take up to `count` jobs that somebody still waits for."""
        now = monotonic()
        jobs: list[Job] = []
        while self._queue and len(jobs) < count:
            job = self._queue.popleft()
            waited = now - job.queued_at
            if job.future.done():
                continue
            if job.deadline <= now:
                job.fail(DeadlinePassed("the request waited longer than its time"))
                continue
            if waited > POLL_AFTER_S and job.receive is not None and client_left(job.receive):
                job.future.cancel()
                continue
            job.taken_at = now
            self._metrics.queue_time.observe(waited)
            jobs.append(job)
        return jobs

    def _must_gather(self) -> bool:
        """Tell whether the first job still waits for company, and wake up when it has waited."""
        if not self._delay_s or len(self._queue) >= self._batch_size:
            return False
        left = self._queue[0].queued_at + self._delay_s - monotonic()
        if left <= 0:
            return False
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(left, self.pump)
        return True

    def _estimate_s(self) -> int:
        """Return whole seconds until what waits now will have been run, at least 1."""
        cost = self._engine.seconds_per_job(self._kind) * len(self._queue)
        return max(1, math.ceil(cost / max(1, self._engine.ready_count)))
