"""An open gzip'ed tar: is it safe, and what do its files hold?

A gzip stream can only be read from its start. So `check` runs through all of it once and hashes
every file on its way, and contents are read by a second run that goes on from file to file; only a
step back starts a new one.
"""

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelyard.archiver.digest import Digest
from modelyard.archiver.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from modelyard.archiver.untrusted.container import (
    CHUNK_BYTES,
    MAX_RATIO,
    RATIO_FROM_BYTES,
    Damaged,
    Progress,
    open_regular,
)
from modelyard.archiver.untrusted.names import collisions, file_name_problem, quoted
from modelyard.archiver.untrusted.tar_headers import BLOCK_BYTES, TarEntry, read_entries

GZIP_MAGIC = b"\x1f\x8b"

# A gzip header and trailer around the stream.
_GZIP_WBITS = zlib.MAX_WBITS | 16


@dataclass(frozen=True)
class TarMember:
    """A file or folder, and where its content starts in the unpacked tar."""

    name: str
    """Without the top folder; a folder's ends with "/"."""
    size_bytes: int
    offset: int

    @property
    def is_folder(self) -> bool:
        """Return whether it is a folder."""
        return self.name.endswith("/")


class TarReader:
    """A gzip'ed tar behind one file descriptor.

    The first part of every path is left out, as TorchServe does: it is the folder that all files
    lie in.

    Attributes:
        members: filled by `check`, and complete when `is_readable`.
        digests: SHA-256 by name, filled by `check`.
        is_readable: every member's content may be read.
    """

    kind = "gzip'ed tar"

    def __init__(self, path: Path) -> None:
        """Open the file; errors as `open_regular`."""
        self._fd = open_regular(path)
        self.members: tuple[TarMember, ...] = ()
        self.digests: dict[str, str] = {}
        self.is_readable = False
        self._manifest = b""
        self._run: _Run | None = None

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def check(self, progress: Progress) -> list[str]:
        """Run through the whole stream; return all problems of its headers and names."""
        run = _Run(self._fd, progress)
        entries: list[TarEntry] = []
        offsets: list[int] = []
        digests: list[str] = []
        try:
            for entry in read_entries(run.read):
                entries.append(entry)
                offsets.append(run.position)
                digests.append(self._hash(run, entry))
                run.skip(-entry.size_bytes % BLOCK_BYTES)
            run.finish()
        except Damaged as error:
            where = f" after {quoted(entries[-1].name)}" if entries else ""
            return [f"it is not a sound gzip'ed tar: {error}{where}"]
        names, problems = _without_top([entry.name for entry in entries])
        problems += _problems(names, entries)
        self.members = tuple(
            TarMember(name, entry.size_bytes, offset)
            for name, entry, offset in zip(names, entries, offsets, strict=True)
            if name
        )
        self.digests = {
            name: digest
            for name, digest, entry in zip(names, digests, entries, strict=True)
            if name and not entry.is_folder
        }
        self.is_readable = not any(entry.kind for entry in entries)
        return problems

    def _hash(self, run: "_Run", entry: TarEntry) -> str:
        """Read one file; keep the manifest, for which the stream would be unpacked once more."""
        keep = entry.name.partition("/")[2] == MANIFEST_NAME
        kept = []
        left = entry.size_bytes
        with Digest() as digest:
            while left:
                chunk = run.read_some(left)
                left -= len(chunk)
                digest.update(chunk)
                if keep and entry.size_bytes <= MAX_MANIFEST_BYTES:
                    kept.append(chunk)
            self._manifest = b"".join(kept) or self._manifest
            return digest.hexdigest()

    def chunks(self, member: TarMember) -> Iterator[bytes]:
        """Yield a member's content, at most 1 MiB at a time; the gzip checksum holds for all.

        Raises:
            Damaged: the stream is not what `check` saw.
        """
        if member.name == MANIFEST_NAME and member.size_bytes == len(self._manifest):
            yield self._manifest
            return
        # Taken out while it is used: two readers of one archive must not move each other's place.
        run, self._run = self._run, None
        if run is None or run.position > member.offset:
            run = _Run(self._fd)
        run.skip(member.offset - run.position)
        left = member.size_bytes
        while left:
            chunk = run.read_some(left)
            left -= len(chunk)
            yield chunk
        self._run = run


