"""The object that a training run saved → what it is, and where in it the weights are.

Decided by keys, in the order of `kinds.yaml`; the first rule that applies wins.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.pickles import Global, UnresolvedCall, is_module
from modelyard.exporter.ingest.plain import build_stock, state_dict, stock_class, to_plain
from modelyard.exporter.ingest.rebuild import is_known
from modelyard.exporter.ingest.value import (
    ClassHint,
    ParsedCheckpoint,
    Weights,
    list_shown,
    parse_labels,
)
from modelyard.exporter.tables import read_table

_MAX_DEPTH = 4
_MAX_VISITS = 2_000_000

_MAX_DICTS = 10_000
_EXTRA = "_extra_state"
"""Modules may keep state of any type under names that end so."""
_TABLES = read_table(__package__, "kinds")


@dataclass(frozen=True)
class Rule:
    """One kind of checkpoint: the keys that tell it, and those of its weights; see `kinds.yaml`."""

    kind: str
    weights: tuple[str, ...]
    all: tuple[str, ...] = ()
    any: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    writer: str | None = None
    version: str | None = None
    hyper_parameters: tuple[str, ...] = ()
    builds: bool = False

    def applies(self, root: Mapping[str, Any]) -> bool:
        """Return whether the keys of a saved object are those of this kind."""
        return (
            all(key in root for key in self.all)
            and (not self.any or any(key in root for key in self.any))
            and (not self.modules or any(is_module(root.get(key)) for key in self.modules))
        )


RULES = tuple(Rule(**each) for each in _TABLES["rules"])


class _Found(NamedTuple):
    """A checkpoint's kind and the sets of weights in it."""

    kind: str
    rule: Rule | None
    weights: Mapping[str, Weights]
    """Path → weights; an empty path is all of the checkpoint."""
    default: str | None = ""
    """The path that the rule chooses; None when nothing tells which."""
    ema: str | None = None
    left_out: tuple[str, ...] = ()
    """Entries beside the tensors of a state dict."""


_EMA = re.compile(r"(^|[._-])(ema|averaged?|averaging|shadow)([._-]|$)")


def _find_weights(root: Any, file: str, refused: tuple[str, ...] = ()) -> _Found:
    """Return what kind a saved object is, and list every set of weights in it.

    Args:
        root: what was saved; placeholders for what was not made.
        file: its name, for messages.
        refused: names that were not imported, for messages.

    Raises:
        CheckpointError: there are no weights in it.
    """
    if isinstance(root, Tensor):
        raise CheckpointError(
            f'"{file}" holds one tensor (as Flyte\'s PyTorchTensor), no model; expected a state '
            "dict: save model.state_dict()"
        )
    if isinstance(root, nn.Module) or is_module(root):
        return _Found("pickled module", None, {"": _of_module(root)})
    content = as_mapping(root)
    wants = f", and wants {', '.join(refused)}, which was refused" if refused else ""
    if content is None:
        raise CheckpointError(
            f'checkpoint "{file}" holds a {_named(root)}{wants}; expected a state dict, name → '
            "tensor, or a dict that has one: save model.state_dict()"
        )
    rule = next((rule for rule in RULES if rule.applies(content)), None)
    weights = weight_sets(content)
    chosen = None if rule is None else next((key for key in rule.weights if key in weights), None)
    flat = tensor_map(root)
    if chosen is None and flat is not None and _is_flat(content):
        return _Found("state dict", None, {"": flat})
    if not weights and _is_flat(content) and (beside := _beside_tensors(content)):
        kept = tensor_map({key: item for key, item in content.items() if key not in beside})
        assert kept is not None
        kept = replace(kept, versions=_versions(root))
        return _Found("state dict", None, {"": kept}, left_out=beside)
    if not weights:
        if any(name.startswith(_SHARES) for name in refused):
            raise CheckpointError(
                f'checkpoint "{file}" holds DTensors, of which a rank has its share; gather them '
                "where it was trained: get_model_state_dict(model, options=StateDictOptions("
                "full_state_dict=True)), or save it with torch.distributed.checkpoint"
            )
        if any(name.startswith("torchao.") for name in refused):
            raise CheckpointError(
                f'checkpoint "{file}" holds weights that torchao has quantised{wants}; expected '
                "those that they were made from: export the float checkpoint, with --quantize "
                "int8-dynamic for a small file"
            )
        raise CheckpointError(
            f'checkpoint "{file}" holds {_shown(content)}{wants}; expected a plain state dict, '
            "name → tensor, or a dict that has one: save model.state_dict()"
        )
    ema = next((key for key in weights if _EMA.search(key.lower()) and key != chosen), None)
    if chosen is None and len(set(weights) - {ema}) == 1:
        (chosen,) = set(weights) - {ema}
    kind = "training checkpoint" if rule is None or chosen is None else rule.kind
    return _Found(kind, rule if chosen is not None else None, weights, chosen, ema)


