"""Builds and connects the objects of a server."""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter

from modelyard.serve.api.description import DOCUMENT, described_calls
from modelyard.serve.api.inference import Calls, right_of
from modelyard.serve.api.management import management_routes, metrics_routes
from modelyard.serve.api.oip import OPEN_PATHS, health_routes, kserve_routes, oip_routes
from modelyard.serve.api.routes import DOCS_PATHS, Routes
from modelyard.serve.api.schemas import model_docs_routes
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import Registry
from modelyard.serve.control.repository import Repository
from modelyard.serve.control.state import make_keys
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.dataplane.tracing import Tracing, open_tracing
from modelyard.serve.dataplane.worker import frame_bytes
from modelyard.serve.errors import StartError
from modelyard.serve.front.begin import Front, ServerState
from modelyard.serve.front.face import Face, Inside, make_faces
from modelyard.serve.http.application import (
    Answers,
    Application,
    Check,
    Route,
    TokenCheck,
    check_changes,
)
from modelyard.serve.http.connection import Accepts, Access
from modelyard.serve.http.listener import Listener, Tls
from modelyard.serve.http.quotas import Quotas
from modelyard.serve.http.site import Cors, SiteCheck
from modelyard.serve.http.tokens import Grants, make_grant, parse_grants, read_token_file
from modelyard.serve.http.watched import Watched
from modelyard.serve.log import AccessLog
from modelyard.serve.observers import Host, Observer, make_observers, with_observers
from modelyard.serve.policy import Policy
from modelyard.serve.settings import Address, Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Server:
    """A server that is built and bound, but does not accept yet."""

    lifecycle: Lifecycle
    observers: Sequence[Observer]
    state: ServerState
    inference: Listener
    management: Listener
    metrics: Listener | None
    """None where nobody wants it."""
    tracing: Tracing | None = None
    access_log: AccessLog | None = None
    """None where no request is traced."""
    faces: Sequence[Face] = ()
    """Further ways in."""

    @property
    def listeners(self) -> list[Listener]:
        """Each of them once, the inference API's first; APIs may share one."""
        every = (self.inference, self.management, self.metrics)
        return list(dict.fromkeys(listener for listener in every if listener))


