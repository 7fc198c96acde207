"""What the C library does with freed memory: kept for the next body, or given back.

glibc gives every block above some size to the system as soon as it is freed, and takes it again,
page by page, for the next one: bodies of 602 KB spend 40 % of a request's time on that.
"""

import ctypes
import os
from collections.abc import Callable
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
