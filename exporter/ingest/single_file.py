"""One file of weights, of torch.save, safetensors, TorchScript or torch.export → its content."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from modelyard.exporter.errors import CheckpointError, cause
from modelyard.exporter.ingest.estimators import estimator_refusal
from modelyard.exporter.ingest.exported_program import read_exported_program
from modelyard.exporter.ingest.kinds import (
    Classification,
    Rule,
    as_mapping,
    at,
    find_training,
    find_weights,
)
from modelyard.exporter.ingest.onnx_file import labels_of, read_onnx
from modelyard.exporter.ingest.pickles import Global, UnresolvedCall, is_module
from modelyard.exporter.ingest.plain import build_stock, stock_class, to_plain
from modelyard.exporter.ingest.rebuild import is_known
from modelyard.exporter.ingest.safetensors_file import read_safetensors
from modelyard.exporter.ingest.source import ADVICE, Source, packed_names, sniff_source
from modelyard.exporter.ingest.torch_file import load_as_torch, read_torch_file
from modelyard.exporter.ingest.torchscript import read_script
from modelyard.exporter.ingest.trust import unpickle
from modelyard.exporter.ingest.value import ClassHint, ParsedCheckpoint, Weights, parse_labels
from modelyard.exporter.tables import read_table

Announce = Callable[[str, Sequence[str]], None]
"""Told, before a trusted file is unpickled, its name and what it will import."""

PROGRAM = "exported program"
ONNX = "ONNX"

_IS_ARTIFACT = (
    "it is an artifact already: give --model to export its weights anew, or package it with "
    "`modelyard archive`"
)

_ALLOWED = read_table(__package__, "allowed")
_DANGEROUS = frozenset(_ALLOWED["dangerous"])
PROFILES: Mapping[str, frozenset[str]] = {
    name: frozenset(names) for name, names in _ALLOWED["profiles"].items()
}
_NAMES_SHOWN = 10
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
        rest = len(inside) - _NAMES_SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        return CheckpointError(
            f'"{name}" is not itself a checkpoint, and holds {", ".join(inside[:_NAMES_SHOWN])}'
            f"{more}: {'unpack it and ' if is_packed else ''}give the one with the weights"
        )
    return CheckpointError(
        f'"{name}" is not a checkpoint that can be read; expected a file of torch.save or '
        "safetensors, or the folder that a trainer wrote: save torch.save(model.state_dict(), …)"
    )


def may_hold_weights(name: str) -> bool:
    """Return whether a file inside of something is worth to be named, by its name."""
    return bool(_WEIGHTS.search(name)) and not _BESIDE.search(name.rpartition("/")[2])


def danger_notes(refused: Sequence[str]) -> tuple[str, ...]:
    """Warn of a file that was made to run something."""
    bad = ", ".join(name for name in refused if {name, name.partition(".")[0]} & _DANGEROUS)
    note = (
        f"it wants {bad}, which no training run saves: it may have been made to run a command. "
        "Nothing was run"
    )
    return (note,) if bad else ()


def _read_torch_file(source: Source, announce: Announce | None) -> ParsedCheckpoint:
    """Decide how a file of torch.save is taken, what kind it is and what is in it."""
    file = read_torch_file(source)
    used: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    if not all(map(is_known, file.wanted)):
        used, refused = match_profiles(_first_kind(file.value, source.name), file.wanted)
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
        return replace(_parse_object(root, source.name, "trusted", ()), imports=refused)
    root, loader = file.value, "inert"
    if used and not refused:
        loader = f"profile {'+'.join(used)}"
    elif not refused and file.protocol <= 2:
        # The floor: torch's own loader agrees that nothing else is in it.
        by_torch = load_as_torch(source, file)
        root, loader = (root, "inert") if by_torch is None else (by_torch, "weights_only")
    return replace(_parse_object(root, source.name, loader, refused), sources=file.sources)


def parse_beside(source: Source, weights: Mapping[str, Any]) -> ParsedCheckpoint:
    """Read a file that holds all of a checkpoint but its weights.

    Args:
        source: the file.
        weights: what it would have, under its own keys, so that its kind is known.
    """
    file = read_torch_file(source)
    content = {**(as_mapping(file.value) or {}), **weights}
    kind = _first_kind(content, source.name, "Lightning checkpoint")
    _, refused = match_profiles(kind, file.wanted)
    return _parse_object(content, source.name, "inert", refused)


def _first_kind(root: Any, name: str, otherwise: str = "unknown") -> str:
    try:
        return find_weights(root, name).kind
    except CheckpointError:
        return otherwise  # said again, with its reason, once the loader is known


def _parse_object(root: Any, name: str, loader: str, refused: tuple[str, ...]) -> ParsedCheckpoint:
    classified = find_weights(root, name, refused)
    _check_whole(root, classified)
    hyper, how, training = _beside_weights(root, classified)
    chosen, rule = classified.weights.get(classified.default or ""), classified.rule
    tree = (chosen and chosen.module) or (root if is_module(root) else None)
    module = root if isinstance(root, nn.Module) else tree and build_stock(tree)
    version = None if rule is None or rule.version is None else at(root, rule.version)
    return ParsedCheckpoint(
        kind=classified.kind,
        loader=loader,
        weights=classified.weights,
        default=classified.default,
        ema=classified.ema,
        writer=rule.writer if rule else None,
        writer_version=str(version) if isinstance(version, str | int | float) else None,
        hyper_parameters=hyper,
        hyper_parameters_name=how,
        training=training,
        refused=refused,
        class_hint=_class_hint(root, tree),
        labels=_labels(as_mapping(root) or {}),
        module=module,
        notes=(*_beside_notes(root, classified.left_out), *danger_notes(refused)),
    )


def _beside_weights(
    root: Any, classified: Classification
) -> tuple[Mapping[str, Any], str | None, Mapping[str, Any]]:
    """Return the hyper-parameters, how the class takes them, and what is known of the run."""
    if classified.kind == "state dict":
        return {}, None, {}
    allowed = allowed_names(classified.kind)
    training = find_training(root, allowed)
    rule = classified.rule
    if rule is None:
        return {}, None, training
    for path in rule.hyper_parameters:
        value = to_plain(at(root, path), allowed) if path else _flattened(root, rule, allowed)
        if isinstance(value, Mapping) and value:
            how = at(root, "hparams_name") if rule.builds else None
            default = "kwargs" if rule.builds else None
            return value, how if isinstance(how, str) and how.isidentifier() else default, training
    return {}, None, training


def _labels(content: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of classes that a training loop kept beside the weights."""
    for key in ("classes", "class_names", "class_to_idx", "idx_to_class", "id2label", "labels"):
        names = content.get(key)
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            return dict(enumerate(names))
        if isinstance(names, Mapping) and names:
            if all(type(index) is int for index in names.values()):
                names = {index: name for name, index in names.items()}
            if labels := parse_labels(names):
                return labels
    return {}


