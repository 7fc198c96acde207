"""Gradients at the input, and means of gradients over random points: drawn until they are sure."""

import math
from collections.abc import Callable
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from modelyard.handlers.explain.attribute.attribution import (
    DEFAULT_TOLERANCE,
    Attribution,
    AttributionRequest,
    Tensors,
    chunks,
    gradients,
    product,
    recording,
    stopwatch,
)
from modelyard.handlers.explain.attribute.method import Method

DEFAULT_NOISE = 0.15
"""Share of a picture's range, as in the paper on SmoothGrad."""


FIRST_SAMPLES = 50
MAX_SAMPLES = 200
"""Number of draws that end it where nobody said one: a pass each."""

Draw = Callable[[], tuple[Tensors, Tensors]]
"""Gives a point (1, *S) per input, and what its gradient is multiplied by."""


def saliency(request: AttributionRequest) -> Attribution:
    """Return the size of the gradient at the input.

    Source: Simonyan et al. 2013, section 3, https://arxiv.org/abs/1312.6034
    """
    return _at_inputs(request, lambda slope, _: slope.abs())


def input_x_gradient(request: AttributionRequest) -> Attribution:
    """Return the gradient at the input times the input.

    Source: Shrikumar et al. 2016, https://arxiv.org/abs/1605.01713
    """
    return _at_inputs(request, product)


class Draws(TypedDict, total=False):
    """How many points are drawn."""

    n_samples: int | None
    """Points; without it as many as `tolerance` needs, `max_samples` at most."""
    tolerance: float
    """The largest error."""
    max_samples: int
    """Where drawing ends."""
    budget_ms: int | None
    """Budget as in `stopwatch`; the first draws are always made."""


def smoothgrad(
    request: AttributionRequest,
    *,
    noise: float = DEFAULT_NOISE,
    seed: int = 0,
    **draws: Unpack[Draws],
) -> Attribution:
    """Return the mean of the gradients at noisy copies of the input.

    Args:
        request: request of one explanation.
        noise: standard deviation of the normal noise, as a share of the request's scales.
        seed: seed of the noise.
        draws: how many copies.

    Source: Smilkov et al. 2017, https://arxiv.org/abs/1706.03825
    """
    noisy = _Noise(request, noise, seed)
    ones = tuple(map(torch.ones_like, request.inputs))
    return mean_gradients(request, lambda: (noisy.copies(), ones), **draws)


def gradient_shap(
    request: AttributionRequest, *, noise: float = 0.0, seed: int = 0, **draws: Unpack[Draws]
) -> Attribution:
    """Return expected gradients: random points between input and baselines drawn from the set.

    Args:
        request: request of one explanation; its baseline set is drawn from.
        noise: standard deviation of normal noise on the input, as a share of its scales.
        seed: seed of the draws.
        draws: how many points.

    Source: Erion et al. 2019, https://arxiv.org/abs/1906.10670
    """
    noisy = _Noise(request, noise, seed)
    (baselines,) = request.baseline_sets

    def draw() -> tuple[Tensors, Tensors]:
        at = int(torch.randint(len(baselines[0]), (), generator=noisy.random))
        share = float(torch.rand((), generator=noisy.random))
        starts = [each[at : at + 1].detach() for each in baselines]
        ways = tuple(end - start for end, start in zip(noisy.copies(), starts, strict=True))
        return tuple(start + share * way for start, way in zip(starts, ways, strict=True)), ways

    return mean_gradients(request, draw, **draws)


def mean_gradients(
    request: AttributionRequest,
    draw: Draw,
    *,
    n_samples: int | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    max_samples: int = MAX_SAMPLES,
    budget_ms: int | None = None,
) -> Attribution:
    """Return the mean of the gradients at random points, with its standard errors.

    Points are drawn one by one, so that they do not depend on how many share a pass.

    Args:
        request: request of one explanation.
        draw: the next point.
        n_samples, tolerance, max_samples, budget_ms: as in `Draws`.
    """
    fits = stopwatch(budget_ms)
    mean = _Mean(request.inputs)
    first = wanted = n_samples or min(FIRST_SAMPLES, max_samples)
    while True:
        with recording():
            while (more := min(request.chunk_rows, wanted - mean.count)) > 0:
                if mean.count >= first and not fits(more / mean.count):
                    return mean.found()
                mean.add(_shares(request, draw, more))
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
        product(each, torch.cat(column))
        for each, column in zip(found, zip(*factors, strict=True), strict=True)
    )


class _Noise:
    """Copies of one explanation's inputs with normal noise, and what else follows from its seed."""

    def __init__(self, request: AttributionRequest, noise: float, seed: int) -> None:
        self.inputs = tuple(each.detach() for each in request.inputs)
        self.deviations = [noise * scale for scale in request.scales]
        self.is_silent = not any(bool(each.any()) for each in self.deviations)
        self.random = torch.Generator().manual_seed(seed)

    def copies(self) -> Tensors:
        """Draw the next."""
        if self.is_silent:
            return self.inputs
        return tuple(
            each + size * torch.randn(each.shape, generator=self.random, dtype=each.dtype).to(each)
            for each, size in zip(self.inputs, self.deviations, strict=True)
        )


def _at_inputs(
    request: AttributionRequest, share: Callable[[Tensor, Tensor], Tensor]
) -> Attribution:
    """Return what the gradient at the input, and the input, make of each value."""
    parts = []
    rows = torch.arange(len(request), device=request.device)
    with recording():
        for chunk in chunks(len(request), request.chunk_rows):
            request.between_chunks()
            points = tuple(each[chunk].detach().clone().requires_grad_() for each in request.inputs)
            slopes = gradients(request.forward, points, rows[chunk])
            parts.append(tuple(map(share, slopes, points)))
    found = tuple(
        torch.cat([each.detach() for each in column]) for column in zip(*parts, strict=True)
    )
    return Attribution(found, torch.ones(len(request), dtype=torch.int64, device=request.device))


DRAWS = ("n_samples", "seed", "tolerance", "max_samples", "budget_ms", "errors")
"""Options of what is drawn."""

SALIENCY = Method(saliency, multiplies=False, has_signs=False)
INPUT_X_GRADIENT = Method(input_x_gradient)
SMOOTHGRAD = Method(smoothgrad, (*DRAWS, "noise"), multiplies=False, is_random=True)
GRADIENT_SHAP = Method(
    gradient_shap,
    (*DRAWS, "noise"),
    uses_baseline=True,
    adds_up=True,
    is_random=True,
    takes_sets=True,
)
