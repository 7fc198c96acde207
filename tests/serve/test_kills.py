"""Kills, ends and clocks under an accounted load: every request gets exactly one answer.

G1 (workers killed), G2 (SIGTERM) and G10 (clocks, a process that stood still) of the fault table.
"""

from __future__ import annotations

import ast
import os
import random
import re
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.serve.live import (
    LiveServer,
    build_archive,
    descendants,
    is_alive,
    poll,
    start_server,
)
from tests.serve.load import Answer, Load, ask, descriptors

REPO = Path(__file__).parent.parent.parent
KILL_EVERY_S = 0.5
STOPPED_S = 3
CONFIGS = {
    "killed": "minWorkers: 2\nbatchSize: 4\n",
    "watched": "minWorkers: 1\nresponseTimeout: 1\nclientTimeoutInMills: 2000\n",
}
LIBFAKETIME = next(
    iter(
        path
        for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib")
        for path in sorted(Path(folder, "faketime").glob("libfaketime.so*"))
    ),
    None,
)


@pytest.fixture(scope="module")
def store(shared_server: LiveServer) -> Path:
    for name, config in CONFIGS.items():
        build_archive(shared_server.store, "mortal", name=name, config=config)
    return shared_server.store


@pytest.fixture(scope="module")
def server(shared_server: LiveServer, store: Path) -> LiveServer:
    shared_server.register_all(*CONFIGS)
    return shared_server


def all_are_ready(server: LiveServer, model: str) -> bool:
    return all(worker["status"] == "READY" for worker in server.describe(model)["workers"])


def goes_on(load: Load) -> None:
    """Wait for some more answers."""
    answered = load.outcomes[200]
    poll(lambda: load.outcomes[200] > answered + 50, "it goes on")


# -- G1: workers that are killed ---------------------------------------------------------------


def kill_workers(server: LiveServer, model: str, seconds: float) -> int:
    """Kill a worker of a model every half second, and return how many were."""
    chosen = random.Random(0)
    kills, pause, end = 0, threading.Event(), time.monotonic() + seconds
    while time.monotonic() < end:
        if pids := server.worker_pids(model):
            os.kill(chosen.choice(pids), signal.SIGKILL)
            kills += 1
        pause.wait(KILL_EVERY_S)
    return kills


