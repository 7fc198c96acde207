"""What workers of one model version may reach: planned by the server, raised by each worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Walls:
    """Part of the LOAD message."""

    has_network: bool
    """Whether sockets may be made."""
    writes: tuple[str, ...] = ()
    """Folders and files that may be read and written, beside what every worker may."""
    reads: tuple[str, ...] = ()
    """What may be read only."""
    has_files: bool = False
    """Whether files are left as they are: `reads` and `writes` mean nothing then."""
    uid: int | None = None
    """User and group of the processes; None leaves them the server's."""

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> Walls:
        """Return what `asdict` and JSON have made of one."""
        paths = {key: tuple(message[key]) for key in ("reads", "writes")}
        return cls(**{**message, **paths})
