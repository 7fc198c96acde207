"""What locations and names mean in TorchServe's dialect."""

import re
from pathlib import Path

from modelyard.archiver.errors import BadName
from modelyard.archiver.untrusted.names import quoted
from modelyard.serve.control.store import (
    SUFFIXES,
    describe_store,
    file_stem,
    find_in_store,
    list_archives,
)
from modelyard.serve.errors import FileNotInStore, StartError

TORCHSERVE_SUFFIXES = (*SUFFIXES, ".model")
MAX_QUOTED_NAME = 200
"""Most of a file name's 255 bytes that the model's name takes, in logs and unpacked files."""


def find_as_torchserve(store: Path, location: str) -> Path:
    """Return the archive that a location names; a name that is not there, that name and a suffix.

    Of a path only the last part counts, so nothing outside the store is reached.

    Raises:
        FileNotInStore: nothing is there; TorchServe's words.
    """
    refuse_relative(location)
    name = location.rstrip("/").rpartition("/")[2]
    is_name = name.isprintable() and name and not name.startswith(".") and "://" not in location
    if not is_name or (archive := find_in_store(store, name)) is None:
        raise FileNotInStore(f"Model not found at: {location}")
    return archive


def refuse_missing(store: Path, location: str) -> None:
    """Refuse a start with a model that the store does not have.

    A file name in a store without archives passes, as in TorchServe: they may come later.

    Raises:
        StartError: the message names what is there.
    """
    try:
        find_as_torchserve(store, location)
    except FileNotInStore as error:
        if location.endswith(TORCHSERVE_SUFFIXES) and not list_archives(store, TORCHSERVE_SUFFIXES):
            return
        raise StartError(f"{error}; {describe_store(store, TORCHSERVE_SUFFIXES)}") from error


def refuse_relative(location: str) -> None:
    """Raise FileNotInStore for a location that is empty or climbs; TorchServe's words."""
    if not location:
        raise FileNotInStore("empty url")
    if ".." in location:
        raise FileNotInStore(f"Relative path is not allowed in url: {location}")


def check_torchserve_name(name: str) -> None:
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


def name_of_file(file: str) -> str:
    """Return the name that TorchServe gives at its start to an archive that states none."""
    has_suffix = ".mar" in file or ".model" in file
    stem = file.rpartition(".")[0] if has_suffix else file
    return re.sub(r"\W|^_", "_", stem)
