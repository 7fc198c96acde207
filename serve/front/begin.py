"""Where every request for a model's answer begins, whichever face it came by.

    find: model, version → trace → terms: deadline, priority → rights → admission → a call

Faces only translate: HTTP's requests and gRPC's calls hand over a `CallReply`, which is where the
answer goes, and get a `Call`, to which they give the body. So all are admitted and refused alike.
"""

import asyncio
import itertools
import math
import re
import secrets
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import monotonic
from typing import Any, Protocol
from urllib.parse import parse_qsl

from modelyard.base.explain_options import check_query
from modelyard.serve import errors
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import (
    CLASSES,
    HIGH,
    LOW,
    NORMAL,
    PREDICT,
    Call,
    Client,
    Reply,
    Stream,
    Target,
)
from modelyard.serve.dataplane.metrics import KINDS, Metrics
from modelyard.serve.dataplane.tracing import Attributes, Trace, Tracing
from modelyard.serve.dataplane.wire import Buffer

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, and values."""
Fields = Sequence[tuple[bytes, bytes]]
"""The same, not to be changed."""
Served = tuple[str, str] | None
"""Model and version that a request reached."""
Submit = Callable[[Sequence[Buffer]], None]
Release = Callable[[], None]
"""Called once, at the end of a request that counted until then."""
CheckRight = Callable[[str, Headers], None]
"""Called with a right and a request's headers; raises Forbidden unless it may do that too."""

TIME_HEADER = b"x-request-timeout"
PRIORITY_HEADER = b"x-request-priority"
_TIME = re.compile(rb"(\d*\.?\d+)(ms|s)?")
LONGEST_TIME_S = 86_400.0
BAD_NAME = re.compile(rb'[\x00-\x20\x7f-\xff()<>@,;:\[\]={}\\"]')
BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_PAGE = re.compile(rb"html|xml|multipart", re.IGNORECASE)
SANDBOX = (b"content-security-policy", b"sandbox allow-scripts")
"""Takes from a handler's page what browsers give to pages of this host; beside a policy of its
own, both hold."""
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
"""What of a client's own ids is taken."""
_RUN = str(uuid.uuid4())[:24]
_count = itertools.count(secrets.randbits(32))
"""A new id is a UUID whose last twelve digits count: a tenth of the cost of a random one."""


class ServerState:
    """Where the server is in its life; shared by all that must know."""

    is_starting = True
    """Models are being loaded; one that is not there yet may come."""
    is_draining = False
    """The server is being stopped; connections close with their answer."""


class Asked(Client, Protocol):
    """A request as its face has it, and what its end is told of it."""

    id: str
    headers: Headers
    served: Served
    trace_id: str
    release: Release | None
    """Called at its end: it counts no more among those that its token has at once."""

    def is_left(self) -> bool:
        """Return whether nobody waits for the answer any more."""


def let_everybody(right: str, headers: Headers) -> None:
    """Check nothing."""


class Extensions:
    """What plug-ins add to the Open Inference Protocol, whichever face a request came by."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Names that the server's metadata has beside its own."""
        self.calls: dict[str, Callable[[Mapping[str, Any], Headers], dict[str, Any]]] = {}
        """Call's name in gRPC → what answers its fields and headers, messages as JSON has them."""
        self.bring: Callable[[Call, Sequence[Buffer]], Sequence[Buffer]] | None = None
        """Returns the body of a call for tensors, with what of it lies elsewhere."""

    def submit(self, call: Call, parts: Sequence[Buffer], submit: Submit) -> None:
        """Submit a call for tensors, with all of them."""
        try:
            whole = parts if self.bring is None else self.bring(call, parts)
        except errors.ServeError as error:
            call.arrived(parts, monotonic())
            call.sink.set_exception(error)
        else:
            submit(whole)


