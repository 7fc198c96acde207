"""Archives that we sealed, whose handlers import TorchServe's names, in a server of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.plugins.torchserve.archiver.archive import (
    ModelArchiverConfig,
    archive_for_torchserve,
)
from tests.archiver.test_serving import SOUP
from tests.archiver.wheels import build_wheel
from tests.serve.live import LiveServer, build_archive, running

NAMES = Path(__file__).parent / "archives" / "names"


@pytest.fixture(scope="module")
def server(shared_server: LiveServer) -> LiveServer:
    build_archive(shared_server.store, str(NAMES), name="names", config="minWorkers: 1\n")
    shared_server.register_all("names.mar")
    return shared_server


def test_a_handler_written_for_torchserve_runs_unchanged(server: LiveServer) -> None:
    assert server.predict("names", b"grey").text == "GREY"
    refused = server.predict("names", b"teapot")
    assert (refused.status_code, refused.json()["message"]) == (418, "short and stout")


@pytest.mark.nightly
def test_requirements_of_torchserves_archives_are_installed_where_that_is_allowed(
    tmp_path: Path,
) -> None:
    wheels, store = tmp_path / "wheels", tmp_path / "store"
    build_wheel(wheels, "soup", code="SAYS = 'hot'\n", requires="salt")
    build_wheel(wheels, "salt")
    (tmp_path / "handler.py").write_text(SOUP)
    (tmp_path / "r.txt").write_text(f"--no-index\n--find-links {wheels}\nsoup\n")
    (tmp_path / "broken.txt").write_text("--no-index\nnothing-like-this\n")
    for name, file in (("good", "r.txt"), ("bad", "broken.txt")):
        wanted = ModelArchiverConfig(
            name,
            str(tmp_path / "handler.py"),
            "1.0",
            requirements_file=str(tmp_path / file),
            export_path=str(store),
        )
        archive_for_torchserve(wanted, warn=lambda message: None)

    with running(tmp_path / "state", store, "--install-requirements", "--workers=1") as server:
        assert server.register("good.mar", initial_workers=1).status_code == 200
        assert server.predict("good", b"x").text == "hot"
        refused = server.register("bad.mar", initial_workers=1)
        assert refused.status_code == 400
        assert "bad.mar: its requirements cannot be installed: " in refused.json()["message"]
        assert "No matching distribution found for nothing-like-this" in refused.json()["message"]
