"""What strict JSON is, for files and requests alike, and typed access that names the field.

Everybody reads the same in it: no number, character or key is guessed. Python's own reader takes
NaN and Infinity, makes infinity of 1e400, keeps halves of characters, and of a key that is there
twice the last.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from modelyard.archiver.untrusted.names import quoted

MAX_DEPTH = 64

_T = TypeVar("_T")
# The closing quote is optional so that text full of open strings is still read once, not n times.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.S)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_DIGITS = 308  # of what a float holds
_MISSING: Any = object()


class RefusedJson(ValueError):
    """It may be JSON, and holds what readers would differ in; the message is a phrase."""


def parse_json(
    data: bytes | bytearray | str,
    max_bytes: int | None = None,
    *,
    max_depth: int = MAX_DEPTH,
    fast: Callable[[bytes | bytearray | str], Any] | None = None,
) -> Any:
    """Parse UTF-8 JSON in which every reader sees the same values.

    Args:
        data: the text.
        max_bytes: the longest that is read.
        max_depth: how deep lists and objects may be nested.
        fast: a parser that is strict but for repeated keys and has a limit of depth itself, as
            orjson's is; it is tried first, and what it makes of the numbers is what is returned.

    Raises:
        ValueError: too long, not UTF-8, or not JSON; the message is a phrase without a file's name.
        RefusedJson: nested too deep, a key given twice, half a character, or a number that JSON or
            a float does not have.
    """
    if max_bytes is not None and len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes; at most {max_bytes} are read")
    if fast is not None:
        try:
            value = fast(data)
            if not _may_repeat_keys(data, value):
                return value
        except ValueError:
            pass  # the slower reader says what is wrong
    text = data if isinstance(data, str) else _decode(data)
    _check_depth(text, max_depth)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise RefusedJson("nested deeper than it can be read") from error
    if "\\u" in text:
        _check_characters(value)
    return value if fast is None else fast(text)


def format_json(document: Any) -> bytes:
    """Write JSON for people: 2-space indent, a line's end after it."""
    return (json.dumps(document, indent=2) + "\n").encode()


def _decode(data: bytes | bytearray) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start} cannot be decoded") from error
    if text.startswith("\ufeff"):
        raise ValueError("it starts with a byte order mark; save it as plain UTF-8")
    return text


def _may_repeat_keys(data: bytes | bytearray | str, value: Any) -> bool:
    """Return whether there are more colons than the keys that were kept account for."""
    colons = data.count(":") if isinstance(data, str) else data.count(b":")
    values = [value]
    for each in values:  # it grows meanwhile: what is outside comes before what is inside
        if not colons:
            break
        if isinstance(each, dict):
            colons -= len(each)
            values += each.values()
        elif isinstance(each, list):
            values += each
    return colons > 0


def _check_depth(text: str, max_depth: int) -> None:
    """Refuse deep nesting before the parser, which recurses, sees it."""
    depth = 0
    for token in _TOKEN.finditer(text):
        first = token[0][0]
        if first in "[{":
            depth += 1
        elif first in "]}":
            depth -= 1
        if depth > max_depth:
            raise RefusedJson(f"nested deeper than {max_depth} levels")


def _check_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise RefusedJson(f"{quoted(half)} is half a character, a lone surrogate") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key in counts if counts[key] > 1)
        raise RefusedJson(f"the key {quoted(twice)} is given twice")
    return values


