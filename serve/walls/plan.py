"""What workers of one model version may reach: planned by the server, raised by each worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Walls:
    """Part of the LOAD message."""

    has_network: bool
    """Whether sockets may be made."""
    has_files: bool = False
    """Whether files are left as they are: the next three mean nothing then."""
    reads: tuple[str, ...] = ()
    """Folders and files that may be read."""
    writes: tuple[str, ...] = ()
    """What may be read and written."""
    devices: tuple[str, ...] = ()
    """Device files that may be used."""
    uid: int | None = None
    """User and group of the processes; None leaves them the server's."""
    groups: tuple[int, ...] = ()
    """Further groups of that user."""
    capability: int | None = None
    """What that user keeps."""

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> Walls:
        """Return what `asdict` and JSON have made of one."""
        known: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in message.items()
        }
        return cls(**known)
