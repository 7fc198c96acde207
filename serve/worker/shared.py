"""A process that serves several model versions, none of which brings code of its own.

Each has its own connection to the server, as every worker has. Batches of all of them run one after
the other, one of each version in turn.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import selectors
import socket
from collections.abc import Callable

from modelyard.serve.dataplane.heap import trim
from modelyard.serve.worker.load import Service
from modelyard.serve.worker.loop import Reader, Session

logger = logging.getLogger(__name__)

Load = Callable[[socket.socket, Reader], Service | None]
"""Load what the next frame of a connection names and answer it; None where that fails."""


class Guest:
    """One model version, once its connection has said what to load."""

    def __init__(self, connection: socket.socket, load: Load) -> None:
        self.connection = connection
        self._load = load
        self._reader = Reader(connection)
        self._session: Session | None = None

    def take_turn(self) -> bool:
        """Load, or run a batch; return whether more waits.

        Raises:
            EOFError, ConnectionError: it has left, or cannot be loaded.
        """
        if self._session is not None:
            return self._session.take_turn()
        service = self._load(self.connection, self._reader)
        if service is None:
            raise EOFError
        self._session = Session(self._reader, service)
        freeze()
        return False

    def leave(self) -> None:
        """Give back what it has."""
        self.connection.close()
        if self._session is not None:
            self._session.close()
            self._session = None
            gc.unfreeze()
            freeze()
            trim()


def freeze() -> None:
    """Have the collector leave alone what is there now."""
    gc.collect()
    gc.freeze()


def run(control: socket.socket, load: Load) -> None:
    """Serve the connections that come over `control`, until the server closes it."""
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        busy: dict[Guest, None] = {}
        """Those with jobs that wait, in the order of their turns."""
        while True:
            for key, _ in selector.select(0 if busy else None):
                if key.data is not None:
                    busy.setdefault(key.data)
                    continue
                message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                if not message:
                    return
                connection = socket.socket(fileno=descriptors[0])
                guest = Guest(connection, load)
                selector.register(connection, selectors.EVENT_READ, guest)
            for guest in tuple(busy):
                del busy[guest]
                try:
                    if guest.take_turn():
                        busy[guest] = None
                except (EOFError, ConnectionError):
                    selector.unregister(guest.connection)
                    with contextlib.suppress(OSError):
                        guest.leave()
