"""What an artifact of lower precision loses, beside what the checkpoint's outputs vary by.

It is measured on ordinary values: the rows of samples that nothing was calibrated on, or what is
made up where there are none. An offset counts for nothing: of temperatures around 300 K that vary
by 2 K, an error of 1 K is half.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

MAX_LOSS = 0.01
"""Loss above which an artifact is named as outside, and not chosen by `--quantize auto`."""

# Share of a number's size below which it counts as constant: float32 rounds to a hundredth of it.
_CONSTANT = 1e-5
_MOST_PLACES = 1 << 16
_NEVER = 1e100
"""The difference of a number from what is not finite."""
_Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Loss:
    """What one output loses over some rows."""

    rows: int
    spread: float
    """Largest less smallest value of the checkpoint, at the place where that is most."""
    error: float
    """Root mean square of the differences, each over the spread of its place."""
    worst: float
    """Largest difference over the spread of its place."""
    r2: float | None
    """Share of the checkpoint's variance that is kept, a mean over the places; None without any."""
    top1_agreement: float | None
    """Share of rows whose largest value is at the same place; None without ranks."""

    @property
    def loss(self) -> float:
        """The larger of the share of other largest values and that of variance lost, up to 1."""
        lost = self.error if self.r2 is None else 1 - self.r2
        moved = 0.0 if self.top1_agreement is None else 1 - self.top1_agreement
        return min(1.0, max(lost, moved))

    def outside(self, most: float = MAX_LOSS) -> str:
        """Return what is lost, where that is more than `most`; else nothing."""
        lost = []
        if self.top1_agreement is not None and 1 - self.top1_agreement > most:
            lost.append(f"another largest value in {1 - self.top1_agreement:.1%} of them")
        if self.r2 is None and self.error > most:
            lost.append(f"nothing varies, and errors are {self.error:.1%} of its size")
        if self.r2 is not None and 1 - self.r2 > most:
            lost.append(
                f"R2 {self.r2:.3f}, errors up to {self.worst:.1%} of a spread of {self.spread:.3g}"
            )
        return ", ".join(lost)


class LossLearner:
    """Learns what one output loses, case by case; of large outputs it keeps a few sums a place.

    A place is one of the last dim, of images a channel; all are one where their number changes.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[_Numbers, ...]] = []
        self._rows = self._ranked = self._same = 0

    def see(self, expected: Tensor, found: Tensor) -> None:
        """Learn from one case; the two have the same shape."""
        self._rows += expected.shape[0] if expected.ndim else 1
        if expected.ndim > 1 and expected.shape[-1] > 1 and expected.is_floating_point():
            same = expected.argmax(-1) == found.argmax(-1)
            self._ranked += same.numel()
            self._same += int(same.sum())
        if not expected.numel():
            return
        one, two = (_by_place(each) for each in (expected, found))
        with np.errstate(invalid="ignore"):
            apart = np.nan_to_num(np.abs(one - two), nan=_NEVER, posinf=_NEVER).clip(max=_NEVER)
        off = np.where(np.isfinite(one), apart, 0.0)
        one = np.where(np.isfinite(one), one, 0.0)
        middle = one.mean(0)
        self._seen.append(
            (
                np.full(one.shape[1], float(len(one))),
                middle,
                np.square(one - middle).sum(0),
                one.min(0),
                one.max(0),
                np.square(off).sum(0),
                off.max(0),
            )
        )

    def loss(self) -> Loss:
        """Return what is lost over all cases."""
        if len({len(each[0]) for each in self._seen}) > 1:
            # Of places that come and go, all are one.
            self._seen = [_joined(zip(*(part[:, None] for part in each), strict=True))
                          for each in self._seen]  # fmt: skip
        number, _, squares, low, high, off, worst = _joined(self._seen)
        spread = high - low
        size = np.maximum(np.abs(high), np.abs(low))
        varies = spread > _CONSTANT * size
        if not varies.any():
            varies, spread = np.ones_like(varies), np.maximum(size, 1e-30)
            squares = np.full_like(squares, math.nan)
        number, off, worst, spread, squares = (
            each[varies] for each in (number, off, worst, spread, squares)
        )
        r2 = float(np.mean(1 - off / squares))
        return Loss(
            rows=self._rows,
            spread=float(spread.max()),
            error=float(np.sqrt(np.mean(off / number / np.square(spread)))),
            worst=float(np.max(worst / spread)),
            r2=r2 if math.isfinite(r2) else None,
            top1_agreement=self._same / self._ranked if self._ranked else None,
        )


def _by_place(tensor: Tensor) -> _Numbers:
    values = tensor.detach().double()
    if values.ndim > 3:
        values = values.movedim(1, -1)
    places = values.shape[-1] if values.ndim > 1 and values.shape[-1] <= _MOST_PLACES else 1
    return values.reshape(-1, places).numpy()


def _joined(seen: Iterable[Sequence[_Numbers]]) -> tuple[_Numbers, ...]:
    """Return the sums of several parts as those of one, place by place."""
    count, middle, squares, low, high, off, worst = map(np.stack, zip(*seen, strict=True))
    centre = (count * middle).sum(0) / count.sum(0)
    squares = squares.sum(0) + (count * np.square(middle - centre)).sum(0)
    return count.sum(0), centre, squares, low.min(0), high.max(0), off.sum(0), worst.max(0)
