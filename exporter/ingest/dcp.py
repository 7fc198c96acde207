"""torch.distributed.checkpoint: an index and slices → tensors.

torch's own reader unpickles the index and every item without limits. Here the index is read as
placeholders, its fields are checked, and each item is a file of torch.save in a range of bytes.

Source: `torch/distributed/checkpoint/metadata.py` and `filesystem.py`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.pickles import BadPickle, Global, UnresolvedCall, read_pickle
from modelyard.exporter.ingest.rebuild import Rebuilder, global_value
from modelyard.exporter.ingest.source import Source, Window, inside
from modelyard.exporter.ingest.torch_file import TorchFile, read_torch_file
from modelyard.exporter.ingest.value import as_dict, as_text
from modelyard.exporter.tables import read_table

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = frozenset(read_table(__package__, "allowed")["dcp"])
_DTYPES = frozenset(str(each) for each in vars(torch).values() if isinstance(each, torch.dtype))
_MAX_INDEX_BYTES = 1 << 30
_MAX_BYTES_ITEM = 1 << 28
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

_Place = tuple[int, ...] | None
"""Offsets in a tensor; None of a value that is pickled as one."""


class _Wrong(ValueError):
    """What the index says of an item is not so."""


class Slice(NamedTuple):
    """Where one item lies."""

    file: str
    offset: int
    size: int


@dataclass(frozen=True)
class Item:
    """One tensor of the index, with its chunks; or one pickled value, without."""

    name: str
    path: tuple[str, ...]
    """Keys in the object that was saved."""
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    chunks: Mapping[_Place, Slice]


@dataclass(frozen=True)
class Index:
    """A `.metadata`, checked."""

    folder: Path
    items: Mapping[str, Item]
    version: str | None
    _sources: dict[str, Source] = field(default_factory=dict)
    """The slices' files, each mapped once."""

    def read(self, part: Slice) -> TorchFile:
        """Read a range of one file, in which a file of torch.save lies."""
        if part.file not in self._sources:
            self._sources[part.file] = Source.of_file(self.folder / part.file)
        source, name = self._sources[part.file], f"{part.file}[{part.offset}:]"
        return read_torch_file(source.part(name, part.offset, part.size))

    @property
    def paths(self) -> tuple[Path, ...]:
        """List the index and every file that it names."""
        names = {part.file for item in self.items.values() for part in item.chunks.values()}
        return (self.folder / ".metadata", *(self.folder / name for name in sorted(names)))


def read_index(folder: Path) -> Index:
    """Read `.metadata` and check every name and range in it against the files that are there.

    Raises:
        CheckpointError: it names what no index needs, or a slice leaves its file.
    """
    source, refused = Source.of_file(inside(folder, ".metadata")), f'"{folder.name}" is refused: '
    if source.size > _MAX_INDEX_BYTES:
        raise CheckpointError(f'"{folder.name}/.metadata" has more than {_MAX_INDEX_BYTES} bytes')
    try:
        rebuild = partial(_rebuild, Rebuilder())
        read = read_pickle(Window(source.data), _no_storage, rebuild, global_value)
    except BadPickle as error:
        raise CheckpointError(f"{refused}its index holds {error}") from error
    if unknown := sorted(read.wanted - _ALLOWED - _DTYPES):
        raise CheckpointError(
            f"{refused}its index wants {', '.join(unknown)}, which no checkpoint's index needs, "
            "and loading it could run code; nothing was run"
        )
    try:
        fields = _fields(read.value, "Metadata")
        slices = _slices(folder, fields.get("storage_data"))
        entries, paths = fields.get("state_dict_metadata"), as_dict(fields.get("planner_data"))
        if not isinstance(entries, Mapping) or not all(isinstance(name, str) for name in entries):
            raise _Wrong("its index has no names")
        items = {name: _item(name, entry, slices, paths) for name, entry in entries.items()}
    except _Wrong as error:
        raise CheckpointError(f"{refused}{error}; copy it again") from error
    return Index(folder, items, as_text(fields.get("version")))


def read_tensor(index: Index, item: Item) -> Tensor:
    """Put one tensor together from its chunks.

    Raises:
        CheckpointError: a chunk is not the tensor that the index says.
    """
    whole = torch.empty(item.shape, dtype=item.dtype)
    filled = 0
    for offsets, part in item.chunks.items():
        tensor, starts = index.read(part).value, offsets or ()
        problem = f"is not a tensor of {item.dtype} in {part.file}"
        if isinstance(tensor, Tensor) and tensor.dtype == item.dtype:
            problem = "has a chunk that leaves it"
            if len(starts) == tensor.ndim == len(item.shape):
                if tensor.shape == item.shape and not any(starts):
                    return tensor  # mapped, not copied
                ends = [start + size for start, size in zip(starts, tensor.shape, strict=True)]
                if all(end <= size for end, size in zip(ends, item.shape, strict=True)):
                    whole[tuple(map(slice, starts, ends))] = tensor
                    filled += tensor.numel()
                    continue
        raise CheckpointError(f'"{index.folder.name}" is refused: "{item.name}" {problem}')
    if filled != whole.numel():
        raise CheckpointError(
            f'"{index.folder.name}" is refused: "{item.name}" has chunks for {filled} of '
            f"{whole.numel()} elements"
        )
    return whole


