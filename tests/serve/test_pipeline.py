"""The loop with two batches in flight, over a socket pair.

`Device` stands for handler and device: its batches are done when the test says so.
"""

from __future__ import annotations

import json
import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelyard.handlers import BadInput, BaseHandler, Context, ImageClassifier, PredictionException
from modelyard.handlers.cuda import open_overlap
from modelyard.handlers.errors import LoadError
from modelyard.serve.dataplane import wire
from modelyard.serve.worker import loop, pipeline
from modelyard.serve.worker.answer import OURS, UNREAD, Rules
from modelyard.serve.worker.golden import check_golden
from modelyard.serve.worker.load import Service
from tests.lazy_device import LazyDevice

WAIT_S = 20


class Held:
    """A batch that is done when the test lets it."""

    def __init__(self, device: Device, names: list[str], context: Context) -> None:
        self.device = device
        self.names = names
        self.context = context
        self.let_go = threading.Event()
        if device.is_fast:
            self.let_go.set()

    def is_done(self) -> bool:
        return self.let_go.is_set() and not self.device.is_coy

    def result(self) -> list[Any]:
        assert self.let_go.wait(WAIT_S)
        self.device.log.append(f"result {' '.join(self.names)}")
        if "bad-result" in self.names:
            raise self.device.error
        if "few" in self.names:
            return []
        for at, name in enumerate(self.names):
            if name == "noted":
                self.context.set_response_header(at, "x-note", "mine")
        if "streamed" in self.names:
            self.context.send_intermediate([f"first of {name}, " for name in self.names])
        if "breaks" in self.names:
            raise self.device.error
        return [f"{name} {self.context.get_request_id(at)}" for at, name in enumerate(self.names)]


class Device:
    """Launches batches, and tells the test of each; `log` says what happened in which order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.launched: queue.Queue[Held] = queue.Queue()
        self.error: BaseException = ZeroDivisionError("by 0")
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.is_fast = False
        """Whether batches are done as soon as they are launched."""
        self.is_coy = False
        """Whether that is only known by waiting for them."""

    def launch(self, data: list[dict[str, Any]], context: Context) -> Held:
        names = [bytes(row["body"]).decode() for row in data]
        self.log.append(f"launch {' '.join(names)}")
        self.entered.set()
        assert self.go_on.wait(WAIT_S)
        if "bad-launch" in names:
            raise self.error
        held = Held(self, names, context)
        self.launched.put(held)
        return held

    def handle(self, data: list[dict[str, Any]], context: Context) -> list[str]:
        names = [bytes(row.get("body", b"")).decode() for row in data]
        self.log.append(f"handle {' '.join(names)}")
        if names[0].startswith("bad"):
            raise self.error
        return [f"{name} {context.get_request_id(at)} plainly" for at, name in enumerate(names)]

    def next(self) -> Held:
        return self.launched.get(timeout=WAIT_S)


class Connection:
    """The server's end, and the worker's thread at the other."""

    def __init__(self, service: Service, rules: Rules = OURS) -> None:
        self._end, theirs = socket.socketpair()
        self._end.settimeout(WAIT_S)
        self._decoder = wire.Decoder(1_000_000)
        self._arrived: list[wire.Item] = []
        self.ended: list[BaseException] = []

        def work() -> None:
            try:
                pipeline.run(loop.Reader(theirs), service, rules)
            except BaseException as error:
                self.ended.append(error)
            theirs.close()

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def send(self, *jobs: tuple[int, str], flags: int = 0, content_type: str = "") -> None:
        """Send jobs in one frame."""
        frame = wire.Frame()
        for id, body in jobs:
            meta = [b"", b"", b"request-%d" % id, b"content-type", content_type.encode()]
            frame.add(id, 0, flags, wire.pack_meta(meta), [body.encode()])
        self._end.sendall(b"".join(frame.buffers()))

    def cancel(self, *ids: int) -> None:
        self._end.sendall(wire.encode_control(wire.CANCEL, {"ids": ids}))

    def reply(self) -> wire.Item:
        while not self._arrived:
            for frame in self._decoder.feed(self._end.recv(65_536)):
                self._arrived += frame
        return self._arrived.pop(0)

    def texts(self, count: int) -> dict[int, str]:
        replies = [self.reply() for _ in range(count)]
        return {reply.id: bytes(reply.body).decode() for reply in replies}

    def has_reply(self) -> bool:
        self._end.setblocking(False)
        try:
            return bool(self._arrived) or bool(self._end.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False
        finally:
            self._end.settimeout(WAIT_S)

    def close(self) -> list[BaseException]:
        """Close the server's end; give what ended the loop."""
        self._end.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.ended


