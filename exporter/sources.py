"""`SCHEME:/…` → a folder that holds a checkpoint, by the entry points `modelyard.sources`."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from modelyard.base.plugins import registered

Tell = Callable[[str], None] | None
"""Called with a line about what was found where a location leaves it open."""


class Fetched(NamedTuple):
    """What a source has for a location."""

    folder: Path
    """The checkpoint; it is there until the context ends."""
    name: str
    """Name of the artifacts, where nobody gives another."""
    origin: Mapping[str, str]
    """What the report says of it: `location`, which means the same tomorrow, and the source's own
    ids; nothing secret."""


Fetch = Callable[[str, Tell], AbstractContextManager[Fetched]]
"""Registered by scheme. It raises a CheckpointError for what is not there, a ModelError where a
package is missing."""


def find_source(location: str | Path) -> Fetch | None:
    """Return what fetches a location; None for a path."""
    scheme, _, rest = str(location).partition(":")
    entry = registered("sources").get(scheme) if rest.startswith("/") else None
    return entry.load() if entry else None