def create_server(
    policy: Policy, access: AccessLog | None = None, keys: Mapping[str, str] | None = None
) -> Server:
    """Write new keys, build everything and bind the addresses.

    Args:
        access: takes a line for each request.
        keys: those of other servers too, in place of new ones.

    Raises:
        StartError: an address cannot be bound, or the keys cannot be written.
    """
    settings, metrics, registry, state = policy.settings, Metrics(), Registry(), ServerState()
    budget = answer_budget(settings, policy)
    lifecycle = Lifecycle(policy, registry, metrics, budget)
    repository = Repository(lifecycle, settings.allow_load)
    grants = known_tokens(settings, keys or make_keys(policy.state.key_file))
    is_open, is_never = not settings.asks_for_tokens, settings.auth == "never"
    of_operators = None if is_never and settings.insecure else grants
    of_clients = None if settings.auth == "management" else of_operators
    clients_check = partial(TokenCheck, of_clients, is_open=is_open)
    operators_check = partial(TokenCheck, of_operators, is_open=is_never)
    cors = Cors(settings.allowed_origins) if settings.allowed_origins else None
    answers = Answers(state, cors=cors)
    observers = make_observers(Host(lifecycle, metrics, answers, None if is_never else grants))
    tracing = open_tracing(os.environ) if settings.tracing else None
    client = clients_check(right_of, frozenset((*OPEN_PATHS, *DOCS_PATHS)))
    take_quota = None
    if of_clients is not None and (settings.tokens or settings.token_file):
        take_quota = Quotas(of_clients, *settings.quota_place).take
    front = Front(registry, metrics, state, tracing=tracing, check_right=client.check_right,
                  take_quota=take_quota)  # fmt: skip
    calls = Calls(front, answers, hides_tokens=of_clients is not None)
    operator = operators_check(lambda _: "manage", DOCS_PATHS)
    check: Check = client
    if settings.allow_load:
        check = check_changes(check, operator)
    tls = None
    if (certificate := settings.tls_cert) is not None:
        from modelyard.serve.http.tls import watched_tls

        tls = watched_tls((), certificate, settings.tls_key)
    checks = {"inference": clients_check, "management": operators_check}
    faces = make_faces(
        Inside(settings, lifecycle, front, repository, answers, checks, budget, tls, access)
    )

    def more(api: str) -> list[APIRouter]:
        return [router for face in faces for router in face.routes.get(api, ())]

    clients = Routes(
        "Modelyard",
        DOCUMENT["description"],
        answers,
        described_calls(),
        health_routes(registry, state),
        *more("inference"),  # first: they have paths below those of a model's name
        oip_routes(front, repository),
        kserve_routes(registry, state),
        model_docs_routes(registry),
    )
    operators = Routes(
        "Modelyard management",
        "Register, scale and remove models.",
        answers,
        *(router for each in observers for router in each.routers),  # first: they say more
        management_routes(registry, lifecycle),
        *more("management"),
    )
    scraper = Routes(
        "Modelyard metrics",
        "Prometheus metrics.",
        answers,
        metrics_routes(metrics),
        *more("metrics"),
    )
    looked_on = with_observers(observers, operator, operators, operator if is_never else None)

    def application(name: str, check: Check, route: Route, calls: Calls | None = None
                    ) -> Application:  # fmt: skip
        for face in faces:
            check, route = face.guard(name, check), face.route(name, route)
        return Application(check, answers, route, calls)

    scrapers = clients_check(lambda _: "metrics", DOCS_PATHS)
    apis = (
        application("inference", check, clients, calls),
        application("management", *looked_on),
        application("metrics", scrapers, scraper),
    )
    served = zip(apis, settings.addresses, strict=True)
    inference, management, scraped = listen(
        served, settings, budget, tls, access, settings.allowed_origins
    )
    routes = {"inference": clients, "management": operators, "metrics": scraper}
    listeners = (inference, management, scraped)
    ports = {name: listener.address.port for name, listener in zip(routes, listeners, strict=True)}
    for name, api in routes.items():
        api.add_docs(name, ports)
        api.elsewhere = {other: (routes[other], ports[other]) for other in routes if other != name}
    logger.info("%s", settings.who_is_let_in)
    return Server(
        lifecycle, observers, state, inference, management, scraped, tracing, access, faces
    )


OWN_RIGHTS = {"management": "manage", "inference": "predict,explain,metrics,priority"}
"""Rights of the keys that each start makes."""


def known_tokens(settings: Settings, keys: Mapping[str, str]) -> Grants:
    """Return what returns the tokens that a server knows: its own keys, and those that stay.

    Raises:
        StartError: one that stays cannot be read.
    """
    own = [make_grant(f"serve-{api}", OWN_RIGHTS[api], key) for api, key in keys.items()]
    try:
        own += parse_grants(settings.tokens)
    except ValueError as error:
        raise StartError(f"the setting tokens: {error}") from error
    if (file := settings.token_file) is None:
        return lambda: own
    return Watched([file], lambda: (*own, *read_token_file(file))).get


def answer_budget(settings: Settings, policy: Policy) -> AnswerBudget:
    """Return the memory for answers and bodies; the longest of each has room in it."""
    return AnswerBudget(
        max(settings.response_memory_bytes, frame_bytes(policy.max_answer_bytes)),
        max(settings.request_memory_bytes, settings.max_request_bytes),
    )


def listen(
    apis: Iterable[tuple[Accepts, Address]],
    settings: Settings,
    budget: AnswerBudget,
    tls: Tls | None = None,
    access: Access | None = None,
    allowed_origins: Iterable[str] = (),
) -> list[Listener]:
    """Bind every address, or none.

    Args:
        apis: what answers where.
        settings: settings of every server.
        budget: budget of answers.
        tls: returns certificate and key, for addresses that ask for them.
        access: called with each answer, for an access log.
        allowed_origins: web pages of elsewhere that may call, as CORS writes them.

    Raises:
        StartError: an address cannot be bound.
    """
    listeners: list[Listener] = []
    try:
        for api, address in apis:
            is_first = not listeners
            site = SiteCheck(address, settings.allowed_hosts, tuple(allowed_origins))
            listeners.append(Listener(api, address, settings, tls, access, site, budget, is_first))
    except BaseException:
        for listener in listeners:
            listener.abandon()
        raise
    return listeners