def read_value(index: Index, item: Item) -> TorchFile | None:
    """Read a pickled value as placeholders; None when it is too large for one."""
    part = item.chunks.get(None)
    return None if part is None or part.size > _MAX_BYTES_ITEM else index.read(part)


def _rebuild(rebuild: Rebuilder, function: Global, args: tuple[Any, ...]) -> Any:
    """Return the value of torch's own calls, and the name of an enum's member.

    Python 3.11.2, among others, writes a member as `getattr(enum, name)`; later ones by value.
    """
    if function.dotted != "builtins.getattr":
        return rebuild(function, args)
    if len(args) == 2 and args[0] == Global(_METADATA, "_MEM_FORMAT_ENCODING"):
        return args[1]
    raise BadPickle("a call of getattr, which gives more than an index needs")


def _no_storage(identifier: Any) -> Any:
    raise BadPickle("a storage, which an index has not")


def _slices(folder: Path, storage_data: Any) -> dict[tuple[str, _Place], Slice]:
    found: dict[tuple[str, _Place], Slice] = {}
    for index, info in as_dict(storage_data).items():
        where, place = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        name, offset, file = where.get("fqn"), where.get("offset"), place.get("relative_path")
        if not isinstance(name, str):
            raise _Wrong(f'"{name}" is not a name')
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise _Wrong(f'"{name}" lies in {file!r}, which is not a plain file name')
        path = folder / file
        if not path.is_file() or path.is_symlink():
            raise _Wrong(f'"{name}" lies in {file!r}, which is missing')
        part = Slice(file, _count(place.get("offset"), name), _count(place.get("length"), name))
        if (end := part.offset + part.size) > (size_bytes := path.stat().st_size):
            raise _Wrong(f'"{name}" ends at {end} in {file}, of {size_bytes} bytes')
        if place.get("transform_descriptors"):
            raise _Wrong(f'"{name}" is compressed, which is not read here')
        found[name, tuple(offset) if isinstance(offset, tuple) else None] = part
    return found


def _item(
    name: str, entry: Any, slices: Mapping[tuple[str, _Place], Slice], paths: Mapping[Any, Any]
) -> Item:
    path = paths.get(name)
    keys = tuple(map(str, path)) if isinstance(path, tuple) else (name,)
    if isinstance(entry, UnresolvedCall) and entry.dotted == f"{_METADATA}.BytesStorageMetadata":
        part = slices.get((name, None))
        return Item(name, keys, None, (), {} if part is None else {None: part})
    fields = _fields(entry, "TensorStorageMetadata")
    shape, dtype = _shape(fields.get("size"), name), _dtype(fields.get("properties"), name)
    chunks: dict[_Place, Slice] = {}
    needed = 0
    for chunk in fields.get("chunks") or ():
        parts = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _shape(parts.get("offsets"), name), _shape(parts.get("sizes"), name)
        if (name, offsets) not in slices:
            raise _Wrong(f'"{name}" at {offsets} has no slice')
        chunks[offsets] = slices[name, offsets]
        needed += math.prod(sizes)
        if needed * dtype.itemsize > 2 * sum(part.size for part in chunks.values()) + 4096:
            raise _Wrong(f'"{name}" says more elements than its files have')
    if math.prod(shape) > needed:
        raise _Wrong(f'"{name}" of shape {list(shape)} has chunks for {needed} elements')
    return Item(name, keys, dtype, shape, chunks)


def _dtype(properties: Any, name: str) -> torch.dtype:
    """Read `TensorProperties`: a dict, or the tuple that its `__getstate__` gives."""
    if isinstance(properties, UnresolvedCall):
        state = properties.state[0] if properties.state else properties.args
        dtype = state[0] if isinstance(state, tuple) and state else None
        dtype = properties.attributes.get("dtype", dtype)
        if isinstance(dtype, torch.dtype):
            return dtype
    raise _Wrong(f'"{name}" has no dtype')


def _shape(value: Any, name: str) -> tuple[int, ...]:
    if isinstance(value, tuple):
        return tuple(_count(size, name) for size in value)
    raise _Wrong(f'"{name}" has no shape')


def _count(value: Any, name: str) -> int:
    if type(value) is int and 0 <= value < 1 << 48:
        return value
    raise _Wrong(f'"{name}" has {value!r:.40} for a size, an offset or a length')


def _fields(value: Any, kind: str) -> dict[str, Any]:
    if isinstance(value, UnresolvedCall) and value.dotted.rpartition(".")[2] == kind:
        return value.attributes
    raise _Wrong(f"its index has no {kind} where one belongs")
