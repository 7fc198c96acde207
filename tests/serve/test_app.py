"""How the server's objects are built."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from modelyard.plugins.torchserve import app as torchserve
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve import app
from modelyard.serve.control.state import StateDir
from modelyard.serve.settings import Address, Settings

HERE = Address("127.0.0.1", 0)


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


@pytest.mark.parametrize("is_torchserve", [False, True], ids=["ours", "torchserve"])
@pytest.mark.parametrize("is_one_port", [False, True], ids=["ports", "one port"])
def test_every_object_is_initialised_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_torchserve: bool, is_one_port: bool
) -> None:
    dialect = TorchServeSettings(
        directory=tmp_path,
        inference_address=HERE,
        management_address=HERE if is_one_port else Address("127.0.0.2", 0),
        metrics_address=HERE if is_one_port else Address("127.0.0.3", 0),
        grpc_inference_port=0,
        grpc_management_port=0,
    )
    settings = Settings(
        port=0,
        management_port=0,
        metrics_port=0,
        state_dir=tmp_path / "state",
    )
    StateDir(settings.state_dir).create()
    seen = watch_inits(monkeypatch)

    async def build() -> None:
        if is_torchserve:
            server = torchserve.create_server(dialect, None, settings)
        else:
            server = app.create_server(settings)
        for listener in server.listeners:
            listener.abandon()

    asyncio.run(build())
    assert len(seen) > 10
    times = Counter((kind.__qualname__, id(made)) for kind, made in seen)
    assert [kind for (kind, _), count in times.items() if count > 1] == []
