"""The one quantile of measurements."""

import math

import pytest

from modelyard.base.quantile import nearest_rank


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.0, 1)])
def test_quantiles_of_a_hundred_values(share: float, expected: int) -> None:
    assert nearest_rank(range(1, 101), share) == expected


def test_the_only_value_is_every_quantile() -> None:
    assert nearest_rank([7.0], 0.5) == nearest_rank([7.0], 0.99) == 7.0


def test_nothing_measured_has_no_finite_quantile() -> None:
    assert nearest_rank([], 0.5) == math.inf
