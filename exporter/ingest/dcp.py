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
from typing import Any

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
_MAX_INDEX_BYTES = 1 << 30
_MAX_BYTES_ITEM = 1 << 28


@dataclass(frozen=True)
class Slice:
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
    chunks: Mapping[tuple[int, ...] | None, Slice]
    """Offsets in the tensor → where it lies; of a pickled value, None → where."""


@dataclass(frozen=True)
class Index:
    """A `.metadata`, checked."""

    folder: Path
    items: Mapping[str, Item]
    version: str | None
    _sources: dict[str, Source] = field(default_factory=dict)
    """The slices' files, each mapped once."""

    def open(self, part: Slice) -> Source:
        """Return a range of one file."""
        if part.file not in self._sources:
            self._sources[part.file] = Source.of_file(self.folder / part.file)
        return self._sources[part.file].part(f"{part.file}[{part.offset}:]", part.offset, part.size)

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
    source = Source.of_file(inside(folder, ".metadata"))
    if source.size > _MAX_INDEX_BYTES:
        raise CheckpointError(f'"{folder.name}/.metadata" has more than {_MAX_INDEX_BYTES} bytes')
    try:
        rebuild = partial(_rebuild, Rebuilder())
        read = read_pickle(Window(source.data), _no_storage, rebuild, global_value)
    except BadPickle as error:
        raise CheckpointError(f'"{folder.name}/.metadata" is refused: it holds {error}') from error
    refused = sorted(name for name in read.wanted if not _is_allowed(name))
    if refused:
        raise CheckpointError(
            f'"{folder.name}/.metadata" is refused: it wants {", ".join(refused)}, which no '
            "checkpoint's index needs, and loading it could run code; nothing was run"
        )
    fields = _fields(read.value, "Metadata")
    slices = _slices(folder, fields.get("storage_data"))
    paths = fields.get("planner_data")
    items = {}
    for name, entry in _mapping(fields.get("state_dict_metadata")).items():
        items[name] = _item(name, entry, slices, as_dict(paths))
    version = fields.get("version")
    return Index(folder, items, as_text(version))


def read_tensor(index: Index, item: Item) -> Tensor:
    """Put one tensor together from its chunks.

    Raises:
        CheckpointError: a chunk is not the tensor that the index says.
    """
    assert item.dtype is not None
    if set(item.chunks) == {(0,) * len(item.shape)}:
        (part,) = item.chunks.values()
        tensor = _read_chunk(index, item, part)
        if tensor.shape == item.shape:
            return tensor
    whole = torch.empty(item.shape, dtype=item.dtype)
    filled = 0
    for offsets, part in item.chunks.items():
        tensor = _read_chunk(index, item, part)
        starts = offsets or ()
        ends = tuple(start + size for start, size in zip(starts, tensor.shape, strict=False))
        if not len(starts) == tensor.ndim == len(item.shape) or any(
            end > size for end, size in zip(ends, item.shape, strict=True)
        ):
            raise _wrong(index.folder, item.name, "has a chunk that leaves it")
        whole[tuple(map(slice, starts, ends))] = tensor
        filled += tensor.numel()
    if filled != whole.numel():
        missing = f"has chunks for {filled} of {whole.numel()} elements"
        raise _wrong(index.folder, item.name, missing)
    return whole


def read_value(index: Index, item: Item) -> TorchFile | None:
    """Read a pickled value as placeholders; None when it is too large for one."""
    part = item.chunks.get(None)
    if part is None or part.size > _MAX_BYTES_ITEM:
        return None
    return read_torch_file(index.open(part))


def _read_chunk(index: Index, item: Item, part: Slice) -> Tensor:
    tensor = read_torch_file(index.open(part)).value
    if not isinstance(tensor, Tensor) or tensor.dtype != item.dtype:
        raise _wrong(index.folder, item.name, f"is not a tensor of {item.dtype} in {part.file}")
    return tensor


