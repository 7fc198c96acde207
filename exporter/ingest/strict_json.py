"""JSON of a checkpoint: of limited size, an object, every key once."""

import json
from pathlib import Path
from typing import Any

from modelyard.exporter.errors import CheckpointError

MAX_BYTES = 256 << 20


def parse_object(content: bytes | memoryview, name: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        CheckpointError: it is not valid JSON, no object, or has a key twice.
    """
    try:
        value = json.loads(bytes(content), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f'"{name}" is not valid JSON that can be read ({error}); copy the checkpoint again'
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f'"{name}" is a JSON {type(value).__name__}; expected an object')
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        CheckpointError: there is none, it is too large, or it is none.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f'"{path.name}" has more than {MAX_BYTES} bytes')
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f'"{path}" cannot be read: {error.strerror}') from error
    return parse_object(content, path.name)


def read_object_or_nothing(path: Path) -> dict[str, Any]:
    """Read a file that may be there."""
    return read_object(path) if path.is_file() else {}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found
