"""Archives of cells: of a folder that every node reaches, or fetched; named by their digest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from modelyard.archiver import open_archive
from modelyard.archiver.errors import RefusedArchive
from modelyard.archiver.untrusted.names import check_name, check_version
from modelyard.serve.control.fetch import Source, parse_source, place
from modelyard.serve.control.store import find_archive, list_archives
from modelyard.serve.control.urls import is_url
from modelyard.serve.errors import BadRequest, StartError, without_secrets


class CellArchive(BaseModel):
    """One archive that every cell serves; what it is called there, and its content."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str
    location: str
    """A file or folder of the model store, or a URL."""
    digest: str


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
        path = locate(source.location, source.digest, store, cache)
        with open_archive(path) as archive:
            if source.digest not in (None, archive.digest):
                raise RefusedArchive(
                    f"{source.shown}: its digest is {archive.digest}, expected {source.digest}; "
                    "put that archive back, or name the digest of this one"
                )
            name = source.name or archive.manifest.model_name or path.stem
            version, digest = archive.manifest.model_version, archive.digest
        check_name(name)
        check_version(version)
        if (other := found.get((name, version))) is not None:
            raise BadRequest(
                f"{without_secrets(other.location)} and {source.shown} both hold {name} {version}; "
                "leave one out, name it NAME=FILE, or archive it again under another version"
            )
        found[name, version] = CellArchive(
            name=name, version=version, location=source.location, digest=digest
        )
    return list(found.values())


def locate(location: str, digest: str | None, store: Path, cache: Path) -> Path:
    """Return the file or folder of an archive on this machine; fetch it if need be. Blocking.

    Raises:
        ArchiveError, ServeError: there is none, it cannot be fetched, or it is another one.
    """
    if is_url(location):
        return place(Source(None, location, digest), cache)
    return find_archive(store, location)
