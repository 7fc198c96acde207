"""What makes a zip entry, or the places of all entries in the file, unsafe."""

import stat
from collections.abc import Iterator, Sequence

from modelyard.archiver.untrusted.container import MAX_RATIO, RATIO_FROM_BYTES
from modelyard.archiver.untrusted.names import quoted
from modelyard.archiver.untrusted.zip_directory import Directory, Entry, LocalHeader

STORED = 0
DEFLATED = 8

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


def entry_problem(entry: Entry) -> str | None:
    """Return why one entry must not be unpacked, its name aside, or None."""
    return _format_problem(entry) or _kind_problem(entry) or _size_problem(entry)


def local_problem(entry: Entry, local: LocalHeader) -> str | None:
    """Return how an entry's own header differs from the directory, or None."""
    if local.raw_name != entry.raw_name:
        shown = quoted(local.raw_name.decode("utf-8", "backslashreplace"))
        return f"its own header names it {shown}"
    stated = (local.flags, local.method, local.crc, local.packed_bytes, local.size_bytes)
    expected = (entry.flags, entry.method, entry.crc, entry.packed_bytes, entry.size_bytes)
    # A streamed entry's sizes follow its data; its header may leave them 0.
    if stated == expected or (entry.flags & _STREAMED and stated == (*expected[:2], 0, 0, 0)):
        return None
    return "its own header and the directory differ"


def layout_problems(directory: Directory, data: Sequence[range]) -> Iterator[str]:
    """Describe bytes before the directory that no entry, or more than one entry, claims.

    Args:
        directory: what `read_directory` gave.
        data: for every entry, in the same order, the bytes that hold its packed data.
    """
    position, previous, is_streamed = 0, "the start of the file", False
    places = sorted(
        zip(directory.entries, data, strict=True), key=lambda place: place[0].header_offset
    )
    claims = [(entry.header_offset, quoted(entry.name)) for entry, _ in places]
    claims.append((directory.offset, "the directory"))
    for i, (start, name) in enumerate(claims):
        gap = start - position
        if gap < 0:
            yield f"{previous} and {name} overlap"
        elif gap > 0 and not (is_streamed and gap in _DESCRIPTOR_BYTES):
            yield f"{gap} bytes between {previous} and {name} belong to no entry"
        if i < len(places):
            entry, data_range = places[i]
            position, previous = max(position, data_range.stop), name
            is_streamed = bool(entry.flags & _STREAMED)


def total_problem(entries: Sequence[Entry], file_bytes: int) -> str | None:
    """Return that the entries together unpack to far more than the file's size, or None."""
    total = sum(entry.size_bytes for entry in entries)
    if total > RATIO_FROM_BYTES and total > MAX_RATIO * file_bytes:
        return f"its {file_bytes} bytes unpack to {total}, over {MAX_RATIO} times as many"
    return None


def _format_problem(entry: Entry) -> str | None:
    if entry.flags & (_ENCRYPTED | _STRONG_ENCRYPTION | _MASKED):
        return "it is encrypted"
    if entry.method not in (STORED, DEFLATED) or entry.flags & _PATCH:
        return f"compression method {entry.method} is unknown; 0 (stored) and 8 (deflate) are read"
    if not entry.flags & _UTF8 and not entry.raw_name.isascii():
        return "its name is neither ASCII nor marked as UTF-8"
    if not _is_utf8(entry.raw_name):
        return "its name is not UTF-8"
    if _UNICODE_PATH_EXTRA in entry.extras:
        return "it carries a second name in an extra field"
    if len(set(entry.extras)) < len(entry.extras):
        return "it carries an extra field twice"
    return None


def _is_utf8(raw_name: bytes) -> bool:
    try:
        raw_name.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _kind_problem(entry: Entry) -> str | None:
    kind = stat.S_IFMT(entry.mode)
    expected = stat.S_IFDIR if entry.is_folder else stat.S_IFREG
    if kind in (0, expected):
        return None
    if kind in _KINDS:
        return f"it is {_KINDS[kind]}"
    return "its mode and its name disagree on whether it is a folder"


def _size_problem(entry: Entry) -> str | None:
    if entry.is_folder:
        # Deflating nothing takes two bytes.
        has_content = entry.size_bytes or entry.packed_bytes > 2
        return "it is a folder with content" if has_content else None
    if entry.method == STORED and entry.packed_bytes != entry.size_bytes:
        return f"stored in {entry.packed_bytes} bytes, it cannot have {entry.size_bytes}"
    if entry.size_bytes > RATIO_FROM_BYTES and entry.size_bytes > MAX_RATIO * entry.packed_bytes:
        return (
            f"{entry.packed_bytes} bytes that unpack to {entry.size_bytes} "
            f"are a ratio over {MAX_RATIO}"
        )
    return None
