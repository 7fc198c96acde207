"""One of several servers, as their parent has it: its process, and requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from modelyard.base.exits import describe_exit
from modelyard.plugins.cluster.servers.one import OneOf
from modelyard.serve.control.state import StateDir, read_json, write_json
from modelyard.serve.errors import StartError, Unavailable
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


class ServerProcess:
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
        self.about: dict[str, Any] = {}
        """What it said of itself when it was ready; empty while it is not."""
        self.starts = 0
        self._settings = settings
        self._told = told
        self._report = report
        self._process: asyncio.subprocess.Process | None = None
        self._clients = {
            api: httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=str(settings.sockets / api)), timeout=None
            )
            for api in ("management", "metrics")
        }

    def __str__(self) -> str:
        return f"server {self.number} of {self._settings.servers}"

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
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "modelyard.plugins.cluster.servers.one"),
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=self.state.root,
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        self.starts += 1
        told = {**self._told, "settings": settings.model_dump(mode="json")}
        process.stdin.write(json.dumps(told).encode())
        process.stdin.close()
        message = ""
        async for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                self.about = event
                return
            message = event.get("message", message)
            if event["event"] == "loading":
                self._report(event)
        ended = f"{self} ended with {describe_exit(await process.wait())}"
        raise StartError(message or f"{ended}; its log is {self.state.log_file}")

    async def wait(self) -> str:
        """Return how it ended, once it has."""
        assert self._process is not None
        code = await self._process.wait()
        self.about = {}
        return describe_exit(code)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

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
