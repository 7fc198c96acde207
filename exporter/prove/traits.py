"""What holds of a model's outputs whatever the input: rows that do not mix, and probabilities."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain

from torch import Tensor

from modelyard.archiver.signature import Batching, Dim, Signature
from modelyard.base.scale import Scale
from modelyard.exporter.errors import ExportError, ModelError
from modelyard.exporter.inputs.samples import why_no_rows
from modelyard.handlers.models.invariant import (
    OWN_ROWS,
    STRANGERS,
    candidates,
    enlarged,
    find_sizes,
    mixes,
)
from modelyard.handlers.proof.agree import Rule, allowance, compare
from modelyard.handlers.proof.bounds import Bounds

Tensors = tuple[Tensor, ...]

# Rows of the smaller batch that is tried: neither 1 nor the tile of any kernel.
_SMALL = 3
_BUDGET_GFLOP = 50.0
"""Arithmetic of all batches of an artifact, each size with many rows; some seconds."""
_MOST_GFLOP = 100.0
"""Arithmetic of those in which bits are compared, where few are tried."""
_TOO_FEW = "no two rows of the samples could change places, so whether rows mix is unknown"
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


@dataclass(frozen=True)
class Rows:
    """What is needed to find out whether the rows of a batch keep apart, in any artifact."""

    signature: Signature
    """Inputs and outputs."""
    batch_norm: Sequence[str]
    """Places that normalise by the batch, which explain why rows mix."""
    batches: Callable[[int, int], Tensors] | None
    """Size and number → a batch of ordinary rows; None where the samples have too few."""
    scales: Sequence[Scale]
    """Scale of each output."""
    gflop: float
    """Arithmetic of one row."""
    sensitivity: Callable[[], list[float]]
    """What each output of an ordinary case moves when the model's sums are rounded otherwise."""
    are_chosen: bool
    """Whether the outputs are those that were asked for: else others may do."""

    def find(
        self,
        run: Callable[[Tensors], Tensors],
        tolerance: float = 0.0,
        find_alike: Callable[..., Sequence[int]] | None = None,
    ) -> Batching:
        """Find whether requests may share a batch: compare rows alone, and beside all sorts.

        Args:
            run: what is served; raises an `ExportError` where it fails.
            tolerance: largest scaled difference that its precision explains, if that is more than
                float32's.
            find_alike: `find_sizes` behind its `run`, where that is elsewhere.
        """
        signature, batch = self.signature, self.signature.batch
        if not isinstance(batch, Dim):
            name = signature.inputs[0].name
            return Batching(False, f'the first dim of input "{name}" is fixed to {batch}')
        reasons = [reason for spec in signature.inputs if (reason := why_no_rows(spec, batch))]
        if reasons:
            return Batching(False, reasons[0])
        if mixed := _shapes_apart(signature, batch):
            return self._not_batchable(mixed)
        if self.batches is None:
            return Batching(False, _TOO_FEW)
        tried = candidates(batch, batch.max)
        is_cheap = self.gflop * 25 * sum(tried) <= _BUDGET_GFLOP
        count, strangers = (OWN_ROWS, STRANGERS) if is_cheap else (2, STRANGERS[-1:])
        own = tuple(tensor[:count] for tensor in self.batches(batch.max, 0))
        rows = self.batches(batch.max, 1)
        others = [enlarged(signature.inputs, rows, factors) for factors in strangers]
        largest = [batch.max, *([batch.at_least(_SMALL)] if is_cheap else [])]
        allowed = max(_ROW_TOLERANCE, tolerance)
        mixed, apart = self._mixed(run, batch.min, own, others, largest, allowed)
        if mixed:
            return self._not_batchable(mixed)
        if not is_cheap:
            tried = [size for size in tried if size & (size - 1) == 0]
            work = accumulate(self.gflop * (3 * size + 4) for size in tried)
            tried = tried[: sum(each <= _MOST_GFLOP for each in work)]
        sizes: Sequence[int] = ()
        with suppress(ExportError):
            sizes = (find_alike or partial(find_sizes, run))(own, others, tried)
        reason = "a row gives the same alone and beside any other rows"
        return Batching(True, reason, tuple(sizes), apart)

    def _not_batchable(self, mixed: Mapping[str, str]) -> Batching:
        left = [spec.name for spec in self.signature.outputs if spec.name not in mixed]
        keep = "" if self.are_chosen else "".join(f" --output {name}" for name in left)
        return Batching(False, next(iter(mixed.values())) + (f"; try{keep}" if keep else ""))

    def _mixed(
        self,
        run: Callable[[Tensors], Tensors],
        least: int,
        own: Tensors,
        others: Sequence[Tensors],
        sizes: Sequence[int],
        tolerance: float,
    ) -> tuple[dict[str, str], float]:
        """Return the outputs whose rows change, and why; else how far others move a row."""
        why = (
            f"; batch-norm uses the statistics of its batch{self.batch_norm[0]}"
            if self.batch_norm
            else ""
        )
        expected: dict[int, Tensors] = {}
        if least == 1:
            alone = (tuple(tensor[row : row + 1] for tensor in own) for row in range(len(own[0])))
            expected = dict(enumerate(map(run, alone)))
        mixed: dict[str, str] = {}
        furthest = 0.0
        for inputs, rows in chain.from_iterable(mixes(own, others, size) for size in sizes):
            try:
                outputs = run(inputs)
            # A worker runs each request of a batch alone where they fail together.
            except ExportError:
                continue
            for place, row in (*rows[:: 1 + len(rows) // 16], rows[-1]):
                found = tuple(out[place : place + 1] for out in outputs)
                wanted = expected.setdefault(row, found)
                for at, spec in enumerate(self.signature.outputs):
                    differ = compare(wanted[at], found[at], scale=self.scales[at])
                    apart = float(differ["scaled"])
                    if apart <= tolerance or apart <= self._allowed(at, tolerance):
                        furthest = max(furthest, apart)
                        continue
                    amount = f"by {apart:.1e}" if apart < math.inf else "its shape or becomes NaN"
                    mixed.setdefault(
                        spec.name,
                        f'a row of output "{spec.name}" changes {amount} in a batch of '
                        f"{len(inputs[0])}, beside others{why}",
                    )
            if mixed:
                break
        return mixed, furthest

    def _allowed(self, place: int, tolerance: float) -> float:
        """Return what an output of the checkpoint's may move that no two libraries agree on."""
        return allowance(Rule(tolerance), "random", self.sensitivity()[place]) or 0.0


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