def kind_of(root: Any, otherwise: str = "unknown") -> str:
    """Return what kind a saved object is, as far as its names alone say it."""
    try:
        return _find_weights(root, "").kind
    except CheckpointError:
        return otherwise  # said again, with its reason, once the loader is known


def parse_saved(root: Any, name: str, loader: str, refused: tuple[str, ...]) -> ParsedCheckpoint:
    """Return what a saved object holds.

    Args:
        root: what was saved; placeholders for what was not made.
        name: its file's name, for messages.
        loader: how it was read.
        refused: names that were not imported.

    Raises:
        CheckpointError: there are no weights in it, or a rank's share of them.
    """
    found, content = _find_weights(root, name, refused), as_mapping(root) or {}
    if found.kind == "DeepSpeed rank file":
        _check_whole(content, found.weights)
    chosen, rule = found.weights.get(found.default or ""), found.rule
    tree = (chosen and chosen.module) or (root if is_module(root) else None)
    version = None if rule is None or rule.version is None else at(root, rule.version)
    arch = content.get("arch")
    left_out = [f'"{key}" ({type(content[key]).__name__})' for key in found.left_out[:20]]
    beside = f"beside its tensors it holds {', '.join(left_out)}, which were left out"
    parsed = ParsedCheckpoint(
        kind=found.kind,
        loader=loader,
        weights=found.weights,
        default=found.default,
        ema=found.ema,
        writer=rule.writer if rule else None,
        writer_version=str(version) if isinstance(version, str | int | float) else None,
        refused=refused,
        class_hint=ClassHint(tree.dotted, "the pickled module")
        if tree
        else ClassHint(arch, '"arch" of the checkpoint')
        if isinstance(arch, str)
        else None,
        labels=_labels(content),
        module=root if isinstance(root, nn.Module) else tree and build_stock(tree),
        notes=(beside,) if left_out else (),
    )
    if found.kind == "state dict":
        return parsed
    allowed = frozenset[str]().union(*(_PROFILES[name] for name in _profiles_for(found.kind)))
    parsed = replace(parsed, training=find_training(root, allowed))
    if rule is None:
        return parsed
    others = (*rule.weights, "optimizer_state_dict")
    beside_them = {key: value for key, value in content.items() if key not in others}  # as Flyte
    for path in rule.hyper_parameters:
        value = to_plain(at(root, path) if path else beside_them, allowed)
        if isinstance(value, Mapping) and value:
            how = at(root, "hparams_name") if rule.builds else None
            is_name = isinstance(how, str) and how.isidentifier()
            default = "kwargs" if rule.builds else None
            return replace(
                parsed, hyper_parameters=value, hyper_parameters_name=how if is_name else default
            )
    return parsed


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


def _check_whole(content: Mapping[str, Any], weights: Mapping[str, Weights]) -> None:
    """Refuse a rank's share of the weights."""
    ranks, tensors = content.get("mp_world_size"), next(iter(weights.values())).tensors
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


_SHARES = ("torch.distributed.tensor.", "torch.distributed._tensor.")


