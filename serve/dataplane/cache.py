"""Answers that are kept, of versions whose operator says that a request always has the same one.

What is asked is what a worker gets of a request: kind and flags, the rest of the path, the query,
the headers that count, the body. Each version has its own answers, which end with it; whatever
takes its place, even under the same number, begins without any.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from time import monotonic
from typing import NamedTuple

from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import Call, Note, Reply, ReplySink, Stream
from modelyard.serve.dataplane.metrics import KINDS, LOOKUPS

Headers = Iterable[tuple[bytes, bytes]]

OUR_HEADERS = frozenset(
    {
        b"accept", b"accept-encoding", b"content-encoding", b"content-type",
        b"inference-header-content-length",
    }
)  # fmt: skip
"""All that handlers of ours, and what runs around them, read of a request's headers."""
TRAVEL_HEADERS = frozenset(
    {
        b"cache-control", b"connection", b"content-length", b"expect", b"if-none-match",
        b"keep-alive", b"pragma", b"te", b"traceparent", b"tracestate", b"transfer-encoding",
        b"upgrade", b"x-request-id", b"x-request-priority", b"x-request-timeout",
    }
)  # fmt: skip
"""What says how a request travels, and not what is asked: it counts for no handler."""
MOST_HASHED_BYTES = 1 << 20
"""Most bytes of a body, and of an answer, that are hashed: longer ones would hold up all others for
more than a millisecond or two."""
ENTRY_BYTES = 768
"""What keeping an answer takes beside its body and its headers: 530 to 660 were measured."""
HIT, MISS, JOINED, BYPASS = LOOKUPS


class CachedAnswer(NamedTuple):
    """An answer of a worker's."""

    headers: bytes
    body: bytes
    note: tuple[tuple[bytes, bytes], ...]
    """The headers that it is sent with beside its own, but for the outcome's."""
    tag: bytes
    """Its ETag: of the same bytes always the same one, whichever version gave them."""
    expires_at: float
    """Time of `time.monotonic()` when it ends to hold, as its handler says."""

    @property
    def size_bytes(self) -> int:
        """How much memory it takes, at most."""
        return ENTRY_BYTES + len(self.headers) + len(self.body)


