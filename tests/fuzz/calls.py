"""A call of an operator, as JSON keeps it: constants, and of tensors their type and sizes."""

import math
from typing import Any

import torch
from torch import Tensor

KINDS = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}


def as_call(node: torch.fx.Node) -> list[Any]:
    """Return the arguments of a traced call: [positional, by name]."""
    return [_state(list(node.args)), {name: _state(value) for name, value in node.kwargs.items()}]


def _state(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        value = value.meta["val"]
    if isinstance(value, Tensor):
        sizes = [_number(size) for size in value.shape]
        stated = {"tensor": str(value.dtype).removeprefix("torch."), "size": sizes}
        strides = [_number(step) for step in value.stride()]
        plain = torch.empty(sizes, device="meta").stride()
        return stated if strides == list(plain) else stated | {"stride": strides}
    if isinstance(value, list | tuple):
        return [_state(each) for each in value]
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return _number(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, torch.device):
        return {"device": "cpu"}
    return {KINDS[type(value)]: str(value).removeprefix("torch.")}


def _number(size: Any) -> Any:
    """Return a size that a trace was made with."""
    return size.node.hint if hasattr(size, "node") else size
