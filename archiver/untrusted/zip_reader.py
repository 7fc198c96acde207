"""An open zip file: is it safe, and what do its entries hold?"""

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelyard.archiver.untrusted.container import CHUNK_BYTES, Damaged, Progress, open_regular
from modelyard.archiver.untrusted.names import collisions, file_name_problem, quoted
from modelyard.archiver.untrusted.zip_checks import (
    DEFLATED,
    entry_problem,
    layout_problems,
    local_problem,
    total_problem,
)
from modelyard.archiver.untrusted.zip_directory import (
    Directory,
    Entry,
    NotAZip,
    read_directory,
    read_local_header,
)


@dataclass(frozen=True)
class ZipMember:
    """An entry, and the bytes of the file that hold its packed data."""

    entry: Entry
    data: range

    @property
    def name(self) -> str:
        """Return the entry's name; a folder's ends with "/"."""
        return self.entry.name

    @property
    def size_bytes(self) -> int:
        """Return what the directory says that it unpacks to."""
        return self.entry.size_bytes

    @property
    def is_folder(self) -> bool:
        """Return whether it is a folder."""
        return self.entry.is_folder


class ZipReader:
    """A zip behind one file descriptor, read at positions only, so threads may share it.

    Attributes:
        size: of the file, in bytes.
        members: filled by `check`, and complete when `is_readable`.
        digests: empty; no content is read by `check`.
        is_readable: every entry's content may be read: none is a bomb, none overlaps another.
    """

    kind = "zip"

    def __init__(self, path: Path) -> None:
        """Open the file; errors as `open_regular`."""
        self._fd = open_regular(path)
        self.size = os.fstat(self._fd).st_size
        self.members: tuple[ZipMember, ...] = ()
        self.digests: dict[str, str] = {}
        self.is_readable = False

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def read_at(self, offset: int, count: int) -> bytes:
        """Read exactly `count` bytes at `offset`, or raise NotAZip."""
        data = os.pread(self._fd, count, offset) if offset + count <= self.size else b""
        if len(data) != count:
            raise NotAZip(f"it ends before byte {offset + count}")
        return data

    def check(self, progress: Progress) -> list[str]:
        """Read the directory and all headers, no content; return all problems."""
        try:
            directory = read_directory(self)
        except NotAZip as error:
            return [str(error)]
        problems = _name_problems(directory.entries)
        unsafe = _entry_problems(directory.entries)
        if problem := total_problem(directory.entries, self.size):
            unsafe.append(problem)
        unsafe += self._locate(directory)
        self.is_readable = not unsafe
        return problems + unsafe

    def chunks(self, member: ZipMember) -> Iterator[bytes]:
        """Yield a member's content, at most 1 MiB at a time; check size and CRC on the way.

        Raises:
            Damaged: at the latest after the last chunk; what was yielded must not be used.
        """
        entry, crc, size = member.entry, 0, 0
        packed = self._packed_chunks(member.data)
        for chunk in _inflated(packed) if entry.method == DEFLATED else packed:
            size += len(chunk)
            if size > entry.size_bytes:
                raise Damaged(f"it unpacks to more than the {entry.size_bytes} bytes it declares")
            crc = zlib.crc32(chunk, crc)
            yield chunk
        if size != entry.size_bytes:
            raise Damaged(f"it unpacks to {size} bytes and declares {entry.size_bytes}")
        if crc != entry.crc:
            raise Damaged(f"its CRC-32 is {crc:08x}, the directory says {entry.crc:08x}")

    def _packed_chunks(self, data: range) -> Iterator[bytes]:
        for offset in range(data.start, data.stop, CHUNK_BYTES):
            try:
                yield self.read_at(offset, min(CHUNK_BYTES, data.stop - offset))
            except NotAZip as error:
                raise Damaged(str(error)) from error

    def _locate(self, directory: Directory) -> list[str]:
        """Find the members' data behind their own headers; return what is wrong with those."""
        problems, members = [], []
        for entry in directory.entries:
            try:
                local = read_local_header(self, entry)
            except NotAZip as error:
                problems.append(f"{quoted(entry.name)}: {error}")
                continue
            start = local.data_offset
            members.append(ZipMember(entry, range(start, start + entry.packed_bytes)))
            if problem := local_problem(entry, local):
                problems.append(f"{quoted(entry.name)}: {problem}")
        if len(members) == len(directory.entries):
            problems += layout_problems(directory, [member.data for member in members])
        self.members = tuple(members)
        return problems


def _name_problems(entries: tuple[Entry, ...]) -> list[str]:
    names = [entry.name for entry in entries]
    problems = [
        f"{quoted(name)}: {problem}"
        for name in names
        if (problem := file_name_problem(name.removesuffix("/")))
    ]
    return problems + list(collisions(names))


def _entry_problems(entries: tuple[Entry, ...]) -> list[str]:
    return [
        f"{quoted(entry.name)}: {problem}" for entry in entries if (problem := entry_problem(entry))
    ]


def _inflated(packed: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress a raw deflate stream, at most 1 MiB of output at a time."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    for waiting in packed:
        while waiting or not inflater.eof:
            if inflater.eof:
                raise Damaged("bytes follow the end of its compressed data")
            try:
                chunk = inflater.decompress(waiting, CHUNK_BYTES)
            except zlib.error as error:
                raise Damaged(f"its compressed data is damaged ({error})") from error
            yield chunk
            waiting = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            if not waiting and len(chunk) < CHUNK_BYTES:
                break
    if not inflater.eof:
        raise Damaged("its compressed data ends too early")
