"""Means over random points and their standard errors: draws until these are small enough."""

import math
from collections.abc import Callable

import torch

from modelyard.handlers.explain.attribution import (
    Attribution,
    AttributionRequest,
    Tensors,
    gradients,
    recording,
)

FIRST_SAMPLES = 50
MAX_SAMPLES = 200
"""Where draws end that nobody said a number for: a pass each."""

Draw = Callable[[], tuple[Tensors, Tensors]]
"""Gives a point (1, *S) per input, and what its gradient is multiplied by."""


def mean_gradients(
    request: AttributionRequest,
    draw: Draw,
    n_samples: int | None,
    tolerance: float,
    max_samples: int,
) -> Attribution:
    """Return the mean of the gradients at random points, with its standard errors.

    Points are drawn one by one, so that they do not depend on how many share a pass.

    Args:
        request: of one explanation.
        draw: the next point.
        n_samples: points; without it as many as `tolerance` needs, `max_samples` at most.
        tolerance: the largest error.
        max_samples: where drawing ends.
    """
    mean = _Mean(request.inputs)
    wanted = n_samples or min(FIRST_SAMPLES, max_samples)
    while True:
        with recording():
            while mean.count < wanted:
                mean.add(_shares(request, draw, min(request.chunk_rows, wanted - mean.count)))
        found = mean.found()
        error = None if found.error is None else float(found.error)
        if n_samples or wanted >= max_samples or (error is not None and error <= tolerance):
            return found
        wanted = enough(wanted, error, tolerance, max_samples)


def enough(drawn: int, error: float | None, tolerance: float, most: int) -> int:
    """Return how many draws would meet a tolerance, as `drawn` of them have an error.

    Errors fall with the root of the draws. A tenth more is drawn, as the error is itself an
    estimate; twice as many where it is not known.
    """
    if error is None or not math.isfinite(error):
        return min(most, 2 * drawn)
    share = min(1.1 * (error / tolerance) ** 2, most / drawn)
    return min(most, max(drawn + 2, math.ceil(drawn * share)))


class _Mean:
    """The mean of values that come a few at a time, and how far they lie apart (Chan 1979)."""

    def __init__(self, like: Tensors) -> None:
        self.count = 0
        self.means = tuple(torch.zeros_like(each, dtype=torch.float64) for each in like)
        self.squares = tuple(map(torch.zeros_like, self.means))
        self.dtypes = tuple(torch.promote_types(each.dtype, torch.float32) for each in like)

    def add(self, values: Tensors) -> None:
        """Take some (R, *S) per input in."""
        new = len(values[0])
        whole = self.count + new
        for mean, square, each in zip(self.means, self.squares, values, strict=True):
            own = each.mean(0, keepdim=True, dtype=torch.float64)
            apart = own - mean
            square += (each - own).square().sum(0, keepdim=True)
            square += apart.square() * (self.count * new / whole)
            mean += apart * (new / whole)
        self.count = whole

    def found(self) -> Attribution:
        """Return the mean; of fewer than two values no error is known."""
        count = self.count
        errors = None
        if count > 1:
            errors = tuple(
                (each / (count * (count - 1))).sqrt().to(dtype)
                for each, dtype in zip(self.squares, self.dtypes, strict=True)
            )
        return Attribution(
            tuple(each.to(dtype) for each, dtype in zip(self.means, self.dtypes, strict=True)),
            torch.tensor([count], device=self.means[0].device),
            errors,
        )


def _shares(request: AttributionRequest, draw: Draw, count: int) -> Tensors:
    """Return what each of some new points contributes: (count, *S) per input."""
    request.between_chunks()
    points, factors = zip(*(draw() for _ in range(count)), strict=True)
    rows = torch.zeros(count, dtype=torch.int64, device=request.device)
    at = tuple(torch.cat(column).requires_grad_() for column in zip(*points, strict=True))
    found = gradients(request.forward, at, rows)
    return tuple(
        each * torch.cat(column)
        for each, column in zip(found, zip(*factors, strict=True), strict=True)
    )