@dataclass(eq=False)
class Front:
    """Makes calls of requests: the one implementation for every face and dialect."""

    registry: Registry
    metrics: Metrics
    state: ServerState
    """Shared with the server."""
    rephrase: Callable[[Exception, list[str]], Exception] = lambda error, path: error
    """Returns the dialect's error for one of ours, given the target's path."""
    tracing: Tracing | None = None
    """What traces requests; None where nobody asked for that."""
    check_right: CheckRight = let_everybody
    """Whether a request may have high priority, the right `priority`."""
    take_quota: Callable[[Headers], Release | None] | None = None
    """Counts a request among those of its token; raises QuotaUsed where it is one too many. None:
    nothing limits them."""

    def __post_init__(self) -> None:
        self.observer = self.metrics.observer
        self.extensions = Extensions()

    def begin(
        self,
        reply: "CallReply",
        *,
        timeout_s: float = math.inf,
        waited_s: float = 0.0,
        priority: int = NORMAL,
        began_at: float = 0.0,
        check: Callable[[ModelVersion], None] | None = None,
        expect: Callable[[float], None] | None = None,
    ) -> Call | None:
        """Return a request's call, which waits for its body; None where it was refused.

        Args:
            reply: what has the request, and takes the answer or the refusal.
            timeout_s: how long the client waits, as its protocol says; headers may say less.
            waited_s: how much of that has passed before the request was read.
            priority: its class, as its protocol says; a header goes before it.
            began_at: when the request came, by `time.monotonic()`.
            check: raises what is wrong with the request, once its model is known.
            expect: called with the time within which the client wants its answer.

        Raises:
            ModelNotFound, VersionNotFound, Unavailable: there is no such model, or not yet.
        """
        asked, target, trace = reply.asked, reply.target, None
        model = reply.model = self.find(target, asked.id, asked.headers)
        asked.served = model.name, model.version
        if self.tracing is not None:
            trace = reply.trace = self.tracing.begin(
                asked.headers, began_at or monotonic(), reply.describe, reply.describe_status
            )
            asked.trace_id = trace.id if trace is not None else asked.trace_id
        try:
            if check is not None:
                check(model)
            timeout_s, priority = reply.terms(timeout_s, priority)
            if priority == HIGH:
                self.check_high(asked.headers)
            must_fit = model.config.refuses_late or timeout_s < math.inf
            timeout_s = min(timeout_s, model.config.request_timeout_s)
            if expect is not None:
                expect(timeout_s)
            if target.kind == PREDICT and model.answers is None:
                # Before there is a call, or a body: a refusal is to cost little.
                model.batchers[PREDICT].check(
                    timeout_s, must_fit, monotonic(), waited_s, priority=priority
                )
            if self.take_quota is not None:
                asked.release = self.take_quota(asked.headers)
        except (
            errors.BadRequest,
            errors.Forbidden,
            errors.Unavailable,
            errors.UnknownCoding,
        ) as error:
            reply.fail(error, 0.0)
            return None
        call = reply.call = Call(
            model, target.kind, reply.head(), reply, timeout_s - waited_s, asked.is_left,
            target.flags, must_fit, trace, priority, asked,
        )  # fmt: skip
        if model.answers is not None:  # whose answer is there needs no place in a queue
            call.lookup = model.answers.lookup(asked.headers)
        return call

    def check_high(self, headers: Headers) -> None:
        """Raise Forbidden unless a request with these headers may go before others."""
        self.check_right("priority", headers)

    def count_unrouted(self, status: int) -> None:
        """Count the answer to a request that has become no call, by its HTTP status."""
        self.metrics["unrouted_requests"].count(str(status)).inc()

    def find(self, target: Target, id: str, headers: Headers) -> ModelVersion:
        """Return the model version that a request asks for, and take note of the request.

        Args:
            id: id of the request.
            headers: headers of it, which may decide between two versions.

        Raises:
            ModelNotFound, VersionNotFound, Unavailable: there is no such model, or not yet.
        """
        path = target.path
        version = (path[1] or None) if len(path) > 1 else None
        try:
            model = self.registry.get(path[0], version)
        except errors.ModelNotFound:
            model = find_model(self.registry, self.state, path[0], version)
        if splits := self.registry.splits:
            split = splits.get(model.name)
            if split is not None and target.kind == PREDICT and version is None:
                model = split.choose(id, headers)
        if self.observer is not None:
            self.observer.accepted(model.name, version)
        return model


