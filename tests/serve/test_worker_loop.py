"""A worker's batches, with handlers of this file and one end of a socket pair."""

from __future__ import annotations

import gzip
import json
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelyard.handlers import BadInput, BaseHandler, Context, PredictionException
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.lengths import take_batch
from modelyard.serve.worker import loop
from modelyard.serve.worker.codec import OURS, Answer, Rules
from modelyard.serve.worker.golden import compare_golden
from modelyard.serve.worker.load import Service
from modelyard.serve.worker.loop import answer_batch

JSON = {"content-type": "application/json"}

Handle = Callable[[list[dict[str, Any]], Context], Any]


def service(
    handle: Handle, explain: Handle | None = None, batch_size: int = 8, rules: Rules = OURS
) -> Service:
    context = Context("m", ".", None, batch_size)
    return Service(handle, explain or handle, context, batch_size, "cpu", rules)


def item(id: int, body: bytes = b"", flags: int = 0, content_type: bytes = b"") -> wire.Item:
    meta = wire.pack_meta([b"", b"", b"request-%d" % id, b"content-type", content_type])
    return wire.Item(id, 0, flags, meta, body)


def bodies(data: list[dict[str, Any]]) -> list[str]:
    return [bytes(row["body"]).decode() for row in data]


def echo(data: list[dict[str, Any]], context: Context) -> list[str]:
    return bodies(data)


def error_of(answer: Answer) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    content: dict[str, Any] = json.loads(answer.body)
    assert content["code"] == answer.status
    return content


def numbers(items: list[wire.Item] | deque[wire.Item]) -> list[int]:
    return [one.id for one in items]


# -- take_batch --------------------------------------------------------------------------------


def test_a_batch_holds_what_waits_up_to_its_size_in_order() -> None:
    waiting = deque(item(id) for id in range(1, 6))
    assert numbers(take_batch(waiting, 3)) == [1, 2, 3]
    assert numbers(take_batch(waiting, 3)) == [4, 5]
    assert not waiting


def test_a_batch_has_one_kind_and_the_others_keep_their_order() -> None:
    kinds = {1: 0, 2: wire.EXPLAIN, 3: 0, 4: wire.EXPLAIN, 5: 0}
    waiting = deque(item(id, flags=flags) for id, flags in kinds.items())
    assert numbers(take_batch(waiting, 2)) == [1, 3]
    assert numbers(waiting) == [2, 4, 5]
    assert numbers(take_batch(waiting, 8)) == [2, 4]
    assert numbers(waiting) == [5]


def test_a_describe_job_is_alone_and_routes_do_not_part_a_batch() -> None:
    flags = {1: wire.KSERVE, 2: wire.DESCRIBE, 3: wire.LEGACY, 4: 0}
    waiting = deque(item(id, flags=flag) for id, flag in flags.items())
    assert [numbers(take_batch(waiting, 8)) for _ in range(2)] == [[1, 3, 4], [2]]


def test_a_job_that_is_tried_again_is_alone() -> None:
    waiting = deque([item(1, flags=wire.ALONE), item(2, flags=wire.ALONE), item(3)])
    assert [numbers(take_batch(waiting, 8)) for _ in range(3)] == [[1], [2], [3]]


def test_a_batch_of_like_length_has_the_oldest_one_kind_and_leaves_the_others_in_order() -> None:
    kinds = {3: wire.EXPLAIN, 6: wire.ALONE}
    lengths = {1: 50, 2: 400, 3: 50, 4: 60, 5: 380, 6: 50, 7: 55}
    waiting = deque(item(id, b"x" * length, kinds.get(id, 0)) for id, length in lengths.items())
    assert numbers(take_batch(waiting, 8, 48)) == [1, 4, 7]
    assert numbers(waiting) == [2, 3, 5, 6]
    assert [numbers(take_batch(waiting, 8, 48)) for _ in range(3)] == [[2, 5], [3], [6]]
    assert not waiting


# -- answer_batch ------------------------------------------------------------------------------


