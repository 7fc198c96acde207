"""A head that is known says what the parser would say: nobody is read in two ways."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Sequence

import pytest
import uvloop

from modelyard.serve.dataplane.wire import Buffer
from modelyard.serve.http.connection import RequestResponseCycle
from modelyard.serve.http.heads import (
    HOPELESS_HOLDS_S,
    MOST_BYTES,
    MOST_HEADS,
    Again,
    Head,
    Heads,
    Refusal,
)
from tests.serve.test_connection import (
    CLOSE,
    HOST,
    SETTINGS,
    Answers,
    Served,
    chunked,
    get,
    post,
    run,
    until,
)

KNOWN = post(b"/e", b"abc")
ID, TRACE = b"X-Request-ID: %b\r\n", b"traceparent: 00-%032d-%016d-01\r\n"
STRANGE = (b"a1", b"\xff1", b"", b"\t1")
MOST = SETTINGS.max_request_bytes
NONE = get(b"/e")
SMUGGLED = get(b"/smuggled")

CASES = {
    "again": [KNOWN],
    "without a body": [NONE],
    "two in one": [KNOWN + KNOWN],
    "another behind it": [KNOWN + SMUGGLED],
    "half of the body": [KNOWN[:-1], KNOWN[-1:]],
    "half of the head": [KNOWN[:20], KNOWN[20:]],
    "no end yet": [NONE[:-4], b"\r\na: b\r\n\r\n"],
    "no body yet": [KNOWN[:-3], b"abc"],
    "a body that looks like an end": [post(b"/e", b"\r\n\r\n")],
    "a body that is a request": [post(b"/e", SMUGGLED)],
    "a body one too long": [KNOWN + b"d"],
    "empty lines before it": [b"\r\n\r\n" + KNOWN],
    "a bare line feed at its end": [KNOWN.replace(b"\r\n\r\n", b"\n\n")],
    "bare line feeds": [KNOWN.replace(b"\r\n", b"\n")],
    "two lengths": [post(b"/e", b"abc", b"content-length: 3\r\n")],
    "two other lengths": [post(b"/e", b"abc", b"content-length: 33\r\n")],
    "a length with a sign": [get(b"/e", b"content-length: +3\r\n", b"POST") + b"abc"],
    "length and chunks": [post(b"/e", b"0\r\n\r\n", b"transfer-encoding: chunked\r\n")],
    "behind chunks": [b"".join(chunked(b"3\r\nabc\r\n0\r\n\r\n")) + KNOWN],
    "after chunks": [b"".join(chunked(b"3\r\nabc\r\n0\r\n\r\n")), KNOWN],
    "in chunks that do not end": [b"".join(chunked(b"3\r\nabc\r\n")), KNOWN],
    "in a body": [get(b"/e", b"content-length: 200\r\n", b"POST"), KNOWN, b"x" * 200],
    "after a close": [post(b"/e", b"abc", CLOSE), KNOWN],
    "version 1.0": [KNOWN.replace(b"1.1", b"1.0"), KNOWN],
    "an offer of another protocol": [
        get(b"/e", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"), KNOWN, SMUGGLED,
    ],
    "waits to be asked": [post(b"/e", b"abc", b"Expect: 100-continue\r\n")],
    "a header of two lines": [get(b"/e", b"a: b\r\n c: d\r\n")],
    "two hosts": [get(b"/e", HOST)],
    "by a page": [post(b"/e", b"abc", b"Origin: http://elsewhere\r\n")],
    "a longer body": [post(b"/e", b"abcdefghij")],
    "a body too long": [post(b"/e", b"x" * (MOST + 1))],
    "no body": [post(b"/e", b"")],
    "two of other lengths in one": [post(b"/e", b"abcd") + post(b"/e", b"ab")],
    "a length of zeros": [get(b"/e", b"content-length: 0004\r\n", b"POST") + b"abcd"],
    "a length in words": [get(b"/e", b"content-length: four\r\n", b"POST") + b"abcd"],
    "a negative length": [get(b"/e", b"content-length: -4\r\n", b"POST") + b"abcd"],
    "a length too large": [get(b"/e", b"content-length: 1%s\r\n" % (b"0" * 20), b"POST")],
    "a length that is only named": [get(b"/e", b"content-length\r\n", b"POST")],
    "two lengths, one spelled otherwise": [post(b"/e", b"abc", b"Content-Length: 4\r\n")],
    "ids": [post(b"/e", b"ab", ID % b"a1"), post(b"/e", b"abc", ID % b"b2"),
            post(b"/e", b"a", ID % b"longer"), get(b"/e", ID % b"c3")],
    "ids and traces": [post(b"/e", b"a" * at, ID % b"%d" % at + TRACE % (at, at))
                       for at in range(9)],
    "two ids": [post(b"/e", b"a", ID % b"a1" + ID % one) for one in (b"b2", b"c3", b"d d")],
    "an id of strange letters": [post(b"/e", b"a", ID % one) for one in STRANGE],
    "a head alone": [get(b"/exact", b"", b"HEAD")],
}  # fmt: skip
"""What is sent, in pieces: on one connection, twice."""


class Telling(Answers):
    """Answers with all that it was asked."""

    def echo(self, cycle: RequestResponseCycle, parts: Sequence[Buffer]) -> None:
        """Write headers and body."""
        told = cycle.headers, cycle.spelled, cycle.length, cycle.query, b"".join(parts)
        body = repr(told).encode()
        assert cycle.send_whole(200, [(b"content-length", b"%d" % len(body))], body)


class Forgetful(Heads):
    """Keeps nothing: everything is parsed."""

    def keep(self, data: bytes, head: Head) -> None:
        """Keep nothing."""


async def answers(served: Served, exchanges: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Return all that comes back on a connection for each exchange, one after the other."""
    found: list[bytes] = []
    for pieces in exchanges:
        reader, writer, _ = await served.open()
        found.append(b"")
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            for piece in pieces:
                if not writer.transport.is_closing():
                    writer.write(piece)
                    await asyncio.sleep(0.003)
            if not writer.transport.is_closing():
                writer.write_eof()
            while data := await reader.read(1 << 16):
                found[-1] += data
    return found


