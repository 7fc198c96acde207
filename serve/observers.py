"""What looks on at a server and may act beside its APIs: plug-ins of `modelyard.observers`."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from modelyard.base.plugins import registered
from modelyard.serve.control.register import Lifecycle, Report
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.http.application import Answers, Check, Route
from modelyard.serve.http.connection import Headers, RequestResponseCycle
from modelyard.serve.http.tokens import ACTOR, Grants

if TYPE_CHECKING:
    from fastapi import APIRouter


@dataclass(frozen=True)
class Host:
    """The server that an observer is made for.

    It hears of models by `registry.on_change`, of answers by `pool.on_answer` and a kind's
    `watcher`, of batches by `pool.on_batch`, decides who answers by `registry.splits`, is
    remembered by `registry.notes`, and exposes its metrics by `metrics.add`.
    """

    lifecycle: Lifecycle
    metrics: Metrics
    answers: Answers
    """The form of what the management API answers."""
    grants: Grants | None
    """Tokens that operators have; None asks for none."""
    may_register: bool = True
    """Whether operators may register and remove versions."""
    unlogged: Collection[str] = ()
    """Loggers whose lines are not the server's own log."""


class Observer(Protocol):
    """One plug-in's part in one server; its entry point is called with the `Host`.

    Requests of the management API for its `routers` have passed the token check; whatever it owns
    it checks itself.
    """

    routers: "Sequence[APIRouter]"

    def owns(self, path: str) -> bool:
        """Return whether it answers this path of the management API's port, whoever asks."""

    def __call__(self, cycle: RequestResponseCycle, id: str) -> None:
        """Answer a request for a path that it owns, now or from a task."""

    async def restore(self, report: Report) -> None:
        """Go on where the server ended, once its models are there again."""

    async def stop(self) -> None:
        """End, before the server's workers do."""


Make = Callable[[Host], Observer]


def make_observers(host: Host) -> list[Observer]:
    """Return the observers of a server, one of each plug-in that is installed."""
    made: list[Make] = [entry.load() for entry in registered("observers").values()]
    return [make(host) for make in made]


def with_observers(
    observers: Sequence[Observer], check: Check, route: Route, check_owned: Check | None = None
) -> tuple[Check, Route]:
    """Return token check and routes of a port on which observers answer what they own.

    Args:
        check_owned: comes before their own check; None where that is enough.
    """

    def find(path: str) -> Observer | None:
        return next((each for each in observers if each.owns(path)), None)

    def check_others(path: str, headers: Headers) -> None:
        ACTOR.set("anybody")
        checks = check if find(path) is None else check_owned
        if checks is not None:
            checks(path, headers)

    def route_all(cycle: RequestResponseCycle, id: str) -> None:
        (find(cycle.path) or route)(cycle, id)

    return check_others, route_all
