"""TorchServe's five log files, and the same lines on standard output.

Lines are handed to threads that write them: neither a slow disk nor a reader that stopped reading
holds up a request, or the other one's lines. What cannot be written in time is lost, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO

ACCESS_LOG = "ACCESS_LOG"
MODEL_LOG = "MODEL_LOG"
MODEL_METRICS = "MODEL_METRICS"
TS_METRICS = "TS_METRICS"

_access_log = logging.getLogger(ACCESS_LOG)
_model_log = logging.getLogger(MODEL_LOG)

WITH_THREAD = "{time} [{level:<5}] {thread} {logger} - "
BARE = "{time} - "

FILE_BYTES = 100 * 2**20
FILES_KEPT = 5
MOST_WAITING = 10_000
"""Records that wait to be written; more are dropped."""
CLOSE_TIMEOUT_S = 2.0
CHUNK_BYTES = 8192
"""Of a worker's output are taken at once, and are one record."""
LEVELS = {"WARNING": "WARN", "CRITICAL": "FATAL"}


class Logs:
    """The five files and standard output, each side with a thread that writes.

    Args:
        log_dir: folder of access_log.log, ts_log.log and model_log.log.
        metrics_dir: folder of ts_metrics.log and model_metrics.log.
    """

    def __init__(self, log_dir: Path, metrics_dir: Path) -> None:
        files = {
            ACCESS_LOG: _file(log_dir / "access_log.log", BARE),
            MODEL_LOG: _file(log_dir / "model_log.log", WITH_THREAD),
            MODEL_METRICS: _file(metrics_dir / "model_metrics.log", BARE),
            TS_METRICS: _file(metrics_dir / "ts_metrics.log", BARE),
        }
        rest = _file(log_dir / "ts_log.log", WITH_THREAD)
        self._writers = [_Threaded(_Files(files, rest)), _Threaded(_Console())]

    def start(self) -> None:
        """Take over what this process logs."""
        logging.raiseExceptions = False  # a terminal that has gone is no reason for a traceback
        root = logging.getLogger()
        root.handlers = [*self._writers]
        root.setLevel(logging.INFO)
        for writer in self._writers:
            writer.thread.start()

    def close(self) -> None:
        """Write what waits, as far as it can be written soon."""
        for writer in self._writers:
            writer.finish()


class _Threaded(logging.Handler):
    """Lets another handler write in a thread of its own."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler
        self._queue: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._lost = 0
        self.thread = threading.Thread(target=self._write, name="log", daemon=True)

    def handle(self, record: logging.LogRecord) -> bool:
        """Take a record without the lock that handlers hold while they write."""
        if self._queue.qsize() < MOST_WAITING:
            self._queue.put(record)
        else:
            self._lost += 1
        return True

    def _write(self) -> None:
        while (record := self._queue.get()) is not None:
            self._handler.handle(record)
            if self._lost and self._queue.empty():
                lost, self._lost = self._lost, 0
                logging.getLogger(__name__).warning("%d log lines came too fast and are lost", lost)

    def finish(self) -> None:
        """Let the thread come to the end of what waits."""
        self._queue.put(None)
        self.thread.join(CLOSE_TIMEOUT_S)
        if not self.thread.is_alive():
            self._handler.close()


class _Files(logging.Handler):
    """Writes each record to the file of its logger."""

    def __init__(self, files: Mapping[str, logging.Handler], rest: logging.Handler) -> None:
        super().__init__()
        self._files = files
        self._rest = rest

    def handle(self, record: logging.LogRecord) -> bool:
        """Pass a record on; the file has a lock of its own."""
        return bool(self._files.get(record.name, self._rest).handle(record))

    def close(self) -> None:
        """Close all files."""
        for file in (*self._files.values(), self._rest):
            file.close()
        super().close()


class _Console(logging.Handler):
    """Writes to the descriptor itself: a blocked buffer would hold up the end of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_Formatter(WITH_THREAD))

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a record; without the lock, for which `logging.shutdown` would wait for ever."""
        text = memoryview((self.format(record) + "\n").encode(errors="replace"))
        with contextlib.suppress(OSError):  # nobody reads any more
            while text:
                text = text[os.write(1, text) :]
        return True


class _Formatter(logging.Formatter):
    """Puts time, level, thread and logger in front of a message, as far as a file shows them."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines."""
        prefix = self._prefix.format(
            time=f"{_second(int(record.created))},{int(record.msecs):03d}",
            level=LEVELS.get(record.levelname, record.levelname),
            thread=record.threadName,
            logger=record.name,
        )
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        if record.name == MODEL_LOG:  # many lines of a worker at once
            message = message.replace("\n", "\n" + prefix)
        return prefix + message


