"""What a plug-in does otherwise in workers: archives, handlers and answers of another server.

It registers a `Dialect` under `modelyard.policies`; where several do, the first by name counts.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

from modelyard.base.plugins import registered
from modelyard.handlers.context import Context
from modelyard.handlers.entry_point import Entry
from modelyard.handlers.errors import LoadError
from modelyard.handlers.metrics import Metrics, Reporter
from modelyard.serve.worker.codec import Rules, our_rules


class Envelope(Protocol):
    """What stands around a handler: it opens what clients send, and packs what is answered."""

    takes_tensors: bool
    """Whether it reads and writes requests of tensors by name itself."""

    def __init__(self, handle: Entry) -> None: ...

    def handle(self, data: Any, context: Any) -> Any:
        """Answer a batch."""


class Dialect(Protocol):
    """The ways of another server; one that subclasses this says only what it has."""

    @property
    def modules(self) -> frozenset[str]:
        """The full names of modules that it brings to an author's code; the archiver asks, too."""
        return frozenset()

    @property
    def handlers(self) -> Mapping[str, str]:
        """Its built-in handlers: name → `module:Class`."""
        return {}

    def prepare(self) -> None:
        """Have its modules be found; called once, before an archive's folder is on the path."""
        return None

    def begin_log(self) -> None:
        """Begin the log of a worker whose server speaks it."""
        return None

    def choose_rules(self, message: Mapping[str, Any]) -> Rules:
        """Return how a worker with this LOAD message reads and writes.

        Raises:
            LoadError: the archive is another server's.
        """
        if "modelyard" not in (message["manifest"] or {}):
            raise LoadError(
                "this archive was made for TorchServe: its manifest has no key modelyard; install "
                "the plug-in torchserve to serve it, or archive it again with `modelyard archive`"
            )
        return our_rules(message)

    def metrics(self, context: Context, message: Mapping[str, Any]) -> Reporter:
        """Return what a handler measures with."""
        return Metrics(context)

    def envelope(self, name: str) -> type[Envelope]:
        """Return the envelope that a LOAD message names.

        Raises:
            LoadError: there is none of this name.
        """
        raise LoadError(f"there is no envelope {name!r}")


class Plain(Dialect):
    """What there is without a plug-in: archives that `modelyard archive` made, and no others."""


@cache
def find_dialect() -> Dialect:
    """Return what a plug-in registered, prepared; called first before an archive's code runs."""
    found: Dialect = Plain()
    for entry in registered("policies").values():
        found = entry.load()
        break
    found.prepare()
    return found
