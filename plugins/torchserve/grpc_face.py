"""TorchServe's two APIs by gRPC, each on its own address; equal addresses share a server."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from grpc import StatusCode

from modelyard.plugins.grpc import health, oip
from modelyard.plugins.grpc.rpc import Failure, GrpcServer, Method, Services
from modelyard.plugins.torchserve.grpc_inference import InferenceApi, open_inference
from modelyard.plugins.torchserve.grpc_management import ManagementApi
from modelyard.plugins.torchserve.inference import TorchServeInference
from modelyard.plugins.torchserve.management import TorchServeManagement
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.errors import Unauthorized
from modelyard.serve.front.begin import Front
from modelyard.serve.front.face import Face
from modelyard.serve.front.models import why_not_ready
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
        inference: the inference API by HTTP.
        management: the management API by HTTP.
        check_at: returns the token check of the inference API at an address.
        dialect: settings of the dialect.
        settings: settings whose limits hold.
        budget: counts the messages that the server holds.
        tls: returns certificate and key, for addresses with TLS.
        access: called with each call, for an access log.
    """

    def __init__(
        self,
        inference: TorchServeInference,
        management: TorchServeManagement,
        check_at: Callable[..., Check],
        dialect: TorchServeSettings,
        settings: Settings,
        budget: AnswerBudget,
        tls: Tls | None,
        access: Access | None,
    ) -> None:
        front, most_bytes = inference.front, dialect.max_response_size
        methods = InferenceApi(front, inference.is_healthy, most_bytes, budget).methods()
        if dialect.has_oip:
            described = oip.Inference(front, inference.repository).methods()
            methods |= open_inference(described, oip.SERVICE)
        operated = ManagementApi(management, inference.calls.answers).methods()
        (first, second), (age_s, other_age_s) = dialect.grpc_addresses, dialect.grpc_ages
        checks = check_at(first, oip.CHANGES.__contains__), management.check
        apis = [
            Api("inference", methods, checks[0], first, age_s),
            Api("management", operated, checks[1], second, other_age_s),
        ]
        servers: dict[Address, GrpcServer] = {}
        for address in {first: None, second: None}:
            here = [api for api in apis if api.address == address]
            served = Services(*_methods(here, front), budget, settings.max_request_bytes, access)
            ages_s = min(api.age_s for api in here)
            servers[address] = GrpcServer(served, address, settings, tls, ages_s)
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


def _methods(apis: Sequence[Api], front: Front) -> tuple[dict[str, Method], Check]:
    """Return what answers on an address, and the check of its tokens.

    Each API has its own key; that of the first opens what is nobody's.
    """
    methods = {name: method for api in apis for name, method in api.methods.items()}
    checks = {name: api.check for api in apis for name in api.methods}
    names = sorted({method.split("/")[1] for method in methods})

    def is_ready() -> bool:
        return why_not_ready(front.registry, front.state) is None

    methods |= health.Health(names, is_ready).methods() | health.Reflection(names).methods()

    def check(method: str, headers: Headers) -> None:
        if method in oip.OPEN or method in health.OPEN:
            return
        try:
            checks.get(method, apis[0].check)(method, headers)
        except Unauthorized as error:
            raise Failure(StatusCode.PERMISSION_DENIED, str(error)) from error

    return methods, check
