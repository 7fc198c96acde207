"""The attribution methods that can be asked for, and which options each takes.

What captum (https://captum.ai) has too is compared with it in tests. It is not imported here: that
takes half a second, most of it matplotlib's. Its other rules of quadrature are not offered, as its
trapezoid's weights sum to 1 − 1/n.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelyard.handlers.errors import BadInput
from modelyard.handlers.explain.attribution import (
    DEFAULT_TOLERANCE,
    Attribution,
    AttributionRequest,
    Tensors,
    chunks,
    gradients,
    integrated_gradients,
    recording,
)
from modelyard.handlers.explain.features import Features, Groups, Shapes, features_of, group_of
from modelyard.handlers.explain.grad_cam import guided_grad_cam, layer_grad_cam
from modelyard.handlers.explain.rules import deep_lift
from modelyard.handlers.explain.sampling import MAX_SAMPLES, enough, mean_gradients
from modelyard.handlers.explain.shapley import Bools, Floats, Game

MAX_EVALUATIONS = 20_000
"""Points at which a method without gradients may ask the model, per explanation."""

DEFAULT_NOISE = 0.15
"""Share of a picture's range, as in the paper on SmoothGrad."""

LEAST_BUDGET = 1024
"""Of kernel_shap, where nobody said one: all sets of ten features."""


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
    is_at_layer: bool = False
    """Explains the output of a layer, in place of the inputs."""
    looks_at_layer: bool = False
    """Asks a layer about the inputs: it is given `at_layer`."""
    watches: bool = False
    """Watches what the model calls, which a compiled module does not show."""
    repeats: bool = False
    """Every value of a window has what belongs to the window as a whole."""
    is_random: bool = False
    """Runs for each request by itself, so that its seed alone decides over the answer."""


def saliency(request: AttributionRequest) -> Attribution:
    """Return the size of the gradient at the input.

    Source: Simonyan et al. 2013, section 3, https://arxiv.org/abs/1312.6034
    """
    return _at_inputs(request, lambda slope, _: slope.abs())


def input_x_gradient(request: AttributionRequest) -> Attribution:
    """Return the gradient at the input times the input.

    Source: Shrikumar et al. 2016, https://arxiv.org/abs/1605.01713
    """
    return _at_inputs(request, torch.mul)


def smoothgrad(
    request: AttributionRequest,
    *,
    n_samples: int | None = None,
    noise: float = DEFAULT_NOISE,
    seed: int = 0,
    tolerance: float = DEFAULT_TOLERANCE,
    max_samples: int = MAX_SAMPLES,
) -> Attribution:
    """Return the mean of the gradients at noisy copies of the input.

    Args:
        request: of one explanation.
        n_samples: copies; without it as many as `tolerance` needs, `max_samples` at most.
        noise: standard deviation of the normal noise, as a share of the request's scales.
        seed: of the noise.
        tolerance: the largest error.
        max_samples: where drawing ends.

    Source: Smilkov et al. 2017, https://arxiv.org/abs/1706.03825
    """
    noisy = _Noise(request, noise, seed)
    ones = tuple(map(torch.ones_like, request.inputs))
    return mean_gradients(
        request, lambda: (noisy.copies(), ones), n_samples, tolerance, max_samples
    )


