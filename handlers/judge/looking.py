"""Operators whose arguments are compared with each other before they run.

torch's recurrent kernels take the sizes of some weights for those of all, its bags of embeddings
take offsets as they are, and its group norms read weights as if they were contiguous.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def checked(name: str) -> Callable[..., Any]:
    """Return the operator `name`.input behind a check of its arguments."""
    run, gates = getattr(torch.ops.aten, name).input, _GATES[name]

    def recurrent(
        x: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        states = list(hx) if name == "lstm" else [hx]
        _check(gates, x, states, params, has_biases, num_layers, bidirectional, batch_first)
        return run(
            x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )

    recurrent.__name__ = f"checked_{name}"
    return recurrent


def _check(
    gates: int,
    x: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> None:
    directions = 2 if bidirectional else 1
    hidden, out = states[-1].shape[-1], states[0].shape[-1]
    is_projected = len(states) == 2 and hidden != out
    each = (4 if has_biases else 2) + is_projected
    expected = [x.dim() == 3, num_layers > 0, len(params) == num_layers * directions * each]
    expected += [state.dim() == 3 for state in states]
    expected += [min(hidden, out) > 0, len(states) == (2 if gates == 4 else 1)]
    if all(expected):
        batch = x.shape[0 if batch_first else 1]
        layers = num_layers * directions
        expected += [tuple(s.shape[:2]) == (layers, batch) for s in states]
        rows = gates * hidden
        for layer in range(layers):
            width = x.shape[2] if layer < directions else out * directions
            shapes: list[tuple[int, ...]] = [(rows, width), (rows, out)]
            shapes += [(rows,), (rows,)] if has_biases else []
            shapes += [(out, hidden)] if is_projected else []
            given = params[layer * each : (layer + 1) * each]
            expected += [tuple(p.shape) == s for p, s in zip(given, shapes, strict=True)]
        expected += [tensor.dtype == x.dtype for tensor in (*params, *states)]
        expected += [tensor.device == x.device for tensor in (*params, *states)]
    if not all(expected):
        raise ValueError("weights, states and inputs of a recurrent layer do not go together")


def checked_embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Any:
    """Run aten.embedding_bag.padding_idx behind a check of its arguments."""
    fits = (
        (weight.dim(), indices.dim(), offsets.dim()) == (2, 1, 1)
        and (weight.dtype, indices.dtype) == (torch.float32, torch.int64)
        and indices.dtype == offsets.dtype
        and weight.device == indices.device == offsets.device
        and weight.is_contiguous()
        and weight.numel() > 0
        and mode in (0, 1)
        and not (scale_grad_by_freq or sparse or include_last_offset)
        and per_sample_weights is None
        and padding_idx is None
    )
    if fits and offsets.numel():
        ends = torch.cat([offsets, offsets.new_full((1,), indices.numel())])
        fits = bool((offsets[0] == 0) & (ends[1:] >= ends[:-1]).all())
    if fits and indices.numel():
        fits = bool((indices.min() >= 0) & (indices.max() < weight.shape[0]))
    if not fits:
        raise ValueError("table, indices and offsets of a bag of embeddings do not go together")
    return _BAG(weight, indices.contiguous(), offsets.contiguous(), False, mode, False, None)


def checked_group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Run aten.group_norm with weights that lie in memory as its kernel reads them."""
    own = [each if each is None else each.contiguous() for each in (weight, bias)]
    return torch.ops.aten.group_norm.default(x, num_groups, *own, eps, cudnn_enabled)


def checked_native_group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any
) -> Any:
    """Run aten.native_group_norm as `checked_group_norm`."""
    own = [each if each is None else each.contiguous() for each in (weight, bias)]
    return torch.ops.aten.native_group_norm.default(x.contiguous(), *own, *sizes)


_BAG = torch.ops.aten.embedding_bag.default
CHECKED: Mapping[Any, Callable[..., Any]] = {
    **{getattr(torch.ops.aten, name).input: checked(name) for name in _GATES},
    torch.ops.aten.embedding_bag.padding_idx: checked_embedding_bag,
    torch.ops.aten.group_norm.default: checked_group_norm,
    torch.ops.aten.native_group_norm.default: checked_native_group_norm,
}