def test_each_request_gets_its_own_answer() -> None:
    answers = answer_batch(service(echo), [item(id, b"%d" % id) for id in (3, 1, 2)])
    assert [answer.body for answer in answers] == [b"3", b"1", b"2"]


@pytest.mark.parametrize(
    ("output", "content_type", "body"),
    [
        ("gr\u00fcn", "text/plain; charset=utf-8", "gr\u00fcn".encode()),
        (b"\x89PNG", "application/octet-stream", b"\x89PNG"),
        (bytearray(b"\x89PNG"), "application/octet-stream", b"\x89PNG"),
        ({"7": 0.5}, "application/json", b'{"7":0.5}'),
        ([1, None, True], "application/json", b"[1,null,true]"),
        (None, "application/json", b"null"),
        (0.25, "application/json", b"0.25"),
        ({1: 10**30, "none": None}, "application/json", b'{"1":1%s,"none":null}' % (b"0" * 30)),
        ("null", "text/plain; charset=utf-8", b"null"),
        (["null"], "application/json", b'["null"]'),
    ],
    ids=str,
)
def test_an_answer_is_sent_by_its_type(output: Any, content_type: str, body: bytes) -> None:
    (answer,) = answer_batch(service(lambda data, context: [output]), [item(1)])
    assert answer == Answer(200, {"content-type": content_type}, body)


def cyclic() -> list[Any]:
    outer: list[Any] = []
    outer.append(outer)
    return outer


