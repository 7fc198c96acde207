"""A gzip'ed tar, read strictly: one meaning for every reader.

`tarfile` is lenient where archives from strangers must not be: it makes up for broken headers,
follows links, and knows many ways to name a file. Here a member is a file or a folder, and
anything unusual is a problem.

A gzip stream can only be read from its start. So `check` runs through all of it once and hashes
every file on its way, and contents are read by a second run that goes on from file to file; only a
step back starts a new one.

Format: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Header Block".
"""

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from modelyard.archiver.digest import Digest
from modelyard.archiver.manifest import MAX_MANIFEST_BYTES
from modelyard.archiver.untrusted import container
from modelyard.archiver.untrusted.container import Damaged
from modelyard.archiver.untrusted.names import MANIFEST_NAME, collisions, file_name_problem, quoted

BLOCK_BYTES = 512

# Names have at most 1024 bytes; what else tools put into these headers is short.
_MAX_EXTENDED_BYTES = 64 * 1024
_USTAR, _GNU = b"ustar\x0000", b"ustar  \0"
_FILE, _FOLDER = b"0\0", b"5"
_PAX, _PAX_GLOBAL, _GNU_NAME = b"x", b"g", b"L"
_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a named pipe",
    b"S": "a sparse file",
}
# Tools add times, owners and comments; these change what is unpacked, in ways that readers differ.
_REFUSED_KEYS = re.compile(r"linkpath|hdrcharset|GNU\.sparse\..*")
_RECORD = re.compile(rb"([1-9][0-9]{0,5}) ([^=\n]+)=")

Read = Callable[[int], bytes]
"""Read exactly that many bytes of the unpacked tar, or raise Damaged."""


@dataclass(frozen=True)
class TarMember(container.Member):
    """A file or folder of a tar; in an archive, without the folder that all lie in."""

    kind: str | None = None
    """What it is when it is neither a file nor a folder."""
    offset: int = 0
    """Where its content starts in the unpacked tar."""


def read_entries(read: Read) -> Iterator[TarMember]:
    """Yield the entries up to the empty block that ends the tar.

    The caller reads each entry's content, padded to whole blocks, before it asks for the next.

    Raises:
        Damaged: a header cannot be understood.
    """
    count = 0
    while any(block := read(BLOCK_BYTES)):
        extended: dict[str, str] = {}
        while (flag := block[156:157]) in (_PAX, _PAX_GLOBAL, _GNU_NAME):
            extended |= _extended(flag, _content(read, _header(block)[1]), extended)
            block = read(BLOCK_BYTES)
        count += 1
        if count > container.MAX_ENTRIES:
            raise Damaged(f"it holds more than {container.MAX_ENTRIES} files")
        yield _entry(_header(block), flag, extended)


def _header(block: bytes) -> tuple[str, int]:
    """Read one header block's name and size.

    Raises:
        Damaged: the checksum or a field is wrong.
    """
    if _number(block[148:156]) != sum(block[:148]) + sum(block[156:]) + 8 * ord(" "):
        raise Damaged("the checksum of a header is wrong")
    name, magic, prefix = _text(block[:100]), block[257:265], _text(block[345:500])
    if magic not in (_USTAR, _GNU):
        raise Damaged("a header is of no kind that is known")
    if magic == _USTAR and prefix:
        name = f"{prefix}/{name}"
    return name, _number(block[124:136])


def _entry(header: tuple[str, int], flag: bytes, extended: dict[str, str]) -> TarMember:
    name = extended.get("path", header[0])
    size = int(extended.get("size", header[1]))
    kind = None
    if flag not in _FILE + _FOLDER:
        kind = _KINDS.get(flag, "neither a file nor a folder")
    elif flag != _FOLDER and name.endswith("/"):
        kind = "a file with the name of a folder"
    elif flag == _FOLDER and size:
        kind = "a folder with content"
    if flag == _FOLDER:
        name = name.rstrip("/") + "/"
    return TarMember(name, size, kind)


def _content(read: Read, size_bytes: int) -> bytes:
    if size_bytes > _MAX_EXTENDED_BYTES:
        raise Damaged(f"an extended header has {size_bytes} bytes")
    return read(size_bytes + -size_bytes % BLOCK_BYTES)[:size_bytes]


def _extended(flag: bytes, data: bytes, before: dict[str, str]) -> dict[str, str]:
    """Read an extended header: what it says of the next entry."""
    if flag == _GNU_NAME:
        fields = {"path": _text(data)}
    else:
        fields = dict(_pax_records(data))
        if flag == _PAX_GLOBAL and fields:
            raise Damaged("a header for all entries names a path or a size")
    if fields.keys() & before.keys():
        raise Damaged("an entry is named, or its size is given, twice")
    return fields


