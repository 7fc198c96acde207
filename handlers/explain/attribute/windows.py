"""Occlusion and ablation: by how much the output falls without some of the values."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from modelyard.handlers.errors import BadInput
from modelyard.handlers.explain.attribute.attribution import (
    Attribution,
    AttributionRequest,
    Tensors,
    chunks,
)
from modelyard.handlers.explain.attribute.method import Groups, Shapes, group_of

MAX_EVALUATIONS = 20_000
"""Points at which a method without gradients may ask the model, per explanation."""


def occlusion(
    request: AttributionRequest, *, shapes: Shapes, groups: Groups = (), stride: int | None = None
) -> Attribution:
    """Return by how much the output falls when a window is replaced by the baseline.

    Args:
        request: request of any number of explanations.
        shapes: shapes of the window in each input, one size for each dimension of a row, or a
            number of groups.
        groups: values that are always replaced together, the same for all rows; see `Groups`.
        stride: step by which the window moves where it does not fill the dimension; half a window
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
        request: request as in `occlusion`.
        shapes: shapes of the windows whose values together are a feature, as in `occlusion`; they
            lie side by side.
        groups: groups as in `occlusion`.
    """
    return _falls(request, shapes, shapes, groups)


def check_evaluations(count: int) -> None:
    """Refuse to ask a model too often.

    Raises:
        BadInput: the message says what to ask for instead.
    """
    if count > MAX_EVALUATIONS:
        raise BadInput(
            f"the model would be asked {count} times; the limit is {MAX_EVALUATIONS}: ask with a "
            "larger window, or with fewer n_samples"
        )


def real_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of attributions to a tensor's values."""
    kind = tensor.dtype if tensor.is_floating_point() else torch.float32
    return torch.promote_types(kind, torch.float32)


Window = tuple[int, tuple[slice | Tensor, ...]]
"""Number of an input, and which of its values (*S)."""


def _falls(
    request: AttributionRequest, shapes: Shapes, strides: Shapes, groups: Groups
) -> Attribution:
    """Return how far the output falls without each value: the mean over the windows that hold it.

    A window that is as in the baseline changes nothing, and is not asked about. The sides count
    each window once, shared among its values: where windows overlap, as often as they do. What a
    group has is shared evenly among its values.
    """
    # The last window may reach over the end.
    corners = [
        [range(0, (-(-(size - side) // step) + 1) * step, step)
         for size, side, step in zip(*each, strict=True)]
        for each in zip(_sizes(request.inputs, groups), shapes, strides, strict=True)
    ]  # fmt: skip
    check_evaluations(sum(math.prod(map(len, each)) for each in corners))
    windows = [
        (which, _values(corner, shapes[which], group_of(groups, which)))
        for which, each in enumerate(corners)
        for corner in itertools.product(*each)
    ]
    rows = range(len(request))
    asked = [
        (row, (which, place))
        for which, place in windows
        for row in rows
        if not torch.equal(request.inputs[which][row][place], request.baselines[which][row][place])
    ]
    whole = _outputs_without(request, [(row, None) for row in rows])
    sums = [torch.zeros_like(each, dtype=torch.float64) for each in request.inputs]
    holding = [each[0].clone() for each in sums]
    for which, place in windows:
        holding[which][place] += 1
    sides, steps = [[0.0, 0.0] for _ in rows], [0 for _ in rows]
    for (row, (which, place)), output in zip(asked, _outputs_without(request, asked), strict=True):
        fall = whole[row] - output
        sums[which][row][place] += fall
        sides[row][fall < 0] += fall * float((1 / holding[which][place]).mean())
        steps[row] += 1
    found = []
    for which, each in enumerate(request.inputs):
        share = holding[which] * _members(each, group_of(groups, which))
        found.append((sums[which] / share).to(real_dtype(each)))
    return Attribution(
        tuple(found),
        torch.tensor(steps, device=request.device),
        sides=torch.tensor(sides, dtype=torch.float64, device=request.device),
    )


def _outputs_without(
    request: AttributionRequest, points: Sequence[tuple[int, Window | None]]
) -> list[float]:
    """Return the output of explanations, each with one window as in its baseline, or none."""
    outputs: list[float] = []
    for chunk in chunks(len(points), request.chunk_rows):
        request.between_chunks()
        rows = torch.tensor([row for row, _ in points[chunk]], device=request.device)
        inputs = tuple(each[rows] for each in request.inputs)
        for at, (row, window) in enumerate(points[chunk]):
            if window is not None:
                which, place = window
                inputs[which][at][place] = request.baselines[which][row][place]
        with torch.no_grad():
            outputs += request.forward(inputs, rows).double().tolist()
    return outputs


def _strides(shape: tuple[int, ...], sizes: tuple[int, ...], stride: int | None) -> tuple[int, ...]:
    """Return by how much a window moves along each dimension: by its own size where it fills it."""
    if stride is not None and stride > max(shape):
        raise BadInput(f"stride is {stride}; expected at most the window, {max(shape)}")
    return tuple(
        side if side >= size else min(stride or -(-side // 2), side)
        for side, size in zip(shape, sizes, strict=True)
    )


def _sizes(inputs: Tensors, groups: Groups) -> tuple[tuple[int, ...], ...]:
    """Return the sizes among which windows lie in each input: of a row, or the number of groups."""
    every = ((each, group_of(groups, which)) for which, each in enumerate(inputs))
    return tuple(
        tuple(each.shape[1:]) if group is None else (int(group.max()) + 1,) for each, group in every
    )


def _members(values: Tensor, group: Tensor | None) -> Tensor:
    """Return how many values the group of each value has: (*S)."""
    if group is None:
        return torch.ones(values.shape[1:], device=values.device)
    return group.flatten().bincount()[group].to(values.device)


def _values(
    corner: tuple[int, ...], shape: tuple[int, ...], group: Tensor | None
) -> tuple[slice | Tensor, ...]:
    """Return which values (*S) are in a window, whose place may be among groups."""
    if group is None:
        return tuple(slice(at, at + side) for at, side in zip(corner, shape, strict=True))
    return ((group >= corner[0]) & (group < corner[0] + shape[0]),)
