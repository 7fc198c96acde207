"""Where lines of a log go: files that are put aside when they are full or old, and the console."""

import contextlib
import gzip
import os
import re
import shutil
import threading
import time
from functools import partial
from pathlib import Path

from modelyard.plugins.torchserve.layout import FINEST, BadPattern, DateFormat
from modelyard.plugins.torchserve.log_config import Appender, Rolling
from modelyard.serve.dataplane.log_file import Console, LogFile, make_room

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
