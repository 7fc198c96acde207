"""What was acknowledged is there after `kill -9`, at whatever moment it came.

A long random history of changes over HTTP, cut by kills between and during changes. After each
restart the server serves what the last acknowledged change left, or the one that was in flight.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.live import start_server

NAMES = ("alpha", "beta", "gamma")
VERSIONS = ("1.0", "2.0", "3.0")
KILL_EVERY = 30
"""Changes between two kills, on average."""

State = dict[str, dict[str, Any]]
"""Name → {"default": version, "versions": {version: (least workers, most workers)}}."""


class Server:
    """A server process whose state outlives it."""

    has_most = False
    """Whether it remembers how many workers there may be at most."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.folder = folder
        self.store = store
        self.process: subprocess.Popen[str] | None = None
        self.client = httpx.Client()

    def start(self) -> None:
        raise NotImplementedError

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)

    def end(self) -> None:
        assert self.process is not None
        self.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.client.close()

    def state(self) -> State:
        """Return what the management API says is served."""
        found: State = {}
        for listed in self.client.get("/models").json()["models"]:
            name = listed["modelName"]
            every = self.client.get(f"/models/{name}/all").json()
            (default,) = self.client.get(f"/models/{name}").json()
            found[name] = {
                "default": default["modelVersion"],
                "versions": {
                    one["modelVersion"]: (one["minWorkers"], one["maxWorkers"]) for one in every
                },
            }
        return found


class Ours(Server):
    """A server as `modelyard serve start` starts it."""

    def start(self) -> None:
        self.live = start_server(self.folder / "state", self.store)
        self.client = self.live.management

    def kill(self) -> None:
        self.live.signal(signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        assert self.live.wait() == -signal.SIGKILL
        self.live.close_clients()


def write_store(folder: Path) -> Path:
    """Write an archive of each version into a new folder, and return it."""
    folder.mkdir()
    for version in VERSIONS:
        with zipfile.ZipFile(folder / f"m{version[0]}.mar", "w") as zipped:
            model = {"modelName": "m", "handler": "h.py", "modelVersion": version}
            manifest = {"runtime": "python", "model": model, "archiverVersion": "1"}
            zipped.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
            zipped.writestr("h.py", "def handle(data, context):\n    return data\n")
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("kills") / "store")


def draw(
    dice: random.Random, state: State, has_most: bool
) -> tuple[Callable[[httpx.Client], httpx.Response], State, int]:
    """Choose a change; return it, the state after it and the status that it must be answered."""
    after = deepcopy(state)
    name, version = dice.choice(NAMES), dice.choice(VERSIONS)
    model = state.get(name)
    is_there = model is not None and version in model["versions"]
    kind = dice.choices(("register", "scale", "default", "unregister"), (5, 2, 2, 3))[0]
    if kind == "register":
        if not is_there:
            entry = after.setdefault(name, {"default": version, "versions": {}})
            entry["versions"][version] = (0, 0)
        query = f"url=m{version[0]}.mar&model_name={name}&initial_workers=0"
        return lambda client: client.post(f"/models?{query}"), after, 409 if is_there else 200
    path = f"/models/{name}/{version}"
    if kind == "scale":
        most = dice.randrange(9)
        if is_there:
            after[name]["versions"][version] = (0, most if has_most else 0)
        query = f"min_worker=0&max_worker={most}&synchronous=true"
        return lambda client: client.put(f"{path}?{query}"), after, 200 if is_there else 404
    if kind == "default":
        if is_there:
            after[name]["default"] = version
        return lambda client: client.put(f"{path}/set-default"), after, 200 if is_there else 404
    if not is_there:
        return lambda client: client.delete(path), after, 404
    assert model is not None
    if model["default"] == version and len(model["versions"]) > 1:
        return lambda client: client.delete(path), after, 403
    del after[name]["versions"][version]
    if not after[name]["versions"]:
        del after[name]
    return lambda client: client.delete(path), after, 200


@pytest.mark.parametrize(
    "changes",
    [
        100,
        pytest.param(250, marks=pytest.mark.nightly),
        pytest.param(1000, marks=[pytest.mark.nightly, pytest.mark.timeout(900)]),
    ],
)
def test_what_was_acknowledged_survives_kills_at_any_moment(
    changes: int, store: Path, tmp_path: Path
) -> None:
    check_survival(Ours(tmp_path, store), changes)


def check_survival(server: Server, changes: int) -> None:
    """Change and kill a server, and fail where it does not come back as it was acknowledged."""
    dice = random.Random(20261121)
    server.start()
    state: State = {}
    left, in_flight = changes, 0
    took_s = [0.01]
    try:
        while left or not in_flight:  # each kill may come before or after its change
            for _ in range(min(left, dice.randrange(1, 2 * KILL_EVERY))):
                left -= 1
                change, state, status = draw(dice, state, server.has_most)
                began = time.perf_counter()
                assert change(server.client).status_code == status
                took_s.append(time.perf_counter() - began)
            before, killer = state, None
            change, after, status = draw(dice, state, server.has_most)
            if dice.random() < 0.75:  # else between two changes
                # Within the time that changes take on this machine, so that some are cut.
                killer = threading.Timer(dice.random() * statistics.mean(took_s), server.kill)
                killer.start()
                try:
                    assert change(server.client).status_code == status
                    before = after
                except httpx.TransportError:
                    in_flight += 1
                killer.join()
            server.end()
            server.start()
            state = server.state()
            assert state in (before, after if killer else before)
    finally:
        server.end()
    assert len(list(server.store.iterdir())) == len(VERSIONS)
