"""A cell: one replica of Ray Serve, which is one whole server and the hop to it.

Ray places, watches, scales and replaces cells. The server inside keeps its queues, batches, workers
and limits, and looks at tokens: nothing above it decides about a request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from ray import serve

from modelyard.plugins.cluster.process import ChildServer
from modelyard.plugins.cluster.ray.archives import locate
from modelyard.plugins.cluster.ray.arguments import Plan
from modelyard.plugins.cluster.ray.beats import Beats
from modelyard.plugins.cluster.ray.folders import ADDRESS, CellFolder
from modelyard.plugins.cluster.ray.forward import Forwarder, Upstream
from modelyard.plugins.cluster.ray.publish import Publisher
from modelyard.plugins.cluster.ray.signals import Signals
from modelyard.plugins.cluster.ray.versions import refuse_other
from modelyard.serve.control.model_config import ModelSpec
from modelyard.serve.control.saved import write_specs
from modelyard.serve.control.state import StateDir, read_key
from modelyard.serve.errors import StartError
from modelyard.serve.settings import Settings

logger = logging.getLogger("ray.serve")

STORE = "store"
HEALTH_S = 4.0
"""Time for an answer to the question whether the server lives."""
MOST_MISSED = 3
"""Answers to it that are missed in a row; as many as Ray forgives."""
STOP_GRACE_S = 10.0
"""Time for the server to end, beyond its own drain time."""
SERVER_ENDED = 70
"""Exit code of a replica whose server has ended."""


class Cell:
    """What Ray makes a replica of; `serve.ingress` adds the calls of HTTP to it."""

    _server: ChildServer | None = None
    _ends: asyncio.Task[None] | None = None
    _folder: CellFolder | None = None
    _beats: Beats | None = None
    _missed = 0

    def __init__(self, plan: str) -> None:
        """Read what every cell is given.

        Args:
            plan: a `Plan` as JSON.

        Raises:
            StartError: this machine has another version of Modelyard.
        """
        refuse_other(json.loads(plan)["version"])
        self._plan = Plan.model_validate_json(plan)

    async def __serve_build_asgi_app__(self) -> Forwarder:
        """Start the server; return what answers requests when it is ready.

        Raises:
            StartError, ArchiveError: the server does not start; nothing is left of it.
        """
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return Forwarder(self._upstream, self._keeps_host)

    async def _start(self) -> None:
        settings = self._plan.settings
        replica = serve.get_replica_context().replica_id.unique_id
        self._folder = await asyncio.to_thread(CellFolder, settings.state_dir, replica)
        state = StateDir(self._folder.path)
        store = self._folder.path / STORE
        settings = settings.model_copy(update={"state_dir": state.root, "model_store": store})
        await asyncio.to_thread(self._place_archives, state, store)
        self._beats = Beats()
        self._server = ChildServer("the server of the cell", "Ray's log of this replica says more")
        plan, pipe = self._plan, self._beats.pipe
        about = await self._server.launch(
            settings, version=plan.version, python=plan.python, beats=pipe
        )
        self._ends = asyncio.create_task(self._end_with(self._server))
        logger.info("cell %s: server pid %d at %s", state.root, about["pid"], about["inference"])
        self._upstream = _upstream(about["inference"], settings)
        self._keeps_host = bool(settings.allowed_hosts)
        # The server answers to its own name only, unless `allowed_hosts` says by which.
        name = "" if self._keeps_host else " localhost"
        (state.root / ADDRESS).write_text(f"{self._upstream.address}{name}\n")
        token = read_key(state.key_file, "inference")
        self._signals = Signals(_upstream(about["metrics"], settings), token, Publisher())

    async def _end_with(self, server: ChildServer) -> None:
        _end(await server.ended())

    async def check_health(self) -> None:
        """Raise where the server does not answer.

        After the third time the replica ends. Ray would wait for what the server holds, and that is
        never answered; with the replica gone, it is sent to another cell.
        """
        try:
            async with asyncio.timeout(HEALTH_S):
                status, _ = await self._upstream.get("/health/live")
            if status != HTTPStatus.OK:
                raise StartError(f"the cell's server answers {status} to /health/live")
        except Exception:
            self._missed += 1
            if self._missed == MOST_MISSED:
                _end(f"the cell's server has not answered /health/live {MOST_MISSED} times")
            raise
        self._missed = 0

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `CellScaling` decides by."""
        return {"busy": self._signals.busy, "in_flight": self._signals.in_flight}

    async def __del__(self) -> None:
        """Stop the server; Ray has waited for the requests, and sends no more."""
        await self._stop()

    async def _stop(self) -> None:
        if (signals := getattr(self, "_signals", None)) is not None:
            await signals.stop()
        if self._ends is not None:
            self._ends.cancel()
        if self._server is not None:
            settings = self._plan.settings
            drain_s = settings.drain_delay_s + settings.drain_timeout_s
            await self._server.stop(drain_s + STOP_GRACE_S)
        if self._beats is not None:
            await self._beats.stop()
        if self._folder is not None:
            await asyncio.to_thread(self._folder.remove)
        self._server = self._beats = self._folder = None

    def _place_archives(self, state: StateDir, store: Path) -> None:
        """Link to every archive of the plan, and have the server restore exactly these."""
        store.mkdir(mode=0o700)
        settings, specs = self._plan.settings, list[ModelSpec]()
        for each in self._plan.archives:
            path = locate(each.location, each.digest, settings.model_store, settings.cache_dir)
            if not (link := store / path.name).is_symlink():  # one file may have two names
                link.symlink_to(path)
            is_first = all(each.name != spec.name for spec in specs)
            specs.append(ModelSpec(path.name, each.name, is_default=is_first, digest=each.digest))
        write_specs(state, specs)


def _upstream(url: str, settings: Settings) -> Upstream:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return Upstream(parts.hostname, parts.port, settings.keep_alive_s / 2)


def _end(how: str) -> None:
    """End the replica at once: it would refuse faster than others answer, and be sent the most."""
    logger.error("%s; the replica ends with it", how)
    os._exit(SERVER_ENDED)
