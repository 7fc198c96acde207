"""What `torch.save` writes, in the zip and the legacy format → its object, with tensors mapped.

Source: `torch/serialization.py`, `_save` and `_legacy_save`.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from modelyard.archiver.untrusted.container import Damaged
from modelyard.archiver.untrusted.zip import TORCH_RULES, ZipMember, ZipReader
from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.pickles import BadPickle, Global, Pickled, read_pickle
from modelyard.exporter.ingest.rebuild import Rebuilder, Storage, global_value, storage_dtype
from modelyard.exporter.ingest.source import Source, Window

MAX_PICKLE_BYTES = 1 << 29
_SHOWN = 5
_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_PROTOCOL_VERSION = 1001
_COUNT_BYTES = 8


@dataclass(frozen=True)
class TorchFile(Pickled):
    """A file of torch.save, read without running anything in it; its tensors are on the CPU."""

    is_legacy: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source text of module classes by name, in legacy files of whole modules; never compiled."""


class TorchZip:
    """A zip as torch writes it; every name and range has been checked.

    What torch writes is plain: entries are stored, but for the text of a program. Only that is
    taken, so that another zip reader cannot see another content in the same bytes.

    Args:
        source: all bytes of the zip.
        may_deflate: says of a name whether its entry may be compressed.

    Attributes:
        entries: name → entry.

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
            name: name of the entry.
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


def read_torch_file(source: Source) -> TorchFile:
    """Read a file of torch.save; the tensors lie on its pages until they are looked at.

    Raises:
        CheckpointError: it is damaged, or asks for more than its own bytes.
    """
    try:
        if bytes(source.data[:2]) == b"PK":
            return read_zip(TorchZip(source))
        return _read_legacy(source)
    except BadPickle as error:
        raise CheckpointError(
            f'"{source.name}" is refused: its pickle holds {error}; expected a file as torch.save '
            "writes it: copy it again, or save model.state_dict() anew"
        ) from error


def read_zip(container: TorchZip) -> TorchFile:
    """Read the `data.pkl` of a zip that torch wrote, with the storages beside it.

    Raises:
        BadPickle: the pickle is damaged or hostile.
        CheckpointError: a storage is missing, is damaged, or has another size.
    """
    entries = container.entries
    # The folder on top is the file's stem when it was saved, whatever it is called now.
    path = next(name for name in entries if name.endswith("/data.pkl"))
    top = path.removesuffix("data.pkl")
    order = f"{top}byteorder"
    is_swapped = order in entries and container.read(order, limit=16) != sys.byteorder.encode()
    storages: dict[str, torch.UntypedStorage] = {}

    def load(identifier: Any) -> Storage:
        dtype, key, numel = _storage_identifier(identifier, length=5)
        entry = entries.get(f"{top}data/{key}")
        if entry is None or entry.size_bytes != numel * dtype.itemsize:
            seen = "is missing" if entry is None else f"has {entry.size_bytes} bytes"
            raise BadPickle(f"storage {key!r} of {numel} × {dtype}, which {seen}")
        if key not in storages:
            storages[key] = container.storage(entry.name)
            if is_swapped:
                storages[key] = _copy_swapped(storages[key], dtype)
        return Storage(storages[key], dtype)

    rebuild = Rebuilder()
    content = memoryview(container.read(path, limit=MAX_PICKLE_BYTES))
    pickled = read_pickle(Window(content), load, rebuild, global_value)
    rebuild.check_contents()
    return TorchFile(**vars(pickled))


def load_as_torch(source: Source, file: TorchFile) -> Any:
    """Let torch's own weights-only loader read a file that `read_torch_file` has read whole.

    Only then: torch makes some calls of its table as the file tells it, `bytearray(10**12)` too.

    Returns:
        torch's object; the other reader's where torch cannot read the pickle's protocol.
    """
    # By this suffix torch takes another reader, whatever the content.
    is_named_otherwise = source.path is not None and source.path.suffix == ".safetensors"
    mapped = None if file.is_legacy or is_named_otherwise else source.path
    checked = torch.sparse.check_sparse_tensor_invariants()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings(), checked:
            # Said of protocols that it then reads or refuses.
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
            # From torch 2.14 on; `checked` asks for it.
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants", UserWarning)
            # A quantised tensor is rebuilt through it.
            warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
            return torch.load(
                mapped or source.open(),
                map_location="cpu",
                weights_only=True,
                mmap=mapped is not None,
            )
    # torch refuses in whatever way its parser reaches; what was read already stands.
    except Exception:
        return None


def _read_legacy(source: Source) -> TorchFile:
    """Read five pickles, back to back, and the storages behind them."""
    stream = Window(source.data)
    rebuild = Rebuilder(storages_are_filled=False)
    storages = _LegacyStorages(source)
    magic = read_pickle(stream, storages.refuse, rebuild).value
    version = read_pickle(stream, storages.refuse, rebuild).value
    if magic != _MAGIC_NUMBER or version != _PROTOCOL_VERSION:
        raise BadPickle("another magic number than torch's legacy format")
    read_pickle(stream, storages.refuse, rebuild)  # sizes of C types where it was written
    pickled = read_pickle(stream, storages.load, rebuild, global_value)
    keys = read_pickle(stream, storages.refuse, rebuild).value
    storages.fill(keys, stream.tell())
    rebuild.check_contents()
    return TorchFile(**vars(pickled), is_legacy=True, sources=storages.sources)


class _LegacyStorages:
    """Storages that are named by the pickle first and follow it in the file."""

    def __init__(self, source: Source) -> None:
        self.sources: dict[str, str] = {}
        self._source = source
        self._made: dict[str, Storage] = {}
        self._views: dict[str, Storage] = {}
        self._bytes_left = source.size

    def refuse(self, identifier: Any) -> Any:
        raise BadPickle("a storage outside the pickle that may name some")

    def load(self, identifier: Any) -> Any:
        if isinstance(identifier, tuple) and identifier[:1] == ("module",):
            return self._module(identifier)
        dtype, key, numel = _storage_identifier(identifier, length=6)
        storage = self._made.get(key) or self._make(key, dtype, numel)
        return storage if identifier[5] is None else self._view(storage, identifier[5])

    def fill(self, keys: Any, position: int) -> None:
        """Copy each storage's content from the file: its count of elements, then the elements."""
        if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(self._made):
            raise BadPickle("storages that are not those of its list")
        for key in keys:
            storage = self._made[key]
            head = self._source.part(f"storage {key}", position, _COUNT_BYTES).data
            position += _COUNT_BYTES
            if int.from_bytes(head, "little") * storage.dtype.itemsize != storage.nbytes:
                raise BadPickle(f"storage {key!r} with another size than the pickle says")
            content = self._source.part(f"storage {key}", position, storage.nbytes)
            position += storage.nbytes
            found = content.storage(0, storage.nbytes)
            # The file is little-endian, wherever it was written.
            is_big = sys.byteorder == "big"
            storage.untyped.copy_(_copy_swapped(found, storage.dtype) if is_big else found)

    def _make(self, key: str, dtype: torch.dtype, numel: int) -> Storage:
        # Each storage's bytes are in the file, so all of them are no more than it has.
        self._bytes_left -= numel * dtype.itemsize
        if self._bytes_left < 0:
            raise BadPickle(f"storage {key!r} of {numel} × {dtype}, more than the file has")
        made = torch.zeros(numel * dtype.itemsize, dtype=torch.uint8).untyped_storage()
        self._made[key] = Storage(made, dtype)
        return self._made[key]

    def _view(self, storage: Storage, view: Any) -> Storage:
        key, *span = view if isinstance(view, tuple) else ("",)
        if len(span) != 2 or not all(type(number) is int and number >= 0 for number in span):
            raise BadPickle("a view of a storage that is not a range")
        start, size = (number * storage.dtype.itemsize for number in span)
        if start + size > storage.nbytes:
            raise BadPickle("a view that leaves its storage")
        if str(key) not in self._views:
            self._views[str(key)] = Storage(storage.untyped[start : start + size], storage.dtype)
        return self._views[str(key)]

    def _module(self, identifier: tuple[Any, ...]) -> Any:
        """Keep the text of a module's class for a person to read."""
        if len(identifier) != 4 or not isinstance(identifier[1], Global):
            raise BadPickle("a module without a class")
        _, found, _file, text = identifier
        if isinstance(text, str):
            self.sources[found.dotted] = text
        return found


def _copy_swapped(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.UntypedStorage:
    """Copy a storage with the bytes of each element in the other order."""
    copied: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
    if copied.nbytes():
        copied.byteswap(dtype)  # type: ignore[no-untyped-call]
    return copied


def _storage_identifier(identifier: Any, length: int) -> tuple[torch.dtype, str, int]:
    """Read `("storage", type, key, location, number of elements, …)`; the location is ignored."""
    is_id = isinstance(identifier, tuple) and len(identifier) == length
    word, kind, key, _location, numel = identifier[:5] if is_id else [None] * 5
    if word not in ("storage", b"storage") or not isinstance(key, str):
        raise BadPickle("a persistent id that is not a storage")
    if type(numel) is not int or not 0 <= numel < 1 << 56:
        raise BadPickle(f"a storage of {numel} elements")
    return storage_dtype(kind), key, numel
