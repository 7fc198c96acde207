"""Signs by which a candidate that answers clients is taken back at once.

Shares of failures and latencies are judged by the rule; here is what needs no statistics, or cannot
wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import psutil

from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import PREDICT, Reply
from modelyard.serve.dataplane.pool import Pool
from modelyard.serve.dataplane.worker import Worker

MOST_RESTARTS = 3
GOLDEN_EVERY_S = 60.0
HUNG_S = 5.0
"""Least time that a request may take, however fast the live version is."""
SLOWER = 20
"""Times the live version's 99th percentile that a request may take."""
MEMORY_EVERY_S = 2.0
GROWTH_BYTES = 256 << 20
"""Least growth of a worker, beyond its size at first and beyond the live version's largest."""


class Watch:
    """Watches a candidate while it answers.

    Args:
        live: what it is measured by.
        live_p99_s: returns the 99th percentile of the live version's latency, 0 while unknown.
    """

    def __init__(
        self, live: ModelVersion, candidate: ModelVersion, live_p99_s: Callable[[], float]
    ) -> None:
        self._live = live
        self._candidate = candidate
        self._live_p99_s = live_p99_s
        self._failure = ""
        self._memory_at = 0.0
        self._first: dict[int, int] = {}
        """Bytes of a process when it was looked at first, in whatever state."""
        self.begin()

    def begin(self) -> None:
        """Count anew what a state may have few of; a worker that grows has grown in all states."""
        self._restarts = _restarts(self._candidate.pool)
        self._golden_at = monotonic() + GOLDEN_EVERY_S

    def look(self) -> str | None:
        """Return why the candidate must not answer any more; None where there is nothing."""
        now = monotonic()
        restarts = _restarts(self._candidate.pool) - self._restarts
        if restarts >= MOST_RESTARTS:
            return f"its workers ended {restarts} times unasked"
        if (reason := self._candidate.pool.why_none) is not None:
            return reason
        self._replay(now)
        return self._failure or self._hung(now) or self._grown(now)

    def _hung(self, now: float) -> str | None:
        waits = self._live.batchers[PREDICT].oldest_s
        limit = max(HUNG_S, SLOWER * self._live_p99_s(), waits)
        jobs = [job for worker in self._candidate.pool.workers for job in worker.flight.values()]
        taken = (job.taken_at for job in jobs if job.kind == PREDICT and job.stream is None)
        longest = now - min(taken, default=now)
        if longest > limit:
            return f"a request has no answer for {longest:.1f} s"
        if (waited := self._candidate.batchers[PREDICT].oldest_s) > limit:
            return f"a request waits for {waited:.1f} s"
        return None

    # -- golden requests -----------------------------------------------------------------------

    def _replay(self, now: float) -> None:
        """Have an idle worker answer the golden requests again, when it is time."""
        plan = self._candidate.pool.plan
        if now < self._golden_at or not plan.load["golden"] or plan.load["handler"] == "generate":
            return
        idle = (worker for worker in self._candidate.pool.workers if worker.is_idle)
        if (worker := next(idle, None)) is None:
            return
        self._golden_at = now + GOLDEN_EVERY_S
        head = wire.pack_meta((b"", b"", b"golden"))
        worker.run_aside([(head, [b""], wire.GOLDEN, self, 0)])

    def done(self) -> bool:
        """Return False: it takes every reply."""
        return False

    def cancel(self) -> bool:
        """Try again soon, where a request came first."""
        self._golden_at = monotonic() + 1.0
        return True

    def set_result(self, reply: Reply, /) -> None:
        """Take what a replay of the golden requests found."""
        if reply.status != 200 and isinstance(reply.body, bytes | bytearray):
            self._failure = bytes(reply.body[:500]).decode("utf-8", "replace")

    def set_exception(self, error: Exception, /) -> None:
        """Leave the death of a worker to those who count these."""

    # -- memory --------------------------------------------------------------------------------

    def _grown(self, now: float) -> str | None:
        """Return that a worker has come to be twice as large, and larger than the live version's.

        Those have answered the same requests, and for longer.
        """
        if now < self._memory_at:
            return None
        self._memory_at = now + MEMORY_EVERY_S
        most = max(map(_bytes_of, self._live.pool.workers), default=0)
        for worker in self._candidate.pool.workers:
            if not (size := _bytes_of(worker)):
                continue
            first = self._first.setdefault(worker.pid, size)
            if size - first > max(first, GROWTH_BYTES) and size > most + GROWTH_BYTES:
                return (
                    f"worker {worker.number} has grown from {first >> 20} MB to {size >> 20} MB; "
                    f"the live version's largest has {most >> 20} MB"
                )
        return None


def _bytes_of(worker: Worker) -> int:
    """Return the memory of a worker; 0 where it is not ready or gone."""
    try:
        return int(psutil.Process(worker.pid).memory_info().rss) if worker.is_ready else 0
    except psutil.Error:
        return 0


def _restarts(pool: Pool) -> int:
    return sum(slot.restarts for slot in pool.slots)
