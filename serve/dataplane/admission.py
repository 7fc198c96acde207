"""Whether a call's answer is to be expected in its time: the estimates behind every refusal."""

from __future__ import annotations

import math

from modelyard.serve.dataplane.call import Call
from modelyard.serve.dataplane.engine import Engine

EXPECTED_SHARE = 0.75
"""Share of a job's time that its answer may be expected to take: half of all answers take longer
than expected, and at saturation every job waits as long as it may."""
UNHURRIED_S = 5.0
"""A job with more time than that is only asked whether one replica could do it all."""


class Admission:
    """What is expected of one queue.

    Args:
        batch_size: the largest batch.
    """

    def __init__(self, engine: Engine, kind: int, batch_size: int) -> None:
        self._engine = engine
        self._kind = kind
        self._most_held = 3 * batch_size
        """Jobs of a replica with its own batch behind them."""

    def excess_s(self, timeout_s: float, queued: int, waited_s: float = 0.0) -> float:
        """Return by how many seconds an answer is expected too late; negative: in time.

        Args:
            timeout_s: of the job that comes.
            queued: how many are before it.
            waited_s: how much of its time has passed.
        """
        allowed_s = EXPECTED_SHARE * timeout_s - waited_s
        if allowed_s > UNHURRIED_S:
            most_s = (queued + self._most_held) * self._engine.job_s(self._kind)
            if most_s < allowed_s:
                return most_s - allowed_s
        return self._engine.expected_s(self._kind, queued) - allowed_s

    def wait_s(self, queued: int) -> int:
        """Return whole seconds until what waits now will have been run, at least 1."""
        return max(1, math.ceil(self._engine.expected_s(self._kind, max(0, queued - 1))))

    def gathers_until(self, job: Call, delay_s: float) -> float:
        """Return until when a job may wait for company: half of its time is for its answer."""
        until = job.queued_at + delay_s
        if not job.must_fit:
            return until
        answer_s = max(2 * self._engine.batch_s(self._kind), job.timeout_s / 2)
        return min(until, job.deadline - answer_s)
