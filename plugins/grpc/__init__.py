"""gRPC: messages in streams of HTTP/2, and the services that answer them.

Nothing of it is imported before the first client speaks HTTP/2: most servers never see one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelyard.plugins.grpc.http2 import Stream
    from modelyard.plugins.grpc.rpc import Rpc, Services
    from modelyard.serve.api.inference import Calls
    from modelyard.serve.control.registry import Registry
    from modelyard.serve.control.repository import Repository
    from modelyard.serve.http.application import Check, ServerState
    from modelyard.serve.http.connection import Access

OPEN_METHODS = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
)
"""Probes carry no token."""


class LazyServices:
    """Services that are made for the first client.

    Args:
        make: called once.
    """

    def __init__(self, make: Callable[[], Services]) -> None:
        self._make = make
        self._made: Services | None = None

    def accept(self, stream: Stream) -> None:
        """Begin to answer a call."""
        if self._made is None:
            self._made = self._make()
        self._made.accept(stream)


def services(
    calls: Calls, registry: Registry, state: ServerState, repository: Repository, check: Check,
    most_bytes: int, access: Access | None = None,
) -> Services:  # fmt: skip
    """Return what answers on the inference API: inference, health and reflection.

    Args:
        check: the token check; it is given the full name of the method as path.
        most_bytes: longest message.
    """
    from modelyard.plugins.grpc.health import HEALTH, Health, Reflection
    from modelyard.plugins.grpc.oip import SERVICE, Inference, error_of
    from modelyard.plugins.grpc.rpc import HTTP_STATUSES, Services
    from modelyard.serve.api.health import why_not_ready
    from modelyard.serve.api.inference import GRPC_CALLS

    def check_token(rpc: Rpc) -> None:
        try:
            check(rpc.method, rpc.metadata)
        except Exception as error:
            raise error_of(error) from error

    def count(rpc: Rpc) -> None:
        """Count a call that asked for an answer, and has come to no model."""
        if not rpc.is_counted and rpc.method in GRPC_CALLS and rpc.status in HTTP_STATUSES:
            calls.count_unrouted(HTTP_STATUSES[rpc.status])

    names = (SERVICE, HEALTH)
    methods = {
        **Inference(calls, registry, state, repository).methods(),
        **Health(names, lambda: why_not_ready(registry, state) is None).methods(),
        **Reflection(names).methods(),
    }
    return Services(methods, check_token, most_bytes, access, count)
