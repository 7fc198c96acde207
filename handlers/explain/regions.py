"""Parts of a picture: nine that have names, and regions of one colour, whose pixels count as one.

Single pixels of a photograph are speckle; a person reads which part of it spoke for the answer.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

TINY = 64
"""Up to this side a picture's pixels are seen one by one; a larger one is a photograph."""

COUNT = 100
"""About how many regions of one colour a photograph has."""

MOST_WINDOWS = 1000
"""Windows of which each is a region of its own; of more, regions of one colour are taken."""

STRONGEST = 3
"""Regions that are named."""

_SIDE = 128
"""Longer side at which regions are looked for, in 0.1 s whatever the picture's size."""

_COMPACT, _ROUNDS = 20.0, 10
"""Difference of colours that counts as much as the distance between two regions; and how often
regions are moved to where their pixels are."""

_ALONE = 2.0
"""Standard deviations that pixels which err alone may be off by."""

_ROW_NAMES = ("top", "middle", "bottom")
_COLUMN_NAMES = ("left", "centre", "right")
NINTHS = tuple(f"{row} {column}" for row in _ROW_NAMES for column in _COLUMN_NAMES)
"""Names of the nine places of a picture, row by row."""


def ninths(attributions: Tensor) -> dict[str, float]:
    """Return the sum of |attributions| (C, H, W) in each ninth of a picture."""
    bands = attributions.abs().double().sum(0).tensor_split(3)
    cells = (cell for band in bands for cell in band.tensor_split(3, 1))
    return dict(zip(NINTHS, (float(cell.sum()) for cell in cells), strict=True))


@dataclass(frozen=True)
class Regions:
    """Regions of a picture, and what each of them has of one explanation."""

    kind: str
    """slic: parts of one colour; windows: what the method replaced at once."""
    labels: np.ndarray
    """(H, W) int64: the number of the region that each pixel is of, from 0."""
    values: np.ndarray
    """(R,) float64, in units of the output: the sum of a region's attributions."""
    errors: np.ndarray | None
    """(R,) float64: how far off each may be; None where nobody knows, as of draws, whose errors are
    known of single pixels alone and not how they go together."""

    @cached_property
    def sizes(self) -> np.ndarray:
        """(R,): pixels of each."""
        return np.bincount(self.labels.ravel())

    @cached_property
    def centres(self) -> list[tuple[float, float]]:
        """Row and column of the middle of each."""
        rows, columns = (
            np.bincount(self.labels.ravel(), each.ravel()) / self.sizes
            for each in np.indices(self.labels.shape)
        )
        return list(zip(rows.tolist(), columns.tolist(), strict=True))

    @property
    def places(self) -> list[str]:
        """The ninth of the picture in which each has its centre."""
        height, width = self.labels.shape
        return [NINTHS[int(3 * y / height) * 3 + int(3 * x / width)] for y, x in self.centres]

    @property
    def strongest(self) -> list[int]:
        """Numbers of those with the largest sizes |value|, the largest first."""
        order = np.argsort(-np.abs(self.values), kind="stable")[:STRONGEST]
        return [int(at) for at in order if self.values[at]]

    def brief(self) -> dict[str, Any]:
        """Return what people read of them."""
        whole, places = float(np.abs(self.values).sum()), self.places
        named = [
            {
                "region": at,
                "place": places[at],
                "value": float(self.values[at]),
                "error": None if self.errors is None else float(self.errors[at]),
                "share": abs(float(self.values[at])) / whole,
            }
            for at in self.strongest
        ]
        return {"kind": self.kind, "count": len(self.values), "strongest": named}

    def as_json(self) -> dict[str, Any]:
        """Return the field `regions` of an answer; `counts` are run lengths, column by column."""
        columns = self.labels.T.ravel()
        ends = np.flatnonzero(np.diff(columns)) + 1
        return {
            **self.brief(),
            "values": _digits(self.values),
            "errors": None if self.errors is None else _digits(self.errors),
            "places": self.places,
            "size": list(self.labels.shape),
            "labels": columns[[0, *ends]].tolist(),
            "counts": np.diff([0, *ends, len(columns)]).tolist(),
        }


