"""Model versions that share a worker process: one memory, and all else of their own."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelyard.archiver import open_archive
from modelyard.serve.control.build import why_alone
from tests.conftest import DIGITS
from tests.serve.live import LiveServer, build_archive, poll, running

SCANS = [(DIGITS / "scans" / f"{digit}.png").read_bytes() for digit in range(10)]
SETTINGS = "{alone: {shareWorkers: false}, code: {shareWorkers: true}, one: {jobQueueSize: 7}}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, digits_store: Path) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("sharing")
    store = folder / "store"
    store.mkdir()
    shutil.copy(digits_store / "onnx.mar", store)
    build_archive(store, "echo", name="code")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.serve.live.environment", environment)
        arguments = [f"--models={name}=onnx.mar" for name in ("one", "two", "alone")]
        with running(folder / "state", store, *arguments, "--workers=1") as server:
            yield server


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MODELYARD_")}
    return {
        **kept, "COLUMNS": "200", "NO_COLOR": "1",
        "MODELYARD_SHARE_WORKERS": "true", "MODELYARD_MODEL_SETTINGS": SETTINGS,
    }  # fmt: skip


def digit(server: LiveServer, model: str, number: int) -> int:
    answer = server.predict(model, SCANS[number])
    assert answer.status_code == 200, answer.text
    return int(max(answer.json().items(), key=lambda item: item[1])[0])


def test_models_without_code_share_a_process_and_nothing_else(server: LiveServer) -> None:
    (one,), (two,), (alone,) = map(server.worker_pids, ("one", "two", "alone"))
    assert one == two != alone
    for number in (3, 4, 8):
        assert [digit(server, name, number) for name in ("one", "two")] == [number, number]
    digit(server, "two", 5)
    assert (server.handed_over("one"), server.handed_over("two")) == (3, 4)
    assert server.describe("one")["jobQueueStatus"]["remainingCapacity"] == 7
    assert server.describe("two")["jobQueueStatus"]["remainingCapacity"] == 100


def test_one_that_leaves_leaves_the_others_alone(server: LiveServer) -> None:
    before = server.worker_pids("one")
    assert server.register("onnx.mar", model_name="third", initial_workers=1).status_code == 200
    assert server.worker_pids("third") == before
    assert server.management.delete("/models/third").status_code == 200
    assert digit(server, "one", 2) == 2
    assert (server.worker_pids("one"), server.restarts("one")) == (before, 0)


def test_all_of_them_come_back_when_their_process_has_ended(server: LiveServer) -> None:
    (before,) = server.worker_pids("one")
    os.kill(before, signal.SIGKILL)
    names = ("one", "two")
    poll(lambda: all(server.restarts(name) == 1 for name in names), "they are replaced")
    assert [digit(server, name, 6) for name in names] == [6, 6]
    assert server.worker_pids("one") == server.worker_pids("two") != [before]
    assert server.restarts("alone") == 0


def test_code_cannot_share_and_says_why(server: LiveServer) -> None:
    answer = server.register("code.mar", model_name="code")
    assert answer.status_code == 400
    assert "shareWorkers: code.mar cannot share: it brings code, handler.py" in answer.text


@pytest.mark.parametrize(
    ("file", "handler", "reason"),
    [
        ("onnx.mar", "image_classifier", None),
        ("onnx.mar", "generate", "the handler generate runs requests that join and leave"),
        ("pt2.mar", "image_classifier", "its artifact is digits.pt2; expected ONNX"),
    ],
)
def test_what_shares(digits_store: Path, file: str, handler: str, reason: str | None) -> None:
    with open_archive(digits_store / file) as archive:
        found = why_alone(archive, handler)
    assert found == reason or (reason is not None and found is not None and reason in found)
