"""log4j's pattern layout: `%d{ISO8601} [%-5p] %t %c - %m%n` → what stands around a message.

Source: https://logging.apache.org/log4j/2.x/manual/pattern-layout.html
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

TORCHSERVE_LEVELS = {"WARNING": "WARN", "CRITICAL": "FATAL"}
"""Python's name of a level → log4j's."""

_TOKEN = re.compile(
    r"%(?P<left>-)?(?P<zeros>0)?(?P<least>\d{1,3})?(?:\.-?(?P<most>\d{1,5}))?(?P<name>%|[A-Za-z]+)"
)
_TOO_LONG = 4096
"""Characters of a pattern."""

DATES = {
    "DEFAULT": "yyyy-MM-dd HH:mm:ss,SSS",
    "DEFAULT_PERIOD": "yyyy-MM-dd HH:mm:ss.SSS",
    "ISO8601": "yyyy-MM-dd'T'HH:mm:ss,SSS",
    "ISO8601_BASIC": "yyyyMMdd'T'HHmmss,SSS",
    "ISO8601_PERIOD": "yyyy-MM-dd'T'HH:mm:ss.SSS",
    "ISO8601_OFFSET_DATE_TIME_HHCMM": "yyyy-MM-dd'T'HH:mm:ss,SSSXXX",
    "ISO8601_OFFSET_DATE_TIME_HHMM": "yyyy-MM-dd'T'HH:mm:ss,SSSZ",
    "ABSOLUTE": "HH:mm:ss,SSS",
    "ABSOLUTE_PERIOD": "HH:mm:ss.SSS",
    "COMPACT": "yyyyMMddHHmmssSSS",
    "DATE": "dd MMM yyyy HH:mm:ss,SSS",
    "DATE_PERIOD": "dd MMM yyyy HH:mm:ss.SSS",
}
_FIELD = re.compile(r"'((?:[^']|'')*)'|([A-Za-z])\2*|[^A-Za-z']+")
_FIELDS = {
    "y": "%Y", "yy": "%y", "yyyy": "%Y", "u": "%Y", "uuuu": "%Y",
    "M": "%m", "MM": "%m", "MMM": "%b", "MMMM": "%B", "d": "%d", "dd": "%d", "D": "%j", "DDD": "%j",
    "E": "%a", "EEE": "%a", "EEEE": "%A", "H": "%H", "HH": "%H", "h": "%I", "hh": "%I",
    "m": "%M", "mm": "%M", "s": "%S", "ss": "%S", "a": "%p",
    "Z": "%z", "XXX": "%:z", "z": "%Z",
}  # fmt: skip
"""Java's field of a date → that of `strftime`."""
FINEST = ("%S", "%M", "%H", "%d", "%m", "%Y")
"""Fields of `strftime` by how often they change; each includes those after it."""


class BadPattern(ValueError):
    """A date that cannot be followed."""


class DateFormat:
    """A date as Java's SimpleDateFormat writes it, of a time in milliseconds.

    Raises:
        BadPattern: a field, or the time zone, is unknown.
    """

    def __init__(self, pattern: str, zone: str | None = None) -> None:
        try:
            self._zone = ZoneInfo(zone) if zone else None
        except (OSError, ValueError, KeyError) as error:
            raise BadPattern(f"the time zone {zone!r} is unknown") from error
        pieces = [""]
        self._digits: list[int] = []
        """Of the fractions of a second, which stand between the pieces."""
        for text in _date_fields(DATES.get(pattern, pattern)):
            if text.startswith("S"):
                self._digits.append(len(text))
                pieces.append("")
            else:
                pieces[-1] += text
        self._pieces = pieces
        self._at = self._second = -1
        self._text = ""
        self._written: list[str] = []

    def at(self, milliseconds: int) -> str:
        """Return the date of a time since the epoch."""
        if milliseconds != self._at:
            self._at = milliseconds
            self._text = self._make(milliseconds)
        return self._text

    def _make(self, milliseconds: int) -> str:
        second, rest = divmod(milliseconds, 1000)
        if second != self._second:
            self._second = second
            self._written = [_date(piece, second, self._zone) for piece in self._pieces]
        text, *others = self._written
        for digits, after in zip(self._digits, others, strict=True):
            text += f"{rest:03d}".ljust(digits, "0")[:digits] + after
        return text

    @property
    def finest(self) -> str | None:
        """The field that changes most often, of `FINEST`; None where none is there."""
        return next((field for field in FINEST if any(field in p for p in self._pieces)), None)