@lru_cache(maxsize=4)
def _second(since_epoch: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since_epoch))


@lru_cache(maxsize=4)
def _day(quarter: int) -> tuple[int, ...]:
    """Return the date of a quarter of an hour since the epoch; in no zone it changes within one."""
    return time.localtime(900 * quarter)[:3]


class _DailyFile(RotatingFileHandler):
    """A file that is put aside at 100 MB, and at the first line of another day."""

    def __init__(self, file: Path) -> None:
        super().__init__(
            file, maxBytes=FILE_BYTES, backupCount=FILES_KEPT, encoding="utf-8", errors="replace"
        )
        self._day = self._written_on(file)

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802 - logging's name
        """Return whether the next line belongs into a new file."""
        day = _day(int(record.created) // 900)
        if day != self._day:
            self._day = day
            return Path(self.baseFilename).stat().st_size > 0
        return self.stream is not None and self.stream.tell() >= FILE_BYTES

    @staticmethod
    def _written_on(file: Path) -> tuple[int, ...]:
        return _day(int(file.stat().st_mtime) // 900)


def _file(file: Path, prefix: str) -> logging.Handler:
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = _DailyFile(file)
    handler.setFormatter(_Formatter(prefix))
    return handler


def log_access(client: object, method: str, target: str, status: int, seconds: float) -> None:
    """Write the line of one answer.

    Args:
        client: host and port, or None on a Unix socket.
        target: path and query as the client wrote them.
        seconds: from the request's last header to the answer.
    """
    address = "/{}:{}".format(*client) if isinstance(client, tuple) else "/unix"
    text = f'{address} "{method} {target} HTTP/1.1" {status} {round(1000 * seconds)}'
    _log(_access_log, logging.INFO, text)


def _log(to: logging.Logger, level: int, text: str, thread: str | None = None) -> None:
    """Log without looking for the calling line, which would take most of the time."""
    record = to.makeRecord(to.name, level, "", 0, text, (), None)
    if thread is not None:
        record.threadName = thread
    to.handle(record)


class WorkerOutput:
    """Logs what a worker prints, line by line; read on the event loop, so a worker never waits.

    Args:
        pipe: the reading end.
        thread: shown as the line's thread, as in `W-9000-echo_1.0-stdout`.
        level: INFO for standard output, WARNING for standard error.
    """

    def __init__(self, pipe: IO[bytes], thread: str, level: int) -> None:
        self._pipe = pipe
        self._thread = thread
        self._level = level
        self._unfinished = b""
        self.last_line = ""
        self._loop = asyncio.get_running_loop()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._read)

    def _read(self) -> bool:
        """Read what is there; return whether there may be more."""
        if self._pipe.closed:
            return False
        try:
            data = os.read(self._pipe.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return False
        lines, _, rest = (self._unfinished + data).rpartition(b"\n")
        if not data or len(rest) > CHUNK_BYTES:  # its end, or a line without one
            lines, rest = self._unfinished + data, b""
        self._unfinished = rest
        if lines:
            self._log(lines.decode("utf-8", "replace"))
        if not data:
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()
        return bool(data)

    def _log(self, text: str) -> None:
        self.last_line = text.rstrip().rpartition("\n")[2]
        _log(_model_log, self._level, text, self._thread)

    def finish(self) -> None:
        """Log the rest, after the worker has ended, and close the pipe."""
        while self._read():
            pass
        if not self._pipe.closed:  # a process that it has left behind holds the other end
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()


class WorkerPipes:
    """The two pipes of a worker's output.

    Args:
        worker: as in `W-9000-echo_1.0`.
    """

    def __init__(self, worker: str) -> None:
        out, self.stdout = os.pipe()
        err, self.stderr = os.pipe()
        self._outputs = [
            WorkerOutput(os.fdopen(out, "rb", 0), f"{worker}-stdout", logging.INFO),
            WorkerOutput(os.fdopen(err, "rb", 0), f"{worker}-stderr", logging.WARNING),
        ]

    def close(self) -> None:
        """Close the server's copies of the writing ends."""
        os.close(self.stdout)
        os.close(self.stderr)

    def finish(self) -> None:
        """Log what is left."""
        for output in self._outputs:
            output.finish()

    @property
    def last_line(self) -> str:
        """The last line of standard error, else of standard output."""
        return next((o.last_line for o in reversed(self._outputs) if o.last_line), "")
