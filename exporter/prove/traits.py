"""What holds of a model's outputs whatever the input: rows that do not mix, and probabilities."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from modelyard.archiver.signature import Batching, Dim, Signature
from modelyard.base.scale import Scale
from modelyard.exporter.errors import ModelError
from modelyard.exporter.inputs.samples import why_no_rows
from modelyard.handlers.proof.agree import compare
from modelyard.handlers.proof.bounds import Bounds

Tensors = tuple[Tensor, ...]

ROWS = 3
"""Rows that share a batch when they are compared."""
# As the tolerance of float32: a kernel may add in another order for another batch size.
_ROW_TOLERANCE = 1e-4
STRONG = 1e4
"""The factor by which an input's floats grow: what no sigmoid bounds leaves 0 to 1 then."""


def find_probabilities(
    bounds: Mapping[str, Bounds],
    signature: Signature,
    run: Callable[[Tensors], Sequence[Tensor]],
    example: Tensors,
) -> dict[str, bool]:
    """Return for each output whether its numbers are probabilities; not those that nobody knows.

    Rows that add up to 1 are such. So are numbers between 0 and 1, where they stay there however
    large the floats become that the model reads.

    Args:
        bounds: those of the outputs, after all cases.
        signature: the inputs.
        run: the model.
        example: inputs of one case.
    """
    known = {name: each for name, each in bounds.items() if each.is_enough}
    found = {name: each.are_shares for name, each in known.items()}
    unsettled = [name for name, each in known.items() if each.are_chances and not each.are_shares]
    strong = tuple(
        tensor * STRONG if spec.is_float and spec.values is None else tensor
        for spec, tensor in zip(signature.inputs, example, strict=True)
    )
    given: dict[str, Tensor] = {}
    if unsettled and any(a is not b for a, b in zip(strong, example, strict=True)):
        with suppress(ModelError):
            given = dict(zip(bounds, run(strong), strict=True))
    for name in unsettled:
        if name in given:
            known[name].see(given[name])
            found[name] = known[name].are_chances
        else:
            del found[name]
    return found


def find_batching(
    run: Callable[[Tensors], Tensors],
    signature: Signature,
    batch_norm: Sequence[str],
    batches: tuple[Tensors, Tensors] | None,
    scales: Sequence[Scale],
    *,
    are_chosen: bool = False,
) -> Batching:
    """Find whether requests may share a batch: compare a row beside different others, and alone.

    Args:
        run: the checkpoint's model.
        signature: inputs and outputs.
        batch_norm: places that normalise by the batch, which explain why rows mix.
        batches: two of one size, in which no row is the same; None where samples have none.
        scales: by which each output is measured.
        are_chosen: whether the outputs are those that were asked for: else others may do.
    """
    batch = signature.batch
    if not isinstance(batch, Dim):
        name = signature.inputs[0].name
        return Batching(False, f'the first dim of input "{name}" is fixed to {batch}')
    if reasons := [reason for spec in signature.inputs if (reason := why_no_rows(spec, batch))]:
        return Batching(False, reasons[0])
    mixed = _shapes_apart(signature, batch)
    if not mixed and batches is None:
        return Batching(
            False, "no two rows of the samples could change places, so whether rows mix is unknown"
        )
    if not mixed and batches is not None:
        why = f"; batch-norm uses the statistics of its batch{batch_norm[0]}" if batch_norm else ""
        for name, apart, how in _row_differences(run, signature, batch, batches, scales):
            if not apart <= _ROW_TOLERANCE:
                amount = f"by {apart:.1e}" if math.isfinite(apart) else "its shape or becomes NaN"
                mixed.setdefault(name, f'a row of output "{name}" changes {amount} {how}{why}')
    if mixed:
        others = [spec.name for spec in signature.outputs if spec.name not in mixed]
        keep = "" if are_chosen else "".join(f" --output {name}" for name in others)
        return Batching(False, next(iter(mixed.values())) + (f"; try{keep}" if keep else ""))
    return Batching(True, "a row gives the same alone and beside any other rows")


def _shapes_apart(signature: Signature, batch: Dim) -> dict[str, str]:
    """Return which outputs do not hold one row per request, and why."""
    reasons = {}
    for spec in signature.outputs:
        if not spec.shape or spec.shape[0] != batch:
            reasons[spec.name] = (
                f'output "{spec.name}" has no dim "{batch.name}" in front, so no row per request'
            )
        elif batch in spec.shape[1:]:
            reasons[spec.name] = f'output "{spec.name}" has rows as long as the batch'
    return reasons


def _row_differences(
    run: Callable[[Tensors], Tensors],
    signature: Signature,
    batch: Dim,
    batches: tuple[Tensors, Tensors],
    scales: Sequence[Scale],
) -> list[tuple[str, float, str]]:
    """Measure per output how much one row changes: (output, scaled difference, when)."""
    rows, others = batches
    together = run(rows)
    last = len(rows[0]) - 1
    trials = [
        (row, tuple(_keep_row(*pair, row) for pair in zip(rows, others, strict=True)))
        for row in (0, last)
    ]
    when = ["with the other rows of its batch"] * 2
    if batch.min == 1:
        trials.append((0, tuple(tensor[:1] for tensor in rows)))
        when.append("between alone and in a batch")
    return [
        (
            spec.name,
            float(compare(one[row : row + 1], two[row : row + 1], scale=scale)["scaled"]),
            how,
        )
        for (row, inputs), how in zip(trials, when, strict=True)
        for spec, one, two, scale in zip(
            signature.outputs, together, run(inputs), scales, strict=True
        )
    ]


def _keep_row(tensor: Tensor, others: Tensor, row: int) -> Tensor:
    """Keep one row of `tensor` and take all others from `others`."""
    places = torch.arange(len(tensor), device=tensor.device) == row
    return torch.where(places.reshape(-1, *[1] * (tensor.ndim - 1)), tensor, others)
