"""The attributes of a pickled `nn.Module` → its state dict, without its class."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.pickles import Global, UnresolvedCall, is_module
from modelyard.exporter.ingest.plain import stock_class

_MAX_DEPTH = 200
_MAX_MODULES = 100_000
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def state_dict(tree: UnresolvedCall) -> dict[str, Tensor]:
    """Return what `module.state_dict()` would: names, order and tensors; no hook of it runs."""
    state: dict[str, Tensor] = {}
    for prefix, module in _walk(tree):
        attributes = module.attributes
        left_out = attributes.get("_non_persistent_buffers_set")
        left_out = left_out if isinstance(left_out, set | list) else ()
        for group, skipped in (("_parameters", ()), ("_buffers", left_out)):
            for name, tensor in _items(attributes.get(group)):
                if isinstance(tensor, Tensor) and name not in skipped:
                    state[prefix + name] = tensor.detach()
    return state


def _walk(tree: UnresolvedCall) -> Iterator[tuple[str, UnresolvedCall]]:
    """Yield each module with its prefix, parents first.

    Raises:
        CheckpointError: a module that holds itself, or more of them than any network has.
    """
    waiting: list[tuple[str, UnresolvedCall, int]] = [("", tree, 0)]
    for _ in range(_MAX_MODULES):
        if not waiting:
            return
        prefix, module, depth = waiting.pop()
        yield prefix, module
        children = _items(module.attributes.get("_modules"))
        if depth < _MAX_DEPTH:
            waiting += [
                (f"{prefix}{name}.", child, depth + 1)
                for name, child in reversed(children)
                if is_module(child)
            ]
    raise CheckpointError(
        f"it holds a tree of more than {_MAX_MODULES} modules, or one inside of itself; save "
        "model.state_dict() alone"
    )


def _items(value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        return []
    return [(key, item) for key, item in value.items() if isinstance(key, str)]


def build_stock(tree: UnresolvedCall) -> nn.Module | None:
    """Build a module whose classes are all torch.nn's own; None when one is not, or has code.

    Each is made empty and given its plain attributes; hooks and functions are none.
    """
    try:
        return _build(tree, 0)
    # torch's own __setstate__ meets what a file of another version, or a hostile one, left out.
    except Exception:
        return None


class _NotStock(ValueError):
    """A class, a function or a value that is not torch.nn's own."""


def _build(tree: Any, depth: int) -> nn.Module:
    if not isinstance(tree, UnresolvedCall):
        raise _NotStock(type(tree).__name__)
    found = stock_class(tree.function) if isinstance(tree.function, Global) else None
    if found is None or tree.args or depth > _MAX_DEPTH:
        raise _NotStock(tree.dotted)
    module = found.__new__(found)
    nn.Module.__init__(module)
    state = {name: _attribute(name, value, depth) for name, value in tree.attributes.items()}
    module.__setstate__(state)  # type: ignore[no-untyped-call]
    return module


def _attribute(name: str, value: Any, depth: int) -> Any:
    if name == "_parameters":
        return {key: _parameter(item) for key, item in _items(value)}
    if name == "_buffers":
        return {key: item if isinstance(item, Tensor) else None for key, item in _items(value)}
    if name == "_modules":
        parts = dict(_items(value))
        return {
            key: None if part is None else _build(part, depth + 1) for key, part in parts.items()
        }
    if name.endswith(_HOOKS):
        if value:
            raise _NotStock(name)
        return {}
    return _plain(value)


def _parameter(value: Any) -> nn.Parameter | None:
    if not isinstance(value, Tensor):
        return None
    return nn.Parameter(value, requires_grad=value.is_floating_point())


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple | set):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, Global) and (function := _FUNCTIONS.get(value.dotted)) is not None:
        return function
    if isinstance(value, bool | int | float | str | torch.dtype | torch.Size | None):
        return value
    raise _NotStock(type(value).__name__)


# What torch.nn's transformer layers keep as an attribute.
_FUNCTIONS: Mapping[str, Any] = {
    "torch.nn.functional.relu": nn.functional.relu,
    "torch.nn.functional.gelu": nn.functional.gelu,
    "torch._C._nn.gelu": nn.functional.gelu,
}
