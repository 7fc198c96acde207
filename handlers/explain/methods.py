"""The attribution methods that can be asked for, and which options each takes.

Those that captum has are captum's, https://captum.ai; its rules of quadrature are not offered, as
its trapezoid's weights sum to 1 − 1/n.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from modelyard.handlers.errors import BadInput
from modelyard.handlers.explain.attribution import (
    Attribution,
    AttributionRequest,
    Tensors,
    chunks,
    integrated_gradients,
    recording,
)

MAX_EVALUATIONS = 20_000
"""Points at which a method without gradients may ask the model, per explanation."""

Shapes = tuple[tuple[int, ...], ...]

DEFAULT_SAMPLES = 50
DEFAULT_NOISE = 0.15
"""Share of an input's range, as in the paper on SmoothGrad."""


@dataclass(frozen=True)
class Method:
    """How to answer a request, and what may be asked with it."""

    run: Callable[..., Attribution]
    """Called with the request and those of `options` that are given."""
    options: tuple[str, ...] = ()
    """Fields of `ExplainOptions` that it takes besides those that all methods take."""
    needs_gradients: bool = True
    uses_baseline: bool = False
    multiplies: bool = True
    """Attributions are shares of the output, not slopes."""
    has_signs: bool = True
    """A negative attribution speaks against the target."""
    adds_up: bool = False
    """Promises that attributions sum to f(input) − f(baseline), as far as steps or draws allow."""
    needs_windows: bool = False
    """Replaces windows of the input: it is given their `shapes`, one per input."""
    is_random: bool = False
    """Runs for each request by itself, so that its seed alone decides over the answer."""


def saliency(request: AttributionRequest) -> Attribution:
    """Return the size of the gradient at the input.

    Source: Simonyan et al. 2013, section 3, https://arxiv.org/abs/1312.6034
    """
    from captum.attr import Saliency

    return _at_inputs(request, Saliency)


def input_x_gradient(request: AttributionRequest) -> Attribution:
    """Return the gradient at the input times the input.

    Source: Shrikumar et al. 2016, https://arxiv.org/abs/1605.01713
    """
    from captum.attr import InputXGradient

    return _at_inputs(request, InputXGradient)


def smoothgrad(
    request: AttributionRequest,
    *,
    n_samples: int = DEFAULT_SAMPLES,
    noise: float = DEFAULT_NOISE,
    seed: int = 0,
) -> Attribution:
    """Return the mean of the gradients at noisy copies of the input.

    Args:
        request: of one explanation.
        n_samples: copies.
        noise: standard deviation of the normal noise, as a share of the input's range.
        seed: of the noise.

    Source: Smilkov et al. 2017, https://arxiv.org/abs/1706.03825
    """
    from captum.attr import NoiseTunnel, Saliency

    ranges = tuple(float(each.max() - each.min()) for each in request.inputs)
    with recording(), seeded(seed):
        found = NoiseTunnel(Saliency(_forward(request))).attribute(
            _copies(request.inputs),
            nt_type="smoothgrad",
            nt_samples=n_samples,
            nt_samples_batch_size=min(n_samples, request.chunk_rows),
            stdevs=tuple(max(noise * each, 1e-12) for each in ranges),
            abs=False,
            additional_forward_args=_rows(request),
        )
    return _found(request, found, n_samples)


def gradient_shap(
    request: AttributionRequest,
    *,
    n_samples: int = DEFAULT_SAMPLES,
    noise: float = 0.0,
    seed: int = 0,
) -> Attribution:
    """Return expected gradients: random points between input and baselines drawn from the set.

    Args:
        request: of one explanation; its baseline set is drawn from.
        n_samples: points.
        noise: standard deviation of normal noise on the input, as a share of its range.
        seed: of the draws.

    Source: Erion et al. 2019, https://arxiv.org/abs/1906.10670
    """
    from captum.attr import GradientShap

    (baselines,) = request.baseline_sets
    ranges = tuple(float(each.max() - each.min()) for each in request.inputs)
    totals = tuple(torch.zeros_like(each) for each in request.inputs)
    with recording(), seeded(seed):
        explainer = GradientShap(_forward(request))
        # It takes all points in one pass, whatever their number; so it is asked for few at a time.
        for chunk in chunks(n_samples, request.chunk_rows):
            count = min(chunk.stop, n_samples) - chunk.start
            found = explainer.attribute(
                _copies(request.inputs),
                _copies(baselines),
                n_samples=count,
                stdevs=tuple(noise * each for each in ranges),
                additional_forward_args=_rows(request),
            )
            for total, each in zip(totals, found, strict=True):
                total += each.detach() * (count / n_samples)
    return _found(request, totals, n_samples)


