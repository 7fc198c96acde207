"""When what is compared beside copies is shown to be worse than the live version's own noise."""

from __future__ import annotations

from random import Random

import pytest

from modelyard.plugins.ops.rollout.excess import Excess

ROLLOUTS = 400
CHECKS = 500


def is_found(draw: Random, share: float, noise: float, allowed: float) -> int | None:
    """Return after how many checks a candidate is found that differs in such a share."""
    excess, of_noise = Excess("it differs"), 0
    for number in range(1, CHECKS + 1):
        excess.add(draw.random() >= share, "so")
        of_noise += draw.random() < noise
        if number % 5 == 0 and excess.reason(of_noise, number, allowed) is not None:
            return number
    return None


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05, 0.3, 1.0])
def test_a_candidate_as_noisy_as_the_live_version_is_hardly_ever_refused(noise: float) -> None:
    draw = Random(1)
    found = [is_found(draw, noise, noise, 0.0) for _ in range(ROLLOUTS)]
    assert sum(each is not None for each in found) <= 0.02 * ROLLOUTS


@pytest.mark.parametrize(
    ("share", "noise", "most"), [(1.0, 0.0, 10), (0.5, 0.0, 50), (0.2, 0.0, 200), (0.6, 0.3, 200)]
)
def test_one_that_is_worse_is_found(share: float, noise: float, most: int) -> None:
    draw = Random(2)
    found = [is_found(draw, share, noise, 0.01) for _ in range(100)]
    assert sum(each is not None and each <= most for each in found) >= 95, found


def test_what_the_rule_allows_is_allowed_and_without_noise_measured_nothing_is_shown() -> None:
    assert all(is_found(Random(seed), 0.02, 0.0, 0.05) is None for seed in range(100))
    excess = Excess("it differs")
    for _ in range(50):
        excess.add(False, "so")
    assert excess.reason(0, 0, 0.01) is None
    reason = excess.reason(0, 50, 0.01)
    assert reason == (
        "it differs: 50 of 50, and the live version's own answers differ in 0 of 50; so"
    )