def compare(exchanges: Sequence[Sequence[bytes]]) -> tuple[list[bytes], list[bytes]]:
    """Return what a listener answers that knows heads, and one that parses all."""

    async def main() -> tuple[list[bytes], list[bytes]]:
        found = []
        for heads in (Heads(MOST), Forgetful(MOST)):
            served = Served()
            served.listener.heads, served.listener.app = heads, Telling()
            await served.listener.start()
            found.append(await answers(served, [[KNOWN], [NONE], *exchanges]))
            served.listener.close_idle(0)
            await served.listener.stop_accepting()
        return found[0], found[1]

    return uvloop.run(main())


def test_what_is_known_is_read_as_if_it_were_parsed() -> None:
    exchanges = [pieces * times for times in (1, 2) for pieces in CASES.values()]
    known, parsed = compare(exchanges + exchanges)
    names = ["", "", *[f"{name} × {times}" for times in (1, 2) for name in CASES] * 2]
    wrong = {name: pair for name, *pair in zip(names, known, parsed, strict=True)
             if pair[0] != pair[1]}  # fmt: skip
    assert not wrong
    assert len(set(parsed)) > 10


@pytest.mark.parametrize("seed", range(2))
def test_nor_is_what_chance_makes_of_requests(seed: int) -> None:
    rng = random.Random(seed)
    parts = [piece for pieces in CASES.values() for piece in pieces]
    exchanges = []
    for _ in range(100):
        sent = bytearray(b"".join(rng.choices(parts, k=rng.randint(1, 3))))
        for _ in range(rng.randint(0, 2)):
            at = rng.randrange(len(sent) + 1)
            sent[at : at + rng.randint(0, 2)] = rng.choice([b"", b"\r", b"\n", b" ", b"0", b":"])
        cut = rng.randrange(len(sent) + 1) if rng.random() < 0.3 else 0
        exchanges.append([bytes(piece) for piece in (sent[:cut], sent[cut:]) if piece])
    known, parsed = compare(exchanges)
    assert known == parsed


