"""What writes the trail: a server's versions, workers and defaults, and what others tell of."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from modelyard.plugins.audit.chain import Trail, check_head
from modelyard.serve.control.register import Report
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.control.state import StateDir
from modelyard.serve.errors import ServeError
from modelyard.serve.http.connection import RequestResponseCycle
from modelyard.serve.http.tokens import ACTOR
from modelyard.serve.observers import Host

if TYPE_CHECKING:
    from fastapi import APIRouter

logger = logging.getLogger(__name__)

NOTE = "audit"
"""What the server's state file calls the trail's head."""
PROTECTS = ("returned", "failed", "aborted", "not registered")
"""Kinds of events that take something away: they happen whether or not they can be recorded."""


def file_of(state: StateDir) -> Path:
    """Return the trail's file."""
    return state.root / "audit.jsonl"


class Known(NamedTuple):
    """What is compared with what it was when the trail last looked."""

    least: int
    most: int
    is_default: bool


class Audit:
    """The `Observer` of one server."""

    routers: Sequence[APIRouter] = ()

    def __init__(self, host: Host) -> None:
        self._state = host.lifecycle.policy.state
        self._registry = host.lifecycle.registry
        self._trail: Trail | None = None
        self._known: dict[tuple[str, str], Known] = {}
        self._registry.on_change.append(self._changed)
        self._registry.on_event.append(self._told)

    def owns(self, path: str) -> bool:
        """Answer nothing."""
        return False

    def __call__(self, cycle: RequestResponseCycle, id: str) -> None:
        """Answer nothing."""

    async def restore(self, report: Report) -> None:
        """Open the trail, and write how it was found and what is served at the start."""
        file, registry = file_of(self._state), self._registry
        noted = registry.notes.get(NOTE)
        try:
            trail = self._trail = Trail(file)
        except OSError as error:
            raise ServeError(f"cannot write the audit trail {file}: {error.strerror}") from error
        found = trail.found
        broken = found.broken or (check_head(found, noted(), "the state file") if noted else "")
        if found.torn:
            text = f"a last line of {len(found.torn)} bytes was half written, and is taken out"
            self._append("the server", "repaired", text=text)
        if broken:
            logger.error("the audit trail %s does not hold: %s", file, broken)
            self._append("the server", "broken", text=broken)
        served = [{"model": model.name, **_describe(model)} for model in registry]
        self._append("the server", "started", served=served[:100], versions=len(served))
        self._known = self._look()
        registry.notes[NOTE] = self._note

    async def stop(self) -> None:
        """Write that the server ends, in good order."""
        if self._trail is not None:
            self._append("the server", "stopped")
            self._trail.close()
            self._trail = None

    # -- what happens ----------------------------------------------------------------------------

    def _changed(self, model: ModelVersion, is_there: bool) -> None:
        """Record a version that comes, which may be refused for it, or that has gone."""
        what = "registered" if is_there else "unregistered"
        self._record(what, not is_there, model=model.name, **_describe(model))
        if not is_there:
            self._known.pop((model.name, model.version), None)

    def _told(self, event: Mapping[str, Any]) -> None:
        said = {name: each for name, each in event.items() if name not in ("kind", "page")}
        self._record(event["kind"], event["kind"] in PROTECTS, **said)

    def _note(self) -> dict[str, Any]:
        """Record what else changes, before it is saved; return the head, which is saved with it."""
        now = self._look()
        for (name, version), each in now.items():
            before = self._known.get((name, version))
            if before is not None and before[:2] != each[:2]:
                counts = {"workers": [each.least, each.most], "before_it": [*before[:2]]}
                self._record("scaled", False, model=name, version=version, **counts)
            if each.is_default and (before is None or not before.is_default):
                self._record("default", False, model=name, version=version)
        self._known = now
        return self._trail.head.to_json() if self._trail is not None else {}

    def _look(self) -> dict[tuple[str, str], Known]:
        registry = self._registry
        return {
            (model.name, model.version): Known(
                model.pool.least, model.pool.most, registry.is_default(model)
            )
            for model in registry
        }

    def _record(self, what: str, must_go_on: bool, **more: Any) -> None:
        """Write an entry.

        Args:
            must_go_on: whether what happened stands where it cannot be written.

        Raises:
            ServeError: it could not be written, and what is to happen does not.
        """
        if self._trail is None:  # the start is one entry
            return
        try:
            self._append(ACTOR.get(), what, **more)
        except ServeError as error:
            if not must_go_on:
                raise
            logger.error("%s", error)

    def _append(self, who: str, what: str, **more: Any) -> None:
        assert self._trail is not None
        try:
            self._trail.append(who, what, **more)
        except (OSError, TypeError, ValueError) as error:
            file, reason = self._trail.file, getattr(error, "strerror", None) or error
            raise ServeError(f"cannot write the audit trail {file}: {reason}") from error


def _describe(model: ModelVersion) -> dict[str, Any]:
    return {"version": model.version, "file": model.file, "sha256": model.digest}
