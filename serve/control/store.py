"""Model name or file name → archive in the model store: a zip, a gzip'ed tar or a folder."""

from pathlib import Path
from urllib.parse import quote

from modelyard.archiver.untrusted.names import MANIFEST_NAME, check_name
from modelyard.serve.errors import BadRequest, FileNotInStore

SUFFIXES = (".mar", ".tar.gz")
SHOWN = 20
"""Names in a message."""


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
    if (archive := find_in_store(store, location)) is not None:
        return archive
    if not store.is_dir():
        raise FileNotInStore(
            f"Model not found at: {location}; the model store {store} is not a folder; name "
            "another with --model-store, or make it with `modelyard archive -o`"
        )
    raise FileNotInStore(f"Model not found at: {location}; {describe_store(store)}")


def find_in_store(store: Path, name: str) -> Path | None:
    """Return the archive of this plain name, or of this name and a suffix; None: neither."""
    paths = (store / f"{name}{suffix}" for suffix in ("", *SUFFIXES))
    return next(filter(is_archive, paths), None)


def describe_store(store: Path, suffixes: tuple[str, ...] = SUFFIXES) -> str:
    """Return a sentence that names the store's archives."""
    names = list_archives(store, suffixes) or ["no archives"]
    more = [f"{len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return f"the model store {store} holds {', '.join([*names[:SHOWN], *more])}"


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


def is_archive(path: Path) -> bool:
    """Return whether a path is a file, or a folder that holds an archive."""
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
    if not separator or "://" in name:  # a URL may hold '=' and be given without a name
        return None, option
    check_name(name)
    return name, location


def file_stem(name: str) -> str:
    """Return a model's name as part of a file name; a plain one is unchanged."""
    return quote(name, safe="+")
