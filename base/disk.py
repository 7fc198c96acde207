"""What outlasts a power cut, and what is built once."""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path


def build_once(folder: Path, build: Callable[[], None]) -> None:
    """Have a folder built by one process while the others wait; half a one is never used.

    `complete` in it says that it is whole.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process at a time builds it; a dead one's is free
        if (folder / "complete").exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        try:
            build()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        (folder / "complete").touch()


def remove(folder: Path) -> None:
    """Remove a folder that others wrote: its folders may be closed, and deeper than Python calls.

    What cannot be removed stays.
    """
    waiting = [folder]
    for each in waiting:
        with contextlib.suppress(OSError):
            each.chmod(0o700)
            for entry in list(os.scandir(each)):
                if entry.is_dir(follow_symlinks=False):
                    Path(entry).chmod(0o700)
                    waiting.append(Path(entry).rename(folder / secrets.token_hex(16)))
    shutil.rmtree(folder, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file, or what a folder names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
