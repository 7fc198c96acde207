"""Traces of requests: which of them are sampled, and what their spans say.

Whether a request is traced is decided here, before OpenTelemetry does anything: that takes 0.4 µs,
four spans 400 with their export. Spans of waiting and of workers are made after the answer.
"""

import asyncio
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from modelyard.serve.dataplane.call import Call, Stream
from modelyard.serve.errors import StartError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanContext, Tracer

PARENT, STATE = b"traceparent", b"tracestate"
"""Headers of the W3C's Trace Context, https://www.w3.org/TR/trace-context/."""
MOST_STATE_BYTES = 512
CLOSE_S = 2.0
"""Time for the last spans to leave, when the server ends."""
DEFAULT_SAMPLER, DEFAULT_SHARE = "parentbased_traceidratio", 0.01
SAMPLERS: Mapping[str, tuple[bool, float | None]] = {
    "always_on": (False, 1.0),
    "always_off": (False, 0.0),
    "traceidratio": (False, None),
    "parentbased_always_on": (True, 1.0),
    "parentbased_always_off": (True, 0.0),
    "parentbased_traceidratio": (True, None),
}
"""Values of OTEL_TRACES_SAMPLER: whether a client's own choice goes first, and the share of the
others; None takes OTEL_TRACES_SAMPLER_ARG."""
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

Attributes = Mapping[str, str | int | float | bool]
Describe = Callable[[int], Attributes]
"""Returns what a protocol says of an answer, by its status in HTTP."""


class Parent(NamedTuple):
    """The span of a client that a request belongs to."""

    trace_id: int
    span_id: int
    flags: int
    state: str


def read_parent(headers: Iterable[tuple[bytes, bytes]]) -> Parent | None:
    """Return the parent that headers name; None where they name none, several, or a malformed one.

    Names are in lower case.
    """
    found: bytes | None = None
    state: list[bytes] = []
    for name, value in headers:
        if name == PARENT:
            if found is not None:
                return None
            found = value
        elif name == STATE:
            state.append(value)
    match = _PARENT.fullmatch(found) if found is not None else None
    if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    text = b",".join(state)
    kept = text.decode("latin-1") if len(text) <= MOST_STATE_BYTES else ""
    return Parent(trace_id, span_id, int(match[4], 16), kept)


def trace_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's trace, sampled or not; nothing where headers name none."""
    parent = read_parent(headers)
    return f"{parent.trace_id:032x}" if parent is not None else ""


@dataclass(frozen=True)
class Sampling:
    """Which requests are traced."""

    by_parent: bool = True
    """Whether a client that traces decides for its requests."""
    share: float = DEFAULT_SHARE
    """Share of the others."""

    def takes(self, parent: Parent | None) -> bool:
        """Return whether a request is traced."""
        if parent is None:
            return random.random() < self.share
        if self.by_parent:
            return bool(parent.flags & 1)  # whether the client's own trace is kept
        return (parent.trace_id & 0xFFFF_FFFF_FFFF_FFFF) < round(self.share * 2**64)


def read_sampling(environment: Mapping[str, str]) -> Sampling:
    """Return which requests OpenTelemetry's variables ask to trace.

    Raises:
        StartError: a value is wrong.
    """
    name = environment.get("OTEL_TRACES_SAMPLER") or DEFAULT_SAMPLER
    if name not in SAMPLERS:
        raise StartError(f"OTEL_TRACES_SAMPLER is {name!r}; expected one of {', '.join(SAMPLERS)}")
    by_parent, share = SAMPLERS[name]
    if share is not None:
        return Sampling(by_parent, share)
    text = environment.get("OTEL_TRACES_SAMPLER_ARG") or str(DEFAULT_SHARE)
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise StartError(f"OTEL_TRACES_SAMPLER_ARG is {text!r}; expected a number from 0 to 1")
    return Sampling(by_parent, share)


@dataclass(eq=False)
class Batch:
    """One batch of a worker that has a traced request in it."""

    worker_pid: int
    size: int
    traces: "list[Trace]" = field(default_factory=list)
    """Those of its requests that are traced."""


