"""The digits model, served."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.live import LiveServer


@pytest.fixture(scope="module")
def server(shared_server: LiveServer, digits_store: Path) -> LiveServer:
    """Serve the three archives of the digits model, each under its artifact's format."""
    names = []
    for archive in digits_store.glob("*.mar"):
        link = shared_server.store / archive.name
        link.unlink(missing_ok=True)
        link.symlink_to(archive)
        names.append(archive.stem)
    shared_server.register_all(*names, initial_workers=1)
    return shared_server
