"""Memory that large bodies leave behind: kept for the next ones, then given back to the system.

The C library keeps what is freed between blocks that are still used, too: after a minute of answers
of 10 MB the server process holds tens of megabytes that nothing of it uses.
"""

import asyncio
import resource
from pathlib import Path

from modelyard.serve.dataplane.heap import keep_freed, trim

EVERY_S = 2.0
LONGEST_PAUSE_S = 60.0
GROWN_BYTES = 8 << 20
"""Growth beyond what the process had when it began; less is not worth a look."""
WORTH_BYTES = 1 << 20
"""What comes back; after less the next attempt is later."""


class Memory:
    """Looks now and then at what this process holds. Lives on the event loop."""

    def __init__(self) -> None:
        keep_freed()
        self._usual = resident_bytes()
        self._pause_s = EVERY_S
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(EVERY_S, self._look)

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        before = resident_bytes()
        is_worth_it = True
        if before > self._usual + GROWN_BYTES:
            trim()
            is_worth_it = before - resident_bytes() >= WORTH_BYTES
        self._pause_s = EVERY_S if is_worth_it else min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._timer = self._loop.call_later(self._pause_s, self._look)


def resident_bytes() -> int:
    """Return how much memory of this process is in RAM."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()
