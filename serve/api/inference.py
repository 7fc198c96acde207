"""The inference API: predictions and explanations, HTTP's requests ↔ calls and replies.

Every request for an answer takes the same way, without a task: the front makes a call when the head
has come, the body submits it, and whoever has the reply writes the answer. It costs no FastAPI
machinery (1.5 µs instead of 80): `Application` takes it before routing.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from time import monotonic

import orjson

from modelyard.serve import errors
from modelyard.serve.api import events
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import (
    EXPLAIN,
    HIGH,
    MOST_UNREAD_BYTES,
    NORMAL,
    PREDICT,
    Call,
    Reply,
    Stream,
    Target,
)
from modelyard.serve.dataplane.queue import EXPECTED_SHARE
from modelyard.serve.dataplane.tracing import PARENT, Attributes, Trace
from modelyard.serve.dataplane.wire import MOST_ROWS, Buffer, Payload
from modelyard.serve.front.begin import (
    CallReply,
    Front,
    Headers,
    check_options,
    class_of,
    read_terms,
    unpack_headers,
)
from modelyard.serve.http.application import Answers, Events
from modelyard.serve.http.connection import RequestResponseCycle
from modelyard.serve.http.heads import HOLDS_S, Again

KINDS = {"predictions": PREDICT, "explanations": EXPLAIN}
METHODS = frozenset({"POST", "PUT"})
"""`curl -T` sends PUT."""
JSON: Headers = [(b"content-type", b"application/json")]
_SAID = {False: (b"content-type", b"application/json"),
         True: (b"content-type", b"application/json", b"accept", events.EVENTS)}  # fmt: skip
"""What a handler finds among the headers of a request whose answer has a form, by `is_stream`."""


def find_target(cycle: RequestResponseCycle) -> Target | None:
    """Return what a request asks a model for, by our paths; None for all other requests."""
    return target_of(cycle.path) if cycle.method in METHODS else None


@lru_cache(maxsize=128)
def target_of(path: str) -> Target | None:
    """Return what a path asks a model for, as `find_target` does for a request."""
    first, *rest = path.split("/")[1:] or [""]
    if first in KINDS and rest and rest[0]:
        return Target(KINDS[first], rest)
    if first == "v2":
        return target_of_v2(rest)
    if first == "v1":
        match rest:
            case ["models", last] if (found := split_verb(last)) is not None:
                return Target(found[1], [found[0]], wire.KSERVE | wire.INSTANCES)
    return None


OF_V2: Mapping[str, tuple[int, events.Form | None]] = {
    "infer": (wire.TENSORS, None),
    "infer_stream": (wire.TENSORS | wire.STREAM, events.INFER_STREAM),
    "generate": (0, events.GENERATE),
    "generate_stream": (0, events.GENERATE_STREAM),
}
"""How requests of the Open Inference Protocol end, what a worker does, and the form of answers."""


def target_of_v2(rest: Sequence[str]) -> Target | None:
    """Return what a path behind `/v2` asks a model for; None for all other paths."""
    match rest:
        case ["models", model, verb] if model and verb in OF_V2:
            path = [model]
        case ["models", model, "versions", version, verb] if model and version and verb in OF_V2:
            path = [model, version]
        case _:
            return None
    flags, form = OF_V2[rest[-1]]
    return Target(PREDICT, path, wire.KSERVE | flags, form)


_VERBS = {"predict": PREDICT, "explain": EXPLAIN}


def split_verb(last: str) -> tuple[str, int] | None:
    """Return model and kind of `model:predict` or `model:explain`, as KServe's v1 paths end."""
    name, _, verb = last.rpartition(":")
    return (name, _VERBS[verb]) if name and verb in _VERBS else None


def right_of(path: str) -> str | None:
    """Return the right that a path needs; None where any token will do."""
    target = target_of(path)
    return None if target is None else ("explain" if target.kind == EXPLAIN else "predict")


