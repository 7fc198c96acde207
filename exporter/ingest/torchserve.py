"""A TorchServe archive, zip, tgz or folder → its manifest and the file of weights inside."""

import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.source import Source, is_safe_name, read_directory, read_entry
from modelyard.exporter.ingest.strict_json import parse_object

MANIFEST = "MAR-INF/MANIFEST.json"
_MAX_MANIFEST = 1 << 20
_MAX_TEXT = 4 << 20
_MAX_MEMBERS = 10_000
_MAX_MEMBER = 8 << 30
_MAX_RATIO = 200


@dataclass(frozen=True)
class ServeArchive:
    """An archive's manifest, the sizes of its files, and a way to read one."""

    path: Path
    manifest: Mapping[str, Any]
    sizes: Mapping[str, int]
    """Name of each file → its bytes."""
    form: str
    """`zip`, `tgz` or `folder`."""

    @property
    def model(self) -> Mapping[str, Any]:
        """Return the manifest's part on the model."""
        model = self.manifest.get("model")
        return model if isinstance(model, dict) else {}

    def file_named(self, key: str) -> str | None:
        """Return the file that a key of the manifest names, when it is there."""
        name = self.model.get(key)
        return name if isinstance(name, str) and name in self.sizes else None

    def open(self, name: str) -> Source:
        """Return one file's bytes; they are inflated in memory where they are compressed.

        Raises:
            CheckpointError: it is damaged or too large.
        """
        if self.form == "folder":
            return Source.of_file(self.path / name)
        if self.form == "tgz":
            return Source.of_bytes(name, _read_tar(self.path, {name})[name])
        source = Source.of_file(self.path)
        entry = read_directory(source, may_deflate=lambda _: True)[name]
        if not entry.is_deflated:
            return source.part(name, entry.start, entry.stored)
        return Source.of_bytes(name, read_entry(source, entry, limit=_MAX_MEMBER))

    def text(self, name: str) -> str:
        """Return one file as text.

        Raises:
            CheckpointError: it is not text, or more than a person could read.
        """
        if self.sizes[name] > _MAX_TEXT:
            raise CheckpointError(f'"{self.path.name}": {name} has more than {_MAX_TEXT} bytes')
        return bytes(self.open(name).data).decode("utf-8", "replace")


def open_serve_archive(path: Path) -> ServeArchive:
    """Read an archive's list of files and its manifest; no file of it is run or unpacked.

    Raises:
        CheckpointError: it is damaged, or a name leaves it.
    """
    if path.is_dir():
        sizes = {
            file.relative_to(path).as_posix(): file.stat().st_size
            for file in sorted(path.rglob("*"))
            if file.is_file() and not file.is_symlink()
        }
        content = (path / MANIFEST).read_bytes()[: _MAX_MANIFEST + 1]
        return ServeArchive(path, _parse(content, path), sizes, "folder")
    source = Source.of_file(path)
    if bytes(source.data[:2]) == b"PK":
        entries = read_directory(source, may_deflate=lambda _: True)
        sizes = {name: entry.size for name, entry in entries.items() if not name.endswith("/")}
        content = read_entry(source, entries[MANIFEST], limit=_MAX_MANIFEST)
        return ServeArchive(path, _parse(content, path), sizes, "zip")
    sizes = _tar_sizes(path)
    return ServeArchive(path, _parse(_read_tar(path, {MANIFEST})[MANIFEST], path), sizes, "tgz")


def _parse(content: bytes, path: Path) -> Mapping[str, Any]:
    if len(content) > _MAX_MANIFEST:
        raise CheckpointError(f'"{path.name}": its manifest has more than {_MAX_MANIFEST} bytes')
    return parse_object(content, f"{path.name}: {MANIFEST}")


def _tar_sizes(path: Path) -> dict[str, int]:
    """List a tar's files; a tgz has one folder on top, named after the model."""
    sizes: dict[str, int] = {}
    for member, name in _members(path):
        if name in sizes:
            raise CheckpointError(f'"{path.name}" is refused: {name!r} is there twice')
        sizes[name] = member.size
    return sizes


def _read_tar(path: Path, wanted: set[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with tarfile.open(path) as container:
        for member in container:
            name = _inner_name(member.name)
            file = container.extractfile(member) if member.isreg() and name in wanted else None
            if file is not None:
                found[name] = file.read(_MAX_MEMBER)
                if len(found) == len(wanted):
                    return found
    raise CheckpointError(f'"{path.name}" has no {", ".join(sorted(wanted - set(found)))}')


def _members(path: Path) -> list[tuple[tarfile.TarInfo, str]]:
    found: list[tuple[tarfile.TarInfo, str]] = []
    total, room = 0, _MAX_RATIO * path.stat().st_size
    try:
        with tarfile.open(path) as container:
            for member in container:
                total += member.size
                if not is_safe_name(member.name) or not (member.isreg() or member.isdir()):
                    raise CheckpointError(
                        f'"{path.name}" is refused: its entry {member.name!r} leaves its folder, '
                        "or is not a plain file"
                    )
                if total > room or len(found) > _MAX_MEMBERS or member.size > _MAX_MEMBER:
                    raise CheckpointError(
                        f'"{path.name}" is refused: it would grow by more than {_MAX_RATIO} times'
                    )
                if member.isreg():
                    found.append((member, _inner_name(member.name)))
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise CheckpointError(f'"{path.name}" is damaged ({error}); copy it again') from error
    return found


def _inner_name(name: str) -> str:
    """Drop the folder on top, where there is one."""
    name = name.removeprefix("./")
    return name if name.startswith("MAR-INF/") or "/" not in name else name.partition("/")[2]
