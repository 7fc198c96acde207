"""Copies of live predictions → the candidate, and the answers to both → what was found.

A copy is taken when the live answer has been given out, and costs no client anything: it waits in a
queue of its own, bounded in number and bytes, for a worker of the candidate that has nothing to do,
and not while requests wait for the live version. It has a deadline of its own and is never tried
again; what finds no room is dropped and counted. One of ten goes to the live version a second time,
in a batch of its own: what then differs is the noise that the candidate is measured against.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import PREDICT, Call, Reply, Stream
from modelyard.serve.dataplane.pool import Pool
from modelyard.serve.dataplane.worker import Worker
from modelyard.serve.errors import StreamBroken

MOST_COPIES = 64
MOST_BYTES = 32 << 20
"""Of all copies that wait or run, their live answers included."""
MOST_COPY_BYTES = 8 << 20
"""Of one."""
WAIT_S = 10.0
"""After which a copy is not worth running any more."""
LEAST_RUN_S = 5.0
"""That a copy may run, however fast the live version was."""
SLOWER = 50
"""Times as long as the live version's own answer that a copy may run."""
NOISE_EVERY = 10
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
    """By the live version, from the whole body to its answer."""
    since: float
    size: int


class Findings(Protocol):
    """What takes what was found."""

    def compared(self, copy: Copy, reply: Reply) -> None:
        """Take the candidate's answer."""

    def failed(self, copy: Copy, error: Exception) -> None:
        """Take what there was instead of the candidate's answer."""

    def repeated(self, copy: Copy, reply: Reply) -> None:
        """Take the live version's second answer."""

    def dropped(self, reason: str) -> None:
        """Count a copy that was not run: full, busy, late, large, stream, interrupted."""


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
        live: whose answers clients get.
        candidate: what runs the copies.
        share: of the live version's answers, above 0 and at most 1.
        findings: what takes what was found.
    """

    def __init__(
        self, live: ModelVersion, candidate: ModelVersion, share: float, findings: Findings
    ) -> None:
        self._live = live
        self._candidate = candidate
        self._sampler = Sampler(share)
        self._findings = findings
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Copy] = deque()
        self._running: dict[int, _Run] = {}
        self._held = 0
        """Bytes of all copies."""
        self._count = 0
        self._again: Copy | None = None
        """To be answered by the live version a second time."""
        self._since_noise = NOISE_EVERY
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False
        live.pool.on_answer = (*live.pool.on_answer, self.offer)

    @property
    def waiting(self) -> int:
        """Copies that wait for a worker."""
        return len(self._queue)

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
        if self._since_noise >= NOISE_EVERY and self._again is None:
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
        run = _Run(self, worker, copy, is_candidate)
        self._running[id(run)] = run
        worker.run_aside(copy.head, copy.parts, copy.flags, run, copy.rows)

    def _end_late(self, now: float) -> None:
        """End copies that take far longer than the live version took."""
        for run in list(self._running.values()):
            if now - run.since <= max(LEAST_RUN_S, SLOWER * run.copy.took_s):
                continue
            if run.is_candidate:
                run.set_exception(TimeoutError(f"no answer within {now - run.since:.1f} s"))
                run.worker.condemn()  # it may hang for good
            else:
                run.cancel()

    def ended(self, run: _Run, outcome: Reply | Exception | None) -> None:
        """Take what became of a copy; None where it gave way to a request."""
        del self._running[id(run)]
        self._let_go(run.copy)
        if not self._is_stopped:
            self._tell(run, outcome)
            self._wake()

    def _tell(self, run: _Run, outcome: Reply | Exception | None) -> None:
        copy, findings = run.copy, self._findings
        if isinstance(outcome, StreamBroken):
            findings.dropped("stream")
        elif not run.is_candidate:
            if isinstance(outcome, Reply):
                findings.repeated(copy, outcome)
        elif outcome is None:
            findings.dropped("interrupted")
        elif isinstance(outcome, Exception):
            findings.failed(copy, outcome)
        else:
            findings.compared(copy, outcome)


class _Run:
    """A copy in a worker; a `ReplySink`."""

    def __init__(self, shadow: Shadow, worker: Worker, copy: Copy, is_candidate: bool) -> None:
        self.worker = worker
        self.copy = copy
        self.is_candidate = is_candidate
        self.since = monotonic()
        self._shadow: Shadow | None = shadow

    def done(self) -> bool:
        """Return whether nobody waits for it any more."""
        return self._shadow is None

    def cancel(self) -> bool:
        """Note that it gave way."""
        self._end(None)
        return True

    def set_result(self, reply: Reply, /) -> None:
        """Take the answer."""
        self._end(reply)

    def set_exception(self, error: Exception, /) -> None:
        """Take the error that there is instead; a worker that is ended here has made none."""
        self._end(None if self.worker.is_closing else error)

    def _end(self, outcome: Reply | Exception | None) -> None:
        shadow, self._shadow = self._shadow, None
        if shadow is not None:  # else it came too late
            shadow.ended(self, outcome)


def _idle(pool: Pool) -> Iterator[Worker]:
    return (worker for worker in pool.workers if worker.is_idle)
