"""What the points of one path say together: how sharp it bends, and what hides between them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SIGMAS = 2.4
"""The error of a bend is even within what its place leaves open; so many deviations are stated."""

MOST_GAPS = 16
"""More gaps are not mended one by one: the whole path is due for points."""

_SMOOTH = 0.55
TAIL, _GROWTH = 1e-4, 1e6
_LOW, _HIGH = (torch.linspace(start, start + 0.2, 5, dtype=torch.float64) for start in (0.5, 0.8))
_LEAST_POINTS = 8


class Mended(NamedTuple):
    """A gap between two points after further ones were put there."""

    rest: float
    """What the output changed by there, less what the gradients account for."""
    hidden: float
    """As of a `Verdict`, in this gap, like `jumps`."""
    jumps: float


@dataclass(frozen=True)
class Verdict:
    """What the points of a path say together."""

    sharpness: float
    """1 where gradients jump between points; the less, the more of their bends are resolved."""
    path_delta: float
    """The largest gap between the output along the path and the sum up to there, as a share of how
    far the output goes from the baseline's."""
    hidden: float
    """What the output changes by between points beyond what the gradients there allow."""
    jumps: float
    """The same at places too narrow for further points: no slope accounts for it."""
    gaps: tuple[int, ...]
    """Numbers of the gaps that further points belong in; the first is before the first midpoint."""


class Trace(NamedTuple):
    """The points of one path in their order: one just inside each end, evenly spaced midpoints."""

    places: Tensor
    """(P,) between 0 and 1."""
    outputs: Tensor
    """(P,)"""
    slopes: Tensor
    """(P,) of the output along the path: the sum of all shares."""
    shares: Tensor
    """(P, K): gradient times way of each value, or sums of many of these with random signs."""

    def judge(
        self, ends: tuple[float, float], size: float, rounding: float, limit: float,
        mended: Mapping[int, Mended],
    ) -> Verdict:  # fmt: skip
        """Look for what the sum of the gradients does not show.

        Args:
            ends: the outputs at baseline and input.
            size: norm of the attributions.
            rounding: what is no more than this is rounding.
            limit: what matters of a single gap.
            mended: gaps that have further points.
        """
        count = len(self.places) - 2
        lengths = torch.full((count + 1,), 1 / count, dtype=torch.float64)
        lengths[0] = lengths[-1] = 0.5 / count
        start, end = (torch.tensor([each], dtype=torch.float64) for each in ends)
        outputs = torch.cat([start, self.outputs[1:-1], end])
        inner = self.slopes[1:-1]
        sides = torch.cat([inner[:1], inner, inner[-1:]])
        rest = outputs.diff() - lengths * (sides[1:] + sides[:-1]) / 2
        # Between two points of a monotone slope the sum is off by half of its change at most.
        bends = self.slopes.diff().abs()
        near = torch.nn.functional.pad(bends, (1, 1)).unfold(0, 3, 1).amax(1)
        hidden = (rest.abs() - lengths * near - rounding).clamp(0)
        for gap, each in mended.items():
            rest[gap], hidden[gap] = each.rest, each.hidden
        apart = float(rest.cumsum(0).abs().max())
        reach = float((outputs - start).abs().max())
        jumps = self.shares.diff(dim=0)
        squares = self._bends(jumps)
        whole = float(squares.sum())
        sharpness = self._sharpness(jumps[1:-1], whole / 1.5)
        found = {*(hidden > limit).nonzero().flatten().tolist(), *self._tails(size)}
        if sharpness == 1 and len(squares) > 2:
            deviations = SIGMAS / count * (squares / 18).sqrt()
            peaks = torch.nn.functional.pad(deviations, (1, 1)).unfold(0, 3, 1).amax(1)
            sharp = (deviations > limit) & (deviations > 0.6 * peaks)
            gaps = {1 + gap for gap in sharp.nonzero().flatten().tolist()}
            found |= gaps - {1, count - 1}
            # At the ends only what is steeper there: waves that all midpoints miss alike are not.
            sizes = self.shares.norm(dim=1).tolist()
            for gap, beside, at_end, before in ((0, 1, 0, 1), (count, count - 1, -1, -2)):
                if beside in gaps and sizes[at_end] > 2 * sizes[before]:
                    found.add(gap)
        return Verdict(
            sharpness,
            apart / reach if apart > rounding else 0.0,
            float(hidden.sum()) + (size if self._tails(size) - set(mended) else 0.0),
            sum(each.jumps for each in mended.values()),
            tuple(sorted(found - set(mended))),
        )

    def _bends(self, jumps: Tensor) -> Tensor:
        """Return the squares of what of each inner jump its neighbours do not foretell."""
        steps = self.places.diff()[:, None]
        slopes = jumps / steps
        bends = slopes[1:-1] - (slopes[:-2] + slopes[2:]) / 2
        return (bends * steps[1:-1]).square().sum(1)

    def _sharpness(self, jumps: Tensor, squares: float) -> float:
        """Return 1 where jumps are like noise, less where fast waves have less of them.

        What the midpoint rule misses are waves of one period a step. The fastest that can be seen
        take two; where these are weaker than slower ones, those that are missed are weaker yet.
        """
        if len(jumps) < _LEAST_POINTS or not squares > 0:
            return 1.0
        # Mirrored at both ends; fourth differences let smooth parts of large size leak nowhere.
        padded = torch.cat([jumps[:2].flip(0), jumps, jumps[-2:].flip(0)])
        filtered = padded.diff(n=4, dim=0)
        low, high = (_power(filtered, band) for band in (_LOW, _HIGH))
        ratio = math.sqrt(high / low) if low > 0 else 1.0
        if not ratio < _SMOOTH:
            return 1.0
        return (ratio / _SMOOTH) ** 2 * min(1.0, math.sqrt(high / squares))

    def _tails(self, size: float) -> set[int]:
        """Return the gaps beside a share that is next to nothing, yet far above both neighbours'.

        That is how the tail of a cliff looks which lies between two points.
        """
        shares = self.shares.abs() / len(self.shares)
        middle, beside = shares[1:-1], torch.maximum(shares[:-2], shares[2:])
        peaks = ((middle > 0) & (middle < TAIL * size) & (middle > _GROWTH * beside)).any(1)
        points = peaks.nonzero().flatten().tolist()
        return {gap for point in points for gap in (point, point + 1)}


def _power(values: Tensor, band: Tensor) -> float:
    """Return the mean power of waves of these frequencies, with what fourth differences lose."""
    at = torch.arange(len(values), dtype=torch.float64)
    waves = torch.exp(1j * torch.pi * band[:, None] * at) @ values.to(torch.complex128)
    gains = (2 * (torch.pi * band / 2).sin())[:, None] ** 4
    return float((waves / gains).abs().square().sum()) / len(band)
