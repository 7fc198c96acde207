"""How many of the waiting requests one batch takes."""

from __future__ import annotations

REMEASURE = 64
"""Every so many choices the other one is taken, so that its time is not of long ago."""
FALLING, RISING = 0.3, 0.03
"""Weights of a new time below and above the one known: what else the machine does only adds."""


class Halves:
    """Learns how long batches of each size take, and halves them where that answers sooner.

    A worker that had nothing to do and then takes all that comes makes its clients wait while it
    runs, and waits for them afterwards: both move in lockstep. If it takes half, the first half's
    clients have their answers, and ask again, while it runs the second half; from then on it never
    waits, so it is asked only after a wait. But each half costs its share of what a batch costs
    however small it is. With t(n) for the time of n requests, the mean answer of two halves comes
    after 1.5 t(n/2): they are taken where that is before t(n). So a network on a CPU, whose time
    grows with the batch, is halved, and one on a GPU, whose time does not, never is.

    Args:
        size: the largest batch.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._seconds = [0.0] * (size + 1)
        self._choices = 0

    def choose(self, waiting: int) -> int:
        """Return how many of `waiting` requests the next batch takes."""
        if not 2 <= waiting <= self._size:
            return min(waiting, self._size)
        half = (waiting + 1) // 2
        whole_s, half_s = self._seconds[waiting], self._seconds[half]
        if not whole_s:
            return waiting
        if not half_s:
            return half
        self._choices += 1
        is_better = 1.5 * half_s < whole_s
        return half if is_better != (self._choices % REMEASURE == 0) else waiting

    def measured(self, count: int, seconds: float) -> None:
        """Take note of the time of a batch."""
        if known := self._seconds[count]:
            weight = FALLING if seconds < known else RISING
            seconds = known + weight * (min(seconds, 2 * known) - known)
        self._seconds[count] = seconds
