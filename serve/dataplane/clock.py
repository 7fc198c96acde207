"""A clock that stops while this process stands still: stopped, suspended, or its loop held up.

Whoever waits for another process judges it by this: what came while nobody could read it was not
late.
"""

from time import monotonic

STOOD_STILL_S = 0.5
"""Time from tick to tick above which this process stood still; of each such time that much
counts."""


class Clock:
    """`time.monotonic()` less what this process stood still, as told by regular ticks."""

    def __init__(self) -> None:
        self._ticked_at = monotonic()
        self._stood_s = 0.0
        self._stood_at = 0.0
        self._stood_until = 0.0
        self._stood_last_s = 0.0

    def read(self, now: float) -> float:
        """Return the time, in seconds, where `now` is what `time.monotonic()` says."""
        return min(now, self._ticked_at + STOOD_STILL_S) - self._stood_s

    def tick(self, now: float) -> bool:
        """Return whether this process stood still since the last tick; to be called often."""
        stood_s = now - self._ticked_at - STOOD_STILL_S
        if stood_s > 0:
            self._stood_at = self.read(now)
            self._stood_s += stood_s
            self._stood_until, self._stood_last_s = now, stood_s
        self._ticked_at = now
        return stood_s > 0

    def stood_s(self, since: float, now: float) -> float:
        """Return for how long of that time this process stood still last.

        Args:
            since: time of `time.monotonic()`, as is `now`.
        """
        until, last_s = self._stood_until, self._stood_last_s
        if now > self._ticked_at + STOOD_STILL_S:  # it is told before the next tick, too
            until, last_s = now, now - self._ticked_at - STOOD_STILL_S
        return max(0.0, until - max(until - last_s, since))

    def stood_still_since(self, then: float, now: float) -> bool:
        """Return whether this process stood still since `then`, which was read; `now` as of `read`.

        It is told before the next tick, too.
        """
        return then <= self._stood_at or now > self._ticked_at + STOOD_STILL_S
