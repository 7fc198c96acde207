"""The parent of several servers: starts and stops them, and serves management and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from modelyard.plugins.cluster.process import OneOf
from modelyard.plugins.cluster.servers.fleet import ROLLOUT, Fleet, is_judged_good
from modelyard.plugins.cluster.servers.merge import SummedMetrics, merge_models, merge_statuses
from modelyard.plugins.cluster.servers.process import Request, ServerProcess
from modelyard.serve.api.management import CONTENT_TYPE
from modelyard.serve.control.sandbox import check_machine
from modelyard.serve.control.sizing import this_machine
from modelyard.serve.control.state import StateDir, make_keys, write_json
from modelyard.serve.errors import Conflict, StartError, WrongUsage
from modelyard.serve.front.begin import ServerState, let_everybody
from modelyard.serve.http.application import Answers, Application
from modelyard.serve.http.connection import RequestResponseCycle
from modelyard.serve.http.listener import Listener, bind
from modelyard.serve.http.site import SiteCheck
from modelyard.serve.http.tls import watched_tls
from modelyard.serve.log import FileHandler
from modelyard.serve.server import Report, StopSignals
from modelyard.serve.settings import Settings

logger = logging.getLogger(__name__)

OF_THE_HOP = frozenset(
    b"connection content-length date keep-alive server transfer-encoding x-request-id".split()
)
"""Headers of an answer that are written anew."""
MODEL = re.compile(r"/models/[^/]+(/[^/]+)?")
CONSOLE = "/console/"
SESSION = ("/console/sign-in", "/console/sign-out")


async def serve_several(settings: Settings, state: StateDir, report: Report) -> None:
    """Start as many servers as the settings say, wait for the signal to stop, stop all.

    Raises:
        StartError, WrongUsage: they cannot be started so; the message says why.
    """
    refuse_unfit(settings)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request
    measures = check_machine(settings)
    walls = {each.name: {"status": each.status, "found": each.found} for each in measures}
    shutil.rmtree(settings.quota_place[0], ignore_errors=True)
    keys, stop, drain = make_keys(state.key_file), StopSignals(), ServerState()
    with tempfile.TemporaryDirectory(prefix="modelyard-") as sockets, reserved(settings) as port:
        settings = settings.model_copy(update={"port": port})
        faces = Faces(Answers(drain))
        listeners = faces.listen(settings)
        ports = [listener.address.port for listener in listeners]
        settings = settings.model_copy(
            update={"management_port": ports[0], "metrics_port": ports[1]}
        )
        logs_to_file = any(isinstance(each, FileHandler) for each in logging.getLogger().handlers)
        told = {"keys": keys, "logs_to_file": logs_to_file}
        servers = [
            ServerProcess(number, settings_of(settings, number, Path(sockets)), told, report)
            for number in range(1, settings.servers + 1)
        ]
        faces.fleet = fleet = Fleet(servers, state, keys["management"])
        starting = asyncio.ensure_future(fleet.start(bool(settings.models)))
        stopped = asyncio.ensure_future(stop.first.wait())
        try:
            await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                raise StartError("stopped while it was starting")
            await starting
            for listener in listeners:
                await listener.start()
            about = describe(servers, listeners, state)
            write_json(state.server_file, {**about, "sandbox": walls})
            report({"event": "started", **about})
            logger.info("ready, pid %d: %d servers, pids %s", os.getpid(), len(servers),
                        about["servers"])  # fmt: skip
            warnings = dict.fromkeys(w for server in servers for w in server.about["warnings"])
            report({"event": "ready", **about, "warnings": list(warnings)})
            await stopped
        finally:
            starting.cancel()
            stopped.cancel()
            drain.is_draining = True
            await fleet.stop(stop.second)
            for listener in listeners:
                await listener.stop_accepting()
                listener.close_idle(0)
            state.server_file.unlink(missing_ok=True)


def refuse_unfit(settings: Settings) -> None:
    """Refuse what several servers cannot have.

    Raises:
        WrongUsage: says what, and what to do.
    """
    count, cores = settings.servers, this_machine().cores
    reasons = {
        "it needs Linux, whose kernel spreads the connections": sys.platform != "linux",
        f"there are {cores} cores, and each server wants one: set {cores} or fewer": count > cores,
        "grpc_port: gRPC is not shared; leave one of both out": settings.grpc_port is not None,
        "allow_load: a load by the inference API would reach one server only; use the management "
        "API, which speaks to all": settings.allow_load,
        "shared_memory: a region would be known to one server only; leave one of both out": (
            settings.shared_memory
        ),
        "reload: edits would be served by each server at another time; edit with one": bool(
            settings.reload
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise WrongUsage(f"servers is {count}: {reason}")


def settings_of(settings: Settings, number: int, sockets: Path) -> OneOf:
    """Return the settings of one server, whose folder is below that of all."""
    own = {"state_dir": settings.state_dir / "servers" / str(number)}
    return OneOf(**{**settings.model_dump(), **own}, sockets=sockets / str(number))


@contextmanager
def reserved(settings: Settings) -> Iterator[int]:
    """Keep the inference port for the servers, and refuse one that others listen on.

    Raises:
        StartError: it cannot be bound.
    """
    address = settings.addresses[0]
    listening, address = bind(address)  # alone, which fails where anybody listens
    listening.close()
    shared, address = bind(replace(address, is_shared=True))
    assert isinstance(shared, socket.socket)
    with shared:
        yield address.port


def describe(
    servers: list[ServerProcess], listeners: list[Listener], state: StateDir
) -> dict[str, Any]:
    """Return what the parent says of itself: what a server does, but for what is the parent's."""
    about = {k: v for k, v in servers[0].about.items() if k not in ("event", "warnings")}
    return {
        **about,
        "pid": os.getpid(),
        "servers": [server.about["pid"] for server in servers],
        "management": listeners[0].url,
        "metrics": listeners[1].url,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "key_file": str(state.key_file),
        "log": str(state.log_file),
    }


