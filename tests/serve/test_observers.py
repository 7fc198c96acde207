"""A server whose observers are not installed starts and serves."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from modelyard.base.plugins import registered
from tests.serve.live import build_archive, running

ROOT = Path(__file__).parents[2]


def test_without_observers_a_server_serves_and_has_none_of_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = {entry.module.split(".")[2] for entry in registered("observers").values()}
    package = tmp_path / "without" / "modelyard"
    (package / "plugins").mkdir(parents=True)
    for part in (ROOT / "modelyard").iterdir():
        if part.name != "plugins":
            (package / part.name).symlink_to(part.resolve())
    for part in (ROOT / "plugins").glob("*"):
        if part.name not in left_out:
            (package / "plugins" / part.name).symlink_to(part)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    build_archive(tmp_path / "store", "echo")
    with running(tmp_path / "state", tmp_path / "store", "--models=echo", "--workers=1") as server:
        assert server.predict("echo", b"hello").status_code == 200
        for path in ("/console", "/console/sign-in", "/models/echo/rollout"):
            assert server.management.get(path).status_code == 404, path
        with httpx.Client(base_url=server.management.base_url, verify=False) as anybody:
            assert anybody.get("/console").status_code == 401
        shown = server.metrics.get("/metrics").text
        assert "modelyard_requests_total" in shown
        assert "rollout" not in shown and "attribution" not in shown
