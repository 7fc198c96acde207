"""How much memory the server process gives to answers and bodies, and who waits for it."""

import asyncio
from collections import deque
from collections.abc import Callable

DEFAULT_BYTES = 256 << 20
DEFAULT_BODY_BYTES = 1 << 30
"""Budgets as the settings have them by default."""


class AnswerBudget:
    """Bytes of answers between workers and clients, of one server. Lives on the event loop.

    An answer that does not come from its worker in one piece takes its size before it is read on,
    and a worker whose answer finds no room is not read until there is. From then on the client's
    connection holds what the client has not taken. So clients that take their answers slowly slow
    workers down, and cost no memory beyond the limit.

    Bodies of requests are counted beside them: what has come of one cannot be sent back, so who
    adds to them beyond the limit is refused.

    Args:
        limit: limit of all bytes held.
        body_limit: limit of all bodies.
    """

    def __init__(self, limit: int = DEFAULT_BYTES, body_limit: int = DEFAULT_BODY_BYTES) -> None:
        self.limit = limit
        self.body_limit = body_limit
        self.bodies = 0
        self.held = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    @property
    def is_short(self) -> bool:
        """Whether a worker waits for room."""
        return bool(self._waiting)

    def take(self, size: int, then: Callable[[], None]) -> bool:
        """Take room for so many bytes, and return True; else call `then` once they are taken."""
        if not self._waiting and self._has_room(size):
            self.held += size
            return True
        self._waiting.append((size, then))
        return False

    def add(self, size: int) -> None:
        """Count bytes that are there in any case."""
        self.held += size

    def give_back(self, size: int) -> None:
        """Make room for whoever waits, in their order."""
        self.held -= size
        while self._waiting and self._has_room(self._waiting[0][0]):
            size, then = self._waiting.popleft()
            self.held += size
            then()

    def forget(self, then: Callable[[], None]) -> None:
        """Let somebody wait no longer."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting[1] != then)
        self.give_back(0)

    def _has_room(self, size: int) -> bool:
        return not self.held or self.held + size <= self.limit


class Share:
    """What one worker's frames take of the budget, from before they are read until they are sent.

    Args:
        pause: called when there is no room: the worker is to be read no more.
        go_on: called when there is; `take` is asked again and says yes.
    """

    def __init__(
        self, budget: AnswerBudget, pause: Callable[[], None], go_on: Callable[[], None]
    ) -> None:
        self.is_held_up = False
        self.budget = budget
        self._pause = pause
        self._go_on = go_on
        self.taken: list[int] = []
        """Bytes taken by the frame that comes, and by the one that ended as it began."""
        self._wanted = self._granted = 0

    def take(self, size: int) -> bool:
        """Return whether a frame of this size may begin."""
        if self._granted:
            self._granted = 0
        elif not self._has_room(size):
            return False
        self.taken.append(size)
        return True

    def settle(self, is_begun: bool) -> None:
        """Give back what frames took that are whole, and hold up a worker beyond the limit.

        Args:
            is_begun: whether the last one still comes.
        """
        done = self.taken[:-1] if is_begun else self.taken
        self.taken = self.taken[len(done) :]
        if done:
            self.budget.give_back(sum(done))
        if self.budget.held > self.budget.limit and not self.is_held_up:
            self._has_room(0)

    def close(self) -> None:
        """Leave the budget."""
        if self.is_held_up:
            self.budget.forget(self._resume)
        given, self.taken = self._granted + sum(self.taken), []
        self.is_held_up, self._granted = False, 0
        self.budget.give_back(given)

    def _has_room(self, size: int) -> bool:
        if self.budget.take(size, self._resume):
            return True
        self.is_held_up = True
        self._wanted = size
        self._pause()
        return False

    def _resume(self) -> None:
        self.is_held_up = False
        self._granted = self._wanted
        # What made room is freed at the end of this turn of the loop.
        asyncio.get_running_loop().call_soon(self._go_on)
