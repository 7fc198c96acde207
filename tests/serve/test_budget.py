"""What the server process gives to answers: nobody gets more than the limits say."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.exposition import read_records
from modelyard.serve.front.begin import unpack_headers
from tests.serve.live import LiveServer, build_archive, poll, running

MB = 1 << 20
ANSWER, ALL = 16 * MB, 40 * MB
BODY, BODIES = 4 * MB, 8 * MB
LOG, LINE = 100_000, 1000
CONFIG = f"""\
max_response_bytes: {ANSWER}
response_memory_bytes: {ALL}
max_request_bytes: {BODY}
request_memory_bytes: {BODIES}
log_bytes: {LOG}
log_keep: 2
"""
SLACK = 24 * MB
"""What the allocator keeps, and the server needs for its other work."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("budget")
    build_archive(folder / "store", "greedy", config="minWorkers: 2\nbatchSize: 4\n")
    build_archive(folder / "store", "echo", config="minWorkers: 1\n")
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    options = ("--models=greedy,echo", f"--config={folder / 'config.yaml'}")
    with running(folder / "state", folder / "store", *options) as server:
        yield server


def resident(server: LiveServer, what: str = "VmRSS:") -> int:
    status = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition(what)[2].split()[0])


def ask_without_reading(server: LiveServer, body: bytes) -> socket.socket:
    """Send a request from a client that will not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(server.address)
    head = b"POST /predictions/greedy HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    client.sendall(head % len(body) + body)
    return client


# -- the budget ----------------------------------------------------------------------------------


def test_who_finds_no_room_gets_it_in_order_as_it_is_given_back() -> None:
    budget, served = AnswerBudget(100), list[str]()
    assert budget.take(60, lambda: served.append("never"))
    assert not budget.take(50, lambda: served.append("first"))
    assert not budget.take(10, lambda: served.append("second"))  # it fits, but is not first
    assert budget.is_short
    budget.give_back(5)
    assert (served, budget.held) == ([], 55)
    budget.give_back(10)
    assert (served, budget.held) == (["first"], 95)
    budget.give_back(10)
    assert (served, budget.held) == (["first", "second"], 95)
    assert not budget.is_short


def test_what_is_there_in_any_case_is_counted_beyond_the_limit() -> None:
    budget, served = AnswerBudget(100), list[str]()
    budget.add(150)
    assert not budget.take(0, lambda: served.append("read on"))
    budget.give_back(50)
    assert served == ["read on"]


def test_what_is_longer_than_the_limit_has_room_alone() -> None:
    assert AnswerBudget(100).take(200, lambda: None)


def test_who_waits_no_longer_holds_nobody_up() -> None:
    budget, served = AnswerBudget(100), list[str]()
    budget.add(90)

    def first() -> None:
        served.append("first")

    assert not budget.take(80, first)
    assert not budget.take(5, lambda: served.append("second"))
    budget.forget(first)
    assert served == ["second"]


# -- one answer ----------------------------------------------------------------------------------


def test_an_answer_of_the_longest_length_comes_and_a_longer_one_is_refused(
    server: LiveServer,
) -> None:
    assert len(server.predict("greedy", f"give {ANSWER}").content) == ANSWER
    refused = server.predict("greedy", f"give {ANSWER + 1}")
    assert refused.status_code == 500
    text = f"the answer has {ANSWER + 1} bytes; max_response_bytes allows {ANSWER}"
    assert refused.json()["message"] == text


def test_long_answers_of_one_batch_all_come_and_count_as_one_batch(server: LiveServer) -> None:
    name, labels = "modelyard_batch_size_sum", {"model": "greedy", "kind": "predict"}
    before = server.metric(name, **labels)
    with ThreadPoolExecutor(8) as threads:
        bodies = [f"give {at * MB}" for at in range(3, 11)]
        answers = threads.map(lambda body: server.predict("greedy", body), bodies)
        assert [len(answer.content) for answer in answers] == [at * MB for at in range(3, 11)]
    assert server.metric(name, **labels) == before + 8


def test_headers_that_frame_the_answer_are_the_servers_own() -> None:
    forged = [b"Content-Length", b"999", b"x-mine", b"1", b"connection", b"close"]
    assert unpack_headers(wire.pack_meta(forged)) == ((b"x-mine", b"1"),)


# -- all answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["give", pytest.param("stream", marks=pytest.mark.nightly)])
def test_clients_that_read_nothing_cost_what_the_budget_says_and_are_cut_off(
    server: LiveServer, verb: str
) -> None:
    Path(f"/proc/{server.pid}/clear_refs").write_text("5", encoding="utf-8")
    before = resident(server)
    idle = [ask_without_reading(server, b"%s %d" % (verb.encode(), ANSWER)) for _ in range(6)]
    try:
        # While workers wait for room, others are served, and who reads gets its answer.
        assert server.predict("echo", b"well").status_code == 200
        assert len(server.predict("greedy", f"give {ANSWER}").content) == ANSWER
    finally:
        for client in idle:
            client.close()
    assert resident(server, "VmHWM:") - before < ALL + SLACK
    assert server.predict("echo", b"well").status_code == 200


def test_what_clients_left_unread_is_given_back(server: LiveServer) -> None:
    for _ in range(4):
        ask_without_reading(server, b"give %d" % ANSWER).close()
    poll(lambda: not server.waiting("greedy"), "nothing waits")
    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(lambda _: server.predict("greedy", f"give {ANSWER}"), range(4))
        assert [len(answer.content) for answer in answers] == [ANSWER] * 4


# -- bodies --------------------------------------------------------------------------------------


def test_bodies_that_do_not_end_cost_what_the_budget_says(server: LiveServer) -> None:
    head = (
        b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % BODY
    )
    open_ended = [socket.create_connection(server.address, 20) for _ in range(3)]
    try:
        for client in open_ended:
            client.sendall(head + bytes(BODY - MB))
        answer = open_ended[-1].recv(1000)  # 9 MB of 8 have come
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer
        assert b"request_memory_bytes" in answer
        assert server.predict("echo", b"small").status_code == 200
    finally:
        for client in open_ended:
            client.close()
    long = b"x" * BODY
    poll(lambda: server.predict("echo", long).status_code == 200, "they are given back")
    assert server.predict("echo", long).status_code == 200


# -- frames --------------------------------------------------------------------------------------


def test_a_frame_that_announces_more_than_an_answer_ends_its_worker(server: LiveServer) -> None:
    before, restarts = resident(server), server.restarts("greedy")
    # Announced are 4,096 answers of 16 MB, of which each is within its own limit.
    assert server.predict("greedy", f"announce 4096 {ANSWER}").status_code == 500
    assert resident(server) - before < SLACK
    assert server.restarts("greedy") > restarts
    server.logs("a frame of 68719476736 bytes")


def test_records_that_cannot_be_read_take_one_line(server: LiveServer) -> None:
    logged = len(server.log)
    assert server.predict("greedy", "record 300000").status_code == 200
    assert server.predict("echo", b"well").status_code == 200
    server.logs("300000 of 300000 records of a worker are left out (more than 1000)")
    assert len(server.log) - logged < 2000


def test_records_by_the_api_all_count_however_many_there_are(server: LiveServer) -> None:
    many = 3 * wire.MAX_RECORDS + 1
    assert server.predict("greedy", f"measure {many}").status_code == 200
    poll(lambda: server.metric("Counted", ModelName="greedy") == many, "all are counted")


def test_a_control_message_longer_than_it_may_be_ends_its_worker(server: LiveServer) -> None:
    restarts = server.restarts("greedy")
    assert server.predict("greedy", "record 600000").status_code == 500  # 1.8 MB of JSON
    poll(lambda: server.restarts("greedy") > restarts, "the worker is replaced")


def test_no_more_records_of_one_message_are_taken_than_allowed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = {"name": "a", "value": 1, "unit": "", "type": "counter", "dimensions": {}}
    given = [record, {}, *[record] * wire.MAX_RECORDS]
    assert len(list(read_records(json.loads(json.dumps(given))))) == wire.MAX_RECORDS - 1
    (line,) = caplog.messages
    assert line.startswith(f"3 of {len(given)} records of a worker are left out (more than ")


# -- logs ----------------------------------------------------------------------------------------


def test_what_handlers_print_stays_within_the_size_of_their_logs(server: LiveServer) -> None:
    assert server.predict("greedy", "print 2000000").status_code == 200
    folder = server.state_dir / "logs" / "greedy-1.0"
    poll(lambda: len(list(folder.glob("worker-*.log.*"))) >= 2, "the log is put aside")
    for file in folder.iterdir():
        assert file.stat().st_size <= LOG + LINE, file
    assert len(list(folder.iterdir())) <= 2 * 3


def test_the_servers_own_log_stays_within_its_size(server: LiveServer) -> None:
    for at in range(1000):  # of one address a second has one line
        source = (f"127.1.{at >> 8}.{at & 255}", 0)
        with socket.create_connection(server.address, 20, source) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n" % (b"x" * 150))
            assert b" 403 " in client.recv(1000)
    logs = [file for file in (server.state_dir / "logs").iterdir() if file.is_file()]
    assert sorted(file.name for file in logs) == ["server.log", "server.log.1", "server.log.2"]
    assert all(file.stat().st_size <= LOG + LINE for file in logs)
    # What libraries write to standard error goes to the file that is written now.
    shared = Path(f"/proc/{server.pid}/fd/2").readlink()
    assert shared == server.state_dir / "logs" / "server.log"
