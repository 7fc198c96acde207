"""Floating-point operations of a call: torch's own formulas, and what they leave out.

A multiplication and an addition count as two. Only matrix products, convolutions, attention and
recurrent layers count; element-wise operators do not, as everywhere in the literature.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten

_Shape = Sequence[int]

# Arithmetic that no formula here covers: a count without it would be wrong, not low.
_WITHOUT_FORMULA = (
    *("_transformer_encoder_layer_fwd", "_native_multi_head_attention", "_cudnn_rnn"),
    *("_fft_r2c", "_fft_c2c", "_fft_c2r", "linalg_lu", "linalg_qr", "_linalg_svd", "cdist"),
    *("_embedding_bag_dense_backward", "_cdist_forward", "quantize_per_tensor"),
)


@dataclass(frozen=True)
class Flops:
    """The count of one call; None where an operator without a formula was met."""

    total: int | None
    unknown: tuple[str, ...] = ()
    """The operators without a formula."""


def count_flops(call: Callable[[], object]) -> Flops:
    """Count the operations of one call, which is made."""
    seen = _Seen()
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    with torch.no_grad(), counter, seen:
        call()
    unknown = tuple(sorted(seen.names & set(_WITHOUT_FORMULA)))
    return Flops(None if unknown else counter.get_total_flops(), unknown)


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the signature is torch's
        self.names.add(str(func.name()).partition("::")[2].partition(".")[0])
        return func(*args, **(kwargs or {}))


def _recurrent(steps: _Shape, inner: _Shape, outer: _Shape, *_: object, **__: object) -> int:
    """Count one layer in one direction: two products per step, the gates stacked in the weights.

    Args:
        steps: (length, N, inputs).
        inner: (gates * hidden, inputs).
        outer: (gates * hidden, hidden).
    """
    return 2 * steps[0] * steps[1] * (math.prod(inner) + math.prod(outer))


def _attention(query: _Shape, key: _Shape, value: _Shape, *_: object, **__: object) -> int:
    """Count two products of (N, heads, length, width): with the keys and with the values."""
    *batch, length, width = query
    return 2 * math.prod(batch) * length * key[-2] * (width + value[-1])


# torch gives a formula the shapes of the tensors.
_FORMULAS: dict[Any, Callable[..., int]] = {
    aten.mkldnn_rnn_layer: _recurrent,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
}
