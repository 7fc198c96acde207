"""A model archive, zip, tgz or folder → the weights inside.

`archiver` reads it, so that what `modelyard verify` refuses is refused here: names, sizes, digests.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.read import Archive, open_archive
from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.single_file import Announce, read_file
from modelyard.exporter.ingest.source import Source, parse_object
from modelyard.exporter.ingest.value import ClassHint, ParsedCheckpoint, parse_labels

_LABELS = "index_to_name.json"


@contextmanager
def checked_archive(path: Path) -> Iterator[Archive]:
    """Open an archive of which every name, size and digest has been checked.

    Raises:
        CheckpointError: it is refused, in the words of `modelyard verify`.
    """
    try:
        with open_archive(path) as archive:
            yield archive
    except ArchiveError as error:
        raise CheckpointError(str(error)) from error


def serialized_source(archive: Archive) -> Source | None:
    """Return the bytes of the file of weights that the manifest names, when it is there."""
    name = archive.manifest.serialized_file
    if name is None or name not in archive.names:
        return None
    return Source(name, archive.view(name))


def read_archive(path: Path, announce: Announce | None = None) -> ParsedCheckpoint:
    """Read the weights inside an archive, a file or a folder.

    Raises:
        CheckpointError: it is refused, or has no weights, or they are refused.
    """
    with checked_archive(path) as archive:
        return read_weights(archive, announce)


def read_weights(archive: Archive, announce: Announce | None = None) -> ParsedCheckpoint:
    """Read the weights inside an open archive; errors as `read_archive`."""
    source = serialized_source(archive)
    if source is None:
        raise CheckpointError(
            f'"{archive.path.name}" names no serializedFile that is in it; its handler makes the '
            "model itself, so there are no weights to export"
        )
    inner = read_file(source, announce)
    names, path = archive.names, archive.path
    model_file = archive.manifest.model_file
    labels = parse_object(archive.read(_LABELS), _LABELS) if _LABELS in names else {}
    parsed = replace(
        inner,
        kind=f"TorchServe archive ({inner.kind})",
        paths=tuple(path / name for name in names) if path.is_dir() else (path,),
        writer="TorchServe",
        writer_version=archive.manifest.archiver_version,
        labels=parse_labels(labels),
    )
    if model_file is None or model_file not in names:
        return parsed
    return replace(
        parsed,
        class_hint=ClassHint(model_file, "modelFile of its manifest"),
        sources={model_file: archive.read(model_file).decode("utf-8", "replace")},
    )
