"""The seam for faces: ways in that plug-ins add, by the entry points `modelyard.faces`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from modelyard.base.plugins import registered
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.repository import Repository
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.front.begin import Front
from modelyard.serve.settings import Settings

if TYPE_CHECKING:
    from fastapi import APIRouter

    from modelyard.serve.http.application import Answers, Check, Route, TokenCheck
    from modelyard.serve.http.connection import Access
    from modelyard.serve.http.listener import Tls


@dataclass(frozen=True)
class Inside:
    """What a server has that a face may use."""

    settings: Settings
    lifecycle: Lifecycle
    front: Front
    repository: Repository
    answers: Answers
    checks: Mapping[str, Callable[..., TokenCheck]]
    """What makes the token checks of the APIs `inference` and `management`."""
    budget: AnswerBudget
    tls: Tls | None
    access: Access | None


class Face(Protocol):
    """A way in beside the three APIs by HTTP, or more of one of them; translates, and no more.

    A module registers a `MakeFace`. A face that subclasses this one says only what it has.
    """

    @property
    def routes(self) -> Mapping[str, Sequence[APIRouter]]:
        """Routes that an API has too, by its name: `inference`, `management` or `metrics`."""
        return {}

    @property
    def urls(self) -> Mapping[str, str]:
        """Where it listens, by name, as the server says of itself; bound, but not open yet."""
        return {}

    def guard(self, api: str, check: Check) -> Check:
        """Return the token check of an API, which knows what the face's own paths need."""
        return check

    def route(self, api: str, route: Route) -> Route:
        """Return what answers an API's requests that are not calls: the face, or `route`."""
        return route

    async def start(self) -> None:
        """Open the addresses."""

    async def stop(self, timeout_s: float) -> None:
        """Take nothing new, and answer within this time what was accepted."""


MakeFace = Callable[[Inside], Face | None]
"""Builds a face, and binds its addresses; None where the settings ask for none.

It raises a StartError for what cannot be had.
"""


def make_faces(inside: Inside) -> list[Face]:
    """Return the faces that are registered and asked for.

    Raises:
        StartError: one cannot be had.
    """
    makes: list[MakeFace] = [entry.load() for entry in registered("faces").values()]
    return [face for make in makes if (face := make(inside)) is not None]
