"""Which of two versions is late more often, in blocks of requests whose times depend on each other.

A machine is slow now and then, for one worker or for all, so a late time is likely beside others;
bets that take each request for news then refuse a good candidate. What is bet on is therefore a
block of them: whose late times are more, from -1 (only the live version's) to 1. Within a block
times may depend on each other as they like: of two equally fast versions each is as likely to lead
as the other, and a slow period of both gives the lead to neither.

Blocks are as long as it takes. Sums of 1, 2, 4, … pairs vary, by the pair, equally much as long as
no slow period is longer than such a block, and more while one is. So blocks are taken of twice the
length of the shortest that vary nearly as much as any longer ones. How much they vary is seen from
neighbours, which a change for good sets apart once and slow periods each time.

E. Carlstein, "The use of subseries values for estimating the variance of a general statistic from a
stationary sequence", Ann. Statist. 14 (1986).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from modelyard.plugins.ops.rollout.evidence import Cells

SHORTEST = 4
"""Level of the shortest blocks, of two to its power pairs: twice as slow is found in 200."""
_GRID = 16
"""Leads are told apart to a part of so many."""
_FEW = 4
"""Pairs of neighbours from which it is known how much blocks vary."""
_NEARLY = 1.1
"""Ratio of the variance of longer blocks to that of the chosen ones, at most."""
_LUCK = 1.5
"""Standard deviations by which longer ones may vary more by chance."""


@dataclass
class _Level:
    """Blocks of the same length."""

    cells: Counter[float] = field(default_factory=Counter)
    """Lead → in how many blocks it was seen."""
    waiting: tuple[int, int] | None = None
    """How many times of either version were late in a block whose neighbour is not complete."""
    squares: int = 0
    """Sum of the squares of how far neighbours are apart."""
    largest: int = 0
    """The largest of these: a change for good sets two neighbours apart, and slow periods many."""
    neighbours: int = 0


class Blocks:
    """Counts late times of two versions, and learns how long blocks have to be."""

    def __init__(self) -> None:
        self._levels = [_Level() for _ in range(SHORTEST + 1)]
        self._pairs = 0
        self.level = SHORTEST
        """Blocks of two to its power pairs are long enough, as far as is known."""

    def begin(self) -> None:
        """Forget who was late, but not how long blocks have to be."""
        for level in self._levels:
            level.cells, level.waiting = Counter(), None

    def put(self, live: int, candidate: int) -> None:
        """Count a pair of times, each late (1) or not (0)."""
        self._pairs += 1
        for number in count():
            if number == len(self._levels):
                self._levels.append(_Level())
            level = self._levels[number]
            if number >= SHORTEST:
                self._lead(level.cells, candidate - live, candidate + live)
            if level.waiting is None:
                level.waiting = live, candidate
                break
            one, other = level.waiting
            level.waiting = None
            square = (candidate - live - other + one) ** 2
            level.squares = level.squares + square
            level.largest = self._larger(level.largest, square)
            level.neighbours += 1
            live, candidate = live + one, candidate + other
        if not self._pairs & (self._pairs - 1):  # seldom: what is bet on is not what teaches it
            self.level = self._long_enough(self._variances())

    _larger = staticmethod(max)

    def _lead(self, cells: Counter[float], more: int, late: int) -> None:
        cells[round(_GRID * more / late) / _GRID if late else 0.0] += 1

    def _variances(self) -> list[tuple[int, float, float]]:
        """Return levels with the variance of their sums by the pair, and the least it may be."""
        found = []
        for number, level in enumerate(self._levels):
            if (known := level.neighbours - 1) >= _FEW:
                variance = (level.squares - level.largest) / known / (2 << number)
                luck = 1 + _LUCK * math.sqrt(2 / known)
                found.append((number, variance, variance / luck))
        return found

    def _long_enough(self, variances: list[tuple[int, float, float]]) -> int:
        """Return the level after the first that varies enough, which only few blocks may show."""
        most = max((least for _, _, least in variances), default=0.0)
        enough = (number for number, variance, _ in variances if _NEARLY * variance >= most)
        found = next(enough, SHORTEST)
        return found + 1 if found > SHORTEST else SHORTEST

    def cells(self, level: int) -> Cells:
        """Return how often which lead was seen in blocks of a level."""
        return self._levels[level].cells if level < len(self._levels) else Counter()
