"""What TorchServe's dialect decides: where archives come from, and how many workers they get."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver import open_archive
from modelyard.plugins.torchserve.metrics import TorchServeMetrics
from modelyard.plugins.torchserve.policy import TorchServePolicy
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve.control.model_config import ModelSpec
from modelyard.serve.control.sizing import this_machine
from modelyard.serve.settings import Settings
from tests.serve.live import build_archive, poll


def make(folder: Path, **options: Any) -> TorchServePolicy:
    store = folder / "store"
    store.mkdir(exist_ok=True)
    settings = Settings(model_store=store, state_dir=folder / "state", device="cpu")
    dialect = TorchServeSettings(directory=folder, **options)
    return TorchServePolicy(settings, dialect, TorchServeMetrics(dialect))


class Gate:
    """A server of one file, which it sends when the gate is open."""

    def __init__(self, content: bytes) -> None:
        self.is_asked, self.is_open = threading.Event(), threading.Event()
        gate = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                gate.is_asked.set()
                gate.is_open.wait(20)
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/echo.mar"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.is_open.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    opened = Gate(build_archive(tmp_path / "built", "echo").read_bytes())
    yield opened
    opened.close()


def test_what_a_url_names_is_fetched_into_the_store(tmp_path: Path, gate: Gate) -> None:
    gate.is_open.set()
    policy = make(tmp_path, allowed_urls=("http://127.0.0.1:.*",))
    file, is_fetched = asyncio.run(policy.locate(gate.url))
    assert (file, is_fetched) == (tmp_path / "store" / "echo.mar", True)
    assert asyncio.run(policy.locate("echo.mar")) == (file, False)


def test_an_archive_that_comes_when_nobody_waits_any_more_is_removed(
    tmp_path: Path, gate: Gate
) -> None:
    policy = make(tmp_path, allowed_urls=("http://127.0.0.1:.*",))

    async def scenario() -> None:
        task = asyncio.ensure_future(policy.locate(gate.url))
        await asyncio.to_thread(gate.is_asked.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    (fetching,) = (thread for thread in threading.enumerate() if thread.name == "fetch")
    gate.is_open.set()
    poll(lambda: not fetching.is_alive(), "the fetch ends")
    assert not list((tmp_path / "store").iterdir())


CORES = this_machine().cores


@pytest.mark.parametrize(
    ("spec", "yaml", "default", "expected"),
    [
        (ModelSpec("echo.mar"), "", 0, (0, 0)),
        (ModelSpec("echo.mar", at_start=True), "", 0, (CORES, CORES)),
        (ModelSpec("echo.mar"), "", 3, (3, 3)),
        (ModelSpec("echo.mar"), "minWorkers: 2\nmaxWorkers: 4\n", 3, (2, 4)),
        (ModelSpec("echo.mar", workers=1), "minWorkers: 2\nmaxWorkers: 4\n", 3, (1, 1)),
        (ModelSpec("echo.mar", workers=1, most=5), "minWorkers: 2\nmaxWorkers: 4\n", 3, (1, 5)),
        (ModelSpec("echo.mar", workers=0), "minWorkers: 2\nmaxWorkers: 4\n", 3, (0, 0)),
    ],
    ids=["nobody", "the start", "the server", "the archive", "the caller", "a snapshot", "none"],
)
def test_workers_are_as_many_as_the_first_of_caller_archive_and_server_says(
    tmp_path: Path, spec: ModelSpec, yaml: str, default: int, expected: tuple[int, int]
) -> None:
    policy = make(tmp_path, default_workers_per_model=default)
    with open_archive(build_archive(tmp_path / "store", "echo", config=yaml)) as archive:
        config = policy.configure(archive, spec, "echo")

    async def share(request: object) -> Any:
        raise AssertionError("the cores are not shared")

    size = asyncio.run(policy.size(spec, config, "echo", share))
    assert (size.workers, size.most, size.threads) == (*expected, 1)


def test_variables_are_passed_as_torchserve_does_unless_they_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "BUCKET", "MODELYARD_SIGNING_KEY"):
        monkeypatch.setenv(name, "set")
    passed = make(tmp_path, blacklist_env_vars="BUCK.*").environment(1)
    assert "AWS_SECRET_ACCESS_KEY" in passed
    assert not passed.keys() & {"BUCKET", "MODELYARD_SIGNING_KEY"}
