"""Whether what an explanation ranks first matters: take it away, and look at the output."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelyard.handlers.explain.attribute.attribution import AttributionRequest, Tensors
from modelyard.handlers.explain.attribute.method import Measurement, Result
from modelyard.plugins.tasks.methods.features import Features, features_of

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
