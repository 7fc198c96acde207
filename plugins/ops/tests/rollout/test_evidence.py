"""Bounds and tests that hold at any time: by hand, and in many simulated runs."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from modelyard.plugins.ops.rollout.evidence import (
    FALSE_ALARMS,
    RARE,
    STAKES,
    Cells,
    Drift,
    Span,
    bound,
    log_evidence,
    share,
    upper,
)

SHARE: Span = (0, 1)
PAIR: Span = (-1, 1)


def test_the_money_is_divided_among_the_stakes() -> None:
    for stakes in (STAKES, RARE):
        assert sum(part for _, part in stakes) == pytest.approx(1)
        assert all(0 < stake < 1 for stake, _ in stakes)


@pytest.mark.parametrize(
    ("value", "mean", "span", "is_above", "won"),
    [
        # Stakes on more than a share: each wins (1 - mean) / mean of itself, or loses itself.
        (1, 0.01, SHARE, True, sum(part * (1 + stake * 99) for stake, part in RARE)),
        (0, 0.01, SHARE, True, sum(part * (1 - stake) for stake, part in RARE)),
        # Stakes on less: the largest is lost when 1 is seen.
        (1, 0.01, SHARE, False, sum(part * (1 - stake) for stake, part in STAKES)),
        (0, 0.01, SHARE, False, sum(part * (1 + stake / 99) for stake, part in STAKES)),
        (1, 0.0, PAIR, True, sum(part * (1 + stake) for stake, part in STAKES)),
        (-1, 0.0, PAIR, True, sum(part * (1 - stake) for stake, part in STAKES)),
        (0, 0.0, PAIR, True, 1),
    ],
)
def test_one_bet_by_hand(value: float, mean: float, span: Span, is_above: bool, won: float) -> None:
    assert math.exp(log_evidence({value: 1}, mean, span, is_above)) == pytest.approx(won)


@pytest.mark.parametrize(
    ("values", "span", "is_above"),
    [
        ({1: 0.01, 0: 0.99}, SHARE, True),
        ({1: 0.01, 0: 0.99}, SHARE, False),
        ({1: 0.5, 0: 0.5}, SHARE, True),
        ({1: 0.1, 0: 0.8, -1: 0.1}, PAIR, True),
        ({1: 0.1, 0: 0.8, -1: 0.1}, PAIR, False),
    ],
)
def test_a_bet_on_what_is_true_gains_nothing_on_average(
    values: dict[float, float], span: Span, is_above: bool
) -> None:
    """Fair odds, value by value: what Ville's inequality asks for."""
    mean = sum(value * chance for value, chance in values.items())
    gained = sum(
        chance * math.exp(log_evidence({value: 1}, mean, span, is_above))
        for value, chance in values.items()
    )
    assert gained == pytest.approx(1)


def _seen(draw: random.Random, chance: float, n: int) -> Counter[float]:
    return Counter(int(draw.random() < chance) for _ in range(n))


@pytest.mark.parametrize("is_above", [True, False])
def test_who_looks_at_every_tenth_value_is_seldom_wrong(is_above: bool) -> None:
    """Of 400 runs of 1,000 values whose mean is the one that is doubted, 5 % are 20."""
    draw = random.Random(1)
    wrong = 0
    for _ in range(400):
        cells: Counter[float] = Counter()
        for _ in range(100):
            cells += _seen(draw, 0.1, 10)
            if log_evidence(cells, 0.1, SHARE, is_above) >= math.log(20):
                wrong += 1
                break
    assert 0 < wrong <= 20


def test_bounds_lie_around_what_was_seen_and_draw_near() -> None:
    few, many = share(10, 100, 0.05), share(1000, 10_000, 0.05)
    assert few.low < many.low < 0.1 < many.high < few.high
    assert many.estimate == pytest.approx(0.1)
    assert many.high - many.low < 0.025
    assert share(10, 100, 0.001).high > few.high
    assert upper(10, 100, 0.05) == few.high


def test_a_bound_is_the_mean_at_which_the_evidence_is_enough() -> None:
    cells: Cells = {1: 30, 0: 900, -1: 20}
    found = bound(cells, PAIR, 0.05)
    for end, is_above in ((found.low, True), (found.high, False)):
        assert log_evidence(cells, end, PAIR, is_above) == pytest.approx(math.log(20), abs=1e-2)


def test_of_nothing_everything_is_possible() -> None:
    assert bound({}, PAIR, 0.05) == (0, -1, 1)
    assert share(0, 0, 0.05) == (0, 0, 1)
    assert upper(0, 0, 0.05) == 1


def test_no_difference_in_n_leaves_four_in_n() -> None:
    assert 3 / 1000 < share(0, 1000, 0.05).high < 4 / 1000
    assert share(0, 1000, 0.05).low == 0
    assert share(1000, 1000, 0.05).high == 1


def test_a_change_is_seen_soon_however_long_there_was_none() -> None:
    for before in (100, 10_000, 1_000_000):
        drift = Drift()
        cells: Counter[float] = Counter({0: before})
        assert not drift.look(cells, 0.01, PAIR)
        needed = 0
        while not drift.look(cells, 0.01, PAIR):
            cells[1] += 1
            needed += 1
            assert needed < 30, "thirty in a row are seen"
        assert needed > 10


def test_who_looks_again_at_the_same_hears_the_same_as_before() -> None:
    drift, cells = Drift(), Counter[float]({1: 19, 0: 100})
    drift.look(cells, 0.01, PAIR)
    assert not any(drift.look(cells, 0.01, PAIR) for _ in range(100))


def test_alarms_without_a_change_are_as_rare_as_promised() -> None:
    """At the limit itself: 40 runs of 5,000 values are one false alarm on average at most."""
    draw = random.Random(4)
    alarms = 0
    for _ in range(40):
        drift, cells = Drift(), Counter[float]()
        for _ in range(500):
            cells += _seen(draw, 0.02, 10)
            if drift.look(cells, 0.02, PAIR):
                alarms += 1
                break
    assert FALSE_ALARMS == 40 * 5000
    assert alarms <= 4
