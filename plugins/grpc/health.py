"""grpc.health.v1 and server reflection: what probes and tools ask of a gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto

from modelyard.plugins.grpc.oip import parse
from modelyard.plugins.grpc.protos import files, message, pool
from modelyard.plugins.grpc.rpc import Message, Method, Rpc, RpcError, Status

HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1.ServerReflection"
REFLECTION_ALPHA = "grpc.reflection.v1alpha.ServerReflection"
"""The same messages by the name that older tools ask for."""
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
LOOK_S = 1.0
"""From one look at the state to the next, for those who watch it."""


class Health:
    """The health service.

    Args:
        services: that are served.
        is_ready: whether calls can be answered now.
    """

    def __init__(self, services: Iterable[str], is_ready: Callable[[], bool]) -> None:
        self._services = frozenset(services)
        self._is_ready = is_ready

    def methods(self) -> dict[str, Method]:
        """Return the methods by full name."""
        return {f"/{HEALTH}/Check": self._check, f"/{HEALTH}/Watch": self._watch}

    def _status(self, service: str) -> int:
        if service and service not in self._services:
            return SERVICE_UNKNOWN
        return SERVING if self._is_ready() else NOT_SERVING

    def _check(self, rpc: Rpc) -> None:
        def reply(data: Message) -> None:
            service = parse("grpc.health.v1.HealthCheckRequest", data).service
            status = self._status(service)
            if status == SERVICE_UNKNOWN:
                raise RpcError(Status.NOT_FOUND, f"no service {service[:100]!r} is served here")
            rpc.reply(_status_message(status))

        rpc.unary(reply)

    def _watch(self, rpc: Rpc) -> None:
        def begin(data: Message) -> None:
            service = parse("grpc.health.v1.HealthCheckRequest", data).service
            last = -1

            def look() -> None:
                nonlocal last
                if rpc.is_over:
                    return
                status = self._status(service)
                if status != last:
                    last = status
                    rpc.send(_status_message(status))
                asyncio.get_running_loop().call_later(LOOK_S, look)

            look()

        rpc.unary(begin)


def _status_message(status: int) -> bytes:
    data: bytes = message("grpc.health.v1.HealthCheckResponse")(status=status).SerializeToString()
    return data


class Reflection:
    """Server reflection.

    Args:
        services: that are served.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = sorted({*services, REFLECTION})

    def methods(self) -> dict[str, Method]:
        """Return the methods by full name."""
        return {
            f"/{service}/ServerReflectionInfo": self._begin
            for service in (REFLECTION, REFLECTION_ALPHA)
        }

    def _begin(self, rpc: Rpc) -> None:
        def take(data: Message) -> None:
            request = parse("grpc.reflection.v1.ServerReflectionRequest", data)
            rpc.send(self._answer(request).SerializeToString())

        rpc.may_rest = True
        rpc.on_message = lambda data: rpc.guard(lambda: take(data))
        rpc.on_whole = rpc.finish

    def _answer(self, request: Any) -> Any:
        answer = message("grpc.reflection.v1.ServerReflectionResponse")(
            valid_host=request.host, original_request=request
        )
        asked = request.WhichOneof("message_request")
        if asked == "list_services":
            for name in self._services:
                answer.list_services_response.service.add(name=name)
            return answer
        try:
            if asked == "file_by_filename":
                found = _with_imports(request.file_by_filename)
            elif asked == "file_containing_symbol":
                symbol = pool().FindFileContainingSymbol(request.file_containing_symbol)
                found = _with_imports(symbol.name)
            else:
                raise KeyError(asked)
        except KeyError:
            answer.error_response.error_code = Status.NOT_FOUND
            answer.error_response.error_message = "not known here"
            return answer
        answer.file_descriptor_response.file_descriptor_proto.extend(found)
        return answer


def _with_imports(name: str) -> list[bytes]:
    """Return the descriptor of a file, and of all that it imports.

    Raises:
        KeyError: there is no such file.
    """
    known: dict[str, FileDescriptorProto] = {file.name: file for file in files().file}
    found: dict[str, bytes] = {}
    wanted = [name]
    while wanted:
        each = known[wanted.pop()]
        if each.name not in found:
            found[each.name] = each.SerializeToString()
            wanted += each.dependency
    return list(found.values())
