"""TorchServe's log files, and the same lines on standard output.

What is logged, and where to, is TorchServe's defaults or what `log4j.py` reads of a file. A record
is written by the appenders of its logger and of those above it, as log4j does it; each appender
gets it once.

Whoever logs hands over values, and goes on. One thread makes lines of them, many at a time, and
writes each file once for all: neither a slow disk nor a reader that stopped reading holds up a
request. What cannot be written in time is lost, and counted.
"""

import contextlib
import gzip
import logging
import os
import queue
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from modelyard.plugins.torchserve.layout import (
    FINEST,
    TORCHSERVE_LEVELS,
    Around,
    BadPattern,
    DateFormat,
    Layout,
    Said,
)
from modelyard.serve.dataplane.log_file import Console, LogFile, Pipe, make_room
from modelyard.serve.http.connection import LEFT, Answered

ACCESS_LOG = "ACCESS_LOG"
MODEL_LOG = "MODEL_LOG"
MODEL_METRICS = "MODEL_METRICS"
TS_METRICS = "TS_METRICS"
LOGGERS = (ACCESS_LOG, MODEL_LOG, MODEL_METRICS, TS_METRICS)

OWN_LOGGER = "modelyard"
THEIR_LOGGER = "org.pytorch.serve"
"""What a file says of TorchServe's own code is said of ours."""
OFF = 100
LEVELS = {
    "ALL": 1, "TRACE": 5, "DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARN": logging.WARNING,
    "WARNING": logging.WARNING, "ERROR": logging.ERROR, "FATAL": logging.CRITICAL, "OFF": OFF,
}  # fmt: skip
"""log4j's levels as Python's numbers, of which 0 would mean: as the logger above."""

WITH_THREAD = "%d{ISO8601} [%-5p] %t %c - %m%n"
BARE = "%d{ISO8601} - %m%n"
FILE_BYTES = 100 * 2**20
FILES_KEPT = 5


@dataclass(frozen=True)
class Rolling:
    """When a file is put aside, and under what name."""

    max_bytes: int | None = FILE_BYTES
    period: str | None = "%d"
    """Field of `layout.FINEST` whose change ends a file: %d each day, %H each hour."""
    pattern: str | None = None
    """Pattern of the name, with %d{date} and %i; None adds .1 for the newest, .2 …"""
    keep: int = FILES_KEPT
    newest_first: bool = False
    """Whether %i is 1 for the newest file; else it is the highest."""
    at_start: bool = False


@dataclass(frozen=True)
class Appender:
    """A file, or standard output."""

    name: str
    pattern: str = WITH_THREAD
    file: Path | None = None
    is_stderr: bool = False
    threshold: int = 0
    appends: bool = True
    rolling: Rolling | None = None


@dataclass(frozen=True)
class LoggerRule:
    """What is said of one logger and those below it."""

    level: int | None = None
    appenders: tuple[tuple[str, int], ...] = ()
    """Names, and from which level each gets records."""
    is_additive: bool = True
    """Whether the appenders of the loggers above get its records too."""


