"""What values that were seen say of their mean: bounds and tests that hold however often one looks.

A gambler who starts with 1 bets on each value, at fair odds if the mean is what is doubted. While
it is, his capital is ever above 1 / alpha with a chance of at most alpha (Ville), whoever looks,
whenever, and whatever makes him stop. Here he divides his money among fixed stakes, so that his
capital follows from how often each value was seen.

I. Waudby-Smith and A. Ramdas, "Estimating means of bounded random variables by betting", J. R.
Statist. Soc. B 86 (2024), section 4; to divide what is betted: H. Robbins, "Statistical methods
related to the law of the iterated logarithm", Ann. Math. Statist. 41 (1970).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

Cells = Mapping[float, int]
"""Value → how often it was seen."""
Span = tuple[float, float]
"""The least and the largest value that there may be."""
Stakes = tuple[tuple[float, float], ...]
"""Share of the largest stake that cannot ruin, and which part of the money is betted so."""
STAKES: Stakes = ((0.97, 0.55), (0.5, 0.15), (0.25, 0.15), (0.1, 0.15))
RARE: Stakes = ((0.6, 0.2), (0.21, 0.2), (0.07, 0.2), (0.025, 0.2), (0.009, 0.2))
"""Stakes on shares that are larger than a small one, where the largest stake is large."""
FALSE_ALARMS = 200_000
"""Least number of values, on average, to a false alarm of `Drift`."""
_STEPS = 20


class Bound(NamedTuple):
    """An estimate, and how far the truth may be from it."""

    estimate: float
    low: float
    """Lower bound: with the stated confidence it is never above the truth."""
    high: float
    """Upper bound: with the same confidence, taken by itself, it is never below the truth."""


def log_evidence(cells: Cells, mean: float, span: Span, is_above: bool) -> float:
    """Return the logarithm of the evidence that the true mean is above, or below, a given one.

    Where it is not, this is ever above log(1 / alpha) with a chance of at most alpha.
    """
    return _log_sum([log for log, _ in _capitals(cells, mean, span, is_above)])


def _capitals(cells: Cells, mean: float, span: Span, is_above: bool) -> list[tuple[float, float]]:
    """Return for each stake the logarithm of what has become of its part, and that of the part."""
    room = mean - span[0] if is_above else mean - span[1]
    found = []
    for stake, part in RARE if is_above and span[0] == 0 else STAKES:
        won = sum(
            count * math.log1p(stake * (value - mean) / room) for value, count in cells.items()
        )
        found.append((math.log(part) + won, math.log(part)))
    return found


class Bet:
    """What is betted, value by value from -1 to 1, on their mean being above a limit, or below."""

    def __init__(self, limit: float, is_above: bool) -> None:
        self._limit = limit
        self._room = limit + 1 if is_above else limit - 1
        self._logs = [math.log(part) for _, part in STAKES]

    def put(self, value: float, times: int = 1) -> Bet:
        """Take a value, so many times; return itself."""
        odds = (value - self._limit) / self._room
        self._logs = [log + times * math.log1p(stake * odds)
                      for log, (stake, _) in zip(self._logs, STAKES, strict=True)]  # fmt: skip
        return self

    @property
    def log(self) -> float:
        """The logarithm of the evidence, as `log_evidence` has it."""
        return _log_sum(self._logs)


def mean_log(logs: list[float]) -> float:
    """Return the logarithm of the evidence that several bets of equal stakes have together."""
    return _log_sum(logs) - math.log(len(logs))


def _log_sum(logs: list[float]) -> float:
    most = max(logs)
    return most + math.log(sum(math.exp(each - most) for each in logs))


def bound(cells: Cells, span: Span, alpha: float) -> Bound:
    """Return the mean with both bounds, each of which fails at any time with chance `alpha`."""
    total = sum(cells.values())
    if not total:
        return Bound(0.0, *span)
    mean = sum(value * count for value, count in cells.items()) / total
    return Bound(mean, *(_end(cells, span, is_above, alpha) for is_above in (True, False)))


def _end(cells: Cells, span: Span, is_above: bool, alpha: float) -> float:
    """Return how far from an end of the span the evidence rules means out."""
    ruled_out, possible = span if is_above else span[::-1]
    for _ in range(_STEPS):
        middle = (ruled_out + possible) / 2
        if log_evidence(cells, middle, span, is_above) >= -math.log(alpha):
            ruled_out = middle
        else:
            possible = middle
    return ruled_out


def share(count: int, total: int, alpha: float) -> Bound:
    """Return a share of what was counted with both bounds."""
    return bound({1: count, 0: total - count}, (0, 1), alpha)


@lru_cache(maxsize=256)
def upper(count: int, total: int, alpha: float) -> float:
    """Return the share that the truth is ever seen to exceed with chance `alpha`."""
    return _end({1: count, 0: total - count}, (0, 1), False, alpha) if total else 1.0


class Drift:
    """Sees a mean that comes to be above a limit, however long it was below.

    At each look a further gambler begins to bet; what matters is what all of them have. Until the
    mean is above the limit an alarm comes, on average, after `FALSE_ALARMS` values or more, and
    within the first n with a chance of at most n / `FALSE_ALARMS`.

    J. Shin, A. Ramdas and A. Rinaldo, "E-detectors: a nonparametric framework for sequential change
    detection", New England J. Statist. Data Sci. 2 (2024), section 2: the Shiryaev-Roberts one.
    """

    def __init__(self) -> None:
        self._logs: list[float] = []
        self._seen: Cells = {}

    def look(self, cells: Cells, limit: float, span: Span) -> bool:
        """Return whether there is an alarm, of everything that was seen so far."""
        new = {value: count - self._seen.get(value, 0) for value, count in cells.items()}
        if limit >= span[1] or not any(new.values()):
            return False
        self._seen = dict(cells)
        grown = _capitals(new, limit, span, is_above=True)
        self._logs = [
            _log_sum([log, part]) + won - part
            for log, (won, part) in zip(self._logs or [-math.inf] * len(grown), grown, strict=True)
        ]
        return _log_sum(self._logs) >= math.log(FALSE_ALARMS)
