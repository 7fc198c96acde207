"""Landlock: rights to files that a process gives up for good, for itself and for its children.

Source: https://docs.kernel.org/userspace-api/landlock.html
"""

import ctypes
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from modelyard.serve.walls.kernel import syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every architecture
_VERSION = 1
_PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = (1 << bit for bit in range(4))
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
MAKE_CHAR, MAKE_BLOCK = 1 << 6, 1 << 11
_ALL = (1 << 16) - 1
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
TRUNCATE_SINCE = 3
_SINCE = {REFER: 2, TRUNCATE: TRUNCATE_SINCE, IOCTL_DEV: 5}
"""Right → the version that brought it; all others came with the first."""

READ = EXECUTE | READ_FILE | READ_DIR
WRITE = _ALL & ~(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV)
DEVICE = READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE | IOCTL_DEV
SCOPES_SINCE = 6
_SCOPES = 0b11  # signals, and abstract Unix sockets


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scopes", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("rights", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """Return the version of this kernel's Landlock; 0 where it has none."""
    try:
        return syscall(_CREATE_RULESET, None, 0, _VERSION)
    except OSError:
        return 0


def restrict(rules: Iterable[tuple[str, int]] | None) -> None:
    """Give up what no rule grants; and, of what is outside, signals, memory and abstract sockets.

    Descriptors stay open, for programs that this process becomes too: they keep rules that the
    kernel would lose. The thread that calls this must be the only one. no_new_privs must be set.

    Args:
        rules: paths and what may be done with them and below; a path that cannot be reached
            grants nothing. None leaves files as they are.

    Raises:
        OSError: the kernel has no Landlock.
    """
    known = version()
    handled = _ALL if rules is not None else REFER
    for right, since in _SINCE.items():
        if known < since:
            handled &= ~right
    if not handled:
        return  # the first version has nothing to give up but files, and takes no empty ruleset
    ruleset = _Ruleset(handled, 0, _SCOPES if known >= SCOPES_SINCE else 0)
    size = ctypes.sizeof(ruleset) if known >= SCOPES_SINCE else 8
    descriptor = syscall(_CREATE_RULESET, ctypes.byref(ruleset), size, 0)
    try:
        # What no ruleset names is allowed, but for moving a file to another folder.
        procfs = Path("/proc").stat().st_dev
        for path, rights in rules if rules is not None else (("/", REFER),):
            _allow(descriptor, path, rights & handled, procfs)
        syscall(_RESTRICT_SELF, descriptor, 0)
    finally:
        os.close(descriptor)


def _allow(ruleset: int, path: str, rights: int, procfs: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # what cannot be reached needs no right
        return
    about = os.fstat(parent)
    is_folder = stat.S_ISDIR(about.st_mode)
    rule = _PathBeneath(rights if is_folder else rights & _OF_FILES, parent)
    try:
        syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        # A rule is one on an inode. procfs makes a new one when it was asked for the name again
        # after the kernel needed memory, overlayfs for files with several names. What is open has
        # its name kept.
        if is_folder and about.st_dev != procfs:
            os.close(parent)
        else:
            os.set_inheritable(parent, True)