@dataclass(frozen=True)
class LogConfig:
    """Everything that is said."""

    appenders: Mapping[str, Appender]
    loggers: Mapping[str, LoggerRule]
    """Rules of loggers by name; the root is ""."""

    def level(self, name: str) -> int:
        """Return the least level of records that somebody gets."""
        rules = (self.loggers[above] for above in self._above(name))
        said = next((rule.level for rule in rules if rule.level is not None), logging.ERROR)
        return max(said, min(self._thresholds(name).values(), default=OFF))

    def appenders_of(self, name: str, level: int) -> list[Appender]:
        """Return those that get a logger's records of a level."""
        thresholds = self._thresholds(name).items()
        return [self.appenders[each] for each, least in thresholds if level >= least]

    def _thresholds(self, name: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for above in self._above(name):
            rule = self.loggers[above]
            for appender, least in rule.appenders:
                if appender in self.appenders:
                    least = max(least, self.appenders[appender].threshold)
                    found[appender] = min(least, found.get(appender, OFF))
            if not rule.is_additive:
                break
        return found

    def _above(self, name: str) -> list[str]:
        """Return the loggers that something is said of, the logger itself first, the root last."""
        names = _ancestors(name)
        if name.partition(".")[0] == OWN_LOGGER:
            names += _ancestors(THEIR_LOGGER)
        return [each for each in [*names, ""] if each in self.loggers]


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def default_config(log_dir: Path, metrics_dir: Path) -> LogConfig:
    """Return TorchServe's defaults: five files, and all of it on standard output.

    Args:
        log_dir: folder of access_log.log, ts_log.log and model_log.log.
        metrics_dir: folder of ts_metrics.log and model_metrics.log.
    """

    def file(path: Path, pattern: str) -> Appender:
        return Appender(path.stem, pattern, path, rolling=Rolling())

    files = {
        ACCESS_LOG: file(log_dir / "access_log.log", BARE),
        MODEL_LOG: file(log_dir / "model_log.log", WITH_THREAD),
        MODEL_METRICS: file(metrics_dir / "model_metrics.log", BARE),
        TS_METRICS: file(metrics_dir / "ts_metrics.log", BARE),
        "": file(log_dir / "ts_log.log", WITH_THREAD),
    }
    console = Appender("STDOUT")
    return LogConfig(
        {appender.name: appender for appender in (*files.values(), console)},
        {
            name: LoggerRule(logging.INFO, ((appender.name, 0), (console.name, 0)), False)
            for name, appender in files.items()
        },
    )


# -- files that are put aside when they are full or old, and the console ---------------------------


_DATE_OR_INDEX = re.compile(r"%(?:d(?:ate)?(?:\{([^}]*)\})?|(0\d+)?i)")


def open_sink(appender: Appender) -> "Sink | None":
    """Return what writes the lines of an appender; None where nobody would see them.

    Raises:
        OSError: a file cannot be opened.
    """
    if appender.file is not None:
        return FileSink(appender.file, appender.rolling, appender.appends)
    descriptor = 2 if appender.is_stderr else 1
    return None if _is_null(descriptor) else ConsoleSink(descriptor)


def _is_null(descriptor: int) -> bool:
    try:
        return os.fstat(descriptor).st_rdev == Path(os.devnull).stat().st_rdev
    except OSError:
        return True


class ConsoleSink(Console):
    """The console, as a sink."""

    def write(self, data: bytes, now: float) -> int:
        """Hand lines to its thread; return how many were lost."""
        return self.append(data)


class FileSink(LogFile):
    """A file that is put aside when it is full, and at the first line of another day.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, file: Path, rolling: Rolling | None, appends: bool = True) -> None:
        self._rolling = rolling or Rolling(None, None)
        self._packing: threading.Thread | None = None
        super().__init__(file, self._rolling.max_bytes, self._rolling.keep, appends)
        self._written_at = file.stat().st_mtime if self._size else time.time()
        self._period = self._period_at(self._written_at)
        if self._rolling.at_start and self._size:
            self._roll()

    def write(self, data: bytes, now: float) -> int:
        """Write whole lines, into a new file where one is due; return how many were lost."""
        if self._rolling.period is not None and (period := self._period_at(now)) != self._period:
            self._period = period
            if self._size:
                self._roll()
        self._written_at = now
        return self.append(data)

    def close(self) -> None:
        """Close the file; one that is being packed is waited for."""
        super().close()
        if self._packing is not None:
            self._packing.join()

    def _period_at(self, now: float) -> str:
        """Return the period of a time; a second counts as its minute."""
        if self._rolling.period is None:
            return ""
        fields = min(5, len(FINEST) - FINEST.index(self._rolling.period))
        return str(time.localtime(now)[:fields])

    def _put_aside(self) -> None:
        if self._packing is not None:
            self._packing.join()
        if self._rolling.pattern is None:
            super()._put_aside()
            return
        to = _aside(self.file, self._rolling, self._written_at)
        to.parent.mkdir(parents=True, exist_ok=True)
        if to.suffix != ".gz":
            self.file.replace(to)
            return
        plain = to.with_name(f"{to.name}.part")
        self.file.replace(plain)
        self._packing = threading.Thread(target=_pack, args=(plain, to), name="log-pack")
        self._packing.start()


Sink = ConsoleSink | FileSink
"""Takes encoded lines; used by one thread."""


def _aside(file: Path, rolling: Rolling, written_at: float) -> Path:
    """Return the name under which a file is put aside, which nobody has."""

    def name(index: int, pattern: str = str(rolling.pattern)) -> Path:
        def fill(match: re.Match[str]) -> str:
            if match[0].endswith("i"):
                return str(index).rjust(int(match[2] or 0), "0")
            try:
                return DateFormat(match[1] or "yyyy-MM-dd").at(int(written_at * 1000))
            except BadPattern:
                return ""

        return file.parent / _DATE_OR_INDEX.sub(fill, pattern)

    if name(1) == name(2):  # without %i, which only a second one of its day needs
        if not name(1).exists():
            return name(1)
        name = partial(name, pattern=re.sub(r"(\.gz)?$", r".%i\1", str(rolling.pattern), count=1))
    if rolling.newest_first:
        make_room(name, rolling.keep)
        return name(1)
    index = 1
    while index <= rolling.keep and name(index).exists():
        index += 1
    if index > rolling.keep:
        name(1).unlink(missing_ok=True)
        for each in range(2, index):
            name(each).replace(name(each - 1))
        index -= 1
    return name(index)


def _pack(plain: Path, to: Path) -> None:
    with contextlib.suppress(OSError):
        with plain.open("rb") as source, gzip.open(to, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        plain.unlink()


# -- whoever logs, and the thread that writes ------------------------------------------------------


logger = logging.getLogger(__name__)
_model_log = logging.getLogger(MODEL_LOG)

MOST_WAITING = 100_000
"""Records that wait to be written, some 30 MB; more are dropped."""
GATHER_S = 0.1
"""Time from one writing of records to the next: a thread that is woken for each takes
more from the event loop than the lines cost."""
SOON_S = 0.005
"""Time after a pause from the first record to when it is written, with what else its request
logs."""
AT_ONCE = 256
"""Records that are made into lines in one go, a third of a millisecond during which the event loop
may have to wait."""
TOGETHER_MS = 5
"""Records made of values show the time of the first of so many milliseconds: half of what a line
costs is what stands around it, made once for each time."""
MOST_SOURCES = 1000
CLOSE_TIMEOUT_S = 2.0
CHUNK_BYTES = 8192
"""Bytes of a worker's output that are taken at once, and are one record."""

Form = Callable[..., Sequence[str]]
"""Called in the thread that writes, with a record's second and values; returns its messages."""
Lines = Callable[[Form], Callable[..., None]]


Buffer = list[str]


class Source:
    """One logger, level and thread, whose records differ in values only."""

    def __init__(self, said: Said, sinks: Sequence[tuple[Layout, Buffer]]) -> None:
        self.messages: list[str] = []
        """Messages of the time that is being written."""
        self.together_ms = 1
        """Milliseconds whose records show the time of the first."""
        self._targets: dict[str, tuple[Around, list[Buffer]]] = {}
        """Pattern → what stands around the messages, and where the lines go."""
        for layout, buffer in sinks:
            if layout.pattern not in self._targets:
                self._targets[layout.pattern] = layout.around(said), []
            self._targets[layout.pattern][1].append(buffer)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody writes its records."""
        return bool(self._targets)

    def end(self, milliseconds: int) -> None:
        """Turn the messages of one time into lines, once for all with one layout."""
        messages, self.messages = self.messages, []
        for around, buffers in self._targets.values():
            before, after = around(milliseconds)
            text = f"{before}{(after + before).join(messages)}{after}"
            for buffer in buffers:
                buffer.append(text)


Item = tuple[float, Source, Form, tuple[Any, ...]]
"""Time, source, and what makes messages of the values."""


def access_line(second: int, answered: Answered) -> Sequence[str]:
    """Return the line of one answer; none for a client that left before it.

    Args:
        second: second of the answer.
    """
    if answered.status == LEFT:
        return ()
    client, method, target, status, seconds, *_ = answered
    address = f"{client[0]}:{client[1]}" if client else "unix"
    protocol = "HTTP/2.0" if method == "gRPC" else "HTTP/1.1"
    return (f'/{address} "{method} {target} {protocol}" {status} {int(1000 * seconds + 0.5)}',)


class Logs(logging.Handler):
    """Everything that this process logs.

    Args:
        config: what is logged, and where to.

    Raises:
        OSError: a file cannot be opened.
    """

    def __init__(self, config: LogConfig) -> None:
        super().__init__()
        self._config = config
        self._waiting: deque[Item] = deque()
        self._signal: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._lost = 0
        self._sources: dict[tuple[str, int, str], Source] = {}
        self._outputs: dict[str, tuple[Sink, Layout, Buffer]] = {}
        """Those that records go to, by the name of the appender."""
        used = {name for rule in config.loggers.values() for name, _ in rule.appenders}
        for appender in config.appenders.values():
            if appender.name in used and (sink := open_sink(appender)) is not None:
                self._outputs[appender.name] = sink, Layout(appender.pattern), []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)

    # -- whoever logs ------------------------------------------------------------------------------

    def start(self) -> None:
        """Take over what this process logs."""
        logging.raiseExceptions = False  # a terminal that has gone is not worth a traceback
        root = logging.getLogger()
        root.handlers = [self]
        for name in ("", MODEL_LOG, OWN_LOGGER, *self._config.loggers):
            logging.getLogger(name).setLevel(self._config.level(name))
        self.start_writing()

    def start_writing(self) -> None:
        """Write what was handed over, and what will be."""
        self._thread.start()

    def lines(self, name: str) -> Lines | None:
        """Return what makes writers of a logger's records at level INFO; None: nobody wants them.

        A writer hands over the values of one record. It is called for each request.
        """
        if self._config.level(name) > logging.INFO:
            return None
        put, source = self.put, self._source(name, logging.INFO, threading.current_thread().name)
        source.together_ms = TOGETHER_MS

        def writer(form: Form) -> Callable[..., None]:
            return lambda *values: put((time.time(), source, form, values))

        return writer if source.is_wanted else None

    def put(self, item: Item) -> None:
        """Hand over a record."""
        waiting = self._waiting
        if len(waiting) >= MOST_WAITING:
            self._lost += 1
            return
        waiting.append(item)
        if len(waiting) == 1:
            self._signal.put(True)

    def handle(self, record: logging.LogRecord) -> bool:
        """Hand over a record of Python's; without the lock that handlers hold while they write."""
        source = self._source(record.name, record.levelno, str(record.threadName))
        if source.is_wanted:
            self.put((record.created, source, _record_lines, (record,)))
        return True

    def _source(self, name: str, level: int, thread: str) -> Source:
        key = name, level, thread
        source = self._sources.get(key)
        if source is None:
            if len(self._sources) >= MOST_SOURCES:
                self._sources.clear()
            shown = logging.getLevelName(level)
            names = (appender.name for appender in self._config.appenders_of(name, level))
            source = self._sources[key] = Source(
                Said(TORCHSERVE_LEVELS.get(shown, shown), thread, name),
                [self._outputs[each][1:] for each in names if each in self._outputs],
            )
        return source

    # -- the thread that writes --------------------------------------------------------------------

    def _run(self) -> None:
        written_at = 0.0
        while not self._is_closing:
            with contextlib.suppress(queue.Empty):
                self._signal.get(timeout=1)  # two threads at once may each leave it to the other
            if not self._is_closing:
                time.sleep(max(SOON_S, written_at + GATHER_S - time.monotonic()))
            while self._waiting:
                self._write_some()
            written_at = time.monotonic()
        while self._waiting:
            self._write_some()

    def _write_some(self) -> None:
        """Write what waits, up to so much that others must not wait for it."""
        waiting = self._waiting
        at, second, dirty, written_at = -1, 0, dict[Source, None](), time.time()
        for _ in range(min(AT_ONCE, len(waiting))):
            written_at, source, form, values = waiting.popleft()
            milliseconds = int(written_at * 1000)
            if not 0 <= milliseconds - at < source.together_ms:
                for each in dirty:
                    each.end(at)
                at, dirty = milliseconds, {}
                second = milliseconds // 1000
            source.messages += form(second, *values)
            dirty[source] = None
        for each in dirty:
            each.end(at)
        for sink, _, buffer in self._outputs.values():
            if buffer:
                data = "".join(buffer).encode("utf-8", "replace")
                buffer.clear()
                self._lost += sink.write(data, written_at)
        if self._lost and not waiting and not self._is_closing:
            lost, self._lost = self._lost, 0
            logger.warning("%d log lines came too fast and are lost", lost)

    def close(self) -> None:
        """Write what waits, as far as it can be written soon."""
        super().close()
        if self._thread.is_alive():
            self._is_closing = True
            self._signal.put(True)
            self._thread.join(CLOSE_TIMEOUT_S)
            if not self._thread.is_alive():
                for sink, _, _ in self._outputs.values():
                    sink.close()


_format_exception = logging.Formatter().formatException


def _record_lines(second: int, record: logging.LogRecord) -> Sequence[str]:
    try:
        message = record.getMessage()
    except Exception as error:  # whoever logged it gave other values than its text has places for
        message = f"{record.msg!r} % {record.args!r}: {error}"
    if record.exc_info:
        message += "\n" + _format_exception(record.exc_info)
    return message.split("\n") if record.name == MODEL_LOG else (message,)


class WorkerOutput:
    """Logs what a worker prints, line by line.

    Args:
        thread: shown as the line's thread, as in `W-9000-echo_1.0-stdout`.
        level: INFO for standard output, WARNING for standard error.
    """

    def __init__(self, thread: str, level: int) -> None:
        self._thread = thread
        self._level = level
        self._unfinished = b""
        self.last_line = ""
        self.pipe = Pipe(self._take, read_bytes=CHUNK_BYTES)

    def _take(self, data: bytes) -> None:
        lines, _, rest = (self._unfinished + data).rpartition(b"\n")
        if not data or len(rest) > CHUNK_BYTES:  # its end, or a line without one
            lines, rest = self._unfinished + data, b""
        self._unfinished = rest
        if not lines:
            return
        text = lines.decode("utf-8", "replace")
        self.last_line = text.rstrip().rpartition("\n")[2]
        if _model_log.isEnabledFor(self._level):
            # To look for the calling line, as `log` does, would take most of the time.
            record = _model_log.makeRecord(MODEL_LOG, self._level, "", 0, text, (), None)
            record.threadName = self._thread
            _model_log.handle(record)


class WorkerPipes:
    """The two pipes of a worker's output.

    Args:
        worker: worker as in `W-9000-echo_1.0`.
    """

    def __init__(self, worker: str) -> None:
        levels = {"stdout": logging.INFO, "stderr": logging.WARNING}
        self._outputs = [WorkerOutput(f"{worker}-{name}", level) for name, level in levels.items()]
        self.stdout, self.stderr = (each.pipe.writing for each in self._outputs)

    def close(self) -> None:
        """Close the server's copies of the writing ends."""
        os.close(self.stdout)
        os.close(self.stderr)

    def finish(self) -> None:
        """Log what is left."""
        for output in self._outputs:
            output.pipe.finish()

    @property
    def last_line(self) -> str:
        """The last line of standard error, else of standard output."""
        return next((o.last_line for o in reversed(self._outputs) if o.last_line), "")
