"""What is learnt of numbers, beside what numpy says of all of them at once."""

from __future__ import annotations

import math

import numpy as np
import pytest

from modelyard.base.scale import MOST_PLACES, Numbers, Scale, ScaleLearner, one_place


def learnt(cases: list[Numbers]) -> Scale:
    learner = ScaleLearner()
    for case in cases:
        learner.see(case)
    return learner.scale()


def around(centre: Numbers, spread: list[float], count: int) -> list[Numbers]:
    """Return cases whose places have these deviations, where their number is even."""
    return [centre + np.array(spread) * (-1) ** at for at in range(count)]


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_a_place_has_the_mean_and_the_deviation_of_all_cases(offset: float) -> None:
    random = np.random.default_rng(0)
    cases = [random.normal(offset, [1.0, 5.0, 0.2], (rows, 3)) for rows in (2, 7, 1, 4, 4)]
    scale, together = learnt(cases), np.concatenate(cases)
    np.testing.assert_allclose(scale.centre, together.mean(0, keepdims=True), rtol=1e-12)
    np.testing.assert_allclose(scale.spread, together.std(0, keepdims=True), rtol=1e-9)
    assert scale.fits((9, 3)) and not scale.fits((9, 4)) and not scale.fits((3,))


def test_of_many_positions_the_last_dim_is_one_place() -> None:
    random = np.random.default_rng(1)
    cases = [random.normal([[1.0], [2.0]], 1.0, (2, MOST_PLACES)) for _ in range(5)]
    scale, together = learnt(cases), np.stack(cases)
    np.testing.assert_allclose(scale.centre, together.mean((0, 2)).reshape(2, 1), rtol=1e-12)
    np.testing.assert_allclose(scale.spread, together.std((0, 2)).reshape(2, 1), rtol=1e-9)
    assert learnt([each[:, : MOST_PLACES // 2] for each in cases]).centre.size == MOST_PLACES


@pytest.mark.parametrize(
    ("spreads", "count", "first"),
    [
        pytest.param([0.0, *range(1, 11)], 8, 1.0, id="never on: the lowest tenth of ten"),
        pytest.param([0.0, 2.0, *range(2, 12)], 8, 2.0, id="never on: the lowest tenth of eleven"),
        pytest.param([1e-6, *[1.0] * 10], 2, 1.0, id="too few values to know it"),
        pytest.param([1e-6, *[1.0] * 10], 4, 1e-5, id="known to a factor of ten"),
        pytest.param([0.5, *[1.0] * 10], 4, 1.0, id="raised no higher than the lowest tenth"),
        pytest.param([2.0, *[1.0] * 10], 2, 2.0, id="never lowered"),
    ],
)
def test_a_spread_that_may_be_chance_is_raised(
    spreads: list[float], count: int, first: float
) -> None:
    scale = learnt(around(np.full(len(spreads), 7.0), spreads, count))
    np.testing.assert_allclose(scale.spread, [first, *spreads[1:]], rtol=1e-6)


def test_where_nothing_varies_the_centre_is_the_spread() -> None:
    scale = learnt([np.array([-3.0, 0.0])] * 5)
    assert scale.centre.tolist() == [-3.0, 0.0] and scale.spread.tolist() == [3.0, 0.0]


def test_what_is_not_finite_teaches_nothing() -> None:
    scale = learnt([np.array([math.nan, 1.0]), np.array([math.inf, 3.0])])
    assert scale.centre.tolist() == [0.0, 2.0] and scale.spread.tolist() == [1.0, 1.0]


def test_a_single_output_is_one_place() -> None:
    scale = one_place(np.array([[1.0, 2.0], [6.0, 3.0]]))
    assert scale.centre == pytest.approx(3.0) and scale.spread == pytest.approx(math.sqrt(3.5))
    assert one_place(np.array([[4.0]])).centre.tolist() == [4.0]
