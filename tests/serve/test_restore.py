from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from modelyard.archiver import open_archive
from modelyard.serve.app import create_server
from modelyard.serve.control.preload import start_fork_server
from modelyard.serve.control.register import Lifecycle, restore
from modelyard.serve.control.registry import Registry
from modelyard.serve.control.state import StateDir
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.errors import (
    FileNotInStore,
    ServeError,
    StartError,
    StorageFull,
    http_status,
)
from modelyard.serve.policy import Policy
from modelyard.serve.settings import load_settings
from modelyard.serve.walls.kernel import children
from tests.serve.live import build_archive

PAIRS = 25
OF_ABC = ("weakref.ReferenceType", "builtins.builtin_function_or_method")
"""Types of what abc remembers, once for each class that is asked about."""


def start(state: Path, **more: object) -> Registry:
    """Start with nothing asked for: what was served last is restored."""
    folders = {"state_dir": state, "model_store": state / "store"}
    settings = load_settings({**folders, **more}, None, {})
    StateDir(state).create()
    registry = Registry()
    lifecycle = Lifecycle(Policy(settings), registry, Metrics())
    asyncio.run(restore(lifecycle, lambda model, text: None))
    return registry


def test_the_first_start_serves_nothing(tmp_path: Path) -> None:
    assert len(start(tmp_path)) == 0
    saved = json.loads((tmp_path / "models.json").read_text(encoding="utf-8"))
    assert saved == {"schema": 1, "models": []}


@pytest.mark.parametrize(
    "content",
    [
        *("", "nonsense", "[]", "{}", "7", '{"models": null}', "\udcff"),
        *("[" * 100_000, '{"models": ' + "[" * 100_000, '{"schema": 1e999, "models": []}'),
    ],
    ids=lambda content: repr(content[:20]),
)
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
    [
        *(1, {}, {"file": 2}, {"file": "x.mar", "name": ["x"]}, {"file": "x.mar", "digest": 7}),
        *({"file": "x.mar", "workers": each} for each in ("many", -1, 1025, 10**25)),
    ],
    ids=str,
)
def test_a_line_of_the_saved_state_that_makes_no_sense_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, entry: object
) -> None:
    (tmp_path / "models.json").write_text(json.dumps({"models": [entry]}), encoding="utf-8")
    assert len(start(tmp_path)) == 0
    assert "1 of 1 entries make no sense and are left out" in caplog.text


def test_an_archive_that_has_changed_is_restored_only_where_that_is_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive = build_archive(tmp_path / "store", "echo")
    with open_archive(archive) as opened:
        digest = opened.digest
    entry = {"file": "echo.mar", "workers": 0, "digest": digest}
    file = tmp_path / "models.json"
    file.write_text(json.dumps({"models": [entry]}), encoding="utf-8")
    (served,) = start(tmp_path)
    assert served.digest == digest
    build_archive(tmp_path / "store", "picky", name="echo")
    saved = file.read_bytes()
    with pytest.raises(StartError, match=rf"echo\.mar is not the .* {digest}; .*--accept-changed"):
        start(tmp_path)
    assert file.read_bytes() == saved
    (served,) = start(tmp_path, accept_changed=True)
    assert served.digest != digest
    assert "accepted, as the setting accept_changed says" in caplog.text
    start(tmp_path)  # that one was served last


@pytest.mark.parametrize(
    ("saved", "models", "is_begun"),
    [
        (["torch"], [], True),
        (["echo"], [], False),
        (["torch"], ["echo"], False),
        ([], ["echo", "torch=torch.mar"], True),
        ([], ["all"], True),
        ([], ["../store/torch", "nothing", "damaged"], False),
    ],
    ids=["as it was", "without torch", "others are named", "named", "all", "none there"],
)
def test_what_workers_need_is_imported_while_the_server_starts(
    tmp_path: Path, saved: list[str], models: list[str], is_begun: bool
) -> None:
    store = tmp_path / "store"
    build_archive(store, "echo")
    build_archive(store, "clash", name="torch")
    (store / "damaged.mar").write_bytes((store / "torch.mar").read_bytes()[:-30])
    entries = [{"name": name, "file": f"{name}.mar"} for name in saved]
    (tmp_path / "models.json").write_text(json.dumps({"models": entries}), encoding="utf-8")
    given = {"state_dir": tmp_path, "models": models, "model_store": store}
    policy = Policy(load_settings(given, None, {}))
    policy.state.create()

    async def scenario() -> None:
        before = set(children())
        start_fork_server(policy)
        assert policy.fork_server is not None
        new = set(children()) - before
        assert len(new) == is_begun
        for pid in new:
            maps = Path(f"/proc/{pid}/maps")
            async with asyncio.timeout(60):
                while "libtorch" not in maps.read_text(encoding="utf-8"):
                    await asyncio.sleep(0.01)
        await policy.fork_server.stop()
        assert set(children()) == before

    asyncio.run(scenario())


