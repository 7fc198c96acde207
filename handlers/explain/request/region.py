"""A part of an output: where a class wins, a span of a line, a box of a picture, or a mask."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelyard.handlers.body import parse_strictly
from modelyard.handlers.errors import BadInput
from modelyard.handlers.tasks.pictures import MAX_PIXELS

_EXPECTED = (
    "expected predicted, a span START,END, a box LEFT,TOP,RIGHT,BOTTOM, or a mask "
    '{"size": [HEIGHT, WIDTH], "counts": […]} as a segmentation answers'
)


@dataclass(frozen=True)
class Region:
    """What one request means by `region`; ends lie outside."""

    text: str
    """As it was asked for."""
    box: tuple[int, ...] = ()
    """(start, end) or (left, top, right, bottom)."""
    size: tuple[int, int] = (0, 0)
    """(height, width) of the mask, which `counts` is of."""
    counts: tuple[int, ...] = ()
    """Run lengths, column by column, outside first."""

    @property
    def is_predicted(self) -> bool:
        """Whether it is wherever the class itself is predicted."""
        return not self.box and not self.counts

    def inside(self, sizes: tuple[int, ...], extent: tuple[int, ...] | None = None) -> Tensor:
        """Return which places of an output are inside: bool of `sizes`.

        A place is where its centre is.

        Args:
            sizes: (L,) or (h, w) of the output.
            extent: what the box is measured in, the sizes themselves without it.

        Raises:
            BadInput: it is a region of something else, or none of the places is inside.
        """
        extent = extent or sizes
        if self.counts:
            found = self._sampled(sizes)
        else:
            if len(self.box) != 2 * len(sizes):
                raise BadInput(
                    f"region is {self.text}; expected "
                    + ("START,END" if len(sizes) == 1 else "LEFT,TOP,RIGHT,BOTTOM")
                    + f" or predicted, as the output has the sizes {list(sizes)}"
                )
            starts, ends = (self.box[:1], self.box[1:]) if len(sizes) == 1 else (
                self.box[1::-1], self.box[:1:-1])  # fmt: skip
            found = torch.ones(sizes, dtype=torch.bool)
            for dim, (size, whole, start, end) in enumerate(
                zip(sizes, extent, starts, ends, strict=True)
            ):
                centres = (torch.arange(size) + 0.5) * whole / size
                is_in = (centres >= start) & (centres < end)
                found &= is_in.view(-1, *[1] * (len(sizes) - dim - 1))
        if not found.any():
            raise BadInput(
                f"region is {self.text}; no place of the output has its centre there: expected one "
                f"within {list(extent)}"
            )
        return found

    def _sampled(self, sizes: tuple[int, ...]) -> Tensor:
        if len(sizes) != 2:
            raise BadInput(f"region is a mask; expected a span: the output has {list(sizes)}")
        height, width = self.size
        runs = np.arange(len(self.counts)) % 2 == 1
        columns = np.repeat(runs, self.counts).reshape(width, height)
        rows, cols = (
            ((np.arange(size) + 0.5) * whole / size).astype(int)
            for size, whole in zip(sizes, self.size, strict=True)
        )
        return torch.from_numpy(columns.T[np.ix_(rows, cols)].copy())


def parse_region(name: str, text: str) -> Region:
    """Read `region` of a request.

    Raises:
        BadInput: it is none, or its box is empty.
    """
    if text == "predicted":
        return Region(text)
    if text.lstrip()[:1] == "{":
        return _mask(name, text)
    parts = text.split(",")
    if len(parts) not in (2, 4) or not all(
        part.isascii() and part.isdigit() and len(part) <= 9 for part in parts
    ):
        raise BadInput(f'{name} is "{text}"; {_EXPECTED}')
    box = tuple(map(int, parts))
    half = len(box) // 2
    if any(start >= end for start, end in zip(box[:half], box[half:], strict=True)):
        raise BadInput(f'{name} is "{text}"; expected each end after its start')
    return Region(text, box)


def _mask(name: str, text: str) -> Region:
    try:
        value = parse_strictly(text, name)
    except ValueError as error:
        raise BadInput(f"{name} is not JSON: {error}") from error
    size, counts = _entries(value)
    if size is None or counts is None:
        raise BadInput(f"{name} is {json.dumps(value)[:100]}; {_EXPECTED}")
    if sum(counts) != size[0] * size[1] or sum(counts) > MAX_PIXELS:
        raise BadInput(
            f"{name}: counts add up to {sum(counts)}; expected {size[0]} × {size[1]}, "
            f"{MAX_PIXELS} at most"
        )
    return Region(f"a mask of {size[0]} × {size[1]}", size=(size[0], size[1]), counts=counts)


def _entries(value: Any) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    def whole(numbers: Any) -> tuple[int, ...] | None:
        is_list = isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)
        return tuple(numbers) if is_list and numbers else None

    if not isinstance(value, Mapping) or set(value) != {"size", "counts"}:
        return None, None
    size = whole(value["size"])
    return (size if size and len(size) == 2 else None), whole(value["counts"])