class _Run:
    """One run through the unpacked stream, forward only.

    Attributes:
        position: how many unpacked bytes have been read.
    """

    def __init__(self, fd: int, progress: Progress = lambda done, total: None) -> None:
        self.position = 0
        self._fd = fd
        self._progress = progress
        self._size = os.fstat(fd).st_size
        self._limit = max(RATIO_FROM_BYTES, MAX_RATIO * self._size)
        self._offset = 0
        self._inflater = zlib.decompressobj(_GZIP_WBITS)
        self._packed = b""
        self._waiting = memoryview(b"")
        self._unpacked = 0

    def read(self, count: int) -> bytes:
        """Read exactly `count` bytes."""
        parts = []
        while count:
            parts.append(self.read_some(count))
            count -= len(parts[-1])
        return b"".join(parts)

    def skip(self, count: int) -> None:
        """Read `count` bytes and forget them."""
        while count:
            count -= len(self.read_some(count))

    def read_some(self, most: int) -> bytes:
        """Read from 1 to `most` bytes, at most 1 MiB."""
        if not self._waiting:
            self._waiting = memoryview(self._inflate())
            if not self._waiting:
                raise Damaged("it ends too early")
        chunk = bytes(self._waiting[:most])
        self._waiting = self._waiting[len(chunk) :]
        self.position += len(chunk)
        return chunk

    def finish(self) -> None:
        """Read the rest, which must be nothing but padding."""
        while self._waiting or (rest := self._inflate()):
            if any(self._waiting.tobytes() or rest):
                raise Damaged("bytes follow the end of the tar")
            self._waiting = memoryview(b"")

    def _inflate(self) -> bytes:
        """Decompress up to 1 MiB more; nothing at the end, where zlib has checked the CRC-32."""
        try:
            while not self._inflater.eof:
                packed = self._packed or self._read_packed()
                data = self._inflater.decompress(packed, CHUNK_BYTES)
                self._packed = self._inflater.unconsumed_tail
                self._unpacked += len(data)
                if self._unpacked > self._limit:
                    raise Damaged(f"it unpacks to over {MAX_RATIO} times its {self._size} bytes")
                if data:
                    return data
        except zlib.error as error:
            raise Damaged(f"its compressed data is damaged ({error})") from error
        if self._inflater.unused_data or self._offset < self._size:
            raise Damaged("bytes follow the end of its compressed data")
        return b""

    def _read_packed(self) -> bytes:
        packed = os.pread(self._fd, CHUNK_BYTES, self._offset)
        if not packed:
            raise Damaged("its compressed data ends too early")
        self._offset += len(packed)
        self._progress(self._offset, self._size)
        return packed


def _without_top(names: list[str]) -> tuple[list[str], list[str]]:
    """Leave out the first part of each path; return the rests, and what is wrong with the parts."""
    tops = {name.partition("/")[0] for name in names}
    problems = []
    if len(tops) > 1:
        shown = ", ".join(map(quoted, sorted(tops)[:3]))
        problems.append(f"its files do not lie in one folder: the paths begin with {shown}")
    for top in tops - {"."}:
        if problem := file_name_problem(top):
            problems.append(f"{quoted(top)}: {problem}")
    return [name.partition("/")[2] for name in names], problems


def _problems(names: list[str], entries: list[TarEntry]) -> list[str]:
    problems = [
        f"{quoted(entry.name)}: it is {entry.kind}" for entry in entries if entry.kind is not None
    ]
    for name, entry in zip(names, entries, strict=True):
        if not name and entry.is_folder:
            continue  # the top folder itself
        if problem := file_name_problem(name.removesuffix("/")):
            problems.append(f"{quoted(entry.name)}: {problem}")
    return problems + list(collisions(name for name in names if name))
