"""The inference API: predictions and explanations, HTTP's requests ↔ calls and replies.

Every request for an answer takes the same way, without a task: `begin` makes a call when the head
has come, the body submits it, and whoever has the reply writes the answer. It costs no FastAPI
machinery (1.5 µs instead of 80): `Application` takes it before routing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from time import monotonic
from typing import Protocol
from urllib.parse import parse_qsl

import orjson

from modelyard.base.explain_options import check_query
from modelyard.serve.api.events import (
    CHUNKS,
    EVENTS,
    GENERATE,
    GENERATE_STREAM,
    HEAD,
    INFER_STREAM,
    OF_BODY,
    PAUSE,
    Form,
    are_events,
    as_chunk,
    broken_text,
    error_event,
    is_text,
    wants_events,
    writer,
)
from modelyard.serve.api.health import find_model
from modelyard.serve.api.traces import begin_trace
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import (
    CLASSES,
    EXPLAIN,
    HIGH,
    LOW,
    MOST_UNREAD_BYTES,
    NORMAL,
    PREDICT,
    Call,
    Reply,
    Stream,
    Target,
)
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.dataplane.tracing import PARENT, Trace, Tracing
from modelyard.serve.dataplane.wire import MOST_ROWS, Buffer, Payload
from modelyard.serve.errors import (
    BadRequest,
    DeadlinePassed,
    Forbidden,
    ServeError,
    StreamBroken,
    Unavailable,
    UnknownCoding,
    http_status,
)
from modelyard.serve.http.application import Answers, Events, ServerState
from modelyard.serve.http.connection import Headers, RequestResponseCycle, Served

KINDS = {"predictions": PREDICT, "explanations": EXPLAIN}
METHODS = frozenset({"POST", "PUT"})
"""`curl -T` sends PUT."""
JSON: Headers = [(b"content-type", b"application/json")]
_SAID = {False: (b"content-type", b"application/json"),
         True: (b"content-type", b"application/json", b"accept", EVENTS)}  # fmt: skip
"""What a handler finds among the headers of a request whose answer has a form, by `is_stream`."""
TIME_HEADER = b"x-request-timeout"
PRIORITY_HEADER = b"x-request-priority"
_TIME = re.compile(rb"(\d*\.?\d+)(ms|s)?")
LONGEST_TIME_S = 86_400.0


def find_target(cycle: RequestResponseCycle) -> Target | None:
    """Return what a request asks a model for, by our paths; None for all other requests."""
    return target_of(cycle.path) if cycle.method in METHODS else None


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


OF_V2: Mapping[str, tuple[int, Form | None]] = {
    "infer": (wire.TENSORS, None),
    "infer_stream": (wire.TENSORS | wire.STREAM, INFER_STREAM),
    "generate": (0, GENERATE),
    "generate_stream": (0, GENERATE_STREAM),
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


GRPC_CALLS = frozenset({
    "/inference.GRPCInferenceService/ModelInfer",
    "/inference.GRPCInferenceService/ModelStreamInfer",
})  # fmt: skip


def right_of(path: str) -> str | None:
    """Return the right that a path, or a method of gRPC, needs; None where any token will do."""
    if path in GRPC_CALLS:
        return "predict"
    target = target_of(path)
    return None if target is None else ("explain" if target.kind == EXPLAIN else "predict")


def _as_it_is(error: Exception, path: list[str]) -> Exception:
    return error


CheckRight = Callable[[str, Headers], None]
"""Called with a right and a request's headers; raises Forbidden unless it may do that too."""


def let_everybody(right: str, headers: Headers) -> None:
    """Check nothing."""


