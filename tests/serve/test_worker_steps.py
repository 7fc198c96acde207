"""A worker's steps, with a handler of this file and one end of a socket pair, turn by turn."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pytest

from modelyard.handlers import BadInput, Context
from modelyard.handlers.steps import Part, Steps
from modelyard.serve.dataplane import wire
from modelyard.serve.worker.codec import OURS
from modelyard.serve.worker.load import Service
from modelyard.serve.worker.loop import Reader
from modelyard.serve.worker.steps import Stepping


class Counting(Steps):
    """`N` answers after N steps; `stream N` sends a chunk in each; `fail N` fails in the Nth."""

    def __init__(self) -> None:
        self.left: dict[int, list[Any]] = {}
        self.company: list[list[int]] = []
        """The requests of each step."""

    def join(self, request: int, row: Mapping[str, Any], headers: Mapping[str, Any]) -> None:
        kind, _, count = bytes(row["body"]).decode().rpartition(" ")
        if not count.isdecimal():
            raise BadInput(f"{count} is not a number; {headers['X-Name']} sent it")
        self.left[request] = [kind, int(count)]

    def step(self) -> list[Part]:
        self.company.append(sorted(self.left))
        parts = []
        for request, state in list(self.left.items()):
            kind, count = state = [state[0], state[1] - 1]
            self.left[request] = state
            if kind == "fail" and not count:
                self.left.clear()
                raise ValueError("no more")
            if not count:
                del self.left[request]
                parts.append(Part(request, {1} if kind == "unfit" else {"end": kind}, True))
            elif kind == "stream":
                parts.append(Part(request, f"{count} ", False, "text/event-stream"))
        return parts

    def leave(self, requests: Collection[int]) -> None:
        for request in requests:
            self.left.pop(request, None)

    @property
    def is_idle(self) -> bool:
        return not self.left


class Worker:
    """Both ends, and the turns between them."""

    def __init__(self, batch_size: int = 4) -> None:
        self.server, theirs = socket.socketpair()
        self.server.settimeout(10)
        self.handler = Counting()
        context = Context("m", ".", None, batch_size)
        service = Service(
            self.handler.handle, self.explain, context, batch_size, "cpu", OURS, steps=self.handler
        )
        self.stepping = Stepping(Reader(theirs), service)
        self.theirs = theirs
        self._decoder = wire.Decoder(1 << 20)

    def explain(self, data: Any, context: Context) -> list[str]:
        return ["because"]

    def send(self, bodies: Mapping[int, str], flags: int = 0) -> None:
        frame = wire.Frame()
        for id, body in bodies.items():
            meta = wire.pack_meta([b"", b"", b"request-%d" % id, b"x-name", b"tester"])
            frame.add(id, 0, flags, meta, [body.encode()], wire.now_us())
        self.server.sendall(b"".join(frame.buffers()))

    def cancel(self, *ids: int) -> None:
        self.server.sendall(wire.encode_control(wire.CANCEL, {"ids": list(ids)}))

    def turn(self, times: int = 1) -> list[tuple[int, str]]:
        """Take turns; return the replies: which request, and the body, `status` or `flag body`."""
        for _ in range(times):
            self.stepping.turn()
        found = []
        self.server.setblocking(False)
        try:
            for frame in self._decoder.feed(self.server.recv(1 << 20)):
                found += [(item.id, describe(item)) for item in frame]
        except BlockingIOError:
            pass
        self.server.setblocking(True)
        return found

    @property
    def company(self) -> list[list[int]]:
        """The requests of each step so far."""
        return self.handler.company


def describe(item: wire.Item) -> str:
    flags = {wire.MORE: "more ", wire.BROKEN: "broken ", wire.UNREAD: "unread "}
    return f"{flags.get(item.flags, '')}{item.code} {item.body.decode()}".strip()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    with worker.server, worker.theirs:
        yield worker


def test_requests_join_those_that_run_and_are_answered_when_done(worker: Worker) -> None:
    worker.send({1: "4"})
    assert worker.turn(2) == []
    worker.send({2: "1", 3: "2"})
    assert worker.turn() == [(2, '200 {"end":""}')]
    assert worker.turn() == [(1, '200 {"end":""}'), (3, '200 {"end":""}')]
    assert worker.company == [[1], [1], [1, 2, 3], [1, 3]]


def test_no_more_run_together_than_a_batch_has(worker: Worker) -> None:
    worker.send({id: "2" for id in range(1, 7)})
    worker.turn(2)
    worker.turn(2)
    assert worker.company == [[1, 2, 3, 4], [1, 2, 3, 4], [5, 6], [5, 6]]


def test_chunks_go_out_with_each_step(worker: Worker) -> None:
    worker.send({1: "stream 3", 2: "2"})
    assert worker.turn() == [(1, "more 200 2")]
    assert worker.turn() == [(1, "more 200 1"), (2, '200 {"end":""}')]
    assert worker.turn() == [(1, '200 {"end":"stream"}')]


def test_the_first_chunk_has_the_headers_and_replies_the_times(worker: Worker) -> None:
    worker.send({1: "stream 3"})
    worker.stepping.turn()
    worker.stepping.turn()
    worker.stepping.turn()
    frames = wire.Decoder(1 << 20).feed(worker.server.recv(1 << 20))
    first, second, last = (item for frame in frames for item in frame)
    headers = wire.unpack_meta(first.meta)
    assert dict(zip(headers[::2], headers[1::2], strict=True)) == {
        b"content-type": b"text/event-stream",
        b"ts_stream_next": b"true",
    }
    assert second.meta == b""
    assert last.handler_us > 0
    assert last.queue_us < 1_000_000


def test_who_has_left_takes_no_step_more(worker: Worker) -> None:
    worker.send({1: "stream 9", 2: "3", 3: "9"})
    worker.turn()
    worker.cancel(1, 3)
    assert sorted(worker.turn()) == [(1, "unread 503"), (3, "unread 503")]
    assert worker.turn() == [(2, '200 {"end":""}')]
    assert worker.company == [[1, 2, 3], [2], [2]]


def test_who_left_before_joining_is_never_run(worker: Worker) -> None:
    worker.send({1: "2", 2: "1"})
    worker.cancel(2)
    assert worker.turn() == [(2, "unread 503")]
    worker.turn()
    assert worker.company == [[1], [1]]


def test_word_of_a_client_that_comes_after_its_answer_is_forgotten(worker: Worker) -> None:
    worker.send({1: "1", 2: "9"})
    worker.turn()
    worker.cancel(1)
    worker.turn()
    worker.send({1: "1"})  # ids come round
    assert worker.turn() == [(1, '200 {"end":""}')]


def test_a_request_that_cannot_join_is_answered_by_itself(worker: Worker) -> None:
    worker.send({1: "what", 2: "1"})
    (bad, good) = worker.turn()
    assert bad[0] == 1 and bad[1].startswith("400 ")
    assert "what is not a number; tester sent it" in bad[1]
    assert good == (2, '200 {"end":""}')


def test_a_failed_step_costs_no_whole_request_but_the_bad_one(worker: Worker) -> None:
    worker.send({1: "3", 2: "fail 2", 3: "stream 9"})
    assert worker.turn() == [(3, "more 200 8")]
    (broken,) = worker.turn()
    assert broken[0] == 3 and broken[1].startswith("broken 500 ")
    assert worker.turn(3) == [(1, '200 {"end":""}')]
    (failed,) = worker.turn(2)
    assert failed[0] == 2 and "ValueError: no more" in failed[1]
    assert worker.company == [[1, 2, 3]] * 2 + [[1]] * 3 + [[2]] * 2
    worker.send({4: "1", 5: "1"})
    worker.turn()
    assert worker.company[-1] == [4, 5]


def test_an_answer_that_cannot_be_sent_is_an_error_of_its_own(worker: Worker) -> None:
    worker.send({1: "unfit 1", 2: "1"})
    bad, good = worker.turn()
    assert bad[1].startswith("500 ") or bad[1].startswith("503 ")
    assert good == (2, '200 {"end":""}')


def test_what_a_worker_died_with_runs_by_itself(worker: Worker) -> None:
    worker.send({1: "2"})
    worker.turn()
    worker.send({2: "2"}, wire.ALONE)
    worker.send({3: "1"})
    worker.turn(4)
    assert worker.company == [[1], [1], [2], [2], [3]]


def test_an_explanation_waits_until_nothing_runs(worker: Worker) -> None:
    worker.send({1: "2"})
    worker.turn()
    worker.send({2: ""}, wire.EXPLAIN)
    assert worker.turn() == [(1, '200 {"end":""}')]
    assert worker.turn() == [(2, "200 because")]


def test_the_loop_ends_with_the_connection(worker: Worker) -> None:
    worker.server.close()
    with pytest.raises(EOFError):
        worker.stepping.turn()
