"""Traces: what is sampled, and what a collector gets, over OTLP with the real messages."""

from __future__ import annotations

import asyncio
import gzip
import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from modelyard.serve.api.inference import route_of
from modelyard.serve.dataplane.call import PREDICT, Target
from modelyard.serve.dataplane.tracing import (
    Parent,
    Sampling,
    open_tracing,
    read_parent,
    read_sampling,
)
from modelyard.serve.errors import StartError
from tests.serve.live import LiveServer, build_archive, poll, running

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


class Collector(http.server.ThreadingHTTPServer):
    """Takes OTLP over HTTP, as a collector does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Export)
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def of(self, trace_id: str, count: int = 4) -> dict[str, Span]:
        """Return the spans of a trace by name, once there are as many."""

        def found() -> dict[str, Span]:
            spans = {span.name: span for span in self.spans if span.trace_id.hex() == trace_id}
            return spans if len(spans) >= count else {}

        spans: dict[str, Span] = poll(found, f"{count} spans of {trace_id}")
        return spans


class Export(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers["content-encoding"] == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.resources.append(values(resource.resource.attributes))
            self.server.spans += [s for scope in resource.scope_spans for s in scope.spans]
        self.send_response(200)
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector
        collector.shutdown()


@contextmanager
def sending_spans(
    collector: Collector, folder: Path, *behaviours: str, settings: Mapping[str, Any] | None = None
) -> Iterator[LiveServer]:
    """Start a server that sends its spans, with a worker for each of these archives."""
    for behaviour in behaviours:
        build_archive(folder / "store", behaviour, config="minWorkers: 1\nbatchSize: 4\n")
    config = folder / "modelyard.yaml"
    config.write_text(json.dumps({"tracing": True, **(settings or {})}), encoding="utf-8")
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
            patch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
            patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
            serving = running(folder / "state", folder / "store", f"--config={config}")
            server = stack.enter_context(serving)
        server.register_all(*(f"{name}.mar" for name in behaviours))
        yield server


@pytest.fixture(scope="module")
def server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("tracing")
    with sending_spans(collector, folder, "echo", "gated", "picky", "streamer") as server:
        yield server


def traced(number: int) -> tuple[str, dict[str, str]]:
    """Return the id of a trace that nothing else has, and headers that begin it."""
    id = f"{number:032x}"
    return id, {"traceparent": f"00-{id}-{SPAN}-01", "TraceState": "vendor=1,other=a b"}


def test_a_traced_request_has_a_span_for_itself_the_queue_the_batch_and_the_handler(
    server: LiveServer, collector: Collector
) -> None:
    id, headers = traced(1)
    answer = server.predict("echo/1.0", "x", headers={**headers, "User-Agent": "test"})
    seen = answer.json()["headers"]
    spans = collector.of(id)
    call, queue, batch, handler = (
        spans[name] for name in ("POST /predictions/{model}/{version}", "queue", "batch", "handler")
    )
    assert call.parent_span_id.hex() == SPAN
    assert call.kind == Span.SPAN_KIND_SERVER
    assert {each.parent_span_id for each in (queue, batch, handler)} == {call.span_id}
    # The handler's own spans belong below ours; the state of other systems is passed on.
    assert seen["traceparent"] == f"00-{id}-{call.span_id.hex()}-01"
    assert seen["TraceState"] == "vendor=1,other=a b"
    about = values(call.attributes)
    host, port = server.address
    assert about.items() >= {
        "http.request.method": "POST",
        "http.route": "/predictions/{model}/{version}",
        "http.response.status_code": 200,
        "url.path": "/predictions/echo/1.0",
        "url.scheme": "http",
        "server.address": host,
        "server.port": port,
        "user_agent.original": "test",
        "modelyard.model.name": "echo",
        "modelyard.model.version": "1.0",
        "modelyard.kind": "predict",
        "modelyard.request.id": answer.headers["x-request-id"],
    }.items()  # fmt: skip
    assert values(batch.attributes) == {
        "modelyard.batch.size": 1,
        "modelyard.worker.pid": answer.json()["pid"],
    }
    began, ended = call.start_time_unix_nano, call.end_time_unix_nano
    assert began <= queue.start_time_unix_nano <= queue.end_time_unix_nano
    assert queue.end_time_unix_nano == batch.start_time_unix_nano <= batch.end_time_unix_nano
    assert handler.start_time_unix_nano == batch.start_time_unix_nano
    assert handler.end_time_unix_nano <= batch.end_time_unix_nano <= ended
    resource = collector.resources[0]
    named = {"service.name": "modelyard", "deployment.environment.name": "test"}
    assert resource.items() >= named.items()


def test_a_request_that_is_not_sampled_is_passed_on_as_it_came(
    server: LiveServer, collector: Collector
) -> None:
    seen = server.predict("echo", "x", headers={"traceparent": UNSAMPLED}).json()["headers"]
    assert seen["traceparent"] == UNSAMPLED
    assert "traceparent" not in server.predict("echo", "x").json()["headers"]
    id, headers = traced(2)
    server.predict("echo", "x", headers=headers)
    assert collector.of(id)
    assert not [span for span in collector.spans if span.trace_id.hex() == TRACE]


def test_requests_of_one_batch_link_each_other(
    server: LiveServer, collector: Collector, gate: Path, threads: ThreadPoolExecutor
) -> None:
    first = threads.submit(server.predict, "gated", str(gate))
    poll(gate.with_name("gate.began").exists, "the worker is busy")
    ids = [traced(number) for number in (3, 4)]
    both = [threads.submit(server.predict, "gated", "x", headers=sent) for _, sent in ids]
    poll(lambda: server.handed_over("gated") == 3, "both wait at the worker")
    in_flight = {"model": "gated", "kind": "predict"}
    assert server.metric("modelyard_requests_in_flight", **in_flight) == 3
    before = server.metric("modelyard_worker_busy_seconds_total", model="gated")
    gate.touch()
    assert {each.result().status_code for each in (first, *both)} == {200}
    assert server.metric("modelyard_worker_busy_seconds_total", model="gated") >= before > 0
    assert server.metric("modelyard_requests_in_flight", **in_flight) == 0
    (one, other), names = [collector.of(id) for id, _ in ids], "POST /predictions/{model}"
    for own, mate in ((one, other), (other, one)):
        assert values(own["batch"].attributes)["modelyard.batch.size"] == 2
        assert [link.span_id for link in own["batch"].links] == [mate[names].span_id]
        waited = own["queue"].end_time_unix_nano - own["queue"].start_time_unix_nano
        in_worker = values(own["queue"].attributes)["modelyard.worker.queue_s"]
        assert 0 < in_worker <= waited / 1e9


@pytest.mark.parametrize(
    ("number", "body", "status", "type"), [(5, "bad", 400, ""), (6, "broken", 500, "500")]
)
def test_only_what_the_server_is_to_blame_for_is_an_error(
    server: LiveServer, collector: Collector, number: int, body: str, status: int, type: str
) -> None:
    id, headers = traced(number)
    assert server.predict("picky", body, headers=headers).status_code == status
    call = collector.of(id)["POST /predictions/{model}"]
    assert values(call.attributes)["http.response.status_code"] == status
    assert values(call.attributes).get("error.type", "") == type
    assert (call.status.code == Status.STATUS_CODE_ERROR) is bool(type)


def test_a_streams_span_ends_with_its_last_chunk(
    server: LiveServer, collector: Collector, gate: Path
) -> None:
    id, headers = traced(7)
    path = "/predictions/streamer"
    with server.client.stream("POST", path, content=f"wait {gate}", headers=headers) as answer:
        chunks = answer.iter_raw()
        assert next(chunks)
        assert not [span for span in collector.spans if span.trace_id.hex() == id]
        gate.touch()
        assert list(chunks)
    spans = collector.of(id)
    assert spans["handler"].end_time_unix_nano > spans["handler"].start_time_unix_nano


def test_latency_has_the_trace_as_its_exemplar(server: LiveServer) -> None:
    id, headers = traced(9)
    server.predict("echo", "x", headers=headers)
    accept = {"Accept": "application/openmetrics-text; version=1.0.0,text/plain;q=0.5"}
    answer = server.metrics.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")
    (bucket,) = (line for line in answer.text.splitlines() if id in line)
    assert bucket.startswith("modelyard_request_latency_seconds_bucket{")
    assert 'model="echo"' in bucket


# -- what is sampled -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (SAMPLED, True),
        (f"01-{TRACE}-{SPAN}-01-more", True),
        (f"{SAMPLED}-more", False),
        (SAMPLED.upper(), False),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE}-{SPAN}", False),
        ("", False),
        ("x" * 5000, False),
    ],
)
def test_a_malformed_parent_is_none(value: str, found: bool) -> None:
    headers = [(b"traceparent", value.encode()), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    parent = Parent(int(TRACE, 16), int(SPAN, 16), 1, "a=1,b=2") if found else None
    assert read_parent(headers) == parent
    assert read_parent([*headers, headers[0]]) is None, "two of them"


@pytest.mark.parametrize(
    ("name", "argument", "sampling"),
    [
        (None, None, Sampling(True, 0.01)),
        ("always_on", None, Sampling(False, 1.0)),
        ("parentbased_always_off", "0.5", Sampling(True, 0.0)),
        ("traceidratio", "0.25", Sampling(False, 0.25)),
    ],
)
def test_the_sampler_is_opentelemetrys(
    name: str | None, argument: str | None, sampling: Sampling
) -> None:
    given = {"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument}
    assert read_sampling({k: v for k, v in given.items() if v is not None}) == sampling


def test_a_ratio_of_trace_ids_takes_the_same_ones_everywhere() -> None:
    half = Sampling(by_parent=False, share=0.5)
    low, high = Parent(1, 1, 0, ""), Parent(1 << 63, 1, 1, "")
    assert (half.takes(low), half.takes(high)) == (True, False)
    follows = Sampling(by_parent=True, share=0.0)
    assert (follows.takes(low), follows.takes(high), follows.takes(None)) == (False, True, False)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("OTEL_TRACES_SAMPLER", "jaeger_remote", "expected one of always_on, always_off"),
        ("OTEL_TRACES_SAMPLER_ARG", "1 %", "expected a number from 0 to 1"),
        ("OTEL_TRACES_SAMPLER_ARG", "nan", "expected a number from 0 to 1"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "spans are sent by http/protobuf alone"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "spans are sent by otlp alone"),
    ],
)
def test_a_variable_that_asks_for_what_is_not_there_is_refused(
    variable: str, value: str, said: str
) -> None:
    with pytest.raises(StartError, match=f"{variable} is '{value}'; .*{said}"):
        open_tracing({variable: value})


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(StartError, match=r"pip install 'modelyard\[otel\]'"):
        open_tracing({})


def test_the_last_spans_leave_before_the_server_ends(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)

    async def trace_one(id: str, close: Callable[[], Any]) -> None:
        headers = [(b"traceparent", f"00-{id}-{SPAN}-01".encode())]
        trace = tracing.begin(headers, monotonic(), lambda: ("one", {}), lambda status: {})
        assert trace is not None
        trace.failed(None, 503, StartError("x"))
        await asyncio.sleep(0)
        await close()

    tracing = open_tracing({})
    asyncio.run(trace_one(f"{10:032x}", tracing.close))
    span = collector.of(f"{10:032x}", 1)["one"]
    assert values(span.attributes)["error.type"] == "StartError"


@pytest.mark.parametrize(
    ("path", "target", "route"),
    [
        ("/predictions/m", ["m"], "/predictions/{model}"),
        ("/explanations/m/1.0", ["m", "1.0"], "/explanations/{model}/{version}"),
        ("/predictions/m/1.0/a/b", ["m", "1.0", "a", "b"], "/predictions/{model}/{version}/{path}"),
        ("/predictions/predictions", ["predictions"], "/predictions/{model}"),
        ("/v1/models/m:predict", ["m"], "/v1/models/{model}:predict"),
        ("/v2/models/models/infer", ["models"], "/v2/models/{model}/infer"),
        (
            "/v2/models/m/versions/1/infer",
            ["m", "1"],
            "/v2/models/{model}/versions/{version}/infer",
        ),
    ],
)
def test_a_route_names_no_model(path: str, target: list[str], route: str) -> None:
    assert route_of(path, Target(PREDICT, target)) == route
