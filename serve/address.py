"""Where an API listens."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Address:
    """A host and port, or the path of a Unix socket."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 lets the system choose."""
    path: Path | None = None
    """Of a Unix socket; host and port say nothing then."""
    is_tls: bool = False

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        """Return the address as a client writes it."""
        if self.path is not None:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.is_tls else ''}://{host}:{self.port}"