@dataclass(eq=False)
class Calls:
    """HTTP's requests ↔ calls and replies."""

    front: Front
    """Where the requests begin."""
    answers: Answers
    """Their form."""
    target: Callable[[RequestResponseCycle], Target | None] = find_target
    """Returns what a request asks a model for, by the dialect's paths."""
    takes_codings: bool = False
    """Whether compressed bodies go to handlers as they are, and what they stream is never sent as
    events; as TorchServe does."""
    hides_tokens: bool = False
    """Whether handlers, whose authors are others, do not see Authorization."""

    def begin(self, cycle: RequestResponseCycle, target: Target) -> None:
        """Make a call that is submitted when its body is there.

        Raises:
            ModelNotFound, VersionNotFound, Unavailable: there is no such model, or not yet.
        """
        kind, _, flags, form = target
        connection = cycle.connection
        check = None
        if cycle.coding or (kind == EXPLAIN and cycle.query):
            check = partial(self._check, cycle, target)
        if self.hides_tokens:
            if cycle.head.shown is None:
                cycle.head.shown = without_token(cycle.head.spelled)
            cycle.spelled = cycle.head.shown
        if form is not None:
            cycle.spelled = [*cycle.spelled, *_SAID[form.is_stream]]
        reply = DirectReply(self.front, cycle, target)
        reply.calls = self
        call = self.front.begin(
            reply,
            waited_s=connection.waited_s,
            began_at=cycle.began,
            check=check,
            expect=connection.turns.expect,
        )
        if call is None:
            return
        is_checked = kind == PREDICT and cycle.is_received and call.lookup is None
        put = call.put if is_checked else call.submit
        if flags & wire.TENSORS:
            put = partial(put_tensors, call, self.front.check_high, cycle.headers)
            if self.front.extensions.bring is not None:
                put = partial(self.front.extensions.submit, call, submit=put)
        elif flags & wire.INSTANCES:
            put = partial(put_instances, call)
        cycle.read_body(put)

    def _check(self, cycle: RequestResponseCycle, target: Target, model: ModelVersion) -> None:
        if target.kind == EXPLAIN and cycle.query and model.takes_our_options:
            check_options(cycle.query)
        takes_codings = self.takes_codings or target.flags & wire.TENSORS  # which the worker reads
        if cycle.coding and not takes_codings and cycle.coding.lower() != b"identity":
            shown = ascii(cycle.coding[:40].decode("latin-1"))
            raise errors.UnknownCoding(f"Content-Encoding is {shown}; send the body without one")

    def count_unrouted(self, status: int) -> None:
        """Count the answer to a request that has become no call."""
        self.front.count_unrouted(status)


