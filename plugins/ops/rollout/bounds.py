"""Between which shares the truth lies when k of n were seen: Clopper and Pearson's exact bounds.

C. J. Clopper and E. S. Pearson, "The use of confidence or fiducial limits illustrated in the case
of the binomial", Biometrika 26 (1934). The incomplete beta function by its continued fraction:
DLMF 8.17.22, https://dlmf.nist.gov/8.17.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

NOISE_SHARE = 0.2
"""Share of the error that a bound of an excess may make which its noise floor gets: it is measured
on fewer requests and mostly 0, where its lower bound costs nothing."""
_STEPS = 10_000
_TINY = 1e-300


class Bound(NamedTuple):
    """What was seen of a share, a difference of shares or a ratio, and how far the truth may be."""

    estimate: float
    low: float
    """Lower bound: with the stated confidence the truth is not lower."""
    high: float
    """Upper bound: with the same confidence, taken by itself, it is not higher."""


def share(k: int, n: int, alpha: float) -> Bound:
    """Return a share with a lower and an upper bound, each of which fails with chance `alpha`."""
    return Bound(k / n if n else 0.0, lower(k, n, alpha), upper(k, n, alpha))


def excess(k: int, n: int, of_noise: int, noise: int, alpha: float) -> Bound:
    """Return by how much one share is above another, each bound failing with chance `alpha`.

    The upper bound is the upper bound of the one share less the lower of the other. Both hold at
    once unless one of them fails, whose chances add up to `alpha`, whether or not the two were seen
    on the same requests (Bonferroni): it is never too low, and may be a little too high.

    Args:
        k: seen of `n`.
        n: how many were looked at.
        of_noise: seen of `noise`.
        noise: how many were looked at for the floor; 0 where none were.
        alpha: chance that a bound fails.
    """
    mine, floors = alpha * (1 - NOISE_SHARE), alpha * NOISE_SHARE
    estimate = (k / n if n else 0.0) - (of_noise / noise if noise else 0.0)
    low = lower(k, n, mine) - upper(of_noise, noise, floors)
    high = upper(k, n, mine) - lower(of_noise, noise, floors)
    return Bound(estimate, low, high)


def upper(k: int, n: int, alpha: float) -> float:
    """Return the share that the truth exceeds with a chance of at most `alpha`."""
    return 1.0 if k >= n else _beta_quantile(1 - alpha, k + 1, n - k)


def lower(k: int, n: int, alpha: float) -> float:
    """Return the share that the truth falls short of with a chance of at most `alpha`."""
    return 0.0 if k <= 0 or n <= 0 else _beta_quantile(alpha, k, n - k + 1)


@lru_cache(maxsize=1024)
def _beta_quantile(chance: float, a: int, b: int) -> float:
    """Return x with I_x(a, b) = chance: Newton's steps, kept inside what bisection knows."""
    low, high = 0.0, 1.0
    x = a / (a + b)
    for _ in range(200):
        difference = incomplete_beta(x, a, b) - chance
        if difference > 0:
            high = x
        else:
            low = x
        log_density = (a - 1) * math.log(x) + (b - 1) * math.log1p(-x) - _log_beta(a, b)
        density = math.exp(min(700.0, log_density))
        step = x - difference / density if density > _TINY else -1.0
        moved = step if low < step < high else (low + high) / 2
        if abs(moved - x) <= 1e-12 * x:
            return moved
        x = moved
    return x


def incomplete_beta(x: float, a: float, b: float) -> float:
    """Return I_x(a, b): the chance that a share drawn from Beta(a, b) is at most x."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly; the other end is quick
        return 1 - incomplete_beta(1 - x, b, a)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) - _log_beta(a, b)) / a
    return front * _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """Return the continued fraction, by Lentz's method."""
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > _TINY else _TINY)
    value = d
    for m in range(1, _STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 + term * d
            c = 1 + term / c
            d = 1 / (d if abs(d) > _TINY else _TINY)
            c = c if abs(c) > _TINY else _TINY
            value *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return value


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
