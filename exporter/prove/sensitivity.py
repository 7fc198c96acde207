"""How far a model's answer moves when its sums are rounded otherwise.

Every library adds in an order of its own, so that sums end a few units in the last place apart.
A model whose answer that changes has no one answer: a normalisation of what is constant divides
rounding errors by nothing. Here each result of a sum (matrix product, convolution, mean, norm,
softmax …) is moved by up to two units in the last place, in a direction drawn from a fixed seed:
Monte Carlo arithmetic. What is zero stays zero, and other operators are as they were.

Source: D. S. Parker, Monte Carlo Arithmetic, UCLA CSD-970002, 1997.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modelyard.exporter.prove.watch import EachOperator
from modelyard.handlers.proof.agree import compare

RUNS = 4
_LAST_PLACES = 2.0
# Parts of the names of torch's operators that add up many terms, or do so inside.
_SUMS = (
    *("mm", "addmv", "mv", "dot", "linear", "einsum", "convolution", "mkldnn", "attention"),
    *("sum", "mean", "var", "std", "norm", "softmax", "pool", "upsample", "lstm", "gru", "rnn"),
)


def measure_sensitivity(
    run: Callable[[tuple[Tensor, ...]], Sequence[Tensor]],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> list[float]:
    """Return per output how far it moved at most, scaled as differences are.

    Args:
        run: the model.
        inputs: of one case.
        outputs: what it gives for them undisturbed.
    """
    moved = [0.0] * len(outputs)
    for seed in range(RUNS):
        generator = torch.Generator().manual_seed(seed)
        with _rounded(generator):
            disturbed = run(tuple(_disturb(tensor, generator) for tensor in inputs))
        apart = (
            compare(one, other)["scaled"] for one, other in zip(outputs, disturbed, strict=True)
        )
        moved = [max(one, two) for one, two in zip(moved, apart, strict=True)]
    return moved


def _rounded(generator: torch.Generator) -> EachOperator:
    """Round what sums give in a direction of its own."""

    def run(func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        result = func(*args, **given)
        name = func.name().removeprefix("aten::").partition(".")[0]
        # An operator that writes into its input gives that, whose other views must follow.
        if name.endswith("_") or not any(part in name for part in _SUMS):
            return result
        if isinstance(result, tuple):
            return tuple(_disturb(value, generator) for value in result)
        return _disturb(result, generator)

    return EachOperator(run)


def _disturb(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float64):
        return value
    moves = torch.rand(value.shape, generator=generator, dtype=value.dtype).to(value.device)
    return value * (1 + (2 * moves - 1) * _LAST_PLACES * torch.finfo(value.dtype).eps)
