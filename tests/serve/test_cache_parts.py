"""Answers that are kept, call by call, without a server."""

from __future__ import annotations

import asyncio
import gc
import re
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from modelyard.serve.control.model_config import HEADERS, Values
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.cache import (
    ENTRY_BYTES,
    MOST_HASHED_BYTES,
    OUR_HEADERS,
    AnswerStore,
    VersionAnswers,
)
from modelyard.serve.dataplane.call import EXPLAIN, HIGH, LOW, NORMAL, PREDICT, Call, Reply, Stream
from modelyard.serve.dataplane.wire import pack_meta
from modelyard.serve.errors import BadModelConfig
from tests.serve.test_queue import Sink, job

Pairs = Sequence[tuple[bytes, bytes]]
SIZE = 1 << 20


def ask(
    answers: VersionAnswers,
    body: bytes = b"x",
    *,
    kind: int = PREDICT,
    lookup: Pairs = (),
    spelled: Sequence[bytes] = (),
    rest: bytes = b"",
    query: bytes = b"",
    timeout_s: float = 60,
) -> tuple[bool, Call, Sink]:
    """Ask; return whether that was seen to, the call, and what its client gets."""
    call = job(timeout_s=timeout_s)
    sink = call.sink
    assert isinstance(sink, Sink)
    call.kind, call.parts = kind, [body]
    call.head = pack_meta([rest, query, b"POST", *spelled])
    return answers.lookup(lookup).answer(call), call, sink


def reply(body: bytes = b"answer", *headers: bytes, status: int = 200) -> Reply:
    return Reply(status, pack_meta(headers), body)


def outcome(sink: Sink) -> bytes:
    assert sink.reply is not None
    assert sink.reply.note is not None
    return dict(sink.reply.note.headers)[b"x-cache"]


def version(limit: int = SIZE, is_ours: bool = False) -> VersionAnswers:
    return VersionAnswers(AnswerStore(limit), is_ours, (b"x-ignored",))


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        ((LOW, 60), (LOW, 60), True),
        ((NORMAL, 60), (LOW, 60), True),
        ((LOW, 60), (NORMAL, 60), False),
        ((LOW, 60), (HIGH, 60), False),
        ((NORMAL, 60), (NORMAL, 90), True),
        ((NORMAL, 60), (NORMAL, 30), False),
    ],
)
def test_nobody_waits_for_an_answer_that_comes_after_their_own(
    first: tuple[int, float], second: tuple[int, float], waits: bool
) -> None:
    answers = VersionAnswers(AnswerStore(1 << 20), is_ours=True)
    lookup = answers.lookup([])
    for each, expected in ((first, False), (second, waits)):
        call = job(*each)
        call.head = pack_meta([b"", b"", b""])
        assert answers.answer(call, lookup) is expected


def test_what_is_counted_is_what_is_used() -> None:
    store = AnswerStore(1 << 30)
    owner = VersionAnswers(store, is_ours=True)
    headers = pack_meta([b"content-type", b"application/json"])
    gc.collect()
    tracemalloc.start()
    try:
        for at in range(5000):
            reply = Reply(200, bytes(bytearray(headers)), b"%0200d" % at)
            assert owner.keep(at.to_bytes(32, "big"), reply) is not None
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert store.held * 0.6 < used < store.held == owner.held
    owner.close()
    assert (store.held, owner.held, owner.count) == (0, 0, 0)
    assert owner.keep(b"key", Reply(200, headers, b"late")) is not None and store.held == 0


def test_no_header_that_our_handlers_read_is_left_out() -> None:
    root = Path(__file__).parents[2]
    reads = re.compile(r'(?:get_request_header\([^,]+,|headers\.get\()\s*"([\w-]+)"')
    files = [*(root / "handlers").rglob("*.py"), *(root / "serve" / "worker").glob("*.py")]
    found = {name.lower() for file in files for name in reads.findall(file.read_text("utf-8"))}
    # `explain` and `describe` are made of the request's kind.
    assert {"accept", "accept-encoding", "content-encoding"} <= found
    assert found - {"explain", "describe"} <= {name.decode() for name in OUR_HEADERS}


