"""What an archive can be written as, and what its reader and writer do for every one of them.

| format | as | why |
| --- | --- | --- |
| `zip-store` | `<name>.mar`, a zip without compression | weights do not shrink |
| `zip-deflate` | `<name>.mar`, what shrinks is compressed | TorchServe's default |
| `tgz` | `<name>.tar.gz`, all files under a folder `<name>` | TorchServe's second form |
| `no-archive` | a folder `<name>` | for work in progress |
"""

import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from modelyard.archiver.errors import ArchiveError, ArchiveNotFound

CHUNK_BYTES = 1024 * 1024

SUFFIXES = {"zip-store": ".mar", "zip-deflate": ".mar", "tgz": ".tar.gz", "no-archive": ""}
"""Format → what follows the model's name in the archive's."""

MAX_ENTRIES = 10_000
"""Files in one archive."""

MAX_RATIO = 200
RATIO_FROM_BYTES = 100_000
"""A small file may shrink a lot (a list of zeros) and cannot hurt."""


Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes to do."""


class Damaged(Exception):
    """A file's bytes are not what the container says; the message is a phrase."""


@dataclass(frozen=True)
class Member:
    """One file or folder of an archive."""

    name: str
    """Its path; a folder's ends with "/"."""
    size_bytes: int
    """What it says it unpacks to."""

    @property
    def is_folder(self) -> bool:
        """Return whether it is a folder."""
        return self.name.endswith("/")


class Reader(Protocol):
    """An open archive, before anything in it is believed.

    Attributes:
        kind: the container in a word, for messages.
        members: filled by `check`, and complete when `is_readable`.
        is_readable: every member's content may be read: none is a bomb, none overlaps another.
    """

    kind: str
    is_readable: bool

    @property
    def digests(self) -> Mapping[str, str]:
        """SHA-256 of the files that `check` had to read through, by name."""

    @property
    def members(self) -> tuple[Member, ...]:
        """The files and folders, in the archive's order."""

    def check(self, progress: Progress) -> list[str]:
        """Read what says where and how large the files are; return all problems."""

    def map(self, member: Any) -> memoryview | None:
        """Map the content of one of `members`, copy-on-write; None where it must be unpacked."""

    def chunks(self, member: Any) -> Iterator[bytes]:
        """Yield the content of one of `members`, at most 1 MiB at a time.

        Raises:
            Damaged: at the latest after the last chunk; what was yielded must not be used.
        """

    def close(self) -> None:
        """Close what is open; a second call does nothing."""


class Bytes(Protocol):
    """What is read at given positions: an open file, or memory."""

    @property
    def size(self) -> int:
        """The number of bytes."""

    def read_at(self, offset: int, count: int) -> bytes:
        """Read `count` bytes, and fewer only where the bytes end."""


class OpenFile:
    """A file behind one descriptor, so that replacing it on disk changes nothing.

    Attributes:
        size: size in bytes.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size = os.fstat(fd).st_size

    def read_at(self, offset: int, count: int) -> bytes:
        """Read `count` bytes, and fewer only where the file ends."""
        return os.pread(self._fd, count, offset)

    def map(self, place: range) -> memoryview:
        """Map a part of the file, copy-on-write."""
        return map_file(self._fd)[place.start : place.stop]

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


@dataclass(frozen=True)
class Held:
    """Bytes that are in memory."""

    data: bytes

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return len(self.data)

    def read_at(self, offset: int, count: int) -> bytes:
        """Read `count` bytes, and fewer only where the bytes end."""
        return self.data[offset : offset + count]


def map_file(fd: int) -> memoryview:
    """Map a whole file copy-on-write; it stays readable when the descriptor is closed."""
    if not os.fstat(fd).st_size:
        return memoryview(bytearray())
    return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))


class Writer(Protocol):
    """An archive that is being written; files come in the order in which they will lie."""

    def add(self, name: str, size_bytes: int, chunks: Iterable[bytes]) -> None:
        """Write one file. The caller makes sure that the chunks have the size."""

    def close(self) -> None:
        """Write what comes after the last file."""


def open_regular(path: Path) -> int:
    """Open a file for reading and return its descriptor.

    Raises:
        ArchiveNotFound: there is none.
        ArchiveError: it is not a regular file, or must not be read.
    """
    try:
        # O_NONBLOCK: opening a named pipe must not wait for somebody to write to it.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise ArchiveNotFound(f"there is no archive {path}") from error
    except OSError as error:
        raise ArchiveError(f"cannot open {path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ArchiveError(f"{path} is neither a file nor a folder; an archive is one of them")
    return fd