def _pax_records(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the records that say where and how large the next entry is."""
    seen, at = set(), 0
    while at < len(data):
        start = _RECORD.match(data, at)
        end = at + int(start[1]) if start else 0
        if start is None or not start.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise Damaged("a pax header is damaged")
        key, value = _text(start[2]), _text(data[start.end() : end - 1])
        if _REFUSED_KEYS.fullmatch(key):
            raise Damaged(f"a pax header holds {key}, which is not read")
        if key in seen:
            raise Damaged(f"a pax header holds {key} twice")
        if key == "size" and not re.fullmatch(r"[0-9]{1,19}", value):
            raise Damaged("the size in a pax header is not a number")
        seen.add(key)
        if key in ("path", "size"):
            yield key, value
        at = end


def _text(field: bytes) -> str:
    """Decode a field up to its first NUL; nothing may follow that."""
    text, _, rest = field.partition(b"\0")
    if any(rest):
        raise Damaged("bytes follow the end of a name in a header")
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Damaged("a name is not UTF-8") from error


def _number(field: bytes) -> int:
    """Read an octal number, or the binary one that GNU's tar writes for large files."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.rstrip(b"\0 ").lstrip(b" ")
    if not re.fullmatch(rb"[0-7]*", digits):
        raise Damaged("a number in a header is damaged")
    return int(digits or b"0", 8)


GZIP_MAGIC = b"\x1f\x8b"

# A gzip header and trailer around the stream.
_GZIP_WBITS = zlib.MAX_WBITS | 16


class TarReader:
    """A gzip'ed tar behind one file descriptor.

    The first part of every path is left out: it is the folder that all files
    lie in.
    """

    kind = "gzip'ed tar"

    def __init__(self, path: Path) -> None:
        """Open the file; errors as `open_regular`."""
        self._file = container.OpenFile(container.open_regular(path))
        self.members: tuple[TarMember, ...] = ()
        self.digests: dict[str, str] = {}
        self.is_readable = False
        self._manifest = b""
        self._run: Inflated | None = None

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def check(self, progress: container.Progress) -> list[str]:
        """Run through the whole stream; return all problems of its headers and names."""
        run = Inflated(self._file, progress)
        entries: list[TarMember] = []
        try:
            for entry in read_entries(run.read):
                entries.append(replace(entry, offset=run.position))
                digest = self._hash(run, entry)
                if not entry.is_folder:
                    self.digests[entry.name.partition("/")[2]] = digest
                run.skip(-entry.size_bytes % BLOCK_BYTES)
            run.finish()
        except Damaged as error:
            where = f" after {quoted(entries[-1].name)}" if entries else ""
            return [f"it is not a sound gzip'ed tar: {error}{where}"]
        names, problems = _without_top([entry.name for entry in entries])
        problems += _problems(names, entries)
        self.members = tuple(
            replace(entry, name=name) for name, entry in zip(names, entries, strict=True) if name
        )
        self.is_readable = not any(entry.kind for entry in entries)
        return problems

    def _hash(self, run: "Inflated", entry: TarMember) -> str:
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

    def map(self, member: TarMember) -> None:
        """Return None: every member must be unpacked."""

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
            run = Inflated(self._file)
        run.skip(member.offset - run.position)
        left = member.size_bytes
        while left:
            chunk = run.read_some(left)
            left -= len(chunk)
            yield chunk
        self._run = run


class Inflated:
    """One run through what a gzip stream unpacks to, forward only.

    Attributes:
        position: how many unpacked bytes have been read.
    """

    def __init__(
        self, source: container.Bytes, progress: container.Progress = lambda done, total: None
    ) -> None:
        self.position = 0
        self._source = source
        self._progress = progress
        self._size = source.size
        self._limit = max(container.RATIO_FROM_BYTES, container.MAX_RATIO * self._size)
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
                data = self._inflater.decompress(packed, container.CHUNK_BYTES)
                self._packed = self._inflater.unconsumed_tail
                self._unpacked += len(data)
                if self._unpacked > self._limit:
                    raise Damaged(
                        f"it unpacks to over {container.MAX_RATIO} times its {self._size} bytes"
                    )
                if data:
                    return data
        except zlib.error as error:
            raise Damaged(f"its compressed data is damaged ({error})") from error
        if self._inflater.unused_data or self._offset < self._size:
            raise Damaged("bytes follow the end of its compressed data")
        return b""

    def _read_packed(self) -> bytes:
        packed = self._source.read_at(self._offset, container.CHUNK_BYTES)
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


def _problems(names: list[str], entries: list[TarMember]) -> list[str]:
    problems = [
        f"{quoted(entry.name)}: it is {entry.kind}" for entry in entries if entry.kind is not None
    ]
    for name, entry in zip(names, entries, strict=True):
        if not name and entry.is_folder:
            continue  # the top folder itself
        if problem := file_name_problem(name.removesuffix("/")):
            problems.append(f"{quoted(entry.name)}: {problem}")
    return problems + list(collisions(name for name in names if name))
