"""The one place that builds and connects the server's objects."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass

from modelyard.serve.address import Address
from modelyard.serve.api.asgi import Api, Check, Phase, open_to_all
from modelyard.serve.api.docs import add_docs
from modelyard.serve.api.health import OPEN_PATHS, health_routes
from modelyard.serve.api.inference import Inference
from modelyard.serve.api.management import create_management
from modelyard.serve.api.metrics import create_metrics
from modelyard.serve.api.oip import oip_routes
from modelyard.serve.control.lifecycle import Lifecycle
from modelyard.serve.control.registry import Registry
from modelyard.serve.control.state import StateDir, make_keys
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.http.auth import TokenCheck
from modelyard.serve.http.connection import Access, Limits
from modelyard.serve.http.listener import Listener
from modelyard.serve.http.tls import tls_context
from modelyard.serve.settings import Settings
from modelyard.serve.torchserve.combined import Combined
from modelyard.serve.torchserve.dialect import Dialect
from modelyard.serve.torchserve.inference import PROBES, TorchServeInference
from modelyard.serve.torchserve.logs import log_access
from modelyard.serve.torchserve.management import TorchServeManagement
from modelyard.serve.torchserve.scrape import Scrape
from modelyard.serve.torchserve.settings import TorchServeSettings
from modelyard.serve.torchserve.tokens import Tokens

Application = Api | Dialect | Combined


@dataclass(frozen=True)
class Server:
    """A server that is built and bound, but does not accept yet."""

    lifecycle: Lifecycle
    registry: Registry
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
    metrics = Metrics(settings.torchserve)
    registry = Registry()
    lifecycle = Lifecycle(settings, registry, metrics)
    phase = Phase()
    if settings.torchserve is not None:
        inference, management, scraped = _torchserves_listeners(
            settings, settings.torchserve, metrics, registry, lifecycle, phase
        )
    else:
        inference, management, scraped = _our_listeners(
            settings, metrics, registry, lifecycle, phase
        )
    return Server(lifecycle, registry, phase, inference, management, scraped)


def _our_listeners(
    settings: Settings, metrics: Metrics, registry: Registry, lifecycle: Lifecycle, phase: Phase
) -> tuple[Listener, Listener, Listener]:
    keys = make_keys(StateDir(settings.state_dir).key_file)
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
    inference_api.include_router(oip_routes(registry, phase))
    management_api = create_management(registry, lifecycle, TokenCheck(operator_key), phase)
    metrics_api = create_metrics(metrics, TokenCheck(client_key), phase)
    apis = (inference_api, management_api, metrics_api)
    inference, management, scraped = _listen(
        zip(apis, settings.addresses, strict=True), _limits(settings)
    )
    add_docs(
        inference_api,
        {management.url: management_api, scraped.url: metrics_api},
        inference.url,
    )
    return inference, management, scraped


def _torchserves_listeners(
    settings: Settings,
    dialect: TorchServeSettings,
    metrics: Metrics,
    registry: Registry,
    lifecycle: Lifecycle,
    phase: Phase,
) -> tuple[Listener, Listener, Listener | None]:
    """Bind the addresses of TorchServe's dialect; APIs with equal addresses share a listener."""
    wanted = dialect.disable_token_authorization
    tokens = None if wanted else Tokens(dialect.directory, dialect.token_expiration_min)
    check: Check = open_to_all
    if tokens is not None and not (wanted is None and settings.is_loopback):
        check = tokens.check("inference", PROBES)
    apis: list[Dialect] = [
        TorchServeInference(registry, metrics, check, phase, settings, dialect),
        TorchServeManagement(registry, lifecycle, tokens, phase, settings, dialect),
    ]
    if metrics.torchserve is not None:
        for api in apis:
            api.on_status = metrics.torchserve.answered
        metrics.torchserve.start()
    if dialect.enable_metrics_api:
        apis.append(Scrape(metrics, phase, dialect, settings.max_request_bytes))
    addresses = settings.addresses[: len(apis)]
    groups: dict[Address, list[Dialect]] = {}
    for api, address in zip(apis, addresses, strict=True):
        groups.setdefault(address, []).append(api)
    if addresses[0] == addresses[1]:  # such a port answers for all three
        groups[addresses[0]] = apis
    ports = [
        (Combined(group) if len(group) > 1 else group[0], address)
        for address, group in groups.items()
    ]
    hosts = [address.host for address in groups if address.is_tls]
    tls = (
        tls_context(
            hosts,
            dialect.certificate_file,
            dialect.private_key_file,
            dialect.keystore,
            dialect.keystore_pass,
        )
        if hosts
        else None
    )
    listeners = dict(zip(groups, _listen(ports, _limits(settings), tls, log_access), strict=True))
    found = [listeners[address] for address in addresses]
    return found[0], found[1], found[2] if len(found) > 2 else None


def _limits(settings: Settings) -> Limits:
    return Limits(
        header_bytes=settings.max_header_bytes,
        head_timeout_s=settings.head_timeout_s,
        transfer_timeout_s=settings.transfer_timeout_s,
        keep_alive_s=settings.keep_alive_s,
        connections=settings.max_connections,
        body_bytes=settings.max_request_bytes,
    )


def _listen(
    apis: Iterable[tuple[Application, Address]],
    limits: Limits,
    tls: ssl.SSLContext | None = None,
    access: Access | None = None,
) -> list[Listener]:
    """Bind every address, or none."""
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