class Calls:
    """Makes calls of requests and answers of replies: the one implementation of every dialect.

    Args:
        state: shared with the server.
        answers: their form.
        target: returns what a request asks a model for, by the dialect's paths.
        rephrase: returns the dialect's error for one of ours, given the target's path.
        takes_codings: whether compressed bodies go to handlers as they are.
        hides_tokens: whether handlers, whose authors are others, do not see Authorization.
        tracing: what traces requests; None where nobody asked for that.
        check_right: whether a request may have high priority, the right `priority`.
    """

    def __init__(
        self,
        registry: Registry,
        metrics: Metrics,
        state: ServerState,
        answers: Answers,
        target: Callable[[RequestResponseCycle], Target | None] = find_target,
        rephrase: Callable[[Exception, list[str]], Exception] = _as_it_is,
        takes_codings: bool = False,
        hides_tokens: bool = False,
        tracing: Tracing | None = None,
        check_right: CheckRight = let_everybody,
    ) -> None:
        self._check_right = check_right
        self._hides_tokens = hides_tokens
        self.tracing = tracing
        self._takes_codings = takes_codings
        self.target = target
        self._models = registry
        self._unrouted = metrics.unrouted
        self._state = state
        self.answers = answers
        self.rephrase = rephrase
        self.observer = metrics.observer

    def begin(self, cycle: RequestResponseCycle, id: str, target: Target) -> None:
        """Make a call that is submitted when its body is there.

        Raises:
            ModelNotFound, VersionNotFound, Unavailable: there is no such model, or not yet.
        """
        kind, path, flags, form = target
        model = self.find(target, id, cycle.headers)
        trace = None
        if self.tracing is not None:
            trace = begin_trace(self.tracing, cycle, id, model, target)
        cycle.served = model.name, model.version
        if trace is not None:
            cycle.trace_id = trace.id
        reply = DirectReply(self, cycle, id, model, target, trace)
        try:
            if kind == EXPLAIN and cycle.query and model.takes_our_options:
                check_options(cycle.query)
            takes_codings = self._takes_codings or flags & wire.TENSORS  # which the worker reads
            if cycle.coding and not takes_codings and cycle.coding.lower() != b"identity":
                raise UnknownCoding(cycle.coding)
            timeout_s, priority = read_terms(cycle.headers)
            if priority == HIGH:
                self.check_high(cycle.headers)
            must_fit = model.config.refuses_late or timeout_s < math.inf
            timeout_s = min(timeout_s, model.request_timeout_s)
            cycle.connection.turns.expect(timeout_s)
            waited_s = cycle.connection.waited_s
            if (
                kind == PREDICT and model.kept is None
            ):  # before there is a call, or a body: a refusal is to cost little
                model.batchers[kind].check(
                    timeout_s, must_fit, monotonic(), waited_s, priority=priority
                )
        except (BadRequest, Forbidden, Unavailable, UnknownCoding) as error:
            reply.fail(error, 0.0)
            return
        if self._hides_tokens:
            cycle.spelled = without_token(cycle.spelled)
        if form is not None:
            cycle.spelled = [*cycle.spelled, *_SAID[form.is_stream]]
        call = reply.call = Call(
            model,
            kind,
            pack_head(cycle, "/".join(path[2:]), id, trace),
            reply,
            timeout_s - waited_s,
            cycle.is_left,
            flags,
            must_fit,
            trace,
            priority,
        )
        if model.kept is not None:  # whose answer is there needs no place in a queue
            call.lookup = model.kept.lookup(cycle.headers)
        is_checked = kind == PREDICT and cycle.is_received and model.kept is None
        put = call.put if is_checked else call.submit
        if flags & wire.TENSORS:
            put = partial(put_tensors, call, self.check_high, cycle.headers)
        elif flags & wire.INSTANCES:
            put = partial(put_instances, call)
        cycle.read_body(put)

    @property
    def sends_events(self) -> bool:
        """Whether what handlers stream is sent as events to clients that ask for them."""
        return not self._takes_codings  # as TorchServe does not

    def check_high(self, headers: Headers) -> None:
        """Raise Forbidden unless a request with these headers may go before others."""
        self._check_right("priority", headers)

    def count_unrouted(self, status: int) -> None:
        """Count the answer to a request that has become no call."""
        self._unrouted.labels(str(status)).inc()

    def find(self, target: Target, id: str, headers: Headers) -> ModelVersion:
        """Return the model version that a request asks for, and take note of the request.

        Args:
            id: of the request.
            headers: of it, which may decide between two versions.

        Raises:
            ModelNotFound, VersionNotFound, Unavailable: there is no such model, or not yet.
        """
        model = find_model(self._models, self._state, target.path[0], target.version)
        if splits := self._models.splits:
            split = splits.get(model.name)
            if split is not None and target.kind == PREDICT and target.version is None:
                model = split.choose(id, headers)
        if self.observer is not None:
            self.observer.accepted(model.name, target.version)
        return model


