"""The page of the server's log: its last lines, for whoever looks at them."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from modelyard.plugins.ops.console.render import Renderer
from modelyard.plugins.ops.console.visit import Page, Visit
from modelyard.serve.errors import BadRequest
from modelyard.serve.http.connection import Answer

MOST_LINES = 1000
"""Records that are kept; the file, or standard error, has them all."""
MOST_CHARACTERS = 2000
"""Most characters of one record; the rest is cut."""
SHOWN = 200
"""Lines on the page, the newest ones."""
MOST_TEXT = 200
"""Characters that are looked for."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class Line(NamedTuple):
    """One record of the log."""

    number: int
    """Number from 1 up, in order."""
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


class LogPages:
    """The log, and its updates."""

    def __init__(self, tail: LogTail, renderer: Renderer) -> None:
        self._tail = tail
        self._renderer = renderer

    def pages(self) -> Sequence[Page]:
        """Return them all."""
        return [
            Page("GET", "/log", "view", self._show),
            Page("GET", "/log/lines", "view", self._update),
        ]

    async def _show(self, visit: Visit) -> Answer:
        level, contains = _wanted(visit)
        values = {
            **self._lines(level, contains),
            "levels": LEVELS,
            "level": level,
            "contains": contains,
            "most_text": MOST_TEXT,
        }
        return self._renderer.page(visit, "log.html", values)

    async def _update(self, visit: Visit) -> Answer:
        return self._renderer.part("live_log.html", self._lines(*_wanted(visit)))

    def _lines(self, level: str, contains: str) -> dict[str, object]:
        least = logging.getLevelNamesMapping()[level]
        found = self._tail.lines(least, contains)
        return {"lines": found[-SHOWN:][::-1], "left_out": max(0, len(found) - SHOWN)}


def _wanted(visit: Visit) -> tuple[str, str]:
    """Return the level and the text that a page asks for.

    Raises:
        BadRequest: there is no such level, or the text is too long.
    """
    level, contains = visit.query.get("level", "INFO"), visit.query.get("contains", "")
    if level not in LEVELS:
        raise BadRequest(f"level: expected one of {', '.join(LEVELS)}, got {level[:40]!a}")
    if len(contains) > MOST_TEXT:
        raise BadRequest(f"contains: expected up to {MOST_TEXT} characters, got {len(contains)}")
    return level, contains
