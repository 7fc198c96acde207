"""A zip file's directory, read strictly: one meaning for every reader, every byte accounted for.

`zipfile` is lenient where archives from strangers must not be: it skips data before the zip, lets
entries overlap, and allocates for as many entries as the file claims. Here anything unusual is a
problem, and nothing larger than the limits below is ever held in memory.

Format: APPNOTE 6.3.10, https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

MAX_ENTRIES = 10_000

_MAX_DIRECTORY_BYTES = 16 * 1024 * 1024

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


class Source(Protocol):
    """A file that is read at given positions."""

    size: int

    def read_at(self, offset: int, count: int) -> bytes:
        """Read exactly `count` bytes, or raise NotAZip."""


class NotAZip(Exception):
    """Raise when the file as a whole cannot be read as a zip; the message says why."""


@dataclass(frozen=True)
class Entry:
    """One entry as the central directory states it."""

    raw_name: bytes
    name: str
    """A folder's ends with "/"; bytes that are not UTF-8 are shown as escapes."""
    flags: int
    method: int
    crc: int
    packed_bytes: int
    size_bytes: int
    header_offset: int
    mode: int
    extras: tuple[int, ...]

    @property
    def is_folder(self) -> bool:
        """Return whether the entry is a folder."""
        return self.name.endswith("/")


@dataclass(frozen=True)
class LocalHeader:
    """The copy of an entry's description that stands before its data."""

    raw_name: bytes
    flags: int
    method: int
    crc: int
    packed_bytes: int
    size_bytes: int
    data_offset: int


@dataclass(frozen=True)
class Directory:
    """The entries in the order of the central directory, and where that directory starts."""

    entries: tuple[Entry, ...]
    offset: int


def read_directory(source: Source) -> Directory:
    """Read the central directory.

    Raises:
        NotAZip: no zip, cut off, or of another structure than one plain zip from first to last
            byte.
    """
    count, size, offset, end = _find_end(source)
    if count > MAX_ENTRIES:
        raise NotAZip(f"it claims {count} entries; at most {MAX_ENTRIES} are read")
    if size > _MAX_DIRECTORY_BYTES:
        raise NotAZip(f"its directory of {size} bytes is over {_MAX_DIRECTORY_BYTES}")
    if offset + size != end:
        raise NotAZip(
            f"its directory should end at byte {offset + size} and ends at {end}: "
            "bytes were added, removed or cut off"
        )
    entries = tuple(_read_entries(source.read_at(offset, size), count))
    return Directory(entries, offset)


def read_local_header(source: Source, entry: Entry) -> LocalHeader:
    """Read the header in front of an entry's data.

    Raises:
        NotAZip: there is none where the directory says.
    """
    fields = _LOCAL.unpack(source.read_at(entry.header_offset, _LOCAL.size))
    signature, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes = fields
    if signature != _LOCAL_SIGNATURE:
        raise NotAZip("there is no header where the directory says")
    names = source.read_at(entry.header_offset + _LOCAL.size, name_bytes + extra_bytes)
    extras = dict(_extra_fields(names[name_bytes:]))
    size, packed = _resolve64(extras.get(_ZIP64_EXTRA, b""), [size, packed])
    start = entry.header_offset + _LOCAL.size + len(names)
    return LocalHeader(names[:name_bytes], flags, method, crc, packed, size, start)


def _find_end(source: Source) -> tuple[int, int, int, int]:
    """Find entry count, directory size, directory offset, and where the directory must end."""
    tail_bytes = min(source.size, _END.size + 0xFFFF)
    if source.size < _END.size:
        raise NotAZip(f"it has {source.size} bytes; the smallest zip has {_END.size}")
    tail = source.read_at(source.size - tail_bytes, tail_bytes)
    at = tail.rfind(_END_SIGNATURE, 0, len(tail) - _END.size + 4)
    if at < 0:
        raise NotAZip("it is not a zip, or its end is cut off: there is no end-of-directory record")
    end = source.size - tail_bytes + at
    _, disk, first_disk, here, count, size, offset, comment = _END.unpack_from(tail, at)
    if end + _END.size + comment != source.size:
        raise NotAZip("bytes were added or cut off after its end-of-directory record")
    stated = (disk, first_disk, here, count, size, offset)
    end64 = _find_end64(source, end)
    if end64 is not None:
        limits = (0xFFFF,) * 4 + (_MAX32,) * 2
        wide, end = end64
        if any(a not in (b, limit) for a, b, limit in zip(stated, wide, limits, strict=True)):
            raise NotAZip("its two end-of-directory records differ")
        stated = wide
    disk, first_disk, here, count, size, offset = stated
    if disk or first_disk or here != count:
        raise NotAZip("it is one part of a zip of several files")
    return count, size, offset, end


def _find_end64(source: Source, end: int) -> tuple[tuple[int, int, int, int, int, int], int] | None:
    if end < _LOCATOR.size + _END64.size:
        return None
    locator = _LOCATOR.unpack(source.read_at(end - _LOCATOR.size, _LOCATOR.size))
    if locator[0] != _LOCATOR_SIGNATURE:
        return None
    at = end - _LOCATOR.size - _END64.size
    record = _END64.unpack(source.read_at(at, _END64.size))
    if record[0] != _END64_SIGNATURE or record[1] != _END64.size - 12 or locator[1:] != (0, at, 1):
        raise NotAZip("its zip64 end-of-directory record is damaged")
    return record[4:], at


def _read_entries(directory: bytes, count: int) -> Iterator[Entry]:
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(directory):
            raise NotAZip("its directory ends before the last entry")
        entry, at = _read_entry(directory, at)
        yield entry
    if at != len(directory):
        raise NotAZip("its directory holds more than the entries it counts")


def _read_entry(directory: bytes, at: int) -> tuple[Entry, int]:
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
    entry = Entry(
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
