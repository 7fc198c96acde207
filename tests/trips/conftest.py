"""The digits model, served."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.live import LiveServer


@pytest.fixture(scope="module")
def server(
    shared_server: LiveServer, digits_store: Path, request: pytest.FixtureRequest
) -> LiveServer:
    """Serve archives of the digits model by the names of their formats, which the module states."""
    for archive in digits_store.glob("*.mar"):
        link = shared_server.store / archive.name
        link.unlink(missing_ok=True)
        link.symlink_to(archive)
    shared_server.register_all(*request.module.FORMATS, initial_workers=1)
    return shared_server


@pytest.fixture
def format(server: LiveServer, request: pytest.FixtureRequest) -> str:
    """Serve the digits model of a format, also of one that the module does not state."""
    name: str = request.param
    if server.management.get(f"/models/{name}").status_code == 404:
        server.register_all(name, initial_workers=1)
    return name
