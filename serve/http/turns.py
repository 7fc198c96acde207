"""Turns of the event loop: clients' work in slices.

Whatever many clients ask for, workers' answers are read between two slices of clients' work: the
requests that can be answered are. What is not read waits in the kernel, and TCP holds its senders
back. Clients that ask again as fast as they are refused are read a little later: thousands of them
would fill all time between two looks at the workers.
"""

import asyncio
import math
from collections import deque
from time import monotonic
from typing import Protocol

from modelyard.serve.dataplane.clock import Clock

SLICE_S = 0.001
"""Clients' work between two looks at the workers; these have been given more than that to do."""
PATIENT_SHARE = 0.5
"""Share of the time that a request has: where somebody waits longer for a turn, it is a flood."""
FORGETS = 1.001
"""Factor by which each request lets the shortest time grow that was asked for of late."""
OLDEST_EVERY = 16
"""Turns under a flood among which one is of who waits longest."""
NEWEST_SHARE = 0.1
"""Weight of the newest turn in the mean of what one takes."""
WINDOW_S, REFUSALS = 0.01, 60
"""Refusals within such a time after which refused clients are held back, while others wait for
their turn: a tenth of a processor."""
IDLE_REFUSALS = 120
"""Clients of these that are read again in such a time while nobody waits."""
TICK_S = 0.2
"""Time from one look at the clock to the next, which tells whether this process stood still."""


class Waiting(Protocol):
    """A connection, as far as its turn is concerned."""

    def take_put_off(self) -> None:
        """Work on what has been received."""


class Reading(Waiting, Protocol):
    """A connection that may be held back as well."""

    def release(self) -> None:
        """Read again."""


class Turns:
    """Whose turn it is, among the connections of one listener. Lives on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, deque[tuple[float, Waiting]]] = {}
        """Connections with bytes that no turn had time for yet, and since when, by address: these
        take turns, so that nobody has more of them for having more connections."""
        self._is_armed = False
        self._until = 0.0
        self._patience_s = math.inf
        """The shortest time of late within which a client wants its answer."""
        self._taken = 0
        self._count = 0
        """Connections that wait."""
        self._turn_s = 0.0
        """Time that one of them takes, a mean of late."""
        self._refused = 0
        """Refusals of this window."""
        self._held: deque[Reading] = deque()
        """Connections that were refused a request and are not read, the longest first."""
        self._window: asyncio.TimerHandle | None = None
        self._clock = Clock()
        self.one = asyncio.Lock()
        """Held for a turn by a task that is to answer: tasks of many clients begin in as many."""
        self._tick()

    def _tick(self) -> None:
        self._clock.tick(monotonic())
        self._loop.call_later(TICK_S, self._tick)

    def late_s(self, unread_s: float) -> float:
        """Return how long a request waited for this process, less what that stood still.

        Args:
            unread_s: how long it lay in the kernel.
        """
        if unread_s < TICK_S:
            return unread_s
        now = monotonic()
        return max(0.0, unread_s - self._clock.stood_s(now - unread_s, now))

    def has_time(self) -> bool:
        """Return whether this turn has time for what a client sent."""
        now = monotonic()
        if not self._is_armed:
            self._arm(now)
        return now < self._until and not self._waiting

    @property
    def is_over(self) -> bool:
        """Whether who has this turn is to leave the rest for a later one."""
        return monotonic() >= self._until

    def put_off(self, connection: Waiting, address: str = "") -> None:
        """Have a connection of an address take what it holds in a later turn."""
        self._waiting.setdefault(address, deque()).append((monotonic(), connection))
        self._count += 1

    def expect(self, timeout_s: float) -> None:
        """Take note of the time within which a client wants its answer."""
        self._patience_s = min(timeout_s, FORGETS * self._patience_s)

    @property
    def behind_s(self) -> float:
        """How long who comes now will wait for a turn."""
        return self._count * self._turn_s

    @property
    def is_behind(self) -> bool:
        """Whether clients wait for their turn."""
        return bool(self._waiting)

    def _arm(self, now: float) -> None:
        self._is_armed = True
        self._until = now + SLICE_S
        self._loop.call_soon(self._next)

    def _next(self) -> None:
        """Begin a turn with what the last one had no time for."""
        self._is_armed = False
        if not self._waiting:
            return
        began_at, before = monotonic(), self._taken
        self._until = began_at + SLICE_S
        try:
            while self._taken == before or (self._waiting and not self.is_over):
                self._take().take_put_off()
        finally:  # whatever becomes of one, the others have their turns
            now = monotonic()
            turn_s = (now - began_at) / (self._taken - before)
            self._turn_s += NEWEST_SHARE * (turn_s - self._turn_s)
            self._arm(now)

    def _take(self) -> Waiting:
        """Return whose turn it is: who waits longest, or under a flood mostly who came last.

        That is among those of one address, whose turn it is among addresses. It is a flood where in
        the order of arrival all would come too late: the last can still be answered in their time,
        and among the others are those who left.
        """
        self._taken += 1
        self._count -= 1
        address = next(iter(self._waiting))
        queue = self._waiting.pop(address)
        is_flood = monotonic() - queue[0][0] > PATIENT_SHARE * self._patience_s
        is_last = is_flood and self._taken % OLDEST_EVERY != 0
        _, taken = queue.pop() if is_last else queue.popleft()
        if queue:
            self._waiting[address] = queue
        return taken

    # -- refusals --------------------------------------------------------------------------------

    def must_hold(self) -> bool:
        """Count a refusal, and return whether its client is to wait before it is read again."""
        self._refused += 1
        if self._window is None:
            self._window = self._loop.call_later(WINDOW_S, self._end_window)
        return self._refused > REFUSALS and bool(self._waiting)

    def hold(self, connection: Reading) -> None:
        """Release a connection, which reads nothing until then, when it is its turn."""
        self._held.append(connection)

    def _end_window(self) -> None:
        """Release as many as may be refused until the next one ends; more where nobody waits."""
        self._refused, self._window = 0, None
        most = REFUSALS if self._waiting else IDLE_REFUSALS
        for _ in range(min(len(self._held), most)):
            self._held.popleft().release()
        if self._held and self._window is None:
            self._window = self._loop.call_later(WINDOW_S, self._end_window)
