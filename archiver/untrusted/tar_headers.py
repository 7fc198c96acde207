"""The headers of a tar, read strictly: one meaning for every reader.

`tarfile` is lenient where archives from strangers must not be: it makes up for broken headers,
follows links, and knows many ways to name a file. Here a member is a file or a folder, and
anything unusual is a problem.

Format: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Header Block".
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from modelyard.archiver.untrusted.container import Damaged
from modelyard.archiver.untrusted.zip_directory import MAX_ENTRIES

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
class TarEntry:
    """One file or folder of a tar."""

    name: str
    size_bytes: int
    kind: str | None
    """What it is when it is neither a file nor a folder."""
    is_folder: bool


def read_entries(read: Read) -> Iterator[TarEntry]:
    """Yield the entries up to the empty block that ends the tar.

    The caller reads each entry's content, padded to whole blocks, before it asks for the next.

    Raises:
        Damaged: a header cannot be understood.
    """
    count = 0
    while any(block := read(BLOCK_BYTES)):
        extended: dict[str, str] = {}
        while (flag := block[156:157]) in (_PAX, _PAX_GLOBAL, _GNU_NAME):
            extended |= _extended(flag, _content(read, _header(block)), extended)
            block = read(BLOCK_BYTES)
        count += 1
        if count > MAX_ENTRIES:
            raise Damaged(f"it holds more than {MAX_ENTRIES} files")
        yield _entry(_header(block), flag, extended)


@dataclass(frozen=True)
class _Header:
    name: str
    size_bytes: int


def _header(block: bytes) -> _Header:
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
    return _Header(name, _number(block[124:136]))


def _entry(header: _Header, flag: bytes, extended: dict[str, str]) -> TarEntry:
    name = extended.get("path", header.name)
    size = int(extended["size"]) if "size" in extended else header.size_bytes
    kind = None
    if flag not in _FILE + _FOLDER:
        kind = _KINDS.get(flag, "neither a file nor a folder")
    elif flag != _FOLDER and name.endswith("/"):
        kind = "a file with the name of a folder"
    elif flag == _FOLDER and size:
        kind = "a folder with content"
    if flag == _FOLDER:
        name = name.rstrip("/") + "/"
    return TarEntry(name, size, kind, flag == _FOLDER)


def _content(read: Read, header: _Header) -> bytes:
    if header.size_bytes > _MAX_EXTENDED_BYTES:
        raise Damaged(f"an extended header has {header.size_bytes} bytes")
    padded = header.size_bytes + -header.size_bytes % BLOCK_BYTES
    return read(padded)[: header.size_bytes]


def _extended(flag: bytes, data: bytes, before: dict[str, str]) -> dict[str, str]:
    """Read an extended header: what it says of the next entry."""
    if flag == _GNU_NAME:
        found = {"path": _text(data)}
    else:
        found = dict(_pax_records(data))
        if flag == _PAX_GLOBAL and found:
            raise Damaged("a header for all entries names a path or a size")
    if found.keys() & before.keys():
        raise Damaged("an entry is named, or its size is given, twice")
    return found


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
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.rstrip(b"\0 ").lstrip(b" ")
    if not re.fullmatch(rb"[0-7]*", digits):
        raise Damaged("a number in a header is damaged")
    return int(digits or b"0", 8)
