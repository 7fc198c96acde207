"""Several servers behind one port: what each does alone, all do together, or none does."""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.plugins.cluster.servers.merge import SummedMetrics
from modelyard.plugins.cluster.servers.parent import refuse_unfit
from modelyard.serve.control.sizing import Machine, machine_of, share_of, this_machine
from modelyard.serve.errors import WrongUsage
from modelyard.serve.settings import Settings
from tests.serve.live import (
    LiveServer,
    build_archive,
    is_alive,
    launch,
    modelyard,
    poll,
    start_arguments,
)

pytestmark = pytest.mark.skipif(
    this_machine().cores < 2, reason="two servers are started on two cores or more"
)
TWO = "--servers=2"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    root = tmp_path_factory.mktemp("servers")
    store, state = root / "store", root / "state"
    store.mkdir()
    build_archive(store, "echo", version="2.0").rename(store / "echo-2.mar")
    build_archive(store, "echo")
    server = start(store, state, TWO, "--models=echo")
    yield server
    server.stop()


def start(store: Path, state: Path, *more: str) -> LiveServer:
    ports = [each for each in start_arguments(state, store) if "grpc" not in each]
    return launch(state, store, *ports, *more)


def ask(live: LiveServer, count: int = 20) -> set[int]:
    """Send requests, each by a connection of its own; return who answered."""
    workers = set()
    for _ in range(count):
        with httpx.Client(base_url=live.about["inference"], timeout=60, verify=False) as client:
            answer = client.post("/predictions/echo", content=b"x")
            assert answer.status_code == 200, answer.text
            workers.add(answer.json()["pid"])
    return workers


def one(live: LiveServer, number: int) -> httpx.Client:
    """Return a client of one server's own management API, past the parent."""
    file = live.state_dir / "servers" / str(number) / "server.json"
    path = json.loads(file.read_text())["management"].removeprefix("unix:")
    headers = {"Authorization": f"Bearer {live.token}"}
    transport = httpx.HTTPTransport(uds=path)
    return httpx.Client(
        transport=transport, base_url="http://localhost", headers=headers, timeout=60
    )


def served(live: LiveServer) -> list[list[tuple[str, str, int, bool]]]:
    """Return what each server serves, by its own state folder."""
    files = [live.state_dir / "servers" / str(number) / "models.json" for number in (1, 2)]
    return [
        sorted((m["name"], m["version"], m["workers"], m["default"]) for m in content["models"])
        for content in (json.loads(file.read_text()) for file in files)
    ]


BOTH = [[("echo", "1.0", 1, True)]] * 2


def test_both_answer_and_are_described_counted_and_shown_as_one(live: LiveServer) -> None:
    before = live.metric("modelyard_requests_total", model="echo")
    workers = ask(live)
    assert workers == set(live.worker_pids("echo"))
    assert len(workers) == 2, "20 connections went to one server, which happens once in 500,000"
    assert live.metric("modelyard_requests_total", model="echo") == before + 20
    assert live.metric("modelyard_ready_workers", model="echo") == 2
    assert live.metric("modelyard_model_info", model="echo") == 1
    assert live.describe("echo")["jobQueueStatus"]["remainingCapacity"] == 200
    ran = modelyard("serve", "status", "--state-dir", live.state_dir)
    assert "2/2" in ran.stdout, ran.stdout
    assert httpx.get(f"{live.about['management']}/models", verify=False).status_code == 401


def test_a_change_is_made_by_both(live: LiveServer) -> None:
    assert live.register("echo-2.mar", initial_workers=2).json() == {
        "status": 'Model "echo" Version: 2.0 registered with 2 initial workers'
    }
    assert live.management.put("/models/echo/2.0/set-default").is_success
    assert served(live) == [[("echo", "1.0", 1, False), ("echo", "2.0", 1, True)]] * 2
    scaled = live.management.put("/models/echo/2.0", params={"min_worker": 3})
    assert "scaled to 4 " in scaled.text, "rounded up, so that each has as many"
    assert served(live) == [[("echo", "1.0", 1, False), ("echo", "2.0", 2, True)]] * 2
    remembered = json.loads((live.state_dir / "models.json").read_text())["models"]
    assert sorted((m["version"], m["workers"]) for m in remembered) == [("1.0", 2), ("2.0", 4)]
    assert live.management.put("/models/echo/1.0/set-default").is_success
    assert live.management.delete("/models/echo/2.0").is_success
    assert served(live) == BOTH


