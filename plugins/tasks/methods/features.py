"""Which values of an explanation's inputs are one feature, and what the model gives without some.

A feature is a pixel of all channels, a window, a word of several tokens, the columns of a category.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelyard.handlers.explain.attribute.attribution import AttributionRequest, Tensors, chunks
from modelyard.handlers.explain.attribute.method import (
    Groups,
    Measurement,
    Result,
    Shapes,
    group_of,
)


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


# -- whether what an explanation ranks first matters: take it away, and look at the output ---------


SHARE = 0.1
"""Share of the features that are removed at once."""
DRAWS = 16
"""Random sets of as many features, beside those that come first."""
STEPS = 10
"""Steps of a curve."""


@dataclass(frozen=True)
class Check:
    """How far the output falls without the first tenth of the features, and a random tenth."""

    removed: int
    features: int
    """Features that are not as in the baseline; the others take no part."""
    top: float
    """The fall without the features that speak most for the target."""
    random: float
    """The mean fall without as many random ones."""
    random_spread: float
    """The standard deviation of that over the draws."""

    @property
    def summary(self) -> str:
        """What it says, in one sentence."""
        share = f"{100 * SHARE:.0f} %"
        top, random = (
            f"{'lowers' if fall >= 0 else 'raises'} the output by {abs(fall):.4g}"
            for fall in (self.top, self.random)
        )
        if (self.top >= 0) == (self.random >= 0):
            random = random[random.index("by") :]
        return (
            f"removing the top {share} ({self.removed} of {self.features} features) {top}, random "
            f"{share} {random} ± {self.random_spread:.2g}"
        )

    @property
    def is_idle(self) -> bool:
        """Whether random features matter no less than the first."""
        return self.features > 1 and self.top <= self.random

    def as_json(self) -> dict[str, Any]:
        """Return the fields of an answer."""
        return {"share": SHARE, **vars(self), "draws": DRAWS, "summary": self.summary}


@dataclass(frozen=True)
class Curves:
    """The output while features go in the order of an explanation, and while they come.

    Source: Petsiuk et al. 2018, section 4.1, https://arxiv.org/abs/1806.07421
    """

    shares: list[float]
    """Shares of the features, from 0 to 1."""
    deletion: list[float]
    """The output without that share, the first taken first."""
    insertion: list[float]
    """The output of the baseline with that share put in, the first put in first."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields of an answer; areas are means of the curves."""
        return {
            "shares": self.shares,
            "deletion": {"outputs": self.deletion, "area": self._area(self.deletion)},
            "insertion": {"outputs": self.insertion, "area": self._area(self.insertion)},
        }

    def _area(self, outputs: list[float]) -> float:
        return float(np.trapezoid(outputs, self.shares))


def check(result: Result) -> Measurement:
    """Say whether what the explanation ranks first matters more than features drawn at random."""
    found = check_of(result.request, *ranked(result), result.seed)
    warnings: tuple[str, ...] = ()
    if found.is_idle:
        warnings = (
            "what this explanation ranks first matters no more to the output than features chosen "
            f"at random: {found.summary}",
        )
    return Measurement(found.as_json(), warnings)


def ranked(result: Result) -> tuple[Features, Tensor]:
    """Return the features of an explanation, and how much each speaks for the target (F,)."""
    windows = result.windows
    features = features_of(result.request.inputs, windows.shapes, windows.groups)
    repeats = result.method.repeats and not windows.groups
    attributions = tuple(each[0] for each in result.attributions)
    return features, scores_of(features, attributions, is_mean=repeats)


def check_of(request: AttributionRequest, features: Features, scores: Tensor, seed: int) -> Check:
    """Remove the first tenth of the features, and `DRAWS` times a random tenth, in one batch.

    Args:
        request: request of one explanation; what is removed becomes its baseline.
        features: features of its inputs.
        scores: (F,) how much each feature speaks for the target.
        seed: seed of the draws.
    """
    order = _ranking(request, features, scores)
    count = len(order)
    removed = _part(SHARE, count)
    if not removed:
        return Check(0, 0, 0.0, 0.0, 0.0)
    random = np.random.default_rng(seed)
    draws = [random.choice(count, removed, replace=False) for _ in range(DRAWS)]
    sets = [order[:removed], *(order[torch.from_numpy(each).to(order.device)] for each in draws)]
    kept = torch.ones((len(sets), features.count), dtype=torch.bool, device=request.device)
    for row, each in enumerate(sets):
        kept[row, each] = False
    top, *others = (request.f_input.double() - features.outputs(request, kept).mean(1)).tolist()
    return Check(removed, count, top, float(np.mean(others)), float(np.std(others, ddof=1)))


def curves_of(request: AttributionRequest, features: Features, scores: Tensor) -> Curves:
    """Remove and insert the features in tenths, in one batch.

    Args:
        request: request as of `check_of`.
        features: features as of `check_of`.
        scores: scores as of `check_of`.
    """
    order = _ranking(request, features, scores)
    shares = [step / STEPS for step in range(STEPS + 1)]
    without = torch.ones((len(shares), features.count), dtype=torch.bool, device=request.device)
    only = without.clone()
    for row, share in enumerate(shares):
        first = order[: _part(share, len(order))]
        without[row, first] = False
        only[row, order] = False
        only[row, first] = True
    outputs = features.outputs(request, torch.cat((without, only))).mean(1).tolist()
    return Curves(shares, outputs[: len(shares)], outputs[len(shares) :])


def scores_of(features: Features, attributions: Tensors, *, is_mean: bool) -> Tensor:
    """Return what each feature has, (F,): the sum or the mean of its values, of attributions (*S).

    One channel of attributions counts for each of an input's.
    """
    whole = tuple(
        each.expand(mask.shape) for each, mask in zip(attributions, features.masks, strict=True)
    )
    sums = features.sums(whole)
    return sums / features.sizes if is_mean else sums


def _ranking(request: AttributionRequest, features: Features, scores: Tensor) -> Tensor:
    """Return the features that are not as in the baseline, what has most first."""
    taking_part = features.differing(request)
    return taking_part[scores[taking_part].argsort(descending=True, stable=True)]


def _part(share: float, count: int) -> int:
    """Return how many features a share is, one at least of any."""
    return min(count, max(1, round(share * count))) if share and count else 0