def _refuse_constant(text: str) -> Any:
    raise RefusedJson(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RefusedJson(f"the number {text[:40]} is too large")
    return value


def _whole(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise RefusedJson(f"the number {text[:40]}… is too large")
    return int(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_without_duplicates,
    parse_constant=_refuse_constant,
    parse_float=_finite,
    parse_int=_whole,
)


class Fields:
    """The fields of one JSON object, read with their types; problems are gathered, not raised.

    Attributes:
        path: where the object is, as `modelyard.golden[1]`; empty for the outermost one.
        problems: shared by the objects of one document, one sentence per wrong field.
    """

    def __init__(self, value: Any, path: str = "", problems: list[str] | None = None) -> None:
        self.path = path
        self.problems = [] if problems is None else problems
        self.is_object = isinstance(value, dict)
        self.values: Mapping[str, Any] = value if self.is_object else {}
        if value is not _MISSING and not self.is_object:
            self.wrong("", "an object", value)

    def check(self) -> None:
        """Raise what was gathered.

        Raises:
            ValueError: every field that is wrong.
        """
        if self.problems:
            raise ValueError("; ".join(self.problems))

    def text(self, key: str) -> str:
        """Read a required string that is not empty; "" stands for one that is wrong."""
        return self._read(key, "a string that is not empty", _is_text, "")

    def text_or_none(self, key: str) -> str | None:
        """Read a string that may be absent, null or empty, which all mean None."""
        return None if self.values.get(key) in (None, "") else self.text(key)

    def sha256(self, key: str) -> str:
        """Read a required SHA-256, which is text as files and reports hold it."""
        digest = self.text(key)
        if digest and not _SHA256.fullmatch(digest):
            self.wrong(key, "64 lower-case hexadecimal digits", digest)
        return digest

    def integer(self, key: str, absent: int | None = None) -> int:
        """Read a whole number, which may lack where `absent` stands for it; 0 for a wrong one."""
        return self._read(key, "a whole number", _is_integer, 0, absent)

    def number(self, key: str) -> float:
        """Read a required number; 0 stands for one that is wrong."""
        return float(self._read(key, "a number", is_number, 0.0))

    def boolean(self, key: str, absent: bool | None = None) -> bool:
        """Read true or false, as `integer`; False stands for what is wrong."""
        return self._read(key, "true or false", lambda each: isinstance(each, bool), False, absent)

    def object(self, key: str, *, may_lack: bool = False) -> "Fields":
        """Read an object; an empty one stands for one that lacks and may."""
        if may_lack and key not in self.values:
            return Fields({}, self.at(key), self.problems)
        return Fields(self._present(key, "an object"), self.at(key), self.problems)

    def mapping(
        self, key: str, read: Callable[["Fields", str], _T], *, may_lack: bool = False
    ) -> dict[str, _T]:
        """Read an object of any fields, each of which `read` takes by its name."""
        inner = self.object(key, may_lack=may_lack)
        return {name: read(inner, name) for name in inner.values}

    def items(self, key: str, absent: list[Any] | None = None) -> list[Any]:
        """Read a list, as `integer`; [] stands for one that is wrong."""
        return self._read(key, "a list", lambda value: isinstance(value, list), [], absent)

    def objects(self, key: str) -> "list[Fields]":
        """Read a required list of objects."""
        items = enumerate(self.items(key))
        return [Fields(item, f"{self.at(key)}[{i}]", self.problems) for i, item in items]

    def at(self, key: str) -> str:
        """Name the field `key` of this object from the outermost object on."""
        shown = key if re.fullmatch(r"\w+(\[\d+\])?", key) else f"[{quoted(key)}]"
        separator = "." if self.path and not shown.startswith("[") else ""
        return f"{self.path}{separator}{shown}" if key else self.path

    def wrong(self, key: str, expected: str, value: Any) -> None:
        """Note that the field holds something else than expected."""
        where = f"{self.at(key)}: " if self.at(key) else ""
        self.problems.append(f"{where}expected {expected}, found {_shown(value)}")

    def _present(self, key: str, expected: str) -> Any:
        value = self.values.get(key, _MISSING)
        if value is _MISSING and self.is_object:
            self.problems.append(f"{self.at(key)}: expected {expected}, found nothing")
        return value

    def _read(
        self,
        key: str,
        expected: str,
        fits: Callable[[Any], bool],
        default: _T,
        absent: _T | None = None,
    ) -> _T:
        if absent is not None and key not in self.values:
            return absent
        value = self._present(key, expected)
        if value is not _MISSING and not fits(value):
            self.wrong(key, expected, value)
        return value if value is not _MISSING and fits(value) else default


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a value is a number that any reader of JSON holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return quoted(value)
    kinds: dict[type, str] = {dict: "an object", list: "a list"}
    return kinds.get(type(value)) or json.dumps(value)[:80]
