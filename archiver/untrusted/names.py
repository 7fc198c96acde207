"""The rules for names: of models, of versions, and of files inside an archive."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

from modelyard.archiver.errors import BadName
from modelyard.base.plugins import registered

MANIFEST_NAME = "MAR-INF/MANIFEST.json"
SIGNING_NAME = "MAR-INF/MANIFEST.sig.json"
SBOM_NAME = "MAR-INF/sbom.cdx.json"
REFERENCE_NAME = "MAR-INF/reference.json"
EXPLANATIONS_NAME = "MAR-INF/explanations.json"
PROVEN_NAME = "MAR-INF/proven.json"
LOCK_NAME = "MAR-INF/requirements.lock"
WHEELS_FOLDER = "MAR-INF/wheels"
SHARED_FOLDER = ".shared"
"""Folder of an unpacked archive: what its workers make once, and map."""

_HANDLERS = (
    "base_handler",
    "image_classifier",
    "tabular",
    "text",
    "text_classifier",
)


@cache
def builtin_handlers() -> tuple[str, ...]:
    """Return the handlers that a server brings along, core's and those of plug-ins.

    An archive records the name and holds no file for it.
    """
    return tuple(sorted({*_HANDLERS, *registered("tasks")}))


_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")

# Limits of common file systems, so that what is archived here can be unpacked anywhere.
_MAX_NAME_BYTES = 1024
_MAX_PART_BYTES = 255
# Windows opens these as devices in every folder and with every suffix.
_DEVICE_NAME = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|com[0-9¹²³]|lpt[0-9¹²³])", re.I)
_DRIVE = re.compile(r"[A-Za-z]:")


def check_name(name: str) -> None:
    """Refuse a model name outside the one rule that holds in every place names appear.

    Raises:
        BadName: the name breaks the rule.
    """
    _check("name", name, _MODEL_NAME, "1 to 128 letters, digits, '_', '.' or '-'")


def check_version(version: str) -> None:
    """Refuse a model version outside the one rule that holds everywhere.

    Raises:
        BadName: the version breaks the rule.
    """
    _check("version", version, _VERSION, "1 to 64 letters, digits, '_', '.', '+' or '-'")


def _check(kind: str, text: str, rule: re.Pattern[str], expected: str) -> None:
    if not rule.fullmatch(text):
        raise BadName(
            f"model {kind} {quoted(text)}: expected {expected}, starting with a letter or digit"
        )


def quoted(text: str) -> str:
    """Show untrusted text on one line of printable ASCII, at most 80 characters of it."""
    shown = text if len(text) <= 80 else text[:77] + "..."
    return '"' + shown.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'


def file_name_problem(name: str) -> str | None:
    """Return why a file of this name must not be unpacked, or None when it may.

    Args:
        name: path inside the archive, its parts separated by "/", without a trailing "/".
    """
    if not name:
        return "the name is empty"
    if "\0" in name:
        return "the name holds a NUL"
    if "\\" in name:
        return "the name holds a backslash"
    if not name.isprintable():
        return "the name holds control or invisible characters"
    if name.startswith("/"):
        return "the name is an absolute path"
    if len(name.encode()) > _MAX_NAME_BYTES:
        return f"the name is longer than {_MAX_NAME_BYTES} bytes"
    return next(filter(None, map(_part_problem, name.split("/"))), None)


def name_problems(
    names: Sequence[str], rule: Callable[[str], str | None] = file_name_problem
) -> list[str]:
    """Describe every name that must not be unpacked, and every two that would be one file.

    Args:
        names: paths inside an archive; a folder's ends with "/".
        rule: returns why a file of a name must not be unpacked.
    """
    found = {name: rule(name.removesuffix("/")) for name in names}
    wrong = [f"{quoted(name)}: {problem}" for name, problem in found.items() if problem]
    return wrong + list(collisions(names))


def collisions(names: Iterable[str]) -> Iterator[str]:
    """Describe every two names that would be one file on some file system.

    Args:
        names: paths inside an archive; a folder's ends with "/".
    """
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    for name in names:
        parts = _folded(name.rstrip("/")).split("/")
        for end in range(1, len(parts)):
            folders.setdefault("/".join(parts[:end]), name)
        key = "/".join(parts)
        if key in seen:
            yield _collision(seen[key], name)
        seen.setdefault(key, name)
    for key, inside in folders.items():
        if key in seen and not seen[key].endswith("/"):
            yield f"{quoted(seen[key])} is a file, and a folder in {quoted(inside)}"


def _collision(first: str, second: str) -> str:
    if first == second:
        return f"{quoted(first)} is there twice"
    return f"{quoted(first)} and {quoted(second)} are one name where case does not count"


def _part_problem(part: str) -> str | None:
    if part in ("", ".", ".."):
        return f"the path holds the part {quoted(part)}"
    if _DRIVE.match(part):
        return "the path names a drive"
    if part[-1] in ". ":
        return "a part of the path ends with a dot or a space"
    if _DEVICE_NAME.fullmatch(part.split(".")[0].rstrip()):
        return f"{quoted(part)} is a device on Windows"
    if len(part.encode()) > _MAX_PART_BYTES:
        return f"a part of the path is longer than {_MAX_PART_BYTES} bytes"
    return None


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