def service(device: Device, batch_size: int = 4) -> Service:
    context = Context("m", ".", None, batch_size)
    return Service(device.handle, explain(device), context, batch_size, "cpu", launch=device.launch)


def explain(device: Device) -> Callable[[list[dict[str, Any]], Context], list[str]]:
    def entry(data: list[dict[str, Any]], context: Context) -> list[str]:
        device.log.append(f"explain {' '.join(bytes(row['body']).decode() for row in data)}")
        return ["explained"] * len(data)

    return entry


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def connection(device: Device) -> Iterator[Connection]:
    opened = Connection(service(device))
    yield opened
    assert all(isinstance(error, EOFError) for error in opened.close())


# -- order -------------------------------------------------------------------------------------


def launch_two(
    connection: Connection, device: Device, first: str = "a", second: str = "b"
) -> tuple[Held, Held]:
    """Have two batches in flight: the second's requests arrive while the first is launched."""
    device.go_on.clear()
    connection.send((1, first))
    assert device.entered.wait(WAIT_S)
    connection.send(*((2 + at, name) for at, name in enumerate(second.split())))
    device.go_on.set()
    return device.next(), device.next()


def test_a_second_batch_is_launched_while_the_first_computes(
    connection: Connection, device: Device
) -> None:
    first, second = launch_two(connection, device, "a", "b c d")
    assert device.log == ["launch a", "launch b c d"]
    assert not connection.has_reply()
    first.let_go.set()
    assert connection.texts(1) == {1: "a request-1"}
    second.let_go.set()
    assert connection.texts(3) == {2: "b request-2", 3: "c request-3", 4: "d request-4"}


def test_no_third_batch_is_launched(connection: Connection, device: Device) -> None:
    first, second = launch_two(connection, device, "a", "b c d e f")
    assert device.log == ["launch a", "launch b c d e"]
    second.let_go.set()  # later ones may be done before: the device takes them in turn all the same
    first.let_go.set()
    third = device.next()
    third.let_go.set()
    assert connection.texts(6)[6] == "f request-6"
    assert device.log[:3] == ["launch a", "launch b c d e", "result a"]
    assert third.names == ["f"]


def test_a_batch_that_is_done_is_answered_before_the_next_is_launched(
    connection: Connection, device: Device
) -> None:
    device.is_fast = True
    launch_two(connection, device)
    assert connection.texts(2) == {1: "a request-1", 2: "b request-2"}
    assert device.log == ["launch a", "result a", "launch b", "result b"]


def test_with_nothing_in_flight_the_loop_waits(connection: Connection, device: Device) -> None:
    device.is_fast = True
    for id in (1, 2, 3):
        connection.send((id, "a"))
        assert connection.texts(1) == {id: f"a request-{id}"}


# -- failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["launch", "result"])
def test_a_batch_that_fails_is_run_again_one_by_one(
    connection: Connection, device: Device, where: str
) -> None:
    device.is_fast = True
    connection.send((1, "a"), (2, f"bad-{where}"), (3, "c"))
    replies = {reply.id: reply for reply in (connection.reply() for _ in range(3))}
    assert [replies[id].code for id in (1, 2, 3)] == [200, 500, 200]
    assert replies[1].body == b"a request-1 plainly"
    assert json.loads(replies[2].body)["message"] == "ZeroDivisionError: by 0"
    assert json.loads(replies[2].body)["request_id"] == "request-2"
    assert device.log[-3:] == ["handle a", f"handle bad-{where}", "handle c"]


