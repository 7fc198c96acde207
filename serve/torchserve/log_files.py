"""Where lines of a log go: files that are put aside when they are full or old, and the console."""

from __future__ import annotations

import contextlib
import gzip
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from modelyard.serve.torchserve.layout import BadPattern, DateFormat
from modelyard.serve.torchserve.log_config import Appender, Rolling

CONSOLE_BYTES = 8 << 20
"""Of lines that wait for a reader of standard output; what comes beyond is lost."""
CLOSE_TIMEOUT_S = 2.0

_DATE_OR_INDEX = re.compile(r"%(?:d(?:ate)?(?:\{([^}]*)\})?|(0\d+)?i)")


class Sink(Protocol):
    """Takes encoded lines; called by one thread."""

    def write(self, data: bytes, now: float) -> int:
        """Write whole lines; return how many were lost."""

    def close(self) -> None:
        """Write what waits, as far as it can be written soon."""


def open_sink(appender: Appender) -> Sink | None:
    """Return what writes the lines of an appender; None where nobody would see them.

    Raises:
        OSError: a file cannot be opened.
    """
    if appender.file is not None:
        return FileSink(appender.file, appender.rolling, appender.appends)
    descriptor = 2 if appender.is_stderr else 1
    return None if _is_null(descriptor) else Console(descriptor)


def _is_null(descriptor: int) -> bool:
    try:
        return os.fstat(descriptor).st_rdev == Path(os.devnull).stat().st_rdev
    except OSError:
        return True


def _write(descriptor: int, data: bytes) -> int:
    """Write everything; return how many lines could not be."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:  # the disk is full, or nobody reads any more
        return bytes(rest).count(b"\n")
    return 0


class Console:
    """Standard output or standard error.

    It writes to the descriptor itself, in a thread: a reader that has stopped must hold up neither
    the files nor the end of the process.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._taken = 0
        self._written = 0
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="log-console", daemon=True)
        self._thread.start()

    def write(self, data: bytes, now: float) -> int:
        """Hand lines to the thread."""
        if self._taken - self._written > CONSOLE_BYTES:
            return data.count(b"\n")
        self._taken += len(data)
        self._waiting.put(data)
        lost, self._lost = self._lost, 0
        return lost

    def _run(self) -> None:
        while (data := self._waiting.get()) is not None:
            self._lost += _write(self._descriptor, data)
            self._written += len(data)

    def close(self) -> None:
        """Wait a short while for the reader."""
        self._waiting.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)


class FileSink:
    """A file that is put aside when it is full, and at the first line of another day.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, file: Path, rolling: Rolling | None, appends: bool = True) -> None:
        self._file = file
        self._rolling = rolling or Rolling(None, None)
        self._descriptor = -1
        self._packing: threading.Thread | None = None
        file.parent.mkdir(parents=True, exist_ok=True)
        self._open(0 if appends else os.O_TRUNC)
        written_at = file.stat().st_mtime if self._size else time.time()
        self._period = self._period_at(written_at)
        if self._rolling.at_start and self._size:
            self._roll(written_at)
        self._written_at = written_at

    def write(self, data: bytes, now: float) -> int:
        """Write lines, into a new file where one is due; a file is full after a whole line."""
        rolling, lost = self._rolling, 0
        if rolling.period is not None and (period := self._period_at(now)) != self._period:
            self._period = period
            if self._size:
                self._roll(self._written_at)
        self._written_at = now
        while rolling.max_bytes is not None and self._size + len(data) >= rolling.max_bytes:
            end = data.find(b"\n", max(0, rolling.max_bytes - self._size - 1)) + 1 or len(data)
            lost += self._put(data[:end])
            data = data[end:]
            self._roll(now)
        return lost + self._put(data)

    def close(self) -> None:
        """Close the file; one that is being packed is waited for."""
        os.close(self._descriptor)
        if self._packing is not None:
            self._packing.join()

    def _open(self, flags: int = 0) -> None:
        """Open the file, where there may be one already, which stays open when that fails."""
        flags |= os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._file, flags, 0o666)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor
        self._size = os.fstat(self._descriptor).st_size

    def _put(self, data: bytes) -> int:
        self._size += len(data)
        return _write(self._descriptor, data) if data else 0

    def _period_at(self, now: float) -> str:
        return _period(int(now) // 60, self._rolling.period) if self._rolling.period else ""

    def _roll(self, written_at: float) -> None:
        """Put the file aside; where that fails it goes on as it is."""
        rolling = self._rolling
        if self._packing is not None:
            self._packing.join()
        try:
            if rolling.pattern is None:
                _shift(lambda index: Path(f"{self._file}.{index}"), rolling.keep)
                self._file.replace(f"{self._file}.1")
            else:
                self._put_aside(_aside(self._file, rolling, written_at))
            self._open()
        except OSError:
            self._size = 0  # tried again after as many bytes

    def _put_aside(self, to: Path) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        if to.suffix != ".gz":
            self._file.replace(to)
            return
        plain = to.with_name(f"{to.name}.part")
        self._file.replace(plain)
        self._packing = threading.Thread(target=_pack, args=(plain, to), name="log-pack")
        self._packing.start()


_PERIODS = {"%Y": 1, "%m": 2, "%d": 3, "%H": 4, "%M": 5, "%S": 5}


def _period(minute: int, field: str) -> str:
    """Return the period of a minute since the epoch; seconds count as minutes."""
    return str(time.localtime(60 * minute)[: _PERIODS[field]])


def _shift(name: Callable[[int], Path], keep: int) -> None:
    """Make room for a file of index 1; the oldest goes."""
    for index in range(keep - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            name(index).replace(name(index + 1))


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
        _shift(name, rolling.keep)
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
