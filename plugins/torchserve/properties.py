"""Java's `.properties` text ↔ keys and values.

Source: the description of `java.util.Properties.load` and `.store`,
https://docs.oracle.com/en/java/javase/17/docs/api/java.base/java/util/Properties.html
"""

import re
from collections.abc import Iterator, Mapping

from modelyard.serve.errors import StartError

_BLANK = " \t\f"
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_VARIABLE = re.compile(r"\$\$([^$]+)\$\$")


def parse_properties(text: str) -> dict[str, str]:
    r"""Return the keys and values; of a key that comes twice the last value.

    Raises:
        StartError: a `\u` escape without four hexadecimal digits.
    """
    return dict(_split(line) for line in _logical_lines(text))


def format_properties(values: Mapping[str, str]) -> str:
    """Return text that `parse_properties`, and Java, read back as the same keys and values."""
    return "".join(
        f"{_escape(key, is_key=True)}={_escape(value, is_key=False)}\n"
        for key, value in values.items()
    )


def fill_variables(values: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Put environment variables where values say `$$NAME$$`.

    Raises:
        StartError: a variable is not set.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        if name not in environment:
            raise StartError(f"Invalid Environment Variable {name}")
        return environment[name]

    return {key: _VARIABLE.sub(value_of, value) for key, value in values.items()}


def _logical_lines(text: str) -> Iterator[str]:
    """Yield lines without comments, continued ones joined."""
    pending: str | None = None
    for natural in re.split(r"\r\n|\n|\r", text):
        line = natural.lstrip(_BLANK)
        if pending is None and (not line or line[0] in "#!"):
            continue
        line = (pending or "") + line
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            pending = line[:-1]
        else:
            yield line
            pending = None
    if pending:
        yield pending


def _split(line: str) -> tuple[str, str]:
    """Split at the first `=`, `:` or blank that no backslash precedes."""
    end = 0
    while end < len(line) and line[end] not in _BLANK + "=:":
        end += 2 if line[end] == "\\" else 1
    rest = line[end:].lstrip(_BLANK)
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(_BLANK)
    return _unescape(line[:end]), _unescape(rest)


def _unescape(text: str) -> str:
    def one(match: re.Match[str]) -> str:
        escape = match[1]
        if escape == "u":
            raise StartError(f"Malformed \\uxxxx encoding: {text}")
        if len(escape) == 5:
            return chr(int(escape[1:], 16))
        return _ESCAPES.get(escape, escape)

    plain = re.sub(r"\\(u[0-9A-Fa-f]{4}|.|$)", one, text, flags=re.DOTALL)
    # Java's strings are UTF-16: a character beyond \uFFFF is written as two escapes.
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escape(text: str, *, is_key: bool) -> str:
    names = {ord(value): f"\\{name}" for name, value in _ESCAPES.items()}
    names |= {ord(mark): f"\\{mark}" for mark in ("\\=:#! " if is_key else "\\=:#!")}
    # Java reads such files as Latin-1, hence nothing but ASCII.
    escaped = re.sub(r"[^\x20-\x7e]", _as_utf16, text.translate(names))
    return f"\\{escaped}" if escaped.startswith(" ") else escaped


def _as_utf16(match: re.Match[str]) -> str:
    return "".join(
        f"\\u{unit.hex()}" for unit in re.findall(b"(?s)..", match[0].encode("utf-16-be"))
    )
