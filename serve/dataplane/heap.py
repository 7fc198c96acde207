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


async def give_back() -> None:
    """Look now and then at what this process holds, until this is cancelled."""
    from asyncio import sleep  # which workers do without

    keep_freed()
    usual, pause_s = resident_bytes(), EVERY_S
    while True:
        await sleep(pause_s)
        before = resident_bytes()
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if before > usual + GROWN_BYTES:
            trim()
        if before <= usual + GROWN_BYTES or before - resident_bytes() >= WORTH_BYTES:
            pause_s = EVERY_S


def resident_bytes() -> int:
    """Return how much memory of this process is in RAM."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()