def _flattened(root: Any, rule: Rule, allowed: frozenset[str]) -> dict[str, Any]:
    """Return the hyper-parameters that Flyte writes beside the weights."""
    weights = {*rule.weights, "optimizer_state_dict"}
    content = as_mapping(root) or {}
    return {key: to_plain(v, allowed) for key, v in content.items() if key not in weights}


def _class_hint(root: Any, tree: UnresolvedCall | None) -> ClassHint | None:
    if tree is not None:
        return ClassHint(tree.dotted, "the pickled module")
    arch = (as_mapping(root) or {}).get("arch")
    return ClassHint(arch, '"arch" of the checkpoint') if isinstance(arch, str) else None


def _beside_notes(root: Any, names: Sequence[str]) -> tuple[str, ...]:
    content = as_mapping(root) or {}
    shown = ", ".join(f'"{name}" ({type(content.get(name)).__name__})' for name in names[:20])
    return (f"beside its tensors it holds {shown}, which were left out",) if names else ()


def _check_whole(root: Any, classified: Classification) -> None:
    """Refuse a rank's share of the weights.

    Raises:
        CheckpointError: the weights are spread over several files.
    """
    if classified.kind != "DeepSpeed rank file":
        return
    ranks = (as_mapping(root) or {}).get("mp_world_size")
    tensors = next(iter(classified.weights.values())).tensors
    if isinstance(ranks, int) and ranks > 1:
        raise spread_over_ranks(f"it is one of {ranks} model-parallel ranks")
    if tensors and all(tensor.numel() == 0 for tensor in tensors.values()):
        raise spread_over_ranks("it is of ZeRO stage 3, whose weights are in the optimizers' files")


