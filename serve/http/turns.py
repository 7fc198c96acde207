"""Turns of the event loop: clients' work in slices, and refused clients that are held back.

Whatever many clients ask for, workers' answers are read between two slices of clients' work, and
refusals take a bounded share of the processor: the requests that can be answered are. What is not
read waits in the kernel, and TCP holds its senders back.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections import deque
from time import monotonic, thread_time
from typing import Protocol

from modelyard.serve.dataplane.clock import Clock

SLICE_S = 0.001
"""Clients' work between two looks at the workers; these have been given more than that to do."""
BUSY = 0.8
"""Share of the time that this thread ran or waited for a processor: above it refusals get fewer,
below it more. Whoever waits for a processor keeps workers waiting for it."""
LEAST_RATE, MOST_RATE = 2_000.0, 50_000.0
"""Refusals a second after which clients are held back: the least takes less than a tenth of a
processor, the most is more than one processor can do."""
GROWTH, DECAY = 1.25, 0.8
MEASURE_S = 0.01
"""Time from one measurement of the process's own use to the next."""
PATIENT_SHARE = 0.5
"""Share of the time that a request has: where somebody waits longer for a turn, it is a flood."""
FORGETS = 1.001
"""Factor by which each request lets the shortest time grow that was asked for of late."""
OLDEST_EVERY = 16
"""Turns under a flood among which one is of who waits longest."""
TICK_S = 0.2
"""Time from one look at the clock to the next, which tells whether this process stood still."""
RELEASE_S = 0.002
"""Time from one release of clients that are held back to the next."""


def last_comes_first(waited_s: float, patience_s: float, taken: int) -> bool:
    """Return whether of those who wait the last has its turn, for there is a flood.

    It is one where in the order of arrival all would come too late. The last can still be answered
    in their time, and among the others are those who left.

    Args:
        waited_s: wait of who waits longest.
        patience_s: the shortest time within which a client wants its answer.
        taken: how many have had their turn.
    """
    return is_flood(waited_s, patience_s) and taken % OLDEST_EVERY != 0


def is_flood(waited_s: float, patience_s: float) -> bool:
    """Return whether in the order of arrival all would come too late; arguments as above."""
    return waited_s > PATIENT_SHARE * patience_s


class Demand:
    """For how long this thread has run, or has waited to run.

    Where the kernel does not count waiting (CONFIG_SCHED_INFO): running alone.
    """

    def __init__(self) -> None:
        self._file = -1
        with contextlib.suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def read_s(self) -> float:
        """Return it in seconds."""
        if self._file < 0:
            return thread_time()
        ran, waited, _ = os.pread(self._file, 100, 0).split()
        return (int(ran) + int(waited)) / 1e9

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


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
        self._taken = self._refused = 0
        self._is_refusing = False
        """Whether this turn has refused a request and may not refuse another one."""
        self._held: deque[Reading] = deque()
        """Connections that were refused a request and are not read, the longest first."""
        self._releasing: asyncio.TimerHandle | None = None
        self._rate = MOST_RATE
        self._allowed = self._releasable = 0.0
        """Refusals of which the time is there, and clients that may come back."""
        self._measured_at = 0.0
        self._demand = Demand()
        self._wanted_s = 0.0
        self._clock = Clock()
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
        return now < self._until and not self._waiting and not self._is_refusing

    @property
    def is_over(self) -> bool:
        """Whether who has this turn is to leave the rest for a later one."""
        return monotonic() >= self._until

    def put_off(self, connection: Waiting, address: str = "") -> None:
        """Have a connection of an address take what it holds in a later turn."""
        self._waiting.setdefault(address, deque()).append((monotonic(), connection))

    def expect(self, timeout_s: float) -> None:
        """Take note of the time within which a client wants its answer."""
        self._patience_s = min(timeout_s, FORGETS * self._patience_s)

    @property
    def is_behind(self) -> bool:
        """Whether clients wait for their turn, or to be read again."""
        return bool(self._waiting or self._held)

    @property
    def is_flooded(self) -> bool:
        """Whether clients wait for their turn for so long that the last come first."""
        oldest = min((queue[0][0] for queue in self._waiting.values()), default=math.inf)
        return is_flood(monotonic() - oldest, self._patience_s)

    def _arm(self, now: float, rests: bool = False) -> None:
        self._is_armed = True
        self._until = now + SLICE_S
        if rests:  # there is time for what else this machine does
            self._loop.call_later(SLICE_S, self._next)
        else:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        """Begin a turn with what the last one had no time for."""
        self._is_armed = self._is_refusing = False
        if not self._waiting:
            return
        self._until = monotonic() + SLICE_S
        taken, refused = self._taken, self._refused
        while self._waiting and not self._is_refusing and monotonic() < self._until:
            self._take().take_put_off()
        has_accepted = self._taken - taken > self._refused - refused
        self._arm(monotonic(), rests=self._is_refusing and not has_accepted)

    def _take(self) -> Waiting:
        """Return whose turn it is: who waits longest, or under a flood mostly who came last.

        That is among those of one address, whose turn it is among addresses.
        """
        self._taken += 1
        address = next(iter(self._waiting))
        queue = self._waiting.pop(address)
        is_last = last_comes_first(monotonic() - queue[0][0], self._patience_s, self._taken)
        _, taken = queue.pop() if is_last else queue.popleft()
        if queue:
            self._waiting[address] = queue
        return taken

    # -- refusals --------------------------------------------------------------------------------

    def must_hold(self) -> bool:
        """Count a refusal, and return whether its client is to wait before it is read again."""
        self._measure(monotonic())
        self._refused += 1
        self._allowed -= 1
        self._is_refusing = self._allowed < 0
        return self._is_refusing

    def hold(self, connection: Reading) -> None:
        """Release a connection, which reads nothing until then, when it is its turn."""
        self._held.append(connection)
        if self._releasing is None:
            self._releasing = self._loop.call_later(RELEASE_S, self._release)

    def _release(self) -> None:
        self._measure(monotonic())
        while self._held and self._releasable >= 1:
            self._releasable -= 1
            self._held.popleft().release()
        self._releasing = None
        if self._held:
            self._releasing = self._loop.call_later(RELEASE_S, self._release)

    def _measure(self, now: float) -> None:
        """Allow as many refusals as the processor has time for."""
        took_s = now - self._measured_at
        if took_s < MEASURE_S:
            return
        wanted_s = self._demand.read_s()
        if took_s < 10 * MEASURE_S:
            is_busy = wanted_s - self._wanted_s > BUSY * took_s
            rate = self._rate * (DECAY if is_busy else GROWTH)
            self._rate = min(MOST_RATE, max(LEAST_RATE, rate))
        self._allowed = self._releasable = self._rate * min(took_s, 2 * MEASURE_S)
        self._measured_at, self._wanted_s = now, wanted_s
