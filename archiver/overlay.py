"""An unpacked archive with other files in place of some of its own → an archive again, a folder."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from modelyard.archiver.collect import Part, Plan
from modelyard.archiver.manifest import parse_manifest
from modelyard.archiver.report import parse_report
from modelyard.archiver.untrusted.names import (
    MANIFEST_NAME,
    SBOM_NAME,
    SHARED_FOLDER,
    SIGNING_NAME,
)
from modelyard.archiver.write import write_folder

_MADE = (MANIFEST_NAME, SBOM_NAME, SIGNING_NAME)


def own_files(folder: Path) -> Iterator[str]:
    """Yield the names of the files that an author packed into the archive unpacked in `folder`."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_ours = name in _MADE or name.startswith(f"{SHARED_FOLDER}/") or "__pycache__" in name
        if path.is_file() and not is_ours:
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
    manifest = parse_manifest((folder / MANIFEST_NAME).read_bytes())
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
    write_folder(Plan(manifest, tuple(parts)), target)
