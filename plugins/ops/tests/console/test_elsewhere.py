"""What the console says and does that other tests set the stage for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest

from tests.archiver.test_proven import SAID, aged
from tests.serve.live import LiveServer, running
from tests.serve.test_operating import TOKENS, ask, folder, server

__all__ = ["aged", "folder", "server"]
"""Fixtures."""
RECORDED = Path(__file__).parents[1] / "rollout" / "operations.jsonl"


def test_the_cookie_is_for_tls_only_under_tls(server: LiveServer, folder: Path) -> None:
    form = {"content_type": "application/x-www-form-urlencoded"}
    token = f"token={TOKENS['admin']}".encode()
    answer = ask(server, "management", folder, None, "POST", "/console/sign-in", token, **form)
    assert answer.status_code == 303 and answer.headers["set-cookie"].endswith("; Secure")


@pytest.mark.nightly
def test_an_archive_that_was_proven_on_other_versions_says_so(
    aged: Path, digits_store: Path, tmp_path: Path
) -> None:
    shutil.copy(digits_store / "pt2.mar", aged.parent / "pt2.mar")
    models = ("--models", "onnx", "--models", "pt2", "--workers=1")
    with (
        running(tmp_path / "state", aged.parent, *models) as server,
        httpx.Client(base_url=server.management.base_url) as browser,
    ):
        browser.post("/console/sign-in", data={"token": server.token})
        pages = {
            name: browser.get(f"/console/models/{name}/1.0/archive").text
            for name in ("onnx", "pt2")
        }
    assert SAID in pages["onnx"]
    assert "Bill of materials" in pages["pt2"]
    assert "was proven with" not in pages["pt2"]


def test_roll_outs_are_described_as_it_was_recorded(shared_server: LiveServer) -> None:
    document = shared_server.management.get("/openapi.json").json()
    described = [
        json.dumps({"method": method, "path": path, **operation}, sort_keys=True)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if operation["tags"] == ["roll-out"]
    ]
    recorded = map(json.loads, RECORDED.read_text(encoding="utf-8").splitlines())
    assert sorted(described) == sorted(json.dumps(each, sort_keys=True) for each in recorded)