class AnswerStore:
    """The kept answers of one server; where there are too many, those used longest ago go.

    Args:
        limit: limit of the memory that they take together.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._answers: OrderedDict[tuple[VersionAnswers, bytes], CachedAnswer] = OrderedDict()

    def find(self, owner: VersionAnswers, key: bytes) -> CachedAnswer | None:
        """Return an answer, which is then the one used last."""
        answer = self._answers.get((owner, key))
        if answer is None:
            return None
        if answer.expires_at <= monotonic():
            self._drop(owner, key)
            return None
        self._answers.move_to_end((owner, key))
        return answer

    def keep(self, owner: VersionAnswers, key: bytes, answer: CachedAnswer) -> None:
        """Keep an answer, in the place of those used longest ago."""
        if answer.size_bytes > self.limit:
            return
        if (owner, key) in self._answers:
            self._drop(owner, key)
        self._answers[owner, key] = answer
        self._count(owner, answer.size_bytes)
        while self.held > self.limit:
            oldest, key = next(iter(self._answers))
            self._drop(oldest, key)
            oldest.evictions += 1

    def forget(self, owner: VersionAnswers) -> None:
        """Drop all answers of a version."""
        for other, key in [place for place in self._answers if place[0] is owner]:
            self._drop(other, key)

    def _drop(self, owner: VersionAnswers, key: bytes) -> None:
        self._count(owner, -self._answers.pop((owner, key)).size_bytes)

    def _count(self, owner: VersionAnswers, size: int) -> None:
        self.held += size
        owner.held += size
        owner.count += 1 if size > 0 else -1


class VersionAnswers:
    """The kept answers of one model version.

    Args:
        store: store of the server.
        is_ours: whether its handler is one of ours, for which only `OUR_HEADERS` count. For others
            all headers do, but for `TRAVEL_HEADERS` and those ignored.
        ignored: names of headers, in lower case.
    """

    def __init__(
        self,
        store: AnswerStore,
        is_ours: bool,
        ignored: Collection[bytes] = (),
    ) -> None:
        self._store = store
        self._is_ours = is_ours
        self._left_out = TRAVEL_HEADERS | frozenset(ignored)
        self._flights: dict[bytes, _Flight] = {}
        self._is_closed = False
        self.held = 0
        """Memory that they take."""
        self.count = 0
        self.evictions = 0
        self.outcomes = [dict.fromkeys(LOOKUPS, 0) for _ in KINDS]
        """Kind → how often which outcome."""

    def lookup(self, headers: Headers) -> Lookup:
        """Return what answers a request with such headers, their names in lower case."""
        looks = keeps = True
        tags: list[bytes] = []
        for name, value in headers:
            if name == b"cache-control":
                said = _directives(value)
                keeps = keeps and b"no-store" not in said
                is_fresh = b"no-cache" not in said and said.get(b"max-age") != b"0"
                looks = looks and keeps and is_fresh
            elif name == b"if-none-match":
                tags += (tag.strip().removeprefix(b"W/") for tag in value.split(b","))
        return Lookup(self, looks, keeps, tags)

    def describe(self) -> dict[str, int]:
        """Return what is kept, and what came of looking for it."""
        sums = {word: sum(each[word] for each in self.outcomes) for word in LOOKUPS}
        hits, misses, joined, bypassed = sums.values()
        return {
            "entries": self.count,
            "bytes": self.held,
            "limitBytes": self._store.limit,
            "hits": hits,
            "misses": misses,
            "joined": joined,
            "bypassed": bypassed,
            "evictions": self.evictions,
        }

    def close(self) -> None:
        """End with the version: nothing is found or kept any more."""
        self._is_closed = True
        self._store.forget(self)

    def answer(self, call: Call, lookup: Lookup) -> bool:
        """Answer a call, or have it wait for another's answer; else return False.

        Its answer is kept when it comes, then.
        """
        counted = self.outcomes[call.kind]
        if self._is_closed or not lookup.keeps or sum(map(len, call.parts)) > MOST_HASHED_BYTES:
            counted[BYPASS] += 1
            call.sink = _Flight(self, None, call, lookup, BYPASS)
            return False
        key = digest_of(call, self._left_out, self._is_ours)
        if not lookup.looks:
            counted[BYPASS] += 1
            call.sink = _Flight(self, key, call, lookup, BYPASS)
            return False
        if (answer := self._store.find(self, key)) is not None:
            counted[HIT] += 1
            call.sink.set_result(lookup.reply(answer, HIT))
            return True
        flight = self._flights.get(key)
        if flight is not None and flight.takes(call):
            counted[JOINED] += 1
            flight.waiting.append((call, lookup))
            return True
        counted[MISS] += 1
        call.sink = made = _Flight(self, key, call, lookup, MISS)
        self._flights.setdefault(key, made)
        return False

    def keep(self, key: bytes, reply: Reply) -> CachedAnswer | None:
        """Keep a worker's answer, and return it; None where it may not be."""
        body = reply.body
        if reply.status != 200 or isinstance(body, Stream) or len(body) > MOST_HASHED_BYTES:
            return None
        answer = _read(reply.headers, body)
        if answer is not None and not self._is_closed:
            self._store.keep(self, key, answer)
        return answer

    def end(self, key: bytes, flight: _Flight) -> None:
        """Let nobody wait for a flight any more."""
        if self._flights.get(key) is flight:
            del self._flights[key]


def digest_of(call: Call, left_out: Collection[bytes], is_ours: bool = False) -> bytes:
    """Return a digest of what a call asks; nobody can make two requests that have the same.

    Args:
        left_out: headers that do not count, their names in lower case.
        is_ours: whether only `OUR_HEADERS` do.
    """
    rest, query, _, *spelled = wire.unpack_meta(call.head)
    said = [rest, query]
    for name, value in zip(spelled[::2], spelled[1::2], strict=True):
        lower = name.lower()
        if lower in OUR_HEADERS if is_ours else lower not in left_out:
            # A handler of another's finds a header as the client spelled it.
            said += (lower if is_ours else name, value)
    digest = hashlib.sha256(b"%d %d %d " % (call.kind, call.flags, len(said)))
    digest.update(b"".join(b"%d:%b" % (len(each), each) for each in said))
    for part in call.parts:
        digest.update(part)
    return digest.digest()


class Lookup(NamedTuple):
    """What one request says of answers that are kept."""

    answers: VersionAnswers
    looks: bool
    """Whether it may be answered with one."""
    keeps: bool
    """Whether its own may be kept."""
    tags: Sequence[bytes]
    """ETags of the answers that its client has."""

    def answer(self, call: Call) -> bool:
        """Return whether the call is seen to: it is answered, or waits for the same answer."""
        return self.answers.answer(call, self)

    def reply(self, answer: CachedAnswer, outcome: str) -> Reply:
        """Return an answer as it is sent: 304 where the client has it already."""
        note = Note(outcome, ((b"x-cache", outcome.encode()), *answer.note))
        if answer.tag in self.tags:
            return Reply(304, b"", b"", note=note)
        return Reply(200, answer.headers, answer.body, note=note)


