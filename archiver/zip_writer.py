"""Write a zip that holds nothing of this machine: fixed times, mode 644."""

import stat
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import IO

from modelyard.archiver.untrusted.container import MAX_RATIO, RATIO_FROM_BYTES

# A file whose first mebibyte stays above this share of its size is weights, or compressed already.
_SHRINKS_BELOW = 0.9


class ZipWriter:
    """A zip in `file`.

    Args:
        file: open for writing; stays open.
        deflated: names of the files to compress. The others are stored: weights hardly shrink, and
            the bytes that zlib makes differ from one zlib to the next.
    """

    def __init__(self, file: IO[bytes], deflated: Collection[str] = ()) -> None:
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)
        self._deflated = deflated

    def add(self, name: str, size_bytes: int, chunks: Iterable[bytes]) -> None:
        """Write one file."""
        entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
        entry.create_system = 3  # Unix
        entry.external_attr = (stat.S_IFREG | 0o644) << 16
        entry.file_size = size_bytes
        if name in self._deflated:
            entry.compress_type = zipfile.ZIP_DEFLATED
        with self._zip.open(entry, "w") as target:
            for chunk in chunks:
                target.write(chunk)

    def close(self) -> None:
        """Write the directory."""
        self._zip.close()


def shrinks(read: Callable[[], Iterator[bytes]], size_bytes: int) -> bool:
    """Return whether a file is worth compressing, and may be: readers refuse what shrinks too much.

    Args:
        read: gives the content from the start, whenever it is called.
        size_bytes: size of the content.
    """
    if size_bytes < RATIO_FROM_BYTES:
        return True
    head = next(read(), b"")
    if len(zlib.compress(head)) > _SHRINKS_BELOW * len(head):
        return False
    deflater = zlib.compressobj()
    packed = sum(len(deflater.compress(chunk)) for chunk in read()) + len(deflater.flush())
    return 2 * size_bytes < MAX_RATIO * packed
