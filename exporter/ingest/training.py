"""What a checkpoint keeps of its training run beside the weights."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modelyard.exporter.ingest.kinds import as_mapping, at, is_optimizer
from modelyard.exporter.ingest.plain import to_plain

_COUNTERS = (
    "epoch",
    "epochs",
    "global_step",
    "global_steps",
    "step",
    "steps",
    "iteration",
    "iter",
    "num_updates",
    "best_acc",
    "best_acc1",
    "best_score",
    "best_metric",
    "best_fitness",
    "best_loss",
    "loss",
    "metric",
    "skipped_steps",
    "dp_world_size",
    "mp_world_size",
    "lr",
)
_MAX_DICTS = 10_000
_PLACES = ("", "meta", "extra_state", "state", "rng_state", "train_iterator")


def find_training(root: Any, allowed: frozenset[str]) -> dict[str, Any]:
    """List counters, optimizers, schedulers, random states and callbacks; JSON types only."""
    content = as_mapping(root) or {}
    found: dict[str, Any] = {}
    for place in _PLACES:
        inner = as_mapping(at(content, place)) if place else content
        for name in _COUNTERS:
            value = to_plain((inner or {}).get(name), allowed)
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(name, value)
    if optimizers := _optimizers(content):
        found["optimizers"] = optimizers
    schedulers = [path for path in _state_like(content, ("last_epoch", "_step_count"))]
    if schedulers:
        found["schedulers"] = schedulers
    if scalers := _state_like(content, ("scale", "growth_factor")):
        found["grad scalers"] = scalers
    random = [key for key in content if "rng" in key or key.startswith("random_state")]
    if random:
        found["random states"] = random
    callbacks = as_mapping(content.get("callbacks"))
    if callbacks:
        found["callbacks"] = [_callback_name(key) for key in callbacks]
    return found


def _callback_name(key: Any) -> str:
    return str(getattr(key, "dotted", key))


def _optimizers(content: Mapping[str, Any]) -> list[str]:
    found = []
    for path, value in _dicts(content):
        if is_optimizer(value):
            groups, state = value["param_groups"], value["state"]
            count = len(groups) if isinstance(groups, list) else 0
            steps = len(state) if isinstance(state, Mapping) else 0
            found.append(
                f"{path}: {count} parameter group{'s' if count != 1 else ''}, state of {steps} "
                f"tensor{'s' if steps != 1 else ''}"
            )
    return found


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
