"""Copies of live predictions → the candidate, and the answers to both → what was found.

A copy is taken when the live answer has been given out, and costs no client anything: it waits in a
queue of its own, bounded in number and bytes, for a worker of the candidate that has nothing to do,
and not while requests wait for the live version. It has a deadline of its own and is never tried
again; what finds no room is dropped and counted. One of ten, and each one while there is doubt,
goes to the live version a second time, in a batch of its own: what then differs is the noise that
the candidate is measured against.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import PREDICT, Call, Reply, Stream
from modelyard.serve.dataplane.pool import Pool
from modelyard.serve.dataplane.worker import Worker
from modelyard.serve.errors import StreamBroken

if TYPE_CHECKING:
    from modelyard.plugins.ops.rollout.trial import Trial

MOST_COPIES = 64
MOST_BYTES = 32 << 20
"""Most bytes of all copies that wait or run, their live answers included."""
MOST_COPY_BYTES = 8 << 20
"""Most bytes of one copy."""
WAIT_S = 10.0
"""Time after which a copy is not worth running any more."""
LEAST_RUN_S = 5.0
"""Least time that a copy may run, however fast the live version was."""
SLOWER = 50
"""Times as long as the live version's own answer that a copy may run."""
PUMP_EVERY_S = 0.02
_NOT_COPIED = wire.DESCRIBE | wire.STREAM | wire.EXPLAIN | wire.SHARES


@dataclass(frozen=True)
class Copy:
    """A request that was answered, and its answer."""

    request_id: str
    head: bytes
    parts: tuple[bytes, ...]
    flags: int
    rows: int
    live: Reply
    took_s: float
    """Time that the live version took, from the whole body to its answer."""
    since: float
    size: int


class Run(NamedTuple):
    """A copy in a worker."""

    worker: Worker
    copy: Copy
    is_candidate: bool
    since: float


def place(salt: str, key: str) -> float:
    """Return where a key falls from 0 to 1, evenly, and differently for each salt."""
    digest = blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8, key=salt.encode())
    return int.from_bytes(digest.digest()) / 2**64


class Canary:
    """Sends a share of the requests to the candidate, the same ones always; a `Split`.

    Args:
        salt: salt of the roll-out: who is among the first in one is not among the first in the
            next.
        header: header whose value decides, in lower case; the request's id does where it is absent,
            or where this is empty.
    """

    def __init__(
        self, live: ModelVersion, candidate: ModelVersion, salt: str, share: float, header: str = ""
    ) -> None:
        self._share = share
        self._live = live
        self._candidate = candidate
        self._salt = salt
        self._header = header.encode()

    def choose(self, id: str, headers: Iterable[tuple[bytes, bytes]]) -> ModelVersion:
        """Return the version that answers a request of this id and these headers."""
        if self._header:
            id = next((v.decode("latin-1") for n, v in headers if n == self._header), id)
        return self._candidate if place(self._salt, id) < self._share else self._live


class Sampler:
    """Draws a share of what comes: one of each as many, at a place by chance."""

    def __init__(self, share: float, draw: Callable[[], float] = random.random) -> None:
        self._share = share
        self._draw = draw
        self._seen = 0.0
        self._taken = 0
        self._at = draw()

    def take(self) -> bool:
        """Return whether this one is among them."""
        self._seen += self._share
        if self._seen <= self._taken + self._at:
            return False
        self._taken += 1
        self._at = self._draw()
        return True