def occlusion(
    request: AttributionRequest, *, shapes: Shapes, stride: int | None = None
) -> Attribution:
    """Return by how much the output falls when a window is replaced by the baseline.

    Args:
        shapes: of the window in each input, one size for each dimension of a row.
        stride: by which the window moves where it does not fill the dimension; half a window
            without it. A value's attribution is the mean over the windows that held it.

    Source: Zeiler and Fergus 2013, section 4.2, https://arxiv.org/abs/1311.2901
    """
    from captum.attr import Occlusion

    sizes = tuple(each.shape[1:] for each in request.inputs)
    strides = tuple(_strides(*pair, stride) for pair in zip(shapes, sizes, strict=True))
    count = sum(map(_places, sizes, shapes, strides))
    _check_evaluations(count)
    return _without_gradients(
        request, Occlusion, count, sliding_window_shapes=shapes, strides=strides
    )


def feature_ablation(request: AttributionRequest, *, shapes: Shapes) -> Attribution:
    """Return by how much the output falls when a feature is replaced by the baseline.

    Args:
        shapes: of the windows whose values together are a feature, as in `occlusion`; they lie
            side by side.
    """
    from captum.attr import FeatureAblation

    masks, count = _features(request.inputs, shapes)
    return _without_gradients(request, FeatureAblation, count, feature_mask=masks)


def kernel_shap(
    request: AttributionRequest,
    *,
    shapes: Shapes,
    n_samples: int | None = None,
    seed: int = 0,
) -> Attribution:
    """Estimate Shapley values by weighted regression on random sets of features.

    Args:
        request: of one explanation.
        shapes: as in `feature_ablation`.
        n_samples: sets; 4 for each feature and 200 more without it.
        seed: of the draws.

    Source: Lundberg and Lee 2017, theorem 2, https://arxiv.org/abs/1705.07874
    """
    from captum.attr import KernelShap

    masks, features = _features(request.inputs, shapes)
    count = n_samples or 4 * features + 200
    if count < features + 2:
        raise BadInput(
            f"n_samples is {count}; expected at least {features + 2} for {features} features"
        )
    _check_evaluations(count)

    def explainer(forward: Callable[..., Tensor]) -> Any:
        made = KernelShap(forward)
        # captum's own regression needs scikit-learn, of which we use nothing else.
        made.interpretable_model = _LeastSquares()
        return made

    with seeded(seed):
        return _without_gradients(request, explainer, count, feature_mask=masks, n_samples=count)


_SMOOTH = ("n_samples", "noise", "seed")
_STEPS = ("n_steps", "tolerance", "max_steps")

METHODS: Mapping[str, Method] = {
    "integrated_gradients": Method(integrated_gradients, _STEPS, uses_baseline=True, adds_up=True),
    "layer_integrated_gradients": Method(
        integrated_gradients, (*_STEPS, "layer"), uses_baseline=True, adds_up=True
    ),
    "saliency": Method(saliency, multiplies=False, has_signs=False),
    "input_x_gradient": Method(input_x_gradient),
    "smoothgrad": Method(smoothgrad, _SMOOTH, multiplies=False, is_random=True),
    "gradient_shap": Method(
        gradient_shap, _SMOOTH, uses_baseline=True, adds_up=True, is_random=True
    ),
    "occlusion": Method(
        occlusion,
        ("window", "stride"),
        needs_gradients=False,
        uses_baseline=True,
        needs_windows=True,
    ),
    "feature_ablation": Method(
        feature_ablation, ("window",), needs_gradients=False, uses_baseline=True, needs_windows=True
    ),
    "kernel_shap": Method(
        kernel_shap,
        ("window", "n_samples", "seed"),
        needs_gradients=False,
        uses_baseline=True,
        adds_up=True,
        needs_windows=True,
        is_random=True,
    ),
}


def _at_inputs(request: AttributionRequest, kind: Callable[..., Any]) -> Attribution:
    """Run a method that looks at the input alone, a chunk of explanations at a time."""
    parts = []
    with recording():
        explainer = kind(_forward(request))
        for chunk in chunks(len(request), request.chunk_rows):
            points = tuple(each[chunk].detach().clone().requires_grad_() for each in request.inputs)
            parts.append(explainer.attribute(points, additional_forward_args=_rows(request)[chunk]))
    found = tuple(
        torch.cat([each.detach() for each in column]) for column in zip(*parts, strict=True)
    )
    return _found(request, found, 1)


