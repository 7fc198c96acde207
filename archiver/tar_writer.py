"""Write a gzip'ed tar that holds nothing of this machine: times 0, mode 644, nobody's files.

The gzip stream is made of stored blocks: a decompressor reads them as any other, weights would
hardly shrink, and the bytes are the same whatever zlib is there.

Formats: gzip, RFC 1952; stored blocks, RFC 1951, section 3.2.4.
"""

import struct
import tarfile
import zlib
from collections.abc import Iterable
from typing import IO

BLOCK_BYTES = 512

# Deflate, no flags, no time, no extra flags, unknown system.
_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_MAX_STORED_BYTES = 0xFFFF


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
    """A gzip'ed tar in `file`, all files under the folder `top`, as readers of this form expect."""

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
