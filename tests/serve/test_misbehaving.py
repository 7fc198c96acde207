"""Handlers that misbehave, each beside a healthy model under load: only the sick model suffers.

F1 to F5 and C5 of the fault table: what hangs, ends, raises, answers nonsense, prints, and writes
to the wire. Batch mates of the bad request get their answers.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from tests.serve.live import LiveServer, build_archive, descendants, poll
from tests.serve.load import Answer, Load, ask, unharmed

HEALTHY = "healthy"
HOSTS = count(1)
RESPONSE_TIMEOUT_S = 1
CONFIGS = {
    # Some batches here cost eight workers, which take seconds each to be replaced.
    "sick": "minWorkers: 1\nbatchSize: 16\nclientTimeoutInMills: 240000\n",
    "hanging": f"minWorkers: 1\nresponseTimeout: {RESPONSE_TIMEOUT_S}\n",
    "late": "minWorkers: 1\nresponseTimeout: 3\nclientTimeoutInMills: 300\n",
}


@pytest.fixture(scope="module")
def server(shared_server: LiveServer) -> LiveServer:
    build_archive(shared_server.store, "echo", name=HEALTHY, config="minWorkers: 1\n")
    for name, config in CONFIGS.items():
        build_archive(shared_server.store, "hostile", name=name, config=config)
    shared_server.register_all(HEALTHY, *CONFIGS)
    return shared_server


@pytest.fixture(autouse=True)
def load(server: LiveServer) -> Iterator[Load]:
    """Run every test beside a healthy model, which must not notice."""
    with unharmed(server, HEALTHY) as load:
        yield load


def ends_in_log(server: LiveServer, model: str) -> int:
    return len(re.findall(rf"{model} 1\.0 worker 1 [^;]*; replacing it in", server.log))


def in_one_batch(
    server: LiveServer, threads: ThreadPoolExecutor, gate: Path, *bodies: str, model: str = "sick"
) -> list[Answer]:
    """Have a worker hold these requests while it runs another: they are its next batch.

    Each comes from an address of its own: who ends six workers is refused all else (test_poison).
    """
    answers: list[Future[Answer]] = []
    before = server.handed_over(model)
    for body in (f"until {gate}", *bodies):
        host = "127.1.{}.{}".format(*divmod(next(HOSTS), 250))
        answers.append(threads.submit(partial(ask, host=host), server, model, body))
        poll(lambda: server.handed_over(model) == before + len(answers), "it is handed over")
    gate.touch()
    first, *others = [answer.result() for answer in answers]
    assert first.status == 200, first
    return others


def check_error(answer: Answer, status: int, message: str) -> None:
    """Check that an answer is a JSON error that tells nothing of our insides."""
    content = json.loads(answer.body)
    assert (answer.status, content["code"]) == (status, status), content
    assert re.fullmatch(message, content["message"], re.S), content["message"]
    assert content["request_id"]
    for secret in (b"Traceback", b"File \\", b"loop.py", b"/unpacked/"):
        assert secret not in answer.body


def mates_are_answered(answers: list[Answer]) -> bool:
    """Return whether the first and the last request of a batch of three got their own answers."""
    return [(answer.status, json.loads(answer.body)) for answer in (answers[0], answers[2])] == [
        (200, {"body": "one"}),
        (200, {"body": "three"}),
    ]


# -- F1: what hangs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "misdeed",
    [
        "sleep_forever",
        "stop_itself",
        pytest.param("hold_the_gil", marks=pytest.mark.slow),
        pytest.param("spin_forever", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_hangs_is_replaced_and_only_its_request_is_late(
    server: LiveServer, threads: ThreadPoolExecutor, misdeed: str
) -> None:
    before, logged = server.restarts("hanging"), ends_in_log(server, "hanging")
    hung = threads.submit(ask, server, "hanging", misdeed)
    poll(lambda: server.handed_over("hanging"), "it is handed over")
    behind = [threads.submit(ask, server, "hanging", f"behind {at}") for at in range(4)]
    check_error(hung.result(), 504, f"the worker gave no answer for {RESPONSE_TIMEOUT_S} s")
    assert [answer.result().status for answer in behind] == [200] * 4
    assert server.restarts("hanging") == before + 1
    assert ends_in_log(server, "hanging") == logged + 1


def test_a_request_is_answered_at_its_deadline_though_its_worker_hangs(server: LiveServer) -> None:
    before = server.restarts("late")
    check_error(
        ask(server, "late", "sleep_forever"), 504, "the answer took longer than the request's time"
    )
    poll(lambda: server.restarts("late") == before + 1, "the worker is replaced")
    poll(lambda: ask(server, "late", "after").status == 200, "the next request is right")


# -- F2: what ends -----------------------------------------------------------------------------

DIED = (
    500,
    "the worker that held the request (was ended by the server: .*|ended with exit code 0)",
)
ENDS = {
    body: (code, f"the worker that held the request {how}")
    for body, code, how in (
        ("leave 0", 500, "ended with exit code 0"),
        ("leave 3", 500, "ended with exit code 3"),
        ("kill_itself", 507, "was killed from outside, .*"),
        ("segfault", 500, "ended by SIGSEGV"),
        ("abort", 500, "ended by SIGABRT"),
        ("overflow", 500, "ended by SIGSEGV"),
        ("cut_the_wire", 500, "was ended by the server: .*"),
    )
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "misdeeds",
    [("leave 3", "kill_itself", "segfault"), pytest.param(tuple(ENDS), marks=pytest.mark.nightly)],
    ids=["three", "all"],
)
def test_requests_that_end_their_worker_get_one_error_and_their_mates_answers(
    server: LiveServer, threads: ThreadPoolExecutor, tmp_path: Path, misdeeds: tuple[str, ...]
) -> None:
    before, logged = server.restarts("sick"), ends_in_log(server, "sick")
    bodies = [body for misdeed in misdeeds for body in (misdeed, f"mate of {misdeed}")]
    answers = in_one_batch(server, threads, tmp_path / "gate", *bodies)
    for body, answer in zip(bodies, answers, strict=True):
        if body in misdeeds:
            check_error(answer, *ENDS[body])
        else:
            assert (answer.status, json.loads(answer.body)) == (200, {"body": body})
    assert ask(server, "sick", "after").status == 200
    # Once together, then each of them alone.
    assert server.restarts("sick") == before + 1 + len(misdeeds)
    assert ends_in_log(server, "sick") == logged + 1 + len(misdeeds)


@pytest.fixture
def curse(server: LiveServer, tmp_path: Path) -> Iterator[Path]:
    """A model `cursed` that cannot be loaded while the file exists."""
    curse = tmp_path / "curse"
    config = f"minWorkers: 1\nhandler: {{curse: {curse}}}\n"
    build_archive(server.store, "gated", name="cursed", config=config)
    server.register_all("cursed")
    yield curse
    assert server.management.delete("/models/cursed").is_success


def test_what_waits_survives_a_worker_that_cannot_be_loaded(
    server: LiveServer, load: Load, threads: ThreadPoolExecutor, curse: Path
) -> None:
    curse.touch()
    os.kill(server.worker_pids("cursed")[0], signal.SIGKILL)
    waiting = [threads.submit(ask, server, "cursed", body) for body in ("one", "two")]
    server.logs("CRITICAL serve forged")
    (worker,) = server.describe("cursed")["workers"]
    assert worker["status"] != "READY"
    curse.unlink()
    assert [answer.result().status for answer in waiting] == [200, 200]
    lines = server.log.splitlines()
    assert next(line for line in lines if "forged" in line).startswith("    ")
    assert "\x1b" not in server.log
    assert (
        sum("RuntimeError: cursed" in line for line in lines) == ends_in_log(server, "cursed") - 1
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_cannot_be_loaded_is_tried_ever_more_seldom_and_the_model_says_so(
    server: LiveServer, load: Load, threads: ThreadPoolExecutor, curse: Path
) -> None:
    curse.touch()
    processes = len(descendants(server.pid))
    os.kill(server.worker_pids("cursed")[0], signal.SIGKILL)
    waiting = threads.submit(ask, server, "cursed", "x")
    most = 0
    while not waiting.done():
        most = max(most, len(descendants(server.pid)))
    assert most <= processes + 1  # one at a time, and what it starts while it boots
    check_error(waiting.result(), 500, "no worker of cursed 1.0 could be started, 5 times .*")
    refused = ask(server, "cursed", "x")
    check_error(refused, 503, "no worker of cursed 1.0 could be started, .* again: .*cursed.*")
    assert server.client.get("/ping").json() == {"status": "Unhealthy"}
    assert server.client.get("/health/ready").json()["reason"] == "no worker is ready for cursed"
    waits = re.findall(r"cursed 1\.0 worker 1 [^;]*; replacing it in (\S+) s", server.log)[-5:]
    assert [float(wait) for wait in waits[1:]] == [2 * float(wait) for wait in waits[:-1]]
    curse.unlink()
    poll(lambda: ask(server, "cursed", "x").status == 200, "it recovers", 60)


# -- F3: what raises ---------------------------------------------------------------------------

RAISES = {
    "exit": (500, "SystemExit: bye"),
    "interrupt": (500, "KeyboardInterrupt: "),
    "generator_exit": (500, "GeneratorExit: "),
    "memory": (507, "Out of resources"),
    "recurse": (500, "RecursionError: maximum recursion depth exceeded.*"),
    "unpicklable": (500, r"Unpicklable: \(<function .*"),
    "mute": (500, r"Mute: \(its text fails: RuntimeError\)"),
    "leaving": (500, r"Leaving: \(its text fails: SystemExit\)"),
    "mute_message": (418, r"\(its text fails: RuntimeError\)"),
    "surrogate": (500, "ValueError: \ud800 \0 \r\n\x1b\\[31m"),
}


def test_what_raises_is_an_error_of_its_own_and_costs_no_worker(
    server: LiveServer, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    before = server.restarts("sick")
    for misdeed, error in RAISES.items():
        answers = in_one_batch(server, threads, tmp_path / misdeed, "one", misdeed, "three")
        check_error(answers[1], *error)
        assert mates_are_answered(answers), misdeed
        assert server.restarts("sick") == before, misdeed


def test_what_a_handler_does_to_its_rows_is_not_seen_when_they_are_run_again(
    server: LiveServer, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    answers = in_one_batch(server, threads, tmp_path / "gate", "one", "all_spoil", "three")
    check_error(answers[1], 500, "ValueError: spoilt")
    assert mates_are_answered(answers)


# -- F4: what answers nonsense -----------------------------------------------------------------

NOT_JSON = "the handler's answer cannot be sent as JSON: .*"
NONSENSE = {
    "all_none": "the handler returned NoneType; a list .*",
    "all_dict": "the handler returned dict; a list .*",
    "all_generator": "the handler returned generator; a list .*",
    "all_short": "number of batch response mismatched: 0 answers to 1 requests",
    "all_long": "number of batch response mismatched: 2 answers to 1 requests",
    "all_lie_short": "number of batch response mismatched: 0 answers to 1 requests",
    "all_lie_long": "number of batch response mismatched: 1000 answers to 1 requests",
    "all_endless": "number of batch response mismatched: 0 answers to 1 requests",
    "nan": NOT_JSON,
    "infinity": NOT_JSON,
    "cycle": NOT_JSON,
    "deep": NOT_JSON,
    "array": NOT_JSON,
    "tensor": NOT_JSON,
    "scalar": NOT_JSON,
    "lone_surrogate": NOT_JSON,
    "any_object": NOT_JSON,
    "odd_keys": NOT_JSON,
    "odd_header": "RuntimeError: .*",
}


def test_an_answer_that_cannot_be_sent_is_an_error_of_its_own_request(
    server: LiveServer, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    before = server.restarts("sick")
    for misdeed, message in NONSENSE.items():
        answers = in_one_batch(server, threads, tmp_path / misdeed, "one", misdeed, "three")
        check_error(answers[1], 500, message)
        assert mates_are_answered(answers), misdeed
        assert server.restarts("sick") == before, misdeed


ODD = {
    "raw_bytes": b"\0\xff",
    "unlistable": b'{"a":1}',
    "odd_text": b"text",
    "odd_bytes": b"bytes",
    "large": b"x" * 100_000_000,
    "odd_metric": b'{"body":"counted"}',
}


def test_an_answer_that_is_odd_but_can_be_sent_is_sent(
    server: LiveServer, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    before = server.restarts("sick")
    for misdeed, body in ODD.items():
        answers = in_one_batch(server, threads, tmp_path / misdeed, "one", misdeed, "three")
        assert (answers[1].status, answers[1].body == body) == (200, True), misdeed
        assert mates_are_answered(answers), misdeed
        assert server.restarts("sick") == before, misdeed


# -- F5: what prints ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "misdeed", [pytest.param("print_much", marks=pytest.mark.nightly), "print_bytes"]
)
def test_what_is_printed_holds_nobody_up_and_stays_out_of_the_servers_log(
    server: LiveServer, threads: ThreadPoolExecutor, tmp_path: Path, misdeed: str
) -> None:
    answers = in_one_batch(server, threads, tmp_path / "gate", "one", misdeed, "three")
    assert (answers[1].status, json.loads(answers[1].body)) == (200, {"body": "printed"})
    assert mates_are_answered(answers)
    if misdeed == "print_much":  # 100 MB
        logs = list((server.state_dir / "logs" / "sick-1.0").iterdir())
        assert "worker-1.log.1" in {log.name for log in logs}
        assert sum(log.stat().st_size for log in logs) < 50_000_000
    assert "CRITICAL serve printed" not in server.log


@pytest.mark.parametrize("misdeed", ["close_descriptors", "close_streams"])
def test_a_handler_that_closes_its_output_goes_on(
    server: LiveServer, threads: ThreadPoolExecutor, tmp_path: Path, misdeed: str
) -> None:
    before = server.restarts("sick")
    answers = in_one_batch(server, threads, tmp_path / "gate", "one", misdeed, "three")
    check_error(answers[1], 500, ".*nobody will read this")
    assert mates_are_answered(answers)
    assert ask(server, "sick", "after").status == 200
    assert server.restarts("sick") == before
    # The server closed its end of that output; what comes after is counted with one again.
    check_error(ask(server, f"sick?{misdeed}", "kill_itself"), *ENDS["kill_itself"])
    poll(lambda: server.restarts("sick") == before + 2, "it was tried once more, alone")


# -- C5: what writes to the wire ---------------------------------------------------------------

LIES = {
    "garbage": "a frame of 4294967295 items; 1 to 4096 are allowed",
    "flood": "a frame of 4294967295 items; 1 to 4096 are allowed",
    "long_item": "an item of 4294967295 bytes; 135266304 are allowed",
    "text": "a frame of 1347703880 items; 1 to 4096 are allowed",
    "half_a_frame": None,
    "control 2": "control message 2 from a worker that is loaded",
    "control 4": "control message 4 is not JSON",
    "reports 65": "control message 4 from a worker that is loaded",
    "crowd 4096": "4096 replies, while it holds fewer jobs",
}
"""What a worker sends, and what the log says to that; None where it just ends."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "lies",
    [
        ("crowd 4096", "half_a_frame", "reports 65"),
        pytest.param(tuple(LIES), marks=pytest.mark.nightly),
    ],
    ids=["three", "all"],
)
def test_a_worker_that_writes_to_the_wire_is_ended_with_one_line_in_the_log(
    server: LiveServer, threads: ThreadPoolExecutor, tmp_path: Path, lies: tuple[str, ...]
) -> None:
    before = server.restarts("sick")
    logged = len(server.log)
    bodies = [body for misdeed in lies for body in (misdeed, f"mate of {misdeed}")]
    answers = in_one_batch(server, threads, tmp_path / "gate", *bodies)
    for body, answer in zip(bodies, answers, strict=True):
        if body in lies:
            check_error(answer, *DIED)
        else:
            assert (answer.status, json.loads(answer.body)) == (200, {"body": body})
    assert server.restarts("sick") == before + 1 + len(lies)
    said = Counter(re.findall(r"sick 1\.0 worker 1: (.*); ending it", server.log[logged:]))
    # The first one is said twice: it ended the batch too.
    assert said == Counter(filter(None, (LIES[lie] for lie in (lies[0], *lies))))


