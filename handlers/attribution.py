"""A differentiable model and its inputs → attributions, and how far to trust them.

`METHODS` lists what can be asked for; `parse_options` reads what one request asks for.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal, cast

import torch
from torch import Tensor

from handlers.backends import Output
from handlers.errors import BadInput, NoGradients

FIRST_STEPS = 10
MAX_STEPS = 270
DEFAULT_TOLERANCE = 0.01
N_STEPS_LIMITS = (1, 1000)
BASELINES = ("zero", "black", "white")
ANSWER_FORMATS = ("json", "png")

Model = Callable[[Tensor], Output]


@dataclass(frozen=True)
class Attribution:
    """Attributions of N rows, with what is needed to judge them.

    `delta` is the convergence delta: sum of attributions − (f_input − f_baseline).
    """

    attributions: Tensor
    """(N, *S), in units of the output."""
    f_input: Tensor
    """(N,) float64: output of the target at the input."""
    f_baseline: Tensor
    """(N,) float64: output of the target at the baseline."""
    sums: Tensor
    """(N,) float64: sum of attributions."""
    delta: Tensor
    """(N,) float64."""
    n_steps: Tensor
    """(N,) int64: points between baseline and input that the row used."""
    tolerance_met: Tensor
    """(N,) bool: whether |delta| ≤ tolerance · |f_input − f_baseline|."""


@dataclass(frozen=True)
class ExplainOptions:
    """What one request asks for; a field's name is the query parameter's."""

    method: str = "integrated_gradients"
    target: str = "predicted"
    """Class index, label, or "predicted"."""
    baseline: str = "zero"
    n_steps: int | None = None
    """None raises the steps until `tolerance` is met."""
    tolerance: float = DEFAULT_TOLERANCE
    """The largest |delta| allowed, as a share of |f(input) − f(baseline)|."""
    format: Literal["json", "png"] = "json"


def integrated_gradients(
    model: Model,
    inputs: Tensor,
    baselines: Tensor,
    targets: Tensor,
    *,
    n_steps: int | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    max_steps: int = MAX_STEPS,
    chunk_rows: int = 8,
) -> Attribution:
    """Attribute model(inputs)[:, target] to each input value, by the midpoint rule.

    Without `n_steps`, rows begin with 10 points and triple them while their delta is above the
    tolerance; the midpoints of n steps are among those of 3n, so no point is computed twice, and
    a row that has met the tolerance costs no further passes.

    Args:
        model: gives (N, K) or (N,), or a tuple that begins with it.
        inputs: float tensor (N, *S), one row per request; values as after preprocess.
        baselines: as inputs, or (1, *S) to share one.
        targets: int tensor (N,), an output index per row.
        n_steps: points for every row; None chooses them per row.
        tolerance: the largest |delta| as a share of |f_input − f_baseline|.
        max_steps: no row gets more points than this; `tolerance_met` tells when it was too few.
        chunk_rows: rows × steps that share one forward and backward pass; bounds the memory.

    Raises:
        NoGradients: the output does not depend on the input through anything differentiable.

    Source: Sundararajan et al. 2017, section 3, https://arxiv.org/abs/1703.01365
    """
    if not inputs.is_floating_point():
        raise NoGradients(
            f"integrated gradients needs real-valued inputs, this model takes {inputs.dtype}"
        )
    with torch.inference_mode(False), torch.enable_grad():
        # Tensors made under inference_mode cannot take part in autograd; copies can.
        start = baselines.detach().clone()
        path = inputs.detach() - start
        f_input = _evaluate(model, inputs.detach().clone(), targets, chunk_rows)
        f_baseline = _evaluate(model, start, targets, chunk_rows)
        return _refine(
            _PathGradients(model, start.expand_as(path), path, targets, chunk_rows),
            f_input,
            f_baseline,
            first_steps=n_steps or min(FIRST_STEPS, max_steps),
            max_steps=n_steps or max_steps,
            tolerance=tolerance,
        )


METHODS: Mapping[str, Callable[..., Attribution]] = {"integrated_gradients": integrated_gradients}


@dataclass(frozen=True)
class _PathGradients:
    """Gradients at points of the straight lines from `start` (N, *S) along `path` (N, *S)."""

    model: Model
    start: Tensor
    path: Tensor
    targets: Tensor
    chunk_rows: int

    def add_to(self, sums: Tensor, rows: Tensor, alphas: Tensor) -> None:
        """Add to sums[row] the gradients at start + alpha · path, for each of `rows` and `alphas`.

        Args:
            sums: (N, *S), changed in place.
            rows: (R,) indices of the rows that still need points.
            alphas: (A,) places on the path, 0 is the baseline and 1 the input.
        """
        which = rows.repeat_interleave(len(alphas))
        where = alphas.repeat(len(rows))
        for chunk in _chunks(len(which), self.chunk_rows):
            row = which[chunk]
            alpha = where[chunk].view(-1, *[1] * (self.path.dim() - 1))
            points = (self.start[row] + alpha * self.path[row]).requires_grad_()
            picked = _pick(self.model(points), self.targets[row])
            sums.index_add_(0, row, _gradient(picked, points).to(sums.dtype))


def _refine(
    gradients: _PathGradients,
    f_input: Tensor,
    f_baseline: Tensor,
    *,
    first_steps: int,
    max_steps: int,
    tolerance: float,
) -> Attribution:
    """Triple the steps of the rows whose delta is above the tolerance, as far as `max_steps`."""
    path = gradients.path
    difference = f_input - f_baseline
    allowed = tolerance * difference.abs()
    sums = torch.zeros_like(path, dtype=torch.promote_types(path.dtype, torch.float32))
    steps = torch.full((len(path),), first_steps, device=path.device)
    rows = torch.arange(len(path), device=path.device)
    gradients.add_to(sums, rows, _midpoints(first_steps, path))
    while True:
        scale = steps.view(-1, *[1] * (path.dim() - 1))
        attributions = path * (sums / scale)
        totals = attributions.flatten(1).sum(1, dtype=torch.float64)
        delta = totals - difference
        met = delta.abs() <= allowed
        rows = (~met & (steps * 3 <= max_steps)).nonzero().flatten()
        if not len(rows):
            return Attribution(attributions, f_input, f_baseline, totals, delta, steps, met)
        # All open rows are at the same number of steps: a row leaves for good once it is met.
        steps[rows] *= 3
        gradients.add_to(sums, rows, _new_midpoints(int(steps[rows[0]]), path))


def _midpoints(n: int, like: Tensor) -> Tensor:
    return ((torch.arange(n, dtype=torch.float64) + 0.5) / n).to(like)


def _new_midpoints(n: int, like: Tensor) -> Tensor:
    """Give the midpoints of n steps that are not midpoints of n/3: every third one is."""
    points = _midpoints(n, like)
    return points[torch.arange(n, device=points.device) % 3 != 1]


def class_outputs(model: Model, inputs: Tensor, chunk_rows: int) -> Tensor:
    """Give the explainable outputs (N, K) of inputs (N, *S), recording no gradient."""
    with torch.no_grad():
        chunks = [_rows_of(model(inputs[chunk])) for chunk in _chunks(len(inputs), chunk_rows)]
        return torch.cat(chunks)


def _evaluate(model: Model, inputs: Tensor, targets: Tensor, chunk_rows: int) -> Tensor:
    """Give the targets' outputs (N,) in float64 for inputs (N, *S), or (1, *S) for all targets."""
    outputs = class_outputs(model, inputs, chunk_rows)
    return _pick(outputs.expand(len(targets), -1), targets).double()


