"""Other artifacts of the same checkpoint in an archive, any of which may predict.

`artifact: FILE` in model-config.yaml chooses one. It must have its report beside it, prove as large
a batch as the archive's own, and take and give the same.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.report import Report, parse_report
from modelyard.archiver.signature import TensorSpec

KEY = "artifact"
REPORT = ".report.json"

Read = Callable[[str], bytes]


def find_alternatives(
    manifest: Mapping[str, Any], names: Collection[str], read: Read
) -> Iterator[str]:
    """Yield the artifacts that could predict in place of the one that the manifest names.

    Args:
        manifest: manifest as it is in the archive.
        names: names of the archive's files.
        read: returns one file's content.
    """
    for name in sorted(names):
        other = name.removesuffix(REPORT)
        if other != name and other in names and other != manifest["model"].get("serializedFile"):
            try:
                choose_artifact(manifest, other, read)
            except CannotArchive:
                continue
            yield other


def choose_artifact(manifest: Mapping[str, Any], name: str, read: Read) -> dict[str, Any]:
    """Return the manifest as if the archive had been made with another of its artifacts.

    Args:
        manifest: manifest as it is in the archive.
        name: name of the artifact.
        read: returns one file's content; raises KeyError or OSError where there is none.

    Raises:
        CannotArchive: it cannot take that place.
    """
    chosen = deepcopy(dict(manifest))
    file, seal = chosen["model"].get("serializedFile"), chosen.get("modelyard") or {}
    if name == file:
        return chosen
    summary = f"{KEY}: {name} cannot predict in place of {file}"
    try:
        other = parse_report(read(name + REPORT), Path(name + REPORT))
        own = parse_report(read(seal["report"]), Path(seal["report"]))
    except (KeyError, OSError) as error:
        reason = f"{error.args[-1] if error.args else error}: expected a report beside each of both"
        raise CannotArchive(summary, [reason]) from error
    if problem := difference(own, other) or _shortage(own, other):
        raise CannotArchive(summary, [problem])
    chosen["model"]["serializedFile"] = name
    seal["report"] = name + REPORT
    return chosen


def difference(report: Report, other: Report) -> str | None:
    """Return why two artifacts are not the same model; None where they are."""
    if other.checkpoint_sha256 != report.checkpoint_sha256:
        return (
            f"their checkpoints differ (SHA-256 {other.checkpoint_sha256[:12]}… and "
            f"{report.checkpoint_sha256[:12]}…); export both from one checkpoint"
        )
    ours, theirs = _static(report.signature.inputs), _static(other.signature.inputs)
    if ours != theirs:
        return f"it takes {theirs} instead of {ours}; export both with the same --input"
    return None


def _shortage(report: Report, other: Report) -> str | None:
    ours, theirs = _static(report.signature.outputs), _static(other.signature.outputs)
    if ours != theirs:
        return f"it gives {theirs} instead of {ours}; export both with the same --output"
    if other.parity is None:
        return "its report proves nothing; write it with `modelyard export`"
    proven, wanted = other.signature.proven_batch, report.signature.proven_batch
    if wanted is not None and proven is not None and proven < wanted:
        return f"it is proven for batches of {proven}, not {wanted}; export both alike"
    return None


def _static(tensors: Iterable[TensorSpec]) -> str:
    """Write dtypes and shapes without the names, in which two exports may differ."""
    return ", ".join(
        f"{tensor.dtype}[{','.join(str(n) if isinstance(n, int) else '*' for n in tensor.shape)}]"
        for tensor in tensors
    )