def test_a_head_is_found_again_and_few_are_kept() -> None:
    heads, known = Heads(MOST), Head("POST", "/e", b"/e", b"", [], [], b"", 3)
    for unfit in (KNOWN + b"d", KNOWN[:-1], KNOWN[:-5], b"", b"abc", b"\r\n\r\n" + KNOWN):
        heads.keep(unfit, known)
    assert not heads
    heads.keep(KNOWN, known)
    assert heads == {KNOWN[:-7]: known}
    long = post(b"/e", b"abc", b"a: %b\r\n" % (b"x" * MOST_BYTES))
    heads.keep(long, known)
    assert len(heads) == 1
    for at in range(MOST_HEADS):
        heads.keep(post(b"/%d" % at, b"abc"), known)
    assert 0 < len(heads) < MOST_HEADS


def test_heads_are_alike_but_for_length_and_ids() -> None:
    heads = Heads(1000)

    def head(length: object, id: str, more: str = "") -> bytes:
        fields = f"Host: a\r\nContent-Length: {length}\r\n{more}X-Request-Id: {id}"
        return f"POST /e HTTP/1.1\r\n{fields}".encode()

    headers = [(b"host", b"a"), (b"content-length", b"3"), (b"x-request-id", b"one")]
    spelled = [b"Host", b"a", b"Content-Length", b"3", b"X-Request-Id", b"one"]
    heads.keep(
        head(3, "one") + b"\r\n\r\nabc", Head("POST", "/e", b"/e", b"", headers, spelled, b"", 3)
    )
    found = heads.find_alike(head(1000, "two"))
    assert found is not None and found.memo is next(iter(heads.values())).memo
    assert (found.length, found.headers) == (
        1000, [(b"host", b"a"), (b"content-length", b"1000"), (b"x-request-id", b"two")],
    )  # fmt: skip
    assert found.spelled == [b"Host", b"a", b"Content-Length", b"1000", b"X-Request-Id", b"two"]
    assert headers[1] == (b"content-length", b"3") and spelled[3] == b"3"
    others = [head(1001, "two"), head("+3", "two"), head("", "two"), head(3, "three"),
              head(3, "t o"), head(3, "two", "a: b\r\n"), head(3, "two").replace(b"Host", b"host"),
              head(3, "two").replace(b": 3\r\nX-Request-Id: two", b"\r\nX-Request-Id"),
              head(3, "two") + b"\r\n", head("9" * 13, "two")]  # fmt: skip
    assert [heads.find_alike(other) for other in others] == [None] * len(others)


def test_a_refusal_holds_for_a_moment_and_for_those_who_waited_as_long() -> None:
    head = Head("POST", "/e", b"/e", b"", [], [], b"", 3)
    assert head.find_refusal(1.0) is None
    now = time.monotonic()
    for end, is_so, waited_s, is_refused in (
        (now + 60, True, 0.2, True),
        (now + 60, True, 0.1, False),
        (now + 60, False, 0.2, False),
        (now - 0.1, True, 0.2, False),
        (now - 0.1, False, 0.6, True),  # hopeless, whatever has changed
        (now - 0.1, False, 0.5, False),
        (now - HOPELESS_HOLDS_S, False, 0.6, False),
    ):
        again = Again(0.2, end, 0.6, lambda is_so=is_so: is_so, lambda: False, lambda: None)  # type: ignore[misc]
        head.memo.refusal = Refusal(again, lambda headers: "", [b""], 503, 0, True, None)
        assert (head.find_refusal(waited_s) is not None) is is_refused, (end - now, waited_s)


@pytest.mark.parametrize("is_short", (True, False))
def test_who_is_wanted_by_idle_workers_is_taken_in_a_turn_without_time(is_short: bool) -> None:
    class Other:
        def take_put_off(self) -> None:
            """Only have waited before."""

    async def scenario(served: Served) -> None:
        for _ in "12":  # the host is known from the second on
            assert b"abc" in await served.exchange([KNOWN], 1)
        again = Again(1.0, 0.0, math.inf, lambda: False, lambda: is_short, lambda: None)
        (head,) = served.listener.heads.values()
        refusal = Refusal(again, lambda headers: "", [b""], 503, 0, True, None)
        served.listener.heads.refuse(head, refusal)
        _, writer, connection = await served.open()
        served.listener.turns.put_off(Other())
        connection.data_received(KNOWN)
        assert len(served.app.cycles) == 2 + is_short
        writer.close()
        await until(lambda: len(served.app.cycles) == 3)  # it has its turn, wanted or not

    run(scenario)
