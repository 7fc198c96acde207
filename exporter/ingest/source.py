"""The bytes of a checkpoint, mapped and never copied; the zips and the JSON among them."""

import io
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from modelyard.archiver.untrusted.container import Damaged
from modelyard.archiver.untrusted.json import parse_json
from modelyard.archiver.untrusted.zip import TORCH_RULES, ZipMember, ZipReader
from modelyard.exporter.errors import CheckpointError

MAX_JSON_BYTES = 256 << 20
_MAX_DEPTH = 200  # graphs lie in the nodes of graphs
_MAX_LINE = 64 * 1024
_PEEKED_BYTES = 64
_SHOWN = 5


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

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return len(self.data)

    def read_at(self, offset: int, count: int) -> bytes:
        """Read `count` bytes, and fewer only where the bytes end."""
        return bytes(self.data[offset : offset + count])

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


class TorchZip:
    """A zip as torch writes it; every name and range has been checked.

    What torch writes is plain: entries are stored, but for the text of a program. Only that is
    taken, so that another zip reader cannot see another content in the same bytes.

    Args:
        source: all bytes of the zip.
        may_deflate: says of a name whether its entry may be compressed.

    Attributes:
        entries: by name.

    Raises:
        CheckpointError: it is not a sound zip, or is one that torch would not write.
    """

    def __init__(
        self, source: Source, may_deflate: Callable[[str], bool] = lambda name: False
    ) -> None:
        self.source = source
        self._reader = ZipReader(source, replace(TORCH_RULES, may_deflate=may_deflate))
        if problems := self._reader.check():
            raise CheckpointError(
                f'"{source.name}" is refused: {"; ".join(problems[:_SHOWN])}; expected a file as '
                "torch writes it: it is damaged or cut short, or was changed; copy it again"
            )
        self.entries: Mapping[str, ZipMember] = {m.name: m for m in self._reader.members}

    def read(self, name: str, *, limit: int) -> bytes:
        """Return an entry's content, inflated when it is deflated.

        Args:
            name: of the entry.
            limit: largest size that is read, in bytes.

        Raises:
            CheckpointError: it is larger, or is damaged.
        """
        entry = self.entries[name]
        if entry.size_bytes > limit:
            raise self._refused(name, f"has {entry.size_bytes} bytes; at most {limit} are read")
        return b"".join(self._chunks(entry))

    def part(self, name: str) -> Source:
        """Return a stored entry as a source of its own; its CRC-32 is compared first."""
        place = self._checked(name)
        return self.source.part(name, place.start, len(place))

    def storage(self, name: str) -> torch.UntypedStorage:
        """Return a stored entry as a storage for tensors; its CRC-32 is compared first."""
        place = self._checked(name)
        return self.source.storage(place.start, len(place))

    def _checked(self, name: str) -> range:
        for _ in self._chunks(self.entries[name]):
            pass
        return self.entries[name].data

    def _chunks(self, entry: ZipMember) -> Iterator[bytes]:
        try:
            yield from self._reader.chunks(entry)
        except Damaged as error:
            raise self._refused(entry.name, f"is damaged: {error}") from error

    def _refused(self, name: str, why: str) -> CheckpointError:
        return CheckpointError(
            f'"{self.source.name}" is refused: its entry {name!r} {why}; copy the file again'
        )


def zip_names(source: Source) -> Mapping[str, bytes]:
    """List a zip of any kind by name, with the content of what says its format.

    Raises:
        CheckpointError: it is cut short, or is not a zip.
    """
    reader = ZipReader(source, replace(TORCH_RULES, may_deflate=lambda name: True))
    problems = reader.check()
    if not reader.members and problems:
        raise CheckpointError(
            f'"{source.name}" starts as a zip and is none: {problems[0]}; it is damaged or cut '
            "short: copy it again"
        )
    names = {}
    for member in reader.members:
        names[member.name] = b""
        if member.name.endswith("/archive_format") and member.size_bytes <= _PEEKED_BYTES:
            with suppress(Damaged):
                names[member.name] = b"".join(reader.chunks(member))
    return names


def parse_object(content: bytes | memoryview, name: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        CheckpointError: it is not strict JSON, or not an object.
    """
    try:
        value = parse_json(bytes(content), MAX_JSON_BYTES, max_depth=_MAX_DEPTH)
    except ValueError as error:
        raise CheckpointError(
            f'"{name}" is not valid JSON that can be read ({error}); copy the checkpoint again'
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f'"{name}" is a JSON {type(value).__name__}; expected an object')
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        CheckpointError: it is missing, too large, or not an object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f'"{path.name}" has more than {MAX_JSON_BYTES} bytes')
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f'"{path}" cannot be read: {error.strerror}') from error
    return parse_object(content, path.name)


def read_object_or_nothing(path: Path) -> dict[str, Any]:
    """Read a file that may be there."""
    return read_object(path) if path.is_file() else {}