class DirectReply(CallReply):
    """Sends the reply to a call on as soon as it is there, by HTTP."""

    __slots__ = ("calls",)
    asked: RequestResponseCycle
    calls: Calls

    def head(self) -> bytes:
        """Return what a worker needs of the request's head."""
        return pack_head(self.asked, "/".join(self.target.path[2:]), self.trace)

    def terms(self, timeout_s: float, priority: int) -> tuple[float, int]:
        """Return time and class, which only headers say."""
        head = self.asked.head
        if head.memo.terms is None:
            head.memo.terms = read_terms(head.headers)
        return head.memo.terms

    def describe(self) -> tuple[str, Attributes]:
        """Return the span's name and attributes, by OpenTelemetry's conventions for HTTP."""
        cycle = self.asked
        route = route_of(cycle.path, self.target)
        endpoints = cycle.connection.endpoints
        server = endpoints["server"]
        host, port = server if isinstance(server, tuple) else (str(server or ""), 0)
        agent = next((value for name, value in cycle.headers if name == b"user-agent"), b"")
        return f"{cycle.method} {route}", {
            "http.request.method": cycle.method,
            "http.route": route,
            "url.path": cycle.path,
            "url.scheme": str(endpoints["scheme"]),
            "network.protocol.version": "1.1",
            "server.address": host,
            **({"server.port": port} if port else {}),
            **({"user_agent.original": agent.decode("latin-1")} if agent else {}),
            **self.describe_call(),
        }

    def describe_status(self, status: int) -> Attributes:
        """Return what the span says of an answer."""
        return {"http.response.status_code": status}

    def answer(self, reply: Reply) -> None:
        """Send a worker's reply."""
        headers = unpack_headers(reply.headers)
        form, body = self.target.form, reply.body
        if reply.note is not None:
            self.asked.outcome = reply.note.outcome
            headers = [*headers, *reply.note.headers]
        is_bare = form is None and isinstance(body, Stream) and not self.calls.takes_codings
        if is_bare and events.wants_events(self.asked.headers) and events.is_text(headers):
            form = events.CHUNKS
        if form is None or reply.status == 304 or reply.status >= 400 or events.are_events(headers):
            self.calls.answers.send(self.asked, reply.status, headers, body)
            return
        write = events.writer(form, self.model.name, self.model.version, headers)
        own = [pair for pair in headers if pair[0] not in events.OF_BODY]
        if form.is_stream and isinstance(body, Stream):
            sent = Events(body, write, events.error_event, events.PAUSE)
            self.calls.answers.send(self.asked, reply.status, [*own, *events.HEAD], sent)
        elif isinstance(body, Stream):
            self.asked.run(self._gather(reply.status, own, body, write))
        else:
            if form is events.INFER_STREAM:
                body = events.as_chunk(body, headers)
            kind = events.HEAD if form.is_stream else JSON
            self._write(reply.status, [*own, *kind], body, write)

    def _write(
        self, status: int, headers: Headers, body: Payload, write: Callable[[Payload], bytes]
    ) -> None:
        try:
            written = write(body)
        except ValueError as error:
            self.refuse(errors.BadRequest(str(error)))
        else:
            self.calls.answers.send(self.asked, status, headers, written)

    async def _gather(
        self, status: int, headers: Headers, stream: Stream, write: Callable[[Payload], bytes]
    ) -> None:
        """Send what a handler streams in one answer."""
        whole = bytearray()
        try:
            async for chunk in stream.read():
                whole += chunk
                if len(whole) > MOST_UNREAD_BYTES:
                    raise errors.StreamBroken(f"the answer has more than {MOST_UNREAD_BYTES} bytes")
        except errors.ServeError as error:
            self.refuse(errors.StreamBroken(events.broken_text(str(error))))
        else:
            self._write(status, [*headers, *JSON], whole, write)
        finally:
            stream.close()

    def fail(self, error: Exception, took_s: float, call: Call | None = None) -> None:
        """Count an error and send it; what its queue refuses for now may be refused again so."""
        if call is None and isinstance(error, errors.QueueFull | errors.TooLate):
            self._allow_again(error)
        super().fail(error, took_s, call)

    def _allow_again(self, error: errors.QueueFull | errors.TooLate) -> None:
        front, model, kind = self.front, self.model, self.target.kind
        if self.trace is not None or front.registry.splits:
            return
        name, version, observer = model.name, self.target.version, front.observer
        batcher, counts, answers = (
            model.batchers[kind],
            model.metrics.kinds[kind],
            self.calls.answers,
        )
        changes = batcher.changes
        is_late = isinstance(error, errors.TooLate)
        refused = counts.refused_late if is_late else counts.refused_full

        def count() -> None:
            refused.inc()
            if observer is not None:
                observer.accepted(name, version)
            counts.answered(503, 0.0)
            answers.count(503)

        timeout_s = min(self.terms(math.inf, NORMAL)[0], model.config.request_timeout_s)
        self.asked.again = Again(
            self.asked.connection.waited_s,
            monotonic() + HOLDS_S,
            EXPECTED_SHARE * timeout_s if is_late else math.inf,
            lambda: batcher.changes == changes,
            lambda: batcher.is_short,
            count,
        )

    def refuse(self, error: Exception) -> None:
        """Send an error."""
        self.asked.is_refused = isinstance(error, errors.Unavailable | errors.DeadlinePassed)
        answers = self.calls.answers
        if isinstance(error, errors.Unavailable):
            answers.send_refusal(self.asked, error)
        else:
            answers.send(self.asked, *answers.error(error, self.asked.id))


_ROWS = re.compile(rb'"shape"\s*:\s*\[\s*(\d{1,9})\s*[],]')
_TIMEOUT = re.compile(rb'"parameters"\s*:\s*\{[^{}]*"timeout"\s*:\s*(\d{1,15})\s*[,}]')
_PRIORITY = re.compile(rb'"parameters"\s*:\s*\{[^{}]*"priority"\s*:\s*(\d{1,15})\s*[,}]')
LOOKED_AT_BYTES = 1 << 16
"""Bytes of a body that are looked at for its rows, its time and its class: the worker reads all of
it."""


