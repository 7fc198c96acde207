"""Whether a tensor holds what its signature states."""

from collections.abc import Mapping

import torch
from torch import Tensor

from modelyard.archiver.signature import TensorSpec


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
