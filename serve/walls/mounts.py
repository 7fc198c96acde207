"""Mounts of a process's own: it writes where it was told to, and its /dev/shm starts empty.

Of a folder that is hidden it finds what it may read, and not even the names of the rest. Modes,
owners and times are what Landlock does not see either; a mount that is read-only keeps them all, by
whatever call, path or descriptor they are asked for.

Source: mount_namespaces(7), user_namespaces(7), mount_setattr(2)
"""

import functools
import os
import struct
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from modelyard.serve.walls import kernel, places

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # on every architecture
_HERE = -100
_CLONE, _RECURSIVE, _FROM_DESCRIPTOR = 1, 0x8000, 4
_RDONLY, _SLAVE = 1, 1 << 19
_PROCFS = "/proc"


def separate(writes: Collection[str], reads: Collection[str] = (), hidden: str = "") -> None:
    """Give this process mounts of its own. The thread that calls this must be the only one.

    A process that may not have them gets a user namespace too, in which it keeps its number and has
    every capability: the caller drops them.

    Args:
        writes: what stays writable; a path that is not there is left out.
        reads: what else stays of the hidden folder.
        hidden: folder of which nothing else is left, not even names; empty for none.

    Raises:
        OSError: the kernel, or what rules over it, refuses; some of it may be done.
    """
    _enter()
    _set("/", 0, _SLAVE)  # nothing that follows is seen outside
    trees = [(_clone(path), path) for path in (_PROCFS, *filter(os.path.exists, writes))]
    if hidden and Path(hidden).is_dir():
        _hide(hidden, (*reads, *writes))
    _set("/", 0 if "/" in writes else _RDONLY, 0)
    _move(trees)  # as they were
    if Path(places.SHARED_MEMORY).is_dir():
        about = os.statvfs(places.SHARED_MEMORY)
        size = about.f_blocks * about.f_frsize
        kernel.mount_tmpfs(places.SHARED_MEMORY, f"size={size},mode=1777")


@functools.cache
def why_not() -> str | None:
    """Return why a process of this user cannot have them, or None; it starts one that tries."""
    command = [sys.executable, "-P", "-c", f"from {__name__} import separate; separate(())"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ran.stderr.strip().rpartition("\n")[2] if ran.returncode else None


def _enter() -> None:
    uid, gid = os.geteuid(), os.getegid()
    try:
        kernel.unshare(kernel.NEW_MOUNTS)
    except PermissionError:
        kernel.unshare(kernel.NEW_MOUNTS | kernel.NEW_USERS)
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")


def _hide(folder: str, named: Iterable[str]) -> None:
    """Put an empty folder over one, and in it what is named, to be read."""
    real = Path(folder).resolve()
    there = [Path(path) for path in filter(os.path.exists, named)]
    kept = [path for path in there if path.resolve().is_relative_to(real)]
    trees = [(path, path.is_dir(), _clone(str(path))) for path in kept]
    kernel.mount_tmpfs(folder, "mode=755,size=1m")
    for path, is_folder, tree in trees:
        (path if is_folder else path.parent).mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.touch()
        _move([(tree, str(path))])


def _move(trees: Iterable[tuple[int, str]]) -> None:
    for tree, path in trees:
        kernel.syscall(_MOVE_MOUNT, tree, b"", _HERE, os.fsencode(path), _FROM_DESCRIPTOR)
        os.close(tree)


def _clone(path: str) -> int:
    return kernel.syscall(_OPEN_TREE, _HERE, os.fsencode(path), _CLONE | _RECURSIVE | os.O_CLOEXEC)


def _set(path: str, attributes: int, propagation: int) -> None:
    about = struct.pack("4Q", attributes, 0, propagation, 0)
    kernel.syscall(_MOUNT_SETATTR, _HERE, path.encode(), _RECURSIVE, about, len(about))
