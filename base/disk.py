"""What outlasts a power cut."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file, or what a folder names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
