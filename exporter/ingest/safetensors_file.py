"""safetensors, one file or shards → mapped tensors, by the library that defines the format.

Before it sees a file, the header is held to its limit and read as strict JSON: of a name that is
there twice the library takes one.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from modelyard.exporter.errors import CheckpointError, cause
from modelyard.exporter.ingest.source import Source, inside, parse_object, read_object
from modelyard.exporter.ingest.value import ParsedCheckpoint, Weights

MAX_HEADER_BYTES = 16 << 20
"""Some 150,000 tensors in one file; the library, which takes 20 µs for each, reads 100 MB."""


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
    return SafeTensors(*read_source(Source.of_file(path)), (path,))


def read_index(index: Path) -> SafeTensors:
    """Read the shards that a `…safetensors.index.json` names, and no file outside its folder.

    Raises:
        CheckpointError: a shard is missing, or has other names than the index says.
    """
    weight_map = shard_names(index)
    names = sorted(set(weight_map.values()))
    shards = {name: read_safetensors(inside(index.parent, name)) for name in names}
    for name, shard in weight_map.items():
        if name not in shards[shard].tensors:
            raise CheckpointError(
                f'"{index.name}" says that "{name}" is in "{shard}", which does not have it; copy '
                "the folder again"
            )
    return SafeTensors(
        {name: shards[shard].tensors[name] for name, shard in weight_map.items()},
        {key: value for shard in shards.values() for key, value in shard.metadata.items()},
        (index, *(index.parent / name for name in names)),
    )


def shard_names(index: Path) -> dict[str, str]:
    """Read an index: tensor name → name of a file beside the index.

    Raises:
        CheckpointError: a name leaves the folder, or there is no such file.
    """
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'"{index.name}" has no weight_map; copy the folder again')
    for name in sorted({str(value) for value in weight_map.values()}):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise CheckpointError(
                f'"{index.name}" is refused: the shard {name!r} that it names is not a plain file '
                "name"
            )
        if not (index.parent / name).is_file():
            raise CheckpointError(f'"{index.name}" names "{name}", which is missing: copy it too')
    return weight_map


def parsed_from(kind: str, content: SafeTensors) -> ParsedCheckpoint:
    """Return the one set of weights, and what its writer said beside it."""
    return ParsedCheckpoint(
        kind=kind,
        loader="safetensors",
        weights={"": Weights(content.tensors)},
        paths=content.paths,
        training={key: text[:200] for key, text in content.metadata.items() if key != "format"},
    )


def read_source(source: Source) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Map every tensor; those of a file that is not on disk by itself are copied.

    Returns:
        Tensors by name, and the header's `__metadata__`.

    Raises:
        CheckpointError: sizes, offsets or names are wrong.
    """
    metadata = _read_metadata(source)
    with _refusals(source):
        if source.path is None:
            return safetensors.torch.load(bytes(source.data)), metadata
        with safe_open(source.path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118


def _read_metadata(source: Source) -> dict[str, str]:
    length = int.from_bytes(source.data[:8], "little")
    if 8 + length > len(source):
        raise CheckpointError(
            f'"{source.name}" is refused: its header would have {length} bytes, and the file has '
            f"{len(source)}; it is damaged or cut short: copy it again"
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f'"{source.name}" is refused: its header has {length} bytes, and at most '
            f"{MAX_HEADER_BYTES} are read; save the tensors in several files"
        )
    metadata = parse_object(source.data[8 : 8 + length], source.name).get("__metadata__", {})
    return {str(k): str(v) for k, v in metadata.items()} if isinstance(metadata, dict) else {}


@contextmanager
def _refusals(source: Source) -> Iterator[None]:
    """Wrap what the library, or torch for a dtype or place that it has not, says of a file."""
    try:
        yield
    except (SafetensorError, KeyError, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            f'"{source.name}" is refused: {cause(error)}; expected a file as the safetensors '
            "library writes it: it is damaged or cut short, copy it again"
        ) from error