def summed_up(
    picture: Image.Image,
    values: np.ndarray,
    weight: float | None,
    *,
    errors: np.ndarray | None = None,
    differences: np.ndarray | None = None,
    gap: float = 0.0,
    in_windows: bool = False,
) -> Regions:
    """Return the regions of a picture, and what each has of an explanation of it.

    Args:
        picture: picture of the size of the values.
        values: (H, W) what each pixel has.
        weight: what a pixel's value counts in the sum; None where each has what belongs to its
            whole window, so that a region has their mean.
        errors: (H, W) how far off each value may be.
        differences: (H, W) as of an `Attribution`.
        gap: how far the sum may be off besides, of which the errors hold each value's part.
        in_windows: whether the method replaced windows, in which values are alike.
    """
    windows = _windows_of(values) if in_windows else None
    labels = slic(picture) if windows is None else windows
    counts = np.bincount(labels.ravel())

    def of_regions(each: np.ndarray) -> np.ndarray:
        sums = np.bincount(labels.ravel(), each.ravel().astype(np.float64))
        return sums / counts if weight is None else sums * weight

    off = None
    if errors is not None and windows is not None:
        off = of_regions(errors)  # alike, as the values are
    elif errors is not None and differences is not None:
        # Errors of one sign add up as the differences show; what cancelled in these by chance is
        # put in as if pixels erred alone, twice. What they add up to is more than enough.
        alone = of_regions(errors**2 * (weight or 1)) ** 0.5
        sizes = of_regions(np.abs(values))
        off = np.hypot(of_regions(differences), _ALONE * alone)
        off = np.minimum(off + gap * sizes / (sizes.sum() or 1.0), of_regions(errors))
    return Regions("slic" if windows is None else "windows", labels, of_regions(values), off)


def _digits(values: np.ndarray) -> list[float]:
    """Return numbers with the digits of float32, which is what they are sums of."""
    return [float(f"{each:.7g}") for each in values.tolist()]


def _windows_of(values: np.ndarray) -> np.ndarray | None:
    """Return the cells (H, W) between whose rows and columns a map changes; None of too many."""
    rows, columns = (
        np.concatenate(([0], (np.diff(values, axis=axis) != 0).any(1 - axis).cumsum()))
        for axis in (0, 1)
    )
    count = (int(rows[-1]) + 1) * (int(columns[-1]) + 1)
    if count > MOST_WINDOWS:
        return None
    return np.asarray(rows[:, None] * (columns[-1] + 1) + columns)


def slic(picture: Image.Image) -> np.ndarray:
    """Return regions of one colour (H, W), numbered from 0, each of them in one piece.

    Source: Achanta et al. 2012, section 3, https://doi.org/10.1109/TPAMI.2012.120
    """
    width, height = picture.size
    scale = min(1.0, _SIDE / max(picture.size))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    small = picture.convert("RGB").convert("LAB").resize(size, Image.Resampling.BOX)
    labels = _in_one_piece(_nearest_centres(np.asarray(small, np.float64)))
    rows = np.arange(height) * size[1] // height
    return labels[np.ix_(rows, np.arange(width) * size[0] // width)]


def _nearest_centres(colours: np.ndarray) -> np.ndarray:
    """Return for each pixel (H, W) which centre is nearest in colour and place.

    The centres begin on a grid, and only the nine around its cell are a pixel's.
    """
    height, width, _ = colours.shape
    step = (height * width / COUNT) ** 0.5
    across, down = (max(1, round(side / step)) for side in (width, height))
    y, x = (each.ravel() for each in np.indices((height, width)))
    row, column = y * down // height, x * across // width
    labels = row * across + column
    pixels = np.column_stack((colours.reshape(-1, 3) / _COMPACT, y / step, x / step))
    for _ in range(_ROUNDS):
        sizes = np.bincount(labels, minlength=across * down).clip(1)
        sums = [np.bincount(labels, each, len(sizes)) for each in pixels.T]
        centres = np.column_stack(sums) / sizes[:, None]
        least = np.full(len(labels), np.inf)
        for dy, dx in itertools.product((-1, 0, 1), repeat=2):
            near = (row + dy).clip(0, down - 1) * across + (column + dx).clip(0, across - 1)
            far = ((pixels - centres[near]) ** 2).sum(1)
            labels = np.where(far < least, near, labels)
            least = np.minimum(far, least)
    return np.asarray(labels.reshape(height, width))


def _in_one_piece(labels: np.ndarray) -> np.ndarray:
    """Leave the largest piece of each region; its other pieces become their neighbours'."""
    pieces = np.arange(labels.size).reshape(labels.shape)
    is_alike = _around(labels) == labels
    while True:
        least = np.minimum(pieces, np.where(is_alike, _around(pieces), labels.size).min(0))
        least = least.ravel()[least]  # as far as that piece has come
        if np.array_equal(least, pieces):
            break
        pieces = least
    order = np.argsort(np.bincount(pieces.ravel())[pieces.ravel()], kind="stable")
    largest = np.zeros(int(labels.max()) + 1, np.int64)
    largest[labels.ravel()[order]] = pieces.ravel()[order]
    found = np.where(pieces == largest[labels], labels, -1)
    while (found < 0).any():
        found = np.where(found < 0, _around(found).max(0), found)
    return np.unique(found, return_inverse=True)[1].reshape(labels.shape)


def _around(values: np.ndarray) -> np.ndarray:
    """Return each pixel's four neighbours (4, H, W); −1 beyond the edge."""
    padded = np.pad(values, 1, constant_values=-1)
    return np.stack((padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:]))