@pytest.mark.parametrize(
    "output",
    [
        *(math.nan, [math.inf], {"a": -math.inf}, [None, math.nan], object(), {1, 2}),
        *(np.float32(1), cyclic(), "\ud800", Path("/"), [datetime.now(UTC)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_answer_that_cannot_be_sent_fails_alone(output: Any) -> None:
    def handle(data: list[dict[str, Any]], context: Context) -> list[Any]:
        return ["fine" if body == "good" else output for body in bodies(data)]

    batch = [item(1, b"good"), item(2, b"bad"), item(3, b"good")]
    answers = answer_batch(service(handle), batch)
    assert [answer.status for answer in answers] == [200, 500, 200]
    assert "cannot be sent as JSON" in error_of(answers[1])["message"]
    assert error_of(answers[1])["request_id"] == "request-2"


class Own(BaseHandler):
    """An author's."""


@pytest.mark.parametrize(("handler", "status"), [(BaseHandler(), 400), (Own(), 500), (None, 500)])
def test_numbers_that_overflow_in_a_built_in_handler_are_the_clients(
    handler: BaseHandler | None, status: int
) -> None:
    given = replace(service(lambda data, context: [[math.inf]]), handler=handler)
    (answer,) = answer_batch(given, [item(1)])
    assert answer.status == status
    if status == 400:
        assert "the model gives infinity or NaN" in error_of(answer)["message"]


@pytest.mark.parametrize(
    "outputs", [[], ["one"], ["1", "2", "3", "4"], None, "text", ("1", "2", "3"), iter("123")],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_the_wrong_number_or_kind_of_answers_is_an_error_for_each(outputs: Any) -> None:
    def handle(data: list[dict[str, Any]], context: Context) -> Any:
        return outputs if len(data) == 3 else None

    answers = answer_batch(service(handle), [item(id) for id in (1, 2, 3)])
    assert [answer.status for answer in answers] == [500, 500, 500]
    assert "a list with one answer per request is expected" in error_of(answers[0])["message"]


def test_an_item_that_is_run_again_is_as_it_came() -> None:
    def handle(data: list[dict[str, Any]], context: Context) -> list[str]:
        found = bodies(data)
        for at, row in enumerate(data):
            row.pop("body").clear()
            context.get_all_request_header(at).clear()
        if "bad" in found:
            raise ValueError("bad")
        return found

    answers = answer_batch(service(handle), [item(1, b"one"), item(2, b"bad"), item(3, b"three")])
    assert [answer.status for answer in answers] == [200, 500, 200]
    assert [answers[0].body, answers[2].body] == [b"one", b"three"]


def test_a_list_that_lies_about_its_length_is_taken_for_what_it_holds() -> None:
    class Liar(list[str]):
        def __len__(self) -> int:
            return 2

    (answer,) = answer_batch(service(lambda data, context: Liar(["true"])), [item(1)])
    assert (answer.status, answer.body) == (200, b"true")


def test_a_wrong_number_of_answers_is_named() -> None:
    (answer,) = answer_batch(service(lambda data, context: ["1", "2"]), [item(1)])
    assert "2 answers to 1 requests" in error_of(answer)["message"]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (BadInput("no image"), 400, "BadRequestException", "no image"),
        (ZeroDivisionError("by 0"), 500, "InternalServerException", "ZeroDivisionError: by 0"),
        (PredictionException("short", 418), 418, "InternalServerException", "short"),
        (PredictionException("odd", 70_000), 500, "InternalServerException", "odd"),
        (PredictionException("odd", 99), 500, "InternalServerException", "odd"),
        (MemoryError(), 507, "InternalServerException", "Out of resources"),
        (SystemExit(3), 500, "InternalServerException", "SystemExit: 3"),
        (KeyboardInterrupt(), 500, "InternalServerException", "KeyboardInterrupt: "),
        (Unprintable(), 500, "InternalServerException", "Unprintable: (its text fails"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_one_bad_request_fails_alone_with_its_own_error(
    error: BaseException, status: int, kind: str, message: str
) -> None:
    def handle(data: list[dict[str, Any]], context: Context) -> list[str]:
        if "bad" in bodies(data):
            raise error
        return bodies(data)

    batch = [item(1, b"one"), item(2, b"bad"), item(3, b"three")]
    answers = answer_batch(service(handle), batch)
    assert [answer.status for answer in answers] == [200, status, 200]
    assert [answers[0].body, answers[2].body] == [b"one", b"three"]
    assert error_of(answers[1])["type"] == kind
    assert error_of(answers[1])["message"].startswith(message)
    assert error_of(answers[1])["request_id"] == "request-2"
    assert b"Traceback" not in answers[1].body


def test_a_body_that_cannot_be_decoded_never_reaches_the_handler() -> None:
    seen: list[list[str]] = []

    def handle(data: list[dict[str, Any]], context: Context) -> list[str]:
        seen.append(bodies(data))
        return [context.get_request_id(at) or "" for at in range(len(data))]

    broken = item(2, b"broken", content_type=b"multipart/form-data")
    answers = answer_batch(service(handle), [item(1, b"one"), broken, item(3, b"three")])
    assert [answer.status for answer in answers] == [200, 400, 200]
    assert seen == [["one", "three"]]
    assert [answers[0].body, answers[2].body] == [b"request-1", b"request-3"]


def test_explanations_have_their_own_entry() -> None:
    both = service(lambda data, context: ["predicted"], lambda data, context: ["explained"])
    assert answer_batch(both, [item(1, flags=wire.EXPLAIN)])[0].body == b"explained"
    assert answer_batch(both, [item(1)])[0].body == b"predicted"


LONG = {"attributions": [0.5] * 20_000}


def asked_with(encoding: bytes, flags: int = wire.EXPLAIN) -> wire.Item:
    meta = wire.pack_meta([b"", b"", b"request-1", b"Accept-Encoding", encoding])
    return wire.Item(1, 0, flags, meta, b"")


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate, gzip;q=0.5", b"*", b"GZIP, br"])
def test_a_long_explanation_is_compressed_where_the_client_takes_it(encoding: bytes) -> None:
    (answer,) = answer_batch(service(lambda data, context: [LONG]), [asked_with(encoding)])
    assert answer.headers == {
        "content-type": "application/json",
        "content-encoding": "gzip",
        "vary": "accept-encoding",
    }
    assert json.loads(gzip.decompress(answer.body)) == LONG


@pytest.mark.parametrize(
    ("output", "encoding", "flags", "rules"),
    [
        (LONG, b"", wire.EXPLAIN, OURS),
        (LONG, b"identity, gzip;q=0", wire.EXPLAIN, OURS),
        (LONG, b"gzip", 0, OURS),
        (LONG, b"gzip", wire.EXPLAIN, replace(OURS, compresses=False)),
        ({"attributions": [0.5]}, b"gzip", wire.EXPLAIN, OURS),
        (b"\x89PNG" + bytes(100_000), b"gzip", wire.EXPLAIN, OURS),
    ],
    ids=["not asked for", "refused", "a prediction", "other rules", "short", "a picture"],
)
def test_nothing_else_is_compressed(
    output: object, encoding: bytes, flags: int, rules: Rules
) -> None:
    answers = answer_batch(
        service(lambda data, context: [output], rules=rules), [asked_with(encoding, flags)]
    )
    assert "content-encoding" not in answers[0].headers
    plain = json.loads(answers[0].body) if isinstance(output, dict) else answers[0].body
    assert plain == output


def test_a_handler_sets_status_and_headers_of_each_answer() -> None:
    def handle(data: list[dict[str, Any]], context: Context) -> list[str]:
        context.set_response_status(202, "later", 1)
        context.set_response_header(1, "X-Note", "mine")
        context.set_response_content_type(1, "text/csv")
        return bodies(data)

    first, second = answer_batch(service(handle), [item(1), item(2)])
    assert first == Answer(200, {"content-type": "text/plain; charset=utf-8"}, b"")
    assert second == Answer(202, {"content-type": "text/csv", "x-note": "mine"}, b"")


def test_what_one_batch_sets_is_not_seen_by_the_next() -> None:
    def handle(data: list[dict[str, Any]], context: Context) -> list[str]:
        if bodies(data) == ["set"]:
            context.set_response_status(202, "later", 0)
            context.set_response_header(0, "x-note", "mine")
        return bodies(data)

    running = service(handle)
    answer_batch(running, [item(1, b"set")])
    (answer,) = answer_batch(running, [item(2)])
    assert answer == Answer(200, {"content-type": "text/plain; charset=utf-8"}, b"")


@pytest.mark.parametrize("status", [0, 99, 101, 600, 999, 65_536, -1, "200", None])
def test_a_status_that_http_does_not_have_is_the_handlers_fault(status: Any) -> None:
    def handle(data: list[dict[str, Any]], context: Context) -> list[str]:
        context.set_response_status(status, "odd", 0)
        return bodies(data)

    (answer,) = answer_batch(service(handle), [item(1)])
    assert answer.status == 500
    assert f"the handler set the status {status!r}" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("x-note", "a\r\nx-more: b"), ("x-note", "a\0b"), ("x note", "a"), ("", "a"), ("x:", "a"),
     ("x-note", "\u20ac")],
)  # fmt: skip
def test_a_header_that_http_does_not_have_is_the_handlers_fault(name: str, value: str) -> None:
    def handle(data: list[dict[str, Any]], context: Context) -> list[str]:
        context.set_response_header(0, name, value)
        return bodies(data)

    (answer,) = answer_batch(service(handle), [item(1)])
    assert answer.status == 500
    assert "the handler set the header" in error_of(answer)["message"]


@pytest.mark.parametrize("name", ["Content-Length", "Transfer-Encoding", "Connection"])
def test_how_an_answer_is_framed_is_not_for_the_handler_to_say(name: str) -> None:
    def handle(data: list[dict[str, Any]], context: Context) -> list[str]:
        context.set_response_header(0, name, "7")
        return bodies(data)

    (answer,) = answer_batch(service(handle), [item(1)])
    assert answer.headers == {"content-type": "text/plain; charset=utf-8"}


def test_an_answer_over_the_limit_is_an_error_of_its_own_request() -> None:
    rules = replace(OURS, max_answer_bytes=3)
    answers = answer_batch(service(echo, rules=rules), [item(1, b"abc"), item(2, b"abcd")])
    assert [answer.status for answer in answers] == [200, 500]
    assert "has 4 bytes; max_response_bytes allows 3" in json.loads(answers[1].body)["message"]


# -- the loop ----------------------------------------------------------------------------------


def exchange(running: Service, *bodies: bytes) -> list[list[wire.Item]]:
    """Send one frame of jobs to a loop of this service; return the frames that answer them."""
    ours, theirs = socket.socketpair()
    frame = wire.Frame()
    for id, body in enumerate(bodies, 1):
        one = item(id, body)
        frame.add(one.id, 0, 0, one.meta, [one.body], wire.now_us())
    sent = b"".join(frame.buffers())
    frames: list[list[wire.Item]] = []
    ended: list[BaseException] = []

    def work() -> None:
        try:
            loop.run(loop.Reader(theirs), running)
        except EOFError as error:
            ended.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    decoder = wire.Decoder(1000)
    with ours, theirs:
        ours.settimeout(10)
        ours.sendall(sent[:30])
        ours.sendall(sent[30:])
        while sum(not one.flags & wire.MORE and one.id > 0 for f in frames for one in f) < len(
            bodies
        ):
            frames += decoder.feed(ours.recv(65_536))
        ours.shutdown(socket.SHUT_WR)
        worker.join(10)
    assert len(ended) == 1
    return frames


def test_the_loop_answers_every_frame_and_ends_with_the_connection() -> None:
    frames = exchange(service(echo, batch_size=2), *(b"%d" % id for id in range(1, 6)))
    replies = [reply for frame in frames for reply in frame]
    assert [(reply.id, reply.code, reply.body) for reply in replies] == [
        (id, 200, b"%d" % id) for id in range(1, 6)
    ]
    assert wire.unpack_meta(replies[0].meta) == [b"content-type", b"text/plain; charset=utf-8"]
    assert [len(frame) for frame in frames] == [2, 2, 1]


def test_a_reply_tells_how_long_its_job_waited_and_how_long_the_handler_took() -> None:
    def handle(data: list[dict[str, Any]], context: Context) -> list[str]:
        if bodies(data) == ["slow"]:
            time.sleep(0.02)
        elif len(data) > 1:
            raise ValueError("each is run again alone")
        return bodies(data)

    began = time.perf_counter()
    frames = exchange(service(handle, batch_size=2), b"slow", b"fast", b"last")
    whole_us = (time.perf_counter() - began) * 1e6
    slow, fast, last = (reply for frame in frames for reply in frame)
    assert 20_000 <= slow.handler_us <= whole_us
    assert 20_000 + fast.handler_us + last.handler_us <= whole_us
    assert slow.handler_us <= last.queue_us <= whole_us
    assert slow.handler_us + fast.handler_us <= slow.batch_us == fast.batch_us
    assert last.handler_us <= last.batch_us <= whole_us - slow.batch_us


def test_a_worker_looks_only_after_a_short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    looks: list[float] = []
    monkeypatch.setattr(
        "modelyard.serve.worker.loop.os.sched_yield", lambda: looks.append(time.monotonic())
    )
    control = wire.encode_control(wire.METRICS, {})

    frame = wire.Frame()
    frame.add(1, 0, 0, b"", [bytes(wire.RECEIVE_BYTES + wire.LONG_BYTES)])
    long = b"".join(frame.buffers())

    def looked_before(wait_s: float, sent: bytes = control) -> bool:
        """Return whether the reader looks while it waits so long for a frame."""
        looks.clear()
        sender = threading.Timer(wait_s, ours.sendall, (sent,))
        sender.start()
        assert len(reader.read_arrived(must_wait=True)) == 1
        sender.join()
        return bool(looks)

    with ours, theirs:
        reader = loop.Reader(theirs)
        assert not looked_before(0) and not looked_before(0), "where nobody asked for it"
        reader.poll_s = 0.2
        assert not looked_before(0), "before any wait"
        assert looked_before(0.05)
        assert looked_before(0.5)
        assert looks[-1] - looks[0] < 0.3, "no longer than it may"
        assert not looked_before(0.5, long), "after a long wait"
        assert not looked_before(0.05), "though the rest of a body came at once"
        assert looked_before(0.05)


def test_chunks_and_metrics_travel_beside_the_replies() -> None:
    def handle(data: list[dict[str, Any]], context: Context) -> list[str]:
        context.set_response_header(0, "x-note", "mine")
        context.send_intermediate([f"{body} " for body in bodies(data)])
        context.set_response_header(0, "x-note", "late")
        context.send_intermediate([""] * len(data))
        return ["end"] * len(data)

    class Metrics:
        records = (None,)

        def drain(self) -> list[dict[str, Any]]:
            return [{"name": "Calls", "value": np.float32(2)}]

    running = service(handle)
    running.context.metrics = Metrics()
    first, second, last = exchange(running, b"one", b"two")
    note = [b"content-type", b"text/plain; charset=utf-8", b"x-note", b"mine"]
    assert wire.unpack_meta(first[0].meta) == [*note, b"ts_stream_next", b"true"]
    assert [(i.id, i.flags, i.body) for i in first] == [(1, wire.MORE, b"one "),
                                                        (2, wire.MORE, b"two ")]  # fmt: skip
    assert [(i.flags, i.meta, i.body) for i in second] == [(wire.MORE, b"", b"")] * 2
    assert [(i.id, i.flags, i.body) for i in last[:2]] == [(1, 0, b"end"), (2, 0, b"end")]
    assert (last[2].id, last[2].code) == (0, wire.METRICS)
    assert wire.decode_control(last[2]) == {"records": [{"name": "Calls", "value": "2.0"}]}


def test_as_many_chunks_as_requests_are_expected() -> None:
    def handle(data: list[dict[str, Any]], context: Context) -> list[str]:
        context.send_intermediate(["one", "two"])
        return bodies(data)

    (answer,) = answer_batch(service(handle), [item(1)])
    assert "2 chunks for 1 requests" in error_of(answer)["message"]


# -- golden requests ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"7": 0.9, "1": 0.1}', {"label": "7"}),
        (b"7", {"label": "7"}),
        (b"seven", {"label": "seven"}),
        (b"[1.0, [2.0005]]", {"answer": [1, [2.0]]}),
        (b'{"a": 1, "b": "x"}', {"answer": {"b": "x", "a": 1.0}}),
        (b"null", {"answer": None}),
        (b"\x89PNG\xff", {"answer": "\\x89PNG\\xff"}),
    ],
)
def test_an_answer_within_the_tolerance_agrees(body: bytes, expected: dict[str, Any]) -> None:
    assert compare_golden(Answer(200, JSON, body), expected, 1e-3) is None


@pytest.mark.parametrize(
    ("body", "expected", "message"),
    [
        (b'{"7": 0.1, "1": 0.9}', {"label": "7"}, 'expected the label "7", got "1"'),
        (b"{}", {"label": "7"}, 'expected the label "7", got "{}"'),
        (b"190.5", {"label": "183.28"}, "expected 183.28, got 190.5"),
        (b"[1.0, 2.1]", {"answer": [1, 2]}, "answer[1]: expected 2, got 2.1"),
        (b'{"a": [3]}', {"answer": {"a": [4]}}, "answer.a[0]: expected 4, got 3"),
        (b"[1]", {"answer": [1, 2]}, "answer: expected [1, 2], got [1]"),
        (b'{"a": 1}', {"answer": {"b": 1}}, "answer: expected {'b': 1}, got {'a': 1}"),
        (b'"x"', {"answer": 1}, "answer: expected 1, got 'x'"),
        (b"true", {"answer": 1}, "answer: expected 1, got True"),
        (b"NaN", {"answer": 1.0}, "answer: expected 1.0, got nan"),
        (b"\xff", {"answer": "\\xfe"}, r"answer: expected '\\xfe', got '\\xff'"),
    ],
)
def test_an_answer_that_differs_is_described(
    body: bytes, expected: dict[str, Any], message: str
) -> None:
    assert compare_golden(Answer(200, JSON, body), expected, 1e-3) == message


def test_an_error_is_no_answer() -> None:
    difference = compare_golden(Answer(400, JSON, b'{"message": "no image"}'), {"label": "7"}, 1e-3)
    assert difference == 'expected an answer, got status 400: {"message": "no image"}'
