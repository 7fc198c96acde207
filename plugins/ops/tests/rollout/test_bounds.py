"""Clopper's and Pearson's bounds against scipy's, and what two of them say together."""

from __future__ import annotations

import random

import pytest
from scipy import special, stats

from modelyard.plugins.ops.rollout.bounds import (
    excess,
    incomplete_beta,
    lower,
    upper,
)

COUNTS = [(0, 1), (1, 1), (0, 200), (3, 200), (200, 200), (199, 200), (37, 1000), (5, 100_000)]
LARGE = [(1_000_000, 2_000_000), (3, 10_000_000), (9_999_999, 10_000_000)]


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.975, 0.9999])
@pytest.mark.parametrize(("k", "n"), COUNTS + LARGE)
def test_bounds_are_those_of_scipy(k: int, n: int, confidence: float) -> None:
    wanted = stats.binomtest(k, n).proportion_ci(confidence, method="exact")
    alpha = (1 - confidence) / 2
    low, high = lower(k, n, alpha), upper(k, n, alpha)
    assert low == pytest.approx(wanted.low, rel=1e-6, abs=1e-12)
    assert high == pytest.approx(wanted.high, rel=1e-6, abs=1e-12)


def test_the_incomplete_beta_function_is_that_of_scipy() -> None:
    draw = random.Random(0)
    for _ in range(300):
        a, b, x = draw.randint(1, 5000), draw.randint(1, 5000), draw.random()
        assert incomplete_beta(x, a, b) == pytest.approx(
            special.betainc(a, b, x), rel=1e-8, abs=1e-12
        )


def test_no_share_is_below_0_or_above_1() -> None:
    assert [incomplete_beta(x, 2, 3) for x in (-0.5, 0.0, 1.0, 1.5)] == [0, 0, 1, 1]


def test_no_difference_in_n_leaves_three_in_n() -> None:
    assert upper(0, 300, 0.05) == pytest.approx(3 / 300, rel=0.01)
    assert upper(0, 297, 0.05) > 0.01 > upper(0, 299, 0.05)


def test_without_anything_counted_everything_is_possible() -> None:
    assert (lower(0, 0, 0.05), upper(0, 0, 0.05)) == (0, 1)
    assert excess(0, 0, 0, 0, 0.05) == (0, -1, 1)


def test_an_excess_is_bounded_by_both_shares() -> None:
    found = excess(30, 1000, 2, 100, 0.05)
    assert found.estimate == pytest.approx(0.01)
    assert found.high == pytest.approx(upper(30, 1000, 0.04) - lower(2, 100, 0.01))
    assert found.low == pytest.approx(lower(30, 1000, 0.04) - upper(2, 100, 0.01))


def test_the_bound_of_an_excess_is_too_low_no_more_often_than_it_says() -> None:
    """Many roll-outs whose true excess is known: 4 % of answers differ, 1 % by themselves."""
    draw = random.Random(1)
    tries = 400
    too_low = too_high = 0
    for _ in range(tries):
        k = sum(draw.random() < 0.04 for _ in range(300))
        of_noise = sum(draw.random() < 0.01 for _ in range(30))
        found = excess(k, 300, of_noise, 30, 0.05)
        too_low += found.high < 0.03
        too_high += found.low > 0.03
    # Six standard deviations above 5 % of 400.
    assert too_low <= 46
    assert too_high <= 46
