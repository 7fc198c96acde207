"""Models that are loaded by their first request, and unloaded to make room for others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serve.live import LiveServer, build_archive, descendants, modelyard, poll, running

MODELS = ("m0", "m1", "m2", "m3", "pinned")
SETTINGS = {"pinned": {"pinned": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("demand")
    for name in MODELS:
        build_archive(folder / "store", "mortal", name=name, config="minWorkers: 1\n")
    build_archive(folder / "store", "breaks_on_initialize", name="broken")
    config = folder / "serve.yaml"
    config.write_text(json.dumps({"max_loaded_models": 3, "model_settings": SETTINGS}))
    with running(folder / "state", folder / "store", "--models=ALL", f"--config={config}") as live:
        yield live
        assert "Traceback" not in live.log, live.log


def index(server: LiveServer) -> dict[str, tuple[str, str]]:
    found: list[dict[str, Any]] = server.client.post("/v2/repository/index", json={}).json()
    return {each["name"]: (each["state"], each["reason"]) for each in found}


def loaded(server: LiveServer) -> list[str]:
    return [name for name, (state, _) in index(server).items() if state == "READY"]


def pid_of(server: LiveServer, model: str) -> int:
    answer = server.predict(model, "pid")
    assert answer.status_code == 200, answer.text
    return int(answer.json()["pid"])


def test_nothing_but_a_request_loads_a_model(server: LiveServer) -> None:
    assert loaded(server) == ["pinned"]
    before = descendants(server.pid)
    for path in ("/ping", "/v2/health/ready", "/v2/models/m0", "/v2/models/m0/ready", "/v1/models"):
        assert server.client.get(path).status_code == 200, path
    assert server.describe("m0")["state"] == "UNAVAILABLE"
    listed = modelyard("models", "list", "--state-dir", server.state_dir)
    assert " unloaded " in listed.stdout, listed.stderr
    server.metrics.get("/metrics")
    server.client.post("/predictions/m0", content=b"", headers={"X-Request-Timeout": "never"})
    assert descendants(server.pid) == before
    assert index(server)["m0"] == ("UNAVAILABLE", "unloaded: the first request loads it")


def test_many_requests_load_a_model_once(server: LiveServer, threads: ThreadPoolExecutor) -> None:
    before = server.metric("modelyard_model_loads_total", outcome="loaded")
    pids = set(threads.map(lambda _: pid_of(server, "m0"), range(20)))
    assert len(pids) == 1
    assert server.metric("modelyard_model_loads_total", outcome="loaded") == before + 1
    assert server.metric("modelyard_loaded_models") == 2


def test_who_was_used_longest_ago_goes_and_comes_back(server: LiveServer) -> None:
    for name in ("m1", "m2", "m1", "m3"):  # of the three places the pinned one has one
        pid_of(server, name)
    assert loaded(server) == ["m1", "m3", "pinned"]
    first = pid_of(server, "m1")
    assert (pid_of(server, "m2"), pid_of(server, "m1")) != (first, first)
    assert pid_of(server, "m1") == first
    assert loaded(server) == ["m1", "m2", "pinned"]


def test_a_model_with_requests_stays_and_others_wait_for_it(
    server: LiveServer, threads: ThreadPoolExecutor, gate: Path
) -> None:
    handed = server.handed_over("m0") + server.handed_over("m1")
    short = {"X-Request-Timeout": "10"}
    begun = [threads.submit(server.predict, name, f"until {gate}", headers=short)
             for name in ("m0", "m1")]  # fmt: skip
    poll(lambda: loaded(server) == ["m0", "m1", "pinned"], "both are loaded")
    poll(lambda: server.handed_over("m0") + server.handed_over("m1") == handed + 2, "both run")
    before = descendants(server.pid)
    late = server.predict("m2", "pid", headers={"X-Request-Timeout": "0.5"})
    assert (late.status_code, descendants(server.pid)) == (504, before), late.text
    waits = threads.submit(server.predict, "m2", "pid")
    poll(lambda: index(server)["m2"][0] == "LOADING", "it waits for a place")
    gate.touch()
    assert [each.result().status_code for each in (*begun, waits)] == [200, 200, 200]


def test_a_load_that_fails_is_told_and_not_tried_again_at_once(
    server: LiveServer, threads: ThreadPoolExecutor
) -> None:
    answers = list(threads.map(lambda _: server.predict("broken"), range(20)))
    assert {answer.status_code for answer in answers} == {503}
    assert "could not be loaded" in answers[0].text and int(answers[0].headers["Retry-After"]) >= 1
    assert server.metric("modelyard_model_loads_total", outcome="failed") <= 2
    state, reason = index(server)["broken"]
    assert state == "UNAVAILABLE" and "could not be loaded" in reason
    assert server.client.get("/v2/models/broken/ready").status_code == 503
    poll(lambda: server.predict("broken").headers["Retry-After"] == "2", "it waits twice as long")
    assert server.client.get("/ping").status_code == 200