def _without_gradients(
    request: AttributionRequest,
    kind: Callable[..., Any],
    evaluations: int,
    **arguments: Any,
) -> Attribution:
    """Run a method on a few explanations at a time, so that no pass is larger than a chunk."""
    parts = []
    size = request.chunk_rows
    with torch.no_grad():
        for chunk in chunks(len(request), size):
            part = request.part(chunk)
            parts.append(
                kind(_forward(part)).attribute(
                    part.inputs,
                    baselines=part.baselines,
                    additional_forward_args=_rows(part),
                    perturbations_per_eval=max(1, size // len(part)),
                    **arguments,
                )
            )
    found = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    return _found(request, found, evaluations)


def _forward(request: AttributionRequest) -> Callable[..., Tensor]:
    """Return the output as captum calls it: inputs, then the row that each point belongs to."""

    def forward(*arguments: Tensor) -> Tensor:
        request.between_chunks()
        *points, rows = arguments
        # Of one explanation, kernel_shap repeats the row as a number.
        return request.forward(tuple(points), rows.expand(len(points[0])))

    return forward


def _rows(request: AttributionRequest) -> Tensor:
    return torch.arange(len(request), device=request.device)


def _copies(tensors: Tensors) -> Tensors:
    return tuple(tensor.detach().clone() for tensor in tensors)


def _found(request: AttributionRequest, attributions: Tensors, evaluations: int) -> Attribution:
    steps = torch.full((len(request),), evaluations, device=request.device)
    return Attribution(tuple(each.detach() for each in attributions), steps)


def _strides(shape: tuple[int, ...], sizes: tuple[int, ...], stride: int | None) -> tuple[int, ...]:
    """Return by how much a window moves along each dimension: by its own size where it fills it."""
    if stride is not None and stride > max(shape):
        raise BadInput(f"stride is {stride}; expected at most the window, {max(shape)}")
    return tuple(
        side if side >= size else min(stride or -(-side // 2), side)
        for side, size in zip(shape, sizes, strict=True)
    )


def _places(sizes: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Count the places of a window, the last of which may reach over the end."""
    return math.prod(
        -(-(size - side) // step) + 1
        for size, side, step in zip(sizes, shape, strides, strict=True)
    )


def _features(inputs: Tensors, shapes: Shapes) -> tuple[Tensors, int]:
    """Number the windows of all inputs through: masks (1, *S) of int64, and how many there are."""
    masks = []
    count = 0
    for each, shape in zip(inputs, shapes, strict=True):
        mask = torch.zeros(each.shape[1:], dtype=torch.int64)
        begin = count
        for dim, (size, side) in enumerate(zip(each.shape[1:], shape, strict=True)):
            windows = -(-size // side)
            place = torch.arange(size) // side
            mask = mask * windows + place.view(-1, *[1] * (mask.dim() - dim - 1))
        count = begin + int(mask.max()) + 1
        masks.append((mask + begin).unsqueeze(0).to(each.device))
    _check_evaluations(count)
    return tuple(masks), count


def _check_evaluations(count: int) -> None:
    if count > MAX_EVALUATIONS:
        raise BadInput(
            f"the model would be asked {count} times; the limit is {MAX_EVALUATIONS}: ask with a "
            "larger window, or with fewer n_samples"
        )


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


class _LeastSquares:
    """The regression that captum's kernel_shap fits; in float64, as its weights differ by 10⁶."""

    def __init__(self) -> None:
        self.weights = torch.empty(0)

    def fit(self, rows: Any) -> None:
        # On the CPU, where the driver is that bears features which are never drawn apart.
        place = rows.dataset.tensors[0].device
        features, outputs, weights = (tensor.double().cpu() for tensor in next(iter(rows)))
        root = weights.flatten().sqrt().unsqueeze(1)
        design = torch.cat([features, torch.ones(len(features), 1).to(features)], 1)
        solution = torch.linalg.lstsq(root * design, root * outputs.view(-1, 1), driver="gelsd")
        self.weights = cast(Tensor, solution.solution[:-1].T).to(place)

    def representation(self) -> Tensor:
        return self.weights.float()