@pytest.mark.parametrize("value", ["x-a", ["x a"], [1], {"x-a": 1}])
def test_names_of_headers_are_a_list(value: object) -> None:
    values = Values({}, "model-config.yaml", settings={"cacheIgnores": value})
    with pytest.raises(BadModelConfig, match="cacheIgnores: expected a list of names"):
        values.of_operator("cacheIgnores", [], HEADERS)


def test_each_way_to_an_answer_is_counted_once() -> None:
    answers = version()
    seen_to, flight, first = ask(answers)
    assert not seen_to and answers.describe()["misses"] == 1
    joined, _, second = ask(answers)
    assert joined
    flight.sink.set_result(reply(b"answer", b"x-own", b"value")._replace(queue_us=3, handler_us=4))
    hit, _, third = ask(answers)
    assert hit
    assert [outcome(each) for each in (first, second, third)] == [b"miss", b"joined", b"hit"]
    for sink in (first, second, third):
        assert sink.reply is not None
        assert (sink.reply.status, sink.reply.body) == (200, b"answer")
        assert sink.reply.headers == pack_meta([b"x-own", b"value"])
    assert first.reply is not None and (first.reply.queue_us, first.reply.handler_us) == (3, 4)
    for value in (b"no-cache", b"max-age=0", b"no-store"):
        seen_to, call, sink = ask(answers, lookup=[(b"cache-control", value)])
        assert not seen_to
        call.sink.set_result(reply())
        assert outcome(sink) == b"bypass"
    seen_to, call, _ = ask(answers, b"x" * (MOST_HASHED_BYTES + 1))
    assert not seen_to
    size = ENTRY_BYTES + len(b"answer")
    assert answers.describe() == {
        "entries": 1, "bytes": size, "limitBytes": SIZE, "hits": 1, "misses": 1, "joined": 1,
        "bypassed": 4, "evictions": 0,
    }  # fmt: skip
    assert ask(answers, kind=EXPLAIN)[0] is False
    assert [each["miss"] for each in answers.outcomes] == [1, 1]


@pytest.mark.parametrize("is_ours", [False, True], ids=["another's", "ours"])
def test_what_a_handler_can_read_makes_another_request(is_ours: bool) -> None:
    answers = version(is_ours=is_ours)
    asked = [
        {"body": b"x"}, {"body": b"y"}, {"rest": b"r"}, {"query": b"q"}, {"kind": EXPLAIN},
        {"spelled": [b"Accept", b"a"]}, {"spelled": [b"Accept", b"b"]},
        {"spelled": [b"Content-Type", b"a"]}, {"body": b"x" * MOST_HASHED_BYTES},
    ]  # fmt: skip
    own = [{"spelled": [b"X-User", b"me"]}, {"spelled": [b"x-user", b"me"]}]
    for terms in asked + own * (not is_ours):
        seen_to, call, _ = ask(answers, **terms)  # type: ignore[arg-type]
        assert not seen_to, terms
        call.sink.set_result(reply())
    same = [
        {"spelled": [b"X-Request-Id", b"a"]}, {"spelled": [b"X-Ignored", b"a"]},
        {"spelled": [b"Traceparent", b"t", b"Accept", b"b"]}, *own * is_ours,
    ]  # fmt: skip
    for terms in same:
        assert ask(answers, **terms)[0], terms  # type: ignore[arg-type]
    assert ask(answers, spelled=[b"accept", b"b"])[0] is is_ours


@pytest.mark.parametrize(
    ("answer", "is_kept"),
    [
        (reply(), True),
        (reply(b"x" * MOST_HASHED_BYTES), True),
        (reply(b"x" * (MOST_HASHED_BYTES + 1)), False),
        (reply(status=201), False),
        (reply(status=400), False),
        (Reply(200, b"", Stream(None, lambda: None, AnswerBudget())), False),
        (reply(b"", b"Cache-Control", b"No-Store"), False),
        (reply(b"", b"x-a", b"b", b"Cache-Control", b"public, no-cache"), False),
        (reply(b"", b"cache-control", b"private"), False),
        (reply(b"", b"cache-control", b"max-age=0"), False),
        (reply(b"", b"cache-control", b"max-age=0, s-maxage=60"), True),
        (reply(b"", b"cache-control", b"public, max-age=60"), True),
        (reply(b"", b"Set-Cookie", b"a=b"), False),
        (reply(b"", b"Vary", b" * "), False),
        (reply(b"", b"Vary", b"Accept"), True),
    ],
)
def test_what_is_kept(answer: Reply, is_kept: bool) -> None:
    answers = version(limit=4 * SIZE)

    async def scenario() -> None:
        _, call, sink = ask(answers)
        call.sink.set_result(answer)
        assert sink.reply is not None and sink.reply.body == answer.body
        assert outcome(sink) == b"miss"
        assert ask(answers)[0] is is_kept

    asyncio.run(scenario())
    assert answers.count == is_kept


