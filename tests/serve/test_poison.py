"""A request that ended two workers is refused for a while, and who sends ever new ones."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from modelyard.serve.dataplane import poison
from modelyard.serve.dataplane.call import PREDICT, Call
from modelyard.serve.dataplane.poison import ENDS, MOST, NETWORK_ENDS, REFUSED_S, Poison
from modelyard.serve.dataplane.wire import pack_meta
from tests.serve.live import LiveServer, build_archive, poll
from tests.serve.test_faults import hold

CONFIGS = {
    "poisoned": "minWorkers: 2\n",
    "unretried": "minWorkers: 1\nretry: false\n",
    "varied": "minWorkers: 1\nbatchSize: 1\n",
}
SEGFAULT = "signal 11"
BY_SIGSEGV = "the worker that held the request ended by SIGSEGV"


@pytest.fixture(scope="module")
def server(shared_server: LiveServer) -> LiveServer:
    for name, config in CONFIGS.items():
        build_archive(shared_server.store, "mortal", name=name, config=config)
    shared_server.register_all(*CONFIGS)
    return shared_server


def said(
    server: LiveServer, model: str, body: str, address: str = "127.0.0.1", **options: Any
) -> tuple[int, str]:
    """Return status and message of an answer, once a worker can give one."""
    poll(lambda: server.worker_pids(model), "a worker is ready")
    answer = post(server, model, body, address, **options)
    return answer.status_code, answer.json().get("message", "")


def post(server: LiveServer, model: str, body: str, address: str, **options: Any) -> httpx.Response:
    """Ask from an address of this machine."""
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=60) as client:
        url = f"{server.about['inference']}/predictions/{model}"
        return client.post(url, content=body, **options)


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
    typed: dict[str, Any] = {"headers": {"X-Asks-For": "more"}}
    assert said(server, "poisoned", SEGFAULT, "127.0.0.2", **typed) == (500, BY_SIGSEGV)
    assert is_refusal(said(server, "poisoned", SEGFAULT, **typed))
    assert said(server, "poisoned", SEGFAULT + " ", "127.0.0.3")[0] == 500
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
    assert said(server, "unretried", SEGFAULT, "127.0.0.2") == (500, BY_SIGSEGV)
    assert said(server, "unretried", SEGFAULT, "127.0.0.3") == (500, BY_SIGSEGV)
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
    assert said(server, "unretried", "signal 40", "127.0.0.2")[1].endswith("ended by 40")


def test_who_sends_ever_new_ones_is_refused_and_nobody_else(
    server: LiveServer, threads: ThreadPoolExecutor
) -> None:
    """Also what waits already; its harmless requests too, for nobody can tell them before."""
    bodies = [f"signal 11 {number}" for number in range(10)]
    answers = list(threads.map(lambda body: post(server, "varied", body, "127.0.0.2"), bodies))
    statuses = Counter(answer.status_code for answer in answers)
    assert statuses == {500: statuses[500], 429: 10 - statuses[500]} and statuses[500] <= 4
    ended = server.restarts("varied")
    assert ended <= ENDS
    status, text = said(server, "varied", "harmless", "127.0.0.2")
    assert status == 429 and text.startswith("requests of 127.0.0.2 have just ended 6 workers")
    assert "the last one ended by SIGSEGV; all of them are refused for " in text
    refused = post(server, "varied", "harmless", "127.0.0.2")
    assert 0 < int(refused.headers["retry-after"]) <= REFUSED_S
    assert refused.json()["type"] == "TooManyRequestsException"
    for address, token in (("127.0.0.2", server.inference_token), ("127.0.0.3", "")):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        assert said(server, "varied", "harmless", address, headers=headers)[0] == 200
    told = "varied 1.0: requests of 127.0.0.2 have just ended"
    server.logs(told)
    assert server.log.count(told) == 1 and server.restarts("varied") == ended


# -- what is remembered ------------------------------------------------------------------------


class Client(NamedTuple):
    """Who sent a request."""

    address: str | None = "10.0.0.1"
    token: str = ""
    forwarded: tuple[str, ...] = ()
    real: str = ""

    @property
    def client(self) -> tuple[str, int] | None:
        return (self.address, 1) if self.address else None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        token = [(b"authorization", self.token.encode())] if self.token else []
        real = [(b"x-real-ip", self.real.encode())] if self.real else []
        return [*token, *real, *((b"x-forwarded-for", each.encode()) for each in self.forwarded)]


class Anything:
    request_timeout_s = 1.0
    batchers = ()


class Sink:
    done = cancel = lambda self: False
    set_result = set_exception = lambda self, _: None


def call(
    body: bytes,
    *headers: bytes,
    id: bytes = b"id",
    path: bytes = b"",
    client: Client | None = None,
) -> Call:
    made = Call(Anything(), PREDICT, pack_meta((path, b"", id, *headers)), Sink(), client=client)
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


# -- who is refused ----------------------------------------------------------------------------


class Case(NamedTuple):
    """What ended workers, and who asks then."""

    senders: Iterator[Client | None]
    """Who sent each request that ended workers: another body each."""
    then: Client
    ends: int = 2
    """Workers that each ended; 0: they were killed, or the server ended them."""
    pause_s: float = 0.0
    """Time from each to the next, and to who asks then."""
    harmless: tuple[int, ...] = ()
    """How many harmless requests the same one sends behind the first, and so on."""


def many(count: int, **fields: str) -> Iterator[Client]:
    """Yield clients; `#` in a field stands for the number of each."""
    for number in range(count):
        told = {name: text.replace("#", str(number)) for name, text in fields.items()}
        forwarded = (told.pop("forwarded"),) if "forwarded" in told else ()
        yield Client(**told, forwarded=forwarded)


ONE = Client()
PROXY = {"address": "10.0.0.9"}
HOSTILE = {
    "ever new bodies": Case(many(3), ONE),
    "each tried once": Case(many(6), ONE, ends=1),
    "within a minute": Case(many(3), ONE, pause_s=20),
    "a token of its own": Case(many(3, token="a"), Client(token="a")),
    "on a Unix socket": Case(many(3, address=""), Client("")),
    "behind a proxy": Case(
        many(3, **PROXY, forwarded="1.1.1.1"), Client("10.0.0.9", "", ("1.1.1.1",))
    ),
    "behind a proxy, having said another first": Case(
        many(3, **PROXY, forwarded="2.2.2.#, 1.1.1.1"),
        Client("10.0.0.9", "", ("3.3.3.3", "4.4.4.4, 1.1.1.1")),
    ),
    "ever new tokens": Case(many(9, token="#"), Client(token="another")),
    "forged proxies": Case(many(9, forwarded="1.1.1.#"), Client(forwarded=("2.2.2.2",))),
    "a network of IPv6": Case(many(9, address="2001:db8::#"), Client("2001:db8::ff")),
    "some harmless between": Case(many(3), ONE, harmless=(29, 29)),
    "a thousand harmless before": Case(many(4), ONE, harmless=(1000,)),
}
HARMLESS = {
    "two requests": Case(many(2), ONE),
    "another address": Case(many(9), Client("10.0.0.2")),
    "another token": Case(many(3, token="a"), Client(token="b")),
    "no token": Case(many(3, token="a"), ONE),
    "another one behind the proxy": Case(
        many(3, **PROXY, forwarded="1.1.1.1"), Client("10.0.0.9", "", ("1.1.1.1, 1.1.1.2",))
    ),
    "some behind the proxy": Case(
        many(8, **PROXY, forwarded="1.1.1.#"), Client("10.0.0.9", "", ("1.1.1.9",))
    ),
    "another network of IPv6": Case(many(9, address="2001:db8::#"), Client("2001:db8:0:1::1")),
    "others, as IPv6 has IPv4": Case(
        many(9, address="::ffff:10.0.0.#"), Client("::ffff:10.0.0.99")
    ),
    "another one, as other proxies say": Case(
        many(8, **PROXY, real="1.1.1.#"), Client("10.0.0.9", real="1.1.1.9")
    ),
    "killed, as for memory": Case(many(20), ONE, ends=0),
    "of nobody": Case(iter([None] * 20), ONE),
    "a few in each minute": Case(many(9), ONE, pause_s=40),
    "many users at one address": Case(many(3), ONE, harmless=(30, 30)),
    "many more": Case(many(20), ONE, harmless=(40,) * 19),
    "many behind a proxy, a few of whom": Case(
        many(9, **PROXY, forwarded="1.1.1.#"), Client("10.0.0.9"), harmless=(23,) * 9
    ),
    "a minute ago": Case(many(3), ONE, pause_s=0.1 + REFUSED_S),
}


def test_who_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every hostile one is, and none that is harmless."""
    now = 1000.0
    monkeypatch.setattr(poison, "monotonic", lambda: now)
    outcomes = {}
    for name, case in (HOSTILE | HARMLESS).items():
        known = Poison()
        for number, sender in enumerate(case.senders):
            known.strike(call(b"%03d" % number, client=sender), 2, "ended", case.ends)
            for _ in range(case.harmless[number] if number < len(case.harmless) else 0):
                assert known.refusal(call(b"harmless", client=sender)) is None
            now += case.pause_s
        outcomes[name] = known.refusal(call(b"another", client=case.then)) is not None
    misses = [name for name in HOSTILE if not outcomes[name]]
    alarms = [name for name in HARMLESS if outcomes[name]]
    assert not misses and not alarms, f"missed: {misses}; false alarms: {alarms}"


def test_it_is_refused_for_a_minute_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(poison, "monotonic", lambda: now)
    known = Poison()
    bodies = [call(b"%03d" % number, client=ONE) for number in range(ENDS)]
    assert [known.strike(each, 1, "ended by SIGABRT", 1) for each in bodies] == [False] * 5 + [True]
    now += 10
    assert not known.strike(call(b"in a worker then", client=ONE), 1, "", 1)
    now += REFUSED_S - 10.5
    assert "refused for 1 s more" in str(known.refusal(bodies[0]))
    now += 0.5
    assert known.refusal(bodies[0]) is None
    now += 10
    assert known.refusal(bodies[0]) is None and not known.clients and not known


def test_of_clients_too_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(poison, "monotonic", lambda: now)
    known = Poison()
    assert NETWORK_ENDS < MOST
    for number in (*range(3 * MOST), 2 * MOST, 3 * MOST):
        known.strike(call(b"", client=Client(f"10.0.0.{number}")), 0, "", ENDS)
    asked = [call(b"", client=Client(f"10.0.0.{number}")) for number in range(3 * MOST + 1)]
    refused = [known.refusal(each) is not None for each in asked]
    assert refused == [False] * 2 * MOST + [True, False] + [True] * (MOST - 1)