def put_tensors(
    call: Call, check_high: Callable[[Headers], None], headers: Headers, parts: Sequence[Buffer]
) -> None:
    """Queue a call of tensors by name, with the rows, the time and the class that its JSON says.

    Rows that cannot be seen here count as one; what counts is what the worker reads.
    """
    head = bytes(parts[0][:LOOKED_AT_BYTES])
    if (rows := _ROWS.search(head)) is not None:
        call.rows = max(1, min(int(rows[1]), MOST_ROWS))
    if b'"timeout"' in head and (timeout := _TIMEOUT.search(head)) and int(timeout[1]):
        call.timeout_s = min(call.timeout_s, int(timeout[1]) / 1e6)
        call.must_fit = True
    if b'"priority"' in head and (number := _PRIORITY.search(head)):
        call.priority = class_of(int(number[1]), call.priority)
        if call.priority == HIGH:
            try:
                check_high(headers)
            except errors.Forbidden as error:
                call.arrived(parts, monotonic())
                call.sink.set_exception(error)
                return
    call.submit(parts)


COUNTED_BYTES = 1 << 14
"""Bytes of a body whose instances are counted one by one, which takes the server half a
millisecond."""
_FIRST = re.compile(rb'"instances"\s*:\s*\[\s*')
_DECODER = json.JSONDecoder()


def put_instances(call: Call, parts: Sequence[Buffer]) -> None:
    """Queue a call of several instances as so many rows; of a long body by the first one's size."""
    body = b"".join(parts)
    call.rows = max(1, min(count_instances(body), MOST_ROWS))
    call.submit([body])


def count_instances(body: bytes) -> int:
    """Return how many instances a request seems to have; 0 where it has none."""
    try:
        if len(body) <= COUNTED_BYTES:
            return len(orjson.loads(body)["instances"])
        start = _FIRST.search(body[:COUNTED_BYTES])
        if start is None:
            return 0
        text = body[start.end() : start.end() + LOOKED_AT_BYTES].decode("latin-1")
        _, size = _DECODER.raw_decode(text)
        return round((len(body) - start.end()) / (size + 1))
    except (ValueError, TypeError, LookupError, RecursionError):
        return 0


def pack_head(cycle: RequestResponseCycle, rest: str, trace: Trace | None = None) -> bytes:
    """Pack what a worker needs of the request's head; `worker.codec` reads it.

    The handler of a traced request finds the server's span as its parent.
    """
    headers = cycle.spelled
    if trace is not None:
        pairs = zip(headers[::2], headers[1::2], strict=True)
        kept = (pair for pair in pairs if pair[0].lower() != PARENT)
        headers = [*(each for pair in kept for each in pair), PARENT, trace.parent]
    # The path is decoded already and may hold a NUL, which separates the fields.
    return wire.pack_meta(
        (rest.replace("\0", "%00").encode(), cycle.query, cycle.id.encode(), *headers)
    )


def without_token(spelled: list[bytes]) -> list[bytes]:
    """Return headers, name after value, but for Authorization."""
    pairs = zip(spelled[::2], spelled[1::2], strict=True)
    return [word for pair in pairs if pair[0].lower() != b"authorization" for word in pair]


def route_of(path: str, target: Target) -> str:
    """Return a path with what a client chooses replaced by what that is.

    `/predictions/digits/1.0` is `/predictions/{model}/{version}`.
    """
    segments = path.split("/")
    at = 3 if segments[1] in ("v1", "v2") else 2
    for name, value in zip(("{model}", "{version}"), target.path, strict=False):
        if value in segments[at:]:
            at = segments.index(value, at)
            segments[at] = name
        elif segments[at:] and segments[at].startswith(
            f"{value}:"
        ):  # KServe's /v1/models/digits:predict
            segments[at] = name + segments[at].removeprefix(value)
    if len(target.path) > 2:
        segments[at + 1 :] = ["{path}"]
    return "/".join(segments)
