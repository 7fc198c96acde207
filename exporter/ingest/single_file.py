"""One file of weights, of torch.save, safetensors, TorchScript or torch.export → its content."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open

from modelyard.exporter.errors import CheckpointError, cause
from modelyard.exporter.ingest.estimators import estimator_refusal
from modelyard.exporter.ingest.exported_program import PROGRAM, read_exported_program
from modelyard.exporter.ingest.kinds import as_mapping, kind_of, match_profiles, parse_saved
from modelyard.exporter.ingest.onnx_file import ONNX, labels_of, read_onnx
from modelyard.exporter.ingest.source import (
    ADVICE,
    Source,
    packed_names,
    parse_object,
    sniff_source,
)
from modelyard.exporter.ingest.torch_file import read_script, read_torch_file
from modelyard.exporter.ingest.trust import unpickle
from modelyard.exporter.ingest.value import ParsedCheckpoint, Weights, list_shown

Announce = Callable[[str, Sequence[str]], None]
"""Told, before a trusted file is unpickled, its name and what it will import."""


_IS_ARTIFACT = (
    "it is an artifact already: give --model to export its weights anew, or package it with "
    "`modelyard archive`"
)

_MAX_HEADER_BYTES = 16 << 20
"""Some 150,000 tensors in one file; the library, which takes 20 µs for each, reads 100 MB."""
_WEIGHTS = re.compile(r"\.(pt|pth|ckpt|bin|safetensors|ts)$")
_BESIDE = re.compile(r"optim|sched|rng|scaler|random_state|training_args|counter|brain|dataloader")


def read_file(source: Source, announce: Announce | None = None) -> ParsedCheckpoint:
    """Read a file of any format that holds weights.

    Args:
        source: its bytes.
        announce: only for a file that is trusted to run its code.

    Raises:
        CheckpointError: it is none, is damaged, or holds no weights.
    """
    format = sniff_source(source)
    reader = _READERS.get(format)
    if reader is None:
        if (known := estimator_refusal(source)) is not None:
            raise known
        inside = [name for name in packed_names(source) if may_hold_weights(name)]
        raise refusal(format, source.name, inside, is_packed=True)
    parsed = reader(source, announce)
    return parsed if source.path is None else replace(parsed, paths=parsed.paths or (source.path,))


def refusal(
    format: str, name: str, inside: Sequence[str] = (), *, is_packed: bool = False
) -> CheckpointError:
    """Return why a format is not taken, and what to do; `inside` are files of weights in it."""
    if format in ADVICE:
        return CheckpointError(f'"{name}" is not a checkpoint ({format}): {ADVICE[format]}')
    if inside:
        return CheckpointError(
            f'"{name}" is not itself a checkpoint, and holds {list_shown(inside)}: '
            f"{'unpack it and ' if is_packed else ''}give the one with the weights"
        )
    return CheckpointError(
        f'"{name}" is not a checkpoint that can be read; expected a file of torch.save or '
        "safetensors, or the folder that a trainer wrote: save torch.save(model.state_dict(), …)"
    )


def may_hold_weights(name: str) -> bool:
    """Return whether a file inside of something is worth to be named, by its name."""
    return bool(_WEIGHTS.search(name)) and not _BESIDE.search(name.rpartition("/")[2])


def _read_torch_file(source: Source, announce: Announce | None) -> ParsedCheckpoint:
    """Decide how a file of torch.save is taken, what kind it is and what is in it."""
    file = read_torch_file(source)
    used, refused = match_profiles(kind_of(file.value), file.wanted)
    if refused and announce is not None:
        announce(source.name, refused)
        try:
            root = unpickle(source)
        # The file's own code runs, and may fail in any way.
        except Exception as error:
            raise CheckpointError(
                f'"{source.name}" was trusted and cannot be unpickled: {cause(error)}; install '
                "what defines its classes, or give --model and leave --trust out"
            ) from error
        return replace(parse_saved(root, source.name, "trusted", ()), imports=refused)
    loader = "inert"
    if not refused and (used or file.protocol <= 2):  # those that torch's own loader reads
        loader = f"profile {'+'.join(used)}" if used else "weights_only"
    return replace(parse_saved(file.value, source.name, loader, refused), sources=file.sources)


def parse_beside(source: Source, weights: Mapping[str, Any]) -> ParsedCheckpoint:
    """Read a file that holds all of a checkpoint but its weights.

    Args:
        source: the file.
        weights: what it would have, under its own keys, so that its kind is known.
    """
    file = read_torch_file(source)
    content = {**(as_mapping(file.value) or {}), **weights}
    _, refused = match_profiles(kind_of(content, "Lightning checkpoint"), file.wanted)
    return parse_saved(content, source.name, "inert", refused)


def _read_safetensors(source: Source, _: Announce | None) -> ParsedCheckpoint:
    """Map every tensor of one file; those of a file that is not on disk by itself are copied.

    By the library that defines the format. Before it sees a file, the header is held to its limit
    and read as strict JSON: of a name that is there twice the library takes one.
    """
    metadata = _read_metadata(source)
    if "DCP_SHARDING_INFO" in metadata:
        raise CheckpointError(
            f'"{source.name}" holds slices of tensors in safetensors, written by several ranks; '
            "consolidate them first (HuggingFaceStorageWriter(enable_consolidation=True))"
        )
    try:
        if source.path is None:
            tensors = safetensors.torch.load(bytes(source.data))
        else:
            with safe_open(source.path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # What the library, or torch for a dtype or place that it has not, says of a file.
    except (SafetensorError, KeyError, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            f'"{source.name}" is refused: {cause(error)}; expected a file as the safetensors '
            "library writes it: it is damaged or cut short, copy it again"
        ) from error
    return ParsedCheckpoint(
        kind="safetensors",
        loader="safetensors",
        weights={"": Weights(tensors)},
        paths=() if source.path is None else (source.path,),
        training={key: text[:200] for key, text in metadata.items() if key != "format"},
    )


def _read_metadata(source: Source) -> dict[str, str]:
    length = int.from_bytes(source.data[:8], "little")
    if 8 + length > source.size:
        raise CheckpointError(
            f'"{source.name}" is refused: its header would have {length} bytes, and the file has '
            f"{source.size}; it is damaged or cut short: copy it again"
        )
    if length > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f'"{source.name}" is refused: its header has {length} bytes, and at most '
            f"{_MAX_HEADER_BYTES} are read; save the tensors in several files"
        )
    metadata = parse_object(source.data[8 : 8 + length], source.name).get("__metadata__", {})
    return {str(k): str(v) for k, v in metadata.items()} if isinstance(metadata, dict) else {}


def _read_script(source: Source, _: Announce | None) -> ParsedCheckpoint:
    script = read_script(source)
    return replace(script, notes=(_IS_ARTIFACT, *script.notes))


def _read_program(source: Source, _: Announce | None) -> ParsedCheckpoint:
    program = read_exported_program(source)
    if program.findings:
        raise CheckpointError(
            f'"{source.name}" is refused: {"; ".join(program.findings)}. Loading this exported '
            "program could run code; nothing was run. Export the checkpoint anew"
        )
    return replace(program, refused=())  # of its sample inputs, which nobody reads


def _read_onnx(source: Source, _: Announce | None) -> ParsedCheckpoint:
    if source.path is None:
        raise refusal(ONNX, source.name)
    model, files = read_onnx(source)
    return ParsedCheckpoint(
        kind=ONNX,
        loader="protobuf",
        weights={"": Weights({})},
        writer=model.producer_name or None,
        writer_version=model.producer_version or None,
        labels=labels_of(model),
        paths=files,
    )


_READERS: Mapping[str, Callable[[Source, Announce | None], ParsedCheckpoint]] = {
    "torch zip": _read_torch_file,
    "torch legacy": _read_torch_file,
    "safetensors": _read_safetensors,
    "TorchScript": _read_script,
    PROGRAM: _read_program,
    ONNX: _read_onnx,
}
