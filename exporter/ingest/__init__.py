"""Any checkpoint in: what a training run left → its weights and all that is known of them.

Nothing that a checkpoint holds is imported, called or compiled; `trust.py` is the one exception,
and runs only for a file that a person has trusted.

    source         bytes, mapped, and what they are; JSON, read by `archiver.untrusted`
    pickles        pickle → plain values and placeholders; rebuild: the calls that give tensors
    plain          placeholders → values, by the lists of `allowed.yaml`; a module → its tensors
    torch_file  dcp  exported_program  onnx_file     one format each
    kinds          keys of a saved object → kind, weights and the rest of a run
    single_file  folders     one file, one folder or archive → ParsedCheckpoint
    value          ParsedCheckpoint, Checkpoint; the trip from one to the other is below
"""

from dataclasses import fields
from pathlib import Path

from modelyard.base.nearest import did_you_mean
from modelyard.exporter.errors import CheckpointError, UsageError
from modelyard.exporter.ingest.exported_program import PROGRAM
from modelyard.exporter.ingest.folders import read_archive, read_folder
from modelyard.exporter.ingest.kinds import danger_notes
from modelyard.exporter.ingest.onnx_file import ONNX
from modelyard.exporter.ingest.single_file import Announce, read_file
from modelyard.exporter.ingest.source import Source, inside, sniff
from modelyard.exporter.ingest.value import (
    Checkpoint,
    Description,
    ParsedCheckpoint,
    digest_files,
    find_tied,
    strip_wrappers,
)

_RUN = "checkpoint-*"


def read_checkpoint(
    path: Path,
    *,
    weights_key: str | None = None,
    ema: bool = False,
    announce: Announce | None = None,
) -> Checkpoint:
    """Read a checkpoint of any kind, a file or a folder, without running any of its code.

    Args:
        path: the file or folder.
        weights_key: dotted path of the weights inside, where there are several.
        ema: take the averaged weights.
        announce: only for a file that is trusted. It is called with the file's name and the names
            that the file wants imported, and then the file is unpickled without limits.

    Raises:
        CheckpointError: it cannot be read, is refused, or holds no weights.
        UsageError: `weights_key` or `ema` names weights that it has not.
    """
    parsed = parse_checkpoint(path, announce)
    return take_weights(parsed, path, choose(parsed, path.name, weights_key, ema))


def take_weights(parsed: ParsedCheckpoint, path: Path, key: str) -> Checkpoint:
    """Return one set of weights with all that is known of the checkpoint."""
    weights = parsed.weights[key]
    renamed, prefixes = strip_wrappers(weights.tensors)
    tensors = {new: weights.tensors[old] for old, new in renamed.items()}
    known = {each.name: getattr(parsed, each.name) for each in fields(Description)}
    known["notes"] = (*parsed.notes, *danger_notes(parsed.refused))
    if key != parsed.default:
        known["module"] = None
    return Checkpoint(
        **known,
        path=path,
        tensors=tensors,
        files=digest_files(path, parsed.paths),
        original_names={new: old for old, new in renamed.items()},
        extra_state=dict(weights.extra_state),
        versions=dict(weights.versions),
        weights_key=key,
        alternatives={k: other.parameters for k, other in parsed.weights.items() if k != key},
        ema_key=parsed.ema,
        prefixes=prefixes,
        tied=find_tied(tensors),
    )


def parse_checkpoint(path: Path, announce: Announce | None = None) -> ParsedCheckpoint:
    """Read everything but the choice of weights.

    Raises:
        CheckpointError: it cannot be read, is refused, or holds no weights.
    """
    format = sniff(path)
    if format == "TorchServe archive":
        return read_archive(path, announce)
    if path.is_dir():
        newest = _newest_of_run(path) if format == "unknown" else None
        return read_folder(inside(path, newest.name) if newest else path, announce)
    return read_file(Source.of_file(path), announce)


def _newest_of_run(folder: Path) -> Path | None:
    """Find the checkpoint of the highest step in a folder of `checkpoint-<step>`."""
    steps = {
        int(path.name.partition("-")[2]): path
        for path in folder.glob(_RUN)
        if path.is_dir() and path.name.partition("-")[2].isdecimal()
    }
    return steps[max(steps)] if steps else None


def choose(
    parsed: ParsedCheckpoint, name: str, weights_key: str | None = None, ema: bool = False
) -> str:
    """Return the path of the weights to take.

    Raises:
        CheckpointError: there are several sets, and nothing tells which.
        UsageError: the wanted one is not there.
    """
    if weights_key is not None:
        if weights_key in parsed.weights:
            return weights_key
        raise UsageError(
            f'--weights-key "{weights_key}": "{name}" has no weights there; it has '
            f"{_listed(parsed)}{did_you_mean(weights_key, parsed.weights)}"
        )
    if ema:
        if parsed.ema is None:
            raise UsageError(f'--ema: "{name}" has no averaged weights; it has {_listed(parsed)}')
        return parsed.ema
    if parsed.default is None:
        raise CheckpointError(
            f'"{name}" has several sets of weights: {_listed(parsed)}; give one as --weights-key'
        )
    return parsed.default


def _listed(parsed: ParsedCheckpoint) -> str:
    return ", ".join(
        f"{key or 'the file itself'} ({weights.parameters:,} parameters)"
        for key, weights in parsed.weights.items()
    )


__all__ = ["ONNX", "PROGRAM", "Announce", "Checkpoint", "read_checkpoint"]