def _date_fields(pattern: str) -> Iterator[str]:
    """Yield what `strftime` reads, and fractions of a second as they are."""
    at = 0
    while at < len(pattern):
        match = _FIELD.match(pattern, at)
        if match is None:
            raise BadPattern(f"the date {pattern!r} has a quote without its end")
        at = match.end()
        field = match[0]
        if match[1] is not None:
            yield (match[1].replace("''", "'") or "'").replace("%", "%%")
        elif match[2] is None:
            yield field.replace("%", "%%")
        elif field in _FIELDS:
            yield _FIELDS[field]
        elif field[0] in "Sn":
            yield "S" * min(9, len(field))
        else:
            raise BadPattern(f"the date {pattern!r} has a field {field!r}")


def _date(piece: str, second: int, zone: ZoneInfo | None) -> str:
    if not piece:
        return ""
    if "%:z" in piece:  # Python 3.12 knows it
        offset = datetime.fromtimestamp(second).astimezone(zone).strftime("%z")
        piece = piece.replace("%:z", f"{offset[:3]}:{offset[3:]}")
    if zone is None:
        return time.strftime(piece, time.localtime(second))
    return datetime.fromtimestamp(second, zone).strftime(piece)


@lru_cache(maxsize=64)
def _date_format(pattern: str, zone: str | None) -> DateFormat:
    """Return a date that layouts share, so that each time is written once."""
    return DateFormat(pattern, zone)


class Said(NamedTuple):
    """What a layout may show of a record beside its message and time."""

    level: str
    thread: str
    logger: str


class Around:
    """What stands before and after the messages of one source of records."""

    def __init__(self, before: list[str | Callable[[int], str]], after: str) -> None:
        self._after = after
        texts = [each for each in before[:1] if isinstance(each, str)]
        self._head = "".join(texts)
        self._rest = before[len(texts) :]

    def at(self, milliseconds: int) -> tuple[str, str]:
        """Return both for messages of this time."""
        text = self._head
        for part in self._rest:
            text += part if isinstance(part, str) else part(milliseconds)
        return text, self._after