@pytest.mark.parametrize("name", ["bad-launch", "bad-result"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadInput("no image"), 400),
        (PredictionException("short", 418), 418),
        (MemoryError(), 507),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 507),
        (SystemExit(3), 500),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_one_request_that_fails_gets_its_error_and_is_not_run_again(
    connection: Connection, device: Device, name: str, error: BaseException, status: int
) -> None:
    device.is_fast = True
    device.error = error
    connection.send((1, name))
    reply = connection.reply()
    assert (reply.code, json.loads(reply.body)["code"]) == (status, status)
    assert not any(line.startswith("handle") for line in device.log)
    connection.send((2, "a"))
    assert connection.texts(1) == {2: "a request-2"}


def test_what_fails_to_launch_is_run_again_when_the_other_is_answered(
    connection: Connection, device: Device
) -> None:
    device.go_on.clear()
    connection.send((1, "a"))
    assert device.entered.wait(WAIT_S)
    connection.send((2, "b"), (3, "bad-launch"))
    device.go_on.set()
    device.next().let_go.set()
    assert connection.texts(1) == {1: "a request-1"}
    assert connection.texts(2)[2] == "b request-2 plainly"
    assert device.log.index("result a") < device.log.index("handle b")


def test_what_fails_in_the_end_is_run_again_when_the_other_is_answered(
    connection: Connection, device: Device
) -> None:
    first, second = launch_two(connection, device, "bad-result", "b")
    first.let_go.set()
    second.let_go.set()
    assert connection.texts(1) == {2: "b request-2"}
    reply = connection.reply()
    assert (reply.id, reply.code) == (1, 500)


def test_both_may_fail(connection: Connection, device: Device) -> None:
    first, second = launch_two(connection, device, "bad-result", "b bad-result c")
    first.let_go.set()
    second.let_go.set()
    replies = {reply.id: reply for reply in (connection.reply() for _ in range(4))}
    assert [replies[id].code for id in (1, 2, 3, 4)] == [500, 200, 500, 200]
    assert device.log[2:] == [
        *("result bad-result", "result b bad-result c"),
        *("handle b", "handle bad-result", "handle c"),
    ]


def test_the_wrong_number_of_answers_is_an_error(connection: Connection, device: Device) -> None:
    device.is_fast = True
    connection.send((1, "few"))
    assert "0 answers to 1 requests" in connection.texts(1)[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device of this machine works")
def test_a_lost_device_ends_the_loop(device: Device) -> None:
    device.is_fast = True
    opened = Connection(replace(service(device), device="cuda:0"))
    opened.send((1, "bad-result"))
    with pytest.raises(ConnectionError):  # as a server sees a worker end: no answer, but the end
        if not opened._end.recv(1):
            raise ConnectionError
    (error,) = opened.close()
    assert "CUDA" in str(error)


# -- what does not come in halves --------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "called", "answer"),
    [
        (wire.EXPLAIN, "explain x", "explained"),
        (wire.ALONE, "handle x", "x request-9 plainly"),
        (wire.DESCRIBE, "handle x", "x request-9 plainly"),
    ],
    ids=["explain", "alone", "describe"],
)
def test_other_kinds_run_plainly_with_nothing_in_flight(
    connection: Connection, device: Device, flags: int, called: str, answer: str
) -> None:
    device.go_on.clear()
    connection.send((1, "a"))
    assert device.entered.wait(WAIT_S)
    connection.send((2, "b"))
    connection.send((9, "x"), flags=flags)
    connection.send((3, "c"))
    device.go_on.set()
    one, two = device.next(), device.next()
    assert two.names == ["b", "c"]  # a batch takes what follows of its kind, as ever
    two.let_go.set()
    one.let_go.set()
    if flags == wire.DESCRIBE:
        called, answer = "handle ", " request-9 plainly"
    texts = connection.texts(4)
    assert texts[9] == answer
    assert device.log == ["launch a", "launch b c", "result a", "result b c", called]


def test_an_explanation_waits_for_the_batch_before_it(
    connection: Connection, device: Device
) -> None:
    device.is_fast = device.is_coy = True
    device.go_on.clear()
    connection.send((1, "a"))
    assert device.entered.wait(WAIT_S)
    connection.send((2, "x"), flags=wire.EXPLAIN)
    device.go_on.set()
    assert connection.texts(2) == {1: "a request-1", 2: "explained"}
    assert device.log == ["launch a", "result a", "explain x"]


