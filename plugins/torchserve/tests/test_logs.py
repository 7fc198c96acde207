"""TorchServe's log files, written beside the work."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelyard.plugins.torchserve import logs
from modelyard.plugins.torchserve.logs import (
    FILES_KEPT,
    FileSink,
    Logs,
    Rolling,
    WorkerOutput,
    access_line,
    default_config,
)
from modelyard.serve.http.connection import LEFT, Answered

LOGGERS = ("ACCESS_LOG", "MODEL_LOG", "MODEL_METRICS", "TS_METRICS", "modelyard")
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}"


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Logs]:
    """Log as the server does, and put back what this process had."""
    root = logging.getLogger()
    handlers, level, raises = root.handlers, root.level, logging.raiseExceptions
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    opened = Logs(default_config(tmp_path / "logs", tmp_path / "metrics"))
    opened.start()
    yield opened
    opened.close()
    root.handlers, logging.raiseExceptions = handlers, raises
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def test_each_logger_has_its_file_and_form(
    written: Logs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("serve.any").warning("first\nsecond")
    access_log = written.lines("ACCESS_LOG")
    assert access_log is not None
    log_access = access_log(access_line)
    client = ("127.0.0.1", 51998)
    log_access(Answered(client, "GET", "/ping?x=1", 200, 0.0021, "id", 2, None, ""))
    log_access(Answered(client, "GET", "/ping?x=1", LEFT, 0.0021, "id", 0, None, ""))
    log_access(Answered(None, "GET", "/ping", 500, 0, "id", 2, None, ""))
    logging.getLogger("TS_METRICS").info("CPUUtilization.Percent:1.0")
    logging.getLogger("MODEL_METRICS").info("HandlerTime.ms:1.0")
    written.close()
    name = "MainThread"
    own = lines(tmp_path / "logs" / "ts_log.log")
    assert re.fullmatch(rf"{TIME} \[WARN \] {name} serve.any - first", own[0])
    assert own[1:] == ["second"]
    access = lines(tmp_path / "logs" / "access_log.log")
    assert re.fullmatch(rf'{TIME} - /127.0.0.1:51998 "GET /ping\?x=1 HTTP/1.1" 200 2', access[0])
    assert access[1].endswith(' - /unix "GET /ping HTTP/1.1" 500 0')
    metrics = tmp_path / "metrics"
    assert lines(metrics / "ts_metrics.log")[0].endswith(" - CPUUtilization.Percent:1.0")
    assert lines(metrics / "model_metrics.log")[0].endswith(" - HandlerTime.ms:1.0")
    console = capfd.readouterr().out.splitlines()
    assert len(console) == 6
    assert re.fullmatch(rf"{TIME} \[INFO \] {name} ACCESS_LOG - /127.0.0.1:51998 .*", console[2])


def test_lines_of_one_millisecond_keep_their_order_in_each_file(
    written: Logs, tmp_path: Path
) -> None:
    lines_of = written.lines("TS_METRICS")
    assert lines_of is not None
    write = lines_of(lambda second, value: (f"a {value}", f"b {value}"))
    for number in range(1000):
        write(number)
    written.close()
    found = [line.partition(" - ")[2] for line in lines(tmp_path / "metrics" / "ts_metrics.log")]
    assert found == [f"{letter} {number}" for number in range(1000) for letter in "ab"]


def print_and_end(code: str) -> tuple[str, str]:
    """Run Python as a worker; return the last lines of both its outputs."""

    async def follow() -> tuple[str, str]:
        out = WorkerOutput("W-9000-m_1.0-stdout", logging.INFO)
        err = WorkerOutput("W-9000-m_1.0-stderr", logging.WARNING)
        writing = (out.pipe.writing, err.pipe.writing)
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=writing[0], stderr=writing[1]
        )
        for end in writing:
            os.close(end)
        await asyncio.to_thread(process.wait)
        out.pipe.finish()
        err.pipe.finish()
        return out.last_line, err.last_line

    return asyncio.run(follow())


def test_what_a_worker_prints_is_logged_line_by_line(written: Logs, tmp_path: Path) -> None:
    code = (
        "import os; w = os.write; w(1, b'one\\ntwo\\n\\xff\\n'); w(2, b'bad\\n'); w(1, b'no end')"
    )
    assert print_and_end(code) == ("no end", "bad")
    written.close()
    logged = lines(tmp_path / "logs" / "model_log.log")
    assert all(re.match(rf"{TIME} \[(INFO |WARN )\] W-9000-m_1.0-std", line) for line in logged)
    of = {
        kind: [line.partition(" MODEL_LOG - ")[2] for line in logged if f"-{kind} " in line]
        for kind in ("stdout", "stderr")
    }
    assert of == {"stdout": ["one", "two", "\ufffd", "no end"], "stderr": ["bad"]}


def test_a_line_without_end_is_logged_in_pieces(written: Logs, tmp_path: Path) -> None:
    last, _ = print_and_end("print('x' * 100_000, end='')")
    written.close()
    logged = lines(tmp_path / "logs" / "model_log.log")
    assert sum(line.count("x") for line in logged) == 100_000
    assert 0 < len(last) <= 2 * logs.CHUNK_BYTES


def test_a_record_that_cannot_be_formatted_does_not_end_the_log(
    written: Logs, tmp_path: Path
) -> None:
    logging.getLogger("serve.any").warning("%d requests", "many")
    time.sleep(3 * logs.GATHER_S)
    logging.getLogger("serve.any").warning("after it")
    written.close()
    wrong, after = lines(tmp_path / "logs" / "ts_log.log")
    assert "'%d requests' % ('many',): " in wrong
    assert after.endswith(" - after it")


def test_a_file_that_cannot_be_put_aside_goes_on(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("not a folder")
    sink = FileSink(tmp_path / "a.log", Rolling(4, None, str(taken / "a.%i")))
    for line in (b"one\n", b"two\n"):
        assert sink.write(line, time.time()) == 0
    sink.close()
    assert lines(tmp_path / "a.log") == ["one", "two"]


def of_yesterday(file: Path) -> Path:
    """Return a file whose only line is a day old."""
    file.write_text("of yesterday\n")
    yesterday = time.time() - 86_400
    os.utime(file, (yesterday, yesterday))
    return file


def test_a_file_is_put_aside_when_it_is_full_and_on_another_day(tmp_path: Path) -> None:
    file = of_yesterday(tmp_path / "ts_log.log")
    sink = FileSink(file, Rolling(max_bytes=200))
    for number in range(20):
        sink.write(f"2026-11-22T17:00:00,000 - line {2 * number}\nline {2 * number + 1}\n".encode(),
                   time.time())  # fmt: skip
    sink.write(b"".join(b"last %d\n" % number for number in range(60)), time.time())
    sink.close()
    kept = sorted(other.name for other in tmp_path.iterdir())
    assert kept == ["ts_log.log", *(f"ts_log.log.{n}" for n in range(1, FILES_KEPT + 1))]
    assert all(other.stat().st_size < 250 for other in tmp_path.iterdir())
    newest = (tmp_path / "ts_log.log.1").read_text() + file.read_text()
    assert newest.endswith("last 58\nlast 59\n")


def test_the_first_line_of_a_day_starts_a_file(tmp_path: Path) -> None:
    file = of_yesterday(tmp_path / "ts_log.log")
    sink = FileSink(file, Rolling())
    sink.write(b"of today\n", time.time())
    sink.close()
    assert lines(tmp_path / "ts_log.log.1") == ["of yesterday"]
    assert lines(file) == ["of today"]


def test_lines_that_come_too_fast_are_counted(
    written: Logs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MOST_WAITING", 0)
    logging.getLogger("serve.any").info("lost")
    monkeypatch.undo()
    logging.getLogger("serve.any").info("kept")
    written.close()
    text = (tmp_path / "logs" / "ts_log.log").read_text()
    assert "kept" in text and " lost\n" not in text
