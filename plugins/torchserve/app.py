"""Builds a server that speaks TorchServe's dialect."""

import logging
from collections.abc import Callable

from modelyard.base.extras import what_is_missing
from modelyard.plugins.torchserve.configuration import read_tls
from modelyard.plugins.torchserve.dialect import Combined, Dialect, Scrape, dialect_answers
from modelyard.plugins.torchserve.inference import TorchServeInference, rephrase
from modelyard.plugins.torchserve.logs import ACCESS_LOG, MODEL_LOG, Logs, access_line
from modelyard.plugins.torchserve.management import TorchServeManagement
from modelyard.plugins.torchserve.metrics import TorchServeMetrics
from modelyard.plugins.torchserve.policy import TorchServePolicy
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.plugins.torchserve.tokens import Tokens
from modelyard.serve.api.oip import OPEN_PATHS
from modelyard.serve.app import Server, answer_budget, listen
from modelyard.serve.control.preload import start_fork_server
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import Registry
from modelyard.serve.control.repository import Repository
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.front.begin import Front, ServerState, let_everybody
from modelyard.serve.http.application import Check, changes_models, check_changes
from modelyard.serve.http.connection import Access
from modelyard.serve.http.listener import Listener, Tls
from modelyard.serve.observers import Host, make_observers
from modelyard.serve.settings import Address, Settings

logger = logging.getLogger(__name__)


def create_server(dialect: TorchServeSettings, logs: Logs | None, settings: Settings) -> Server:
    """Write new keys, build everything and bind the addresses; equal ones share a listener.

    Args:
        dialect: settings of the dialect alone.
        logs: what writes the lines of requests and metrics; None writes none.
        settings: settings of every server.

    Raises:
        StartError: an address cannot be bound, the keys cannot be written, or the metrics
            configuration cannot be read.
    """
    recorder = TorchServeMetrics(dialect, logs)
    observer = recorder if recorder.is_wanted else None
    metrics, registry, state = Metrics(recorder, observer), Registry(), ServerState()
    policy = TorchServePolicy(settings, dialect, recorder)
    budget = answer_budget(settings, policy)
    start_fork_server(policy)
    lifecycle = Lifecycle(policy, registry, metrics, budget)
    is_off = dialect.disable_token_authorization
    tokens = None if is_off else Tokens(dialect.directory, dialect.token_expiration_min)

    def check_at(address: Address, is_change: Callable[[str], bool] = changes_models) -> Check:
        """Return the token check of the inference API there, whose paths change models or not."""
        if tokens is None:
            return let_everybody
        is_open = is_off is None and address.is_loopback
        clients = tokens.check("inference", OPEN_PATHS, is_needed=not is_open)
        return check_changes(clients, tokens.check("management"), is_change)

    # Clients may reach what the port of the management API is not open to.
    open_to = (dialect.inference_address, dialect.grpc_addresses[0])
    is_safe = tokens is not None or all(address.is_loopback for address in open_to)
    repository = Repository(lifecycle, dialect.enable_model_api and is_safe, "enable_model_api")
    answers = dialect_answers(state, dialect, observer.answered if observer else None)
    answers.adds_error = dialect.has_tensors
    front, check = Front(registry, metrics, state, rephrase), check_at(dialect.inference_address)
    inference = TorchServeInference(front, check, answers, dialect, repository)
    grants = tokens.grants if tokens else None
    host = Host(lifecycle, metrics, answers, grants, dialect.enable_model_api, [MODEL_LOG])
    observers = make_observers(host)
    management = TorchServeManagement(
        lifecycle, observers, tokens, answers, dialect.enable_model_api
    )
    recorder.start()
    apis: list[Dialect] = [inference, management]
    if dialect.enable_metrics_api:
        scrapers = tokens.check("inference", is_needed=False) if tokens else let_everybody
        apis.append(Scrape(scrapers, metrics, dialect_answers(state, dialect)))
    lines = logs.lines(ACCESS_LOG) if logs else None
    access = lines(access_line) if lines else None

    limits = settings, budget, read_tls(dialect), access
    faces = []
    if (missing := what_is_missing("grpc")) is None:
        from modelyard.plugins.torchserve.grpc_face import GrpcFace

        faces.append(GrpcFace(inference, management, check_at, dialect, *limits))
    else:
        logger.warning("gRPC is not answered, %s", missing)
    listeners = _listen(apis, dialect, *limits)
    return Server(lifecycle, observers, state, *listeners, faces=faces)


def _listen(
    apis: list[Dialect],
    dialect: TorchServeSettings,
    settings: Settings,
    budget: AnswerBudget,
    tls: Tls | None,
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
    origins = [dialect.cors_allowed_origin] if dialect.cors_allowed_origin else []
    bound = listen(ports, settings, budget, tls, access, origins)
    listeners = dict(zip(groups, bound, strict=True))
    inference, management, *scraped = (listeners[address] for address in addresses)
    return inference, management, scraped[0] if scraped else None
