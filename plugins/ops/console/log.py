"""The page of the server's log: its last lines, for whoever looks at them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from modelyard.plugins.ops.console.events import LOG
from modelyard.plugins.ops.console.models import ModelPages
from modelyard.plugins.ops.console.visit import Page, Visit
from modelyard.serve.control.store import file_stem
from modelyard.serve.dataplane.metrics import KINDS
from modelyard.serve.errors import BadRequest
from modelyard.serve.http.connection import Answer

MOST_LINES = 1000
"""Records that are kept; the file, or standard error, has them all."""
MOST_CHARACTERS = 2000
"""Most characters of one record; the rest is cut."""
SHOWN = 200
"""Lines on the page, the newest ones."""
END_BYTES = 64 << 10
"""End of a worker's log that is shown."""
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


@dataclass(frozen=True)
class LogPages:
    """The log, and its updates."""

    tail: LogTail
    models: ModelPages
    folder: Path
    """Folder of the server's log, which has one for each version."""

    def pages(self) -> Sequence[Page]:
        """Return them all."""
        return [
            Page("GET", "/log", "view", self._show),
            Page("GET", "/log/lines", "view", self._update),
            Page("GET", f"/models/{{model}}/{{version}}{LOG}", "view", self._show_worker),
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
        return visit.page("log.html", values)

    async def _show_worker(self, visit: Visit) -> Answer:
        """Show the end of what a worker has written; the file outlives the worker."""
        model = self.models.find(visit)
        pools = list(zip(KINDS, model.pools, strict=False))
        names = [f"{kind}-{slot.number}" for kind, pool in pools for slot in pool.slots]
        wanted = visit.query.get("worker", names[0] if names else f"{KINDS[0]}-1")
        kind, _, number = wanted.partition("-")
        stems = {kind: pool.plan.log_stem for kind, pool in pools}
        if kind not in stems or not number.isdecimal() or len(number) > 6:
            known = ", ".join(names)
            raise BadRequest(f"worker: expected one of {known}, got {wanted[:40]!a}")
        folder = self.folder / f"{file_stem(model.name)}-{model.version}"
        text, is_cut = await asyncio.to_thread(read_end, folder / f"{stems[kind]}-{number}.log")
        values = {"worker": wanted, "names": names, "text": text, "is_cut": is_cut}
        return visit.page("worker_log.html", {**self.models.common(model, LOG), **values})

    async def _update(self, visit: Visit) -> Answer:
        return visit.part("live_log.html", self._lines(*_wanted(visit)))

    def _lines(self, level: str, contains: str) -> dict[str, object]:
        least = logging.getLevelNamesMapping()[level]
        found = self.tail.lines(least, contains)
        return {"lines": found[-SHOWN:][::-1], "left_out": max(0, len(found) - SHOWN)}


def read_end(file: Path) -> tuple[str, bool]:
    """Return the end of a file, from the start of a line on, and whether more comes before it."""
    try:
        with file.open("rb") as opened:
            start = max(0, opened.seek(0, os.SEEK_END) - END_BYTES)
            opened.seek(start)
            data = opened.read(END_BYTES)
    except FileNotFoundError:
        return "", False
    return (data.partition(b"\n")[2] if start else data).decode("utf-8", "replace"), start > 0


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
