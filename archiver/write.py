"""Collect → check names → dry run → container, byte for byte reproducible."""

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from modelyard.archiver.collect import ArchiveRequest, Part, Plan, plan_archive
from modelyard.archiver.digest import Digest, DigestedFile
from modelyard.archiver.errors import ArchiveExists, CannotArchive
from modelyard.archiver.explanations import Explanations
from modelyard.archiver.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    format_manifest,
    parse_manifest,
)
from modelyard.archiver.proven import find_other_versions
from modelyard.archiver.read import Archive
from modelyard.archiver.replay import UNPACKED
from modelyard.archiver.report import Report, parse_report
from modelyard.archiver.sbom import format_sbom
from modelyard.archiver.signing import Statement, sign
from modelyard.archiver.untrusted import names
from modelyard.archiver.untrusted.container import CHUNK_BYTES, SUFFIXES, Progress, Writer
from modelyard.archiver.verify import Rehearsal, rehearse
from modelyard.archiver.writers import FolderWriter, TarWriter, ZipWriter, shrinks
from modelyard.base.disk import flush

if TYPE_CHECKING:
    from modelyard.archiver.keys import PrivateKey

SYNC_S = 0.1
"""Time from one order to the disk to the next, while an archive is written."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedFile(DigestedFile):
    """One file that was packed."""

    role: str


@dataclass(frozen=True)
class Packed:
    """An archive that was written."""

    path: Path
    digest: str
    """SHA-256 of the manifest, which holds the digest of every other file."""
    files: tuple[PackedFile, ...]
    warning: str = ""
    """How it does on versions that nobody has proven, where those are other ones than here."""
    coverage: str = ""
    """Which changes of its pipeline golden requests would notice; empty where none was tried."""
    explanations: Explanations | str = ""
    """What was measured of its explanations, or why nothing was."""


def write_archive(
    name: str,
    *,
    output_dir: Path,
    archive_format: str = "zip-store",
    dry_run: bool = False,
    key: "PrivateKey | None" = None,
    expires: datetime | None = None,
    force: bool = False,
    **files: Any,
) -> Path:
    """Write `<output_dir>/<name>.mar`, whole or not at all; same inputs give the same bytes.

    Warnings go to this module's log.

    Args:
        output_dir: created when missing.
        archive_format: `zip-store`, `tgz` (`<name>.tar.gz`) or `no-archive` (a folder `<name>`).
        dry_run: load the archive in a worker's process and replay the examples before it is
            written; this runs the handler's code and needs the other packages.
        key: signs the archive; see `modelyard.archiver.signing`.
        expires: when the signature ends to stand for anything; by default never.
        force: replace an archive that exists.
        files: the other fields of `ArchiveRequest`.

    Raises:
        BadName: the name or version breaks the rule.
        CannotArchive: something is missing, does not fit, or fails in the dry run; holds all
            problems.
        ArchiveExists: the archive exists and `force` is false.
    """
    plan = plan_archive(ArchiveRequest(name, **files))
    for warning in plan.warnings:
        logger.warning("archive %s: %s", name, warning)
    packed = write_plan(
        plan,
        output_dir,
        archive_format=archive_format,
        dry_run=dry_run,
        key=key,
        expires=expires,
        force=force,
    )
    if packed.warning:
        logger.warning("archive %s: %s", name, packed.warning)
    return packed.path


def write_plan(
    plan: Plan,
    output_dir: Path,
    *,
    archive_format: str = "zip-store",
    dry_run: bool = False,
    key: "PrivateKey | None" = None,
    expires: datetime | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Packed:
    """Write a planned archive; see `write_archive`."""
    target = output_dir / f"{plan.manifest.model_name}{SUFFIXES[archive_format]}"
    for is_given, said in (
        (plan.unanswered, "an example without an expected answer is answered in the dry run; write "
         "FILE=EXPECTED, or leave out --no-dry-run"),
        (plan.reference, "--reference is explained in the dry run; leave out --no-dry-run"),
        (plan.certificate, "--certificate is measured in the dry run; leave out --no-dry-run"),
    ):  # fmt: skip
        if is_given and not dry_run:
            raise CannotArchive(f"cannot archive {plan.manifest.model_name}: {said}")
    runs, rehearsal = 2 if dry_run else 1, Rehearsal({}, "nothing was run", "", "")
    meter = _Meter(progress, runs * sum(part.size_bytes for part in plan.parts))
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        _refuse_existing(target, force)
        if dry_run:
            plan, rehearsal = _rehearsed(plan, output_dir, meter)
        with _replacing(target, plan, archive_format) as writer:
            files = _pack(plan, writer, meter, key, expires)
            _refuse_existing(target, force)
    except OSError as error:
        raise CannotArchive(f"cannot write {target}: {error.strerror or error}") from error
    digest = next(file.sha256 for file in files if file.name == names.MANIFEST_NAME)
    other = find_other_versions(plan.manifest, plan.read)
    warning = f"{other}; {rehearsal.repeated}" if other else ""
    return Packed(target, digest, files, warning, rehearsal.coverage, rehearsal.explanations)


class _Meter:
    """Counts bytes for a progress callback."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, count: int) -> None:
        self._done = min(self._done + count, self._total)
        if self._progress:
            self._progress(self._done, self._total)


