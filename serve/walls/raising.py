"""Raise the walls around this process, and around whatever it will start."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from modelyard.serve.walls import calls, landlock, places
from modelyard.serve.walls.kernel import (
    PR_CAP_AMBIENT,
    PR_CAPBSET_DROP,
    PR_SET_KEEPCAPS,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    capset,
    prctl,
)
from modelyard.serve.walls.plan import Walls

MOST_FILES = 1 << 16
MOST_PROCESSES = 1 << 13
"""Of all workers of a version, threads included; only where they have a user of their own."""

DAC_READ_SEARCH, DAC_OVERRIDE = 2, 1
READS_ALL = (DAC_READ_SEARCH, DAC_OVERRIDE)
"""Capabilities with which a user of its own reads what the server's may, where Landlock lets it:
archive and interpreter often lie in folders that are closed to others. The first of these that the
server has is kept."""
_MOST_CAPABILITIES = 64
_CLEAR_AMBIENT, _RAISE_AMBIENT = 4, 2


def die_with_parent(parent: int | None = None) -> None:
    """Tie this process's life to its parent's; end if that has ended.

    Args:
        parent: its process id, where that was read before.
    """
    parent = parent or os.getppid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
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
    _drop_privileges(walls.uid)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if landlock.version():
        landlock.restrict(None if walls.has_files else _rules(walls))
    if calls.is_supported():
        calls.restrict(walls.has_network)


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
    for path in (*places.readable(), *walls.reads):
        yield path, landlock.READ
    for path in walls.writes:
        yield path, landlock.WRITE
    for path in places.devices():
        yield path, landlock.DEVICE
    yield places.OWN, landlock.READ | landlock.WRITE_FILE
    yield places.SHARED_MEMORY, landlock.WRITE & ~landlock.READ_DIR


def _drop_privileges(uid: int | None) -> None:
    """Drop every capability, and become another user where there is one."""
    parent = os.getppid()
    kept = first_capability(READS_ALL) if uid is not None else None
    for number in range(_MOST_CAPABILITIES):
        if number != kept:
            with contextlib.suppress(OSError):  # it does not exist, or there are none to drop
                prctl(PR_CAPBSET_DROP, number)
    if uid is not None:
        groups = {Path(path).stat().st_gid for path in places.accelerators()} - {0}
        prctl(PR_SET_KEEPCAPS, 1)
        os.setgroups(sorted(groups))
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        die_with_parent(parent)  # who becomes another user is untied from its parent
    capset(0 if kept is None else 1 << kept)
    with contextlib.suppress(OSError):  # a kernel before 4.3 has none
        prctl(PR_CAP_AMBIENT, _CLEAR_AMBIENT)
        if kept is not None:
            prctl(PR_CAP_AMBIENT, _RAISE_AMBIENT, kept)


def first_capability(numbers: tuple[int, ...]) -> int | None:
    """Return the first of these capabilities that this process has."""
    return next((number for number in numbers if capabilities() >> number & 1), None)


def capabilities() -> int:
    """Return the capabilities that this process may use, a bit each."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