def _beside_tensors(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the entries that are plain values beside tensors; nothing where one is an object."""
    beside = {key: value for key, value in content.items() if tensor_map({key: value}) is None}
    plain = (bool, int, float, str, list, tuple, dict)
    is_plain = all(value is None or isinstance(value, plain) for value in beside.values())
    return tuple(beside) if is_plain else ()


def weight_sets(content: Mapping[str, Any]) -> dict[str, Weights]:
    """Return every set of weights in a dict of dicts, by its dotted path; optimizers are none."""
    return dict(_candidates(content, "", 0, iter(range(_MAX_VISITS))))


def as_mapping(value: Any) -> Mapping[str, Any] | None:
    """Return a dict, also one of a subclass that was not made, with text for keys."""
    if isinstance(value, UnresolvedCall) and value.pairs:
        value = dict(pair for pair in value.pairs if isinstance(pair[0], str | int))
    if not isinstance(value, Mapping):
        return None
    return {key if isinstance(key, str) else str(key): item for key, item in value.items()}


def at(root: Any, path: str) -> Any:
    """Return the value at a dotted path; None when there is none."""
    value = root
    for part in path.split(".") if path else ():
        if isinstance(value, list | tuple):
            value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
        else:
            value = (as_mapping(value) or {}).get(part)
    return value


def _count(visits: Iterator[int]) -> None:
    """Count a value that is looked at: a small pickle can hold one dict in itself."""
    if next(visits, None) is None:
        raise CheckpointError(
            f"it holds over {_MAX_VISITS} values, or itself; save model.state_dict() alone"
        )


def tensor_map(value: Any, visits: Iterator[int] | None = None) -> Weights | None:
    """Return the tensors of a (nested) dict by dotted name; None when it holds anything else."""
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    for name, item in _entries(value, "", 0, visits or iter(range(_MAX_VISITS))):
        if not isinstance(item, Tensor) and not name.endswith(_EXTRA):
            return None
        (tensors if isinstance(item, Tensor) else extra)[name] = item
    return Weights(tensors, extra, versions=_versions(value))


def _versions(value: Any) -> dict[str, int]:
    """Return the versions of the modules' forms that torch keeps beside a state dict."""
    stated = as_mapping(getattr(value, "_metadata", None)) or {}
    entries = ((path, as_mapping(entry) or {}) for path, entry in stated.items())
    found = {str(path): entry.get("version") for path, entry in entries}
    return {path: version for path, version in found.items() if isinstance(version, int)}


def _entries(
    value: Any, prefix: str, depth: int, visits: Iterator[int]
) -> Iterator[tuple[str, Any]]:
    """Yield what a (nested) dict holds by dotted name; None for what is not such a dict."""
    content = as_mapping(value)
    if content is None or depth > _MAX_DEPTH:
        yield prefix, None
        return
    for key, item in content.items():
        _count(visits)
        if isinstance(item, Tensor) or key.endswith(_EXTRA):
            yield prefix + key, item
        else:
            yield from _entries(item, f"{prefix}{key}.", depth + 1, visits)


def _is_flat(content: Mapping[str, Any]) -> bool:
    """Distinguish a state dict from a dict of state dicts: names lead to tensors at once."""
    return not content or any(isinstance(value, Tensor) for value in content.values())


def _candidates(
    content: Mapping[str, Any], prefix: str, depth: int, visits: Iterator[int]
) -> Iterator[tuple[str, Weights]]:
    for key, value in content.items():
        _count(visits)
        path = f"{prefix}{key}"
        if isinstance(value, nn.Module) or is_module(value):
            yield path, _of_module(value)
            continue
        if isinstance(value, list | tuple):
            value = dict(enumerate(value[:100]))
        inner = as_mapping(value)
        if not inner or is_optimizer(inner) or _NO_WEIGHTS.search(key.lower()):
            continue
        found = tensor_map(value, visits)
        if found is not None and found.tensors and _is_flat(inner):
            yield path, found
        elif depth < _MAX_DEPTH:
            yield from _candidates(inner, f"{path}.", depth + 1, visits)


_NO_WEIGHTS = re.compile(r"optim|sched|rng|scaler|random|loops|callbacks")


def is_optimizer(value: Any) -> bool:
    """Return whether a dict is the state of an optimizer."""
    return isinstance(value, Mapping) and "param_groups" in value and "state" in value


def _of_module(module: Any) -> Weights:
    """Return the state dict of a placeholder's tree, or of a real module of a trusted file."""
    if isinstance(module, nn.Module):
        state = module.state_dict()
        return Weights({name: value for name, value in state.items() if isinstance(value, Tensor)})
    return Weights(state_dict(module), module=module)


def _shown(content: Mapping[str, Any]) -> str:
    others = {key: value for key, value in content.items() if not isinstance(value, Tensor)}
    text = list_shown([f'"{key}" ({_named(value)})' for key, value in others.items()])
    beside = " beside tensors" if len(others) < len(content) else ""
    return f"{text}{beside}" if text else "nothing"


def _named(value: Any) -> str:
    """Name the class of a value, also of one that was not made."""
    return value.dotted if isinstance(value, UnresolvedCall) else type(value).__name__


# -- what is kept of the training run ------------------------------------------------------------


def find_training(root: Any, allowed: frozenset[str]) -> dict[str, Any]:
    """List counters, optimizers, schedulers, random states and callbacks; JSON types only."""
    content = as_mapping(root) or {}
    found: dict[str, Any] = {}
    for place in _TABLES["places"]:
        inner = as_mapping(at(content, place)) if place else content
        for name in _TABLES["counters"]:
            value = to_plain((inner or {}).get(name), allowed)
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(name, value)
    states: dict[str, list[str]] = {"optimizers": [], "schedulers": [], "grad scalers": []}
    for path, value in _dicts(content):
        if is_optimizer(value):
            groups, state = value["param_groups"], value["state"]
            groups = _counted(groups if isinstance(groups, list) else (), "parameter group")
            state = _counted(state if isinstance(state, Mapping) else (), "tensor")
            states["optimizers"].append(f"{path}: {groups}, state of {state}")
        elif "last_epoch" in value and "_step_count" in value:
            states["schedulers"].append(path)
        elif "scale" in value and "growth_factor" in value:
            states["grad scalers"].append(path)
    states["random states"] = [k for k in content if "rng" in k or k.startswith("random_state")]
    states["callbacks"] = list(as_mapping(content.get("callbacks")) or {})
    return found | {name: state for name, state in states.items() if state}


def _counted(values: Sized, noun: str) -> str:
    return f"{len(values)} {noun}{'' if len(values) == 1 else 's'}"


def _dicts(content: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """List the dicts one and two levels down, where trainers keep such state."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for key, value in content.items():
        inner: Any = dict(enumerate(value[:20])) if isinstance(value, list) else value
        mapping = as_mapping(inner)
        if mapping is None or len(found) > _MAX_DICTS:
            continue
        if not isinstance(value, list):
            found.append((key, mapping))
        for name, item in mapping.items():
            deeper = as_mapping(item)
            if deeper is not None and not isinstance(item, Tensor):
                found.append((f"{key}.{name}", deeper))
    return found


# -- which names beside torch's own a pickle of a kind may use for values: `allowed.yaml` ----------

_ALLOWED = read_table(__package__, "allowed")
_DANGEROUS = frozenset(_ALLOWED["dangerous"])
_PROFILES: Mapping[str, frozenset[str]] = {
    name: frozenset(names) for name, names in _ALLOWED["profiles"].items()
}


def _profiles_for(kind: str) -> list[str]:
    """Name the profiles of a kind of checkpoint, the narrowest first."""
    found: list[str] = next(
        names for start, names in _ALLOWED["by_kind"].items() if kind.startswith(start)
    )
    return found


def match_profiles(kind: str, names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the profiles that hold names beyond torch's, and the names that none holds."""
    unknown = {name for name in names if not is_known(name)}
    used = []
    for profile in _profiles_for(kind):
        if covered := {name for name in unknown if _covers(profile, name)}:
            used.append(profile)
            unknown -= covered
    return tuple(used), tuple(sorted(unknown))


def _covers(profile: str, name: str) -> bool:
    if profile == "torch-nn":
        module, _, last = name.rpartition(".")
        return stock_class(Global(module, last)) is not None
    return name in _PROFILES[profile]


def danger_notes(refused: Sequence[str]) -> tuple[str, ...]:
    """Warn of a file that was made to run something."""
    bad = ", ".join(name for name in refused if {name, name.partition(".")[0]} & _DANGEROUS)
    note = (
        f"it wants {bad}, which no training run saves: it may have been made to run a command. "
        "Nothing was run"
    )
    return (note,) if bad else ()
