"""The face of `modelyard serve` that speaks gRPC, where `grpc_port` is set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelyard.base.extras import what_is_missing
from modelyard.serve.errors import StartError
from modelyard.serve.front.face import Inside
from modelyard.serve.front.models import why_not_ready
from modelyard.serve.http.application import Check, check_changes
from modelyard.serve.settings import Address

if TYPE_CHECKING:
    from modelyard.plugins.grpc.rpc import GrpcServer, Rpc


def make_face(inside: Inside) -> GrpcServer | None:
    """Return the face; None where the setting `grpc_port` is not set.

    Raises:
        StartError: grpcio is not installed, or the address cannot be bound.
    """
    settings = inside.settings
    if settings.grpc_port is None:
        return None
    if (missing := what_is_missing("grpc")) is not None:
        raise StartError(f"grpc_port is {settings.grpc_port}: {missing}")

    from modelyard.plugins.grpc import health, oip
    from modelyard.plugins.grpc.rpc import HTTP_STATUSES, GrpcServer, Services

    front = inside.front
    methods = oip.Inference(front, inside.repository).methods()
    services = (oip.SERVICE, health.HEALTH)
    methods |= health.Reflection(services).methods()
    methods |= health.Health(
        services, lambda: why_not_ready(front.registry, front.state) is None
    ).methods()

    check: Check = inside.checks["inference"](
        lambda path: "predict" if path in oip.PREDICTS else None,
        (*health.OPEN, *oip.OPEN),
    )
    if settings.allow_load:
        operators = inside.checks["management"](lambda _: "manage")
        check = check_changes(check, operators, oip.CHANGES.__contains__)

    def count(rpc: Rpc) -> None:
        """Count a call that asked for an answer, and has come to no model."""
        if not rpc.is_counted and rpc.method in oip.INFERS and rpc.code in HTTP_STATUSES:
            front.count_unrouted(HTTP_STATUSES[rpc.code])

    served = Services(
        methods, check, inside.budget, settings.max_request_bytes, inside.access, count
    )
    is_tls = settings.tls_cert is not None
    address = Address(settings.host, settings.grpc_port, None, is_tls, "--grpc-port")
    return GrpcServer(served, address, settings, inside.tls)