class Carrier(Protocol):
    """What an answer is sent by: a request of HTTP, a call of gRPC."""

    served: Served
    """Model and version that answer, as logs and the answer's headers have it."""


class CallReply:
    """Takes the reply to a call, counts it, and sends it on at once: a sink without a task.

    What sends it is of the protocol: `answer` and `refuse`.
    """

    __slots__ = ("_calls", "_model", "_target", "call", "carrier", "trace")
    call: Call | None
    """Given up with the reply: the two hold each other, and what is left to the collector stops
    this process for it."""

    def __init__(
        self, calls: Calls, model: ModelVersion, target: Target, trace: Trace | None = None
    ) -> None:
        self._calls = calls
        self._model = model
        self._target = target
        self.trace = trace
        self.carrier: Carrier | None = None

    def move(self, call: Call) -> bool:
        """Take the reply of another version, if the client named none."""
        if self._target.version is not None or self.carrier is None:
            return False
        assert isinstance(call.model, ModelVersion)
        self.call, self._model = call, call.model
        self.carrier.served = self._model.name, self._model.version
        return True

    def answer(self, reply: Reply) -> None:
        """Send a worker's reply."""
        raise NotImplementedError

    def refuse(self, error: Exception) -> None:
        """Send an error."""
        raise NotImplementedError

    def done(self) -> bool:
        """Return whether it has its reply, or nobody waits for it any more."""
        return self.call is None

    def cancel(self) -> bool:
        """Note that nobody waits for it any more."""
        call, self.call = self.call, None
        if self.trace is not None:
            self.trace.left(call)
        return True

    def set_result(self, reply: Reply, /) -> None:
        """Count a reply and send it."""
        call, calls, model = self._take(), self._calls, self._model
        took_s = monotonic() - call.queued_at
        trace = self.trace
        trace_id = trace.id if trace is not None else ""
        model.metrics.kinds[call.kind].answered(reply.status, took_s, trace_id)
        if calls.observer is not None and reply.status < 400:
            waited_s = call.taken_at - call.queued_at
            calls.observer.inferred(model.name, self._target.version, waited_s, took_s)
        self.answer(reply)
        if trace is not None:
            stream = reply.body if isinstance(reply.body, Stream) else None
            trace.answered(call, reply.status, stream)

    def set_exception(self, error: Exception, /) -> None:
        """Count an error and send it."""
        call = self._take()
        self.fail(error, monotonic() - call.queued_at, call)

    def fail(self, error: Exception, took_s: float, call: Call | None = None) -> None:
        """Count an error, after this time, and send it."""
        kind, path = self._target.kind, self._target.path
        status = http_status(error)[0]
        self._model.metrics.kinds[kind].answered(status, took_s)
        self.refuse(self._calls.rephrase(error, path))
        if self.trace is not None:
            self.trace.failed(call, status, error)

    def _take(self) -> Call:
        call, self.call = self.call, None
        assert call is not None, "it has its reply"
        return call