def _pick(output: Output, targets: Tensor) -> Tensor:
    return _rows_of(output).gather(1, targets.unsqueeze(1)).squeeze(1)


def _rows_of(output: Output) -> Tensor:
    """Give the explained output as (N, K)."""
    first = output if isinstance(output, Tensor) else output[0]
    if first.dim() == 1:
        return first.unsqueeze(1)
    if first.dim() != 2:
        raise NoGradients(
            f"the output has shape {list(first.shape)}; "
            "only outputs with one number per class, [N, K], can be explained"
        )
    return first


def _gradient(picked: Tensor, points: Tensor) -> Tensor:
    if picked.requires_grad:
        (gradient,) = torch.autograd.grad(picked.sum(), points, allow_unused=True)
        if gradient is not None:
            return gradient
    raise NoGradients(
        "no gradient flows from the output to the input: the artifact is not differentiable, or "
        "its forward() cuts the graph (no_grad, argmax, rounding); archive a pt2 export of the "
        "checkpoint with --explain-with"
    )


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(begin, begin + size) for begin in range(0, count, size))


def parse_options(query: Mapping[str, str], accept: str | None = None) -> ExplainOptions:
    """Read one request's options from its query parameters and its Accept header.

    Raises:
        BadInput: an unknown parameter or a value outside its limits, which the message states.
    """
    known = [field.name for field in fields(ExplainOptions)]
    for name in query:
        if name not in known:
            raise BadInput(f'unknown parameter "{name}"; expected some of {", ".join(known)}')
    asked = query.get("format", "png" if _prefers_png(accept or "") else "json")
    return ExplainOptions(
        method=_one_of("method", query.get("method", ExplainOptions.method), METHODS),
        target=query.get("target", ExplainOptions.target),
        baseline=_one_of("baseline", query.get("baseline", ExplainOptions.baseline), BASELINES),
        n_steps=_n_steps(query["n_steps"]) if "n_steps" in query else None,
        tolerance=_tolerance(query["tolerance"]) if "tolerance" in query else DEFAULT_TOLERANCE,
        format=cast(Literal["json", "png"], _one_of("format", asked, ANSWER_FORMATS)),
    )


def _one_of(name: str, value: str, allowed: "Mapping[str, object] | tuple[str, ...]") -> str:
    if value not in allowed:
        raise BadInput(f'{name} is "{value}"; expected one of {", ".join(allowed)}')
    return value


def _n_steps(text: str) -> int:
    low, high = N_STEPS_LIMITS
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and low <= int(text) <= high):
        raise BadInput(f'n_steps is "{text}"; expected a whole number from {low} to {high}')
    return int(text)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise BadInput(f'tolerance is "{text}"; expected a number above 0 and at most 1')
    return value


def _prefers_png(accept: str) -> bool:
    """Say whether an Accept header puts image/png before application/json (RFC 9110, 12.5.1)."""
    return _quality(accept, "image/png") > _quality(accept, "application/json")


def _quality(accept: str, media_type: str) -> float:
    """Give the weight of a media type: that of the most specific range that holds it."""
    group = media_type.partition("/")[0]
    weights = {}
    for part in accept.lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        weights[name] = _weight(parameters)
    for name in (media_type, f"{group}/*", "*/*"):
        if name in weights:
            return weights[name]
    return 0.0


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0
