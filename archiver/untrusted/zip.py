"""A zip, read strictly: one meaning for every reader, every byte accounted for.

`zipfile` is lenient where files from strangers must not be: it skips data before the zip, lets
entries overlap, and allocates for as many entries as the file claims. Here anything unusual is a
problem, and nothing larger than the limits below is ever held in memory.

Format: APPNOTE 6.3.10, https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import contextlib
import os
import re
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from modelyard.archiver.untrusted import container
from modelyard.archiver.untrusted.container import Bytes, Damaged
from modelyard.archiver.untrusted.names import file_name_problem, name_problems, quoted

STORED = 0
DEFLATED = 8

_END = struct.Struct("<4s4H2LH")
_END_SIGNATURE = b"PK\x05\x06"
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_SIGNATURE = b"PK\x06\x06"
_LOCATOR = struct.Struct("<4sLQL")
_LOCATOR_SIGNATURE = b"PK\x06\x07"
_CENTRAL = struct.Struct("<4s4B4H3L5H2L")
_CENTRAL_SIGNATURE = b"PK\x01\x02"
_LOCAL = struct.Struct("<4s5H3L2H")
_LOCAL_SIGNATURE = b"PK\x03\x04"
_ZIP64_EXTRA = 0x0001
_MAX32 = 0xFFFFFFFF


class NotAZip(Exception):
    """Raise when the file as a whole cannot be read as a zip; the message says why."""


@dataclass(frozen=True)
class ZipRules:
    """What of a zip is taken beyond its structure; these are an archive's."""

    name_problem: Callable[[str], str | None] = file_name_problem
    may_deflate: Callable[[str], bool] = lambda name: True
    may_lack_checksums: bool = False
    """Whether a zip may have CRC-32 0 for all of its entries, as torch can be told to write."""
    max_entries: int = container.MAX_ENTRIES
    max_directory_bytes: int = 16 << 20


def _outside_problem(name: str) -> str | None:
    """Return why a name leaves the file, on any system; torch puts the file's own stem in front."""
    parts = name.split("/")
    is_outside = not name or not parts[0] or ".." in parts
    if is_outside or re.search(r"[\\\x00-\x1f]|^[A-Za-z]:", name):
        return "the name leaves the file's own folder"
    return None


TORCH_RULES = ZipRules(
    name_problem=_outside_problem,
    may_lack_checksums=True,
    max_entries=1_000_000,
    max_directory_bytes=256 << 20,
)
"""Rules for what torch.save, torch.jit.save and torch.export.save write: one entry for each
tensor."""


@dataclass(frozen=True)
class ZipMember(container.Member):
    """One entry as the central directory states it; a name that is not UTF-8 with escapes."""

    raw_name: bytes
    flags: int
    method: int
    crc: int
    packed_bytes: int
    header_offset: int
    mode: int
    extras: tuple[int, ...]
    data: range = range(0)
    """The bytes of the file that hold its packed content, once its own header has been read."""


def read_names(path: Path) -> list[str]:
    """Return the names of a zip's entries, to tell by them what kind of file it is.

    Raises:
        NotAZip: as `read_directory`.
        OSError: it cannot be opened.
    """
    with contextlib.closing(container.OpenFile(os.open(path, os.O_RDONLY))) as file:
        return [entry.name for entry in read_directory(file, TORCH_RULES)[0]]


def read_directory(source: Bytes, rules: ZipRules) -> tuple[tuple[ZipMember, ...], int]:
    """Return the entries in the order of the central directory, and where that directory starts.

    Raises:
        NotAZip: no zip, cut off, or of another structure than one plain zip from first to last
            byte.
    """
    count, size, offset, end = _find_end(source)
    if count > rules.max_entries:
        raise NotAZip(f"it claims {count} entries; at most {rules.max_entries} are read")
    if size > rules.max_directory_bytes:
        raise NotAZip(f"its directory of {size} bytes is over {rules.max_directory_bytes}")
    if offset + size != end:
        raise NotAZip(
            f"its directory should end at byte {offset + size} and ends at {end}: "
            "bytes were added, removed or cut off"
        )
    return tuple(_read_entries(_read_at(source, offset, size), count)), offset


