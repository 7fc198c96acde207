"""Model name or file name → archive in the model store: a zip, a gzip'ed tar or a folder."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

from modelyard.archiver.errors import BadName
from modelyard.archiver.manifest import MANIFEST_NAME, check_name
from modelyard.archiver.untrusted.names import quoted
from modelyard.serve.errors import BadRequest, FileNotInStore

SUFFIXES = (".mar", ".tar.gz")
TORCHSERVES_SUFFIXES = (*SUFFIXES, ".model")
MAX_QUOTED_NAME = 200
"""Of a file name's 255 bytes, in which logs and unpacked files carry the model's name."""


def find_archive(store: Path, location: str) -> Path:
    """Return the archive that `location` names: a file or folder of the store.

    `.mar` and `.tar.gz` may be left out. Only what lies directly in the store is served; a location
    that holds anything but a plain name is refused, whatever it would resolve to.

    Raises:
        BadRequest: not a plain file name.
        FileNotInStore: no such file; the message lists what is there.
    """
    if location in ("", ".", "..") or any(mark in location for mark in "/\\%\0:"):
        raise BadRequest(
            f"url: expected the name of a file in the model store, got {location!r}; "
            "fetching from elsewhere is not allowed"
        )
    for path in (store / location, *(store / (location + suffix) for suffix in SUFFIXES)):
        if _is_archive(path):
            return path
    there = ", ".join(list_archives(store)) or "no archives"
    raise FileNotInStore(f"Model not found at: {location}; the model store holds {there}")


def find_as_torchserve(store: Path, location: str) -> Path:
    """Return the archive that a location names in TorchServe's dialect.

    Of a path only the last part counts, so nothing outside the store is reached.

    Raises:
        FileNotInStore: nothing is there; TorchServe's words.
    """
    refuse_relative(location)
    name = location.rstrip("/").rpartition("/")[2]
    missing = FileNotInStore(f"Model not found at: {location}")
    if "://" in location or name.startswith(".") or not name.isprintable() or not name:
        raise missing
    if not _is_archive(store / name):
        raise missing
    return store / name


def refuse_relative(location: str) -> None:
    """Raise FileNotInStore for a location that is empty or climbs; TorchServe's words."""
    if not location:
        raise FileNotInStore("empty url")
    if ".." in location:
        raise FileNotInStore(f"Relative path is not allowed in url: {location}")


def list_archives(store: Path, suffixes: tuple[str, ...] = SUFFIXES) -> list[str]:
    """Return the names of the store's archives, sorted."""
    if not store.is_dir():
        return []
    return sorted(
        path.name
        for path in store.iterdir()
        if not path.name.startswith(".")
        and ((path.name.endswith(suffixes) and path.is_file()) or is_archive_folder(path))
    )


def is_archive_folder(path: Path) -> bool:
    """Return whether a folder holds an archive, directly or in the one folder that is in it."""
    if not path.is_dir():
        return False
    return (path / MANIFEST_NAME).is_file() or any(path.glob(f"*/{MANIFEST_NAME}"))


def _is_archive(path: Path) -> bool:
    try:
        return path.is_file() or is_archive_folder(path)
    except OSError:  # the name is too long to be one
        return False


def parse_model_option(option: str) -> tuple[str | None, str]:
    """Split `NAME=FILE` or `NAME` into the name to register under (None: the manifest's) and file.

    Raises:
        BadName: the name breaks the rule for names.
    """
    name, separator, location = option.partition("=")
    if not separator:
        return None, option
    check_name(name)
    return name, location


def check_torchserves_name(name: str) -> None:
    """Refuse what cannot be one part of a path; TorchServe takes any other name over its API.

    Raises:
        BadName: the message says what is taken.
    """
    is_plain = name.isprintable() and not set(name) & set("/\\") and name not in (".", "..")
    if not name.strip() or not is_plain or len(file_stem(name)) > MAX_QUOTED_NAME:
        raise BadName(
            f"model name {quoted(name)}: expected printable characters without '/' and '\\', and "
            f"no more than {MAX_QUOTED_NAME} bytes where special ones take three"
        )


def file_stem(name: str) -> str:
    """Return a model's name as part of a file name; a plain one is unchanged."""
    return quote(name, safe="+")


def name_of_file(file: str) -> str:
    """Return the name that TorchServe gives at its start to an archive that states none."""
    has_suffix = ".mar" in file or ".model" in file
    stem = file.rpartition(".")[0] if has_suffix else file
    return re.sub(r"\W|^_", "_", stem)
