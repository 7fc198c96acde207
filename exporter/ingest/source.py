"""The bytes of a checkpoint, mapped and never copied, and the directory of a zip among them."""

import io
import mmap
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from modelyard.exporter.errors import CheckpointError

_MAX_LINE = 64 * 1024
_MAX_RATIO = 200
_MAX_INFLATED = 8 << 30
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_LOCAL_MAGIC = b"PK\x03\x04"
_END_MAGIC = b"PK\x05\x06"
_END_BYTES = 22


class Source:
    """Bytes with a name: a file, mapped copy-on-write, or a part of one.

    Attributes:
        name: what messages call it.
        path: the file, when these are all of its bytes.
        data: the bytes.
    """

    def __init__(self, name: str, data: memoryview, path: Path | None = None) -> None:
        self.name = name
        self.path = path
        self.data = data
        self._storage: torch.UntypedStorage | None = None

    @classmethod
    def of_file(cls, path: Path) -> "Source":
        """Map a file; its pages are read when they are looked at."""
        try:
            with path.open("rb") as file:
                if not path.stat().st_size:
                    raise CheckpointError(
                        f'"{path.name}" is empty; expected a checkpoint: copy it again'
                    )
                # Copy-on-write: tensors on it can be written to, and the file stays as it is.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f'"{path}" cannot be read: {error.strerror}') from error
        return cls(path.name, memoryview(mapped), path)

    @classmethod
    def of_bytes(cls, name: str, data: bytes) -> "Source":
        """Take bytes that were read already; tensors on them can be written to."""
        return cls(name, memoryview(bytearray(data)))

    def __len__(self) -> int:
        return len(self.data)

    def part(self, name: str, start: int, size: int) -> "Source":
        """Return a range of the bytes, as a source of its own.

        Raises:
            CheckpointError: it leaves the bytes.
        """
        if start < 0 or size < 0 or start + size > len(self.data):
            raise CheckpointError(
                f'"{self.name}": {name} would be bytes {start} to {start + size} of '
                f"{len(self.data)}; the file is damaged or cut short: copy it again"
            )
        return Source(name, self.data[start : start + size])

    def storage(self, start: int, size: int) -> torch.UntypedStorage:
        """Return a range, checked by the caller, as a storage for tensors; no byte is copied."""
        if self._storage is None:
            self._storage = torch.frombuffer(self.data, dtype=torch.uint8).untyped_storage()
        part: torch.UntypedStorage = self._storage[start : start + size]
        return part

    def open(self) -> BinaryIO:
        """Return the bytes as a stream for `torch.load` and readers of headers."""
        return io.BytesIO(self.data)


