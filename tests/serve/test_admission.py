"""Requests with little time, and clients that leave: what workers compute, and who is refused."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.open_loop import Phase, has_compiler, run
from tests.serve.live import LiveServer, build_archive, poll

CONFIGS = {
    "wide": "minWorkers: 1\nbatchSize: 8\njobQueueSize: 2000\n",
    "narrow": "minWorkers: 1\nbatchSize: 1\nexplainWorkers: 0\n",
    "new": "minWorkers: 1\nbatchSize: 1\n",
    "short": "minWorkers: 1\nbatchSize: 1\nclientTimeoutInMills: 300\n",
    "full": "minWorkers: 1\nbatchSize: 1\njobQueueSize: 300\n",
    "paced": "minWorkers: 1\nbatchSize: 4\njobQueueSize: 1000\n",
    "gathering": "minWorkers: 1\nbatchSize: 8\nmaxBatchDelay: 60000\n",
}
LEAVING = 1000


@pytest.fixture(scope="module")
def server(shared_server: LiveServer) -> LiveServer:
    for name, config in CONFIGS.items():
        build_archive(shared_server.store, "counting", name=name, config=config)
    shared_server.register_all(*CONFIGS)
    return shared_server


@pytest.fixture
def log(notes: Path) -> Path:
    return notes / "log"


def computed(log: Path) -> list[str]:
    """Return the names of all rows whose computation has begun."""
    return log.read_text().split() if log.exists() else []


def refused(server: LiveServer, model: str, kind: str, reason: str = "deadline") -> float:
    labels = {"model": model, "kind": kind, "reason": reason}
    return server.metric("modelyard_refused_requests_total", **labels)


def send(
    server: LiveServer, model: str, body: str, route: str = "predictions", header: str = ""
) -> socket.socket:
    """Send a request over a connection of its own."""
    client = socket.create_connection(server.address, 20)
    lines = [f"POST /{route}/{model} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    client.sendall("\r\n".join([*lines, *([header] if header else []), "", body]).encode())
    return client


def lockstep(server: LiveServer, model: str, header: bytes, count: int) -> list[bytes]:
    """Send a request so many times over one connection; return what came back for each."""
    request = b"POST /predictions/%b HTTP/1.1\r\nHost: localhost\r\n" % model.encode()
    request += b"%b\r\nContent-Length: 4\r\n\r\nmore" % header
    answers = []
    with socket.create_connection(server.address, 20) as client:
        for _ in range(count):
            client.sendall(request)
            answers.append(client.recv(1 << 16))
    return answers


def within(timeout: str) -> dict[str, str]:
    return {"X-Request-Timeout": timeout}


# -- a request's own time ----------------------------------------------------------------------


def test_the_time_of_a_request_passes_while_it_is_computed(server: LiveServer, gate: Path) -> None:
    answer = server.predict("new", f"it {gate}.log {gate}", headers=within("200ms"))
    gate.touch()
    assert (answer.status_code, answer.json()["type"]) == (504, "RequestTimeoutException")
    assert server.predict("new", "next").text == "next"


def test_a_request_cannot_have_more_time_than_its_model_gives(
    server: LiveServer, gate: Path
) -> None:
    answer = server.predict("short", f"it {gate}.log {gate}", headers=within("3600"))
    gate.touch()
    assert answer.status_code == 504


@pytest.mark.parametrize(
    ("path", "timeout"),
    [
        ("/predictions/wide", "soon"),
        ("/predictions/wide/1.0", "0"),
        ("/explanations/narrow", "-1"),
        ("/v2/models/wide/infer", "NaN"),
        ("/v2/models/wide/versions/1.0/infer", "1e400"),
    ],
)
def test_a_time_that_is_none_is_answered_400(server: LiveServer, path: str, timeout: str) -> None:
    answer = server.client.post(path, content="it", headers=within(timeout))
    assert (answer.status_code, answer.json()["type"]) == (400, "BadRequestException")
    assert answer.json()["message"] == (
        f'X-Request-Timeout is "{timeout}"; expected are seconds such as 0.5 or 2s, or '
        "milliseconds such as 150ms, above 0 and at most 86400 s"
    )


@pytest.mark.parametrize("route", ["/predictions/narrow", "/explanations/narrow"])
def test_what_cannot_be_answered_in_its_time_is_refused_at_once(
    server: LiveServer, threads: ThreadPoolExecutor, log: Path, gate: Path, route: str
) -> None:
    for _ in range(5):
        server.client.post(route, content="sleep 0.3")
    kind, queue, ahead = "predict", "pendingRequests", 2
    if "explanations" in route:  # of which a worker holds one batch, not two
        kind, queue, ahead = "explain", "pendingExplanations", 3
    before = refused(server, "narrow", kind)
    sent = [threads.submit(server.client.post, route, content=f"it {log} {gate}")]
    poll(lambda: computed(log), "a worker is busy")
    sent += [threads.submit(server.client.post, route, content="it") for _ in range(3)]
    poll(lambda: server.describe("narrow")["jobQueueStatus"][queue] == ahead, "more wait")
    answer = server.client.post(route, content=f"late {log}", headers=within("500ms"))
    assert (answer.status_code, answer.json()["type"]) == (503, "ServiceUnavailableException")
    assert "no answer is to be expected within the request's 0.5 s" in answer.json()["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert refused(server, "narrow", kind) == before + 1
    sent.append(threads.submit(server.client.post, route, content="early", headers=within("50s")))
    poll(lambda: server.describe("narrow")["jobQueueStatus"][queue] == ahead + 1, "one more")
    gate.touch()
    assert [answer.result().status_code for answer in sent] == [200] * 5
    assert computed(log) == ["it"]


def test_a_batch_is_not_gathered_for_longer_than_its_requests_wait(server: LiveServer) -> None:
    answer = server.predict("gathering", "it", headers=within("2s"))
    assert (answer.status_code, answer.text) == (200, "it")


# -- clients that leave ------------------------------------------------------------------------


def test_of_a_thousand_clients_that_leave_at_once_no_more_is_computed_than_was_in_flight(
    server: LiveServer, log: Path, gate: Path
) -> None:
    before = server.handed_over("wide")
    with ExitStack() as clients:
        for at in range(LEAVING):
            clients.enter_context(send(server, "wide", f"{at} {log} {gate}"))
        poll(lambda: server.handed_over("wide") + server.waiting("wide") == before + LEAVING,
             "all have come")  # fmt: skip
        in_flight = server.handed_over("wide") - before
        begun = computed(log)
    assert len(begun) <= in_flight <= 16
    poll(lambda: server.waiting("wide") == 0, "all are gone")
    gate.touch()
    assert server.predict("wide", f"after {log}").text == "after"
    assert computed(log) == [*begun, "after"]
    assert server.handed_over("wide") == before + in_flight + 1
    assert not server.metric("modelyard_errors_total", model="wide", code="504")


def test_who_leaves_the_queue_is_not_computed(server: LiveServer, log: Path, gate: Path) -> None:
    with send(server, "narrow", f"first {log} {gate}"), send(server, "narrow", f"second {log}"):
        poll(lambda: computed(log) == ["first"], "it is computed")
        with send(server, "narrow", f"third {log}") as third:
            poll(lambda: server.waiting("narrow") == 1, "it waits")
            third.close()
            poll(lambda: server.waiting("narrow") == 0, "it is gone")
        gate.touch()
        poll(lambda: len(computed(log)) == 2, "the second is computed")
    assert server.predict("narrow", "after").text == "after"
    assert computed(log) == ["first", "second"]


def test_who_leaves_a_workers_next_batch_is_not_computed(
    server: LiveServer, threads: ThreadPoolExecutor, log: Path, gate: Path
) -> None:
    before = server.handed_over("narrow")
    first = threads.submit(server.predict, "narrow", f"first {log} {gate}")
    poll(lambda: computed(log) == ["first"], "it is computed")
    with send(server, "narrow", f"second {log}"):
        poll(lambda: server.handed_over("narrow") == before + 2, "it is in the next batch")
    # Two sweeps: the one that may be running when the client leaves, and the next one.
    with send(server, "narrow", "third") as third:
        poll(lambda: server.waiting("narrow") == 1, "another waits")
        third.close()
        poll(lambda: server.waiting("narrow") == 0, "the sweep has been")
    gate.touch()
    assert first.result().status_code == 200
    assert server.predict("narrow", "after").text == "after"
    assert computed(log) == ["first"]


def test_who_leaves_a_batch_that_is_gathered_is_not_computed(server: LiveServer, log: Path) -> None:
    with send(server, "gathering", f"first {log}"):
        poll(lambda: server.waiting("gathering") == 1, "it waits for company")
    poll(lambda: server.waiting("gathering") == 0, "it is gone")
    assert server.predict("gathering", f"it {log}", headers=within("2s")).text == "it"
    assert computed(log) == ["it"]


def test_an_explanation_stops_between_its_passes(server: LiveServer, log: Path, gate: Path) -> None:
    with send(server, "narrow", f"it {log} {gate}", "explanations"):
        poll(lambda: computed(log) == ["it"], "it is computed")
    # The worker is shared: it answers before the gate is there.
    assert server.predict("narrow", "after").text == "after"
    assert not gate.exists()


# -- whose turn it is --------------------------------------------------------------------------


def test_classes_of_requests_are_answered_in_their_turn(
    server: LiveServer, log: Path, gate: Path
) -> None:
    asked = ["held", "held", "low", "low", "plain", "normal", "high", "high", "now"]
    with ExitStack() as clients:
        for at, name in enumerate(asked):
            header = "" if name in ("held", "plain", "now") else f"X-Request-Priority: {name}"
            header = "X-Request-Timeout: 4s" if name == "now" else header
            body = f"{name} {log} {gate}"
            clients.enter_context(send(server, "narrow", body, header=header))
            poll(lambda at=at: server.waiting("narrow") == max(0, at - 1), "it waits")  # type: ignore[misc]
        queue = server.describe("narrow")["jobQueueStatus"]
        gate.touch()
        poll(lambda: len(computed(log)) == len(asked), "all are computed")
    assert computed(log) == ["held", "held", "high", "high", "now", "plain", "normal", "low", "low"]
    assert [queue[f"pending{name}"] for name in ("High", "Normal", "Low")] == [2, 3, 2]
    by_class = {"model": "narrow", "kind": "predict"}
    counted = "modelyard_queue_time_by_priority_seconds_count"
    assert server.metric(counted, **by_class, priority="low") == 2
    assert server.metric("modelyard_queue_length_by_priority", **by_class, priority="low") == 0


@pytest.mark.parametrize("path", ["/predictions/wide", "/explanations/narrow"])
def test_a_class_that_is_none_is_answered_400(server: LiveServer, path: str) -> None:
    answer = server.client.post(path, content="it", headers={"X-Request-Priority": "High"})
    assert (answer.status_code, answer.json()["type"]) == (400, "BadRequestException")
    text = 'X-Request-Priority is "High"; expected one of high, normal, low'
    assert answer.json()["message"] == text


def test_the_header_is_documented(server: LiveServer) -> None:
    document = server.client.get("/openapi.json").json()
    for path in ("/predictions/{model}", "/explanations/{model}", "/v2/models/{model}/infer"):
        names = [each["name"] for each in document["paths"][path]["post"]["parameters"]]
        assert {"X-Request-Timeout", "X-Request-Priority"} < set(names)
        assert "model" in names


def test_an_idle_worker_takes_a_request_whatever_others_cost(server: LiveServer) -> None:
    for _ in range(5):
        assert server.predict("new", "sleep 0.3").status_code == 200
    assert server.predict("new", "it", headers=within("250ms")).status_code == 200


# -- more than the server can do ---------------------------------------------------------------


def test_a_full_queue_refuses_at_the_door_and_nothing_else_moves(
    server: LiveServer, log: Path, gate: Path
) -> None:
    count = 100
    with ExitStack() as clients:
        for at in range(302):
            clients.enter_context(send(server, "full", f"{at} {log} {gate}"))
        poll(lambda: server.waiting("full") == 300, "the queue is full")
        before, held = refused(server, "full", "predict", "full"), server.handed_over("full")
        answers = [server.predict("full", "one more") for _ in range(count)]
        assert refused(server, "full", "predict", "full") == before + count
        # Faster than a queue's state is looked at: most get what the one before got.
        own, made = (
            lockstep(server, "full", header, count) for header in (b"X-Request-Id: me", b"a: b")
        )
        assert refused(server, "full", "predict", "full") == before + 3 * count
        assert all(b"x-request-id: me\r\n" in answer for answer in own)
        assert len(set(made)) == count, "each has an id of its own"
        assert {answer.partition(b"\r\n")[0] for answer in own + made} == {
            own[0][: own[0].index(b"\r")]
        }
        assert own[0].startswith(b"HTTP/1.1 503 ")
        assert (server.waiting("full"), server.handed_over("full")) == (300, held)
    gate.touch()
    assert {answer.status_code for answer in answers} == {503}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
    poll(lambda: server.waiting("full") == 0, "all are gone")
    assert len(computed(log)) <= 2


@pytest.mark.skipif(not has_compiler(), reason="there is no C compiler")
def test_three_times_the_capacity_is_answered_up_to_the_capacity_and_then_all_again(
    server: LiveServer,
) -> None:
    url = f"{server.about['inference']}/predictions/paced"
    row_s, deadline_s = 0.01, 1.0
    phases = [Phase(3 / row_s, 3), Phase(0.3 / row_s, 2.5)]
    body = f"sleep {row_s}".encode()
    over, after = asyncio.run(run(url, body, phases, deadline_s, seed=1)).phases
    assert (over.failed, after.failed, over.refused_without_retry_after) == (0, 0, 0)
    assert over.good > 0
    assert over.refused > over.late + over.expired
    assert after.good > after.refused
