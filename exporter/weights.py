"""A checkpoint's tensors → the model's parameters and buffers; every misfit in one error."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelyard.exporter.errors import CheckpointError, cause
from modelyard.exporter.ingest import Checkpoint
from modelyard.exporter.ingest.names import fit_names, nearest
from modelyard.exporter.ingest.value import place_of

_KEYS_SHOWN = 20
_NEAREST_SHOWN = 200


def load_weights(model: nn.Module, checkpoint: Checkpoint, name: str) -> None:
    """Copy the checkpoint's tensors into the model.

    Args:
        model: an instance of the class that it was trained with.
        checkpoint: read by `read_checkpoint`.
        name: what messages call the class.

    Raises:
        CheckpointError: names or shapes do not fit; the model is as it was.
    """
    wanted = model.state_dict()
    tensors, _ = fit_names(checkpoint.tensors, checkpoint.original_names, wanted)
    state: dict[str, Any] = {**tensors, **_extra_state(checkpoint, wanted)}
    missing = [key for key in _missing(model, wanted, state)]
    unexpected = [key for key in state if key not in wanted]
    problems = _problems(missing, unexpected, _misshaped(wanted, state))
    if problems:
        raise CheckpointError(
            f'checkpoint "{checkpoint.path.name}" does not fit {name}: {"; ".join(problems)}. '
            f"{_hint(checkpoint, unexpected, missing)}"
            "Give the class and --model-args that it was trained with"
        )
    try:
        model.load_state_dict(state, strict=False)
    # A module may check its own state (load_state_dict hooks), in any way.
    except Exception as error:
        raise CheckpointError(
            f'checkpoint "{checkpoint.path.name}" does not fit {name}: {cause(error)}; '
            "give the class and --model-args that it was trained with"
        ) from error


def _extra_state(checkpoint: Checkpoint, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return what modules keep beside tensors, under the names of the class."""
    found = dict(checkpoint.extra_state)
    for prefix in checkpoint.prefixes:
        found = {key.removeprefix(prefix): value for key, value in found.items()}
    return found


def _missing(model: nn.Module, wanted: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """List the names without a tensor, but not those that share one which is there."""
    given = {place_of(wanted[key]) for key in state if isinstance(wanted.get(key), Tensor)}
    return [
        key
        for key, value in wanted.items()
        if key not in state and not (isinstance(value, Tensor) and place_of(value) in given)
    ]


def _misshaped(wanted: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} (checkpoint {list(state[key].shape)}, model {list(value.shape)})"
        for key, value in wanted.items()
        if isinstance(state.get(key), Tensor)
        and isinstance(value, Tensor)
        and not is_lazy(value)  # takes its shape from the checkpoint
        and state[key].shape != value.shape
    ]


def _problems(missing: list[str], unexpected: list[str], misshaped: list[str]) -> list[str]:
    problems = []
    if missing:
        problems.append(f"missing {_shown(missing)}")
    if unexpected:
        problems.append(f"unexpected {_shown(_with_nearest(unexpected, missing))}")
    if misshaped:
        problems.append(f"mis-shaped {_shown(misshaped)}")
    return problems


def _with_nearest(names: list[str], missing: list[str]) -> list[str]:
    """Put behind a name the missing one that is most like it."""
    if len(missing) > _NEAREST_SHOWN:
        return names
    found = []
    for name in names[:_KEYS_SHOWN]:
        near = nearest(name, missing)
        found.append(f"{name} (nearest missing: {near})" if near else name)
    return found + names[_KEYS_SHOWN:]


def _hint(checkpoint: Checkpoint, unexpected: list[str], missing: list[str]) -> str:
    """Point at a prefix, or at other weights in the file, when that may be the reason."""
    prefixes = {key.partition(".")[0] + "." for key in unexpected}
    if len(prefixes) == 1 and missing:
        (prefix,) = prefixes
        if {key.removeprefix(prefix) for key in unexpected} == set(missing):
            return f'Every name starts with "{prefix}": give the class whose attribute that is. '
    if checkpoint.alternatives:
        others = ", ".join(checkpoint.alternatives)
        chosen = checkpoint.weights_key or "the file itself"
        return f"The weights are those of {chosen}; --weights-key can choose {others}. "
    return ""


def _shown(keys: list[str]) -> str:
    rest = len(keys) - _KEYS_SHOWN
    return ", ".join(keys[:_KEYS_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
