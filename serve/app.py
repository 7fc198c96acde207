"""The one place that builds and connects the server's objects."""

from __future__ import annotations

from dataclasses import dataclass

from serve.api.asgi import Phase
from serve.api.docs import add_docs
from serve.api.health import OPEN_PATHS, health_routes
from serve.api.inference import Inference
from serve.api.management import create_management
from serve.api.metrics import create_metrics
from serve.auth import TokenCheck
from serve.lifecycle import Lifecycle
from serve.listener import Listener
from serve.metrics import Metrics
from serve.registry import Registry
from serve.settings import Settings
from serve.tls import tls_context
from serve.torchserve.logs import log_access

DOCS_PATHS = ("/docs", "/openapi.json")


@dataclass(frozen=True)
class Server:
    """A server that is built and bound, but does not accept yet."""

    lifecycle: Lifecycle
    registry: Registry
    phase: Phase
    inference: Listener
    management: Listener
    metrics: Listener

    @property
    def listeners(self) -> tuple[Listener, Listener, Listener]:
        """All three, the inference API's first."""
        return self.inference, self.management, self.metrics


def create_server(settings: Settings, keys: dict[str, str]) -> Server:
    """Build everything and bind the three addresses.

    Args:
        settings: what the server was told.
        keys: the bearer token of each API.

    Raises:
        StartError: an address cannot be bound.
    """
    metrics = Metrics(settings.torchserve)
    registry = Registry()
    lifecycle = Lifecycle(settings, registry, metrics)
    phase = Phase()
    is_open = settings.auth == "never" or (settings.auth == "auto" and settings.is_loopback)
    client_key = None if is_open else keys["inference"]
    operator_key = None if settings.auth == "never" else keys["management"]

    inference_api = Inference(
        registry,
        metrics,
        TokenCheck(client_key, OPEN_PATHS),
        phase,
        settings.max_request_bytes,
    )
    inference_api.include_router(health_routes(registry, phase))
    management_api = create_management(registry, lifecycle, TokenCheck(operator_key), phase)
    metrics_api = create_metrics(metrics, TokenCheck(client_key), phase)

    if metrics.torchserve is not None:
        inference_api.on_status = management_api.on_status = metrics.torchserve.answered
        metrics.torchserve.start()

    listeners: list[Listener] = []
    access, tls = None, None
    if (own := settings.torchserve) is not None:
        access = log_access
        if any(address.is_tls for address in settings.addresses):
            tls = tls_context(own)
    try:
        apis = (inference_api, management_api, metrics_api)
        for api, address in zip(apis, settings.addresses, strict=True):
            listeners.append(Listener(api, address, tls, access))
    except BaseException:
        for listener in listeners:
            listener.abandon()
        raise
    inference, management, scraped = listeners
    add_docs(
        inference_api,
        {management.url: management_api, scraped.url: metrics_api},
        inference.url,
    )
    return Server(lifecycle, registry, phase, inference, management, scraped)
