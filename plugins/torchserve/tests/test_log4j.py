"""What is read of log4j's configuration files."""

from __future__ import annotations

import gzip
import logging
import re
import time
from pathlib import Path

import pytest

from modelyard.plugins.torchserve.layout import DateFormat, Layout, Said
from modelyard.plugins.torchserve.log4j import find_log_config, read_log_config
from modelyard.plugins.torchserve.logs import FileSink, LogConfig, Logs, Rolling
from modelyard.serve.errors import StartError

NOON = 1_795_348_800.0

XML = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration>
  <Properties><Property name="where">${env:LOG_LOCATION:-logs}</Property></Properties>
  <Appenders>
    <RollingFile name="access" fileName="${where}/access_log.log"
        filePattern="${where}/access_log.%d{dd-MMM}.log.gz">
      <PatternLayout pattern="%d{ISO8601} - %m%n"/>
      <Policies>
        <SizeBasedTriggeringPolicy size="100 MB"/>
        <TimeBasedTriggeringPolicy/>
      </Policies>
      <DefaultRolloverStrategy max="5"/>
    </RollingFile>
    <Console name="STDOUT" target="SYSTEM_OUT">
      <PatternLayout><Pattern>%-5p %c{1} %M: %m%n</Pattern></PatternLayout>
    </Console>
    <Kafka name="far" topic="logs"/>
  </Appenders>
  <Loggers>
    <Logger name="ACCESS_LOG" level="info" additivity="false"><AppenderRef ref="access"/></Logger>
    <Logger name="io.netty" level="error"/>
    <Logger name="TS_METRICS" level="off"/>
    <Logger name="org.pytorch.serve" level="debug"/>
    <Root level="warn"><AppenderRef ref="STDOUT" level="error"/><AppenderRef ref="far"/></Root>
  </Loggers>
