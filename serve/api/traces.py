"""What the span of a request says of it."""

from __future__ import annotations

from time import monotonic

from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane.call import Target
from modelyard.serve.dataplane.metrics import KINDS
from modelyard.serve.dataplane.tracing import Attributes, Trace, Tracing
from modelyard.serve.http.connection import RequestResponseCycle


def begin_trace(
    tracing: Tracing, cycle: RequestResponseCycle, id: str, model: ModelVersion, target: Target
) -> Trace | None:
    """Begin the trace of a request that came by HTTP; None where it is not sampled.

    Names and attributes are those of OpenTelemetry's conventions for HTTP.
    """

    def about() -> tuple[str, Attributes]:
        route = route_of(cycle.path, target)
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
            **describe_call(model, target, id),
        }

    began_at = cycle.began or monotonic()
    return tracing.begin(cycle.headers, began_at, about, _describe_status)


def _describe_status(status: int) -> Attributes:
    return {"http.response.status_code": status}


def describe_call(model: ModelVersion, target: Target, id: str) -> Attributes:
    """Return what a span says of a call, whatever its protocol."""
    return {
        "modelyard.model.name": model.name,
        "modelyard.model.version": model.version,
        "modelyard.model.digest": model.digest,
        "modelyard.kind": KINDS[target.kind],
        "modelyard.request.id": id,
    }


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
        elif segments[at].startswith(f"{value}:"):  # KServe's /v1/models/digits:predict
            segments[at] = name + segments[at].removeprefix(value)
    if len(target.path) > 2:
        segments[at + 1 :] = ["{path}"]
    return "/".join(segments)
