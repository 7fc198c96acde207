"""Write archives that hold nothing of this machine: fixed times, mode 644, nobody's files."""

import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import IO

from modelyard.archiver.untrusted.container import MAX_RATIO, RATIO_FROM_BYTES
from modelyard.archiver.untrusted.tar import BLOCK_BYTES

# A file whose first mebibyte stays above this share of its size is weights, or compressed already.
_SHRINKS_BELOW = 0.9
# Deflate, no flags, no time, no extra flags, unknown system.
_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_MAX_STORED_BYTES = 0xFFFF


class FolderWriter:
    """Files under `folder`, which is made; modes are 644 and 755 as the umask allows."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder

    def add(self, name: str, size_bytes: int, chunks: Iterable[bytes]) -> None:
        """Write one file."""
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)

    def close(self) -> None:
        """Do nothing: files are complete when they were added."""


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


class StoredGzip:
    """A gzip stream in `file` whose bytes depend on the content only, not on how it is cut."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._waiting = bytearray()
        self._crc = self._size = 0
        file.write(_GZIP_HEADER)

    def write(self, data: bytes) -> None:
        """Append data."""
        self._crc = zlib.crc32(data, self._crc)
        self._size += len(data)
        self._waiting += data
        whole = len(self._waiting) // _MAX_STORED_BYTES * _MAX_STORED_BYTES
        with memoryview(self._waiting) as waiting:
            for at in range(0, whole, _MAX_STORED_BYTES):
                self._block(waiting[at : at + _MAX_STORED_BYTES], is_last=False)
        del self._waiting[:whole]

    def close(self) -> None:
        """Write the last block, the checksum and the size; the file stays open."""
        self._block(memoryview(self._waiting), is_last=True)
        self._file.write(struct.pack("<LL", self._crc, self._size & 0xFFFFFFFF))

    def _block(self, data: memoryview, is_last: bool) -> None:
        self._file.write(struct.pack("<BHH", is_last, len(data), len(data) ^ 0xFFFF))
        self._file.write(data)


class TarWriter:
    """A gzip'ed tar in `file`, all files under the folder `top`, as readers of this form expect.

    The gzip stream is made of stored blocks: a decompressor reads them as any other, weights would
    hardly shrink, and the bytes are the same whatever zlib is there.

    Formats: gzip, RFC 1952; stored blocks, RFC 1951, section 3.2.4.
    """

    def __init__(self, file: IO[bytes], top: str) -> None:
        self._gzip = StoredGzip(file)
        self._top = top

    def add(self, name: str, size_bytes: int, chunks: Iterable[bytes]) -> None:
        """Write one file."""
        header = tarfile.TarInfo(f"{self._top}/{name}")
        header.size = size_bytes
        self._gzip.write(header.tobuf(tarfile.PAX_FORMAT))
        for chunk in chunks:
            self._gzip.write(chunk)
        self._gzip.write(b"\0" * (-size_bytes % BLOCK_BYTES))

    def close(self) -> None:
        """Write the two empty blocks that end a tar."""
        self._gzip.write(b"\0" * 2 * BLOCK_BYTES)
        self._gzip.close()
