from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import Registry
from modelyard.serve.control.restore import restore
from modelyard.serve.control.state import StateDir
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.errors import FileNotInStore
from modelyard.serve.policy import Policy
from modelyard.serve.settings import load_settings


def start(state: Path) -> Registry:
    """Start with nothing asked for: what was served last is restored."""
    settings = load_settings({"state_dir": state, "model_store": state / "store"}, None, {})
    StateDir(state).create()
    registry = Registry()
    lifecycle = Lifecycle(Policy(settings), registry, Metrics())
    asyncio.run(restore(lifecycle, lambda model, text: None))
    return registry


def test_the_first_start_serves_nothing(tmp_path: Path) -> None:
    assert len(start(tmp_path)) == 0
    saved = json.loads((tmp_path / "models.json").read_text(encoding="utf-8"))
    assert saved == {"schema": 1, "models": []}


@pytest.mark.parametrize("content", ["", "nonsense", "[]", "{}", "7", '{"models": null}', "\udcff"])
def test_a_saved_state_that_cannot_be_read_is_no_reason_not_to_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    file = tmp_path / "models.json"
    file.write_text(content, encoding="utf-8", errors="surrogateescape")
    with caplog.at_level(logging.ERROR):
        assert len(start(tmp_path)) == 0
    assert f"cannot read {file}" in caplog.text
    assert "nothing restored" in caplog.text


@pytest.mark.parametrize(
    "entry",
    [1, {}, {"file": 2}, {"file": "x.mar", "workers": "many"}, {"file": "x.mar", "name": ["x"]}],
)
def test_a_line_of_the_saved_state_that_makes_no_sense_is_left_out(
    tmp_path: Path, entry: object
) -> None:
    (tmp_path / "models.json").write_text(json.dumps({"models": [entry]}), encoding="utf-8")
    assert len(start(tmp_path)) == 0


@pytest.mark.parametrize("content", ["", '{"models": [', '{"schema": 99, "models": []}', "\0" * 99])
def test_a_damaged_state_is_kept_aside_and_the_one_before_it_restored(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "models.json").write_text(content, encoding="utf-8")
    before = {"schema": 1, "models": [{"file": "gone.mar"}]}
    (tmp_path / "models.previous.json").write_text(json.dumps(before), encoding="utf-8")
    with pytest.raises(FileNotInStore, match=r"gone\.mar"):
        start(tmp_path)
    assert (tmp_path / "models.damaged.json").read_text(encoding="utf-8") == content
