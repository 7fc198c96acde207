"""TorchServe's two APIs by gRPC, each on its own address; equal addresses share a server."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from grpc import StatusCode

from modelyard.plugins.grpc import health
from modelyard.plugins.grpc.oip import OPEN
from modelyard.plugins.grpc.rpc import Failure, GrpcServer, Method, Services
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.errors import Unauthorized
from modelyard.serve.front.face import Face
from modelyard.serve.http.application import Check
from modelyard.serve.http.connection import Access, Headers
from modelyard.serve.http.listener import Tls
from modelyard.serve.settings import Address, Settings


class Api(NamedTuple):
    """One API by gRPC."""

    name: str
    methods: Mapping[str, Method]
    """Methods by full name."""
    check: Check
    """Token check; it is given the full name of the method as path."""
    address: Address
    age_s: tuple[float, float]
    """Age at which its connections end, and their grace."""


class GrpcFace(Face):
    """The addresses of gRPC, bound.

    Args:
        apis: APIs, of which those with equal addresses share a server.
        is_ready: whether calls can be answered now.
        budget: counts the messages that the server holds.
        settings: settings whose limits hold.
        tls: returns certificate and key, for addresses with TLS.
        access: called with each call, for an access log.
    """

    def __init__(
        self,
        apis: Sequence[Api],
        is_ready: Callable[[], bool],
        budget: AnswerBudget,
        settings: Settings,
        tls: Tls | None,
        access: Access | None,
    ) -> None:
        servers: dict[Address, GrpcServer] = {}
        for address in dict.fromkeys(api.address for api in apis):
            here = [api for api in apis if api.address == address]
            served = Services(*_methods(here, is_ready), budget, settings.max_request_bytes, access)
            age_s = min(api.age_s for api in here)
            servers[address] = GrpcServer(served, address, settings, tls, age_s)
        self._servers = servers.values()
        self._urls = {f"grpc_{api.name}": servers[api.address].url for api in apis}

    @property
    def urls(self) -> Mapping[str, str]:
        """Where it listens."""
        return self._urls

    async def start(self) -> None:
        """Open the addresses."""
        for server in self._servers:
            await server.start()

    async def stop(self, timeout_s: float) -> None:
        """Take nothing new, and answer what was accepted."""
        await asyncio.gather(*(server.stop(timeout_s) for server in self._servers))


def _methods(apis: Sequence[Api], is_ready: Callable[[], bool]) -> tuple[dict[str, Method], Check]:
    """Return what answers on an address, and the check of its tokens.

    Each API has its own key; that of the first opens what is nobody's.
    """
    methods = {name: method for api in apis for name, method in api.methods.items()}
    checks = {name: api.check for api in apis for name in api.methods}
    names = sorted({method.split("/")[1] for method in methods})
    methods |= health.Health(names, is_ready).methods() | health.Reflection(names).methods()

    def check(method: str, headers: Headers) -> None:
        if method in OPEN or method in health.OPEN:
            return
        try:
            checks.get(method, apis[0].check)(method, headers)
        except Unauthorized as error:
            raise Failure(StatusCode.PERMISSION_DENIED, str(error)) from error

    return methods, check


def with_class(message: str, kind: str) -> str:
    """Return a status's text as TorchServe writes it: a message, and the name of a class of Java's.

    Args:
        kind: the class without its package, as `type` of an error by HTTP.
    """
    package = "archive.model" if "Model" in kind else "archive" if "Archive" in kind else "http"
    return f"{message}\norg.pytorch.serve.{package}.{kind}"