class DirectReply(CallReply):
    """Sends the reply to a call on as soon as it is there, by HTTP."""

    __slots__ = ("_cycle", "_id")

    def __init__(
        self,
        calls: Calls,
        cycle: RequestResponseCycle,
        id: str,
        model: ModelVersion,
        target: Target,
        trace: Trace | None = None,
    ) -> None:
        super().__init__(calls, model, target, trace)
        self._cycle = self.carrier = cycle
        self._id = id

    def answer(self, reply: Reply) -> None:
        """Send a worker's reply."""
        headers = unpack_headers(reply.headers)
        form, body = self._target.form, reply.body
        if reply.note is not None:
            self._cycle.outcome = reply.note.outcome
            headers = [*headers, *reply.note.headers]
        if form is None and isinstance(body, Stream) and self._calls.sends_events:
            form = CHUNKS if wants_events(self._cycle.headers) and is_text(headers) else None
        if form is None or reply.status == 304 or reply.status >= 400 or are_events(headers):
            self._send(reply.status, headers, body)
            return
        write = writer(form, self._model.name, self._model.version, headers)
        own = [pair for pair in headers if pair[0] not in OF_BODY]
        if form.is_stream and isinstance(body, Stream):
            self._send(reply.status, [*own, *HEAD], Events(body, write, error_event, PAUSE))
        elif isinstance(body, Stream):
            self._cycle.run(self._gather(reply.status, own, body, write))
        else:
            if form is INFER_STREAM:
                body = as_chunk(body, headers)
            kind = HEAD if form.is_stream else JSON
            self._write(reply.status, [*own, *kind], body, write)

    def _send(self, status: int, headers: Headers, body: Payload | Stream | Events) -> None:
        self._calls.answers.send(self._cycle, self._id, status, headers, body)

    def _write(
        self, status: int, headers: Headers, body: Payload, write: Callable[[Payload], bytes]
    ) -> None:
        try:
            written = write(body)
        except ValueError as error:
            self.refuse(BadRequest(str(error)))
        else:
            self._send(status, headers, written)

    async def _gather(
        self, status: int, headers: Headers, stream: Stream, write: Callable[[Payload], bytes]
    ) -> None:
        """Send what a handler streams in one answer."""
        whole = bytearray()
        try:
            async for chunk in stream.read():
                whole += chunk
                if len(whole) > MOST_UNREAD_BYTES:
                    raise StreamBroken(f"the answer has more than {MOST_UNREAD_BYTES} bytes")
        except ServeError as error:
            self.refuse(StreamBroken(broken_text(str(error))))
        else:
            self._write(status, [*headers, *JSON], whole, write)
        finally:
            stream.close()

    def refuse(self, error: Exception) -> None:
        """Send an error."""
        self._cycle.is_refused = isinstance(error, Unavailable | DeadlinePassed)
        answers = self._calls.answers
        if isinstance(error, Unavailable):
            answers.send_refusal(self._cycle, self._id, error)
        else:
            answers.send(self._cycle, self._id, *answers.error(error, self._id))


_ROWS = re.compile(rb'"shape"\s*:\s*\[\s*(\d{1,9})\s*[],]')
_TIMEOUT = re.compile(rb'"parameters"\s*:\s*\{[^{}]*"timeout"\s*:\s*(\d{1,15})\s*[,}]')
_PRIORITY = re.compile(rb'"parameters"\s*:\s*\{[^{}]*"priority"\s*:\s*(\d{1,15})\s*[,}]')
LOOKED_AT_BYTES = 1 << 16
"""Of a body, for its rows, its time and its class: the worker reads all of it."""


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
            except Forbidden as error:
                call.arrived(parts, monotonic())
                call.sink.set_exception(error)
                return
    call.submit(parts)


def class_of(number: int, default: int = NORMAL) -> int:
    """Return the class that a request's parameter `priority` names: 1 is the highest, 0 none.

    Source: Triton's schedule policy extension.
    """
    return min(number - 1, LOW) if number > 0 else default


