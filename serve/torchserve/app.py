"""Builds a server that speaks TorchServe's dialect."""

from __future__ import annotations

from modelyard.serve.app import Server, answer_budget, listen
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import Registry
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.http.application import Check, ServerState, open_to_all
from modelyard.serve.http.connection import Access
from modelyard.serve.http.listener import Listener
from modelyard.serve.http.tls import watched_tls
from modelyard.serve.settings import Address, Settings
from modelyard.serve.torchserve.combined import Combined
from modelyard.serve.torchserve.dialect import Dialect, dialect_answers
from modelyard.serve.torchserve.inference import PROBES, TorchServeInference
from modelyard.serve.torchserve.log_config import ACCESS_LOG
from modelyard.serve.torchserve.logs import Logs, access_line
from modelyard.serve.torchserve.management import TorchServeManagement
from modelyard.serve.torchserve.metrics import TorchServeMetrics
from modelyard.serve.torchserve.policy import TorchServePolicy
from modelyard.serve.torchserve.scrape import Scrape
from modelyard.serve.torchserve.settings import TorchServeSettings
from modelyard.serve.torchserve.tokens import Tokens


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
    is_off = dialect.disable_token_authorization
    tokens = None if is_off else Tokens(dialect.directory, dialect.token_expiration_min)
    check: Check = open_to_all
    if tokens is not None and not (is_off is None and dialect.inference_address.is_loopback):
        check = tokens.check("inference", PROBES)
    answers = dialect_answers(state, dialect, observer.answered if observer else None)
    apis = [
        TorchServeInference(registry, metrics, check, state, answers, dialect).dialect,
        TorchServeManagement(
            registry, lifecycle, tokens, answers, dialect.enable_model_api
        ).dialect,
    ]
    recorder.start()
    if dialect.enable_metrics_api:
        apis.append(Scrape(metrics, dialect_answers(state, dialect)).dialect)
    lines = logs.lines(ACCESS_LOG) if logs else None
    access = lines.writer(access_line) if lines else None
    return Server(lifecycle, state, *_listen(apis, dialect, settings, budget, access))


def _listen(
    apis: list[Dialect],
    dialect: TorchServeSettings,
    settings: Settings,
    budget: AnswerBudget,
    access: Access | None,
) -> tuple[Listener, Listener, Listener | None]:
    addresses = dialect.addresses[: len(apis)]
    groups: dict[Address, list[Dialect]] = {}
    for api, address in zip(apis, addresses, strict=True):
        groups.setdefault(address, []).append(api)
    if addresses[0] == addresses[1]:  # such a port answers for all three
        groups[addresses[0]] = apis
    ports = [
        (Combined(group) if len(group) > 1 else group[0].application, address)
        for address, group in groups.items()
    ]
    tls = None
    if hosts := [address.host for address in groups if address.is_tls]:
        tls = watched_tls(
            hosts,
            dialect.certificate_file,
            dialect.private_key_file,
            dialect.keystore,
            dialect.keystore_pass,
        )
    origins = [dialect.cors_allowed_origin] if dialect.cors_allowed_origin else []
    bound = listen(ports, settings, budget, tls, access, origins)
    listeners = dict(zip(groups, bound, strict=True))
    inference, management, *scraped = (listeners[address] for address in addresses)
    return inference, management, scraped[0] if scraped else None
