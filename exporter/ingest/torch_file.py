"""What `torch.save` writes, in the zip and the legacy format → its object, with tensors mapped.

And TorchScript → the state dict of its module, without loading the program.

Source: `torch/serialization.py`, `_save` and `_legacy_save`.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from modelyard.archiver.untrusted.container import Damaged
from modelyard.archiver.untrusted.zip import TORCH_RULES, ZipMember, ZipReader
from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.pickles import (
    NOT_REBUILT,
    BadPickle,
    Global,
    Pickled,
    UnresolvedCall,
    read_pickle,
)
from modelyard.exporter.ingest.rebuild import Rebuilder, Storage, global_value, storage_dtype
from modelyard.exporter.ingest.source import Source, Window
from modelyard.exporter.ingest.value import ClassHint, ParsedCheckpoint, Weights

MAX_PICKLE_BYTES = 1 << 29
_SHOWN = 5
_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_PROTOCOL_VERSION = 1001
_COUNT_BYTES = 8


@dataclass(frozen=True)
class TorchFile(Pickled):
    """A file of torch.save, read without running anything in it; its tensors are on the CPU."""

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
    return TorchFile(**vars(pickled), sources=storages.sources)


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


# -- TorchScript: names of its tensors stand in the program's text, which is read, not compiled ----

_MAX_CODE = 64 << 20
_MAX_DEPTH = 200
_CLASS = re.compile(r"^class (\w+)\((\w+)\):\n((?:[ ].*\n|\n)*)", re.MULTILINE)
_NAMES = re.compile(r"^  __(parameters|buffers)__ = \[(.*)\]$", re.MULTILINE)


def read_script(source: Source) -> ParsedCheckpoint:
    """Read the tensors, and the program as text.

    Raises:
        CheckpointError: it is damaged.
    """
    container = TorchZip(source, lambda name: "/code/" in name or name.endswith(".debug_pkl"))
    entries = container.entries
    code = {
        name.partition("/code/")[2]: container.read(name, limit=_MAX_CODE).decode(
            "utf-8", "replace"
        )
        for name in entries
        if "/code/" in name and name.endswith(".py")
    }
    try:
        root = read_zip(container).value
        notes = _traced(container)
    except BadPickle as error:
        raise CheckpointError(
            f'"{source.name}" is refused: its pickle holds {error}; expected a file as '
            "torch.jit.save writes it"
        ) from error
    if not isinstance(root, UnresolvedCall):
        raise CheckpointError(f'"{source.name}" holds no TorchScript module; save it again')
    is_mobile = any(name.endswith("/bytecode.pkl") for name in entries)
    return ParsedCheckpoint(
        kind="TorchScript (mobile)" if is_mobile else "TorchScript",
        loader="inert",
        weights={"": Weights(dict(_tensors(root, _declared(code), "", 0)))},
        writer="torch.jit",
        class_hint=ClassHint(root.dotted.removeprefix("__torch__."), "the program's text"),
        sources=code,
        about={"code": sorted(code), "extra": [name for name in entries if "/extra/" in name]},
        notes=tuple(notes),
    )


def _traced(container: TorchZip) -> list[str]:
    """Return what is said of the example rows; some versions of torch leave their content out."""
    entries = container.entries
    shapes: list[tuple[int, ...]] = []

    def record(function: Global, args: tuple[Any, ...]) -> Any:
        if function.name == "_rebuild_tensor_v2" and len(args) > 2 and isinstance(args[2], tuple):
            shapes.append(tuple(size for size in args[2] if isinstance(size, int)))
        return NOT_REBUILT

    for name in [name for name in entries if name.endswith("/traced_inputs.pkl")][:1]:
        content = memoryview(container.read(name, limit=_MAX_CODE))
        read_pickle(Window(content), lambda _: None, record)
    if not shapes:
        return []
    has_rows = any("/traced_inputs/" in name and each.size_bytes for name, each in entries.items())
    rows = ", and the rows themselves are inside" if has_rows else ""
    listed = ", ".join(str(list(shape)) for shape in shapes)
    return [f"it was traced with tensors of shape {listed}{rows}"]


def _declared(code: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Find for each module class the names of its parameters, then of its buffers."""
    found: dict[str, tuple[str, ...]] = {}
    for file, text in code.items():
        module = file.removesuffix(".py").replace("/", ".")
        for name, base, body in _CLASS.findall(text):
            if base == "Module":
                lists = {
                    kind: re.findall(r'"([^"]+)"', names) for kind, names in _NAMES.findall(body)
                }
                found[f"{module}.{name}"] = (
                    *lists.get("parameters", ()),
                    *lists.get("buffers", ()),
                )
    return found


def _tensors(
    module: UnresolvedCall, declared: Mapping[str, tuple[str, ...]], prefix: str, depth: int
) -> Iterator[tuple[str, Tensor]]:
    attributes = module.attributes
    names = declared.get(module.dotted)
    if names is None:  # a program without text: what is a tensor is taken
        names = tuple(name for name, value in attributes.items() if isinstance(value, Tensor))
    for name in names:
        if isinstance(attributes.get(name), Tensor):
            yield prefix + name, attributes[name]
    for name, child in attributes.items():
        is_module = isinstance(child, UnresolvedCall) and isinstance(child.function, Global)
        if is_module and child.dotted in declared and depth < _MAX_DEPTH:
            yield from _tensors(child, declared, f"{prefix}{name}.", depth + 1)