COUNTED_BYTES = 1 << 14
"""Of a body of instances that are counted one by one, which takes the server half a millisecond."""
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
            found = orjson.loads(body)
            return len(found["instances"])
        start = _FIRST.search(body[:COUNTED_BYTES])
        if start is None:
            return 0
        text = body[start.end() : start.end() + LOOKED_AT_BYTES].decode("latin-1")
        _, size = _DECODER.raw_decode(text)
        return round((len(body) - start.end()) / (size + 1))
    except (ValueError, TypeError, LookupError, RecursionError):
        return 0


def pack_head(cycle: RequestResponseCycle, rest: str, id: str, trace: Trace | None = None) -> bytes:
    """Pack what a worker needs of the request's head; `worker.codec` reads it.

    The handler of a traced request finds the server's span as its parent.
    """
    headers = cycle.spelled
    if trace is not None:
        pairs = zip(headers[::2], headers[1::2], strict=True)
        kept = (pair for pair in pairs if pair[0].lower() != PARENT)
        headers = [*(each for pair in kept for each in pair), PARENT, trace.parent]
    # The path is decoded already and may hold a NUL, which separates the fields.
    return pack_fields(rest.replace("\0", "%00").encode(), cycle.query, id, headers)


def without_token(spelled: list[bytes]) -> list[bytes]:
    """Return headers, name after value, but for Authorization."""
    pairs = zip(spelled[::2], spelled[1::2], strict=True)
    return [word for pair in pairs if pair[0].lower() != b"authorization" for word in pair]


def pack_fields(rest: bytes, query: bytes, id: str, headers: Sequence[bytes]) -> bytes:
    """Pack the rest of the path, the query, the request's id, and headers, name after value."""
    return wire.pack_meta((rest, query, id.encode(), *headers))


def check_options(query: bytes) -> None:
    """Refuse options of an explanation that no model takes, before a worker is started for it.

    Raises:
        BadRequest: says which, and what is expected.
    """
    try:
        check_query(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    except ValueError as error:
        raise BadRequest(str(error)) from error


def read_terms(headers: Headers) -> tuple[float, int]:
    """Return how long the client waits for an answer, in seconds, and the class of its request.

    The time is infinite where it does not say.

    Raises:
        BadRequest: what it says is not a time, or not a class.
    """
    timeout_s, priority = math.inf, NORMAL
    for name, value in headers:
        if name == TIME_HEADER:
            timeout_s = min(timeout_s, parse_timeout(value))
        elif name == PRIORITY_HEADER:
            priority = parse_priority(value)
    return timeout_s, priority


def parse_priority(value: bytes) -> int:
    """Return the class that a value of X-Request-Priority names.

    Raises:
        BadRequest: it names none.
    """
    text = value.decode("ascii", "backslashreplace")
    if text not in CLASSES:
        raise BadRequest(
            f'X-Request-Priority is "{text[:40]}"; expected one of {", ".join(CLASSES)}'
        )
    return CLASSES.index(text)


def parse_timeout(value: bytes) -> float:
    """Return the seconds that a value of X-Request-Timeout says: `0.5`, `2s` or `150ms`.

    Raises:
        BadRequest: it is not a time, or none from above 0 to a day.
    """
    match = _TIME.fullmatch(value)
    seconds = float(match[1]) * (0.001 if match[2] == b"ms" else 1) if match else 0.0
    if not 0 < seconds <= LONGEST_TIME_S:
        seen = value[:40].decode("ascii", "backslashreplace")
        raise BadRequest(
            f'X-Request-Timeout is "{seen}"; expected are seconds such as 0.5 or 2s, or '
            f"milliseconds such as 150ms, above 0 and at most {LONGEST_TIME_S:.0f} s"
        )
    return seconds


@lru_cache(maxsize=64)
def unpack_headers(packed: bytes) -> Headers:
    """Return the headers of a worker's answer; most answers of a model have the same. Read only.

    What says how long an answer is, and whether the connection stays, is the server's own.
    """
    fields = wire.unpack_meta(packed)
    pairs = zip(fields[::2], fields[1::2], strict=True)
    return [(name, value) for name, value in pairs if name.lower() not in wire.FRAMING]