def test_requests_that_cannot_be_read_are_answered_at_once(
    connection: Connection, device: Device
) -> None:
    for id in range(1, 5):
        connection.send((id, "x"), content_type="multipart/form-data")
        assert connection.reply().code == 400
    assert device.log == []


def test_a_request_that_cannot_be_read_leaves_the_others_alone(
    connection: Connection, device: Device
) -> None:
    device.go_on.clear()
    connection.send((1, "a"))
    assert device.entered.wait(WAIT_S)
    connection.send((2, "x"), content_type="multipart/form-data")
    connection.send((3, "c"))
    device.go_on.set()
    first, second = device.next(), device.next()
    assert second.names == ["c"]
    first.let_go.set()
    second.let_go.set()
    replies = {reply.id: reply.code for reply in (connection.reply() for _ in range(3))}
    assert replies == {1: 200, 2: 400, 3: 200}


def test_a_job_that_nobody_waits_for_is_not_launched(
    connection: Connection, device: Device
) -> None:
    device.go_on.clear()
    connection.send((1, "a"))
    assert device.entered.wait(WAIT_S)
    connection.send((2, "b"), (3, "c"))
    connection.cancel(2)
    device.go_on.set()
    first, second = device.next(), device.next()
    assert second.names == ["c"]
    first.let_go.set()
    second.let_go.set()
    replies = {reply.id: reply.code for reply in (connection.reply() for _ in range(3))}
    assert replies == {1: 200, 2: UNREAD.status, 3: 200}


# -- contexts and ends -------------------------------------------------------------------------


def test_contexts_are_not_mixed(connection: Connection, device: Device) -> None:
    first, second = launch_two(connection, device, "a", "noted c")
    assert first.context is not second.context
    second.let_go.set()
    first.let_go.set()
    replies = {reply.id: reply for reply in (connection.reply() for _ in range(3))}
    noted = {id: b"x-note" in wire.unpack_meta(reply.meta) for id, reply in replies.items()}
    assert noted == {1: False, 2: True, 3: False}
    assert [replies[id].body for id in (1, 2, 3)] == [
        b"a request-1", b"noted request-2", b"c request-3",
    ]  # fmt: skip


def test_a_context_is_new_to_its_next_batch(connection: Connection, device: Device) -> None:
    device.is_fast = True
    for id in range(1, 6):
        connection.send((id, "noted" if id == 1 else "a"))
        assert (b"x-note" in wire.unpack_meta(connection.reply().meta)) is (id == 1)


def test_chunks_reach_the_clients_of_their_batch(connection: Connection, device: Device) -> None:
    first, second = launch_two(connection, device, "a", "streamed c")
    first.let_go.set()
    second.let_go.set()
    replies = [connection.reply() for _ in range(5)]
    assert [(reply.id, reply.flags, bytes(reply.body)) for reply in replies] == [
        (1, 0, b"a request-1"),
        (2, wire.MORE, b"first of streamed, "),
        (3, wire.MORE, b"first of c, "),
        (2, 0, b"streamed request-2"),
        (3, 0, b"c request-3"),
    ]


def test_an_answer_that_has_begun_is_not_begun_again(
    connection: Connection, device: Device
) -> None:
    device.is_fast = True
    connection.send((1, "streamed"), (2, "breaks"))
    replies = [connection.reply() for _ in range(4)]
    assert [(reply.id, reply.flags) for reply in replies] == [
        *((1, wire.MORE), (2, wire.MORE)),
        *((1, wire.BROKEN), (2, wire.BROKEN)),
    ]
    assert device.log == ["launch streamed breaks", "result streamed breaks"]


def test_the_servers_end_ends_the_loop_without_waiting_for_the_device(device: Device) -> None:
    connection = Connection(service(device))
    device.go_on.clear()
    connection.send((1, "a"))
    assert device.entered.wait(WAIT_S)
    connection._end.shutdown(socket.SHUT_WR)
    device.go_on.set()
    (error,) = connection.close()
    assert isinstance(error, EOFError)
    assert device.log == ["launch a"]