def read_local_header(source: Bytes, entry: ZipMember) -> tuple[bytes, tuple[int, ...], range]:
    """Return the name, numbers and data that the header in front of an entry's data describes.

    The numbers are flags, method, CRC-32, packed size and size.

    Raises:
        NotAZip: there is none where the directory says.
    """
    fields = _LOCAL.unpack(_read_at(source, entry.header_offset, _LOCAL.size))
    signature, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes = fields
    if signature != _LOCAL_SIGNATURE:
        raise NotAZip("there is no header where the directory says")
    names = _read_at(source, entry.header_offset + _LOCAL.size, name_bytes + extra_bytes)
    extras = dict(_extra_fields(names[name_bytes:]))
    size, packed = _resolve64(extras.get(_ZIP64_EXTRA, b""), [size, packed])
    start = entry.header_offset + _LOCAL.size + len(names)
    data = range(start, start + entry.packed_bytes)
    return names[:name_bytes], (flags, method, crc, packed, size), data


def _read_at(source: Bytes, offset: int, count: int) -> bytes:
    data = source.read_at(offset, count)
    if len(data) != count:
        raise NotAZip(f"it ends before byte {offset + count}")
    return data


def _find_end(source: Bytes) -> tuple[int, int, int, int]:
    """Find entry count, directory size, directory offset, and where the directory must end."""
    tail_bytes = min(source.size, _END.size + 0xFFFF)
    if source.size < _END.size:
        raise NotAZip(f"it has {source.size} bytes; the smallest zip has {_END.size}")
    tail = _read_at(source, source.size - tail_bytes, tail_bytes)
    at = tail.rfind(_END_SIGNATURE, 0, len(tail) - _END.size + 4)
    if at < 0:
        raise NotAZip("it is not a zip, or its end is cut off: there is no end-of-directory record")
    end = source.size - tail_bytes + at
    _, disk, first_disk, here, count, size, offset, comment = _END.unpack_from(tail, at)
    if end + _END.size + comment != source.size:
        raise NotAZip("bytes were added or cut off after its end-of-directory record")
    if comment:
        # It may hold a second end for another reader, and neither digests nor signatures cover it.
        raise NotAZip(f"it carries a comment of {comment} bytes, which belong to no entry")
    fields = (disk, first_disk, here, count, size, offset)
    end64 = _find_end64(source, end)
    if end64 is not None:
        limits = (0xFFFF,) * 4 + (_MAX32,) * 2
        wide, end = end64
        if any(a not in (b, limit) for a, b, limit in zip(fields, wide, limits, strict=True)):
            raise NotAZip("its two end-of-directory records differ")
        fields = wide
    disk, first_disk, here, count, size, offset = fields
    if disk or first_disk or here != count:
        raise NotAZip("it is one part of a zip of several files")
    return count, size, offset, end


def _find_end64(source: Bytes, end: int) -> tuple[tuple[int, int, int, int, int, int], int] | None:
    if end < _LOCATOR.size + _END64.size:
        return None
    locator = _LOCATOR.unpack(_read_at(source, end - _LOCATOR.size, _LOCATOR.size))
    if locator[0] != _LOCATOR_SIGNATURE:
        return None
    at = end - _LOCATOR.size - _END64.size
    record = _END64.unpack(_read_at(source, at, _END64.size))
    if record[0] != _END64_SIGNATURE or record[1] != _END64.size - 12 or locator[1:] != (0, at, 1):
        raise NotAZip("its zip64 end-of-directory record is damaged")
    return record[4:], at


def _read_entries(directory: bytes, count: int) -> Iterator[ZipMember]:
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(directory):
            raise NotAZip("its directory ends before the last entry")
        entry, at = _read_entry(directory, at)
        yield entry
    if at != len(directory):
        raise NotAZip("its directory holds more than the entries it counts")


def _read_entry(directory: bytes, at: int) -> tuple[ZipMember, int]:
    fields = _CENTRAL.unpack_from(directory, at)
    (signature, _, _, _, _, flags, method, _, _, crc, packed, size) = fields[:12]
    (name_bytes, extra_bytes, comment_bytes, disk, _, attributes, offset) = fields[12:]
    start = at + _CENTRAL.size
    end = start + name_bytes + extra_bytes + comment_bytes
    if signature != _CENTRAL_SIGNATURE or end > len(directory):
        raise NotAZip(f"its directory is damaged at its byte {at}")
    raw_name = directory[start : start + name_bytes]
    extras = tuple(_extra_fields(directory[start + name_bytes : end - comment_bytes]))
    wide = dict(extras).get(_ZIP64_EXTRA, b"")
    size, packed, offset = _resolve64(wide, [size, packed, offset])
    if disk:
        raise NotAZip("it is one part of a zip of several files")
    entry = ZipMember(
        raw_name=raw_name,
        name=raw_name.decode("utf-8", "backslashreplace"),
        flags=flags,
        method=method,
        crc=crc,
        packed_bytes=packed,
        size_bytes=size,
        header_offset=offset,
        mode=attributes >> 16,
        extras=tuple(kind for kind, _ in extras),
    )
    return entry, end