def _rehearsed(plan: Plan, output_dir: Path, meter: _Meter) -> tuple[Plan, Rehearsal]:
    """Run the archive as a folder beside its target; return the plan with what came of it."""
    staging = output_dir / f".{plan.manifest.model_name}.{secrets.token_hex(8)}.tmp"
    staging.mkdir(mode=0o700)
    identities = {part.name: part.identity for part in plan.parts}
    try:
        files = _pack(plan, FolderWriter(staging / UNPACKED), meter, None)
        rehearsal = rehearse(plan, staging / UNPACKED)
        digests = {file.name: file.sha256 for file in files}
        return plan.rehearsed(rehearsal.answers, digests, identities), rehearsal
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _refuse_existing(target: Path, force: bool) -> None:
    if target.exists() and not force:
        raise ArchiveExists(f"{target} already exists; --force replaces it, -o FOLDER keeps both")


@contextmanager
def _replacing(target: Path, plan: Plan, archive_format: str) -> Iterator[Writer]:
    """Write beside the target and take its place at the end, or leave nothing."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        if archive_format == "no-archive":
            yield FolderWriter(temporary)
            _replace_folder(temporary, target)
        else:
            with (
                temporary.open("xb") as file,
                _syncing(file),
                _closing(_writer(archive_format, file, plan)) as writer,
            ):
                yield writer
            temporary.replace(target)
        flush(target.parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)


@contextmanager
def _syncing(file: IO[bytes]) -> Iterator[None]:
    """Have the disk write while more is packed, and wait at the end until it has written all."""
    is_packed = threading.Event()

    def sync() -> None:
        while not is_packed.wait(SYNC_S):
            os.fdatasync(file.fileno())

    with ThreadPoolExecutor(1, "sync") as thread:
        synced = thread.submit(sync)
        try:
            yield
        finally:
            is_packed.set()
        synced.result()  # an error is told once, to whoever waited for those bytes
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _closing(writer: Writer) -> Iterator[Writer]:
    """Close the writer; after a failure its own error would only hide the first one."""
    try:
        yield writer
    except BaseException:
        with suppress(OSError, ValueError):
            writer.close()
        raise
    writer.close()


def _writer(archive_format: str, file: Any, plan: Plan) -> Writer:
    if archive_format == "tgz":
        return TarWriter(file, str(plan.manifest.model_name))
    if archive_format == "zip-store":
        return ZipWriter(file)
    deflated = {
        part.name
        for part in plan.parts
        if shrinks(lambda: _chunks(part.source), part.size_bytes)  # noqa: B023
    }
    return ZipWriter(file, {*deflated, names.MANIFEST_NAME})


def _replace_folder(new: Path, target: Path) -> None:
    """Put a folder in the place of another; a folder cannot be replaced in one step."""
    if target.exists() and not (target / names.MANIFEST_NAME).is_file():
        raise CannotArchive(f"{target} is not an archive; it is not replaced, remove it yourself")
    for file in new.rglob("*"):
        if file.is_file():
            with file.open("rb") as written:
                os.fsync(written.fileno())
    old = target.with_name(f".{target.name}.{secrets.token_hex(8)}.old")
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _pack(
    plan: Plan,
    writer: Writer,
    meter: _Meter,
    key: "PrivateKey | None",
    expires: datetime | None = None,
) -> tuple[PackedFile, ...]:
    """Write all parts, then what is known only after them: bill of materials, manifest, signature.

    Raises:
        CannotArchive: a file is not the one that its report or the dry run saw.
    """
    packed, problems = [], []
    for part in plan.parts:
        written = _write_part(writer, part, meter)
        packed.append(written)
        if part.sha256 not in (None, written.sha256):
            problems.append(
                f"{part.name} is not the file that {part.vouched_by} (SHA-256 "
                f"{written.sha256[:12]}…, not {str(part.sha256)[:12]}…); make both again"
            )
    if problems:
        raise CannotArchive(f"cannot archive {plan.manifest.model_name}", problems)
    if plan.manifest.modelyard is not None:
        digests = {file.name: file.sha256 for file in packed}
        listed = format_sbom(plan.manifest, digests, _report(plan))
        sbom = Part(names.SBOM_NAME, listed, "bill of materials")
        packed.append(_write_part(writer, sbom, meter))
    manifest = _manifest(plan.manifest, packed)
    packed.append(_write_part(writer, Part(names.MANIFEST_NAME, manifest, "manifest"), meter))
    if key is not None:
        digests = {file.name: file.sha256 for file in packed}
        statement = Statement(str(plan.manifest.model_name), digests, expires)
        signature = Part(names.SIGNING_NAME, sign(statement, key), "signature")
        packed.append(_write_part(writer, signature, meter))
    return tuple(packed)


def _report(plan: Plan) -> Report | None:
    """Return the artifact's report as it is packed."""
    name = plan.manifest.modelyard.report if plan.manifest.modelyard else None
    return parse_report(plan.read(name), Path(name)) if name else None


