"""Archives of cells: of a folder that every node reaches, or fetched; named by their digest."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from modelyard.archiver import open_archive
from modelyard.archiver.errors import RefusedArchive
from modelyard.archiver.untrusted.names import check_name, check_version
from modelyard.serve.control.fetch import UrlRules, fetch_archive, is_url, parse_url
from modelyard.serve.control.store import find_archive, list_archives, parse_model_option
from modelyard.serve.errors import BadRequest, FetchFailed, FileExists, StartError, UrlRefused

DIGEST = "#sha256="
ANYWHERE = "https?://.*"
"""What a URL may be redirected to; only public addresses, and the digest says what comes."""
_HEX = re.compile("[0-9a-f]{64}")


class CellArchive(BaseModel):
    """One archive that every cell serves; what it is called there, and its content."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str
    location: str
    """A file or folder of the model store, or a URL."""
    digest: str


@dataclass(frozen=True)
class Source:
    """What a user wrote: `[NAME=]LOCATION[#sha256=DIGEST]`."""

    name: str | None
    location: str
    digest: str | None


def parse_source(text: str) -> Source:
    """Read what names an archive.

    Raises:
        BadRequest: a digest is wrong, or lacking where the archive is fetched.
        BadName: the name breaks the rule for names.
    """
    rest, separator, digest = text.partition(DIGEST)
    if separator and not _HEX.fullmatch(digest):
        raise BadRequest(
            f"models: {text}: expected 64 hexadecimal digits after {DIGEST}, the digest that "
            "`modelyard verify` shows"
        )
    # A URL may hold '=' and be given without a name.
    name, location = (None, rest) if is_url(rest) else parse_model_option(rest)
    if is_url(location) and parse_url(location).scheme == "file":
        raise BadRequest(f"models: {location}: only http and https; name its folder as model_store")
    if is_url(location) and not digest:
        raise BadRequest(f"models: {text}: an archive that is fetched needs {DIGEST}DIGEST")
    return Source(name, location, digest or None)


def is_fetched(text: str) -> bool:
    """Return whether this names an archive by a URL."""
    return is_url(parse_source(text).location)


def find_archives(models: Sequence[str], store: Path, cache: Path) -> list[CellArchive]:
    """Return what every cell is to serve. Each archive is read, and checked, once.

    Args:
        models: sources; none, or ALL, takes every archive of the store.

    Raises:
        ArchiveError, ServeError: one cannot be served; two are the same model and version.
    """
    if [text.upper() for text in models] in ([], ["ALL"]):
        models = list_archives(store)
        if not models:
            seen = "holds no archives" if store.is_dir() else "does not exist"
            raise StartError(
                f"the model store {store} {seen}; name the folder that every node reaches with "
                "model_store=FOLDER"
            )
    found: dict[tuple[str, str], CellArchive] = {}
    for source in map(parse_source, models):
        path = place(source.location, source.digest, store, cache)
        with open_archive(path) as archive:
            if source.digest not in (None, archive.digest):
                raise RefusedArchive(
                    f"{source.location}: its digest is {archive.digest}, expected {source.digest}; "
                    "put that archive back, or name the digest of this one"
                )
            name = source.name or archive.manifest.model_name or path.stem
            version, digest = archive.manifest.model_version, archive.digest
        check_name(name)
        check_version(version)
        if (other := found.get((name, version))) is not None:
            raise BadRequest(
                f"{other.location} and {source.location} both hold {name} {version}; leave one "
                "out, name it NAME=FILE, or archive it again under another version"
            )
        found[name, version] = CellArchive(
            name=name, version=version, location=source.location, digest=digest
        )
    return list(found.values())


def place(location: str, digest: str | None, store: Path, cache: Path) -> Path:
    """Return the file or folder of an archive on this machine; fetch it if need be. Blocking.

    Raises:
        ArchiveError, ServeError: there is none, it cannot be fetched, or it is another one.
    """
    if not is_url(location):
        return find_archive(store, location)
    assert digest is not None
    url = parse_url(location)
    file = cache / f"{digest}{'.tar.gz' if url.path.endswith('.tar.gz') else '.mar'}"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _held(cache / f"{digest}.lock"):
            if file.exists():
                return file
            host = str(url).removesuffix(url.target)
            rules = UrlRules([f"{re.escape(host)}/.*", ANYWHERE])
            with contextlib.suppress(FileExists):
                fetch_archive(location, cache, rules, name=file.name, digest=digest)
    except (FetchFailed, UrlRefused) as error:
        raise StartError(f"cannot fetch {location}: {error.reason}") from error
    except OSError as error:
        raise StartError(
            f"cannot use the folder {cache} for fetched archives: {error.strerror}; name another "
            "one with cache_dir=FOLDER"
        ) from error
    return file


@contextlib.contextmanager
def _held(file: Path) -> Iterator[None]:
    """Hold a lock: cells that start on one machine fetch an archive once."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
