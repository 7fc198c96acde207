"""How the server's objects are built."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelyard.serve.app import Server, create_server
from modelyard.serve.control.state import StateDir
from modelyard.serve.policy import Policy
from modelyard.serve.settings import Settings


def watch_inits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[type, object]]:
    """Return a list that every `__init__` of `serve` writes its class and its object to."""
    seen: list[tuple[type, object]] = []

    def watch(kind: type, init: Any) -> Any:
        def watched(self: object, *args: Any, **more: Any) -> None:
            seen.append((kind, self))
            init(self, *args, **more)

        return watched

    for name, module in list(sys.modules.items()):
        if name.startswith("modelyard.serve."):
            for kind in list(vars(module).values()):
                if isinstance(kind, type) and kind.__module__ == name and "__init__" in vars(kind):
                    monkeypatch.setattr(kind, "__init__", watch(kind, vars(kind)["__init__"]))
    return seen


def check_build(build: Callable[[], Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """Build a server, and fail where an object of it was initialised twice."""
    seen = watch_inits(monkeypatch)

    async def run() -> None:
        for listener in build().listeners:
            listener.abandon()

    asyncio.run(run())
    assert len(seen) > 10
    times = Counter((kind.__qualname__, id(made)) for kind, made in seen)
    assert [kind for (kind, _), count in times.items() if count > 1] == []


def settings_in(folder: Path) -> Settings:
    """Return the settings of a server on free ports."""
    state = folder / "state"
    settings = Settings(port=0, management_port=0, metrics_port=0, state_dir=state)
    StateDir(settings.state_dir).create()
    return settings


def test_every_object_is_initialised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_in(tmp_path)
    check_build(lambda: create_server(Policy(settings)), monkeypatch)
