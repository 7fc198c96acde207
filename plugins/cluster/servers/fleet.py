"""All servers together: a change is made by all or by none, and one that died comes back.

What all serve is kept in the parent's state folder, in the form of a single server's; so a start
with another number of servers goes on with it. Each change waits for the one before it, and for a
server that is being started again. Where a server refuses, those that have done the change are put
back by their own management API; one that cannot be is ended, and starts with what was before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import httpx

from modelyard.plugins.cluster.servers.process import (
    Request,
    ServerProcess,
    State,
    remember,
    saved_in,
)
from modelyard.serve.control.sizing import share_of
from modelyard.serve.control.state import StateDir
from modelyard.serve.errors import StartError, Unavailable

logger = logging.getLogger(__name__)

WORKERS = ("initial_workers", "min_worker", "max_worker")
"""Parameters that count workers of all servers."""
ROLLOUT = re.compile(r"/models/[^/]+/rollout(/\w+)?")
LONGEST_PAUSE_S = 30.0
ALIGN_S = 1.0
"""Time from one look at the roll-outs of all servers to the next."""
OVER, RUNNING = ("failed", "returned", "aborted"), ("candidate", "shadow", "canary", "default")
ANSWERING = ("canary", "default")
"""States of a roll-out whose candidate answers clients."""


class Fleet:
    """The servers, and what is to be the same in all.

    Args:
        servers: not started yet.
        state: the parent's folder.
        token: lets into the management API of each.
    """

    def __init__(self, servers: Sequence[ServerProcess], state: StateDir, token: str) -> None:
        self.servers = servers
        self._state = state
        self._headers = [(b"authorization", f"Bearer {token}".encode())]
        self._lock = asyncio.Lock()
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    # -- the life of the servers -----------------------------------------------------------------

    async def start(self, has_models: bool) -> None:
        """Start all, beside each other.

        Args:
            has_models: whether the settings name what is served.

        Raises:
            StartError: one does not start; the first reason.
        """
        state = {} if has_models else self._remembered()
        await asyncio.gather(*(server.start(state) for server in self.servers))
        self._agree()
        self._tasks = [asyncio.create_task(self._watch(server)) for server in self.servers]
        self._tasks.append(asyncio.create_task(self._align()))

    async def stop(self, again: asyncio.Event) -> None:
        """Have each answer what it accepted, and wait for their ends; `again` skips the waiting."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        ends = [asyncio.ensure_future(s.wait()) for s in self.servers if s.runs]
        self._signal_all()
        asyncio.ensure_future(again.wait()).add_done_callback(self._signal_all)
        await asyncio.gather(*ends, *(server.close() for server in self.servers))

    def _signal_all(self, *_: object) -> None:
        for server in self.servers:
            server.signal(signal.SIGTERM)

    async def _watch(self, server: ServerProcess) -> None:
        """Start a server again whenever it has died, with what the others serve."""
        while True:
            logger.error("%s; it is started again", await server.wait())
            pause_s = 0.5
            while not server.is_up:
                async with self._lock:
                    other = next((s.saved for s in self.servers if s.is_up), None)
                    try:
                        await server.start(other or self._remembered())
                        logger.info("%s is ready again, pid %d", server, server.about["pid"])
                        break
                    except (StartError, OSError) as error:
                        logger.error("%s does not start: %s", server, error)
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    # -- requests --------------------------------------------------------------------------------

    async def ask_one(self, request: Request, api: str = "management") -> httpx.Response:
        """Return the answer of the first server that runs.

        Raises:
            Unavailable: none does.
        """
        for server in self.servers:
            if server.is_up:
                return await server.send(request, api)
        raise Unavailable("no server runs; they are started again")

    async def ask_all(
        self, request: Request, api: str = "management"
    ) -> dict[ServerProcess, httpx.Response]:
        """Return the answers of all servers that run.

        Raises:
            Unavailable: none does.
        """
        asked = [server for server in self.servers if server.is_up]
        sent = [server.send(request, api) for server in asked]
        pairs = zip(asked, await asyncio.gather(*sent, return_exceptions=True), strict=True)
        answers = {server: answer for server, answer in pairs if isinstance(answer, httpx.Response)}
        if not answers:
            raise Unavailable("no server runs; they are started again")
        return answers

    async def change(self, request: Request) -> list[httpx.Response]:
        """Have all servers make a change; return their answers, or the one that refuses it.

        Raises:
            Unavailable: a server does not run, or ended meanwhile; none has made the change.
        """
        async with self._lock:
            for server in self.servers:
                if self._is_stopping or not server.is_up:
                    raise Unavailable(f"{server} does not run, so nothing is changed; try again")
            self._agree()  # a roll-out may have gone on by itself
            before = {server: server.saved for server in self.servers}
            first, *others = await self._in_order(request)
            request = self._shared(request)
            answers: list[httpx.Response | BaseException] = []
            # What is wrong for one is wrong for all: most refusals come before anything is done.
            for group in ([first], others):
                sent = [server.send(request) for server in group]
                answers += await asyncio.gather(*sent, return_exceptions=True)
                bad = [a for a in answers if isinstance(a, BaseException) or a.is_error]
                if bad:
                    done = {
                        server
                        for server, answer in zip((first, *others), answers, strict=False)
                        if answer not in bad
                    }
                    undoing = [self._undo(s, request, s in done, before[s]) for s in before]
                    await asyncio.gather(*undoing)
                    if isinstance(bad[0], BaseException):
                        raise bad[0]
                    return [bad[0]]
            self._agree()
            return [answer for answer in answers if isinstance(answer, httpx.Response)]

    def _shared(self, request: Request) -> Request:
        """Return the request for each server: workers are counted for all together."""
        pairs = parse_qsl(request.query, keep_blank_values=True)
        count = len(self.servers)
        pairs = [
            (k, str(share_of(int(v), count)) if k in WORKERS and v.isdecimal() else v)
            for k, v in pairs
        ]
        return replace(request, query=urlencode(pairs))

    # -- all or none -----------------------------------------------------------------------------

    def _remembered(self) -> State:
        """Return what each server is to serve, by the parent's folder; empty before any start."""
        state = saved_in(self._state)
        return self._scaled(state, share_of) if state else state

    def _agree(self) -> None:
        """Remember what all servers serve."""
        for server in self.servers:
            if server.is_up:
                remember(self._state, self._scaled(server.saved, int.__mul__))
                return

    def _scaled(self, state: State, change: Any) -> State:
        """Return a state whose workers are those of all servers, or of each."""
        count = len(self.servers)
        models = [
            {**each, "workers": change(each["workers"], count)} if each.get("workers") else each
            for each in state.get("models", ())
        ]
        return {**state, "models": models}

    async def _call(self, server: ServerProcess, method: str, path: str, **query: Any) -> None:
        """Ask a server for a change of our own; raise Unavailable where it refuses."""
        request = Request(method, path, urlencode(query), self._headers)
        answer = await server.send(request)
        if answer.is_error:
            raise Unavailable(f"{method} {path} is answered {answer.status_code}: {answer.text}")

    async def _undo(
        self, server: ServerProcess, request: Request, is_done: bool, before: State
    ) -> None:
        """Put a server back; one that cannot be is ended, and started with what was before.

        One that has refused may have done a part all the same.
        """
        if not server.is_up:
            return
        try:
            if is_done and ROLLOUT.fullmatch(request.path):
                await self._end_rollout(server, request.path.split("/")[2])
            await self._settle(server, before)
        except (Unavailable, KeyError) as error:
            logger.error("%s cannot be put back, and is ended: %s", server, error)
            server.about = {}
            server.signal(signal.SIGKILL)

    async def _settle(self, server: ServerProcess, before: State) -> None:
        """Have a server serve what it served before.

        Raises:
            Unavailable, KeyError: it cannot.
        """
        was, now = _by_version(before), _by_version(server.saved)
        for (name, _), model in was.items():
            if (name, model["version"]) not in now:
                query = {"model_name": name, "initial_workers": model["workers"]}
                await self._call(server, "POST", "/models", url=model["file"], **query)
        for (name, version), model in was.items():
            path = f"/models/{quote(name)}/{quote(version)}"
            other = now.get((name, version), {**model, "default": False})
            if model["default"] and not other["default"]:
                await self._call(server, "PUT", f"{path}/set-default")
            if other["workers"] != model["workers"]:
                await self._call(server, "PUT", path, min_worker=model["workers"])
        for name, version in now.keys() - was.keys():
            await self._call(server, "DELETE", f"/models/{quote(name)}/{quote(version)}")
        after = _by_version(server.saved)
        if any(after[key]["digest"] != model["digest"] for key, model in was.items()):
            raise Unavailable("the store has another archive of this name by now")

    # -- roll-outs -------------------------------------------------------------------------------

    async def _in_order(self, request: Request) -> list[ServerProcess]:
        """Return the servers, those first that would refuse to promote a candidate."""
        path, _, verb = request.path.rpartition("/")
        if verb != "promote" or not ROLLOUT.fullmatch(request.path):
            return list(self.servers)
        answers = await self.ask_all(Request("GET", path, "", self._headers))
        return sorted(self.servers, key=lambda s: s in answers and is_judged_good(answers[s]))

    async def _end_rollout(self, server: ServerProcess, name: str) -> None:
        """Take clients from a candidate, or remove it."""
        state = _rollouts(server.saved).get(name, {}).get("state")
        if state in RUNNING:
            verb = "back" if state in ANSWERING else "abort"
            await self._call(server, "POST", f"/models/{name}/rollout/{verb}")

    async def _align(self) -> None:
        """End a roll-out in all servers once it has ended in one: the worst judgement counts."""
        while True:
            await asyncio.sleep(ALIGN_S)
            async with self._lock:
                states = {s: _rollouts(s.saved) for s in self.servers if s.is_up}
                over = {
                    name
                    for each in states.values()
                    for name, record in each.items()
                    if record.get("state") in OVER
                }
                for name in over:
                    for server, each in states.items():
                        if each.get(name, {}).get("state") in RUNNING:
                            logger.warning("%s: the roll-out of %s has ended elsewhere, and ends",
                                           server, name)  # fmt: skip
                            with contextlib.suppress(Unavailable):
                                await self._end_rollout(server, name)


def is_judged_good(answer: httpx.Response) -> bool:
    """Return whether a server that describes its roll-out so would promote it."""
    return answer.is_success and answer.json().get("judgement", {}).get("verdict") == "pass"


def _by_version(state: State) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["name"], each["version"]): each for each in state.get("models", ())}


def _rollouts(state: State) -> dict[str, dict[str, Any]]:
    """Return the roll-outs that a state notes, by model; none without the plug-in."""
    noted = state.get("rollouts")
    return noted if isinstance(noted, dict) else {}
