"""The ingest trip: sniff → read → choose the weights → strip wrappers' prefixes → `Checkpoint`."""

from dataclasses import replace
from pathlib import Path

from modelyard.exporter.errors import CheckpointError, UsageError
from modelyard.exporter.ingest.draft import Draft
from modelyard.exporter.ingest.folders import read_folder, read_serve_archive
from modelyard.exporter.ingest.names import nearest, strip_wrappers
from modelyard.exporter.ingest.single_file import Announce, read_file
from modelyard.exporter.ingest.sniff import sniff
from modelyard.exporter.ingest.source import Source
from modelyard.exporter.ingest.value import Checkpoint, digest_files, find_tied

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
    draft = read_draft(path, announce)
    return take_weights(draft, path, choose(draft, path.name, weights_key, ema))


def take_weights(draft: Draft, path: Path, key: str) -> Checkpoint:
    """Return one of a draft's sets of weights with all that is known of the checkpoint."""
    weights = draft.weights[key]
    renamed, prefixes = strip_wrappers(weights.tensors)
    tensors = {new: weights.tensors[old] for old, new in renamed.items()}
    return Checkpoint(
        path=path,
        kind=draft.kind,
        tensors=tensors,
        loader=draft.loader,
        files=digest_files(path, draft.paths),
        writer=draft.writer,
        writer_version=draft.writer_version,
        original_names={new: old for old, new in renamed.items()},
        extra_state=dict(weights.extra_state),
        weights_key=key,
        alternatives={k: other.parameters for k, other in draft.weights.items() if k != key},
        ema_key=draft.ema,
        prefixes=prefixes,
        tied=find_tied(tensors),
        hyper_parameters=draft.hyper_parameters,
        hyper_parameters_name=draft.hyper_parameters_name,
        training=draft.training,
        refused=draft.refused,
        imports=draft.imports,
        class_hint=draft.class_hint,
        labels=draft.labels,
        sources=draft.sources,
        notes=draft.notes,
        module=draft.module if key == draft.default else None,
    )


def read_draft(path: Path, announce: Announce | None = None) -> Draft:
    """Read everything but the choice of weights.

    Raises:
        CheckpointError: it cannot be read, is refused, or holds no weights.
    """
    found = sniff(path)
    if found == "TorchServe archive":
        return read_serve_archive(path, announce)
    if path.is_dir():
        newest = _newest_of_run(path) if found == "unknown" else None
        return read_folder(newest or path, announce)
    draft = read_file(Source.of_file(path), announce)
    return replace(draft, paths=(path,))


def _newest_of_run(folder: Path) -> Path | None:
    """Find the checkpoint of the highest step in a folder of `checkpoint-<step>`."""
    steps = {
        int(path.name.partition("-")[2]): path
        for path in folder.glob(_RUN)
        if path.is_dir() and path.name.partition("-")[2].isdecimal()
    }
    return steps[max(steps)] if steps else None


def choose(draft: Draft, name: str, weights_key: str | None = None, ema: bool = False) -> str:
    """Return the path of the weights to take.

    Raises:
        CheckpointError: there are several sets, and nothing tells which.
        UsageError: the wanted one is not there.
    """
    if weights_key is not None:
        if weights_key in draft.weights:
            return weights_key
        near = nearest(weights_key, draft.weights)
        raise UsageError(
            f'--weights-key "{weights_key}": "{name}" has no weights there; it has '
            f"{_listed(draft)}{f'. Did you mean {near}?' if near else ''}"
        )
    if ema:
        if draft.ema is None:
            raise UsageError(f'--ema: "{name}" has no averaged weights; it has {_listed(draft)}')
        return draft.ema
    if draft.default is None:
        raise CheckpointError(
            f'"{name}" has several sets of weights: {_listed(draft)}; choose one with --weights-key'
        )
    return draft.default


def _listed(draft: Draft) -> str:
    return ", ".join(
        f"{key or 'the file itself'} ({weights.parameters:,} parameters)"
        for key, weights in draft.weights.items()
    )