@pytest.mark.parametrize("refuses", [1, 2])
def test_what_one_refuses_none_does(live: LiveServer, refuses: int) -> None:
    with one(live, refuses) as client:
        assert client.post("/models", params={"url": "echo-2.mar"}).is_success
        answer = live.register("echo-2.mar")
        assert answer.status_code == 409, answer.text
        assert client.delete("/models/echo/2.0").is_success
    assert served(live) == BOTH


def test_what_was_removed_comes_back_where_one_refuses_to(live: LiveServer) -> None:
    assert live.register("echo-2.mar").is_success
    with one(live, 2) as client:
        assert client.delete("/models/echo/2.0").is_success
        assert live.management.delete("/models/echo/2.0").status_code == 404
        assert served(live)[0] == [("echo", "1.0", 1, True), ("echo", "2.0", 1, False)]
        assert client.post("/models", params={"url": "echo-2.mar"}).is_success
    assert live.management.delete("/models/echo/2.0").is_success
    assert served(live) == BOTH


@pytest.mark.slow
def test_one_that_dies_comes_back_and_a_change_meanwhile_is_made_by_none(live: LiveServer) -> None:
    ask(live)
    counted = live.metric("modelyard_requests_total", model="echo")
    victim = json.loads((live.state_dir / "servers/2/server.json").read_text())["pid"]
    answers: list[httpx.Response] = []
    change = threading.Thread(target=lambda: answers.append(live.register("echo-2.mar")))
    change.start()
    poll(lambda: len(served(live)[0]) == 2, "the first has registered it")
    os.kill(victim, signal.SIGKILL)
    change.join()
    assert answers[0].status_code == 503, answers[0].text
    assert served(live)[0] == BOTH[0], "it was put back before the client was answered"
    live.logs("is ready again")
    assert served(live) == BOTH
    assert len(ask(live)) == 2
    assert live.metric("modelyard_requests_total", model="echo") == counted + 20, "never falls"
    assert live.register("echo-2.mar").is_success
    assert live.management.delete("/models/echo/2.0").is_success


def rollouts(live: LiveServer) -> list[Any]:
    states = []
    for number in (1, 2):
        with one(live, number) as client:
            states.append(client.get("/models/echo/rollout").json().get("state"))
    return states


@pytest.mark.slow
def test_a_roll_out_goes_on_and_ends_in_both(live: LiveServer) -> None:
    path = "/models/echo/rollout"
    plan = {"url": "echo-2.mar", "shadow": "0", "steps": "50%"}
    answer = live.management.post(path, params=plan)
    assert answer.is_success, answer.text
    assert rollouts(live) == ["candidate"] * 2
    assert live.management.post(f"{path}/promote").status_code == 409
    assert rollouts(live) == ["candidate"] * 2, "nothing was compared"
    forced = {"force": "true"}
    assert live.management.post(f"{path}/promote", params=forced).is_success
    assert rollouts(live) == ["canary"] * 2
    assert live.register("nothing.mar").status_code == 404
    assert "cannot be put back" not in live.log, "what a roll-out holds is left alone"
    with one(live, 2) as client:
        assert client.post(f"{path}/back").is_success
    poll(lambda: rollouts(live) == ["returned"] * 2, "the other takes it back as well")
    assert live.management.post(f"{path}/abort").is_success
    assert rollouts(live) == ["aborted"] * 2
    assert served(live) == BOTH


