"""Cells: whole servers as replicas of Ray Serve; `serve run modelyard.plugins.cluster.ray:app`.

    builder      arguments → an application of Ray; `arguments` checks them
    archives     what is served: found or fetched, and known by its digest
    cell         a replica: one server in a process of its own, and what Ray asks about it
    beats        signs that a replica moves, by which that process ends one that hangs
    forward      the bytes of a request to the server, and those of its answer back
    signals      what the server measures, for Ray's metrics (`publish`) and `scaling`

Only `builder` and `publish` import Ray, never the process of a server.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelyard.plugins.cluster.ray.builder import app
else:

    def __getattr__(name: str) -> object:
        """Import Ray when an application is built: the process of a server needs none of it."""
        if name == "app":
            from modelyard.plugins.cluster.ray.builder import app

            return app
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["app"]
