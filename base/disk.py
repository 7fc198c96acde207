"""What outlasts a power cut, and what is built once."""

import fcntl
import os
import shutil
import subprocess
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

    Others may still write there: `rm` goes through descriptors, and follows no link that is put in
    a folder's place meanwhile. As root nothing is closed, and no mode is changed. What cannot be
    removed stays.
    """
    if os.geteuid():
        subprocess.run(["chmod", "-R", "u+rwX", "--", folder], capture_output=True, check=False)
    subprocess.run(["rm", "-rf", "--", folder], capture_output=True, check=False)


def flush(path: Path) -> None:
    """Wait until a file, or what a folder names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
