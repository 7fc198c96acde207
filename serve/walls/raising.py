"""Raise the walls around this process, and around whatever it will start."""

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelyard.serve.walls import calls, kernel, landlock, mounts, places


@dataclass(frozen=True)
class Walls:
    """Part of the LOAD message."""

    has_network: bool
    """Whether sockets may be connected."""
    has_files: bool = False
    """Whether files are left as they are: the next four mean nothing then."""
    reads: tuple[str, ...] = ()
    """Folders and files that may be read."""
    writes: tuple[str, ...] = ()
    """What may be read and written."""
    devices: tuple[str, ...] = ()
    """Device files that may be used."""
    has_mounts: bool = False
    """Whether mounts are its own: what it may not write is read-only, and its /dev/shm is empty."""
    hidden: str = ""
    """Folder of which it sees nothing then but what it may read and write."""
    uid: int | None = None
    """User and group of the processes; None leaves them the server's."""
    groups: tuple[int, ...] = ()
    """Further groups of that user."""
    capability: int | None = None
    """What that user keeps."""

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> "Walls":
        """Return what `asdict` and JSON have made of one."""
        known: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in message.items()
        }
        return cls(**known)


MOST_FILES = 1 << 16
MOST_PROCESSES = 1 << 13
"""Processes of all workers of a version, threads included; only where they have their own user."""

_CLEAR_AMBIENT, _RAISE_AMBIENT = 4, 2


def die_with_parent(parent: int | None = None) -> None:
    """Tie this process's life to its parent's; end if that has ended.

    Args:
        parent: its process id, where that was read before.
    """
    parent = parent or os.getppid()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)


def count_threads() -> int:
    """Return how many threads this process has."""
    return len(list(Path("/proc/self/task").iterdir()))


def raise_walls(walls: Walls) -> None:
    """Give up what a handler does not need; what this kernel lacks is left out.

    Raises:
        OSError: something failed that should not have; some walls may stand.
    """
    if (threads := count_threads()) != 1:
        raise OSError(f"{threads} threads run where there must be one")
    _set_limits(walls)
    if walls.has_mounts:
        mounts.separate(walls.writes, walls.reads, walls.hidden)
    _drop_privileges(walls)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)  # `exec` brings no capability back
    if landlock.version():
        landlock.restrict(None if walls.has_files else _rules(walls))
    if calls.is_supported():
        calls.restrict(walls.has_network, _has_metadata(walls))


def _has_metadata(walls: Walls) -> bool:
    """Return whether files of others keep theirs without a filter.

    A user of its own with CAP_DAC_OVERRIDE owns none of them, and may set times and labels.
    """
    is_other = walls.uid is not None and walls.capability == kernel.DAC_READ_SEARCH
    return walls.has_files or walls.has_mounts or is_other


def _set_limits(walls: Walls) -> None:
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: MOST_FILES}
    if walls.uid is not None:
        limits[resource.RLIMIT_NPROC] = MOST_PROCESSES
    for limit, most in limits.items():
        soft, hard = (
            most if each == resource.RLIM_INFINITY else min(each, most)
            for each in resource.getrlimit(limit)
        )
        resource.setrlimit(limit, (soft, hard))


def _rules(walls: Walls) -> Iterator[tuple[str, int]]:
    yield from ((path, landlock.READ) for path in walls.reads)
    yield from ((path, landlock.WRITE) for path in walls.writes)
    yield from ((path, landlock.DEVICE) for path in walls.devices)
    # Threads are named by a file there, which CUDA opens as one that is written anew.
    yield places.OWN, landlock.READ | landlock.WRITE_FILE | landlock.TRUNCATE
    hidden = 0 if walls.has_mounts else landlock.READ_DIR  # others' names, drawn at random
    yield places.SHARED_MEMORY, landlock.WRITE & ~hidden


def _drop_privileges(walls: Walls) -> None:
    """Drop every capability but one, and become another user where there is one."""
    parent = os.getppid()
    if walls.uid is not None:
        kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
        os.setgroups(walls.groups)
        os.setresgid(walls.uid, walls.uid, walls.uid)
        os.setresuid(walls.uid, walls.uid, walls.uid)
        die_with_parent(parent)  # who becomes another user is untied from its parent
    kernel.capset(0 if walls.capability is None else 1 << walls.capability)
    with contextlib.suppress(OSError):  # a kernel before 4.3 has none
        kernel.prctl(kernel.PR_CAP_AMBIENT, _CLEAR_AMBIENT)
        if walls.capability is not None:
            kernel.prctl(kernel.PR_CAP_AMBIENT, _RAISE_AMBIENT, walls.capability)
