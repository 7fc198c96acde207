"""Explanations are never in the way: a worker of their own, and an end when nobody waits."""

from __future__ import annotations

import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serve.live import LiveServer, build_archive, is_alive, poll

CONFIGS = {
    "apart": "minWorkers: 1\n",
    "shared": "minWorkers: 1\nexplainWorkers: 0\n",
    "hasty": "minWorkers: 1\nclientTimeoutInMills: 300\n",
    "removed": "minWorkers: 1\n",
    "in-turn": "minWorkers: 1\n",
    "early": "minWorkers: 1\nexplainWorkers: 1\n",
}


@pytest.fixture(scope="module")
def server(shared_server: LiveServer) -> LiveServer:
    for name, config in CONFIGS.items():
        build_archive(shared_server.store, "patient", name=name, config=config)
    shared_server.register_all(*CONFIGS)
    return shared_server


def explain(server: LiveServer, model: str, body: str = "") -> httpx.Response:
    return server.client.post(f"/explanations/{model}", content=body)


def explainers(server: LiveServer, model: str) -> list[int]:
    return [worker["pid"] for worker in server.describe(model)["explainWorkers"]]


def start(server: LiveServer, model: str, body: Path) -> socket.socket:
    """Ask for an explanation that does not end, and return when it has begun."""
    client = socket.create_connection(server.address, 20)
    content = str(body).encode()
    client.sendall(
        b"POST /explanations/%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
        % (model.encode(), len(content), content)
    )
    poll(lambda: body.exists() and body.read_text(), "the explanation begins")
    return client


def test_explanations_have_a_worker_of_their_own_from_the_first_one_on(server: LiveServer) -> None:
    pid = server.predict("apart").text
    assert explainers(server, "apart") == []
    answer = explain(server, "apart")
    own, niceness = answer.text.split()
    assert answer.status_code == 200
    assert explainers(server, "apart") == [int(own)]
    assert own != pid
    assert int(niceness) > 0
    assert len(server.describe("apart")["workers"]) == 1


@pytest.mark.parametrize(("takes", "most"), [("0.2", 1), ("0.001", 4)])
def test_those_that_are_short_are_answered_together_others_in_turn(
    server: LiveServer, takes: str, most: int
) -> None:
    """Whoever came first to a long line is answered first, and nobody with the last one."""
    for _ in range(40):  # until it is known how long one takes
        explain(server, "in-turn", f"takes {takes}")
    with ThreadPoolExecutor() as threads:
        held = threads.submit(explain, server, "in-turn", "takes 0.5")
        time.sleep(0.2)
        asked = [threads.submit(explain, server, "in-turn", f"takes {takes} {i}") for i in range(4)]
        together = [len(each.result().json()) for each in asked]
    assert held.result().json() == ["takes 0.5"]
    assert max(together) == most


def test_they_start_at_once_where_somebody_asks_for_them(server: LiveServer) -> None:
    poll(lambda: explainers(server, "early"), "the worker that explains is there")


def test_an_archive_may_share_them(server: LiveServer) -> None:
    assert explain(server, "shared").text.split()[0] == server.predict("shared").text
    assert explainers(server, "shared") == []


def test_a_long_explanation_holds_up_no_prediction_and_ends_with_its_client(
    server: LiveServer, notes: Path
) -> None:
    note = notes / "note"
    with start(server, "apart", note):
        assert server.predict("apart").status_code == 200
        assert note.read_text() == "started"
    poll(lambda: note.read_text() == "ClientsLeft", "the explanation ends")
    assert explain(server, "apart").status_code == 200


def test_an_explanation_ends_when_its_time_has_passed(server: LiveServer, notes: Path) -> None:
    poll(lambda: explain(server, "hasty").status_code == 200, "its worker is ready")
    note = notes / "note"
    assert explain(server, "hasty", str(note)).status_code == 504
    poll(lambda: note.read_text() == "ClientsLeft", "the explanation ends")
    assert explain(server, "hasty").status_code == 200


def test_what_waits_behind_and_whose_client_left_is_not_run(
    server: LiveServer, notes: Path
) -> None:
    first, second = notes / "first", notes / "second"
    with start(server, "apart", first) as one:
        two = socket.create_connection(server.address, 20)
        body = str(second).encode()
        two.sendall(
            b"POST /explanations/apart HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        two.close()
        one.close()
    assert explain(server, "apart").status_code == 200
    assert not second.exists()


def test_without_workers_nothing_explains_and_none_are_left(server: LiveServer) -> None:
    own = int(explain(server, "removed").text.split()[0])
    server.management.put("/models/removed", params={"min_worker": 0})
    assert explain(server, "removed").status_code == 503
    assert explainers(server, "removed") == []
    assert not is_alive(own)
    server.management.put("/models/removed", params={"min_worker": 1})
    again = int(explain(server, "removed").text.split()[0])
    server.management.delete("/models/removed")
    poll(lambda: not is_alive(again), "its workers have ended")


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("method=lime", 'method is "lime"; expected one of integrated_gradients'),
        ("steps=3", 'unknown parameter "steps"; expected some of method'),
        ("tolerance=2", 'tolerance is "2"; expected a number above 0 and at most 1'),
        ("target=1&target=2", "target is given twice; expected it once"),
    ],
)
def test_what_no_explanation_takes_is_refused_without_a_worker(
    server: LiveServer, digits_store: Path, query: str, said: str
) -> None:
    if server.management.get("/models/refusing").status_code == 404:
        shutil.copy(digits_store / "torchscript.mar", server.store / "refusing.mar")
        server.register_all("refusing.mar", model_name="refusing", initial_workers=1)
    answer = server.client.post(f"/explanations/refusing?{query}", content=b"not read")
    assert answer.status_code == 400
    assert said in answer.json()["message"]
    assert explainers(server, "refusing") == []
    assert explain(server, f"apart?{query}").status_code == 200, "an author's handler decides"
