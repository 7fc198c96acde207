"""`modelyard serve` and its server process: start, state, stop."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from modelyard.serve.http.tokens import make_grant
from tests.serve.live import (
    LiveServer,
    build_archive,
    descendants,
    environment,
    forks,
    is_alive,
    modelyard,
    poll,
    running,
    start_arguments,
    start_server,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    store = folder / "store"
    request = folder / "request.bin"
    request.write_bytes(b"hello")
    for behaviour in ("echo", "picky", "breaks_on_import"):
        build_archive(store, behaviour)
    build_archive(store, "picky", name="wrong", examples=[f'{request}="fine: goodbye"'])
    (store / "no_zip.mar").write_bytes(b"this is not a zip")
    return store


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def lines_of(state: Path) -> str:
    return (state / "logs" / "server.log").read_text(encoding="utf-8")


# -- a start that fails ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("breaks_on_import", "No module named 'a_library_that_nobody_has' (handler.py:3)"),
        ("wrong", "expected 'fine: goodbye', got 'fine: hello'"),
        pytest.param("no_zip", "no_zip.mar", marks=pytest.mark.nightly),
        ("nowhere", "Model not found at: nowhere; the model store "),
        pytest.param(
            "../store/echo",
            "expected the name of a file in the model store",
            marks=pytest.mark.nightly,
        ),
        pytest.param("-x=echo", "model name", marks=pytest.mark.nightly),
    ],
)
def test_a_model_that_cannot_be_served_fails_the_start_and_leaves_nothing(
    store: Path, state: Path, model: str, message: str
) -> None:
    forks()  # which stays
    children = descendants(os.getpid())
    ran = modelyard(*start_arguments(state, store), "--workers=1", f"--models={model}")
    assert ran.returncode == 1
    assert message in ran.stderr.replace("\n", " ")
    assert "Traceback" not in ran.stderr + lines_of(state)
    assert not (state / "server.json").exists()
    assert not any((state / "unpacked").iterdir())
    poll(lambda: descendants(os.getpid()) <= children, "no process is left", 5)


def test_a_host_that_nobody_knows_is_named(store: Path, state: Path) -> None:
    ran = modelyard(*start_arguments(state, store), "--host=no.such.host.invalid")
    assert ran.returncode == 1
    assert "port 0 on no.such.host.invalid cannot be bound: " in ran.stderr
    assert "Unknown error" not in ran.stderr


def test_a_port_in_use_is_named_and_what_to_do(store: Path, state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ran = modelyard(*start_arguments(state, store), f"--management-port={port}")
    assert ran.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use by pid {os.getpid()} (" in ran.stderr
    assert ": stop it, or choose another --" in ran.stderr
    assert not (state / "server.json").exists()
    assert modelyard("serve", "status", f"--state-dir={state}").returncode == 1


def test_a_host_that_is_not_ours_is_named(store: Path, state: Path) -> None:
    ran = modelyard(*start_arguments(state, store), "--host=192.0.2.1")
    assert ran.returncode == 1
    assert "192.0.2.1 cannot be bound: Cannot assign requested address" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--port=99999"], 2, "wrong settings: --port: "),
        (["--device=tpu"], 2, "wrong settings: --device: "),
        (["--auth=maybe"], 2, "wrong settings: --auth: "),
        (["--config=nowhere.yaml"], 1, "cannot read the configuration file"),
        (["--port=http"], 2, "Invalid value for '--port'"),
        (["--nonsense"], 2, "No such option"),
    ],
)
def test_wrong_usage_is_named(state: Path, arguments: list[str], code: int, message: str) -> None:
    ran = modelyard("serve", "start", f"--state-dir={state}", *arguments)
    assert ran.returncode == code
    assert message in ran.stderr
    assert not state.exists()


def test_a_state_folder_that_cannot_be_used_is_named(store: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"a file")
    ran = modelyard(*start_arguments(tmp_path / "state", store))
    assert ran.returncode == 1
    assert "cannot use the state folder" in ran.stderr
    assert "; --state-dir, or the variable MODELYARD_STATE_DIR, names another" in ran.stderr


def test_with_nothing_running_stop_and_status_say_so(state: Path) -> None:
    stopped = modelyard("serve", "stop", f"--state-dir={state}")
    assert (stopped.returncode, stopped.stdout) == (0, "no server is running\n")
    status = modelyard("serve", "status", f"--state-dir={state}")
    assert (status.returncode, status.stdout) == (1, "no server is running\n")
    status = modelyard("serve", "status", f"--state-dir={state}", "--json")
    assert (status.returncode, json.loads(status.stdout)) == (1, {"running": False})
    asked = modelyard("predict", "digits", __file__, f"--state-dir={state}")
    assert asked.returncode == 1
    assert "modelyard serve start" in asked.stderr


# -- a server that runs ------------------------------------------------------------------------


def test_start_status_second_start_token_and_stop(
    store: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    server = start_server(state, store, "--workers=1", "--models", "echo,numbers=picky.mar")
    try:
        where = f"--state-dir={state}"
        text = modelyard("serve", "status", where).stdout
        for expected in (f"pid {server.pid}", "echo", "numbers", "picky.mar", "1/1",
                         "0/100", server.about["inference"], "1.0*"):  # fmt: skip
            assert expected in text
        status = json.loads(modelyard("serve", "status", where, "--json").stdout)
        assert status["running"] is True
        assert status["pid"] == server.pid
        assert [model["modelName"] for model in status["models"]] == ["echo", "numbers"]

        second = modelyard(*start_arguments(state, store), "--models=echo")
        assert second.returncode == 1
        assert f"already running: pid {server.pid}" in second.stderr
        assert str(server.about["inference"]) in second.stderr
        assert server.client.get("/ping").status_code == 200

        assert modelyard("serve", "token", where).stdout.strip() == server.token
        asked = modelyard("predict", "numbers", "-", where)
        assert asked.returncode == 0, asked.stderr
        assert asked.stdout == "fine: "
        missing = modelyard("predict", "cats", __file__, where)
        assert missing.returncode == 1
        assert "Model not found: cats; this server has echo, numbers (request" in missing.stderr

        children = descendants(server.pid)
        assert len(children) == 4  # each worker has a reaper
        stopped = modelyard("serve", "stop", where)
        assert (stopped.returncode, stopped.stdout) == (0, f"stopped, pid {server.pid}\n")
        assert server.wait() == 0
        assert not any(map(is_alive, children))
        assert not (state / "server.json").exists()
        assert not any(work.iterdir())
    finally:
        server.close_clients()
        if is_alive(server.pid):
            server.signal(signal.SIGKILL)


def test_with_auth_always_nothing_but_probes_is_open(
    store: Path, state: Path, tmp_path: Path
) -> None:
    only_predicts = "a-token-of-this-test-that-is-long-enough"
    tokens = tmp_path / "tokens.txt"
    tokens.write_text(str(make_grant("app", "predict", only_predicts)))
    options = ("--auth=always", f"--token-file={tokens}", "--workers=1", "--models=echo")
    with running(state, store, *options) as server:
        right = {"Authorization": f"Bearer {server.inference_token}"}
        for path in ("/predictions/echo", "/explanations/echo/1.0", "/predictions/cats"):
            assert server.client.post(path, content=b"x").status_code == 401
            manager = {"Authorization": f"Bearer {server.token}"}
            assert server.client.post(path, content=b"x", headers=manager).status_code == 403
        for path in ("/openapi.json", "/", "/docs/", "/docs/assets/", "/v2", "/v2/models/echo"):
            assert server.client.get(path).status_code == 401
        for path in ("/v2/health/live", "/v2/health/ready", "/health/ready", "/docs"):
            assert server.client.get(path).status_code == 200
        assert server.metrics.get("/metrics").status_code == 401
        assert server.metrics.get("/metrics", headers=right).status_code == 200
        assert server.client.get("/openapi.json", headers=right).status_code == 200
        for path in ("/ping", "/health/live", "/health/ready"):
            assert server.client.get(path).status_code == 200
        answer = server.client.post("/predictions/echo", content=b"x", headers=right)
        assert answer.status_code == 200
        asked = modelyard("predict", "echo", __file__, f"--state-dir={state}")
        assert asked.returncode == 0, asked.stderr
        app = {"Authorization": f"Bearer {only_predicts}"}
        url, body = "/v2/models/echo/infer", {"parameters": {"priority": 1}, "inputs": []}
        refused = server.client.post(url, json=body, headers=app)
        assert refused.status_code == 403 and "one that may priority" in refused.text
        assert server.client.post(url, json=body, headers=right).status_code != 403
        for priority, token, code in (("low", app, 200), ("high", app, 403), ("high", right, 200)):
            headers = {**token, "X-Request-Priority": priority}
            answer = server.client.post("/predictions/echo", content=b"x", headers=headers)
            assert answer.status_code == code


def test_a_server_that_was_killed_takes_its_workers_along_and_is_restored(
    store: Path, state: Path
) -> None:
    server = start_server(state, store, "--workers=1", "--models=echo")
    children = descendants(server.pid)
    server.register("picky", initial_workers=1, model_name="numbers")
    build_archive(store, "echo", name="later", version="2.0")
    server.register("later", model_name="echo")
    server.management.put("/models/echo/2.0/set-default")
    server.management.put("/models/echo/1.0", params={"min_worker": 0})
    children |= descendants(server.pid)
    server.close_clients()
    server.signal(signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    poll(lambda: not any(map(is_alive, children)), "every worker ends", 2)
    asked = modelyard("predict", "echo", __file__, f"--state-dir={state}")
    died = f"the server of this state folder, pid {server.pid}, died; {state}/logs/server.log may"
    assert (asked.returncode, died in asked.stderr) == (1, True)
    assert modelyard("serve", "status", f"--state-dir={state}").stdout.startswith(died)

    with running(state, store) as again:
        every = [
            (one["modelName"], one["modelVersion"], one["isDefault"], len(one["workers"]))
            for name in ("echo", "numbers")
            for one in again.management.get(f"/models/{name}/all").json()
        ]
        assert every == [
            ("echo", "1.0", False, 0),
            ("echo", "2.0", True, 1),
            ("numbers", "1.0", True, 1),
        ]
        assert again.predict("echo", b"x").json()["version"] == "2.0"
        assert again.predict("numbers", b"x").text == "fine: x"
        assert len(list((state / "unpacked").glob("*-*"))) == 3


def test_a_restore_that_fails_forgets_nothing(store: Path, state: Path) -> None:
    state.mkdir()
    saved = {"models": [{"file": "echo.mar", "workers": 1}, {"file": "gone.mar"}]}
    (state / "models.json").write_text(json.dumps(saved), encoding="utf-8")
    ran = modelyard(*start_arguments(state, store))
    assert ran.returncode == 1
    assert "Model not found at: gone.mar" in ran.stderr
    assert json.loads((state / "models.json").read_text(encoding="utf-8")) == saved


def test_nothing_to_serve_and_a_variable_without_effect_are_said(
    state: Path, tmp_path: Path
) -> None:
    nowhere = tmp_path / "nowhere"
    ran = modelyard(*start_arguments(state, nowhere), "--models=echo")
    assert ran.returncode == 1
    assert f"the model store {nowhere} is not a folder; name another with" in ran.stderr
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MODELYARD_WORKRS", "3")
        ran = subprocess.run(
            [sys.executable, "-P", "-m", "modelyard", *start_arguments(state, nowhere)],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    try:
        assert ran.returncode == 0
        assert "warning: no model is served: name some with --models" in ran.stderr
        assert "MODELYARD_WORKRS is not a setting" in ran.stderr
        assert "ready, pid" in lines_of(state) and "; no model is served" in lines_of(state)
    finally:
        modelyard("serve", "stop", f"--state-dir={state}")


# -- attached ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)]
)
def test_in_the_foreground_it_stays_attached_and_stops_on_a_signal(
    store: Path, state: Path, number: int
) -> None:
    attached = attach(state, store)
    try:
        about = poll(lambda: server_file(state), "the server has an address")
        assert about["pid"] == attached.pid
        server = LiveServer(about, state, store)
        poll(lambda: server.client.get("/health/ready").status_code == 200, "it is ready")
        assert attached.poll() is None
        assert server.predict("echo", b"x").status_code == 200
        children = descendants(attached.pid)
        server.close_clients()
        attached.send_signal(number)
        _, log = attached.communicate(timeout=20)
        assert attached.returncode == 0
        assert "Traceback" not in log
        assert not any(map(is_alive, children))
        assert not (state / "server.json").exists()
        assert not any((state / "unpacked").iterdir())
    finally:
        if attached.poll() is None:
            attached.kill()
            attached.communicate()


def attach(state: Path, store: Path, model: str = "echo") -> subprocess.Popen[str]:
    arguments = [*start_arguments(state, store), "--foreground", "--workers=1", "--models", model]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "modelyard", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def check_that_it_starts(about: dict[str, Any]) -> None:
    """Ask on every way for a model that is still to come."""
    asked = ["/health/ready", "/v2/health/ready", "/v1/models/gated"]
    asked += [f"/v2/models/gated{rest}" for rest in ("", "/ready", "/versions/1.0/ready")]
    sent = [f"/{kind}/gated{rest}" for kind in ("predictions", "explanations")
            for rest in ("", "/1.0")]  # fmt: skip
    sent += ["/v1/models/gated:predict", "/v1/models/gated:explain", "/v2/models/gated/infer"]
    with httpx.Client(base_url=about["inference"], verify=False) as client:
        for path in (*asked, *sent):
            answer = client.request("GET" if path in asked else "POST", path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), path
        assert client.get("/health/live").status_code == 200


def server_file(state: Path) -> dict[str, object] | None:
    try:
        content: dict[str, object] = json.loads((state / "server.json").read_text())
    except FileNotFoundError:
        return None
    return content


def test_while_models_load_it_asks_to_come_again_and_a_signal_ends_it_and_its_workers(
    store: Path, state: Path
) -> None:
    build_archive(store, "gated", config="handler: {gate: /nowhere}\n")
    attached = attach(state, store, "gated")
    try:
        about = poll(lambda: server_file(state), "its ports are open")
        children = poll(lambda: descendants(attached.pid), "a worker is started")
        check_that_it_starts(about)
        attached.send_signal(signal.SIGTERM)
        _, log = attached.communicate(timeout=20)
        assert attached.returncode == 1
        assert "stopped while it was starting" in log
        assert "Traceback" not in log
        assert not any(map(is_alive, children))
        assert not (state / "server.json").exists()
    finally:
        if attached.poll() is None:
            attached.kill()
            attached.communicate()


# -- handlers of old archives ------------------------------------------------------------------


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("old")
    store = folder / "store"
    build_archive(store, "clash", artifact=pickled(folder / "model.pt"))
    build_archive(store, "plain_function", handler="service.py:answer")
    models = "--models=clash,plain_function"
    with running(folder / "state", store, "--workers=1", models) as server:
        yield server


def pickled(file: Path) -> Path:
    """Pickle a whole model whose class lives in the archive's model.py, as authors do."""
    source = Path(__file__).parents[1] / "archives" / "clash"
    shutil.copy(source / "model.py", file.parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(file.parent)
        patch.delitem(sys.modules, "model", raising=False)
        torch.save(importlib.import_module("model").Doubler(), file)
        patch.delitem(sys.modules, "model")
    return file


def test_an_archive_with_our_names_a_pickled_model_and_a_late_import_predicts(
    old: LiveServer,
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = old.client.post("/predictions/clash", content=b"[1, 2.5]", headers=headers)
    assert answer.status_code == 200, answer.text
    told = json.loads(answer.text)
    names = ("archiver", "exporter", "handlers", "serve", "utils", "late")
    assert told == {"names": [f"author's {name}" for name in names], "answer": [2.0, 5.0]}


def test_a_function_may_be_the_handler(old: LiveServer) -> None:
    assert old.predict("plain_function", b"x").json() == {"loaded": ["plain_function"], "body": "x"}
