"""The server of a cell lives as long as its replica, not longer; and folders of dead cells go."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from modelyard.plugins.cluster.process import ChildServer
from modelyard.plugins.cluster.ray.beats import MOST_MISSED, Beats, watch
from modelyard.plugins.cluster.ray.folders import CellFolder
from modelyard.serve.control.model_config import ModelSpec
from modelyard.serve.control.saved import write_specs
from modelyard.serve.control.state import StateDir
from modelyard.serve.errors import StartError
from modelyard.serve.settings import Settings
from tests.serve.live import build_archive, environment, is_alive, poll

REPLICA = """
import asyncio, json, sys
from modelyard.plugins.cluster.ray.beats import Beats
from modelyard.plugins.cluster.process import ChildServer
from modelyard.serve.settings import Settings
async def main():
    settings = Settings(**json.loads(sys.argv[2]))
    server, pipe = ChildServer("it", "no more"), Beats().pipe
    print(json.dumps(await server.launch(settings, version=sys.argv[1], beats=pipe)), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def start_replica(settings: Settings) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", REPLICA, version("modelyard"), settings.model_dump_json()],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    build_archive(tmp_path / "store", "echo")
    state = StateDir(tmp_path / "state")
    state.create()
    return Settings(
        model_store=tmp_path / "store",
        state_dir=state.root,
        port=0,
        management_port=0,
        metrics_port=0,
        workers=1,
    )


def test_a_server_ends_with_its_replica(settings: Settings) -> None:
    write_specs(StateDir(settings.state_dir), [ModelSpec("echo.mar", "echo")])
    with start_replica(settings) as replica:
        assert replica.stdout is not None
        about = json.loads(replica.stdout.readline())
        assert httpx.post(f"{about['inference']}/predictions/echo", verify=False).status_code == 200
        replica.kill()
        poll(lambda: not is_alive(about["pid"]), "the server ends with the replica")


@pytest.mark.nightly
def test_a_server_ends_the_replica_that_hangs(settings: Settings) -> None:
    with start_replica(settings) as replica:
        assert replica.stdout is not None
        about = json.loads(replica.stdout.readline())
        replica.send_signal(signal.SIGSTOP)
        assert replica.wait(60) == -signal.SIGKILL
        poll(lambda: not is_alive(about["pid"]), "and ends with it")


def test_a_replica_is_killed_when_its_event_loop_does_not_move(
    caplog: pytest.LogCaptureFixture,
) -> None:
    beats_s, reads_s = 0.005, 0.05
    with subprocess.Popen(["sleep", "60"]) as replica:

        async def main() -> None:
            beats = Beats(beats_s)
            watching = asyncio.create_task(
                asyncio.to_thread(watch, beats.pipe, replica.pid, reads_s)
            )
            await asyncio.sleep(MOST_MISSED * reads_s * 1.5)
            assert replica.poll() is None, "it beats"
            time.sleep(MOST_MISSED * reads_s * 1.5)
            await watching
            await beats.stop()

        asyncio.run(main())
        assert replica.wait(10) == -signal.SIGKILL
    assert f"process {replica.pid}, has not moved for 0.75 s; it is killed" in caplog.text


def test_another_archive_than_the_plans_is_not_served(settings: Settings) -> None:
    specs = [ModelSpec("echo.mar", "echo", digest="0" * 64)]
    write_specs(StateDir(settings.state_dir), specs)
    with pytest.raises(StartError, match=r"its digest is [0-9a-f]{64}"):
        start_here(settings)


def test_a_server_of_another_version_or_without_an_interpreter_does_not_start(
    settings: Settings,
) -> None:
    with pytest.raises(StartError, match=r"built by 9\.9; install that version on every node"):
        start_here(settings, version="9.9")
    with pytest.raises(StartError, match="cannot start /none/python: No such file"):
        start_here(settings, python=Path("/none/python"))


def start_here(
    settings: Settings, version: str = version("modelyard"), python: Path | None = None
) -> None:
    asyncio.run(ChildServer("it", "no more").launch(settings, version=version, python=python))


def test_a_folder_is_a_cells_own_until_it_ends_however_it_ends(tmp_path: Path) -> None:
    root = tmp_path / "cells"
    living = CellFolder(root, "ab12cd34")
    code = f"""
from pathlib import Path
from modelyard.plugins.cluster.ray.folders import CellFolder
import os, signal
folder = CellFolder(Path({str(root)!r}), 'dead')
(folder.path / "file").touch()
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    dead = Path(subprocess.run([sys.executable, "-c", code], stdout=-1, text=True).stdout.strip())
    assert (dead / "file").exists()
    other = CellFolder(root, "ef56")
    assert not dead.exists() and living.path.is_dir() and living.path != other.path
    for folder in (living, other):
        folder.remove()
    assert list(root.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match="name another one with state_dir=FOLDER") as caught:
        CellFolder(tmp_path / "file" / "cells", "ab")
    assert "\n" not in str(caught.value)
