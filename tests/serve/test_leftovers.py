"""What a handler starts, whatever it does to be left alone, ends with its model and its server."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from modelyard.serve.walls.kernel import children
from tests.serve import live
from tests.serve.live import LiveServer, build_archive, descendants, poll, running

WITHIN_S = 2.0
MOST_ZOMBIES = 100
CHAINS = {1: 8, 20: 30}
"""How often a test is repeated → processes that each fork the next: dozens take a core."""
OFTEN = pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("leftovers") / "store"
    build_archive(store, "leaving", config="minWorkers: 1\n")
    return store


@pytest.fixture(scope="module", params=["users of their own", "the server's user"])
def server(store: Path, request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    config = store.parent / "modelyard.yaml"
    config.write_text("worker_uids: ''\n" if request.param == "the server's user" else "{}\n")
    state = store.parent / request.param.replace(" ", "-")
    with running(state, store, f"--config={config}") as server:
        yield server


def start_leftovers(server: LiveServer, file: Path, times: int = 1) -> int:
    """Start chains of processes that write to a file, and a daemon; return the worker's id."""
    server.predict("leaving", f"daemon {file}")
    pid = int(server.predict("leaving", f"chain {file} {CHAINS[times]}").text)
    poll(lambda: file.exists() and file.stat().st_size > 100, "the chain runs")
    return pid


def is_gone(file: Path) -> bool:
    """Return whether neither the chain writes nor a process has the file among its arguments.

    Whoever looks for processes finds few of a chain.
    """
    before = file.stat().st_size
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if bytes(file) in (process / "cmdline").read_bytes():
                return False
    return file.stat().st_size == before


def zombies(pid: int) -> int:
    """Return how many processes below one have ended and are not reaped."""
    states: dict[int, tuple[int, str]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent, *_ = (process / "stat").read_text().rpartition(")")[2].split()
            states[int(process.name)] = int(parent), state
    below = {pid}
    while more := {each for each, (parent, _) in states.items() if parent in below} - below:
        below |= more
    return sum(states[each][1] == "Z" for each in below if each in states)


@pytest.mark.parametrize("times", [1, OFTEN])
def test_a_chain_of_processes_ends_with_its_model(
    server: LiveServer, notes: Path, times: int
) -> None:
    for at in range(times):
        file = notes / str(at)
        server.register_all("leaving")
        start_leftovers(server, file, times)
        most = max(zombies(server.pid) for _ in range(5))
        removed = time.monotonic()
        assert server.management.delete("/models/leaving").status_code == 200
        poll(partial(is_gone, file), "nothing is left", WITHIN_S)
        assert time.monotonic() - removed < WITHIN_S
        assert max(most, zombies(server.pid)) <= MOST_ZOMBIES


@pytest.mark.parametrize("end", ["worker", "reaper"])
def test_it_ends_with_its_worker_and_with_the_parent_of_that(
    server: LiveServer, notes: Path, end: str
) -> None:
    file = notes / "file"
    server.register_all("leaving")
    worker = start_leftovers(server, file)
    (reaper,) = (pid for pid in descendants(server.pid) if worker in children(pid))
    os.kill(worker if end == "worker" else reaper, signal.SIGKILL)
    poll(partial(is_gone, file), "nothing is left", WITHIN_S)
    poll(lambda: server.worker_pids("leaving") not in ([], [worker]), "it is replaced")
    server.unregister_all()


@pytest.mark.parametrize("times", [1, OFTEN])
def test_nothing_outlives_a_server_that_is_killed(
    store: Path, notes: Path, tmp_path: Path, times: int
) -> None:
    for at in range(times):
        file = notes / str(at)
        server = live.start_server(tmp_path / str(at), store, "--models=leaving", "--workers=2")
        try:
            with ThreadPoolExecutor(2) as threads:
                start_leftovers(server, file, times)
                untied = threads.submit(server.predict, "leaving", f"untied {file}")
                # A third worker is in the middle of its start.
                scaled = threads.submit(server.management.put, "/models/leaving?min_worker=3")
                time.sleep(0.02 * at)
                processes = descendants(server.pid)
                server.signal(signal.SIGKILL)
                killed = time.monotonic()
                poll(partial(is_gone, file), "nothing is left", WITHIN_S)
                while left := set(filter(live.is_alive, processes)):
                    assert time.monotonic() - killed < WITHIN_S, left
                assert untied.exception() and scaled.exception()
        finally:
            server.signal(signal.SIGKILL)
            server.wait()
            server.close_clients()
