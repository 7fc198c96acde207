"""A folder for each cell of a machine, and none for those that are gone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from modelyard.serve.errors import StartError

LOCK = ".lock"
ADDRESS = "address"
"""File of a cell's folder from when its server is ready: where it listens, and the name by
which it must be called, if any. `haproxy.sh` reads it."""


class CellFolder:
    """A folder of a cell's own. A lock beside it says that the cell lives, however it ends.

    Args:
        root: folder of all cells of this machine; made if need be. What dead ones left there goes.
        replica: Ray's word for the cell, by which HAProxy knows it.

    Raises:
        StartError: it cannot be used.
    """

    def __init__(self, root: Path, replica: str) -> None:
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if root.stat().st_uid != os.getuid():
                raise PermissionError(0, "it belongs to another user")
            for left in _unheld(root):
                shutil.rmtree(left, ignore_errors=True)
            self.path = root / f"cell-{replica}"
            self._fd = _lock(_lock_of(self.path), os.O_CREAT | os.O_EXCL)
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise StartError(
                f"cannot use the folder {root} for cells: {error.strerror}; name another one with "
                "state_dir=FOLDER"
            ) from error

    def remove(self) -> None:
        """Remove the folder and its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        _lock_of(self.path).unlink(missing_ok=True)
        os.close(self._fd)


def _unheld(root: Path) -> Iterator[Path]:
    """Yield the folders whose cells are gone, each while its lock is held; the lock goes then."""
    for file in root.glob(f"cell-*{LOCK}"):
        with contextlib.suppress(OSError):  # held, or just removed by another cell
            fd = _lock(file)
            try:
                yield file.with_suffix("")
                file.unlink(missing_ok=True)
            finally:
                os.close(fd)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + LOCK)


def _lock(file: Path, flags: int = 0) -> int:
    """Open a file and take its lock; raise OSError where another process has it."""
    fd = os.open(file, os.O_RDWR | flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd
