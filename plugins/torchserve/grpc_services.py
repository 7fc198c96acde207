"""What answers gRPC on one port of the dialect: TorchServe's services, and what probes ask for.

Imported, with all that it needs, when the first client speaks HTTP/2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from modelyard.plugins.grpc import OPEN_METHODS
from modelyard.plugins.grpc.health import Health, Reflection
from modelyard.plugins.grpc.rpc import Method, Rpc, RpcError, Services, Status
from modelyard.serve.errors import Unauthorized
from modelyard.serve.http.application import Check
from modelyard.serve.http.connection import Access


class Face(NamedTuple):
    """One API on a port."""

    methods: Mapping[str, Method]
    """By full name."""
    check: Check
    """Of its tokens; it is given the full name of the method as path."""


def services(
    faces: Sequence[Face], is_ready: Callable[[], bool], most_bytes: int, access: Access | None
) -> Services:
    """Return what answers on a port.

    Args:
        faces: each with its own key; that of the first opens what is nobody's.
        is_ready: whether calls can be answered now.
        most_bytes: longest message.
        access: called with each call, for an access log.
    """
    methods = {name: method for face in faces for name, method in face.methods.items()}
    checks = {name: face.check for face in faces for name in face.methods}
    names = sorted({method.split("/")[1] for method in methods})
    methods |= Health(names, is_ready).methods() | Reflection(names).methods()

    def check(rpc: Rpc) -> None:
        if rpc.method in OPEN_METHODS:
            return
        try:
            checks.get(rpc.method, faces[0].check)(rpc.method, rpc.metadata)
        except Unauthorized as error:
            raise RpcError(Status.PERMISSION_DENIED, str(error)) from error

    return Services(methods, check, most_bytes, access)


def with_class(message: str, kind: str) -> str:
    """Return a status's text as TorchServe writes it: a message, and the name of a class of Java's.

    Args:
        kind: the class without its package, as `type` of an error by HTTP.
    """
    package = "archive.model" if "Model" in kind else "archive" if "Archive" in kind else "http"
    return f"{message}\norg.pytorch.serve.{package}.{kind}"
