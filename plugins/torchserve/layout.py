"""log4j's pattern layout: `%d{ISO8601} [%-5p] %t %c - %m%n` → what stands around a message.

Source: https://logging.apache.org/log4j/2.x/manual/pattern-layout.html
"""

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
    "ISO8601": "yyyy-MM-dd'T'HH:mm:ss,SSS",
    "ISO8601_BASIC": "yyyyMMdd'T'HHmmss,SSS",
    "ISO8601_OFFSET_DATE_TIME_HHCMM": "yyyy-MM-dd'T'HH:mm:ss,SSSXXX",
    "ISO8601_OFFSET_DATE_TIME_HHMM": "yyyy-MM-dd'T'HH:mm:ss,SSSZ",
    "ABSOLUTE": "HH:mm:ss,SSS",
    "COMPACT": "yyyyMMddHHmmssSSS",
    "DATE": "dd MMM yyyy HH:mm:ss,SSS",
}
DATES |= {
    f"{name}_PERIOD": DATES[name].replace(",", ".")
    for name in ("DEFAULT", "ISO8601", "ABSOLUTE", "DATE")
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


_FRACTION = re.compile("\x01+")
"""Fraction of a second, in what `strftime` has written: one mark for each digit."""
Warn = Callable[[str], None]


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
        self._format = "".join(_date_fields(DATES.get(pattern, pattern)))
        self._second, self._text = -1, ""

    def at(self, milliseconds: int) -> str:
        """Return the date of a time since the epoch."""
        second, rest = divmod(milliseconds, 1000)
        if second != self._second:
            moment = datetime.fromtimestamp(second).astimezone(self._zone)
            offset = moment.strftime("%z")  # Python 3.12 knows "%:z"
            self._text = moment.strftime(self._format.replace("%:z", f"{offset[:3]}:{offset[3:]}"))
            self._second = second
        digits = f"{rest:03d}000000"
        return _FRACTION.sub(lambda marks: digits[: len(marks[0])], self._text)

    @property
    def finest(self) -> str | None:
        """The field that changes most often, of `FINEST`; None where none is there."""
        return next((field for field in FINEST if field in self._format), None)


def _date_fields(pattern: str) -> Iterator[str]:
    """Yield what `strftime` reads, and a mark for each digit of a fraction of a second."""
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
            yield "\x01" * min(9, len(field))
        else:
            raise BadPattern(f"the date {pattern!r} has a field {field!r}")


class Said(NamedTuple):
    """What a layout may show of a record beside its message and time."""

    level: str
    thread: str
    logger: str


Around = Callable[[int], tuple[str, str]]
"""Returns what stands before and after the messages of one source at a time in milliseconds."""


class _Field(NamedTuple):
    """One conversion of a pattern, or the text between two."""

    kind: str
    content: str | DateFormat
    match: re.Match[str] | None = None

    def bind(self, said: Said) -> str | DateFormat:
        """Return the text for one source, or what makes it of a time."""
        if isinstance(self.content, DateFormat):
            return self.content
        known = {"p": said.level, "t": said.thread, "c": said.logger, "pid": str(os.getpid())}
        text = {**known, "n": "\n", "%": "%", "ex": ""}.get(self.kind, self.content)
        if self.kind == "c" and self.content.isdigit() and int(self.content):
            text = ".".join(text.split(".")[-int(self.content) :])
        if self.match is None:
            return text
        if self.match["most"]:
            text = text[-int(self.match["most"]) :] if int(self.match["most"]) else text
        least = int(self.match["least"] or 0)
        return text.ljust(least) if self.match["left"] else text.rjust(least)


class Layout:
    """A pattern.

    Args:
        pattern: pattern as log4j has it.
        warn: called with what of the pattern is not followed.
    """

    def __init__(self, pattern: str, warn: Warn = lambda text: None) -> None:
        self.pattern = pattern
        fields = list(_read(pattern[:_TOO_LONG], warn))
        places = [at for at, field in enumerate(fields) if field.kind == "m"]
        if len(places) > 1:
            warn("a second %m is left out")
        if not places:
            warn("without %m no message would be seen: it stands at the end")
            places, fields = [len(fields)], [*fields, _Field("m", ""), _Field("", "\n")]
        self._before = fields[: places[0]]
        self._after = [field for field in fields[places[0] :] if field.kind != "m"]

    def around(self, said: Said) -> Around:
        """Return what stands around the messages of one source."""

        def join(fields: list[str | DateFormat], milliseconds: int) -> str:
            parts = (each if isinstance(each, str) else each.at(milliseconds) for each in fields)
            return "".join(parts)

        before = [field.bind(said) for field in self._before]
        # A date behind the message is one of the start: nobody was seen to write one.
        after = join([field.bind(said) for field in self._after], int(time.time() * 1000))
        return lambda milliseconds: (join(before, milliseconds), after)


def _read(pattern: str, warn: Warn) -> Iterator[_Field]:
    at = 0
    while (match := _TOKEN.search(pattern, at)) is not None:
        if match.start() > at:
            yield _Field("", pattern[at : match.start()])
        # The longest conversion that the letters begin with: `%mx` is %m and an x.
        letters, at = match["name"], match.start("name")
        ends = range(len(letters), 0, -1)
        name = next((letters[:end] for end in ends if letters[:end] in _NAMES), "")
        at += len(name or letters)
        options: list[str] = []
        while name not in ("m", "n", "%") and pattern[at : at + 1] == "{":
            end = _closing(pattern, at)
            options.append(pattern[at + 1 : end])
            at = end + 1
        first, kind = options[0] if options else "", _NAMES.get(name, "")
        if kind == "style":
            warn(f"%{name} is left out; what it stands around is written without colour")
            yield from _read(first, warn)
        elif kind == "d":
            yield _Field("d", _date(first or "DEFAULT", *options[1:2], warn=warn))
        elif kind:
            yield _Field(kind, first, match)
        else:
            warn(f"%{letters} is left out")
    if at < len(pattern):
        yield _Field("", pattern[at:])


_shared = lru_cache(maxsize=64)(DateFormat)
"""So that layouts of one date write each second once."""


def _date(pattern: str, zone: str | None = None, *, warn: Warn) -> DateFormat:
    try:
        return _shared(pattern, zone)
    except BadPattern as error:
        warn(f"%d: {error}; it is written as ISO 8601")
        return DateFormat("ISO8601")


_NAMES = {
    "d": "d", "date": "d", "p": "p", "level": "p", "t": "t", "thread": "t", "tn": "t",
    "threadName": "t", "c": "c", "logger": "c", "C": "c", "class": "c", "m": "m", "msg": "m",
    "message": "m", "n": "n", "%": "%", "pid": "pid", "processId": "pid",
    "style": "style", "highlight": "style", "ex": "ex", "exception": "ex", "throwable": "ex",
    "xEx": "ex", "xException": "ex", "xThrowable": "ex", "rEx": "ex", "rException": "ex",
    "rThrowable": "ex",
}  # fmt: skip
"""Conversion → what it shows; `ex` is nothing here: an exception always follows its message."""


def _closing(pattern: str, at: int) -> int:
    """Return where the brace that opens at `at` is closed."""
    depth = 0
    for place in range(at, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[place], 0)
        if depth == 0:
            return place
    return len(pattern)