def _extra_fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(extra):
        kind, count = struct.unpack_from("<2H", extra, at)
        yield kind, extra[at + 4 : at + 4 + count]
        at += 4 + count


def _resolve64(wide: bytes, narrow: list[int]) -> list[int]:
    """Replace each value that says "see the zip64 field" by the next one of that field."""
    values = [value for (value,) in struct.iter_unpack("<Q", wide[: len(wide) // 8 * 8])]
    return [values.pop(0) if value == _MAX32 and values else value for value in narrow]


_UNICODE_PATH_EXTRA = 0x7075
# CRC, packed size and size, with or without a signature, in 32 or 64 bits.
_DESCRIPTOR_BYTES = (12, 16, 20, 24)

_ENCRYPTED = 1 << 0
_STREAMED = 1 << 3
_PATCH = 1 << 5
_STRONG_ENCRYPTION = 1 << 6
_UTF8 = 1 << 11
_MASKED = 1 << 13

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


def entry_problem(entry: ZipMember, rules: ZipRules) -> str | None:
    """Return why one entry must not be unpacked, its name aside, or None."""
    if entry.method != STORED and not rules.may_deflate(entry.name):
        return "it is compressed, and torch stores it"
    return _format_problem(entry) or _kind_problem(entry) or _size_problem(entry)


def local_problem(entry: ZipMember, raw_name: bytes, header: tuple[int, ...]) -> str | None:
    """Return how an entry's own header differs from the directory, or None."""
    if raw_name != entry.raw_name:
        return f"its own header names it {quoted(raw_name.decode('utf-8', 'backslashreplace'))}"
    expected = (entry.flags, entry.method, entry.crc, entry.packed_bytes, entry.size_bytes)
    # A streamed entry's sizes follow its data; its header may leave them 0.
    if header == expected or (entry.flags & _STREAMED and header == (*expected[:2], 0, 0, 0)):
        return None
    return "its own header and the directory differ"


def layout_problems(entries: Sequence[ZipMember], directory_offset: int) -> Iterator[str]:
    """Describe bytes before the directory that no entry, or more than one entry, claims."""
    position, previous, is_streamed = 0, "the start of the file", False
    places = sorted(entries, key=lambda entry: entry.header_offset)
    claims = [(entry.header_offset, quoted(entry.name)) for entry in places]
    claims.append((directory_offset, "the directory"))
    for i, (start, name) in enumerate(claims):
        gap = start - position
        if gap < 0:
            yield f"{previous} and {name} overlap"
        elif gap > 0 and not (is_streamed and gap in _DESCRIPTOR_BYTES):
            yield f"{gap} bytes between {previous} and {name} belong to no entry"
        if i < len(places):
            position, previous = max(position, places[i].data.stop), name
            is_streamed = bool(places[i].flags & _STREAMED)


def total_problem(entries: Sequence[ZipMember], file_bytes: int) -> str | None:
    """Return that the entries together unpack to far more than the file's size, or None."""
    total = sum(entry.size_bytes for entry in entries)
    if total > container.RATIO_FROM_BYTES and total > container.MAX_RATIO * file_bytes:
        return f"its {file_bytes} bytes unpack to {total}, over {container.MAX_RATIO} times as many"
    return None


def _format_problem(entry: ZipMember) -> str | None:
    if entry.flags & (_ENCRYPTED | _STRONG_ENCRYPTION | _MASKED):
        return "it is encrypted"
    if entry.method not in (STORED, DEFLATED) or entry.flags & _PATCH:
        return f"compression method {entry.method} is unknown; 0 (stored) and 8 (deflate) are read"
    if not entry.flags & _UTF8 and not entry.raw_name.isascii():
        return "its name is neither ASCII nor marked as UTF-8"
    if entry.name.encode() != entry.raw_name:
        return "its name is not UTF-8"
    if _UNICODE_PATH_EXTRA in entry.extras:
        return "it carries a second name in an extra field"
    if len(set(entry.extras)) < len(entry.extras):
        return "it carries an extra field twice"
    return None


def _kind_problem(entry: ZipMember) -> str | None:
    kind = stat.S_IFMT(entry.mode)
    expected = stat.S_IFDIR if entry.is_folder else stat.S_IFREG
    if kind in (0, expected):
        return None
    if kind in _KINDS:
        return f"it is {_KINDS[kind]}"
    return "its mode and its name disagree on whether it is a folder"


def _size_problem(entry: ZipMember) -> str | None:
    if entry.is_folder:
        # Deflating nothing takes two bytes.
        has_content = entry.size_bytes or entry.packed_bytes > 2
        return "it is a folder with content" if has_content else None
    if entry.method == STORED and entry.packed_bytes != entry.size_bytes:
        return f"stored in {entry.packed_bytes} bytes, it cannot have {entry.size_bytes}"
    if (
        entry.size_bytes > container.RATIO_FROM_BYTES
        and entry.size_bytes > container.MAX_RATIO * entry.packed_bytes
    ):
        return (
            f"{entry.packed_bytes} bytes that unpack to {entry.size_bytes} "
            f"are a ratio over {container.MAX_RATIO}"
        )
    return None


class ZipReader:
    """A zip that is read at positions only, so threads may share it; `check` reads no content."""

    kind = "zip"

    def __init__(self, source: Bytes, rules: ZipRules = ZipRules()) -> None:
        self.members: tuple[ZipMember, ...] = ()
        self.digests: dict[str, str] = {}
        self.is_readable = False
        self._source = source
        self._rules = rules
        self._has_checksums = True

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if isinstance(self._source, container.OpenFile):
            self._source.close()

    def check(self, progress: container.Progress = lambda done, total: None) -> list[str]:
        """Read the directory and all headers, no content; return all problems."""
        try:
            entries, directory_offset = read_directory(self._source, self._rules)
        except NotAZip as error:
            return [str(error)]
        self._has_checksums = not self._rules.may_lack_checksums or any(e.crc for e in entries)
        problems = name_problems([entry.name for entry in entries], self._rules.name_problem)
        unsafe = [
            f"{quoted(entry.name)}: {problem}"
            for entry in entries
            if (problem := entry_problem(entry, self._rules))
        ]
        if problem := total_problem(entries, self._source.size):
            unsafe.append(problem)
        unsafe += self._locate(entries, directory_offset)
        self.is_readable = not unsafe
        return problems + unsafe

    def map(self, member: ZipMember) -> memoryview | None:
        """Map a stored entry's bytes; None where the entry is compressed, or is not in a file."""
        if member.method == STORED and isinstance(self._source, container.OpenFile):
            return self._source.map(member.data)
        return None

    def chunks(self, member: ZipMember) -> Iterator[bytes]:
        """Yield a member's content, at most 1 MiB at a time; check size and CRC on the way.

        Raises:
            Damaged: at the latest after the last chunk; what was yielded must not be used.
        """
        crc, size = 0, 0
        packed = self._packed_chunks(member.data)
        for chunk in _inflated(packed) if member.method == DEFLATED else packed:
            size += len(chunk)
            if size > member.size_bytes:
                raise Damaged(f"it unpacks to more than the {member.size_bytes} bytes it declares")
            crc = zlib.crc32(chunk, crc)
            yield chunk
        if size != member.size_bytes:
            raise Damaged(f"it unpacks to {size} bytes and declares {member.size_bytes}")
        if crc != member.crc and self._has_checksums:
            raise Damaged(f"its CRC-32 is {crc:08x}, the directory says {member.crc:08x}")

    def _packed_chunks(self, data: range) -> Iterator[bytes]:
        for offset in range(data.start, data.stop, container.CHUNK_BYTES):
            try:
                yield _read_at(self._source, offset, min(container.CHUNK_BYTES, data.stop - offset))
            except NotAZip as error:
                raise Damaged(str(error)) from error

    def _locate(self, entries: Sequence[ZipMember], directory_offset: int) -> list[str]:
        """Find the members' data behind their own headers; return what is wrong with those."""
        problems, members = [], []
        for entry in entries:
            try:
                raw_name, header, data = read_local_header(self._source, entry)
            except NotAZip as error:
                problems.append(f"{quoted(entry.name)}: {error}")
                continue
            members.append(replace(entry, data=data))
            if problem := local_problem(entry, raw_name, header):
                problems.append(f"{quoted(entry.name)}: {problem}")
        if len(members) == len(entries):
            problems += layout_problems(members, directory_offset)
        self.members = tuple(members)
        return problems


def _inflated(packed: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress a raw deflate stream, at most 1 MiB of output at a time."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    for waiting in packed:
        while waiting or not inflater.eof:
            if inflater.eof:
                raise Damaged("bytes follow the end of its compressed data")
            try:
                chunk = inflater.decompress(waiting, container.CHUNK_BYTES)
            except zlib.error as error:
                raise Damaged(f"its compressed data is damaged ({error})") from error
            yield chunk
            waiting = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            if not waiting and len(chunk) < container.CHUNK_BYTES:
                break
    if not inflater.eof:
        raise Damaged("its compressed data ends too early")