def _write_part(writer: Writer, part: Part, meter: _Meter) -> PackedFile:
    """Copy one file into the archive, taking its digest on the way.

    A file that is still the one of which the digest was taken is not hashed again. Were that wrong,
    nobody would open the archive.
    """
    digest, size, expected = Digest(), 0, part.size_bytes
    known = part.sha256 if part.hashed_as and part.hashed_as == part.identity else None

    def counted() -> Iterable[bytes]:
        nonlocal size
        for chunk in _chunks(part.source):
            if known is None:
                digest.update(chunk)
            size += len(chunk)
            yield chunk
            if size > expected:
                break
            meter.add(len(chunk))

    with digest:
        writer.add(part.name, expected, counted())
    if size != expected:
        raise CannotArchive(f"{part.name} changed while it was read; archive it again")
    return PackedFile(part.name, size, known or digest.hexdigest(), part.role)


def _manifest(manifest: Manifest, packed: Sequence[PackedFile]) -> bytes:
    """Write the manifest; one with a seal gets the digests."""
    if manifest.modelyard is not None:
        digests = {file.name: file.sha256 for file in packed}
        manifest = replace(manifest, modelyard=replace(manifest.modelyard, digests=digests))
    data = format_manifest(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise CannotArchive(f"the manifest would have {len(data)} bytes; pack fewer files")
    return data


def _chunks(source: Path | bytes) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    with source.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


# -- an unpacked archive with other files in place of some of its own → an archive, a folder -------


def own_files(folder: Path) -> Iterator[str]:
    """Yield the names of the files that an author packed into the archive unpacked in `folder`."""
    made = (names.MANIFEST_NAME, names.SBOM_NAME, names.SIGNING_NAME, f"{names.SHARED_FOLDER}/")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(made) and "__pycache__" not in name:
            yield name


def overlay(folder: Path, files: Mapping[str, Path], target: Path) -> None:
    """Write the archive that is unpacked in `folder` anew, with `files` in place of its own.

    Its golden requests stay, and the digests are those of what it holds now. It is not signed.

    Args:
        folder: folder with its manifest.
        files: name in the archive → file to take.
        target: the folder to make.

    Raises:
        ArchiveError: a report or an artifact does not fit the other.
        OSError: a file cannot be read or written.
    """
    manifest = parse_manifest((folder / names.MANIFEST_NAME).read_bytes())
    described = {}
    seal = manifest.modelyard
    if seal is not None and seal.report and manifest.serialized_file:
        path = files.get(seal.report, folder / seal.report)
        report = parse_report(path.read_bytes(), path)
        described[manifest.serialized_file] = report.artifact_sha256
        manifest = replace(manifest, modelyard=replace(seal, signature=report.signature))
    parts = [
        Part(name, files.get(name, folder / name), "file", described.get(name))
        for name in own_files(folder)
    ]
    _pack(Plan(manifest, tuple(parts)), FolderWriter(target), _Meter(None, 0), None)


def put(
    archive: Archive, folder: Path, extra: Part, key: "PrivateKey | None", expires: datetime | None
) -> None:
    """Write an open archive anew in its place with one more file, whole or not at all.

    All else stays: container, files, golden requests. Its digest changes. It is signed where there
    is a key.

    Args:
        archive: what is replaced.
        folder: where it is unpacked.
        extra: the file; there may be one of its name already.
        key, expires: as `write_archive` takes them.

    Raises:
        CannotArchive: a file in the folder is not the archive's, or nothing can be written there.
    """
    files = {each.name: each for each in archive.files}
    for made in (names.MANIFEST_NAME, names.SBOM_NAME, names.SIGNING_NAME, extra.name):
        files.pop(made, None)
    parts = [
        extra,
        *(Part(name, folder / name, "file", each.sha256) for name, each in files.items()),
    ]
    plan = Plan(archive.manifest, tuple(sorted(parts, key=lambda part: part.name)))
    is_stored = archive.path.stat().st_size > sum(each.size_bytes for each in files.values())
    container = {"gzip'ed tar": "tgz", "folder": "no-archive"}.get(
        archive.kind, "zip-store" if is_stored else "zip-deflate"
    )
    try:
        with _replacing(archive.path, plan, container) as writer:
            _pack(plan, writer, _Meter(None, 0), key, expires)
    except OSError as error:
        raise CannotArchive(f"cannot write {archive.path}: {error.strerror or error}") from error
