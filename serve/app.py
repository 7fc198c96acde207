"""Builds and connects the objects of a server."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass

from modelyard.serve.api.asgi import Phase
from modelyard.serve.api.docs import add_docs
from modelyard.serve.api.health import OPEN_PATHS, health_routes
from modelyard.serve.api.inference import Inference
from modelyard.serve.api.management import create_management
from modelyard.serve.api.metrics import create_metrics
from modelyard.serve.api.oip import oip_routes
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import Registry
from modelyard.serve.control.state import make_keys
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.http.auth import TokenCheck
from modelyard.serve.http.connection import Access, Application, Limits
from modelyard.serve.http.listener import Listener
from modelyard.serve.policy import Policy
from modelyard.serve.settings import Address, Settings


@dataclass(frozen=True)
class Server:
    """A server that is built and bound, but does not accept yet."""

    lifecycle: Lifecycle
    phase: Phase
    inference: Listener
    management: Listener
    metrics: Listener | None
    """None where nobody wants it."""

    @property
    def listeners(self) -> list[Listener]:
        """Each of them once, the inference API's first; APIs may share one."""
        all_three = (self.inference, self.management, self.metrics)
        return list(dict.fromkeys(listener for listener in all_three if listener))


def create_server(settings: Settings) -> Server:
    """Write new keys, build everything and bind the addresses.

    Raises:
        StartError: an address cannot be bound, or the keys cannot be written.
    """
    policy, metrics, registry, phase = Policy(settings), Metrics(), Registry(), Phase()
    lifecycle = Lifecycle(policy, registry, metrics)
    keys = make_keys(policy.state.key_file)
    is_open = settings.auth == "never" or (settings.auth == "auto" and settings.is_loopback)
    client_key = None if is_open else keys["inference"]
    operator_key = None if settings.auth == "never" else keys["management"]
    inference_api = Inference(
        registry, metrics, TokenCheck(client_key, OPEN_PATHS), phase, settings.max_request_bytes
    )
    inference_api.include_router(health_routes(registry, phase))
    inference_api.include_router(oip_routes(registry, phase))
    management_api = create_management(registry, lifecycle, TokenCheck(operator_key), phase)
    metrics_api = create_metrics(metrics, TokenCheck(client_key), phase)
    apis = (inference_api, management_api, metrics_api)
    inference, management, scraped = listen(zip(apis, settings.addresses, strict=True), settings)
    add_docs(
        inference_api, {management.url: management_api, scraped.url: metrics_api}, inference.url
    )
    return Server(lifecycle, phase, inference, management, scraped)


def listen(
    apis: Iterable[tuple[Application, Address]],
    settings: Settings,
    tls: ssl.SSLContext | None = None,
    access: Access | None = None,
) -> list[Listener]:
    """Bind every address, or none.

    Raises:
        StartError: an address cannot be bound.
    """
    limits = Limits(
        header_bytes=settings.max_header_bytes,
        head_timeout_s=settings.head_timeout_s,
        transfer_timeout_s=settings.transfer_timeout_s,
        keep_alive_s=settings.keep_alive_s,
        connections=settings.max_connections,
        body_bytes=settings.max_request_bytes,
    )
    listeners: list[Listener] = []
    try:
        for api, address in apis:
            is_first = not listeners
            listeners.append(Listener(api, address, limits, tls, access, is_first))
    except BaseException:
        for listener in listeners:
            listener.abandon()
        raise
    return listeners
