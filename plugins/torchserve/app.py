"""Builds a server that speaks TorchServe's dialect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from modelyard.plugins.grpc import LazyServices
from modelyard.plugins.ops.console.build import build_console
from modelyard.plugins.ops.rollout.control import Rollouts
from modelyard.plugins.torchserve.combined import Combined
from modelyard.plugins.torchserve.configuration import read_tls
from modelyard.plugins.torchserve.dialect import Dialect, dialect_answers, refuse_http
from modelyard.plugins.torchserve.inference import PROBES, TorchServeInference, has_tensors
from modelyard.plugins.torchserve.log_config import ACCESS_LOG, MODEL_LOG
from modelyard.plugins.torchserve.logs import Logs, access_line
from modelyard.plugins.torchserve.management import TorchServeManagement
from modelyard.plugins.torchserve.metrics import TorchServeMetrics
from modelyard.plugins.torchserve.policy import TorchServePolicy
from modelyard.plugins.torchserve.scrape import Scrape
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.plugins.torchserve.tokens import Tokens
from modelyard.serve.api.health import why_not_ready
from modelyard.serve.app import Server, answer_budget, listen
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import Registry
from modelyard.serve.control.repository import Repository
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.http.application import (
    Answers,
    Application,
    Check,
    ServerState,
    open_to_all,
)
from modelyard.serve.http.auth import check_changes
from modelyard.serve.http.connection import Access
from modelyard.serve.http.listener import Listener
from modelyard.serve.settings import Address, Settings

if TYPE_CHECKING:
    from modelyard.plugins.grpc.rpc import Services


def create_server(dialect: TorchServeSettings, logs: Logs | None, settings: Settings) -> Server:
    """Write new keys, build everything and bind the addresses; equal ones share a listener.

    Args:
        dialect: settings of the dialect alone.
        logs: what writes the lines of requests and metrics; None writes none.
        settings: of every server.

    Raises:
        StartError: an address cannot be bound, the keys cannot be written, or the metrics
            configuration cannot be read.
    """
    recorder = TorchServeMetrics(dialect, logs)
    observer = recorder if recorder.is_wanted else None
    metrics, registry, state = Metrics(recorder, observer), Registry(), ServerState()
    policy = TorchServePolicy(settings, dialect, recorder)
    budget = answer_budget(settings, policy)
    lifecycle = Lifecycle(policy, registry, metrics, budget)
    rollouts = Rollouts(lifecycle, metrics)
    is_off = dialect.disable_token_authorization
    tokens = None if is_off else Tokens(dialect.directory, dialect.token_expiration_min)

    def check_at(address: Address) -> Check:
        """Return the token check of the inference API there."""
        if tokens is None:
            return open_to_all
        is_open = is_off is None and address.is_loopback
        clients = tokens.check("inference", PROBES, is_needed=not is_open)
        return check_changes(clients, tokens.check("management"))

    # Clients may reach what the port of the management API is not open to.
    faces = (dialect.inference_address, dialect.grpc_addresses[0])
    is_safe = tokens is not None or all(address.is_loopback for address in faces)
    repository = Repository(lifecycle, dialect.enable_model_api and is_safe, "enable_model_api")
    answers = dialect_answers(state, dialect, observer.answered if observer else None)
    answers.adds_error = has_tensors(dialect)
    inference = TorchServeInference(
        registry, metrics, check_at(dialect.inference_address), state, answers, dialect, repository
    )
    console = build_console(
        lifecycle,
        None,
        inference.calls,
        tokens.grants if tokens else None,
        answers,
        settings,
        may_unregister=dialect.enable_model_api,
        unlogged=[MODEL_LOG],
    )
    management = TorchServeManagement(
        registry, lifecycle, rollouts, tokens, answers, dialect.enable_model_api, console
    )
    recorder.start()
    apis = [inference.dialect, management.dialect]
    if dialect.enable_metrics_api:
        apis.append(Scrape(metrics, dialect_answers(state, dialect)).dialect)
    lines = logs.lines(ACCESS_LOG) if logs else None
    access = lines.writer(access_line) if lines else None

    def streams(spoken: Sequence[Dialect], address: Address) -> LazyServices:
        """Return what answers gRPC at an address, for these of the first two APIs."""

        def make() -> Services:
            from modelyard.plugins.torchserve.grpc_services import Face, services

            faces = []
            if inference.dialect in spoken:
                faces.append(Face(inference.rpc_methods(), check_at(address)))
            if management.dialect in spoken:
                faces.append(Face(management.rpc_methods(), management.check))
            most_bytes = settings.max_request_bytes
            return services(
                faces, lambda: why_not_ready(registry, state) is None, most_bytes, access
            )

        return LazyServices(make)

    listeners = _listen(apis, streams, answers, dialect, settings, budget, access)
    return Server(lifecycle, rollouts, state, *listeners[:3], more=listeners[3])


def _listen(
    apis: list[Dialect],
    streams: Callable[[Sequence[Dialect], Address], LazyServices],
    answers: Answers,
    dialect: TorchServeSettings,
    settings: Settings,
    budget: AnswerBudget,
    access: Access | None,
) -> tuple[Listener, Listener, Listener | None, Sequence[Listener]]:
    addresses = dialect.addresses[: len(apis)]
    groups: dict[Address, list[Dialect]] = {}
    for api, address in zip(apis, addresses, strict=True):
        groups.setdefault(address, []).append(api)
    if addresses[0] == addresses[1]:  # such a port answers for all three
        groups[addresses[0]] = apis
    ports = {
        address: Combined(group) if len(group) > 1 else group[0].application
        for address, group in groups.items()
    }
    spoken = {
        address: [api for api in group if api in apis[:2]] for address, group in groups.items()
    }
    for api, address in zip(apis[:2], dialect.grpc_addresses, strict=True):
        if address not in ports:
            ports[address] = Application(open_to_all, answers, refuse_http)
        if api not in spoken.setdefault(address, []):
            spoken[address].append(api)
    for address, port in ports.items():
        port.streams = streams(spoken[address], address) if spoken[address] else None
    tls = read_tls(dialect)
    origins = [dialect.cors_allowed_origin] if dialect.cors_allowed_origin else []
    ages: dict[Address, tuple[float, float]] = {}
    for address, age in zip(dialect.grpc_addresses, dialect.grpc_ages, strict=True):
        ages[address] = min(age, ages.get(address, age))
    bound = listen([(port, at) for at, port in ports.items()], settings, budget, tls, access,
                   origins, ages)  # fmt: skip
    listeners = dict(zip(ports, bound, strict=True))
    inference, management, *scraped = (listeners[address] for address in addresses)
    more = [listeners[address] for address in dialect.grpc_addresses]
    return inference, management, scraped[0] if scraped else None, more
