"""The last lines of the server's log, for whoever looks at them in the console."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

MOST_LINES = 1000
"""Records that are kept; the file, or standard error, has them all."""
MOST_CHARACTERS = 2000
"""Of one record; the rest is cut."""


class Line(NamedTuple):
    """One record of the log."""

    number: int
    """From 1 up, in order."""
    at: float
    """Seconds since 1970."""
    level: str
    logger: str
    text: str


class LogTail(logging.Handler):
    """Keeps the last records, as text and bounded."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[Line] = deque(maxlen=MOST_LINES)
        self._numbers = itertools.count(1)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        try:
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                error = record.exc_info[1]
                text = f"{text}: {type(error).__name__}: {error}"
        except Exception:
            self.handleError(record)
            return
        if len(text) > MOST_CHARACTERS:
            text = f"{text[:MOST_CHARACTERS]}… ({len(text)} characters)"
        name = record.name.removeprefix("modelyard.")
        line = Line(next(self._numbers), record.created, record.levelname, name, text)
        self._lines.append(line)

    @property
    def last(self) -> int:
        """The number of the newest record; 0 before the first."""
        return self._lines[-1].number if self._lines else 0

    def lines(self, least: int = logging.NOTSET, contains: str = "") -> Sequence[Line]:
        """Return what is kept, oldest first.

        Args:
            least: level below which records are left out.
            contains: text that a line must have, in whatever case.
        """
        wanted = contains.lower()
        return [
            line
            for line in list(self._lines)
            if logging.getLevelNamesMapping().get(line.level, 0) >= least
            and wanted in f"{line.logger} {line.text}".lower()
        ]


def attach(unlogged: Collection[str] = ()) -> LogTail:
    """Return what keeps the last records of this process, which is one for all of it.

    Args:
        unlogged: loggers whose records are left out.
    """
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler, LogTail):
            return handler
    tail = LogTail()
    left_out = frozenset(unlogged)
    tail.addFilter(lambda record: record.name not in left_out)
    root.addHandler(tail)
    return tail