class _Flight:
    """A call whose answer is kept when it comes, and the others that wait for it: its sink.

    Without a key nothing is kept, and nobody waits: the answer only says so.
    """

    __slots__ = (
        "_answers", "_deadline", "_key", "_lookup", "_outcome", "_priority", "_sink", "waiting",
    )  # fmt: skip

    def __init__(
        self, answers: VersionAnswers, key: bytes | None, call: Call, lookup: Lookup, outcome: str
    ) -> None:
        self._answers = answers
        self._key = key
        self._lookup = lookup
        self._outcome = outcome
        self._deadline, self._priority = call.deadline, call.priority
        self._sink: ReplySink = call.sink
        self.waiting: list[tuple[Call, Lookup]] = []

    def takes(self, call: Call) -> bool:
        """Return whether a call may wait for this one's answer.

        It has as much time, so that it is answered in it whatever comes of this one; and it would
        not go first.
        """
        return (
            not self.done() and call.deadline >= self._deadline and call.priority >= self._priority
        )

    def done(self) -> bool:
        """Return whether it has its reply, or nobody waits for it any more."""
        return self._sink.done()

    def set_result(self, reply: Reply) -> None:
        """Keep the reply, and answer all with it."""
        answer = self._answers.keep(self._key, reply) if self._key is not None else None
        waiting = self._end()
        if answer is None:
            note = Note(self._outcome, ((b"x-cache", self._outcome.encode()),))
            self._sink.set_result(reply._replace(note=note))
            _start(waiting)
            return
        sent = self._lookup.reply(answer, self._outcome)
        self._sink.set_result(sent._replace(queue_us=reply.queue_us, handler_us=reply.handler_us))
        for call, lookup in waiting:
            if not call.drop_if_left():
                call.sink.set_result(lookup.reply(answer, JOINED))

    def set_exception(self, error: Exception) -> None:
        """Fail alone: an error is nobody else's."""
        waiting = self._end()
        self._sink.set_exception(error)
        _start(waiting)

    def cancel(self) -> bool:
        """Leave those that wait to themselves."""
        _start(self._end())
        return self._sink.cancel()

    def _end(self) -> list[tuple[Call, Lookup]]:
        if self._key is not None:
            self._answers.end(self._key, self)
        waiting, self.waiting = self.waiting, []
        return waiting


def _start(waiting: Iterable[tuple[Call, Lookup]]) -> None:
    """Have calls that waited in vain go their own way, once the queues are at rest."""
    for call, _ in waiting:
        if not call.drop_if_left():
            asyncio.get_running_loop().call_soon(call.start)


def _read(headers: bytes, body: wire.Payload) -> CachedAnswer | None:
    """Return a worker's answer to be kept; None where its handler says that it may not be."""
    fields = wire.unpack_meta(headers)
    said = {name.lower(): value for name, value in zip(fields[::2], fields[1::2], strict=True)}
    directives = _directives(said.get(b"cache-control", b""))
    if {b"no-store", b"no-cache", b"private"} & directives.keys():
        return None
    if b"set-cookie" in said or said.get(b"vary", b"").strip() == b"*":
        return None
    seconds = directives.get(b"s-maxage", directives.get(b"max-age", b""))
    expires_at = monotonic() + int(seconds) if seconds.isdigit() else math.inf
    tag = said.get(b"etag", b"").removeprefix(b"W/")
    note: list[tuple[bytes, bytes]] = []
    if not tag:
        digest = hashlib.sha256(b"%d:%b" % (len(headers), headers))
        digest.update(body)
        tag = b'"%b"' % digest.hexdigest()[:32].encode()
        note.append((b"etag", tag))
    if b"cache-control" not in said:  # the client may keep it too, and asks whether it still holds
        note.append((b"cache-control", b"private, no-cache"))
    return CachedAnswer(headers, bytes(body), tuple(note), tag, expires_at)


def _directives(value: bytes) -> dict[bytes, bytes]:
    """Return what a Cache-Control says, by name."""
    found = {}
    for each in value.lower().split(b","):
        name, _, argument = each.partition(b"=")
        found[name.strip()] = argument.strip().strip(b'"')
    return found
