"""A child process: its end, what it leaves behind, and the pauses before the next one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from modelyard.serve.dataplane.process import Backoff, ChildProcess, spawn
from tests.serve.live import is_alive, poll


def start(code: str, niceness: int = 0) -> ChildProcess:
    with Path(os.devnull).open("wb") as null:
        return spawn(
            [sys.executable, "-c", code],
            os.environ,
            stdout=null.fileno(),
            stderr=null.fileno(),
            niceness=niceness,
        )


def test_a_process_that_ends_by_itself_is_reaped_and_described() -> None:
    async def scenario() -> None:
        process = start("raise SystemExit(3)")
        assert process.exit_code is None
        assert await process.ended == process.exit_code == 3
        assert process.how_it_ended == "ended with exit code 3"
        assert not Path(f"/proc/{process.pid}").exists()
        process.kill()  # nobody else's process of the same number

    asyncio.run(scenario())


def test_one_that_goes_on_is_killed_when_its_time_is_over() -> None:
    async def scenario() -> None:
        process = start("import time; time.sleep(600)", niceness=7)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == max(7, os.nice(0))
        await process.end(0.01)
        assert process.how_it_ended == "ended by SIGKILL"

    asyncio.run(scenario())


def test_no_child_of_a_niced_process_is_less_nice() -> None:
    code = (
        "import asyncio, os, time\n"
        "from tests.serve.test_process import start\n"
        "async def scenario():\n"
        "    process = start('import time; time.sleep(600)', niceness=7)\n"
        "    print(os.getpriority(os.PRIO_PROCESS, process.pid), os.nice(0))\n"
        "    await process.end(0.01)\n"
        "os.nice(39)\n"  # the most that there is, from wherever the tests are
        "asyncio.run(scenario())\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert ran.stdout == b"19 19\n"


def test_what_it_has_started_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(file)!r}).write_text(str(child.pid))"
    )

    async def scenario() -> None:
        assert await start(code).ended == 0
        poll(lambda: not is_alive(int(file.read_text())), "the grandchild ends")

    asyncio.run(scenario())


def test_its_group_is_ended_while_no_other_process_can_have_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    were_there: list[bool] = []
    end_group = os.killpg

    def killpg(group: int, number: int) -> None:
        were_there.append(Path(f"/proc/{group}").exists())
        end_group(group, number)

    monkeypatch.setattr(os, "killpg", killpg)

    async def scenario() -> None:
        await start("raise SystemExit(0)").ended
        await start("import time; time.sleep(600)").end(0.01)

    asyncio.run(scenario())
    assert were_there and all(were_there)


def test_one_that_cannot_be_started_is_an_error() -> None:
    async def scenario() -> None:
        with pytest.raises(OSError, match="absent"):
            spawn(["/absent"], {}, stdout=1, stderr=2)

    asyncio.run(scenario())


def test_pauses_grow_to_their_limit_and_begin_anew() -> None:
    backoff, pauses = Backoff(), []
    for _ in range(12):
        pauses.append(backoff.pause_s)
        backoff.grow()
    assert pauses[:3] == [0.05, 0.1, 0.2]
    assert pauses == sorted(pauses) and pauses[-1] == 30
    backoff.grow(longest_s=5)
    assert backoff.pause_s == 5  # of what was killed while it loaded
    backoff.reset()
    assert backoff.pause_s == 0.05
