"""Snapshots: written after each change, restored at the next start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelyard.plugins.torchserve.properties import parse_properties
from modelyard.plugins.torchserve.snapshot import find_snapshots
from plugins.torchserve.tests.live import Home
from tests.serve.live import build_archive


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("archives") / "store"
    build_archive(store, "echo")
    build_archive(store, "echo", version="2.0").rename(store / "echo_two.mar")
    build_archive(store, "echo")
    return store


@pytest.fixture
def home(tmp_path: Path, store: Path) -> Iterator[Home]:
    home = Home(tmp_path, store)
    yield home
    home.stop()


def kinds(home: Home) -> list[str]:
    return [file.stem[18:] for file in reversed(find_snapshots(home.logs / "config"))]


def newest(home: Home) -> tuple[dict[str, str], dict[str, Any]]:
    values = parse_properties(find_snapshots(home.logs / "config")[0].read_text(encoding="utf-8"))
    return values, json.loads(values["model_snapshot"])


def test_what_was_served_is_served_again(home: Home) -> None:
    one_worker = {"default_workers_per_model": "1", "enable_model_api": "true"}
    home.start("--models", "echo.mar", properties=one_worker)
    assert kinds(home) == ["startup"]
    with home.client("management") as client:
        for answer in (
            client.post("/models", params={"url": "echo_two.mar", "batch_size": 3}),
            client.put("/models/echo/2.0/set-default"),
        ):
            assert answer.status_code == 200, answer.text
    assert kinds(home) == ["startup", "snapshot", "snapshot"]
    values, snapshot = newest(home)
    assert values["default_workers_per_model"] == "1"
    assert values["tsConfigFile"] == str(home.folder / "ts.properties")
    assert snapshot["modelCount"] == 2
    assert snapshot["models"]["echo"]["2.0"] == {
        "defaultVersion": True,
        "marName": "echo_two.mar",
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 3,
        "maxBatchDelay": 100,
        "responseTimeout": 120,
        "startupTimeout": 120,
        "runtimeType": "python",
    }
    home.stop()
    assert kinds(home)[-1] == "shutdown"

    code, output = home.run("--model-store", home.store, "--models", "absent.mar")
    assert code == 0, output
    assert "restoring" in output and "absent.mar" not in home.get("/models").text
    described = {model["modelVersion"]: model for model in home.get("/models/echo/all").json()}
    assert sorted(described) == ["1.0", "2.0"]
    assert described["2.0"]["batchSize"] == 3
    assert home.get("/models/echo").json()[0]["modelVersion"] == "2.0"


def test_an_archive_that_has_gone_stops_the_start(home: Home) -> None:
    entry = {
        "defaultVersion": True,
        "marName": "gone.mar",
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 1,
        "maxBatchDelay": 100,
    }
    text = json.dumps({"modelCount": 1, "models": {"gone": {"1.0": entry}}})
    (home.folder / "c.properties").write_text(f"model_snapshot={text}")
    code, output = home.run("--model-store", home.store, "--ts-config", "c.properties")
    assert code == 1
    message = "Model archive file for model :gone, version :1.0 not found in model store"
    assert message in output
    assert kinds(home) == []  # it must not become what the next start restores


def test_snapshots_of_one_moment_have_an_order(home: Home) -> None:
    folder = home.logs / "config"
    folder.mkdir(parents=True)
    (folder / "99990101000000000-shutdown.cfg").write_text("")
    home.start()
    assert kinds(home) == ["shutdown", "startup"]


@pytest.mark.nightly
def test_a_roll_out_of_the_drop_in_is_remembered_too(home: Home) -> None:
    properties = {"default_workers_per_model": "1", "enable_model_api": "true"}
    home.start("--models", "echo.mar", properties=properties)

    def ask() -> set[str]:
        with home.client() as client:
            answers = [client.post("/predictions/echo", content=b"x") for _ in range(30)]
        assert {answer.status_code for answer in answers} == {200}, answers[0].text
        return {answer.headers["x-model-version"] for answer in answers}

    plan = {"url": "echo_two.mar", "shadow": "0", "canary": "50"}
    with home.client("management") as client:
        assert client.get("/models/echo/rollout").status_code == 404
        assert client.post("/models/echo/rollout", params=plan).json()["state"] == "candidate"
        assert ask() == {"1.0"}
        for path, status in (("promote", 409), ("promote?force=true", 200), ("forward", 404)):
            answer = client.post(f"/models/echo/rollout/{path}")
            assert answer.status_code == status, answer.text
        assert client.delete("/models/echo/2.0").status_code == 409
    assert ask() == {"1.0", "2.0"}
    assert newest(home)[1]["modelCount"] == 1
    assert newest(home)[1]["rollouts"]["echo"]["state"] == "canary"
    home.stop()
    code, output = home.run("--model-store", home.store)
    assert code == 0, output
    home.wait_for_workers("echo")
    assert ask() == {"1.0", "2.0"}
    with home.client("management") as client:
        assert client.post("/models/echo/rollout/abort").json()["state"] == "aborted"
    assert ask() == {"1.0"}
