"""Lines of the access log, and JSON lines of the server's."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from pathlib import Path

import pytest

from modelyard.serve.dataplane.log_file import Console, LogFile, LogWriter
from modelyard.serve.errors import StartError
from modelyard.serve.http.connection import LEFT, Answered
from modelyard.serve.log import GATHER_BYTES, AccessLog, JsonFormatter, json_form, text_form
from modelyard.serve.settings import load_settings
from tests.serve.live import poll

SERVED = Answered(
    ("::1", 4711), "POST", "/predictions/digits?q=secret", 200, 0.00125, "id-1", 12,
    ("digits", "1.0"), "",
)  # fmt: skip


def test_a_line_for_people() -> None:
    assert re.fullmatch(
        r'2001-09-09T01:46:40\.250Z ::1:4711 "POST /predictions/digits" 200 12 0\.001250 '
        r"digits/1\.0 id-1 -\n",
        text_form()(SERVED, 1e9 + 0.25).decode(),
    )
    hit = text_form()(SERVED._replace(outcome="hit"), 1e9).decode()
    assert hit.endswith(" digits/1.0 id-1 - hit\n")
    assert json.loads(json_form()(SERVED._replace(outcome="hit"), 1e9))["labels.cache"] == "hit"
    left = SERVED._replace(client=None, status=LEFT, served=None, id="")
    assert text_form()(left, 0).decode().split()[1:] == [
        "unix", '"POST', '/predictions/digits"', "499", "12", "0.001250", "-", "-", "-",
    ]  # fmt: skip


@pytest.mark.parametrize("target", ['/"', "/\\", "/\x1b[2J", "/\xff\x00", "/\n", "/a b?c"])
def test_what_a_client_wrote_cannot_look_like_a_line_of_ours(target: str) -> None:
    for form in (text_form(), json_form()):
        line = form(SERVED._replace(target=target), 0).decode("ascii")
        assert line.isascii() and line[:-1].isprintable() and line.endswith("\n")
    assert json.loads(line)["url.path"].startswith("/")
    grpc = json.loads(json_form()(SERVED._replace(method="gRPC", target=target, status=5), 0))
    assert grpc["rpc.grpc.status_code"] == 5 and "url.path" not in grpc


def test_lines_are_written_together_and_none_is_left(tmp_path: Path) -> None:
    file = tmp_path / "access.log"

    async def scenario() -> None:
        log = AccessLog(text_form(), LogWriter(LogFile(file, None, 1)))
        log(SERVED)
        assert file.read_text() == ""
        size = len(text_form()(SERVED, 0))
        for _ in range(GATHER_BYTES // size):
            log(SERVED)
        poll(lambda: file.stat().st_size >= GATHER_BYTES, "the lines are written")
        log(SERVED)
        log.close()

    asyncio.run(scenario())
    text = file.read_text()
    assert text.count("\n") == GATHER_BYTES // len(text_form()(SERVED, 0)) + 2


def test_a_console_that_nobody_reads_holds_nobody_up() -> None:
    reading, writing = os.pipe()
    console = Console(writing)
    lost = sum(console.append(b"x" * (1 << 20) + b"\n") for _ in range(20))
    assert lost >= 8
    os.close(reading)
    console.close()
    os.close(writing)


def test_an_error_is_one_json_object_with_its_traceback() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = logging.LogRecord(
            "modelyard.x", logging.ERROR, "", 0, "request %s", ("id-1",), (type(error), error, None)
        )
    record.request_id = "id-1"
    (line,) = JsonFormatter().format(record).splitlines()
    said = json.loads(line)
    assert (said["log.level"], said["message"], said["http.request.id"]) == (
        "error", "request id-1", "id-1",
    )  # fmt: skip
    assert (said["error.type"], said["error.message"]) == ("ValueError", "two\nlines")
    assert "ValueError: two" in said["error.stack_trace"]


@pytest.mark.parametrize("given", [{"log_level": "loud"}, {"log_format": "xml"}])
def test_a_form_that_is_not_there_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(StartError, match=f"--{next(iter(given)).replace('_', '-')}: "):
        load_settings(given, None, {})