class Layout:
    """A pattern.

    Args:
        pattern: as log4j has it.
        warn: called with what of the pattern is not followed.
    """

    def __init__(self, pattern: str, warn: Callable[[str], None] = lambda text: None) -> None:
        self.pattern = pattern
        self._before: list[_Field] = []
        self._after: list[_Field] = []
        fields, has_message = self._before, False
        for field in self._read(pattern[:_TOO_LONG], warn):
            if field.kind != "m":
                fields.append(field)
            elif has_message:
                warn("a second %m is left out")
            else:
                fields, has_message = self._after, True
        if not has_message:
            warn("without %m no message would be seen: it stands at the end")
            self._after.append(_Field("", "\n"))

    def around(self, said: Said) -> Around:
        """Return what stands around the messages of one source."""
        before: list[str | Callable[[int], str]] = []
        for field in self._before:
            part = field.bind(said)
            if isinstance(part, str) and before and isinstance(before[-1], str):
                before[-1] += part
            else:
                before.append(part)
        # A date behind the message is one of the start: nobody was seen to write one.
        now = int(time.time() * 1000)
        parts = (field.bind(said) for field in self._after)
        return Around(before, "".join(p if isinstance(p, str) else p(now) for p in parts))

    def _read(self, pattern: str, warn: Callable[[str], None]) -> Iterator[_Field]:
        at = 0
        while (match := _TOKEN.search(pattern, at)) is not None:
            if match.start() > at:
                yield _Field("", pattern[at : match.start()])
            name, at = _longest(match["name"]), match.start("name")
            at += len(name) if name else len(match["name"])
            options: list[str] = []
            while name not in ("m", "n", "%") and pattern[at : at + 1] == "{":
                end = _closing(pattern, at)
                options.append(pattern[at + 1 : end])
                at = end + 1
            kind = _NAMES.get(name, "")
            if kind in ("style", "highlight"):
                warn(f"%{name} is left out; what it stands around is written without colour")
                yield from self._read(options[0] if options else "", warn)
            elif kind == "d":
                yield _Field("d", self._date(options, warn), match)
            elif kind:
                yield _Field(kind, options[0] if options else "", match)
            else:
                warn(f"%{match['name']} is left out")
        if at < len(pattern):
            yield _Field("", pattern[at:])

    def _date(self, options: list[str], warn: Callable[[str], None]) -> DateFormat:
        pattern = options[0] if options and options[0] else "DEFAULT"
        zone = options[1] if len(options) > 1 else None
        try:
            return _date_format(pattern, zone)
        except BadPattern as error:
            warn(f"%d: {error}; it is written as ISO 8601")
            return DateFormat("ISO8601")


_NAMES = {
    "d": "d", "date": "d", "p": "p", "level": "p", "t": "t", "thread": "t", "tn": "t",
    "threadName": "t", "c": "c", "logger": "c", "C": "c", "class": "c", "m": "m", "msg": "m",
    "message": "m", "n": "n", "%": "%", "pid": "pid", "processId": "pid",
    "style": "style", "highlight": "highlight", "ex": "ex", "exception": "ex", "throwable": "ex",
    "xEx": "ex", "xException": "ex", "xThrowable": "ex", "rEx": "ex", "rException": "ex",
    "rThrowable": "ex",
}  # fmt: skip
"""Conversion → what it shows; `ex` is nothing here: an exception always follows its message."""


def _longest(letters: str) -> str:
    """Return the longest conversion that letters begin with: `%mx` is %m and an x."""
    return next((letters[:n] for n in range(len(letters), 0, -1) if letters[:n] in _NAMES), "")


def _closing(pattern: str, at: int) -> int:
    """Return where the brace that opens at `at` is closed."""
    depth = 0
    for place in range(at, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[place], 0)
        if depth == 0:
            return place
    return len(pattern)


class _Field:
    """One conversion of a pattern, or the text between two."""

    def __init__(
        self, kind: str, content: str | DateFormat, match: re.Match[str] | None = None
    ) -> None:
        self.kind = kind
        self._content = content
        groups = match.groupdict() if match is not None else {}
        self._least = int(groups.get("least") or 0)
        self._most = int(groups.get("most") or 0)
        self._is_left = bool(groups.get("left"))

    def bind(self, said: Said) -> str | Callable[[int], str]:
        """Return the text for one source, or what makes it of a time."""
        if isinstance(self._content, DateFormat):
            return self._content.at
        texts = {
            "": self._content, "p": said.level, "t": said.thread, "n": "\n", "%": "%", "ex": "",
            "pid": str(os.getpid()),
        }  # fmt: skip
        text = texts[self.kind] if self.kind != "c" else _shorten(said.logger, self._content)
        if self._most:
            text = text[-self._most :]
        return text.ljust(self._least) if self._is_left else text.rjust(self._least)


def _shorten(logger: str, precision: str) -> str:
    """Return the last parts of a logger's name, as `%c{1}` asks for."""
    if precision.isdigit() and int(precision):
        return ".".join(logger.split(".")[-int(precision) :])
    return logger
