"""One of several servers, as their parent has it: its process, and requests to it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from modelyard.plugins.cluster.process import ChildServer, OneOf
from modelyard.serve.control.state import StateDir, read_json, write_json
from modelyard.serve.errors import Unavailable
from modelyard.serve.http.connection import Headers
from modelyard.serve.server import Report

logger = logging.getLogger(__name__)

State = dict[str, Any]
"""What a server serves, as it keeps it in its state folder (`serve/control/saved.py`)."""
SAME = ("schema", "models", "rollouts")
"""Keys of it that are the same in all servers; what else is noted there is each one's own."""


@dataclass(frozen=True)
class Request:
    """A request as it came, for one of the servers or all of them."""

    method: str
    path: str
    query: str
    headers: Headers
    body: bytes = b""

    @property
    def target(self) -> bytes:
        """Path and query."""
        return (f"{self.path}?{self.query}" if self.query else self.path).encode("latin-1")


def saved_in(folder: StateDir) -> State:
    """Return what is served by a state folder; empty where that cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return dict(read_json(folder.models_file))
    return {}


def remember(folder: StateDir, state: State) -> None:
    """Write what is to be served into a state folder; its own notes stay."""
    own = {name: value for name, value in saved_in(folder).items() if name not in SAME}
    write_json(folder.models_file, {**own, **{k: v for k, v in state.items() if k in SAME}})


class ServerProcess(ChildServer):
    """One of several servers.

    Args:
        number: from 1.
        settings: settings of this one.
        told: what it is told beside them.
        report: called with what happens while it starts.
    """

    def __init__(
        self, number: int, settings: OneOf, told: Mapping[str, Any], report: Report
    ) -> None:
        self.number = number
        self.state = StateDir(settings.state_dir)
        name = f"server {number} of {settings.servers}"
        super().__init__(name, f"its log is {self.state.log_file}")
        self.about: dict[str, Any] = {}
        """What it said of itself when it was ready; empty while it is not."""
        self.starts = 0
        self._settings = settings
        self._told = told
        self._report = report
        self._clients = {
            api: httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=str(settings.sockets / api)), timeout=None
            )
            for api in ("management", "metrics")
        }

    @property
    def is_up(self) -> bool:
        """Whether it can be asked."""
        return bool(self.about)

    @property
    def saved(self) -> State:
        """What it serves."""
        return saved_in(self.state)

    async def start(self, state: State) -> None:
        """Start it, and return when its models are ready.

        Args:
            state: what it serves; empty takes what the settings name.

        Raises:
            StartError: it has ended; in its own words where it has some.
        """
        settings = self._settings
        self.state.create()
        settings.sockets.mkdir(mode=0o700, exist_ok=True)
        if state:
            remember(self.state, state)
            settings = settings.model_copy(update={"models": ()})
        self.starts += 1
        self.about = await self.launch(settings, self._report, **self._told)

    async def wait(self) -> str:
        """Return how it ended, once it has."""
        how = await self.ended()
        self.about = {}
        return how

    async def send(self, request: Request, api: str = "management") -> httpx.Response:
        """Return its answer to a request.

        Raises:
            Unavailable: it does not run, or ended meanwhile.
        """
        url = httpx.URL(scheme="http", host="localhost", raw_path=request.target)
        try:
            return await self._clients[api].request(
                request.method, url, headers=request.headers, content=request.body
            )
        except httpx.HTTPError as error:
            raise Unavailable(f"{self} does not answer: it ended, and is started again") from error

    async def close(self) -> None:
        """Close the connections to it."""
        for client in self._clients.values():
            await client.aclose()
