"""What numbers are measured by, learnt from what the reference gives.

A number means something beside the others that stand at its place for other inputs, and nothing
beside those at other places: a price of 250,000 says nothing about the probability next to it.
Each place has a centre (the mean) and a spread (the standard deviation). The unit of a number b is

    max(spread, |b - centre|) + rounding |b|

so that neither a gain nor an offset of the model changes what agrees; the second part is what a
float of that size cannot hold anyway: a sum of 1,000 and something small has no more digits.

A place is a position along the dims whose size never varies; along the others, as batch and
sequence, all positions are one place. Outputs of many positions are pooled along their largest dim
first, whose positions are the most alike: pixels, steps, boxes, rather than channels.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

MOST_PLACES = 1 << 14
"""Places that are told apart."""
MOST_STATED = 1024
"""Places that a report tells apart."""
ROUNDING = 0.02
"""Share of a number's own size in its unit: 2e-6 at float32's tolerance, sixteen last places."""
# Values whose sums are made at a time: some six copies of them are made.
_PIECE = 1 << 20
_ENOUGH = 4
"""Values from which a spread is known to a factor of ten, at one place of a thousand."""
_LUCK = 10.0
_FAR = 30.0
"""Spreads from the centre up to which a number counts: one odd answer does not hide all others."""
_RARE = 0.1
"""Share of the places whose spread may be small by chance, or zero."""


@dataclass(frozen=True, eq=False)
class Scale:
    """Centre and spread of each place, of a shape that broadcasts to the output's."""

    centre: Numbers
    spread: Numbers

    def units(self, expected: Numbers, rounding: float = ROUNDING) -> Numbers:
        """Return what the difference of each number is divided by.

        Args:
            expected: numbers of the reference, in a shape to which the places broadcast.
            rounding: share of a number's own size.
        """
        away = np.maximum(np.abs(expected - self.centre), self.spread)
        return away + rounding * np.abs(expected)

    def sizes(self, expected: Numbers) -> Numbers:
        """Return how large the number at each place is: its root mean square, or more, if it is."""
        return np.maximum(np.hypot(self.centre, self.spread), np.abs(expected))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether the places are those of an output of this shape."""
        sizes = zip(self.centre.shape, shape, strict=False)
        return self.centre.ndim == len(shape) and all(one in (1, other) for one, other in sizes)

    def wider(self, other: "Scale") -> "Scale":
        """Return the scale with the larger spread at each place."""
        return replace(self, spread=np.maximum(self.spread, other.spread))

    def to_json(self) -> dict[str, Any]:
        """Return the form that reports hold, of few places."""
        sums = np.ones_like(self.centre), self.centre, self.spread**2
        while sums[0].size > MOST_STATED:
            sums = _pool(sums, int(np.argmax(sums[0].shape)))
        count, centre, squares = sums
        return {
            "shape": list(centre.shape),
            "centre": [float(f"{value:.9g}") for value in centre.flat],
            "spread": [float(f"{value:.3g}") for value in np.sqrt(squares / count).flat],
        }

    @classmethod
    def from_json(cls, stated: Mapping[str, Any]) -> "Scale":
        """Return what a report states."""
        parts = (np.array(stated[name], np.float64) for name in ("centre", "spread"))
        return cls(*(part.reshape(stated["shape"]) for part in parts))


class ScaleLearner:
    """Learns a scale from outputs of the reference, one case after the other.

    Means and squared deviations are merged as in T. F. Chan, G. H. Golub, R. J. LeVeque, Updating
    formulae and a pairwise algorithm for computing sample variances, Stanford STAN-CS-79-773, 1979.
    """

    def __init__(self) -> None:
        self._sums: _Sums | None = None
        self._pooled: set[int] = set()
        """Dims along which all positions are one place."""
        self.cases = 0

    def see(self, output: Numbers) -> None:
        """Learn from one output of one case; what is not finite teaches nothing."""
        old = self._sums
        sizes = zip(output.shape, output.shape if old is None else old[0].shape, strict=True)
        self._pooled |= {dim for dim, (one, other) in enumerate(sizes) if one != other}
        places = [1 if dim in self._pooled else size for dim, size in enumerate(output.shape)]
        while math.prod(places) > MOST_PLACES:
            self._pooled.add(dim := int(np.argmax(places)))
            places[dim] = 1
        if old is not None and self._pooled:  # else not a bit may change
            self._sums = old = _pool(old, *self._pooled)
        longest = max(self._pooled, key=lambda dim: output.shape[dim], default=0)
        count = output.size // _PIECE
        for piece in np.array_split(output, count, longest) if count else [output]:
            new = self._sums_of(piece, old)
            self._sums = new if self._sums is None else _merge(self._sums, new)
        self.cases += 1

    def _sums_of(self, piece: Numbers, old: "_Sums | None") -> "_Sums":
        """Return a piece's sums; what is far from all before counts as less far."""
        finite = np.isfinite(piece)
        values = np.where(finite, piece, 0.0)
        if old is not None:
            far = _FAR * np.sqrt(old[2] / np.maximum(old[0], 1))
            far = np.where((old[0] >= _ENOUGH) & (far > 0), far, math.inf)
            values = np.clip(values, old[1] - far, old[1] + far)
        return _pool((finite.astype(np.float64), values, np.zeros_like(values)), *self._pooled)

    def fits(self, output: Numbers) -> bool:
        """Return whether an output has as many dims as those before."""
        return self._sums is None or self._sums[0].ndim == output.ndim

    @property
    def is_enough(self) -> bool:
        """Whether some place has had values enough for its spread."""
        return self._sums is not None and bool(self._sums[0].max(initial=0.0) >= _ENOUGH)

    def scale(self) -> Scale:
        """Return what was learnt, of one case at least.

        A spread that is small by chance, which few values make likely, or zero, as behind a ReLU
        that is never on, becomes that of the lowest tenth of the places; where nothing varies, the
        centre is the spread.
        """
        assert self._sums is not None, "a case was seen"
        count, mean, squares = self._sums
        spread = np.sqrt(squares / np.maximum(count, 1))
        varies = np.sort(spread[spread > 0])
        if not len(varies):
            return Scale(mean, np.abs(mean))
        low = varies[int(_RARE * (len(varies) - 1))]
        is_known = (count >= _ENOUGH) & (spread > 0)
        return Scale(
            mean, np.maximum(spread, np.where(is_known, np.minimum(low, _LUCK * spread), low))
        )


def one_place(output: Numbers) -> Scale:
    """Return the scale of a single output, whose numbers are all taken for those of one place."""
    learner = ScaleLearner()
    values = output.reshape(-1)
    for piece in (values[:1], values[1:]):  # of two sizes, so that positions are no places
        learner.see(piece)
    return learner.scale()


_Sums = tuple[Numbers, Numbers, Numbers]
"""Count, mean and squared deviations of each place."""


def _merge(one: _Sums, other: _Sums) -> _Sums:
    count = one[0] + other[0]
    share = other[0] / np.maximum(count, 1)
    apart = other[1] - one[1]
    return count, one[1] + apart * share, one[2] + other[2] + apart**2 * one[0] * share


def _pool(sums: _Sums, *dims: int) -> _Sums:
    """Merge all positions along dims into one."""
    count, mean, squares = sums
    total = count.sum(dims, keepdims=True)
    middle = (count * mean).sum(dims, keepdims=True) / np.maximum(total, 1)
    return total, middle, (squares + count * (mean - middle) ** 2).sum(dims, keepdims=True)


def over(apart: Numbers, units: Numbers) -> Numbers:
    """Return differences over their units: infinite where one is 0 and there is a difference."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(apart > 0, apart / units, 0.0)
