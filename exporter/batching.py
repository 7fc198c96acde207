"""Whether requests may share a batch: each row's output must depend on that row alone."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from modelyard.archiver.signature import Batching, Dim, Signature, TensorSpec
from modelyard.exporter.watch import Run
from modelyard.handlers.agree import compare
from modelyard.handlers.probes import Probe, example_sizes, make_inputs

# As the tolerance of float32: a kernel may add in another order for another batch size.
_TOLERANCE = 1e-4
_ROWS = 3


def find_batching(
    run: Run, signature: Signature, below: Mapping[str, int], batch_norm: Sequence[str]
) -> Batching:
    """Compare a row inside batches of different neighbours, and alone.

    Args:
        run: the checkpoint's model.
        signature: inputs and outputs.
        below: bounds of integer inputs.
        batch_norm: places that normalise by the batch, which explain why rows mix.
    """
    batch = signature.batch
    if not isinstance(batch, Dim):
        name = signature.inputs[0].name
        return Batching(False, f'the first dim of input "{name}" is fixed to {batch}')
    shape_reason = _shapes_apart(signature, batch)
    if shape_reason:
        return Batching(False, shape_reason)
    for name, apart, how in _row_differences(run, signature, batch, below):
        if not apart <= _TOLERANCE:
            why = (
                f"; batch-norm uses the statistics of its batch{batch_norm[0]}"
                if batch_norm
                else ""
            )
            amount = f"by {apart:.1e}" if math.isfinite(apart) else "its shape or becomes NaN"
            return Batching(False, f'a row of output "{name}" changes {amount} {how}{why}')
    return Batching(True, "a row gives the same alone and beside any other rows")


def _shapes_apart(signature: Signature, batch: Dim) -> str:
    """Return which input or output does not hold one row per request; empty when all do."""
    lacks = f'has no dim "{batch.name}" in front, so'
    for spec in signature.inputs:
        if spec.shape[0] != batch:
            return f'input "{spec.name}" {lacks} rows cannot be stacked'
    for spec in signature.outputs:
        if not spec.shape or spec.shape[0] != batch:
            return f'output "{spec.name}" {lacks} no row per request'
        if batch in spec.shape[1:]:
            return f'output "{spec.name}" has rows as long as the batch'
    return ""


def _row_differences(
    run: Run, signature: Signature, batch: Dim, below: Mapping[str, int]
) -> list[tuple[str, float, str]]:
    """Measure per output how much one row changes: (output, scaled difference, when)."""
    size = min(batch.max, max(batch.min, _ROWS))
    probe = Probe("random", {**example_sizes(signature), batch.name: size})
    rows = make_inputs(signature, probe, below, seed=1)
    others = make_inputs(signature, probe, below, seed=2)
    alone = run(rows)
    found: list[tuple[str, float, str]] = []
    for row in (0, size - 1):
        mixed = run(tuple(_replace_others(a, b, row) for a, b in zip(rows, others, strict=True)))
        found += _measure(signature.outputs, alone, mixed, row, "with the other rows of its batch")
    if batch.min == 1:
        single = run(tuple(tensor[:1] for tensor in rows))
        found += _measure(signature.outputs, alone, single, 0, "between alone and in a batch")
    return found


def _measure(
    specs: Sequence[TensorSpec],
    wanted: Sequence[Tensor],
    got: Sequence[Tensor],
    row: int,
    how: str,
) -> list[tuple[str, float, str]]:
    return [
        (spec.name, float(compare(one[row : row + 1], two[row : row + 1])["scaled"]), how)
        for spec, one, two in zip(specs, wanted, got, strict=True)
    ]


def _replace_others(tensor: Tensor, others: Tensor, row: int) -> Tensor:
    """Keep one row of `tensor` and take all others from `others`."""
    mixed = others.clone()
    mixed[row] = tensor[row]
    return mixed
