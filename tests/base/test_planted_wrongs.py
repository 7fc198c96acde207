"""Wrong numbers that are planted, and honest noise, in places of many distributions.

What is far below the spread of a heavy tail is missed, and how much of it is held here: a robust
spread finds a part of it and takes honest noise of a softmax for wrong (docs/decisions/0112).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from modelyard.base.scale import Numbers, ScaleLearner, over

TOLERANCE = 1e-4
RUNS, TAUGHT, SEEN = 6, 64, 64
Draw = Callable[[np.random.Generator, int], Numbers]


def softmax(draw: np.random.Generator, count: int) -> Numbers:
    logits = draw.normal(0, 3, (count, 1000))
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(shares / shares.sum(1, keepdims=True))


def one(values: Callable[[np.random.Generator, int], Numbers]) -> Draw:
    return lambda draw, count: values(draw, count)[:, None]


PLACES: dict[str, tuple[Draw, float]] = {
    "normal": (one(lambda draw, n: draw.normal(0, 1, n)), 0.003),
    "normal, far from zero": (one(lambda draw, n: draw.normal(1000, 1, n)), 0.0),
    "lognormal 1": (one(lambda draw, n: draw.lognormal(0, 1, n)), 0.002),
    "lognormal 2": (one(lambda draw, n: draw.lognormal(0, 2, n)), 0.05),
    "lognormal 3": (one(lambda draw, n: draw.lognormal(0, 3, n)), 0.25),
    "Cauchy": (one(lambda draw, n: draw.standard_cauchy(n)), 0.05),
    "mostly zero": (one(lambda draw, n: (draw.random(n) < 0.03) * draw.normal(0, 1, n)), 0.0),
    "bimodal": (one(lambda draw, n: draw.choice([-5, 5], n) + draw.normal(0, 0.1, n)), 0.0),
    "constant": (one(lambda draw, n: np.full(n, 7.3)), 0.0),
    "counts": (one(lambda draw, n: draw.poisson(4, n).astype(float)), 0.0),
    "softmax of 1,000": (softmax, 0.25),
}
"""Name → values at its places, and the largest share of wrongs that may be missed."""


def wrongs(value: Numbers, other: Numbers, usual: Numbers) -> Iterator[Numbers]:
    """Yield what is there instead: off by a share, by a hundredth of what is usual, or another."""
    yield from (1.01 * value, 1.1 * value, 10 * value, -value, 0 * value)
    yield from (other, value + 0.01 * usual)


@pytest.mark.parametrize("name", PLACES)
def test_of_planted_wrongs_few_are_missed_and_no_honest_noise_is_wrong(name: str) -> None:
    values, most = PLACES[name]
    draw, missed, planted, refused = np.random.default_rng(0), 0, 0, 0
    for _ in range(RUNS):
        learner, taught = ScaleLearner(), values(draw, TAUGHT)
        for case in taught:
            learner.see(case)
        scale, usual = learner.scale(), np.median(np.abs(taught), 0)
        size = np.sqrt(np.square(taught).mean(0))
        for value, other in zip(values(draw, SEEN), values(draw, SEEN), strict=True):
            units = scale.units(value)
            for got in wrongs(value, other, usual):
                apart = np.abs(got - value)
                is_wrong = apart > 1e-3 * np.abs(value)
                missed += int((is_wrong & (over(apart, units) <= TOLERANCE)).sum())
                planted += int(is_wrong.sum())
            for noise in (3e-7 * value, 1e-7 * (value != 0) * size):
                got = value + noise * draw.normal(0, 1, value.shape)
                refused += int((over(np.abs(got - value), units) > TOLERANCE).sum())
    assert refused == 0
    assert missed <= most * planted, f"{missed} of {planted}"
    assert planted > 50


def test_what_a_quantised_artifact_is_held_to_sees_no_honest_rounding_as_wrong() -> None:
    """Eight bits of the place's range are a relative error of a hundredth; twice as much is not."""
    draw = np.random.default_rng(1)
    for values, _ in PLACES.values():
        learner, taught = ScaleLearner(), values(draw, TAUGHT)
        for case in taught:
            learner.see(case)
        scale = learner.scale()
        step = (taught.max(0) - taught.min(0)) / 255
        seen = values(draw, SEEN)
        honest = np.round(seen / np.where(step > 0, step, 1)) * step if step.any() else seen
        error = over(np.abs(honest - seen), np.stack([scale.sizes(each) for each in seen]))
        assert np.sqrt(np.square(error).mean()) <= 0.15
