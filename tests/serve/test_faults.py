"""Workers that die, hang and talk nonsense, under real load; every request gets one answer."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serve.live import LiveServer, build_archive, poll

CONFIGS = {
    "one": "minWorkers: 1\n",
    "two": "minWorkers: 2\n",
    "once": "minWorkers: 1\nretry: false\n",
    "watched": "minWorkers: 1\nresponseTimeout: 1\n",
    "impatient": "minWorkers: 1\nbatchSize: 1\nclientTimeoutInMills: 300\n",
    "narrow": "minWorkers: 1\nbatchSize: 1\njobQueueSize: 2\n",
}
DIED = "the worker that held the request ended with exit code 3"
ENDED = (
    "the worker that held the request was ended by the server: it took too long, or made no sense"
)


@pytest.fixture(scope="module")
def server(shared_server: LiveServer) -> LiveServer:
    for name, config in CONFIGS.items():
        build_archive(shared_server.store, "mortal", name=name, config=config)
    shared_server.register_all(*CONFIGS)
    return shared_server


def hold(
    server: LiveServer, threads: ThreadPoolExecutor, model: str, *bodies: str
) -> list[Future[httpx.Response]]:
    """Send requests in this order, and return when the workers hold them all."""
    return [_hold_one(server, threads, model, body) for body in bodies]


def _hold_one(
    server: LiveServer, threads: ThreadPoolExecutor, model: str, body: str
) -> Future[httpx.Response]:
    before = server.handed_over(model)
    answer = threads.submit(server.predict, model, body)
    poll(lambda: server.handed_over(model) > before, "it is handed over")
    return answer


def all_are_ready(server: LiveServer) -> bool:
    workers = [worker for name in CONFIGS for worker in server.describe(name)["workers"]]
    return all(worker["status"] == "READY" for worker in workers)


@pytest.fixture(autouse=True)
def everybody_is_well_afterwards(server: LiveServer) -> Iterator[None]:
    yield
    poll(lambda: all_are_ready(server), "all workers are back")
    assert server.client.get("/ping").json() == {"status": "Healthy"}


# -- workers that die --------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["one", "two"])
def test_a_worker_killed_under_load_costs_no_answer(
    server: LiveServer, threads: ThreadPoolExecutor, model: str
) -> None:
    before = server.restarts(model)
    answered: Counter[int] = Counter()
    lock = threading.Lock()

    def ask(client: int) -> None:
        with httpx.Client(base_url=server.about["inference"], timeout=60, verify=False) as own:
            for at in range(25):
                body = f"sleep 0.005 {client}.{at}"
                answer = own.post(f"/predictions/{model}", content=body)
                with lock:
                    answered[answer.status_code] += 1
                assert answer.json().get("body") == body, answer.text

    clients = [threads.submit(ask, client) for client in range(16)]
    poll(lambda: answered[200] > 20, "the load runs")
    os.kill(server.worker_pids(model)[0], signal.SIGKILL)
    for client in clients:
        client.result()
    assert answered == {200: 400}
    poll(lambda: server.restarts(model) == before + 1, "the worker is replaced")


def test_a_poisonous_request_fails_alone(
    server: LiveServer, threads: ThreadPoolExecutor, gate: Path
) -> None:
    before = server.restarts("one")
    (first,) = hold(server, threads, "one", f"until {gate}")
    batch = hold(server, threads, "one", "1", "2", "die", "3", "4", "5")
    gate.touch()
    answers = [answer.result() for answer in batch]
    assert first.result().status_code == 200
    assert [answer.status_code for answer in answers] == [200, 200, 500, 200, 200, 200]
    assert [answer.json()["body"] for answer in answers if answer.is_success] == list("12345")
    error = answers[2].json()
    assert (error["type"], error["message"]) == ("InternalServerException", DIED)
    assert error["request_id"] == answers[2].headers["x-request-id"]
    poll(lambda: server.restarts("one") == before + 2, "both workers are replaced")


def test_without_retry_each_request_that_was_held_gets_one_error(
    server: LiveServer, threads: ThreadPoolExecutor, gate: Path
) -> None:
    before = server.restarts("once")
    (first,) = hold(server, threads, "once", f"until {gate}")
    batch = hold(server, threads, "once", "1", "die", "2")
    gate.touch()
    answers = [answer.result() for answer in batch]
    assert first.result().status_code == 200
    assert [answer.status_code for answer in answers] == [500, 500, 500]
    assert {answer.json()["message"] for answer in answers} == {DIED}
    poll(lambda: server.restarts("once") == before + 1, "the worker is replaced")
    assert server.predict("once", "after").json()["body"] == "after"


def test_a_worker_that_talks_nonsense_is_replaced_and_others_go_on(
    server: LiveServer, threads: ThreadPoolExecutor
) -> None:
    before = server.restarts("two")
    garbage = threads.submit(server.predict, "two", "garbage")
    others = [("two", "1"), ("one", "2"), ("two", "3"), ("once", "4")] * 5
    answers = list(threads.map(lambda pair: server.predict(*pair), others))
    assert [answer.json()["body"] for answer in answers] == [body for _, body in others]
    assert (garbage.result().status_code, garbage.result().json()["message"]) == (500, ENDED)
    poll(lambda: server.restarts("two") == before + 2, "both workers are replaced")
    server.logs("a frame of 4294967295 items; 1 to 4096 are allowed; ending it")


def test_a_forged_reply_harms_only_its_own_worker(server: LiveServer) -> None:
    poll(lambda: server.predict("once", "ready").status_code == 200, "a worker is ready")
    answer = server.predict("once", "forge")
    assert (answer.status_code, answer.json()["message"]) == (500, ENDED)
    said = ("which it does not hold", "a reply with status 999", "while it holds fewer jobs")
    poll(lambda: any(each in server.log for each in said), "the log says why")
    poll(lambda: server.predict("once", "after").status_code == 200, "the worker is replaced")


def test_workers_that_go_answer_what_they_hold_even_without_retry(
    server: LiveServer, threads: ThreadPoolExecutor
) -> None:
    def scale(count: int) -> None:
        answer = server.management.put("/models/once", params={"min_worker": count})
        assert answer.status_code == 200, answer.text

    scale(2)
    done = threading.Event()

    def ask() -> Counter[int]:
        with httpx.Client(base_url=server.about["inference"], timeout=60, verify=False) as own:
            codes: Counter[int] = Counter()
            while not done.is_set():
                codes[own.post("/predictions/once", content="sleep 0.02").status_code] += 1
            return codes

    clients = [threads.submit(ask) for _ in range(8)]
    before = server.handed_over("once")
    poll(lambda: server.handed_over("once") > before + 40, "the load runs")
    scale(1)
    done.set()
    codes = sum((client.result() for client in clients), Counter[int]())
    assert set(codes) == {200}


def test_workers_that_cannot_be_started_are_tried_ever_more_seldom(server: LiveServer) -> None:
    log = server.state_dir / "logs" / "narrow-1.0" / "worker-1.log"
    log.rename(log.with_name("away"))
    log.mkdir()
    try:
        os.kill(server.worker_pids("narrow")[0], signal.SIGKILL)
        poll(lambda: server.predict("narrow", "x").status_code == 503, "it gives up")
        refused = server.predict("narrow", "x")
        assert refused.headers["retry-after"] == "5"
        message = refused.json()["message"]
        assert message.startswith("no worker of narrow 1.0 could be started, "), message
        assert message.endswith(
            " times in a row; it is tried again and again: "
            "narrow 1.0: no worker process can be started: Is a directory"
        )
        ping = server.client.get("/ping")
        assert (ping.status_code, ping.json()) == (500, {"status": "Unhealthy"})
        reason = server.client.get("/health/ready").json()["reason"]
        assert reason == "no worker is ready for narrow"
        assert server.predict("one", "x").status_code == 200
    finally:
        log.rmdir()
    poll(lambda: server.predict("narrow", "x").status_code == 200, "it recovers", 30)
    waits = [
        line.rpartition(" in ")[2].split()[0]
        for line in server.log.splitlines()
        if re.search(r"narrow 1\.0 worker 1 (ended|was killed[^;]*); replacing it in", line)
    ]
    assert waits[:5] == ["0.05", "0.1", "0.2", "0.4", "0.8"]


# -- time --------------------------------------------------------------------------------------


def test_a_worker_that_hangs_is_replaced_and_its_request_answered(
    server: LiveServer, threads: ThreadPoolExecutor
) -> None:
    before = server.restarts("watched")
    (first,) = hold(server, threads, "watched", "hang")
    behind = threads.submit(server.predict, "watched", "behind")
    answer = first.result()
    assert (answer.status_code, answer.json()["type"]) == (504, "RequestTimeoutException")
    assert answer.json()["message"] == "the worker gave no answer for 1 s"
    assert behind.result().json()["body"] == "behind"
    poll(lambda: server.restarts("watched") == before + 1, "the worker is replaced")


def test_a_request_whose_time_passes_is_answered_wherever_it_is(
    server: LiveServer, threads: ThreadPoolExecutor, gate: Path
) -> None:
    sent = hold(server, threads, "impatient", f"until {gate}")
    sent += [threads.submit(server.predict, "impatient", body) for body in ("1", "2", "3")]
    answers = [answer.result() for answer in sent]
    gate.touch()
    assert [answer.status_code for answer in answers] == [504, 504, 504, 504]
    assert {answer.json()["type"] for answer in answers} == {"RequestTimeoutException"}
    assert {answer.json()["message"] for answer in answers} == {
        "the answer took longer than the request's time",
        "the request waited longer than its time",
    }
    poll(lambda: server.predict("impatient", "x").status_code == 200, "it goes on")
    assert server.restarts("impatient") == 0


def test_a_full_queue_answers_503_and_when_to_come_back(
    server: LiveServer, threads: ThreadPoolExecutor, gate: Path
) -> None:
    answers = hold(server, threads, "narrow", f"until {gate}", "1")
    answers += [threads.submit(server.predict, "narrow", body) for body in ("2", "3")]
    poll(lambda: server.waiting("narrow") == 2, "the queue is full")
    refused = server.predict("narrow", "4")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["type"] == "ServiceUnavailableException"
    assert "the queue is full (2 requests wait)" in refused.json()["message"]
    assert server.predict("one", "x").status_code == 200
    gate.touch()
    assert [answer.result().status_code for answer in answers] == [200, 200, 200, 200]


def test_what_a_client_no_longer_waits_for_is_not_run(
    server: LiveServer, threads: ThreadPoolExecutor, gate: Path
) -> None:
    before = server.restarts("narrow")
    first, second = hold(server, threads, "narrow", f"until {gate}", "second")
    with socket.create_connection(server.address, 10) as client:
        head = b"POST /predictions/narrow HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n"
        client.sendall(head + b"die")
        poll(lambda: server.waiting("narrow") == 1, "the request waits")
    poll(lambda: server.waiting("narrow") == 0, "it is gone")
    gate.touch()
    assert (first.result().status_code, second.result().status_code) == (200, 200)
    assert server.predict("narrow", "after").status_code == 200
    assert server.restarts("narrow") == before
