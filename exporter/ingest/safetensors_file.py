"""safetensors, one file or shards → mapped tensors, by the library that defines the format.

Before it sees a file, the header is held to its limit and read as strict JSON: of a name that is
there twice the library takes one.
"""

from collections.abc import Callable
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from modelyard.exporter.errors import CheckpointError, cause
from modelyard.exporter.ingest.source import PLAIN_NAME, Source, inside, parse_object, read_object
from modelyard.exporter.ingest.value import ParsedCheckpoint, Weights

MAX_HEADER_BYTES = 16 << 20
"""Some 150,000 tensors in one file; the library, which takes 20 µs for each, reads 100 MB."""


def read_safetensors(source: Source) -> ParsedCheckpoint:
    """Map every tensor of one file; those of a file that is not on disk by itself are copied.

    Raises:
        CheckpointError: sizes, offsets or names are wrong, or it is a slice of a larger file.
    """
    metadata = _read_metadata(source)
    if "DCP_SHARDING_INFO" in metadata:
        raise CheckpointError(
            f'"{source.name}" holds slices of tensors in safetensors, written by several ranks; '
            "consolidate them first (HuggingFaceStorageWriter(enable_consolidation=True))"
        )
    try:
        if source.path is None:
            tensors = safetensors.torch.load(bytes(source.data))
        else:
            with safe_open(source.path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # What the library, or torch for a dtype or place that it has not, says of a file.
    except (SafetensorError, KeyError, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            f'"{source.name}" is refused: {cause(error)}; expected a file as the safetensors '
            "library writes it: it is damaged or cut short, copy it again"
        ) from error
    return ParsedCheckpoint(
        kind="safetensors",
        loader="safetensors",
        weights={"": Weights(tensors)},
        paths=() if source.path is None else (source.path,),
        training={key: text[:200] for key, text in metadata.items() if key != "format"},
    )


def read_shards(
    index: Path, read: Callable[[Path], ParsedCheckpoint]
) -> tuple[dict[str, Tensor], list[ParsedCheckpoint]]:
    """Read the files that a `….index.json` names, and no file outside its folder.

    Args:
        index: the index.
        read: reads one of them.

    Returns:
        The tensors in the order of the index, and what was read.

    Raises:
        CheckpointError: a shard is missing, or has other names than the index says.
    """
    weight_map = shard_names(index)
    names = sorted(set(weight_map.values()))
    shards = {name: read(inside(index.parent, name)) for name in names}
    tensors = {}
    for name, shard in weight_map.items():
        found = shards[shard].weights.get("")
        if found is None or name not in found.tensors:
            raise CheckpointError(
                f'"{index.name}" says that "{name}" is in "{shard}", which does not have it; copy '
                "the folder again"
            )
        tensors[name] = found.tensors[name]
    return tensors, list(shards.values())


def shard_names(index: Path) -> dict[str, str]:
    """Read an index: tensor name → name of a file beside the index.

    Raises:
        CheckpointError: a name leaves the folder, or there is no such file.
    """
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'"{index.name}" has no weight_map; copy the folder again')
    for name in sorted({str(value) for value in weight_map.values()}):
        if not PLAIN_NAME.fullmatch(name):
            raise CheckpointError(
                f'"{index.name}" is refused: the shard {name!r} that it names is not a plain file '
                "name"
            )
        if not (index.parent / name).is_file():
            raise CheckpointError(f'"{index.name}" names "{name}", which is missing: copy it too')
    return weight_map


def _read_metadata(source: Source) -> dict[str, str]:
    length = int.from_bytes(source.data[:8], "little")
    if 8 + length > source.size:
        raise CheckpointError(
            f'"{source.name}" is refused: its header would have {length} bytes, and the file has '
            f"{source.size}; it is damaged or cut short: copy it again"
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f'"{source.name}" is refused: its header has {length} bytes, and at most '
            f"{MAX_HEADER_BYTES} are read; save the tensors in several files"
        )
    metadata = parse_object(source.data[8 : 8 + length], source.name).get("__metadata__", {})
    return {str(k): str(v) for k, v in metadata.items()} if isinstance(metadata, dict) else {}