def find_model(
    registry: Registry, state: ServerState, name: str, version: str | None = None
) -> ModelVersion:
    """Return a model version, the default one where none is named.

    Raises:
        ModelNotFound, VersionNotFound: there is none.
        Unavailable: nor is there one yet, while the server starts: clients ask again.
    """
    try:
        return registry.get(name, version)
    except errors.ModelNotFound as error:
        if not state.is_starting:
            raise
        which = f" in version {version}" if version else ""
        raise errors.Unavailable(
            f"the server is starting and has no model {name}{which} yet"
        ) from error


class CallReply:
    """Takes the reply to a call, counts it, and sends it on at once: a sink without a task.

    What sends it is of the face: `answer`, `refuse`, and what the worker and a trace are told.

    Args:
        asked: the request.
        target: what it asks for.
    """

    __slots__ = ("asked", "call", "front", "model", "target", "trace")
    model: ModelVersion
    """Known once the front has begun."""
    call: Call | None
    """Given up with the reply: the two hold each other, and what is left to the collector stops
    this process for it."""

    def __init__(self, front: Front, asked: Asked, target: Target) -> None:
        self.front = front
        self.asked = asked
        self.target = target
        self.trace: Trace | None = None

    def head(self) -> bytes:
        """Return what a worker needs of the request beside its body, as `pack_fields` packs it."""
        raise NotImplementedError

    def terms(self, timeout_s: float, priority: int) -> tuple[float, int]:
        """Return time and class of the request, given what its protocol says: see `read_terms`."""
        return read_terms(self.asked.headers, timeout_s, priority)

    def describe(self) -> tuple[str, Attributes]:
        """Return name and attributes of the request's span."""
        raise NotImplementedError

    def describe_status(self, status: int) -> Attributes:
        """Return what the span says of an answer, by its HTTP status."""
        raise NotImplementedError

    def answer(self, reply: Reply) -> None:
        """Send a worker's reply."""
        raise NotImplementedError

    def refuse(self, error: Exception) -> None:
        """Send an error."""
        raise NotImplementedError

    def describe_call(self) -> Attributes:
        """Return what a span says of a call, whatever its protocol."""
        return {
            "modelyard.model.name": self.model.name,
            "modelyard.model.version": self.model.version,
            "modelyard.model.digest": self.model.digest,
            "modelyard.kind": KINDS[self.target.kind],
            "modelyard.request.id": self.asked.id,
        }

    def move(self, call: Call) -> bool:
        """Take the reply of another version, if the client named none."""
        if self.target.version is not None:
            return False
        assert isinstance(call.model, ModelVersion)
        self.call, self.model = call, call.model
        self.asked.served = self.model.name, self.model.version
        return True

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
        call, self.call, trace = self.call, None, self.trace
        assert call is not None, "it has its reply"
        took_s = monotonic() - call.queued_at
        trace_id = trace.id if trace is not None else ""
        self.model.metrics.kinds[call.kind].answered(reply.status, took_s, trace_id)
        if (observer := self.front.observer) is not None and reply.status < 400:
            waited_s = call.taken_at - call.queued_at
            observer.inferred(self.model.name, self.target.version, waited_s, took_s)
        self.answer(reply)
        if trace is not None:
            stream = reply.body if isinstance(reply.body, Stream) else None
            trace.answered(call, reply.status, stream)

    def set_exception(self, error: Exception, /) -> None:
        """Count an error and send it."""
        call, self.call = self.call, None
        assert call is not None, "it has its reply"
        self.fail(error, monotonic() - call.queued_at, call)

    def fail(self, error: Exception, took_s: float, call: Call | None = None) -> None:
        """Count an error, after this time, and send it."""
        status = errors.http_status(error)[0]
        self.model.metrics.kinds[self.target.kind].answered(status, took_s)
        self.refuse(self.front.rephrase(error, self.target.path))
        if self.trace is not None:
            self.trace.failed(call, status, error)


class AwaitedReply(CallReply):
    """Hands the reply to a call to the task that waits for it."""

    __slots__ = ("_future",)

    def __init__(self, front: Front, asked: Asked, target: Target) -> None:
        super().__init__(front, asked, target)
        self._future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def answer(self, reply: Reply) -> None:
        """Hand a worker's reply on."""
        if not self._future.done():
            self._future.set_result(reply)
        elif isinstance(reply.body, Stream):
            reply.body.close()

    def refuse(self, error: Exception) -> None:
        """Hand an error on."""
        if not self._future.done():
            self._future.set_exception(error)

    async def wait(self) -> Reply:
        """Return the reply.

        Raises:
            ServeError: the request is refused, or there is no answer.
        """
        return await self._future