class Trace:
    """The spans of one request that is sampled.

    Args:
        tracer: tracer of OpenTelemetry.
        span: span of the whole request.
        began_at: when that began, by `time.monotonic()`.
        describe: description of the request's protocol.
    """

    def __init__(self, tracer: "Tracer", span: "Span", began_at: float, describe: Describe) -> None:
        self._tracer = tracer
        self._span = span
        self._describe = describe
        self._offset_ns = time.time_ns() - round(monotonic() * 1e9)
        self._batch: Batch | None = None
        self._replied_at = began_at
        self._queue_s = self._handler_s = 0.0
        context = span.get_span_context()
        self.context: SpanContext = context
        self.id = f"{context.trace_id:032x}"
        self.parent = f"00-{self.id}-{context.span_id:016x}-01".encode()
        """Value of `traceparent` for whoever goes on with the request."""

    def ran(self, batch: Batch, replied_at: float, queue_us: int, handler_us: int) -> None:
        """Take the batch that answered, and the times that its worker states."""
        batch.traces.append(self)
        self._batch, self._replied_at = batch, replied_at
        self._queue_s, self._handler_s = queue_us / 1e6, handler_us / 1e6

    def answered(self, call: Call, status: int, stream: Stream | None) -> None:
        """End with the answer, or with the last of its chunks."""
        if stream is not None:
            stream.on_close = lambda: self._end(status, _name(stream.error), call)
        else:
            self._end(status, "", call)

    def failed(self, call: Call | None, status: int, error: Exception) -> None:
        """End with an error; one of the client is none of the server."""
        self._end(status, _name(error) if status >= 500 else "", call)

    def left(self, call: Call | None) -> None:
        """End without an answer: the client has left."""
        self._end(0, "ClientLeft", call)

    def _end(self, status: int, error: str, call: Call | None) -> None:
        """Write the spans once this turn of the loop is over, when its batch is known."""
        asyncio.get_running_loop().call_soon(self._write, monotonic(), status, error, call)

    def _write(self, ended_at: float, status: int, error: str, call: Call | None) -> None:
        from opentelemetry.trace import Status, StatusCode

        if call is not None:
            self._write_parts(call)
            if call.retried:
                self._span.set_attribute("modelyard.retried", True)
        if status:
            self._span.set_attributes(self._describe(status))
        if error or status >= 500:
            self._span.set_attribute("error.type", error or str(status))
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(self._ns(ended_at))

    def _write_parts(self, call: Call) -> None:
        """Write the spans of waiting, of the batch, and of the handler's call in it."""
        batch, self._batch = self._batch, None  # the two hold each other
        if batch is None:
            if call.taken_at > call.queued_at:
                self._write_part("queue", call.queued_at, call.taken_at)
            return
        batch_at = min(call.taken_at + self._queue_s, self._replied_at)
        self._write_part(
            "queue", call.queued_at, batch_at, {"modelyard.worker.queue_s": self._queue_s}
        )
        others = [other.context for other in batch.traces if other is not self]
        about = {"modelyard.batch.size": batch.size, "modelyard.worker.pid": batch.worker_pid}
        self._write_part("batch", batch_at, self._replied_at, about, others)
        self._write_part("handler", batch_at, min(batch_at + self._handler_s, self._replied_at))

    def _write_part(
        self,
        name: str,
        began_at: float,
        ended_at: float,
        attributes: Attributes | None = None,
        links: "Sequence[SpanContext]" = (),
    ) -> None:
        from opentelemetry.trace import Link, set_span_in_context

        span = self._tracer.start_span(
            name,
            set_span_in_context(self._span),
            attributes=attributes,
            links=[Link(each) for each in links],
            start_time=self._ns(began_at),
        )
        span.end(self._ns(ended_at))

    def _ns(self, at: float) -> int:
        return round(at * 1e9) + self._offset_ns


def _name(error: Exception | None) -> str:
    return type(error).__name__ if error is not None else ""


class Tracing:
    """What traces the requests of one server.

    Args:
        provider: provider of OpenTelemetry; it keeps whatever it is given.
        sampling: which requests it is given.
    """

    def __init__(self, provider: "TracerProvider", sampling: Sampling) -> None:
        self._provider = provider
        self._sampling = sampling
        self._tracer = provider.get_tracer("modelyard", version("modelyard"))

    def begin(
        self,
        headers: Iterable[tuple[bytes, bytes]],
        began_at: float,
        about: Callable[[], tuple[str, Attributes]],
        describe: Describe,
    ) -> Trace | None:
        """Begin the trace of a request; None where it is not sampled.

        Args:
            headers: headers of the request, names in lower case.
            began_at: when it came, by `time.monotonic()`.
            about: returns the span's name and attributes.
            describe: what is added with the answer.
        """
        parent = read_parent(headers)
        if not self._sampling.takes(parent):
            return None
        from opentelemetry import trace

        context = None
        if parent is not None:
            above = trace.SpanContext(
                parent.trace_id,
                parent.span_id,
                is_remote=True,
                trace_flags=trace.TraceFlags(parent.flags),
                trace_state=trace.TraceState.from_header([parent.state]),
            )
            context = trace.set_span_in_context(trace.NonRecordingSpan(above))
        name, attributes = about()
        offset_ns = time.time_ns() - round(monotonic() * 1e9)
        span = self._tracer.start_span(
            name,
            # A context of its own: what this task belongs to is not the parent of a request.
            context or trace.set_span_in_context(trace.INVALID_SPAN),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
            start_time=round(began_at * 1e9) + offset_ns,
        )
        return Trace(self._tracer, span, began_at, describe)

    async def close(self) -> None:
        """Send what is left, as far as the time allows."""
        sending = Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        ends_at = monotonic() + CLOSE_S
        while sending.is_alive() and monotonic() < ends_at:
            await asyncio.sleep(0.02)


def open_tracing(environment: Mapping[str, str]) -> Tracing:
    """Return what traces requests and exports their spans, as OpenTelemetry's variables say.

    Raises:
        StartError: OpenTelemetry is not installed, or a variable asks for what is not there.
    """
    sampling = read_sampling(environment)
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (protocol := environment.get(name) or "http/protobuf") != "http/protobuf":
            raise StartError(f"{name} is {protocol!r}; spans are sent by http/protobuf alone")
    if (exporter := environment.get("OTEL_TRACES_EXPORTER") or "otlp") != "otlp":
        raise StartError(f"OTEL_TRACES_EXPORTER is {exporter!r}; spans are sent by otlp alone")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    except ModuleNotFoundError as error:
        raise StartError(
            f"the setting tracing needs {error.name}, which is not installed: "
            "pip install 'modelyard[otel]'"
        ) from error
    resource = Resource.create({"service.version": version("modelyard")})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "modelyard"}))
    provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider, sampling)
