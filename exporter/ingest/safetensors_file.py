"""safetensors, one file or shards → tensors, after own checks of the header.

Source: https://github.com/huggingface/safetensors#format
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.source import Source, parse_object, read_object

_MAX_HEADER = 100_000_000
_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class SafeTensors:
    """The tensors of one file, or of all shards of an index."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    paths: tuple[Path, ...]


def read_safetensors(path: Path) -> SafeTensors:
    """Read one file.

    Raises:
        CheckpointError: its header is not a header, or leaves the file.
    """
    source = Source.of_file(path)
    tensors, metadata = read_source(source)
    return SafeTensors(tensors, metadata, (path,))


def read_index(index: Path) -> SafeTensors:
    """Read the shards that a `…safetensors.index.json` names, and no file outside its folder.

    Raises:
        CheckpointError: a shard is missing, or has other names than the index says.
    """
    weight_map = shard_names(index)
    shards = {name: read_safetensors(index.parent / name) for name in sorted(weight_map.values())}
    tensors: dict[str, Tensor] = {}
    for name, shard in weight_map.items():
        if name not in shards[shard].tensors:
            raise CheckpointError(
                f'"{index.name}" says that "{name}" is in "{shard}", which has it not; copy the '
                "folder again"
            )
        tensors[name] = shards[shard].tensors[name]
    paths = (index, *(index.parent / name for name in sorted(set(weight_map.values()))))
    merged: dict[str, str] = {}
    for found in shards.values():
        merged.update(found.metadata)
    return SafeTensors(tensors, merged, paths)


def shard_names(index: Path) -> dict[str, str]:
    """Read an index: tensor name → name of a file beside the index.

    Raises:
        CheckpointError: a name leaves the folder, or there is no such file.
    """
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'"{index.name}" has no weight_map; copy the folder again')
    for name in sorted({str(value) for value in weight_map.values()}):
        # A file inside the folder by its own name: a link could lead out of it.
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise CheckpointError(
                f'"{index.name}" is refused: the shard {name!r} that it names is not a plain file '
                "name"
            )
        if not (index.parent / name).is_file():
            raise CheckpointError(f'"{index.name}" names "{name}", which is missing: copy it too')
    return weight_map


def read_source(source: Source) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the header and map every tensor.

    Returns:
        Tensors by name, and the header's `__metadata__`.

    Raises:
        CheckpointError: sizes, offsets or names are wrong; every tensor is checked first.
    """
    length = int.from_bytes(source.data[:8], "little")
    if length > _MAX_HEADER or 8 + length > len(source):
        raise CheckpointError(
            f'"{source.name}" is refused: its header would have {length} bytes, and the file has '
            f"{len(source)}; it is damaged or cut short: copy it again"
        )
    header = parse_object(source.data[8 : 8 + length], source.name)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _wrong(source, "__metadata__", "is not an object")
    start = 8 + length
    spans = {name: _check(source, name, entry) for name, entry in header.items()}
    _check_cover(source, spans, len(source) - start)
    tensors = {}
    for name, (dtype, shape, begin, end) in spans.items():
        storage = source.storage(start + begin, end - begin)
        if (start + begin) % dtype.itemsize:
            storage = storage.clone()  # type: ignore[no-untyped-call]  # an unaligned header
        flat = torch.empty(0, dtype=dtype).set_(storage, 0, (math.prod(shape),), (1,))
        tensors[name] = flat.view(shape)
    return tensors, {str(key): str(value) for key, value in metadata.items()}


_Span = tuple[torch.dtype, tuple[int, ...], int, int]


def _check(source: Source, name: str, entry: Any) -> _Span:
    if not isinstance(entry, dict):
        raise _wrong(source, name, "is not an object")
    dtype = _DTYPES.get(str(entry.get("dtype")))
    if dtype is None:
        raise _wrong(source, name, f"has the dtype {entry.get('dtype')!r}, which torch has not")
    shape, offsets = _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2 or len(shape) > 64:
        raise _wrong(source, name, "has no shape or no data_offsets")
    begin, end = offsets
    if begin > end or math.prod(shape) * dtype.itemsize != end - begin:
        raise _wrong(source, name, f"has shape {shape} of {entry['dtype']} in {end - begin} bytes")
    return dtype, tuple(shape), begin, end


def _counts(value: Any) -> list[int] | None:
    is_counts = isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
    return value if is_counts else None


def _check_cover(source: Source, spans: Mapping[str, _Span], available: int) -> None:
    """Refuse holes, overlaps and bytes that no tensor has."""
    position = 0
    for name, (_, _, begin, end) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if begin != position:
            raise _wrong(source, name, f"starts at {begin}, where {position} was expected")
        position = end
    if position != available:
        raise CheckpointError(
            f'"{source.name}" is refused: its tensors take {position} bytes, and {available} '
            "follow the header; it is damaged or cut short: copy it again"
        )


def _wrong(source: Source, name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f'"{source.name}" is refused: {name!r} in its header {why}; expected a file as the '
        "safetensors library writes it"
    )
