"""What a bench measures: subjects, batch sizes, thread counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.report import parse_report
from modelyard.archiver.signature import Dim, Signature, with_dims
from modelyard.exporter.errors import UsageError
from modelyard.exporter.request import report_path
from modelyard.handlers.errors import LoadError
from modelyard.handlers.models.backends import detect_format


@dataclass(frozen=True)
class Subject:
    """One thing to measure: how a child process opens it."""

    name: str
    kind: str
    """"eager", "compile", or an artifact's format."""
    path: Path
    model: str | None = None
    model_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    subjects: tuple[Subject, ...]
    signature: Signature
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    rounds: int = 5
    cell_s: float = 2.0
    """Time for one cell (subject, threads, batch), over all rounds; one call runs in any case."""
    device: str = "cpu"
    profile: Path | None = None
    """Folder for a trace of each subject."""


def read_signature(artifact: Path) -> Signature:
    """Read inputs, proven ranges and the integers that were tried from an artifact's report.

    Raises:
        UsageError: there is no report, or none that states a signature.
    """
    path = report_path(artifact)
    try:
        report = parse_report(path.read_bytes(), path)
    except (OSError, CannotArchive) as error:
        raise UsageError(
            f'"{artifact.name}" has no report that states its inputs ({path.name}); give --input'
        ) from error
    # Static quantisation is compared on samples too, but takes any values.
    if report.parity and report.parity.extent == "none" and not report.parity.is_quantized:
        raise UsageError(
            f'"{artifact.name}" was compared on samples alone, since nothing made up may be a '
            "valid input; give --input with the values that it takes"
        )
    return report.tried


def choose_subjects(
    artifacts: Sequence[Path],
    checkpoint: Path | None,
    model: str | None,
    model_args: Mapping[str, Any],
    *,
    compiled: bool = True,
) -> tuple[Subject, ...]:
    """Name what is measured: the checkpoint's model eager and compiled, then the artifacts.

    Raises:
        UsageError: nothing to measure, or a file that is not an artifact.
    """
    subjects = []
    if checkpoint is not None:
        subjects.append(Subject("eager", "eager", checkpoint, model, model_args))
        if compiled:
            subjects.append(Subject("torch.compile", "compile", checkpoint, model, model_args))
    for path in artifacts:
        try:
            format = detect_format(path)
        except (LoadError, OSError) as error:
            raise UsageError(f"{error}; expected artifacts of modelyard export") from error
        subjects.append(Subject(path.name, format, path))
    names = [subject.name for subject in subjects]
    if not subjects:
        raise UsageError("nothing to measure; give artifacts, or --checkpoint with --model")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f'two artifacts are named "{twice[0]}"; rename one, to tell them apart')
    return tuple(subjects)


def choose_batches(signature: Signature, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the batch sizes to measure: those given, else 1 and the largest that is proven.

    Raises:
        UsageError: the batch is one fixed size, and another is given.
    """
    batch = signature.batch
    if not isinstance(batch, int):
        return tuple(dict.fromkeys(sizes or (1, batch.max if batch else 1)))
    if any(size != batch for size in sizes):
        raise UsageError(f"--batch {sizes[0]}: the model takes batches of {batch} only")
    return (batch,)


def fix_sizes(signature: Signature, sizes: Mapping[str, int]) -> Signature:
    """Choose the size of dims other than the batch; the largest proven one is the default.

    Raises:
        UsageError: no such dim.
    """
    known = [name for name, dim in signature.dims.items() if dim != signature.batch]
    if unknown := [name for name in sizes if name not in known]:
        rest = ", ".join(known) or "none"
        raise UsageError(f'--size names "{unknown[0]}"; beside the batch the dims are {rest}')
    dims = {name: Dim(name, size, size) for name, size in sizes.items()}
    return replace(signature, inputs=tuple(with_dims(signature.inputs, dims)))
