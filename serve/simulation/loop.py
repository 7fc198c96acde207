"""An event loop whose time is made: from one event to the next nothing passes.

What runs in a server on asyncio's loop runs here on the same calls, `call_soon` and `call_later`,
and reads this clock in place of the machine's.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from itertools import count
from typing import Any, TypeVarTuple

Ts = TypeVarTuple("Ts")


class _Event(asyncio.TimerHandle):
    """What is called when its time has come, unless it was cancelled."""

    def __init__(self, when: float, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        # Without a copy of the context, which nothing here reads.
        self._when, self._callback, self._args = when, callback, args
        self._is_off = False

    def cancel(self) -> None:
        """Call nothing any more."""
        self._is_off = True

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        return self._is_off

    def fire(self) -> None:
        """Call it."""
        if not self._is_off:
            self._callback(*self._args)


class VirtualLoop(asyncio.AbstractEventLoop):
    """Calls what is due in the order of time, and of calls that are due together in theirs."""

    def __init__(self) -> None:
        self.now = 0.0
        self._soon: deque[_Event] = deque()
        self._later: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = count()

    def time(self) -> float:
        """Return the time, in seconds from the start."""
        return self.now

    def get_debug(self) -> bool:
        """Return False, as futures ask."""
        return False

    def is_running(self) -> bool:
        """Return True: whoever asks is called by it."""
        return True

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Call at the end of what is due now."""
        event = _Event(self.now, callback, args)
        self._soon.append(event)
        return event

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call after some seconds."""
        return self.call_at(self.now + delay, callback, *args)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call at a time."""
        event = _Event(when, callback, args)
        self.at(when, event.fire)
        return event

    def at(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        """Call at a time, whatever happens; at once, as it were, if that has passed."""
        heapq.heappush(self._later, (max(when, self.now), next(self._numbers), callback, args))

    def run_until(self, end: float) -> None:
        """Call what is due up to a time."""
        soon, later = self._soon, self._later
        while True:
            while soon:
                soon.popleft().fire()
            if not later or later[0][0] > end:
                self.now = max(self.now, end)
                return
            self.now, _, callback, args = heapq.heappop(later)
            callback(*args)


@contextmanager
def virtual_loop() -> Iterator[VirtualLoop]:
    """Yield a loop that is the running one for the block, as what is made in it asks for."""
    # What it lacks is for sockets and processes, of which there are none.
    loop = VirtualLoop()  # type: ignore[abstract]
    before = asyncio._get_running_loop()
    asyncio._set_running_loop(loop)
    try:
        yield loop
    finally:
        asyncio._set_running_loop(before)
