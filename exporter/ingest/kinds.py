"""The object that a training run saved → what it is, and where in it the weights are.

Decided by keys, in the order of `kinds.yaml`; the first rule that applies wins.
"""

import re
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.pickles import UnresolvedCall, is_module
from modelyard.exporter.ingest.plain import state_dict, to_plain
from modelyard.exporter.ingest.value import Weights, list_shown
from modelyard.exporter.tables import read_table

_MAX_DEPTH = 4
_MAX_VISITS = 2_000_000

_MAX_DICTS = 10_000
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


@dataclass(frozen=True)
class Classification:
    """A checkpoint's kind and the sets of weights in it."""

    kind: str
    rule: Rule | None
    weights: Mapping[str, Weights]
    """Path → weights; an empty path is all of the checkpoint."""
    default: str | None
    """The path that the rule chooses; None when nothing tells which."""
    ema: str | None
    left_out: tuple[str, ...] = ()
    """Entries beside the tensors of a state dict."""


_EMA = re.compile(r"(^|[._-])(ema|averaged?|averaging|shadow)([._-]|$)")


def find_weights(root: Any, file: str, refused: tuple[str, ...] = ()) -> Classification:
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
        return Classification("pickled module", None, {"": _of_module(root)}, "", None)
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
        return Classification("state dict", None, {"": flat}, "", None)
    if not weights and _is_flat(content) and (beside := _beside_tensors(content)):
        kept = tensor_map({key: item for key, item in content.items() if key not in beside})
        assert kept is not None
        kept = replace(kept, versions=_versions(root))
        return Classification("state dict", None, {"": kept}, "", None, beside)
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
    return Classification(kind, rule if chosen is not None else None, weights, chosen, ema)


_SHARES = ("torch.distributed.tensor.", "torch.distributed._tensor.")


def _beside_tensors(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the entries that are plain values beside tensors; nothing where one is an object."""
    beside = {key: value for key, value in content.items() if tensor_map({key: value}) is None}
    plain = (bool, int, float, str, list, tuple, dict)
    is_plain = all(value is None or isinstance(value, plain) for value in beside.values())
    return tuple(beside) if is_plain else ()


def weight_sets(content: Mapping[str, Any]) -> dict[str, Weights]:
    """Return every set of weights in a dict of dicts, by its dotted path; optimizers are none."""
    return dict(_candidates(content, "", 0, _Visits()))


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


class _Visits:
    """Counts the values that were looked at: a small pickle can hold one dict in itself."""

    def __init__(self) -> None:
        self._left = _MAX_VISITS

    def count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise CheckpointError(
                f"it holds more than {_MAX_VISITS} values, or dicts inside of themselves; save "
                "model.state_dict() alone"
            )


def tensor_map(value: Any, visits: _Visits | None = None) -> Weights | None:
    """Return the tensors of a (nested) dict by dotted name; None when it holds anything else."""
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    is_map = _flatten(value, "", tensors, extra, 0, visits or _Visits())
    return Weights(tensors, extra, versions=_versions(value)) if is_map else None


def _versions(value: Any) -> dict[str, int]:
    """Return the versions of the modules' forms that torch keeps beside a state dict."""
    stated = as_mapping(getattr(value, "_metadata", None)) or {}
    entries = ((path, as_mapping(entry) or {}) for path, entry in stated.items())
    found = {str(path): entry.get("version") for path, entry in entries}
    return {path: version for path, version in found.items() if isinstance(version, int)}


def _flatten(
    value: Any,
    prefix: str,
    tensors: dict[str, Tensor],
    extra: dict[str, Any],
    depth: int,
    visits: _Visits,
) -> bool:
    content = as_mapping(value)
    if content is None or depth > _MAX_DEPTH:
        return False
    for key, item in content.items():
        visits.count()
        if isinstance(item, Tensor):
            tensors[prefix + key] = item
        elif key.endswith("_extra_state"):  # modules may keep state of any type under this name
            extra[prefix + key] = item
        elif not _flatten(item, f"{prefix}{key}.", tensors, extra, depth + 1, visits):
            return False
    return True


def _is_flat(content: Mapping[str, Any]) -> bool:
    """Distinguish a state dict from a dict of state dicts: names lead to tensors at once."""
    return not content or any(isinstance(value, Tensor) for value in content.values())


def _candidates(
    content: Mapping[str, Any], prefix: str, depth: int, visits: _Visits
) -> Iterator[tuple[str, Weights]]:
    for key, value in content.items():
        visits.count()
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
    callbacks = as_mapping(content.get("callbacks")) or {}
    states = {
        "optimizers": _optimizers(content),
        "schedulers": _state_like(content, ("last_epoch", "_step_count")),
        "grad scalers": _state_like(content, ("scale", "growth_factor")),
        "random states": [key for key in content if "rng" in key or key.startswith("random_state")],
        "callbacks": [str(getattr(key, "dotted", key)) for key in callbacks],
    }
    return found | {name: state for name, state in states.items() if state}


def _optimizers(content: Mapping[str, Any]) -> list[str]:
    found = []
    for path, value in _dicts(content):
        if is_optimizer(value):
            groups, state = value["param_groups"], value["state"]
            groups = _counted(groups if isinstance(groups, list) else (), "parameter group")
            found.append(
                f"{path}: {groups}, state of "
                f"{_counted(state if isinstance(state, Mapping) else (), 'tensor')}"
            )
    return found


def _counted(values: Sized, noun: str) -> str:
    return f"{len(values)} {noun}{'' if len(values) == 1 else 's'}"


def _state_like(content: Mapping[str, Any], keys: tuple[str, ...]) -> list[str]:
    return [path for path, value in _dicts(content) if all(key in value for key in keys)]


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