class Shadow:
    """Copies a share of one version's predictions to another. Lives on the event loop.

    Args:
        live: version whose answers clients get.
        candidate: what runs the copies.
        share: share of the live version's answers, above 0 and at most 1.
        findings: what takes what was found.
    """

    def __init__(
        self, live: ModelVersion, candidate: ModelVersion, share: float, findings: Trial
    ) -> None:
        self._live = live
        self._candidate = candidate
        self._sampler = Sampler(share)
        self._findings = findings
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Copy] = deque()
        self._running: dict[asyncio.Future[Reply], Run] = {}
        self._held = 0
        """Bytes of all copies."""
        self._count = 0
        self._again: Copy | None = None
        """Copy that the live version is to answer a second time."""
        self.noise_every = 1
        """One copy in so many goes to the live version, too; the judge says how many."""
        self._since_noise = 1
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False
        live.pool.on_answer = (*live.pool.on_answer, self.offer)

    def stop(self) -> None:
        """Copy nothing more, and forget what waits."""
        self._is_stopped = True
        pool = self._live.pool
        pool.on_answer = tuple(each for each in pool.on_answer if each != self.offer)
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        while self._queue:
            self._let_go(self._queue.popleft())
        self._forget_again()

    def offer(self, job: Call, reply: Reply) -> None:
        """Copy a request that was answered just now, if it is drawn and there is room."""
        if job.kind != PREDICT or job.flags & _NOT_COPIED or not self._sampler.take():
            return
        if isinstance(reply.body, Stream):
            self._findings.dropped("stream")
            return
        size = sum(map(len, job.parts)) + len(reply.body)
        if reason := self._why_not(size):
            self._findings.dropped(reason)
            return
        parts = tuple(map(bytes, job.parts))  # the connection goes on with its buffers
        fields, now = wire.unpack_meta(job.head), monotonic()
        id = fields[2].decode("latin-1") if len(fields) > 2 else ""
        took_s = now - job.queued_at
        copy = Copy(id, job.head, parts, job.flags, job.rows, reply, took_s, now, size)
        self._queue.append(copy)
        self._hold(size)
        self._since_noise += 1
        if self._since_noise >= self.noise_every and self._again is None:
            self._again, self._since_noise = copy, 0
            self._hold(size)
        self._wake()

    def _why_not(self, size: int) -> str:
        if size > MOST_COPY_BYTES:
            return "large"
        if self._count >= MOST_COPIES or self._held + size > MOST_BYTES:
            return "full"
        return "busy" if self._is_live_busy else ""

    @property
    def _is_live_busy(self) -> bool:
        return self._live.batchers[PREDICT].queued > 0

    def _hold(self, size: int) -> None:
        self._held += size
        self._count += 1
        self._live.pool.budget.bodies += size

    def _let_go(self, copy: Copy) -> None:
        self._held -= copy.size
        self._count -= 1
        self._live.pool.budget.bodies -= copy.size

    def _forget_again(self) -> None:
        if self._again is not None:
            copy, self._again = self._again, None
            self._let_go(copy)

    # -- running -------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Run what waits, once what is being answered now is."""
        if self._soon is None:
            self._soon = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Run what waits, as far as workers have nothing else to do."""
        self._soon = None
        now = monotonic()
        self._end_late(now)
        if not self._is_live_busy:
            for worker in _idle(self._candidate.pool):
                if not self._queue:
                    break
                self._run(worker, self._queue.popleft(), is_candidate=True)
            idle = next(_idle(self._live.pool), None)
            if idle is not None and self._again is not None:
                copy, self._again = self._again, None
                self._run(idle, copy, is_candidate=False)
        while self._queue and now - self._queue[0].since > WAIT_S:
            self._let_go(self._queue.popleft())
            self._findings.dropped("late")
        if self._again is not None and now - self._again.since > WAIT_S:
            self._forget_again()
        has_work = self._queue or self._running or self._again is not None
        if self._timer is None and has_work:
            self._timer = self._loop.call_later(PUMP_EVERY_S, self._pump_later)

    def _pump_later(self) -> None:
        self._timer = None
        self._pump()

    def _run(self, worker: Worker, copy: Copy, is_candidate: bool) -> None:
        sink: asyncio.Future[Reply] = self._loop.create_future()
        self._running[sink] = Run(worker, copy, is_candidate, monotonic())
        sink.add_done_callback(self._ended)
        worker.run_aside(copy.head, copy.parts, copy.flags, sink, copy.rows)

    def _end_late(self, now: float) -> None:
        """End copies that take far longer than the live version took."""
        for sink, run in self._running.items():
            if sink.done() or now - run.since <= max(LEAST_RUN_S, SLOWER * run.copy.took_s):
                continue
            if run.is_candidate:
                sink.set_exception(TimeoutError(f"no answer within {now - run.since:.1f} s"))
                run.worker.condemn()  # it may hang for good
            else:
                sink.cancel()

    def _ended(self, sink: asyncio.Future[Reply]) -> None:
        """Take what became of a copy; one that is cancelled gave way to a request."""
        worker, copy, is_candidate, _ = self._running.pop(sink)
        self._let_go(copy)
        error = None if sink.cancelled() else sink.exception()
        if self._is_stopped:
            return
        findings = self._findings
        if isinstance(error, StreamBroken):
            findings.dropped("stream")
        elif not is_candidate:
            if not sink.cancelled() and error is None:
                findings.repeated(copy, sink.result())
        elif sink.cancelled() or (error is not None and worker.is_closing):
            findings.dropped("interrupted")  # a worker that is ended here has made no error
        elif error is not None:
            findings.failed(copy, error)
        else:
            findings.compared(copy, sink.result())
        self._wake()


def _idle(pool: Pool) -> Iterator[Worker]:
    return (worker for worker in pool.workers if worker.is_idle)