def _is_allowed(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return name in _ALLOWED or isinstance(global_value(Global(module, last)), torch.dtype)


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


def _slices(folder: Path, storage_data: Any) -> dict[tuple[str, tuple[int, ...] | None], Slice]:
    found: dict[tuple[str, tuple[int, ...] | None], Slice] = {}
    if not isinstance(storage_data, Mapping):
        raise CheckpointError(f'"{folder.name}/.metadata" names no files; copy it again')
    for index, info in storage_data.items():
        where = _fields(index, "MetadataIndex")
        name, offset = where.get("fqn"), where.get("offset")
        if not isinstance(name, str):
            raise _wrong(folder, str(name), "is not a name")
        place = tuple(offset) if isinstance(offset, tuple) else None
        found[(name, place)] = _slice(folder, name, _fields(info, "_StorageInfo"))
    return found


def _slice(folder: Path, name: str, info: Mapping[str, Any]) -> Slice:
    file = info.get("relative_path")
    if not isinstance(file, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", file):
        raise _wrong(folder, name, f"lies in {file!r}, which is not a plain file name")
    path = folder / file
    if not path.is_file() or path.is_symlink():
        raise _wrong(folder, name, f"lies in {file!r}, which is missing; copy it too")
    offset, size = info.get("offset"), info.get("length")
    if type(offset) is not int or type(size) is not int or offset < 0 or size < 0:
        raise _wrong(folder, name, "has no offset or length")
    if offset + size > (size_bytes := path.stat().st_size):
        raise _wrong(folder, name, f"ends at {offset + size} in {file}, of {size_bytes} bytes")
    if info.get("transform_descriptors"):
        raise _wrong(folder, name, "is compressed, which is not read here")
    return Slice(file, offset, size)


def _item(
    name: str,
    entry: Any,
    slices: Mapping[tuple[str, tuple[int, ...] | None], Slice],
    paths: Mapping[Any, Any],
) -> Item:
    path = paths.get(name)
    keys = tuple(str(part) for part in path) if isinstance(path, tuple) else (name,)
    if isinstance(entry, UnresolvedCall) and entry.dotted == f"{_METADATA}.BytesStorageMetadata":
        part = slices.get((name, None))
        return Item(name, keys, None, (), {} if part is None else {None: part})
    fields = _fields(entry, "TensorStorageMetadata")
    shape = _shape(fields.get("size"), name)
    dtype = _dtype(fields.get("properties"), name)
    chunks: dict[tuple[int, ...] | None, Slice] = {}
    needed = 0
    for chunk in fields.get("chunks") or ():
        parts = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _shape(parts.get("offsets"), name), _shape(parts.get("sizes"), name)
        part = slices.get((name, offsets))
        if part is None:
            raise CheckpointError(f'DCP index: "{name}" at {offsets} has no slice; copy it again')
        needed += math.prod(sizes)
        if needed * dtype.itemsize > 2 * sum(p.size for p in (*chunks.values(), part)) + 4096:
            raise CheckpointError(f'DCP index: "{name}" says more elements than its files have')
        chunks[offsets] = part
    if math.prod(shape) > needed:
        raise CheckpointError(
            f'DCP index: "{name}" has shape {list(shape)} and chunks for {needed} elements; some '
            "ranks' files are missing"
        )
    return Item(name, keys, dtype, shape, chunks)


def _dtype(properties: Any, name: str) -> torch.dtype:
    """Read `TensorProperties`: a dict, or the tuple that its `__getstate__` gives."""
    if isinstance(properties, UnresolvedCall):
        state = properties.state[0] if properties.state else properties.args
        dtype = state[0] if isinstance(state, tuple) and state else None
        dtype = properties.attributes.get("dtype", dtype)
        if isinstance(dtype, torch.dtype):
            return dtype
    raise CheckpointError(f'DCP index: "{name}" has no dtype; copy it again')


def _shape(value: Any, name: str) -> tuple[int, ...]:
    if isinstance(value, torch.Size | tuple) and all(
        type(size) is int and 0 <= size < 1 << 48 for size in value
    ):
        return tuple(value)
    raise CheckpointError(f'DCP index: "{name}" has no shape; copy it again')


def _fields(value: Any, kind: str) -> dict[str, Any]:
    if isinstance(value, UnresolvedCall) and value.dotted.rpartition(".")[2] == kind:
        return value.attributes
    raise CheckpointError(f"DCP index: expected a {kind}; the index is damaged: copy it again")


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return value
    raise CheckpointError("DCP index: expected names; the index is damaged: copy it again")


def _wrong(folder: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(f'"{folder.name}" is refused: "{name}" {why}')