</Configuration>
"""


def read(folder: Path, content: str) -> tuple[LogConfig, list[str]]:
    file = folder / "log4j2.xml"
    file.write_text(content)
    return read_log_config(file, {"LOG_LOCATION": "there"}, folder)


def test_levels_appenders_and_rotation_are_read(tmp_path: Path) -> None:
    config, warnings = read(tmp_path, XML)
    access = config.appenders["access"]
    assert access.file == tmp_path / "there" / "access_log.log"
    assert access.pattern == "%d{ISO8601} - %m%n"
    assert access.rolling == Rolling(
        100 << 20, "%d", str(tmp_path / "there" / "access_log.%d{dd-MMM}.log.gz"), 5
    )
    assert config.level("ACCESS_LOG") == logging.INFO
    assert [each.name for each in config.appenders_of("ACCESS_LOG", logging.INFO)] == ["access"]
    assert config.level("TS_METRICS") > logging.CRITICAL
    assert config.level("modelyard.serve") == config.level("MODEL_LOG") == logging.ERROR
    assert config.appenders_of("modelyard.serve", logging.WARNING) == []
    (console,) = config.appenders_of("modelyard.serve", logging.ERROR)
    assert console.file is None
    texts = " ".join(warnings)
    assert "%M is left out" in texts and "'far' of type kafka is not followed" in texts
    assert len(warnings) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("log4j.rootLogger = INFO, console", "write it as log4j 2's XML"),
        ("<Configuration>\n<Loggers>\n</Configuration>", "line 3, column 3: mismatched tag"),
        ("<!DOCTYPE x [<!ENTITY a 'b'>]>\n<Configuration/>", "line 1: a document type is not read"),
        ("<logback/>", "line 1: expected <Configuration>, got <logback>"),
        ("<a>" * 5000, "more than 32 levels"),
        ("<Configuration>" + " " * (1 << 20), "larger than 1 MB"),
        (
            '<Configuration><Loggers>\n<Root level="loud"/></Loggers></Configuration>',
            "line 2: there is no level 'loud'; levels are ALL, TRACE",
        ),
        (
            '<Configuration><Appenders>\n<RollingFile name="a" fileName="a">'
            '<SizeBasedTriggeringPolicy size="many"/></RollingFile></Appenders></Configuration>',
            "line 2: 'many' is not a size such as 100 MB",
        ),
        (
            '<Configuration name="${a}"><Properties><Property name="a">${b}</Property>'
            '<Property name="b">${a}</Property></Properties></Configuration>',
            "names itself",
        ),
    ],
    ids=str,
)
def test_a_broken_file_stops_the_start(tmp_path: Path, content: str | None, message: str) -> None:
    with pytest.raises(StartError, match=re.escape(message)):
        if content is None:
            read_log_config(tmp_path / "no.xml", {}, tmp_path)
        else:
            read(tmp_path, content)


def test_what_is_off_is_neither_handed_over_nor_written(tmp_path: Path) -> None:
    content = '<Configuration><Loggers><Root level="OFF"/></Loggers></Configuration>'
    logs = Logs(read(tmp_path, content)[0])
    for name in ("ACCESS_LOG", "TS_METRICS", "MODEL_METRICS"):
        assert logs.lines(name) is None
    assert [each.name for each in tmp_path.iterdir()] == ["log4j2.xml"]


def test_an_appender_that_nobody_refers_to_opens_no_file(tmp_path: Path) -> None:
    content = XML.replace('<AppenderRef ref="access"/>', "")
    Logs(read(tmp_path, content)[0]).close()
    assert not (tmp_path / "there").exists()


def test_java_options_name_the_file_too(tmp_path: Path) -> None:
    options = "-Xmx4g -Dlog4j.configurationFile=file:///etc/log4j2.xml"
    assert find_log_config(None, options, tmp_path) == Path("/etc/log4j2.xml")
    assert find_log_config("own.xml", options, tmp_path) == tmp_path / "own.xml"
    assert find_log_config(None, "-Xmx4g", tmp_path) is None


@pytest.mark.parametrize(
    ("pattern", "shown"),
    [
        ("%d{yyyy-MM-dd'T'HH:mm:ss.SSSXXX}{UTC} %m%n", ("2026-11-22T12:00:00.123+00:00 ", "\n")),
        ("[%-5level][%5.5t] %c{2} | %msg%n%ex", ("[INFO ][-main] b.c | ", "\n")),
        ("%highlight{%p} %style{%m}{cyan}%n", ("INFO ", "\n")),
        ("100%% %p", ("100% INFO", "\n")),
        ("%d{UNIX_TIME} %m%n", (None, "\n")),
    ],
    ids=str,
)
def test_a_pattern_is_what_stands_around_a_message(
    pattern: str, shown: tuple[str | None, str]
) -> None:
    warnings: list[str] = []
    around = Layout(pattern, warn=warnings.append).around(Said("INFO", "the-main", "a.b.c"))
    before, after = around(int(NOON * 1000) + 123)
    assert after == shown[1]
    if shown[0] is None:
        assert "written as ISO 8601" in warnings[0]
    else:
        assert before == shown[0]


def test_files_put_aside_are_named_by_date_and_number_and_packed(tmp_path: Path) -> None:
    rolling = Rolling(10, "%d", str(tmp_path / "old" / "a.%d{yyyy-MM-dd}.%i.gz"), keep=2)
    sink = FileSink(tmp_path / "a.log", rolling)
    now = time.time()
    for line in (b"one......\n", b"two......\n", b"three....\n"):
        sink.write(line, now)
    sink.write(b"four\n", now)
    sink.write(b"five\n", now + 86_400)
    sink.close()
    day, next_day = (DateFormat("yyyy-MM-dd").at(int(at * 1000)) for at in (now, now + 86_400))
    packed = {
        each.name: gzip.decompress(each.read_bytes()) for each in (tmp_path / "old").iterdir()
    }
    assert packed == {f"a.{day}.1.gz": b"three....\n", f"a.{day}.2.gz": b"four\n"}
    assert (tmp_path / "a.log").read_bytes() == b"five\n"
    assert next_day != day


def test_without_a_number_a_second_file_of_a_day_gets_one(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "a.log", Rolling(4, None, str(tmp_path / "a.%d{yyyy}.log"), keep=3))
    for line in (b"one\n", b"two\n", b"six\n"):
        sink.write(line, NOON)
    sink.close()
    kept = {each.name: each.read_text() for each in tmp_path.iterdir() if each.name != "a.log"}
    assert kept == {"a.2026.log": "one\n", "a.2026.log.1": "two\n", "a.2026.log.2": "six\n"}