# -- a real handler ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(
    digits_artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> ImageClassifier:
    """The digits model, as a worker loads it."""
    folder = tmp_path_factory.mktemp("digits")
    source = digits_artifacts["pt2"]
    report = source.with_name(f"{source.name}.report.json")
    for file in (source, report):
        (folder / file.name).write_bytes(file.read_bytes())
    signature = json.loads(report.read_text())["signature"]
    manifest = {
        "model": {"serializedFile": source.name},
        "modelyard": {"report": report.name, "signature": signature},
    }
    image = {"mode": "L", "size": [8, 8], "mean": [0.0], "std": [1.0]}
    handler = ImageClassifier()
    handler.initialize(
        Context("digits", str(folder), manifest, 8,
                model_yaml_config={"handler": {"image": image}})
    )  # fmt: skip
    return handler


def test_every_request_gets_its_own_answer_from_a_real_network(digits: ImageClassifier) -> None:
    chance = random.Random(0)
    bodies = [json.dumps(torch.rand(1, 8, 8).tolist()) for _ in range(40)]
    digits.context.reset([""] * len(bodies))
    expected = digits.handle([{"body": json.loads(body)} for body in bodies], digits.context)
    overlap = open_overlap(digits, digits.context, LazyDevice(7))
    both = Service(digits.handle, digits.explain, digits.context, 8, "cpu", launch=overlap.launch)
    connection = Connection(both)
    sent = [chance.randrange(len(bodies)) for _ in range(300)]
    at = 0
    while at < len(sent):
        count = chance.randint(1, 12)
        jobs = [(at + 1 + i, bodies[which]) for i, which in enumerate(sent[at : at + count])]
        connection.send(*jobs, content_type="application/json")
        at += len(jobs)
    answers = connection.texts(len(sent))
    assert isinstance(connection.close()[0], EOFError)
    for id, which in enumerate(sent, 1):
        assert json.loads(answers[id]) == pytest.approx(expected[which], abs=1e-5)


class Wrong(LazyDevice):
    """Its graphs are right when they are recorded, and wrong ever after."""

    runs = 0

    def record_graph(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        replay, outputs = super().record_graph(call)

        def later_wrong() -> None:
            self.runs += 1
            replay()
            if self.runs > 8:  # each of four is proven by one run, which this device does twice
                assert isinstance(outputs, torch.Tensor)
                outputs.neg_()

        return later_wrong, outputs


def test_golden_requests_go_through_both_halves(digits: ImageClassifier, tmp_path: Path) -> None:
    body = tmp_path / "request.json"
    body.write_text(json.dumps(torch.ones(1, 8, 8).tolist()))
    (answer,) = digits.handle([{"body": json.loads(body.read_text())}], digits.context)
    expected = tmp_path / "expected.json"
    expected.write_text(json.dumps({"answer": answer}))
    golden = [{"request": str(body), "expected": str(expected), "tolerance": 1e-4,
               "content_type": "application/json"}]  # fmt: skip
    plain = Service(digits.handle, digits.explain, digits.context, 8, "cpu")
    check_golden(plain, golden)
    check_golden(
        replace(plain, launch=open_overlap(digits, digits.context, LazyDevice()).launch), golden
    )
    with pytest.raises(LoadError, match="golden request 0"):
        check_golden(
            replace(plain, launch=open_overlap(digits, digits.context, Wrong()).launch), golden
        )


def test_a_worker_of_the_cpu_has_one_half(digits: ImageClassifier) -> None:
    assert isinstance(digits, BaseHandler)
    assert Service(digits.handle, digits.explain, digits.context, 8, "cpu").launch is None


def test_the_time_of_a_prediction_is_reported(device: Device) -> None:
    class Metrics:
        records: list[dict[str, Any]] = []  # noqa: RUF012

        def add_time(self, name: str, value: float) -> None:
            self.records.append({"name": name})

        def drain(self) -> list[dict[str, Any]]:
            found, self.records = self.records, []
            return found

    device.is_fast = True
    timed = service(device)
    timed.context.metrics = Metrics()
    connection = Connection(timed, Rules(times_predictions=True))
    connection.send((1, "a"))
    assert connection.reply().id == 1
    assert wire.decode_control(connection.reply()) == {"records": [{"name": "PredictionTime"}]}
    connection.close()