@pytest.mark.parametrize(
    "seconds", [2.5, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_each_request_is_answered_once_while_workers_are_killed(
    server: LiveServer, seconds: float
) -> None:
    before, files = server.restarts("killed"), descriptors(server.pid)
    with Load(server, "killed", clients=16, prefix="sleep 0.005 ", pause_s=0.01) as load:
        kills = kill_workers(server, "killed", seconds)
    poll(lambda: all_are_ready(server, "killed"), "the workers are back")
    assert kills > 1
    assert server.restarts("killed") == before + kills
    # Only a request that was alone with a second worker that was killed gets an error.
    assert set(load.outcomes) <= {200, 507}, load
    assert load.outcomes[507] < kills, load
    assert load.outcomes[200] > 100, load
    poll(lambda: descriptors(server.pid) <= files, "no more descriptors than before", 5)


def test_what_waits_for_a_killed_worker_is_answered_though_its_model_is_removed(
    server: LiveServer, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    gate = tmp_path / "gate"
    config = f"minWorkers: 1\nhandler: {{gate: {gate}}}\n"
    build_archive(server.store, "gated", name="leaving", config=config)
    gate.touch()
    server.register_all("leaving")
    gate.unlink()
    os.kill(server.worker_pids("leaving")[0], signal.SIGKILL)
    poll(lambda: not server.worker_pids("leaving"), "the worker is gone")
    waiting = threads.submit(ask, server, "leaving", "x")
    poll(
        lambda: server.metric("modelyard_queue_length", model="leaving", kind="predict") == 1,
        "the request waits",
    )
    removal = threads.submit(server.management.delete, "/models/leaving")
    poll(lambda: server.client.get("/v2/models/leaving").status_code == 404, "it is not served")
    gate.touch()
    assert waiting.result().status == 200
    assert removal.result().status_code == 200


# -- G2: SIGTERM -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "signals", [pytest.param(1, marks=pytest.mark.slow), 2], ids=["once", "twice"]
)
@pytest.mark.parametrize("phase", ["loading", "unloading"])
def test_sigterm_while_a_model_comes_or_goes_answers_everybody_and_leaves_nothing(
    store: Path, tmp_path: Path, threads: ThreadPoolExecutor, phase: str, signals: int
) -> None:
    gate, work = tmp_path / "gate", tmp_path / "work"
    build_archive(
        store, "gated", name="gated", config=f"minWorkers: 1\nhandler: {{gate: {gate}}}\n"
    )
    config = tmp_path / "modelyard.yaml"
    drain_timeout_s = 1 if signals == 1 else 60
    config.write_text(f"drain_timeout_s: {drain_timeout_s}\n", encoding="utf-8")
    server = start_server(tmp_path / "state", store, f"--config={config}")
    children = len(descendants(server.pid))
    held: list[Future[Answer]] = []
    if phase == "loading":
        change = threads.submit(server.register, "gated")
        poll(lambda: len(descendants(server.pid)) > children, "its worker is started")
    else:
        gate.touch()
        assert server.register("gated").status_code == 200
        held.append(threads.submit(ask, server, "gated", str(work)))
        handed_over = "modelyard_queue_time_seconds_count"
        poll(lambda: server.metric(handed_over, model="gated"), "the request is handed over")
        change = threads.submit(server.management.delete, "/models/gated")
        poll(lambda: server.client.get("/v2/models/gated").status_code == 404, "it is not served")
    processes = descendants(server.pid)
    server.signal(signal.SIGTERM)
    if signals == 2:
        server.logs("stopping; ")
        server.signal(signal.SIGTERM)
    assert change.result().status_code == (503 if phase == "loading" else 200), change.result().text
    assert [answer.result().status for answer in held] == ([] if phase == "loading" else [503])
    server.close_clients()
    assert server.wait(15) == 0
    poll(lambda: not any(map(is_alive, processes)), "every child process ends", 3)
    assert "Traceback" not in server.log


# -- G10: clocks -------------------------------------------------------------------------------


def test_a_server_that_stood_still_times_nobody_out_whose_answer_has_come(
    server: LiveServer, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    gate, before = tmp_path / "gate", server.restarts("watched")
    handed_over = partial(server.metric, "modelyard_queue_time_seconds_count", model="watched")
    earlier = handed_over()
    held = [threads.submit(ask, server, "watched", f"until {gate} {n}") for n in range(8)]
    poll(lambda: handed_over() == earlier + len(held), "they are handed over")
    server.signal(signal.SIGSTOP)
    gate.touch()
    newer = [threads.submit(ask, server, "watched", str(n)) for n in range(8)]
    threading.Event().wait(STOPPED_S)  # longer than each of the model's times
    server.signal(signal.SIGCONT)
    assert [future.result().status for future in held + newer] == [200] * 16
    with Load(server, "watched", clients=8) as load:
        goes_on(load)
    assert set(load.outcomes) == {200}, load
    assert server.restarts("watched") == before


def test_a_wall_clock_that_jumps_by_days_changes_nothing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libfaketime breaks `time.sleep`, which waits for a monotonic time: no handler here sleeps."""
    if LIBFAKETIME is None:
        pytest.skip("libfaketime is missing; install it with: apt-get install libfaketime")
    offset = tmp_path / "offset"
    offset.write_text("+0d\n")
    for name, value in {
        "LD_PRELOAD": str(LIBFAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }.items():
        monkeypatch.setenv(name, value)
    build_archive(store, "hostile", name="awake", config="clientTimeoutInMills: 2000\n")
    server = start_server(tmp_path / "state", store, "--models=awake", "--workers=1")
    for name in ("LD_PRELOAD", "FAKETIME_TIMESTAMP_FILE"):
        monkeypatch.delenv(name)

    def jump_to(day: str) -> None:
        written = offset.with_suffix(".new")
        written.write_text(f"{day}\n")
        written.replace(offset)  # it is read at every look at the clock

    with Load(server, "awake", clients=2) as load:
        for jump in ("+1d", "-1d", "+0d"):
            jump_to(jump)
            goes_on(load)
            # Tokens are taken, and the log tells which day the server takes it to be.
            assert server.register("killed", model_name="other", initial_workers=0).is_success
            assert server.management.delete("/models/other").is_success
    assert set(load.outcomes) == {200}, load
    days = re.findall(r"^(\S+) .* unregistered$", server.log, re.M)
    assert len(set(days)) == 3, days
    assert ask(server, "awake", "spin_forever").status == 504
    server.stop()


WALL_CLOCK = {
    "serve/control/registry.py": "when a version was registered, as it is shown",
    "serve/dataplane/worker.py": "when a worker was started, as it is shown",
    "serve/dataplane/metrics.py": "exemplars are dated",
    "serve/dataplane/tracing.py": "spans are dated by the calendar",
    "serve/server.py": "when the server was started, as it is shown",
    "serve/log.py": "the time of a line",
    "serve/http/tls.py": "certificates are valid by the calendar",
}
"""Who may ask what time it is, and what for; whatever is measured or limited is monotonic."""
NOT_OF_THE_WALL = {"monotonic", "perf_counter", "thread_time"}


def wall_clock_users(folder: Path) -> set[str]:
    """Return the files below a folder that ask what time it is."""
    found = set()
    for file in folder.rglob("*.py"):
        if {"worker", "shim", "tests"} & {*file.relative_to(REPO).parts}:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime.now",
                "datetime.utcnow", "datetime.today", "date.today",
            ):  # fmt: skip
                found.add(file.relative_to(REPO).as_posix())
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                assert {alias.name for alias in node.names} <= NOT_OF_THE_WALL, file
    return found


def test_only_what_people_read_and_tokens_go_by_the_wall_clock() -> None:
    assert wall_clock_users(REPO / "serve") == set(WALL_CLOCK)