class Faces:
    """Management and metrics of all servers. Each of them checks the tokens of what it is asked."""

    fleet: Fleet

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._metrics = SummedMetrics()

    def listen(self, settings: Settings) -> list[Listener]:
        """Bind the ports of management and metrics.

        Raises:
            StartError: one cannot be bound.
        """
        tls = None
        if settings.tls_cert is not None:
            tls = watched_tls((), settings.tls_cert, settings.tls_key)
        routes = (
            partial(self._read, each) for each in (self._answer_operator, self._answer_scraper)
        )
        listeners: list[Listener] = []
        for route, address in zip(routes, settings.addresses[1:], strict=True):
            app = Application(let_everybody, self._answers, route)
            site = SiteCheck(address, settings.allowed_hosts)
            listeners.append(Listener(app, address, settings, tls, site=site))
        return listeners

    def _read(self, answer: Any, cycle: RequestResponseCycle, id: str) -> None:
        method = "GET" if cycle.method == "HEAD" else cycle.method
        path = cycle.head.raw_path.decode("latin-1")
        headers = [*(h for h in cycle.headers if h[0] not in OF_THE_HOP),
                   (b"x-request-id", id.encode())]  # fmt: skip

        async def run(body: bytes) -> None:
            request = Request(method, path, cycle.query.decode("latin-1"), headers, body)
            try:
                status, fields, content = await answer(request)
            except Exception as error:
                status, fields, content = self._answers.error(error, id)
            self._answers.send(cycle, status, fields, content)

        cycle.read_body(lambda parts: cycle.run(run(b"".join(parts))))

    async def _answer_operator(self, request: Request) -> Any:
        path = request.path
        if request.method != "GET":
            if path in SESSION:
                return plain(await self.fleet.ask_one(request))
            if path.startswith(CONSOLE):
                raise Conflict(
                    "the console shows the first of several servers and changes none; `modelyard "
                    "models` and `modelyard rollout` change all"
                )
            # Goes on where the client leaves: what all do is not left half done.
            answers = await asyncio.shield(asyncio.create_task(self.fleet.change(request)))
            if len(answers) == 1:
                return plain(answers[0])
            return as_json(merge_statuses([answer.json() for answer in answers]))
        if ROLLOUT.fullmatch(path):
            found = await self.fleet.ask_all(request)
            # The one that would hold up a promotion says most.
            return plain(min(found.values(), key=is_judged_good))
        if MODEL.fullmatch(path):
            every = list((await self.fleet.ask_all(request)).values())
            wrong = next((answer for answer in every if answer.is_error), None)
            if wrong is not None:
                return plain(wrong)
            return as_json(merge_models(answer.json() for answer in every))
        return plain(await self.fleet.ask_one(request))

    async def _answer_scraper(self, request: Request) -> Any:
        if request.path != "/metrics":
            return plain(await self.fleet.ask_one(request, "metrics"))
        kept = [each for each in request.headers if each[0] != b"accept"]  # exemplars do not add up
        answers = await self.fleet.ask_all(replace(request, headers=kept), "metrics")
        wrong = next((answer for answer in answers.values() if answer.is_error), None)
        if wrong is not None:
            return plain(wrong)
        texts = {(s.number, s.starts): answer.text for s, answer in answers.items()}
        content = self._metrics.merge(texts).encode()
        return 200, [(b"content-type", CONTENT_TYPE.encode())], content


def plain(answer: httpx.Response) -> Any:
    """Return one server's answer as it is, but for the headers that are written anew."""
    headers = [(k.lower(), v) for k, v in answer.headers.raw if k.lower() not in OF_THE_HOP]
    return answer.status_code, headers, answer.content


def as_json(content: Any) -> Any:
    """Return an answer of JSON."""
    return 200, [(b"content-type", b"application/json")], json.dumps(content).encode()
