"""Whether a tensor holds what its signature states."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from modelyard.archiver.signature import Dim, TensorSpec
from modelyard.handlers.errors import BadInput, HandlerError


def sizes_of_dims(
    specs: Iterable[TensorSpec],
    shapes: Iterable[Sequence[int]],
    first: int = 0,
    error: type[HandlerError] = BadInput,
    expected: str = "one size",
) -> dict[str, int]:
    """Return the size that each dim of a name has.

    Args:
        specs: specs of the inputs.
        shapes: shape of each, without the first dims of its spec.
        first: how many those are.
        error: error that is raised where one dim has two sizes.
        expected: what it says of that.
    """
    sizes: dict[str, int] = {}
    for spec, shape in zip(specs, shapes, strict=True):
        for dim, size in zip(spec.shape[first:], shape, strict=False):
            if isinstance(dim, Dim) and sizes.setdefault(dim.name, size) != size:
                raise error(
                    f'input "{spec.name}" has {dim.name}={size}, another {sizes[dim.name]}; '
                    f"expected {expected}"
                )
    return sizes


def check_stated(
    specs: Sequence[TensorSpec], inputs: Sequence[Tensor], first: int = 0, made_by: str = ""
) -> None:
    """Refuse a request whose inputs hold other values than their signature states.

    Args:
        specs: specs of the inputs.
        inputs: one of each, without the first dims of its spec.
        first: how many those are.
        made_by: what made them of a request that holds something else.

    Raises:
        BadInput: names the value, and what is expected; or a dim that has two sizes.
    """
    sizes = sizes_of_dims(specs, [each.shape for each in inputs], first)
    for spec, tensor in zip(specs, inputs, strict=True):
        if spec.values and (problem := refused_values(spec, tensor, sizes)):
            made = f", as {made_by} makes them" if made_by else ""
            raise BadInput(f'input "{spec.name}" {problem}{made}')
        if spec.limits and beyond(spec, tensor):
            raise BadInput(
                f'input "{spec.name}" holds what this artifact is known to answer otherwise than '
                f"its checkpoint: {spec.limits}; send other values, or export a format that agrees"
            )


def beyond(spec: TensorSpec, tensor: Tensor) -> bool:
    """Return whether a tensor holds values for which its spec says that the artifact differs."""
    limits, wrong = spec.limits, []
    if limits is None:
        return False
    if limits.nan:
        wrong.append(tensor.isnan())
    if limits.low is not None:
        wrong.append(tensor < limits.low)
    if limits.high is not None:
        wrong.append(tensor > limits.high)
    if tensor.ndim and spec.open_value is not None:
        is_open = tensor == spec.open_value
        if limits.closed:
            wrong.append(~is_open.any(dim=-1))
        if limits.padded:
            wrong.append(~is_open[..., :1])
    return any(bool(each.any()) for each in wrong)


def refused_values(spec: TensorSpec, tensor: Tensor, sizes: Mapping[str, int]) -> str | None:
    """Return what a tensor holds beside its stated values, as a phrase; None where it holds none.

    Args:
        spec: spec of the input.
        tensor: tensor of its dtype.
        sizes: sizes of the inputs' dims; a range whose end is the size of another is not checked.
    """
    stated = spec.values
    if stated is None or not {stated.low.dim, stated.high.dim} <= {"", *sizes}:
        return None
    low, high = stated.ends(sizes)
    if stated.among:
        wrong = ~torch.isin(tensor, torch.tensor(stated.among, dtype=tensor.dtype))
    else:
        wrong = ~((tensor >= low) & (tensor <= high))
    if bool(wrong.any()):
        here = f", which are {low} to {high} here" if stated.low.dim or stated.high.dim else ""
        found = tensor[wrong][0].item()
        seen = f"{found:.6g}" if isinstance(found, float) else found
        return f"holds {seen}; expected values {stated}{here}"
    if stated.order and tensor.ndim:
        before, after = tensor[..., :-1], tensor[..., 1:]
        if bool((before > after if stated.order == "rising" else before < after).any()):
            return f"is not {stated.order} along its last dim; expected values {stated}"
    return None
