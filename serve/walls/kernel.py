"""System calls that Python has no function for."""

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2
_CAPABILITY_VERSION = 0x20080522

NEW_MOUNTS, NEW_USERS = 0x20000, 0x10000000
_NOSUID_NODEV = 0b110

USER_MAPS = (Path("/proc/self/uid_map"), Path("/proc/self/gid_map"))

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, *arguments: int) -> int:
    """Change this process.

    Raises:
        OSError: the kernel refuses, or does not know the option.
    """
    words = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:4]]
    return _checked(_libc.prctl(option, *words), f"prctl({option})")


def syscall(number: int, *arguments: object) -> int:
    """Call the kernel by number; pointers and whole numbers go as they are.

    Raises:
        OSError: the kernel refuses, or has no such call.
    """
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *words), f"system call {number}")


def children(pid: int | None = None) -> list[int]:
    """Return the children of a process, by default of this thread; the newest last.

    What is adopted comes to the main thread. One that has ended has none.
    """
    own = f"{pid}/task/{pid}" if pid is not None else "thread-self"
    try:
        return [int(pid) for pid in Path(f"/proc/{own}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has ended, or the kernel has no such file
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(pid).children()]
        return []


def unshare(namespaces: int) -> None:
    """Leave these namespaces for new ones.

    Raises:
        OSError: the kernel refuses.
    """
    _checked(_libc.unshare(namespaces), f"unshare({namespaces:#x})")


def mount_tmpfs(folder: str, options: str) -> None:
    """Mount an empty file system in memory.

    Raises:
        OSError: the kernel refuses.
    """
    words = (b"tmpfs", folder.encode(), b"tmpfs", ctypes.c_ulong(_NOSUID_NODEV), options.encode())
    _checked(_libc.mount(*words), f"mount({folder})")


def capset(mask: int) -> None:
    """Have exactly these capabilities, a bit each, to use and to pass on.

    Raises:
        OSError: there is one among them that this process does not have.
    """
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    _checked(_libc.capset(header, struct.pack("6I", *(low,) * 3, *(high,) * 3)), "capset")


def capabilities() -> int:
    """Return the capabilities that this process may use, a bit each."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def has_users(uids: range, maps: Sequence[Path] = USER_MAPS) -> bool:
    """Return whether these users, and groups of the same numbers, exist in our user namespace.

    A rootless container has as many as it was given, often a single one.

    Source: user_namespaces(7)
    """
    return all(len(uids) == sum(len(each) for each in _common(uids, file)) for file in maps)


def _common(uids: range, file: Path) -> Iterator[range]:
    """Yield which of these each line of a map has."""
    for line in file.read_text(encoding="ascii").splitlines():
        first, _, count = (int(word) for word in line.split())
        yield range(max(uids.start, first), min(uids.stop, first + count))


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