@pytest.mark.slow
def test_what_was_served_is_there_after_a_stop_a_kill_and_with_one_server(tmp_path: Path) -> None:
    store, state = tmp_path / "store", tmp_path / "state"
    store.mkdir()
    build_archive(store, "echo", version="2.0").rename(store / "echo-2.mar")
    build_archive(store, "echo")
    server = start(store, state, TWO, "--models=echo", "--workers=4")
    server.stop()
    server = start(store, state, TWO)
    assert len(server.worker_pids("echo")) == 4
    assert len(ask(server)) >= 2

    def register() -> None:
        with contextlib.suppress(httpx.HTTPError):  # the parent ends meanwhile
            server.register("echo-2.mar")

    change = threading.Thread(target=register)
    change.start()
    poll(lambda: len(served(server)[0]) == 2, "the first has registered it")
    server.signal(signal.SIGKILL)
    change.join()
    server.close_clients()
    server.wait()
    children = server.about["servers"]
    poll(lambda: not any(map(is_alive, children)), "they end with it", 5)
    server = start(store, state, TWO)
    assert served(server) == [[("echo", "1.0", 2, True)]] * 2, "none has made the change"
    server.stop()
    alone = start(store, state)
    assert len(alone.worker_pids("echo")) == 4
    alone.stop()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"servers": 64}, "cores, and each server wants one"),
        ({"grpc_port": 0}, "gRPC is not shared"),
        ({"allow_load": True}, "one server only"),
        ({"reload": "."}, "edit with one"),
    ],
)
def test_what_several_servers_cannot_have_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(WrongUsage, match=reason):
        refuse_unfit(Settings(**{"servers": 2, **settings}))


def test_workers_and_cores_are_shared_in_equal_parts() -> None:
    assert [share_of(count, 2) for count in (0, 1, 2, 3)] == [0, 1, 1, 2]
    machine = this_machine()
    assert machine_of(1) == machine
    assert machine_of(2) == Machine(
        max(1, machine.cores // 2), machine.gpus, machine_of(2).limit, machine.has_quota
    )


ONE = """# HELP modelyard_requests_total Requests.
# TYPE modelyard_requests_total counter
modelyard_requests_total{model="a b"} 3.0
# HELP modelyard_queue_length Rows.
# TYPE modelyard_queue_length gauge
modelyard_queue_length 2.0
# HELP modelyard_queue_oldest_seconds Wait.
# TYPE modelyard_queue_oldest_seconds gauge
modelyard_queue_oldest_seconds 0.5
# HELP modelyard_t_seconds Time.
# TYPE modelyard_t_seconds histogram
modelyard_t_seconds_bucket{le="1.0"} 1.0
modelyard_t_seconds_bucket{le="+Inf"} 2.0
modelyard_t_seconds_count 2.0
modelyard_t_seconds_sum 4.0
"""


def test_metrics_add_up_and_counters_outlive_their_server() -> None:
    metrics = SummedMetrics()
    other = ONE.replace(" 0.5", " 0.25") + '# HELP x X\n# TYPE x gauge\nx{a="b"} 7.0\n'
    changes = {
        'b"} 3.0': 'b"} 6.0', "length 2.0": "length 4.0", '"1.0"} 1.0': '"1.0"} 2.0',
        'Inf"} 2.0': 'Inf"} 4.0', "count 2.0": "count 4.0", "sum 4.0": "sum 8.0",
    }  # fmt: skip
    expected = ONE + '# HELP x X\n# TYPE x gauge\nx{a="b"} 7.0\n'
    for one_server, both in changes.items():
        expected = expected.replace(one_server, both)
    assert metrics.merge({(1, 1): ONE, (2, 1): other}) == expected
    fresh = {(1, 1): ONE, (2, 2): ONE.replace(" 3.0", " 1.0")}
    for texts in (fresh, fresh, {(1, 1): ONE}):  # the last time the other is away
        text = metrics.merge(texts)
        assert 'modelyard_requests_total{model="a b"} 7.0' in text
        assert f"modelyard_queue_length {2.0 * len(texts)}" in text
