"""Logs that stay within their size, whoever writes them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from modelyard.serve.dataplane.log_file import WAITING_BYTES, LogFile, LogWriter, Pipe
from modelyard.serve.dataplane.log_file import files as log_files
from modelyard.serve.dataplane.worker import WorkerLog


def sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir()}


def test_a_full_file_is_put_aside_and_the_oldest_goes(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", 10, keep=2)
    for number in range(5):
        assert log.append(b"line %d...\n" % number) == 0
    assert log.append(b"last\n") == 0
    log.close()
    assert sizes(tmp_path) == {"a.log": 5, "a.log.1": 10, "a.log.2": 10}
    assert (tmp_path / "a.log.1").read_bytes() == b"line 4...\n"


def test_what_is_there_counts_and_lines_stay_whole(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"12345678\n")
    log = LogFile(tmp_path / "a.log", 10, keep=1)
    log.append(b"abc\nde\n")
    log.close()
    assert (tmp_path / "a.log.1").read_bytes() == b"12345678\nabc\n"
    assert (tmp_path / "a.log").read_bytes() == b"de\n"


def test_a_disk_that_takes_nothing_holds_nobody_up_and_gets_what_fits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.log")
    disk = os.open(tmp_path / "a.log", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(disk, True)
    log = LogWriter(LogFile(tmp_path / "a.log", None, keep=1))
    sent = [b"%04d %s\n" % (number, b"x" * (1 << 16)) for number in range(200)]
    lost = sum(map(log.append, sent))  # the thread that writes them waits for the disk
    assert 60 <= lost < 100
    log.close(0)
    with os.fdopen(disk, "rb") as reading:
        written = reading.read()
    assert written == b"".join(sent[: 200 - lost])
    assert WAITING_BYTES < len(written) < WAITING_BYTES + (1 << 18)


def test_a_file_that_cannot_be_put_aside_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a.log.1").mkdir()
    log = LogFile(tmp_path / "a.log", 10, keep=1)
    for _ in range(5):
        log.append(b"line .....\n")
    log.close()
    assert sizes(tmp_path)["a.log"] == 55


def test_whoever_shares_the_file_gets_each_new_one(tmp_path: Path) -> None:
    opened: list[str] = []
    log = LogFile(
        tmp_path / "a.log",
        4,
        1,
        on_open=lambda fd: opened.append(str(Path(f"/proc/self/fd/{fd}").readlink())),
    )
    log.append(b"abcde\n")
    log.close()
    assert opened == [str(tmp_path / "a.log")] * 2


def test_what_a_process_prints_stays_within_its_files(tmp_path: Path) -> None:
    async def follow() -> WorkerLog:
        log = WorkerLog(tmp_path / "worker-1.log", 100_000, 2)
        code = "import sys; [print('x' * 99) for _ in range(50_000)]; print('the end', flush=True)"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=log.stdout
        )
        log.close()
        assert await process.wait() == 0
        log.finish()
        return log

    log = asyncio.run(follow())
    assert log.last_line == "the end"
    log_files().finish(lambda: None, 10)
    found = sizes(tmp_path)
    assert set(found) == {"worker-1.log", "worker-1.log.1", "worker-1.log.2"}
    assert max(found.values()) <= 100_000
    assert (tmp_path / "worker-1.log").read_text().endswith("the end\n")


def test_a_process_left_behind_that_writes_without_end_holds_nobody_up() -> None:
    taken: list[bytes] = []

    async def follow() -> None:
        pipe = Pipe(taken.append)
        process = subprocess.Popen(["yes"], stdout=pipe.writing)
        os.close(pipe.writing)
        await asyncio.sleep(0.1)
        pipe.finish()
        assert process.wait(10) != 0  # nobody reads any more

    asyncio.run(follow())
    assert taken[-1] == b""


def test_the_end_of_a_pipe_is_told_once() -> None:
    taken: list[bytes] = []

    async def follow() -> None:
        pipe = Pipe(taken.append, gather_s=0.01)
        os.write(pipe.writing, b"one\n")
        await asyncio.sleep(0.05)
        os.write(pipe.writing, b"two\n")
        os.close(pipe.writing)
        await asyncio.sleep(0.05)
        pipe.finish()

    asyncio.run(follow())
    assert taken == [b"one\n", b"two\n", b""]


@pytest.mark.parametrize("bad", ["4095", "-1", "x"])
def test_a_log_has_a_size(bad: str) -> None:
    from modelyard.serve.errors import StartError
    from modelyard.serve.settings import load_settings

    with pytest.raises(StartError, match="MODELYARD_LOG_BYTES"):
        load_settings({}, None, {"MODELYARD_LOG_BYTES": bad})
