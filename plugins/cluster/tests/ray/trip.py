"""Cells on a real Ray, in namespaces of their own: `test_trip.py` runs this and reads its words.

`python trip.py STORE EVENT...`: the store holds `echo.mar`, and below `next/` another version of
it; what happens under load is `kill`, a server, or `update`, of the archive.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from modelyard.plugins.cluster.ray.folders import CellFolder

URL = "http://127.0.0.1:8000"
TOKEN = "a-token-that-all-cells-know-by-its-hash"
BIN = Path(sys.executable).parent
SERVE = """
import functools, ray
from ray.serve.scripts import cli
ray.init = functools.partial(ray.init, include_dashboard=False)
cli()
"""
"""The command `serve`, which has no option against the dashboard: that takes as much CPU as the
cells, and nothing here looks at it."""
PAUSE_S = 0.05
"""Between two requests of a client: the question is whether one is lost, not how many there are."""


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def poll(condition: Any, what: str, timeout_s: float = 180) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.1)
    return value


@contextlib.contextmanager
def serve_run(*arguments: str) -> Iterator[None]:
    """Run `serve run` until it says that the application is ready; Ctrl-C at the end."""
    command = [sys.executable, "-c", SERVE, "run", "modelyard.plugins.cluster.ray:app", *arguments]
    with Path("serve-run.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        poll(lambda: is_ready() or process.poll() is not None, "cells are ready")
        assert process.poll() is None, Path("serve-run.log").read_text()
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(90)


def is_ready() -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{URL}/health/ready") as answer:
        return bool(answer.status == 200)
    return False


def servers() -> set[int]:
    """Return the process ids of the cells' servers."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - a glob looks at each
        with contextlib.suppress(OSError):
            if b"modelyard.plugins.cluster.process" in Path("/proc", name, "cmdline").read_bytes():
                found.add(int(name))
    return found


def is_swept(cells: Path) -> bool:
    """Return whether the next cell's start leaves nothing of those that Ray has killed."""
    CellFolder(cells, "next").remove()
    return not any(cells.iterdir())


class Load:
    """Clients that send one request after the other, and account for every one."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._stop = asyncio.Event()

    async def _client(self, client: httpx.AsyncClient) -> None:
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "text/plain"}
        while not self._stop.is_set():
            start = time.monotonic()
            try:
                answer = await client.post(
                    f"{URL}/predictions/echo", content=b"x", headers=headers, timeout=60
                )
                outcome = str(answer.status_code)
                if outcome == "200":
                    outcome = "200 of " + answer.json()["version"]
            except httpx.HTTPError as error:
                outcome = f"{type(error).__name__}: {error}"
                say(time.time(), outcome, repr(error.__context__), repr(error.__cause__))
            self.outcomes[outcome] += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - start)
            await asyncio.sleep(PAUSE_S)

    async def during(self, event: Any, clients: int = 4) -> None:
        async with httpx.AsyncClient() as client:
            tasks = [asyncio.create_task(self._client(client)) for _ in range(clients)]
            await asyncio.sleep(1)
            await asyncio.to_thread(event)
            await asyncio.sleep(2)
            self._stop.set()
            await asyncio.gather(*tasks)


def account(name: str, event: Any) -> Counter[str]:
    """Run something under load; every request must have been answered by a model."""
    load = Load()
    asyncio.run(load.during(event))
    say(name, json.dumps(load.outcomes), f"slowest {load.slowest_s:.2f} s")
    assert all(outcome.startswith("200") for outcome in load.outcomes), load.outcomes
    return load.outcomes


def redeploy(*arguments: str) -> None:
    """Run `serve run` once more, against the Ray that runs; it returns when all are replaced."""
    command = [str(BIN / "serve"), "run", "--non-blocking", "--address", "auto"]
    ran = subprocess.run(
        [*command, "modelyard.plugins.cluster.ray:app", *arguments], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def kill_a_server() -> None:
    before = servers()
    os.kill(min(before), signal.SIGKILL)
    poll(lambda: len(servers() - before) == 1, "another cell has come")


def main(store: Path, events: Sequence[str]) -> None:
    # Ctrl-C is ignored by what a shell has started in the background, and by its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tokens = Path("tokens.txt").absolute()
    made = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "modelyard", "token", "new", "app", "--stdin"),
            *("--rights", "predict", "--file", tokens),
        ],
        input=TOKEN,
        text=True,
        capture_output=True,
    )
    assert made.returncode == 0, made.stderr
    said = [f"token_file={tokens}", "cells=2", "cpus=0.1", "workers=1"]
    start = time.monotonic()
    with serve_run(f"model_store={store}", *said):
        say(f"ready after {time.monotonic() - start:.1f} s")
        poll(lambda: len(servers()) == 2, "both servers run")
        assert httpx.post(f"{URL}/predictions/echo", content=b"x").status_code == 401
        time.sleep(2)
        if "kill" in events:
            account("server killed", kill_a_server)
            poll(is_ready, "ready")
        if "update" in events:
            outcomes = account("updated", lambda: redeploy(f"model_store={store}/next", *said))
            assert outcomes["200 of 1.0"] and outcomes["200 of 2.0"]
    poll(lambda: not servers(), "no server is left", 30)
    cells = Path(os.environ["TMPDIR"], f"modelyard-{os.getuid()}", "cells")
    poll(lambda: is_swept(cells), "no folder of a cell is left", 10)
    say("all is well")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
