"""Which values of an explanation's inputs are one feature, and what the model gives without some.

A feature is a pixel of all channels, a window, a word of several tokens, the columns of a category.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from modelyard.handlers.explain.attribute.attribution import AttributionRequest, Tensors, chunks
from modelyard.handlers.explain.attribute.method import Groups, Shapes, group_of


@dataclass(frozen=True)
class Features:
    """The features of all inputs of one explanation, numbered through."""

    masks: Tensors
    """(*S) int64 per input: the feature that each value is of."""
    count: int

    @cached_property
    def sizes(self) -> Tensor:
        """How many values each has, (F,) float64."""
        return self.sums(tuple(torch.ones_like(each, dtype=torch.float64) for each in self.masks))

    def sums(self, values: Tensors) -> Tensor:
        """Add values (*S) up by feature: (F,) float64."""
        total = torch.zeros(self.count, dtype=torch.float64, device=self.masks[0].device)
        for mask, each in zip(self.masks, values, strict=True):
            total.index_add_(0, mask.flatten(), each.flatten().double())
        return total

    def spread(self, values: Tensor) -> Tensors:
        """Give each value (*S) what its feature has, of (F,)."""
        return tuple(values[mask] for mask in self.masks)

    def differing(self, request: AttributionRequest) -> Tensor:
        """Return the numbers of the features that are not as in every baseline."""
        differs = torch.zeros(self.count, dtype=torch.bool, device=request.device)
        (starts,) = request.baseline_sets
        for end, start, mask in zip(request.inputs, starts, self.masks, strict=True):
            differs[mask[(end != start).any(0)]] = True
        return differs.nonzero().flatten()

    def outputs(self, request: AttributionRequest, kept: Tensor) -> Tensor:
        """Return the output (R, B) float64 where only some features are as in the input.

        Args:
            request: request of one explanation; the others are as in each of its B baselines.
            kept: (R, F) bool.
        """
        (starts,) = request.baseline_sets
        count = len(starts[0])
        found = []
        every = torch.arange(len(kept) * count, device=request.device)
        for chunk in chunks(len(every), request.chunk_rows):
            request.between_chunks()
            at = every[chunk]
            inside = kept[at // count]
            points = tuple(
                end.where(inside[:, mask], start[at % count])
                for end, start, mask in zip(request.inputs, starts, self.masks, strict=True)
            )
            with torch.no_grad():
                found.append(request.forward(points, torch.zeros_like(at)).double())
        return torch.cat(found).view(-1, count)


def features_of(inputs: Tensors, shapes: Shapes, groups: Groups = ()) -> Features:
    """Return the windows that lie side by side in inputs (M, *S), as features.

    Args:
        inputs: inputs of any number of rows.
        shapes: shapes of a window in each; where there are groups, so many of these.
        groups: see `Groups`.
    """
    count = 0
    masks = []
    for which, (each, shape) in enumerate(zip(inputs, shapes, strict=True)):
        group = group_of(groups, which)
        mask = _windows(each.shape[1:], shape) if group is None else group // shape[0]
        masks.append((mask + count).to(each.device))
        count += int(mask.max()) + 1 if mask.numel() else 0
    return Features(tuple(masks), count)


def _windows(sizes: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Number the windows that lie side by side in a row of an input: (*S) int64."""
    mask = torch.zeros(tuple(sizes), dtype=torch.int64)
    for dim, (size, side) in enumerate(zip(sizes, shape, strict=True)):
        place = torch.arange(size) // side
        mask = mask * -(-size // side) + place.view(-1, *[1] * (mask.dim() - dim - 1))
    return mask
