"""What the C library does with freed memory: kept for the next body, or given back.

glibc gives every block above some size to the system as soon as it is freed, and takes it again,
page by page, for the next one: bodies of 602 KB spend 40 % of a request's time on that. What is
freed between blocks that are still used it keeps: after a minute of answers of 10 MB the server
process holds tens of megabytes that nothing of it uses.
"""

import ctypes
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEPT_BYTES = 64 << 20
"""Free memory at the heap's end that stays with the process until it is trimmed."""
LONGEST_BYTES = 32 << 20
"""Blocks of a size up to this lie in the heap; glibc allows no more."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which an operator decides."""


_make_room = ctypes.pythonapi.PyByteArray_FromStringAndSize
_make_room.argtypes, _make_room.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object


def _find(name: str) -> Callable[..., int] | None:
    """Return a function of glibc's; other C libraries decide for themselves."""
    found: Any = getattr(ctypes.CDLL(None), name, None)
    return None if found is None else found


def keep_freed(most: int = KEPT_BYTES) -> None:
    """Keep up to this much freed memory, unless the environment says what to do."""
    if (mallopt := _find("mallopt")) and not any(name in os.environ for name in _ENVIRONMENT):
        mallopt(_MMAP_THRESHOLD, min(most, LONGEST_BYTES))
        mallopt(_TRIM_THRESHOLD, most)


def make_room(size: int) -> bytearray:
    """Return that many bytes of any value, all of which are to be overwritten: none are zeroed."""
    room: bytearray = _make_room(None, size)
    return room


def trim() -> None:
    """Give freed memory back; some milliseconds for 100 MB."""
    if malloc_trim := _find("malloc_trim"):
        malloc_trim(0)


# -- in the server -------------------------------------------------------------------------------

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
        from asyncio import get_running_loop  # which workers do without

        self._loop = get_running_loop()
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