def test_a_worker_that_streams_nothing_without_end_costs_others_a_share_of_the_server(
    server: LiveServer, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """What the server takes of it for each answer of another model is bounded."""
    gate, asked = tmp_path / "gate", 20
    before = server.handed_over("sick")
    streamed = threads.submit(ask, server, "sick", f"stream_until {gate}")
    poll(lambda: server.handed_over("sick") > before, "it is handed over")
    for at in range(asked):
        assert ask(server, HEALTHY, f"beside {at}").status == 200
    gate.touch()
    taken = json.loads(streamed.result().body)["sent"]
    assert taken < asked * 1_000_000, taken


def test_a_replayed_answer_harms_only_the_worker_that_sent_it(server: LiveServer) -> None:
    before = server.restarts("sick")
    answer = ask(server, "sick", "replay")
    assert answer == Answer(200, b"")  # a worker may answer what it holds as it likes
    # Two of them, where the first one has answered something before: that it answers again.
    poll(lambda: server.restarts("sick") > before, "the worker is replaced")
    assert re.search(r"sick .*: a reply to job \d+, which it does not hold; ending it", server.log)
    assert ask(server, "sick", "after").status == 200


@pytest.mark.parametrize(
    ("status", "headers"),
    [(99, ""), (100, ""), (600, ""), (65535, ""), (200, "name-without-value"), (200, "a|b|c")],
)
def test_a_reply_that_cannot_be_sent_on_ends_the_worker(
    server: LiveServer, status: int, headers: str
) -> None:
    before = server.restarts("sick")
    os.kill(server.worker_pids("sick")[0], signal.SIGKILL)
    poll(lambda: server.restarts("sick") == before + 1, "a fresh worker, which counts jobs from 1")
    poll(lambda: server.worker_pids("sick"), "it is ready")
    logged = len(server.log)
    check_error(ask(server, "sick", f"forge {status} {headers}".strip()), *DIED)
    server.logs(f"a reply with status {status} and headers", since=logged)
    poll(lambda: ask(server, "sick", "after").status == 200, "the next request is right")