def copy_swapped(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.UntypedStorage:
    """Copy a storage with the bytes of each element in the other order."""
    copied: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
    if copied.nbytes():
        copied.byteswap(dtype)  # type: ignore[no-untyped-call]
    return copied


class Window:
    """A stream over bytes that never allocates more than there is to read."""

    def __init__(self, data: memoryview, position: int = 0) -> None:
        self._data = data
        self._position = position

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes; all that is left when it is negative."""
        left = len(self._data) - self._position
        taken = max(left, 0) if size < 0 or size > left else size
        start, self._position = self._position, self._position + taken
        return bytes(self._data[start : start + taken])

    def readline(self) -> bytes:
        """Return bytes to the next newline; of a longer line, its first 64 KiB."""
        ahead = bytes(self._data[self._position : self._position + _MAX_LINE])
        end = ahead.find(b"\n") + 1
        line = ahead[:end] if end else ahead
        self._position += len(line)
        return line

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move, as files do."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """Return where the next read starts."""
        return self._position


@dataclass(frozen=True)
class Entry:
    """One file of a zip; `start` and `stored` are the place and number of its bytes there."""

    name: str
    start: int
    stored: int
    size: int
    is_deflated: bool
    crc: int


def read_directory(
    source: Source, may_deflate: Callable[[str], bool] = lambda name: False
) -> Mapping[str, Entry]:
    """List a zip's entries; every name and range has been checked when it returns.

    What torch writes is plain: entries are stored, without a comment, without bytes in front. Only
    that is taken, so that another zip reader cannot see another content in the same bytes.

    Args:
        source: all bytes of the zip.
        may_deflate: says of a name whether its entry may be compressed.

    Raises:
        CheckpointError: no sound zip, or one that torch would not write.
    """
    data = source.data
    if bytes(data[-_END_BYTES:][:4]) != _END_MAGIC:
        raise CheckpointError(
            f'"{source.name}" starts as a zip and does not end as one: it is cut short, or has '
            "bytes behind its directory; copy it again"
        )
    try:
        with zipfile.ZipFile(Window(data)) as container:
            listed = container.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
        raise CheckpointError(
            f'"{source.name}" is a damaged zip ({error}); copy it again'
        ) from error
    entries: dict[str, Entry] = {}
    for info in listed:
        entry = _check_entry(source, info, may_deflate)
        if entry.name in entries:
            raise _refused(source, entry.name, "is there twice")
        entries[entry.name] = entry
    _check_overlap(source, entries)
    return entries


def read_entry(source: Source, entry: Entry, *, limit: int) -> bytes:
    """Return an entry's content, inflated when it is deflated.

    Args:
        source: the zip.
        entry: one of its entries.
        limit: largest size that is read, in bytes.

    Raises:
        CheckpointError: it is larger, or is damaged.
    """
    if entry.size > limit:
        raise _refused(source, entry.name, f"has {entry.size} bytes; at most {limit} are read")
    raw = bytes(source.data[entry.start : entry.start + entry.stored])
    if not entry.is_deflated:
        return raw
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        content = inflater.decompress(raw, entry.size + 1)
    except zlib.error as error:
        raise _refused(source, entry.name, f"is damaged ({error})") from error
    if len(content) != entry.size or zlib.crc32(content) != entry.crc:
        raise _refused(source, entry.name, "is not what the zip's directory says")
    return content


def is_safe_name(name: str) -> bool:
    """Return whether a name inside a container stays inside it, on every system."""
    parts = name.split("/")
    return bool(name) and not (
        re.search(r"[\\\x00-\x1f]|^[A-Za-z]:", name) or ".." in parts or parts[0] == ""
    )


def _check_entry(
    source: Source, info: zipfile.ZipInfo, may_deflate: Callable[[str], bool]
) -> Entry:
    name = info.orig_filename
    if name != info.filename or not is_safe_name(name):
        raise _refused(source, name, "leaves the file's own folder")
    if info.flag_bits & 1:
        raise _refused(source, name, "is encrypted")
    is_deflated = info.compress_type == zipfile.ZIP_DEFLATED
    if info.compress_type != zipfile.ZIP_STORED and not (is_deflated and may_deflate(name)):
        raise _refused(source, name, "is compressed, and torch stores what it writes")
    if not is_deflated and info.file_size != info.compress_size:
        raise _refused(source, name, "has two sizes")
    if is_deflated and info.file_size > max(_MAX_RATIO * info.compress_size, 4096):
        raise _refused(source, name, f"would grow by more than {_MAX_RATIO} times")
    if is_deflated and info.file_size > _MAX_INFLATED:
        raise _refused(source, name, f"would grow to {info.file_size} bytes")
    return Entry(
        name=name,
        start=_payload_start(source, info),
        stored=info.compress_size,
        size=info.file_size,
        is_deflated=is_deflated,
        crc=info.CRC,
    )


def _payload_start(source: Source, info: zipfile.ZipInfo) -> int:
    name, offset = info.orig_filename, info.header_offset
    header = bytes(source.data[max(offset, 0) : max(offset, 0) + _LOCAL_HEADER.size])
    if offset < 0 or len(header) < _LOCAL_HEADER.size or header[:4] != _LOCAL_MAGIC:
        raise _refused(source, name, "is not where the zip's directory says")
    name_bytes, extra_bytes = map(int, _LOCAL_HEADER.unpack(header)[-2:])
    start: int = offset + _LOCAL_HEADER.size
    own = bytes(source.data[start : start + name_bytes])
    if own != name.encode("utf-8" if info.flag_bits & 0x800 else "cp437"):
        raise _refused(source, name, "has another name in its own header")
    start += name_bytes + extra_bytes
    if start + info.compress_size > len(source):
        raise _refused(source, name, "ends behind the end of the file")
    return start


def _check_overlap(source: Source, entries: Mapping[str, Entry]) -> None:
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: entry.start):
        if entry.start < end:
            raise _refused(source, entry.name, "shares bytes with another entry")
        end = entry.start + entry.stored


def _refused(source: Source, name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f'"{source.name}" is refused: its entry {name!r} {why}; '
        "expected a file as torch.save writes it"
    )
