"""How good an explanation is, measured at one input: captum's infidelity and sensitivity."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelyard.base.extras import how_to_install
from modelyard.handlers.errors import BadInput
from modelyard.handlers.explain.attribute.attribution import AttributionRequest, Tensors
from modelyard.handlers.explain.attribute.method import Measurement, Method, Result
from modelyard.plugins.tasks.methods.features import curves_of, ranked

SAMPLES = 10
NOISE = 0.1
"""Standard deviation of infidelity's noise, as a share of the input's range."""
RADIUS = 0.02
"""Radius of sensitivity's neighbourhood, as a share of the input's range."""


@dataclass(frozen=True)
class Quality:
    """Two numbers, smaller is better."""

    infidelity: float | None
    """Mean square of how far the attributions miss the output's change under noise, in squared
    units of the output. None where they are no shares of a change: without signs, of a layer's
    places, or where each value has what belongs to a whole window."""
    sensitivity: float
    """Largest change of the attributions in the neighbourhood, as a share of their norm."""


def quality(result: Result) -> Measurement:
    """Measure infidelity, sensitivity, and the curves of removal."""
    numbers = measure(
        result.request, result.attributions, result.method, result.settings, result.seed
    )
    curves = curves_of(result.request, *ranked(result))
    return Measurement({**vars(numbers), **curves.as_json()})


def measure(
    request: AttributionRequest,
    attributions: Tensors,
    method: Method,
    settings: Mapping[str, Any],
    seed: int,
) -> Quality:
    """Measure an explanation with `SAMPLES` draws; sensitivity explains again for each of them.

    Args:
        request: request of one explanation.
        attributions: (1, *S) per input.
        method: method that made them.
        settings: settings that it was called with, steps fixed.
        seed: seed of the draws.

    Raises:
        BadInput: inputs that cannot be varied by a little; or captum is not installed.

    Source: Yeh et al. 2019, https://arxiv.org/abs/1901.09392
    """
    try:
        from captum.metrics import infidelity, infidelity_perturb_func_decorator, sensitivity_max
    except ImportError as error:
        raise BadInput(
            f"quality=true: {how_to_install(error) or error} where the server runs, or leave it out"
        ) from error
    if not all(each.is_floating_point() for each in request.inputs):
        raise BadInput("quality does not apply: the explained inputs are not real numbers")
    ranges = tuple(each if each.any() else torch.ones_like(each) for each in request.scales)

    @infidelity_perturb_func_decorator(method.multiplies)  # type: ignore[untyped-decorator]
    def near(inputs: Tensor | Tensors, baselines: object = None) -> Tensors:
        pairs = zip(_as_tuple(inputs), ranges, strict=True)
        return tuple(each + NOISE * size * torch.randn_like(each) for each, size in pairs)

    def forward(*points: Tensor) -> Tensor:
        request.between_chunks()
        rows = torch.zeros(len(points[0]), dtype=torch.int64, device=request.device)
        return request.forward(points, rows)

    def explain(inputs: Tensor | Tensors) -> Tensors:
        moved = replace(request, inputs=_as_tuple(inputs))
        return method.run(moved, **settings).attributions

    def around(inputs: Tensor | Tensors, radius: float) -> Tensors:
        pairs = zip(_as_tuple(inputs), ranges, strict=True)
        return tuple(each + radius * size * (2 * torch.rand_like(each) - 1) for each, size in pairs)

    is_of_values = not method.looks_at_layer and (
        not method.repeats or all(side == 1 for shape in settings["shapes"] for side in shape)
    )
    first = None
    with seeded(seed), torch.no_grad():
        if method.has_signs and is_of_values:
            first = infidelity(
                forward,
                near,
                request.inputs,
                attributions,
                baselines=request.baselines if method.multiplies else None,
                n_perturb_samples=SAMPLES,
                max_examples_per_batch=min(request.chunk_rows, SAMPLES),
            )
        second = sensitivity_max(
            explain,
            request.inputs,
            around,
            perturb_radius=RADIUS,
            n_perturb_samples=SAMPLES,
            max_examples_per_batch=1,
        )
    return Quality(None if first is None else float(first), float(second))


def _as_tuple(inputs: Tensor | Tensors) -> Tensors:
    """Undo captum's habit of handing a tuple of one over as its tensor."""
    return (inputs,) if isinstance(inputs, Tensor) else inputs


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let the random numbers of torch and numpy follow from `seed` inside a `with`."""
    state = np.random.get_state()  # captum draws from both
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(state)
