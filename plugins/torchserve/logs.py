"""TorchServe's log files, and the same lines on standard output.

Whoever logs hands over values, and goes on. One thread makes lines of them, many at a time, and
writes each file once for all: neither a slow disk nor a reader that stopped reading holds up a
request. What cannot be written in time is lost, and counted.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from modelyard.plugins.torchserve.layout import TORCHSERVE_LEVELS, Around, Layout, Said
from modelyard.plugins.torchserve.log_config import MODEL_LOG, OWN_LOGGER, LogConfig
from modelyard.plugins.torchserve.log_files import Sink, open_sink
from modelyard.serve.dataplane.log_file import Pipe
from modelyard.serve.http.connection import LEFT, Answered

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
        out = WorkerOutput(f"{worker}-stdout", logging.INFO)
        err = WorkerOutput(f"{worker}-stderr", logging.WARNING)
        self._outputs = [out, err]
        self.stdout, self.stderr = out.pipe.writing, err.pipe.writing

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