def gradient_shap(
    request: AttributionRequest,
    *,
    n_samples: int | None = None,
    noise: float = 0.0,
    seed: int = 0,
    tolerance: float = DEFAULT_TOLERANCE,
    max_samples: int = MAX_SAMPLES,
) -> Attribution:
    """Return expected gradients: random points between input and baselines drawn from the set.

    Args:
        request: of one explanation; its baseline set is drawn from.
        n_samples: points; without it as many as `tolerance` needs, `max_samples` at most.
        noise: standard deviation of normal noise on the input, as a share of its scales.
        seed: of the draws.
        tolerance: the largest error.
        max_samples: where drawing ends.

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

    return mean_gradients(request, draw, n_samples, tolerance, max_samples)


def occlusion(
    request: AttributionRequest, *, shapes: Shapes, groups: Groups = (), stride: int | None = None
) -> Attribution:
    """Return by how much the output falls when a window is replaced by the baseline.

    Args:
        shapes: of the window in each input, one size for each dimension of a row, or a number of
            groups.
        groups: values that are always replaced together, the same for all rows; see `Groups`.
        stride: by which the window moves where it does not fill the dimension; half a window
            without it. A value's attribution is the mean over the windows that held it.

    Source: Zeiler and Fergus 2013, section 4.2, https://arxiv.org/abs/1311.2901
    """
    sizes = _sizes(request.inputs, groups)
    strides = tuple(_strides(*pair, stride) for pair in zip(shapes, sizes, strict=True))
    return _falls(request, shapes, strides, groups)


def feature_ablation(
    request: AttributionRequest, *, shapes: Shapes, groups: Groups = ()
) -> Attribution:
    """Return by how much the output falls when a feature is replaced by the baseline.

    Args:
        shapes: of the windows whose values together are a feature, as in `occlusion`; they lie
            side by side.
        groups: as in `occlusion`.
    """
    return _falls(request, shapes, shapes, groups)


def kernel_shap(
    request: AttributionRequest,
    *,
    shapes: Shapes,
    groups: Groups = (),
    n_samples: int | None = None,
    seed: int = 0,
    tolerance: float = DEFAULT_TOLERANCE,
    max_samples: int | None = None,
) -> Attribution:
    """Return the Shapley values of features, each shared evenly among the values of its feature.

    Features that equal the baseline take no part and get 0. All sets of the others are asked about
    where they fit into the budget; else sets are drawn, each with its complement.

    Args:
        request: of one explanation.
        shapes: as in `feature_ablation`.
        groups: as in `occlusion`.
        n_samples: sets, or all there are; without it as many as `tolerance` needs.
        seed: of the draws.
        tolerance: the largest error.
        max_samples: where drawing ends without `n_samples`; 4 for each feature and 200 more, or
            1024, without it.

    Source: Lundberg and Lee 2017, theorem 2, https://arxiv.org/abs/1705.07874
    """
    coalitions = _Coalitions(request, features_of(request.inputs, shapes, groups))
    players = coalitions.players
    first = 4 * players + 200
    budget = n_samples or max_samples or max(first, LEAST_BUDGET)
    if players < 2:
        return coalitions.attribution(np.full(players, coalitions.total), np.zeros(players), 0)
    game = Game(players, coalitions.worth, coalitions.total, seed)
    if budget < 2 * game.fewest:
        raise BadInput(
            f"{'max' if n_samples is None else 'n'}_samples is {budget}; expected at least "
            f"{2 * game.fewest} for {players} features that are not as in the baseline"
        )
    budget = min(budget, 2 * game.pairs)
    _check_evaluations(budget)
    is_open = n_samples is None and budget < 2 * game.pairs
    sets = min(first, budget) if is_open else budget
    while True:
        found = coalitions.attribution(*game.solve(sets // 2), 2 * len(game.known))
        error = None if found.error is None else float(found.error)
        if sets >= budget or (error is not None and error <= tolerance):
            return found
        sets = enough(sets, error, tolerance, budget)


_DRAWS = ("n_samples", "seed", "tolerance", "max_samples", "errors")
_STEPS = ("n_steps", "tolerance", "max_steps", "errors")

METHODS: Mapping[str, Method] = {
    "integrated_gradients": Method(integrated_gradients, _STEPS, uses_baseline=True, adds_up=True),
    "layer_integrated_gradients": Method(
        integrated_gradients,
        (*_STEPS, "layer"),
        uses_baseline=True,
        adds_up=True,
        is_at_layer=True,
    ),
    "layer_grad_cam": Method(layer_grad_cam, ("layer",), multiplies=False, looks_at_layer=True),
    "guided_grad_cam": Method(
        guided_grad_cam, ("layer",), multiplies=False, looks_at_layer=True, watches=True
    ),
    "deep_lift": Method(deep_lift, uses_baseline=True, adds_up=True, watches=True),
    "saliency": Method(saliency, multiplies=False, has_signs=False),
    "input_x_gradient": Method(input_x_gradient),
    "smoothgrad": Method(smoothgrad, (*_DRAWS, "noise"), multiplies=False, is_random=True),
    "gradient_shap": Method(
        gradient_shap,
        (*_DRAWS, "noise"),
        uses_baseline=True,
        adds_up=True,
        is_random=True,
    ),
    "occlusion": Method(
        occlusion,
        ("window", "stride"),
        needs_gradients=False,
        uses_baseline=True,
        needs_windows=True,
        repeats=True,
    ),
    "feature_ablation": Method(
        feature_ablation,
        ("window",),
        needs_gradients=False,
        uses_baseline=True,
        needs_windows=True,
        repeats=True,
    ),
    "kernel_shap": Method(
        kernel_shap,
        ("window", *_DRAWS),
        needs_gradients=False,
        uses_baseline=True,
        adds_up=True,
        needs_windows=True,
        is_random=True,
    ),
}


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


class _Coalitions:
    """What the model gives where some features are as in the input, the others as in the baseline.

    Of one explanation.
    """

    def __init__(self, request: AttributionRequest, features: Features) -> None:
        _check_evaluations(features.count)
        self.request = request
        self.features = features
        self.playing = features.differing(request)
        """Which features are not as in the baseline, the players."""
        ends = np.array([[True], [False]]).repeat(self.players, 1)
        whole, none = self.worth(ends).tolist()
        self.total = whole - none

    @property
    def players(self) -> int:
        """How many there are."""
        return len(self.playing)

    def worth(self, sets: Bools) -> Floats:
        """Return the output for each set of players (R, M), true for who is in."""
        found = []
        for chunk in chunks(len(sets), self.request.chunk_rows):
            inside = torch.from_numpy(sets[chunk]).to(self.request.device)
            kept = inside.new_zeros(len(inside), self.features.count)
            kept[:, self.playing] = inside
            found.append(self.features.outputs(self.request, kept))
        return torch.cat(found).cpu().numpy()

    def attribution(self, values: Floats, errors: Floats | None, sets: int) -> Attribution:
        """Give each value its even share of what its feature has."""
        return Attribution(
            self._spread(values),
            torch.tensor([sets], device=self.request.device),
            None if errors is None else self._spread(errors),
        )

    def _spread(self, values: Floats) -> Tensors:
        each = torch.zeros_like(self.features.sizes)
        each[self.playing] = torch.from_numpy(values).to(each)
        shares = self.features.spread(each / self.features.sizes)
        return tuple(
            share[None].to(_real(own))
            for share, own in zip(shares, self.request.inputs, strict=True)
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
    return _found(request, found, 1)


def _falls(
    request: AttributionRequest, shapes: Shapes, strides: Shapes, groups: Groups
) -> Attribution:
    """Return how far the output falls without each value: the mean over the windows that hold it.

    A window that is as in the baseline changes nothing, and is not asked about. The sides count
    each window once, shared among its values: where windows overlap, as often as they do. What a
    group has is shared evenly among its values.
    """
    sizes = _sizes(request.inputs, groups)
    _check_evaluations(sum(map(_places, sizes, shapes, strides)))
    windows = [
        (which, _values(place, group_of(groups, which)))
        for which, each in enumerate(zip(sizes, shapes, strides, strict=True))
        for place in _windows(*each)
    ]
    asked = [
        (row, window)
        for window in windows
        for row in range(len(request))
        if not _is_baseline(request, row, window)
    ]
    whole = _outputs_without(request, [(row, None) for row in range(len(request))])
    falls = [
        whole[row] - each
        for (row, _), each in zip(asked, _outputs_without(request, asked), strict=True)
    ]
    device = request.device
    holding = [
        torch.zeros(each.shape[1:], dtype=torch.float64, device=device) for each in request.inputs
    ]
    for which, place in windows:
        holding[which][place] += 1
    sums = [torch.zeros(each.shape, dtype=torch.float64, device=device) for each in request.inputs]
    sides = [[0.0, 0.0] for _ in range(len(request))]
    steps = [0] * len(request)
    for (row, (which, place)), fall in zip(asked, falls, strict=True):
        sums[which][row][place] += fall
        sides[row][fall < 0] += fall * float((1 / holding[which][place]).mean())
        steps[row] += 1
    return Attribution(
        tuple(
            (total / (count * members)).to(_real(each))
            for total, count, members, each in zip(
                sums, holding, _members(request.inputs, groups), request.inputs, strict=True
            )
        ),
        torch.tensor(steps, device=device),
        sides=torch.tensor(sides, dtype=torch.float64, device=device),
    )


Window = tuple[int, tuple[slice | Tensor, ...]]
"""Which input, and which of its values (*S)."""


def _outputs_without(
    request: AttributionRequest, points: Sequence[tuple[int, Window | None]]
) -> list[float]:
    """Return the output of explanations, each with one window as in its baseline, or none."""
    found: list[float] = []
    for chunk in chunks(len(points), request.chunk_rows):
        request.between_chunks()
        rows = torch.tensor([row for row, _ in points[chunk]], device=request.device)
        inputs = tuple(each[rows] for each in request.inputs)
        for at, (row, window) in enumerate(points[chunk]):
            if window is not None:
                which, place = window
                inputs[which][at][place] = request.baselines[which][row][place]
        with torch.no_grad():
            found += request.forward(inputs, rows).double().tolist()
    return found


def _is_baseline(request: AttributionRequest, row: int, window: Window) -> bool:
    which, place = window
    return torch.equal(request.inputs[which][row][place], request.baselines[which][row][place])


def _windows(
    sizes: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]
) -> Iterator[tuple[slice, ...]]:
    """Yield the places of a window, as many as `_places` counts."""
    begins = (
        range(0, (-(-(size - side) // step) + 1) * step, step)
        for size, side, step in zip(sizes, shape, strides, strict=True)
    )
    for corner in itertools.product(*begins):
        yield tuple(slice(begin, begin + side) for begin, side in zip(corner, shape, strict=True))


def _real(tensor: Tensor) -> torch.dtype:
    """Return the dtype of attributions to a tensor's values."""
    kind = tensor.dtype if tensor.is_floating_point() else torch.float32
    return torch.promote_types(kind, torch.float32)


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


def _sizes(inputs: Tensors, groups: Groups) -> tuple[tuple[int, ...], ...]:
    """Return the sizes among which windows lie in each input: of a row, or the number of groups."""
    every = ((each, group_of(groups, which)) for which, each in enumerate(inputs))
    return tuple(
        tuple(each.shape[1:]) if group is None else (int(group.max()) + 1,) for each, group in every
    )


def _members(inputs: Tensors, groups: Groups) -> Tensors:
    """Return how many values the group of each value has: (*S) per input."""
    every = ((each, group_of(groups, which)) for which, each in enumerate(inputs))
    return tuple(
        torch.ones(each.shape[1:], device=each.device)
        if group is None
        else group.flatten().bincount()[group].to(each.device)
        for each, group in every
    )


def _values(place: tuple[slice, ...], group: Tensor | None) -> tuple[slice | Tensor, ...]:
    """Return which values (*S) are in a window, whose place may be among groups."""
    if group is None:
        return place
    (line,) = place
    return ((group >= line.start) & (group < line.stop),)


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
