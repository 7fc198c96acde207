"""`--example FILE[=EXPECTED]` → a golden request and its expected answer."""

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.untrusted.json import format_json, parse_json
from modelyard.archiver.untrusted.names import quoted

TOLERANCE = 1e-3

_MAX_EXPECTED_BYTES = 16 * 1024 * 1024
# A fixed table: `mimetypes` reads the machine's files, and archives must not depend on those.
_CONTENT_TYPES = {
    ".bmp": "image/bmp",
    ".gif": "image/gif",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".json": "application/json",
    ".png": "image/png",
    ".tif": "image/tiff",
    ".tiff": "image/tiff",
    ".txt": "text/plain",
    ".webp": "image/webp",
}


@dataclass(frozen=True)
class Example:
    """A request's file and the answer expected to it."""

    request: Path
    content_type: str
    expected: bytes | None
    """JSON: {"label": "7"} or {"answer": …}; None when the handler is to say."""


def parse_example(text: str) -> Example:
    """Read FILE=EXPECTED, where EXPECTED is a JSON file, a JSON value, or a label; or FILE alone.

    Numbers are labels: `7.png=7` expects the label "7".

    Raises:
        CannotArchive: no such file, or EXPECTED is empty or broken JSON.
    """
    request, expected_text = _split(text)
    if expected_text == "":
        raise CannotArchive(f"example {quoted(text)}: nothing is expected after '='")
    expected = None if expected_text is None else format_json(_expected(expected_text))
    return Example(request, content_type(request.name), expected)


def content_type(name: str) -> str:
    """Return what a file of this name holds, as HTTP says it."""
    return _CONTENT_TYPES.get(PurePath(name).suffix.lower(), "application/octet-stream")


def _split(text: str) -> tuple[Path, str | None]:
    """Split at the first "=" whose left side is a file: names and answers may hold one too."""
    pieces = text.split("=")
    if not pieces[0]:
        raise CannotArchive(f"example {quoted(text)}: expected FILE or FILE=EXPECTED, as 7.png=7")
    for end in range(1, len(pieces) + 1):
        file = Path("=".join(pieces[:end]))
        if file.is_file():
            return file, "=".join(pieces[end:]) if end < len(pieces) else None
    raise CannotArchive(f"example {pieces[0]}: there is no such file")


def _expected(text: str) -> dict[str, Any]:
    if text.lower().endswith(".json"):
        return {"answer": _read_answer(Path(text))}
    try:
        value = parse_json(text.encode("utf-8", "replace"), _MAX_EXPECTED_BYTES)
    except ValueError as error:
        if text.lstrip()[:1] in ("{", "[", '"'):
            raise CannotArchive(f"expected answer {quoted(text)}: {error}") from error
        return {"label": text}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"label": text} if is_number else {"answer": value}


def _read_answer(file: Path) -> Any:
    try:
        return parse_json(file.read_bytes(), _MAX_EXPECTED_BYTES)
    except FileNotFoundError as error:
        raise CannotArchive(f"expected answer {file}: there is no such file") from error
    except (ValueError, OSError) as error:
        raise CannotArchive(f"expected answer {file}: {error}") from error
