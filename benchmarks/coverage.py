"""How often the stated error of integrated gradients covers the true one, network by network.

    python -m benchmarks.explain --coverage [--only NAME …]

The model is asked in float32. The truth are 6,561 midpoints in float64 (2,187 of large networks);
how far those are from a third of them is printed, too. Widths are stated errors as multiples of
true ones, where these are above rounding.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.explained import DESIGN, NAMED, Explained, build
from modelyard.handlers.explain.attribute.attribution import (
    Attribution,
    AttributionRequest,
    ForwardFunction,
    evaluate,
    is_met,
    norms_of,
)
from modelyard.handlers.explain.attribute.path import integrated_gradients

POINTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    **{str(count): {"n_steps": count} for count in (10, 30, 100)},
}
"""Name → how many points a row gets."""

ROUNDING = 1e-5
"""True errors below this share of the norm are rounding of float32, as far as widths go."""


class Coverage(NamedTuple):
    """What stated errors are worth on one network."""

    network: str
    points: str
    """As named in `POINTS`."""
    n: int
    covered: float
    """Share of explanations whose true error is within the stated one."""
    values: float
    """The same of single values."""
    width: float
    """Median of stated ÷ true, of explanations; NaN where all of these are rounding."""
    value_width: float
    steps: float
    met: float
    wrong: int
    """Explanations that claim to have met 5 % and have not."""
    truth: float
    """How far the truth is from that of a third of its points, as a share; the median."""


def ask(model: nn.Module, inputs: Tensor, targets: Tensor, chunk: int = 64) -> AttributionRequest:
    """Ask about one target of each input (N, *S), from zero."""
    starts = torch.zeros_like(inputs)
    rows = torch.arange(len(inputs))
    ends, zeros = (
        evaluate(model, (each,), 256).double()[rows, targets] for each in (inputs, starts)
    )
    forward = ForwardFunction(model, targets)
    return AttributionRequest(
        forward, (inputs,), tuple((each[None],) for each in starts), ends, zeros, chunk
    )


def exact(explained: Explained, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Return shares (N, D) from many midpoints in float64, and those of a third of these."""
    model, inputs = copy.deepcopy(explained.model).double(), explained.inputs.double()
    count = count or (2187 if inputs.dim() > 2 else 6561)
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    fine, third = [], []
    for row, target in zip(inputs, explained.targets, strict=True):
        slopes = []
        for some in torch.split(places, 729):
            points = (some.view(-1, *[1] * row.dim()) * row).requires_grad_()
            slopes.append(torch.autograd.grad(model(points)[:, target].sum(), points)[0].flatten(1))
        every = torch.cat(slopes)
        fine.append(every.mean(0) * row.flatten())
        third.append(every[1::3].mean(0) * row.flatten())
    return torch.stack(fine), torch.stack(third)


def cover(
    name: str, explained: Explained, truth: tuple[Tensor, Tensor], points: str
) -> tuple[Coverage, Attribution]:
    """Hold stated errors of one network against true ones."""
    request = ask(explained.model, explained.inputs, explained.targets)
    found = integrated_gradients(request, **POINTS[points])
    assert found.errors is not None
    assert found.error is not None
    apart = (found.attributions[0].flatten(1) - truth[0]).abs()
    stated = found.errors[0].flatten(1).double()
    norm = truth[0].norm(dim=1)
    true, claimed = apart.norm(dim=1), found.error * norms_of(found.attributions)
    met = is_met(request, found, 0.05)
    seen = true > ROUNDING * norm
    size = norm[:, None] / truth[0].shape[1] ** 0.5
    return Coverage(
        name,
        points,
        len(norm),
        _mean(true <= claimed),
        _mean(apart <= stated),
        float((claimed / true)[seen].nanmedian()),
        float((stated / apart)[apart > ROUNDING * size].nanmedian()),
        _mean(found.n_steps),
        _mean(met),
        int((met & (true > 0.05 * norm)).sum()),
        float(((truth[0] - truth[1]).norm(dim=1) / norm).nanmedian()),
    ), found


def survey(names: Sequence[str], points: Sequence[str] = tuple(POINTS)) -> Iterator[Coverage]:
    """Measure networks by their names."""
    for name in names:
        explained = build(name)
        truth = exact(explained)
        for each in points:
            yield cover(name, explained, truth, each)[0]


def print_table(names: Sequence[str]) -> None:
    """Print the table of the page."""
    print("| network | points asked | n | covered | values | width | of values | points | met "
          "| met, wrong | truth ± |")  # fmt: skip
    print("| --- " * 11 + "|")
    for row in survey(names):
        name = row.network + (" †" if row.network not in NAMED else "")
        name += "" if row.network in DESIGN else " ‡"
        print(
            f"| {name} | {row.points} | {row.n} | {row.covered:.3f} | {row.values:.3f} "
            f"| {row.width:.1f} | {row.value_width:.1f} | {row.steps:.0f} | {row.met:.2f} "
            f"| {row.wrong} | {row.truth:.0e} |",
            flush=True,
        )


def _mean(each: Tensor) -> float:
    return float(each.double().mean())
