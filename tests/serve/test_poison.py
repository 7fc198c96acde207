"""A request that ended two workers is refused for a while, and nobody else is."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from modelyard.serve.dataplane import poison
from modelyard.serve.dataplane.call import PREDICT, Call
from modelyard.serve.dataplane.poison import MOST, REFUSED_S, Poison
from modelyard.serve.dataplane.wire import pack_meta
from tests.serve.live import LiveServer, build_archive, poll
from tests.serve.test_faults import hold

CONFIGS = {"poisoned": "minWorkers: 2\n", "unretried": "minWorkers: 1\nretry: false\n"}
SEGFAULT = "signal 11"
BY_SIGSEGV = "the worker that held the request ended by SIGSEGV"


@pytest.fixture(scope="module")
def server(shared_server: LiveServer) -> LiveServer:
    for name, config in CONFIGS.items():
        build_archive(shared_server.store, "mortal", name=name, config=config)
    shared_server.register_all(*CONFIGS)
    return shared_server


def said(server: LiveServer, model: str, body: str, **options: Any) -> tuple[int, str]:
    """Return status and message of an answer, once a worker can give one."""
    poll(lambda: server.worker_pids(model), "a worker is ready")
    answer = server.predict(model, body, **options)
    return answer.status_code, answer.json().get("message", "")


def is_refusal(answer: tuple[int, str], how: str = "ended by SIGSEGV") -> bool:
    return answer[0] == 400 and f"two workers of the model, the last one {how};" in answer[1]


def refused(server: LiveServer, model: str) -> float:
    name = "modelyard_refused_requests_total"
    return server.metric(name, model=model, kind="predict", reason="poison")


def test_what_ended_two_workers_is_refused_and_costs_no_third(server: LiveServer) -> None:
    assert said(server, "poisoned", SEGFAULT) == (500, BY_SIGSEGV)
    poll(lambda: server.restarts("poisoned") == 2, "both workers are replaced")
    for _ in range(20):
        assert is_refusal(said(server, "poisoned", SEGFAULT))
    answer = server.predict("poisoned", SEGFAULT).json()
    assert answer["type"] == "BadRequestException" and answer["error"] == answer["message"]
    assert refused(server, "poisoned") == 21
    said_once = "poisoned 1.0: this request has just ended two workers"  # others share the server
    server.logs(said_once)
    lines = [line for line in server.log.splitlines() if said_once in line]
    assert len(lines) == 1 and "the last one ended by SIGSEGV" in lines[0], lines
    server.logs("poisoned 1.0 worker 1 ended by SIGSEGV; replacing it in")
    assert server.restarts("poisoned") == 2


def test_another_request_is_another_one(server: LiveServer) -> None:
    """By its header, its path or its length; each ends its own two workers."""
    assert said(server, "poisoned", "sleep 0")[0] == 200
    poll(lambda: len(server.worker_pids("poisoned")) == 2, "both are ready")
    typed = {"headers": {"X-Asks-For": "more"}}
    assert said(server, "poisoned", SEGFAULT, **typed) == (500, BY_SIGSEGV)
    assert is_refusal(said(server, "poisoned", SEGFAULT, **typed))
    assert said(server, "poisoned", SEGFAULT + " ")[0] == 500
    assert said(server, "unretried", "sleep 0")[0] == 200


def test_who_was_in_its_batch_is_not_refused(
    server: LiveServer, threads: ThreadPoolExecutor, gate: Path
) -> None:
    server.management.put("/models/poisoned", params={"min_worker": 1, "max_worker": 1})
    (first,) = hold(server, threads, "poisoned", f"until {gate}")
    batch = hold(server, threads, "poisoned", "1", "signal 6", "2")
    gate.touch()
    assert first.result().is_success
    assert [answer.result().status_code for answer in batch] == [200, 500, 200]
    assert [said(server, "poisoned", body)[0] for body in ("1", "2", "signal 6")] == [200, 200, 400]


def test_without_retry_nobody_is_blamed_for_his_mates(
    server: LiveServer, threads: ThreadPoolExecutor, notes: Path
) -> None:
    for gate in (notes / "first", notes / "second"):
        poll(lambda: server.worker_pids("unretried"), "a worker is ready")
        (first,) = hold(server, threads, "unretried", f"until {gate}")
        batch = hold(server, threads, "unretried", "mate", f"signal {signal.SIGABRT:d}")
        gate.touch()
        assert first.result().is_success
        assert {answer.result().status_code for answer in batch} == {500}
    assert said(server, "unretried", "mate")[0] == 200


def test_without_retry_it_takes_two_of_them(server: LiveServer) -> None:
    assert said(server, "unretried", SEGFAULT) == (500, BY_SIGSEGV)
    assert said(server, "unretried", SEGFAULT) == (500, BY_SIGSEGV)
    assert is_refusal(said(server, "unretried", SEGFAULT))
    assert said(server, "unretried", "die")[1].endswith("ended with exit code 3")
    assert said(server, "unretried", "die")[0] == 500
    assert is_refusal(said(server, "unretried", "die"), "ended with exit code 3")


def test_who_lost_workers_that_others_killed_is_not_refused(
    server: LiveServer, threads: ThreadPoolExecutor
) -> None:
    for _ in range(3):
        poll(lambda: server.worker_pids("unretried"), "a worker is ready")
        (held,) = hold(server, threads, "unretried", "sleep 5")
        os.kill(server.worker_pids("unretried")[0], signal.SIGKILL)
        assert held.result().status_code == 507
        assert "killed from outside" in held.result().json()["message"]
    assert said(server, "unretried", "sleep 0")[0] == 200


def test_a_signal_without_a_name_has_its_number(server: LiveServer) -> None:
    assert said(server, "unretried", "signal 40")[1].endswith("ended by 40")


# -- what is remembered ------------------------------------------------------------------------


class Anything:
    request_timeout_s = 1.0
    batchers = ()


class Sink:
    done = cancel = lambda self: False
    set_result = set_exception = lambda self, _: None


def call(body: bytes, *headers: bytes, id: bytes = b"id", path: bytes = b"") -> Call:
    made = Call(Anything(), PREDICT, pack_meta((path, b"", id, *headers)), Sink())
    made.arrived([body], 0.0)
    return made


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (call(b"body", b"a", b"1"), True),
        (call(b"body", b"a", b"1", id=b"another"), True),
        (call(b"body", b"a", b"1", b"X-Request-Timeout", b"5"), True),
        (call(b"body", b"a", b"2"), False),
        (call(b"body"), False),
        (call(b"bodi", b"a", b"1"), False),
        (call(b"body", b"a", b"1", path=b"b"), False),
        (call(b"long body", b"a", b"1"), False),
    ],
)
def test_it_is_told_by_all_that_a_handler_may_die_of(other: Call, is_same: bool) -> None:
    known = Poison()
    assert known.strike(call(b"body", b"a", b"1"), 2, "ended by SIGSEGV")
    assert (known.refusal(other) is not None) == is_same


def test_the_newest_are_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(poison, "monotonic", lambda: now)
    known = Poison()
    calls = [call(b"%03d" % number) for number in range(MOST + 10)]
    assert not known
    for each in calls:
        assert not known.strike(each, 1, "")
        assert known.strike(each, 1, "")
        assert not known.strike(each, 1, "")  # it is told once
    assert [known.refusal(each) is not None for each in calls] == [False] * 10 + [True] * MOST
    now += REFUSED_S - 1
    assert "for 1 s more" in str(known.refusal(calls[-1]))
    now += 1
    assert known.refusal(calls[-1]) is None and not known