def spread_over_ranks(seen: str) -> CheckpointError:
    """Advise to join the ranks' files where DeepSpeed is installed."""
    return CheckpointError(
        f"DeepSpeed checkpoint: {seen}; expected a file with all weights: where it was trained, "
        "run `python zero_to_fp32.py . pytorch_model.bin` or "
        "convert_zero_checkpoint_to_fp32_state_dict, and give what that writes"
    )


def _read_script(source: Source, announce: Announce | None) -> ParsedCheckpoint:
    script = read_script(source)
    return ParsedCheckpoint(
        kind=script.kind,
        loader="inert",
        weights={"": Weights(script.tensors)},
        writer="torch.jit",
        class_hint=ClassHint(script.class_name, "the program's text"),
        sources=script.code,
        notes=(_IS_ARTIFACT, *script.notes),
    )


def _read_program(source: Source, announce: Announce | None) -> ParsedCheckpoint:
    program = read_exported_program(source)
    if program.findings:
        raise CheckpointError(
            f'"{source.name}" is refused: {"; ".join(program.findings)}. Loading this exported '
            "program could run code; nothing was run. Export the checkpoint anew"
        )
    return ParsedCheckpoint(
        kind=PROGRAM,
        loader="json",
        weights={"": Weights(program.tensors)},
        writer="torch.export",
        writer_version=program.torch_version,
        inputs=program.input_lines,
    )


def _read_onnx(source: Source, announce: Announce | None) -> ParsedCheckpoint:
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


# -- which names beside torch's own a pickle of a kind may use for values: `allowed.yaml` ----------


def profiles_for(kind: str) -> list[str]:
    """Name the profiles of a kind of checkpoint, the narrowest first."""
    found: list[str] = next(
        names for start, names in _ALLOWED["by_kind"].items() if kind.startswith(start)
    )
    return found


def allowed_names(kind: str) -> frozenset[str]:
    """Unite the names that a kind's profiles hold."""
    return frozenset().union(*(PROFILES[name] for name in profiles_for(kind)))


def match_profiles(kind: str, names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the profiles that hold names beyond torch's, and the names that none holds."""
    unknown = {name for name in names if not is_known(name)}
    used = []
    for profile in profiles_for(kind):
        if covered := {name for name in unknown if _covers(profile, name)}:
            used.append(profile)
            unknown -= covered
    return tuple(used), tuple(sorted(unknown))


def _covers(profile: str, name: str) -> bool:
    if profile == "torch-nn":
        module, _, last = name.rpartition(".")
        return stock_class(Global(module, last)) is not None
    return name in PROFILES[profile]


_READERS: Mapping[str, Callable[[Source, Announce | None], ParsedCheckpoint]] = {
    "torch zip": _read_torch_file,
    "torch legacy": _read_torch_file,
    "safetensors": lambda source, _: read_safetensors(source),
    "TorchScript": _read_script,
    PROGRAM: _read_program,
    ONNX: _read_onnx,
}