def test_those_used_longest_ago_go() -> None:
    size = ENTRY_BYTES + 100
    answers = version(limit=3 * size)
    for at in range(3):
        ask(answers, b"%d" % at)[1].sink.set_result(reply(b"%0100d" % at))
    assert (answers.held, answers.count, answers.evictions) == (3 * size, 3, 0)
    assert ask(answers, b"0")[0]
    ask(answers, b"3")[1].sink.set_result(reply(b"%0100d" % 3))
    assert (answers.held, answers.count, answers.evictions) == (3 * size, 3, 1)
    assert [ask(answers, b"%d" % at)[0] for at in range(4)] == [True, False, True, True]
    fresh = [(b"cache-control", b"no-cache")]
    ask(answers, b"3", lookup=fresh)[1].sink.set_result(reply(b"another"))
    assert answers.count == 3 and answers.held == 3 * size - 100 + len(b"another")
    ask(answers, b"large")[1].sink.set_result(reply(b"x" * (3 * size - ENTRY_BYTES + 1)))
    assert answers.count == 3, "it has no place, and takes none"
    ask(answers, b"all")[1].sink.set_result(reply(b"x" * (3 * size - ENTRY_BYTES)))
    assert (answers.held, answers.count, answers.evictions) == (3 * size, 1, 4)
    answers.close()
    assert (answers.held, answers.count) == (0, 0)
    assert not ask(answers, b"all")[0] and answers.describe()["bypassed"] == 2


def test_a_client_that_has_the_answer_is_not_sent_it() -> None:
    answers = version()
    _, call, sink = ask(answers)
    call.sink.set_result(reply())
    assert sink.reply is not None and sink.reply.note is not None
    headers = dict(sink.reply.note.headers)
    tag = headers[b"etag"]
    assert re.fullmatch(rb'"[0-9a-f]{32}"', tag)
    assert headers[b"cache-control"] == b"private, no-cache"
    for tags, status in ((tag, 304), (b'"a", W/%b' % tag, 304), (b'"a"', 200)):
        has_it = ask(answers, lookup=[(b"if-none-match", tags)])[2].reply
        assert has_it is not None and has_it.status == status
        assert (has_it.body == b"") is (status == 304)
    _, call, sink = ask(answers, b"own", lookup=[(b"if-none-match", b'"own"')])
    call.sink.set_result(reply(b"", b"ETag", b'W/"own"', b"Cache-Control", b"max-age=60"))
    assert sink.reply is not None and sink.reply.note is not None and sink.reply.status == 304
    assert dict(sink.reply.note.headers) == {b"x-cache": b"miss"}


class Queue:
    """A batcher, as far as a call that is started looks at it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def submit(self, call: Call) -> None:
        self.calls.append(call)


@pytest.mark.parametrize("end", ["not kept", "an error", "cancelled"])
def test_who_waited_in_vain_goes_their_own_way(end: str) -> None:
    answers, queue = version(), Queue()

    async def scenario() -> None:
        _, flight, first = ask(answers)
        _, waits, second = ask(answers)
        _, leaves, third = ask(answers)
        leaves.has_left = lambda: True
        for call in (waits, leaves):
            call.model.batchers = (queue,)  # type: ignore[assignment,misc]
        if end == "not kept":
            flight.sink.set_result(reply(status=500))
            assert first.reply is not None and first.reply.status == 500
        elif end == "an error":
            flight.sink.set_exception(ValueError())
            assert isinstance(first.error, ValueError)
        else:
            assert flight.sink.cancel() and first.is_cancelled
        await asyncio.sleep(0)
        assert queue.calls == [waits] and third.is_cancelled and not second.done()
        assert not ask(answers)[0], "nobody waits for what has ended"
        assert ask(answers)[0], "and for what has just begun"

    asyncio.run(scenario())
