"""Open → verify → unpack safely.

Everything is checked before `open_archive` returns, all problems are raised as one error, and
nothing is written before, but below a folder that a caller names for it. Every check and every
later read goes through one open file or folder, so an archive that is replaced on disk meanwhile is
not mixed in; what is unpacked is what was checked, or is compared with it once more.
"""

import contextlib
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from modelyard.archiver.digest import Digest, DigestedFile, digest_of_all
from modelyard.archiver.errors import ArchiveError, BadManifest, RefusedArchive
from modelyard.archiver.manifest import (
    FILES,
    KEYS,
    MAX_MANIFEST_BYTES,
    Manifest,
    Seal,
    parse_manifest,
)
from modelyard.archiver.untrusted.container import (
    Damaged,
    Member,
    OpenFile,
    Progress,
    Reader,
    open_regular,
)
from modelyard.archiver.untrusted.folder import FolderReader
from modelyard.archiver.untrusted.names import LOCK_NAME, MANIFEST_NAME, SIGNING_NAME, quoted
from modelyard.archiver.untrusted.tar import GZIP_MAGIC, TarReader
from modelyard.archiver.untrusted.zip import ZipReader


class Archive:
    """An archive whose every name, size and digest has been checked; close it after use.

    Attributes:
        path: the file it was opened from.
        manifest: its manifest.
        kind: the container in a word: zip, gzip'ed tar or folder.
        files: its files, the manifest included, in the archive's order.
        digest: one SHA-256 that names the whole content: of the manifest when the manifest holds
            the other files' digests, else of the sorted lines `sha256  name` of all files. The
            same content has the same digest as a zip, as a tar and as a folder.
    """

    def __init__(
        self,
        path: Path,
        reader: Reader,
        manifest: Manifest,
        files: dict[str, DigestedFile],
        staged: Path | None,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.kind = reader.kind
        self.files = tuple(files.values())
        seal = manifest.modelyard
        self.digest = files[MANIFEST_NAME].sha256 if seal else digest_of_all(self.files)
        self._reader = reader
        self._files = files
        self._members: dict[str, Member] = {member.name: member for member in reader.members}
        self._staged = staged

    @property
    def names(self) -> tuple[str, ...]:
        """List the files' names."""
        return tuple(self._files)

    def read(self, name: str) -> bytes:
        """Return one file's content.

        Raises:
            KeyError: the archive has no such file.
            RefusedArchive: the archive was changed after it was opened.
        """
        return b"".join(self._checked_chunks(self._files[name]))

    def view(self, name: str) -> memoryview:
        """Return one file's content, mapped copy-on-write where it lies uncompressed.

        Pages of a mapping are read when they are looked at: whoever can write to the archive
        meanwhile changes them.

        Raises:
            KeyError: the archive has no such file.
            RefusedArchive: the archive was changed after it was opened.
        """
        file = self._files[name]
        try:
            mapped = self._reader.map(self._members[name])
        except Damaged as error:
            raise self._changed(name) from error
        if mapped is None:
            mapped = memoryview(bytearray().join(self._checked_chunks(file)))
        return mapped

    def unpack(self, folder: Path) -> None:
        """Write all files under `folder`, which must be absent or empty; on failure nothing stays.

        Raises:
            RefusedArchive: the archive was changed after it was opened.
            ArchiveError: the folder holds something, or cannot be written.
        """
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ArchiveError(f"{folder} is not an empty folder; unpack into a new one")
        staging = self._staged or folder.parent / f".{folder.name}.{secrets.token_hex(8)}"
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            staging.mkdir(exist_ok=self._staged is not None)
            for name in self._members:
                if self._staged is None or not (staging / name).exists():
                    self._unpack_one(name, staging)
            if folder.exists():
                staging.chmod(stat.S_IMODE(folder.stat().st_mode))
            staging.replace(folder)
        except OSError as error:
            raise ArchiveError(f"cannot unpack {self.path.name}: {error.strerror}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            self._staged = None

    def close(self) -> None:
        """Close the file; reading and unpacking end here."""
        self._reader.close()
        if self._staged is not None:
            shutil.rmtree(self._staged, ignore_errors=True)

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _unpack_one(self, name: str, staging: Path) -> None:
        if name.endswith("/"):
            (staging / name).mkdir(parents=True, exist_ok=True)
            return
        with _new_file(staging, name) as write:
            for chunk in self._checked_chunks(self._files[name]):
                write(chunk)

    def _checked_chunks(self, expected: DigestedFile) -> Iterator[bytes]:
        """Yield a file's content; raise at its end when it is not what was checked."""
        with Digest() as digest:
            try:
                for chunk in self._reader.chunks(self._members[expected.name]):
                    digest.update(chunk)
                    yield chunk
            except Damaged as error:
                raise self._changed(expected.name) from error
            if digest.hexdigest() != expected.sha256:
                raise self._changed(expected.name)

    def _changed(self, name: str) -> RefusedArchive:
        return RefusedArchive(f"{self.path.name}: {name} was changed after the archive was opened")


def open_archive(
    path: Path | str,
    *,
    progress: Progress | None = None,
    needs_manifest: bool = True,
    staging: Path | None = None,
) -> Archive:
    """Open an archive and check every name, size and digest in it.

    Archives of other archivers hold no digests; their structure, names and checksums are
    checked.

    Args:
        needs_manifest: False serves an archive without one too.
        staging: a folder on the file system that `unpack` will write to. The files are written
            below it while they are read to be checked, and go again unless `unpack` moves them:
            that reads and hashes them once, not twice.

    Raises:
        ArchiveNotFound: there is no file at `path`.
        RefusedArchive: the archive is damaged, was changed or is unsafe; holds all problems.
    """
    path = Path(path)
    reader = _open(path)
    staged = staging / f".{secrets.token_hex(8)}" if staging else None
    try:
        return _verify(path, reader, progress or (lambda done, total: None), needs_manifest, staged)
    except BaseException:
        reader.close()
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)
        raise


@contextlib.contextmanager
def peek(path: Path) -> Iterator[tuple[Manifest, tuple[Member, ...], Callable[[str], bytes]]]:
    """Yield an archive's manifest, its files, and what reads one; no digest in it is checked.

    Raises:
        ArchiveNotFound, RefusedArchive.
    """
    with contextlib.closing(_open(path)) as reader:
        problems = reader.check(lambda done, total: None)
        manifest, more = _read_manifest(reader, True) if reader.is_readable else (None, [])
        if manifest is None:
            raise RefusedArchive(f"{path.name} is refused", problems + more)
        files = {member.name: member for member in reader.members if not member.is_folder}
        yield manifest, tuple(files.values()), lambda name: b"".join(reader.chunks(files[name]))


def _open(path: Path) -> Reader:
    """Choose the reader: a folder is one, `.mar` is a zip, and a gzip stream holds a tar."""
    if path.is_dir():
        return FolderReader(path)
    if path.suffix != ".mar" and path.is_file():
        with path.open("rb") as file:
            if file.read(len(GZIP_MAGIC)) == GZIP_MAGIC:
                return TarReader(path)
    return ZipReader(OpenFile(open_regular(path)))


def _verify(
    path: Path, reader: Reader, progress: Progress, needs_manifest: bool, staged: Path | None
) -> Archive:
    problems = reader.check(progress)
    if not reader.is_readable:
        raise RefusedArchive(f"{path.name} is refused", problems)
    manifest, manifest_problems = _read_manifest(reader, needs_manifest)
    if problems or manifest_problems:
        staged = None  # names may lead anywhere
    try:
        if staged is not None:
            staged.mkdir()
        files, damages = _hash_files(reader, progress, staged)
    except OSError as error:
        raise ArchiveError(f"cannot unpack {path.name}: {error.strerror or error}") from error
    problems += manifest_problems
    if manifest is not None and manifest.modelyard is not None:
        changed = _changed_files(manifest.modelyard.digests, files)
        problems += changed.values()
        problems += _seal_problems(manifest, manifest.modelyard, reader)
        problems += _lock_problems(manifest.modelyard, reader)
        damages = {name: damage for name, damage in damages.items() if name not in changed}
    problems += [f"{quoted(name)}: {damage}" for name, damage in damages.items()]
    if problems or manifest is None:
        raise RefusedArchive(f"{path.name} is refused", problems)
    return Archive(path, reader, manifest, files, staged)


def _read_manifest(reader: Reader, is_needed: bool) -> tuple[Manifest | None, list[str]]:
    member = next((member for member in reader.members if member.name == MANIFEST_NAME), None)
    if member is None and not is_needed:
        return Manifest(model_name=None), []
    if member is None:
        return None, [f"{MANIFEST_NAME} is missing: this {reader.kind} is not a model archive"]
    size = member.size_bytes
    if size > MAX_MANIFEST_BYTES:
        return None, [f"{MANIFEST_NAME} has {size} bytes; at most {MAX_MANIFEST_BYTES} are read"]
    try:
        return parse_manifest(b"".join(reader.chunks(member))), []
    except BadManifest as error:
        return None, [f"{MANIFEST_NAME}: {problem}" for problem in error.problems]
    except Damaged:
        return None, []  # named among the damaged files


def _hash_files(
    reader: Reader, progress: Progress, staged: Path | None
) -> tuple[dict[str, DigestedFile], dict[str, str]]:
    """Read what `check` has not, and write it where that is wanted.

    Returns:
        The files by name, and what is damaged in which.
    """
    files = {
        member.name: DigestedFile(member.name, member.size_bytes, reader.digests[member.name])
        for member in reader.members
        if member.name in reader.digests
    }
    damages = {}
    unread = [m for m in reader.members if not m.is_folder and m.name not in files]
    total, done = sum(member.size_bytes for member in unread), 0
    for member in unread:
        with Digest() as digest, _new_file(staged, member.name) as write:
            try:
                for chunk in reader.chunks(member):
                    digest.update(chunk)
                    write(chunk)
                    done += len(chunk)
                    progress(done, total)
            except Damaged as damage:
                damages[member.name] = str(damage)
            files[member.name] = DigestedFile(member.name, member.size_bytes, digest.hexdigest())
    return files, damages


@contextlib.contextmanager
def _new_file(folder: Path | None, name: str) -> Iterator[Callable[[bytes], object]]:
    """Yield what writes a new file of a folder; without a folder, what writes nothing."""
    if folder is None:
        yield lambda chunk: None
        return
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as file:
        yield file.write


def _changed_files(digests: Mapping[str, str], files: Mapping[str, DigestedFile]) -> dict[str, str]:
    return {
        name: (
            f"{quoted(name)}: SHA-256 is {file.sha256[:12]}…, the manifest says "
            f"{digests[name][:12]}…: the file is damaged or was changed"
        )
        for name, file in files.items()
        if name in digests and file.sha256 != digests[name]
    }


def _lock_problems(seal: Seal, reader: Reader) -> list[str]:
    """Compare what pip would read with what the manifest shows: pip takes options from it too."""
    member = next((member for member in reader.members if member.name == LOCK_NAME), None)
    if member is None:
        missing = f"{LOCK_NAME} is missing, and the manifest lists requirements"
        return [missing] if seal.requirements else []
    expected = "".join(f"{pin}\n" for pin in seal.requirements).encode()
    if member.size_bytes == len(expected):
        with suppress(Damaged):  # named among the damaged files
            if b"".join(reader.chunks(member)) == expected:
                return []
    return [f"{LOCK_NAME} holds something else than the requirements that the manifest lists"]


def _seal_problems(manifest: Manifest, seal: Seal, reader: Reader) -> list[str]:
    """Compare the files that are there with those that the manifest lists and names."""
    there = {member.name for member in reader.members} - {MANIFEST_NAME, SIGNING_NAME}
    there -= _parents([*seal.digests, MANIFEST_NAME])
    listed = set(seal.digests)
    problems = [f"{quoted(name)} is missing" for name in sorted(listed - there)]
    problems += [
        f"{quoted(name)} is not among the manifest's digests: it was added later"
        for name in sorted(there - listed)
    ]
    handler = (manifest.handler or "").partition(":")[0]
    named = {KEYS[field]: getattr(manifest, field) for field in FILES}
    named["handler"] = handler if handler.endswith(".py") else None
    problems += [
        f"{MANIFEST_NAME}: model.{key}: {quoted(name)} is not in the archive"
        for key, name in named.items()
        if name and name not in there | listed
    ]
    return problems


def _parents(names: Iterable[str]) -> set[str]:
    """Return the folders that files of these names lie in, each with a "/" at its end."""
    return {
        "/".join(parts[:end]) + "/"
        for parts in (name.split("/") for name in names)
        for end in range(1, len(parts))
    }
