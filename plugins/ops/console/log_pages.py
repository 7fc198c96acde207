"""The page of the server's log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from modelyard.plugins.ops.console.log_tail import LogTail
from modelyard.plugins.ops.console.render import Renderer
from modelyard.plugins.ops.console.visit import Page, Visit
from modelyard.serve.errors import BadRequest
from modelyard.serve.http.connection import Answer

SHOWN = 200
"""Lines on the page, the newest ones."""
MOST_TEXT = 200
"""Characters that are looked for."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


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