def test_a_full_disk_is_the_servers_fault(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        large = tmp_path / "large.bin"
        large.write_bytes(os.urandom(200_000))
        build_archive(tmp_path / "store", "echo", artifact=large)
        StateDir(disk).create()
        settings = load_settings({"state_dir": disk, "model_store": tmp_path / "store"}, None, {})
        registry = Registry()

        async def register() -> None:
            await Lifecycle(Policy(settings), registry, Metrics()).register("echo.mar", workers=0)

        with pytest.raises(StorageFull, match="No space left on device; the disk of") as caught:
            asyncio.run(register())
        assert http_status(caught.value)[0] == 507
        assert len(registry) == 0
        assert not any((disk / "unpacked").iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_nothing_is_left_of_a_model_that_came_and_went(tmp_path: Path) -> None:
    build_archive(tmp_path, "echo")
    folders = {"state_dir": tmp_path / "state", "model_store": tmp_path}
    settings = load_settings({**folders, "port": 0, "management_port": 0}, None, {})
    StateDir(settings.state_dir).create()

    async def come_and_go(lifecycle: Lifecycle, names: str) -> Counter[str]:
        for number in range(PAIRS):
            name = f"{names}{number}"
            await lifecycle.unregister(await lifecycle.register("echo.mar", name, workers=0))
        await asyncio.sleep(0.1)  # threads hold what they did last
        gc.collect()
        types = map(type, gc.get_objects())
        found = (f"{each.__module__}.{each.__qualname__}" for each in types)
        return Counter(name for name in found if name not in OF_ABC)

    async def grown() -> Counter[str]:
        server = create_server(Policy(settings))
        lifecycle = server.lifecycle
        await restore(lifecycle, lambda model, text: None)
        for observer in server.observers:
            await observer.restore(lambda model, text: None)
        for number in range(500):  # of which observers remember so many at most
            lifecycle.registry.tell("not registered", f"m{number}", "", "of another model")
        before = await come_and_go(lifecycle, "a")
        found = await come_and_go(lifecycle, "b") - before
        for observer in server.observers:
            await observer.stop()
        await lifecycle.stop(0)
        for listener in server.listeners:
            await listener.stop_accepting()
        return found

    found = asyncio.run(grown())
    assert not [each for each in found.items() if each[1] >= PAIRS], found


class Gated(Policy):
    """Has each write wait for a gate, and the first ones fail."""

    def begin(self, fails: int = 0) -> Lifecycle:
        self.gate, self.begun, self.fails = threading.Event(), 0, fails
        self.state.create()
        return Lifecycle(self, Registry(), Metrics())

    def remember(self, event: str, registry: Registry) -> Callable[[], None]:
        write = super().remember(event, registry)

        def wait() -> None:
            self.begun += 1
            assert self.gate.wait(20)
            if self.begun <= self.fails:
                raise ServeError("the disk is gone")
            write()

        return wait

    def saved(self) -> list[str]:
        content = json.loads(self.state.models_file.read_text(encoding="utf-8"))
        return [model["name"] for model in content["models"]]


@pytest.mark.parametrize(
    ("fails", "saved"), [(0, ["m0", "m1", "m2", "m3"]), (1, ["m1", "m2", "m3"])]
)
def test_a_change_is_written_beside_the_loop_and_with_others_that_wait(
    tmp_path: Path, fails: int, saved: list[str]
) -> None:
    names = [build_archive(tmp_path, "echo", name=f"m{n}").name for n in range(4)]
    settings = load_settings({"state_dir": tmp_path, "model_store": tmp_path}, None, {})
    policy = Gated(settings)

    async def register() -> None:
        lifecycle = policy.begin(fails)
        tasks = []
        for name in names:
            tasks.append(asyncio.create_task(lifecycle.register(name, workers=0)))
            async with asyncio.timeout(20):
                while len(lifecycle.registry) < len(tasks) or not policy.begun:
                    await asyncio.sleep(0.005)
        assert (policy.begun, [each.done() for each in tasks]) == (1, 4 * [False])
        policy.gate.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(each, ServeError) for each in outcomes] == [fails > 0, *3 * [False]]
        # The one of the others may hold what has failed, which is written again without it; where
        # that is first, the older one is left out.
        assert policy.begun in (2, 2 + fails)
        assert [each.name for each in lifecycle.registry] == policy.saved() == saved

        late = lifecycle._prepare_save()
        await lifecycle.unregister(lifecycle.registry.get("m1"))
        late()
        assert "m1" not in policy.saved()

    asyncio.run(register())


def test_a_stop_while_a_removal_is_written_ends_the_workers_of_that_model_too(
    tmp_path: Path,
) -> None:
    file = build_archive(tmp_path, "echo").name
    settings = load_settings({"state_dir": tmp_path, "model_store": tmp_path}, None, {})
    policy = Gated(settings)

    async def stop() -> None:
        lifecycle = policy.begin()
        policy.gate.set()
        model = await lifecycle.register(file, workers=1)
        policy.gate.clear()
        removal = asyncio.create_task(lifecycle.unregister(model))
        async with asyncio.timeout(20):
            while len(lifecycle.registry):
                await asyncio.sleep(0.005)
        threading.Timer(0.2, policy.gate.set).start()
        await lifecycle.stop(0)
        assert not model.pool.ready_count
        await asyncio.wait_for(removal, 20)

    asyncio.run(stop())


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
