"""What holds of a model's outputs whatever the input: rows that do not mix, and probabilities."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
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
)
from modelyard.handlers.proof.agree import Rule, allowance, compare
from modelyard.handlers.proof.bounds import Bounds

Tensors = tuple[Tensor, ...]

# Rows of the smaller batch that is tried: neither 1 nor the tile of any kernel.
_SMALL = 3
# How others are made: the words for it, their factors in turn, and whether the batch is small.
_DRAWS = (
    ("beside other rows", (1.0,), False),
    ("beside rows 1,000 times as large", (1000.0,), False),
    ("beside itself and others", (1.0,), True),
    ("beside rows 10 times as large", (10.0,), False),
    ("beside rows 100 times as large", (100.0,), False),
    ("beside other rows", (1.0,), False),
)
_FEW_DRAWS = (
    ("beside rows up to 1,000 times as large", (1.0, 1000.0, 10.0, 100.0), False),
    ("beside itself and others", (1.0,), True),
)
# Of all draws together, for each artifact; a core takes about a second.
_BUDGET_GFLOP = 20.0
_MOST_GFLOP = 100.0
"""Of all batches in which bits are compared, where that is more."""
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
        mixed, apart = _shapes_apart(signature, batch), 0.0
        if not mixed and self.batches is None:
            return Batching(False, _TOO_FEW)
        if not mixed and self.batches is not None:
            mixed, apart = self._mixed(run, batch, self.batches, max(_ROW_TOLERANCE, tolerance))
        if mixed or self.batches is None:
            others = [spec.name for spec in signature.outputs if spec.name not in mixed]
            keep = "" if self.are_chosen else "".join(f" --output {name}" for name in others)
            return Batching(False, next(iter(mixed.values())) + (f"; try{keep}" if keep else ""))
        sizes = self._sizes(find_alike or partial(find_sizes, run), batch, self.batches)
        return Batching(True, "a row gives the same alone and beside any other rows", sizes, apart)

    def _sizes(
        self, find: Callable[..., Sequence[int]], batch: Dim, batches: Callable[[int, int], Tensors]
    ) -> tuple[int, ...]:
        """Return the sizes at which a row keeps its bits, of as many as arithmetic allows."""
        count, strangers, sizes = OWN_ROWS, STRANGERS, candidates(batch, batch.max)
        if self.gflop * (OWN_ROWS + len(STRANGERS)) * 2 * sum(sizes) > _BUDGET_GFLOP:
            count, strangers = 2, STRANGERS[-1:]
            sizes = [size for size in sizes if size & (size - 1) == 0]
        rows = [size * (count + 2) + max(size, 4) * len(strangers) for size in sizes]
        most = sum(self.gflop * each <= _MOST_GFLOP for each in accumulate(rows))
        own = tuple(tensor[:count] for tensor in batches(max(count, batch.min), 0))
        others = batches(batch.max, 1)
        beside = [enlarged(self.signature.inputs, others, each) for each in strangers]
        with suppress(ExportError):
            return tuple(find(own, beside, sizes[:most]))
        return ()

    def _mixed(
        self,
        run: Callable[[Tensors], Tensors],
        batch: Dim,
        batches: Callable[[int, int], Tensors],
        tolerance: float,
    ) -> tuple[dict[str, str], float]:
        """Return the outputs whose rows change, and why; else how far others move a row."""
        why = (
            f"; batch-norm uses the statistics of its batch{self.batch_norm[0]}"
            if self.batch_norm
            else ""
        )
        largest, small = batch.max, batch.at_least(_SMALL)
        is_cheap = self.gflop * largest * len(_DRAWS) <= _BUDGET_GFLOP
        draws = _DRAWS if is_cheap else _FEW_DRAWS
        count = max(1, min(4 if is_cheap else 2, largest // 2))
        mine = tuple(tensor[:count] for tensor in batches(largest, 0))
        expected: list[Tensors] = []
        if batch.min == 1:
            expected = [run(tuple(t[row : row + 1] for t in mine)) for row in range(count)]
        mixed: dict[str, str] = {}
        furthest = 0.0
        for number, (how, factors, is_small) in enumerate(draws):
            size = min(largest, small) if is_small else largest
            places = _places(size, max(1, min(count, size // 2)), number)
            if is_small:
                others = tuple(own[torch.arange(size) % min(count, 2)] for own in mine)
            else:
                others = enlarged(self.signature.inputs, batches(size, number + 1), factors)
            inputs = tuple(
                other.index_copy(0, torch.tensor(places), own[: len(places)])
                for other, own in zip(others, mine, strict=True)
            )
            try:
                outputs = run(inputs)
            # A worker runs each request of a batch alone where they fail together.
            except ExportError:
                continue
            found = [tuple(out[place : place + 1] for out in outputs) for place in places]
            expected = expected or found
            for wanted, got in zip(expected, found, strict=False):
                for place, spec in enumerate(self.signature.outputs):
                    differ = compare(wanted[place], got[place], scale=self.scales[place])
                    apart = float(differ["scaled"])
                    if apart <= tolerance or apart <= self._allowed(place, tolerance):
                        furthest = max(furthest, apart)
                        continue
                    amount = f"by {apart:.1e}" if apart < math.inf else "its shape or becomes NaN"
                    mixed.setdefault(
                        spec.name,
                        f'a row of output "{spec.name}" changes {amount} in a batch of {size}, '
                        f"{how}{why}",
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


def _places(size: int, count: int, number: int) -> list[int]:
    """Return where rows go in a batch: spread from its first to its last place, or anywhere."""
    if number == 0:
        return torch.linspace(0, size - 1, count).long().tolist() if count > 1 else [size - 1]
    generator = torch.Generator().manual_seed(number)
    return torch.randperm(size, generator=generator)[:count].tolist()