# -- what a request says of itself ---------------------------------------------------------------


def request_id(headers: Iterable[tuple[bytes, bytes]], pattern: re.Pattern[bytes] = REQUEST_ID
               ) -> str:  # fmt: skip
    """Return the client's own request id when it has this form, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and pattern.fullmatch(value):
            return value.decode()
    return f"{_RUN}{next(_count):012x}"


def read_terms(
    headers: Headers, timeout_s: float = math.inf, priority: int = NORMAL
) -> tuple[float, int]:
    """Return how long the client waits for an answer, in seconds, and the class of its request.

    Args:
        timeout_s: what its protocol says; infinite where it does not say.
        priority: what its protocol says, which goes before a header unless it is NORMAL.

    Raises:
        BadRequest: what it says is not a time, or not a class.
    """
    for name, value in headers:
        if name == TIME_HEADER:
            timeout_s = min(timeout_s, parse_timeout(value))
        elif name == PRIORITY_HEADER and priority == NORMAL:
            priority = parse_priority(value)
    return timeout_s, priority


def parse_priority(value: bytes) -> int:
    """Return the class that a value of X-Request-Priority names.

    Raises:
        BadRequest: it names none.
    """
    text = value.decode("ascii", "backslashreplace")
    if text not in CLASSES:
        raise errors.BadRequest(
            f'X-Request-Priority is "{text[:40]}"; expected one of {", ".join(CLASSES)}'
        )
    return CLASSES.index(text)


def class_of(number: int, default: int = NORMAL) -> int:
    """Return the class that a request's parameter `priority` names: 1 is the highest, 0 none.

    Source: Triton's schedule policy extension.
    """
    return min(number - 1, LOW) if number > 0 else default


def parse_timeout(value: bytes) -> float:
    """Return the seconds that a value of X-Request-Timeout says: `0.5`, `2s` or `150ms`.

    Raises:
        BadRequest: it is not a time, or none from above 0 to a day.
    """
    match = _TIME.fullmatch(value)
    seconds = float(match[1]) * (0.001 if match[2] == b"ms" else 1) if match else 0.0
    if not 0 < seconds <= LONGEST_TIME_S:
        seen = value[:40].decode("ascii", "backslashreplace")
        raise errors.BadRequest(
            f'X-Request-Timeout is "{seen}"; expected are seconds such as 0.5 or 2s, or '
            f"milliseconds such as 150ms, above 0 and at most {LONGEST_TIME_S:.0f} s"
        )
    return seconds


def check_options(query: bytes) -> None:
    """Refuse options of an explanation that no model takes, before a worker is started for it.

    Raises:
        BadRequest: says which, and what is expected.
    """
    try:
        check_query(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    except ValueError as error:
        raise errors.BadRequest(str(error)) from error


# -- what a worker is told, and answers ----------------------------------------------------------


def pack_fields(rest: bytes, query: bytes, id: str, headers: Sequence[bytes]) -> bytes:
    """Pack the rest of the path, the query, the request's id, and headers, name after value."""
    return wire.pack_meta((rest, query, id.encode(), *headers))


@lru_cache(maxsize=64)
def unpack_headers(packed: bytes) -> Fields:
    """Return the headers of a worker's answer, a tuple; most answers of a model have the same.

    What says how long an answer is, and whether the connection stays, is the server's own, and so
    is what a browser holds against the whole host. A page runs on an origin of its own.
    """
    fields = wire.unpack_meta(packed)
    headers = [
        (name, value)
        for name, value in zip(fields[::2], fields[1::2], strict=True)
        if not _is_the_servers(name.lower(), value)
    ]
    if any(name.lower() == b"content-type" and _PAGE.search(value) for name, value in headers):
        headers.append(SANDBOX)
    return tuple(headers)


def _is_the_servers(name: bytes, value: bytes) -> bool:
    """Return whether a handler's header is left out; one that is not HTTP is."""
    if name in wire.FRAMING or name in wire.OF_HOST or BAD_NAME.search(name):
        return True
    return BAD_VALUE.search(value) is not None or (name == b"set-cookie" and b"modelyard" in value)
