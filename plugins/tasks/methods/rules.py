"""Backward passes by other rules than the derivative: guided ReLUs, and DeepLIFT's ratios.

Both watch what is called while a model runs, so they reach what is written as a function, too, and
the nodes of an exported program. A compiled module (TorchScript) cannot be watched.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from modelyard.handlers.errors import InputMismatch, NoGradients
from modelyard.handlers.explain.attribute.attribution import (
    Attribution,
    AttributionRequest,
    Tensors,
    chunks,
    recording,
    sums_of,
)
from modelyard.handlers.explain.attribute.method import Method

NEARLY_EQUAL = 1e-10
"""Inputs of a step that are no further apart have no ratio; the derivative takes its place."""

LARGEST_MISS = 1e-3
"""What the sum may be off by, as a share of the outputs. With a rule for each step it is exact."""

_NAMES = dict(
    line.split(": ")
    for line in Path(__file__).with_name("rules.txt").read_text("ascii").splitlines()
)
"""Kind of function → the names of those of that kind, which differ by how torch is called."""
ELEMENTWISE, MAX_POOLS, LINEAR_IN_ALL, LINEAR_IN_ONE = (
    frozenset(_NAMES[kind].split())
    for kind in ("elementwise", "max_pools", "linear_in_all", "linear_in_one")
)
"""Functions of each value by itself, the first argument: the ratio is their rule; poolings; linear
in all tensors together, up to a constant; in one tensor while others do not depend on the input."""


class GuidedRelus(TorchFunctionMode):
    """Let only gradients above 0 through ReLUs, inside a `with`.

    Source: Springenberg et al. 2014, https://arxiv.org/abs/1412.6806
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        """ReLUs that were met."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch."""
        if _name(func) in ("relu", "relu_"):
            self.count += 1
            return _Guided.apply(args[0])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Guided(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: Tensor) -> Tensor:
        context.save_for_backward(inputs)
        return inputs.relu()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (inputs,) = context.saved_tensors
        found: Tensor = gradient.relu() * (inputs > 0)
        return found


def deep_lift(request: AttributionRequest) -> Attribution:
    """Return DeepLIFT's attributions by the rescale rule.

    Inputs and baselines run as one batch. Each step that is not linear passes the ratio on by which
    its output differs between the two, in place of a derivative.

    Raises:
        NoGradients: a step of the model has no such rule.

    Source: Shrikumar et al. 2017, https://arxiv.org/abs/1704.02685; the ratio of max-pooling is
    captum's
    """
    parts = []
    with recording():
        for chunk in chunks(len(request), max(1, request.chunk_rows // 2)):
            parts.append(_lifted(request.part(chunk)))
    found = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    return Attribution(found, torch.full((len(request),), 2, device=request.device))


def _lifted(request: AttributionRequest) -> Tensors:
    request.between_chunks()
    count = len(request)
    points = tuple(
        torch.cat((end.detach(), start.detach())).requires_grad_()
        for end, start in zip(request.inputs, request.baselines, strict=True)
    )
    rows = torch.arange(count, device=request.device).repeat(2)
    try:
        with _Ratios(points):
            picked = request.forward(points, rows)
    except InputMismatch as error:
        raise NoGradients(
            f"deep_lift asks about {2 * count} rows at once, which the artifact does not take "
            f"({error}); export it with a batch, or choose integrated_gradients"
        ) from error
    slopes = torch.autograd.grad(picked[:count].sum(), points, allow_unused=True)
    found = tuple(
        torch.zeros_like(end) if each is None else each[:count] * (end - start)
        for each, end, start in zip(slopes, request.inputs, request.baselines, strict=True)
    )
    ends, starts = picked.detach().double().chunk(2)
    miss = (sums_of(found) - (ends - starts)).abs()
    if bool((miss > LARGEST_MISS * (ends.abs() + starts.abs())).any()):
        raise NoGradients(
            f"deep_lift misses the sum of its values by {float(miss.max()):.3g}: this model has a "
            "step that its rules do not cover; choose integrated_gradients"
        )
    return found


class _Ratios(TorchFunctionMode):
    """Put DeepLIFT's rules in place of the derivatives of what is called inside a `with`.

    The first half of every batch is the inputs, the second the baselines.
    """

    def __init__(self, points: Tensors) -> None:
        super().__init__()
        self.points = points

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch."""
        kwargs = kwargs or {}
        moving = [each for each in _tensors((args, kwargs)) if self._moves(each)]
        name = _name(func)
        is_bent = name in ELEMENTWISE | MAX_POOLS
        if is_bent and len(moving) == 1 and moving[0] is args[0]:
            return _Ratio.apply(  # type: ignore[no-untyped-call]
                args[0], lambda values: func(values, *args[1:], **kwargs), name in MAX_POOLS
            )
        found = func(*args, **kwargs)
        is_linear = name in LINEAR_IN_ALL or (
            name in LINEAR_IN_ONE and len(moving) == 1 and moving[0] is not _divisor(name, args)
        )
        if moving and not is_linear and any(map(self._moves, _tensors(found))):
            raise NoGradients(
                f"deep_lift has no rule for {name}"
                + (" of two tensors that depend on the input" if name in LINEAR_IN_ONE else "")
                + "; choose integrated_gradients"
            )
        return found

    def _moves(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on the inputs, as weights do not."""
        return tensor.requires_grad and (
            tensor.grad_fn is not None or any(tensor is each for each in self.points)
        )


class _Ratio(torch.autograd.Function):
    """A function of each value by itself; or max-pooling, each of whose maxima changes where it is.

    That is in the input or the baseline.
    """

    @staticmethod
    def forward(
        context: Any, inputs: Tensor, function: Callable[[Tensor], Tensor], is_pool: bool
    ) -> Tensor:
        before = inputs.clone()  # the function may work in place
        outputs = function(inputs.clone())
        context.save_for_backward(before, outputs)
        context.function, context.is_pool = function, is_pool
        return outputs

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        inputs, outputs = context.saved_tensors
        (end, start), (high, low) = inputs.chunk(2), outputs.chunk(2)
        own, pulled = gradient.chunk(2)[0], partial(_pulled, context.function)
        change = own * (high - low)
        if context.is_pool:
            most = torch.maximum(high, low)
            change = pulled(end, own * (most - low)) + pulled(start, own * (high - most))
        found = _quotient(change, end - start, pulled(end, own))
        return torch.cat((found, torch.zeros_like(found))), None, None


def _pulled(function: Callable[[Tensor], Tensor], at: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient at a point, of a function whose output has one."""
    with torch.enable_grad():
        point = at.detach().clone().requires_grad_()
        return torch.autograd.grad(function(point * 1), point, gradient)[0]


def _quotient(change: Tensor, way: Tensor, slope: Tensor) -> Tensor:
    is_same = way.abs() < NEARLY_EQUAL
    return torch.where(is_same, slope, change / way.where(~is_same, 1.0))


def _divisor(name: str, args: Sequence[Any]) -> Any:
    return args[1] if name in ("div", "div_", "__truediv__", "true_divide") and args[1:] else None


def _name(func: Any) -> str:
    """Return the name of a function, of a method, or of an operator of an exported program."""
    return str(getattr(func, "__name__", func)).partition(".")[0]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


DEEP_LIFT = Method(deep_lift, uses_baseline=True, adds_up=True, watches=True)
