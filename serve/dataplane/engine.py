"""What runs batches, seen from above: the replicas of one model version."""

from __future__ import annotations

from typing import Protocol

from modelyard.serve.dataplane.call import Call


class Replica(Protocol):
    """What runs batches, seen from above the pool."""

    def capacity(self, kind: int) -> int:
        """Return how many more jobs of this kind it takes now."""

    def run(self, jobs: list[Call]) -> None:
        """Run the jobs and answer each one's sink exactly once, whatever happens."""

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
