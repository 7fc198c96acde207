"""grpc.health.v1 and server reflection: what probes and tools ask of a gRPC server.

Not grpcio's own packages: their health is told each change, ours asks; their reflection has only
the older of the two names, and wants a newer protobuf than we do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc import StatusCode

from modelyard.plugins.grpc.messages import parse
from modelyard.plugins.grpc.protos import files, message, pool
from modelyard.plugins.grpc.rpc import Failure, Method, Rpc

HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1.ServerReflection"
REFLECTION_ALPHA = "grpc.reflection.v1alpha.ServerReflection"
"""The same messages by the name that older tools ask for."""
OPEN = (f"/{HEALTH}/Check", f"/{HEALTH}/List", f"/{HEALTH}/Watch")
"""Probes, which carry no token."""
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
LOOK_S = 1.0
"""Time from one look at the state to the next, for those who watch it."""


class Health:
    """The health service.

    Args:
        services: services that are served.
        is_ready: whether calls can be answered now.
    """

    def __init__(self, services: Iterable[str], is_ready: Callable[[], bool]) -> None:
        self._services = frozenset(services)
        self._is_ready = is_ready

    def methods(self) -> dict[str, Method]:
        """Return the methods by full name."""
        return {
            f"/{HEALTH}/Check": Method(self._check),
            f"/{HEALTH}/List": Method(self._list),
            f"/{HEALTH}/Watch": Method(self._watch, is_stream=True),
        }

    def _status(self, service: str) -> int:
        if service and service not in self._services:
            return SERVICE_UNKNOWN
        return SERVING if self._is_ready() else NOT_SERVING

    async def _check(self, rpc: Rpc, data: bytes) -> bytes:
        service = parse("grpc.health.v1.HealthCheckRequest", data).service
        status = self._status(service)
        if status == SERVICE_UNKNOWN:
            raise Failure(StatusCode.NOT_FOUND, f"no service {service[:100]!r} is served here")
        return _status_message(status)

    async def _list(self, rpc: Rpc, data: bytes) -> bytes:
        status = message("grpc.health.v1.HealthCheckResponse")(status=self._status(""))
        answer = message("grpc.health.v1.HealthListResponse")()
        for service in ("", *self._services):
            answer.statuses[service].CopyFrom(status)
        listed: bytes = answer.SerializeToString()
        return listed

    async def _watch(self, rpc: Rpc) -> None:
        service = parse("grpc.health.v1.HealthCheckRequest", await rpc.read() or b"").service
        last = -1
        while True:
            status = self._status(service)
            if status != last:
                last = status
                await rpc.send(_status_message(status))
            await rpc.rest(asyncio.sleep(LOOK_S))


def _status_message(status: int) -> bytes:
    data: bytes = message("grpc.health.v1.HealthCheckResponse")(status=status).SerializeToString()
    return data


class Reflection:
    """Server reflection.

    Args:
        services: services that are served.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = sorted({*services, REFLECTION})

    def methods(self) -> dict[str, Method]:
        """Return the methods by full name."""
        return {
            f"/{service}/ServerReflectionInfo": Method(self._answer_each, is_stream=True)
            for service in (REFLECTION, REFLECTION_ALPHA)
        }

    async def _answer_each(self, rpc: Rpc) -> None:
        while (data := await rpc.read()) is not None:
            request = parse("grpc.reflection.v1.ServerReflectionRequest", data)
            await rpc.send(self._answer(request).SerializeToString())

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
            answer.error_response.error_code = StatusCode.NOT_FOUND.value[0]
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
