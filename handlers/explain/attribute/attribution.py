"""Integrated gradients: one output as a function of the inputs → each value's share in it."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from modelyard.archiver.signature import UNLIMITED, Dim
from modelyard.handlers.errors import NoGradients
from modelyard.handlers.models.backends import Artifact, Output, main_output, type_name

FIRST_STEPS = 30
"""Fewer can agree by chance with a third of them."""

MAX_STEPS = 270
DEFAULT_TOLERANCE = 0.05
"""Tolerance for the stated error, which is some three times the true one: 1 % takes five times the
points."""

ROUNDING = 8
"""So many units in the last place of what was added up are taken for rounding."""

Model = Callable[..., Output]
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class ForwardFunction:
    """The one number per row that is explained, as a function of some of a model's inputs.

    M below is the number of explanations: a request that asks for three targets counts three times.
    """

    model: Model
    """Called with the explained inputs, then the fixed ones; the first output counts."""
    targets: Tensor
    """(M,) or (M, K) int64: places in the flattened output of a row."""
    fixed: Tensors = ()
    """(M, …) each: inputs that are not explained, as token ids or masks."""
    function: Callable[[Tensor], Tensor] | None = None
    """Outputs (R, …) → what takes their place, as probabilities."""
    weights: Tensor | None = None
    """Weights as of `targets`: what each of these numbers counts in the sum; 1 without them."""

    def __call__(self, points: Tensors, rows: Tensor) -> Tensor:
        """Return (R,) numbers for R points.

        Args:
            points: (R, *S) for each explained input.
            rows: (R,) which explanation each point belongs to.
        """
        output = outputs_of(self.model(*points, *(tensor[rows] for tensor in self.fixed)))
        if self.function is not None:
            output = self.function(output)
        # A target alone may have a million places, which are not copied for each point.
        which = rows[:1] if len(self.targets) == 1 else rows
        places = self.targets[which].view(len(which), -1)
        picked = output.flatten(1).gather(1, places.expand(len(rows), -1))
        if self.weights is not None:
            picked = picked * self.weights[which].view(places.shape).to(picked)
        return picked.sum(1)


@dataclass(frozen=True)
class AttributionRequest:
    """M explanations that one call of a method answers together."""

    forward: ForwardFunction
    inputs: Tensors
    """(M, *S) each."""
    baseline_sets: tuple[Tensors, ...]
    """Baselines of each of the M: (B, *S) per input; B is 1 but for a set from a file of the
    archive."""
    f_input: Tensor
    """(M,) float64: the output at the input."""
    f_baseline: Tensor
    """(M,) float64: the output at the baseline, the mean over a set."""
    chunk_rows: int = 8
    """Points that share one forward and backward pass; bounds the memory."""
    between_chunks: Callable[[], None] = field(default=lambda: None)
    """Called before each pass; what it raises ends the work."""
    known_scales: Tensors | None = None
    """(M, …) per input: `scales`, where something is known of the values."""

    def __len__(self) -> int:
        return len(self.f_input)

    @cached_property
    def baselines(self) -> Tensors:
        """The first baseline of each explanation, (M, *S) per input."""
        columns = zip(*self.baseline_sets, strict=True)
        return tuple(torch.stack([rows[0] for rows in column]) for column in columns)

    @cached_property
    def scales(self) -> Tensors:
        """Ranges that the values vary by, which noise is a share of: (M, …) per input.

        Where nothing is known of them, all values of an input count together.
        """
        return self.known_scales or tuple(map(ranges_of, self.inputs))

    @property
    def device(self) -> torch.device:
        """Where the inputs are."""
        return self.inputs[0].device

    def part(self, chunk: slice) -> "AttributionRequest":
        """Return some of the explanations, as a request of their own."""
        weights = self.forward.weights
        forward = replace(
            self.forward,
            targets=self.forward.targets[chunk],
            weights=None if weights is None else weights[chunk],
            fixed=tuple(tensor[chunk] for tensor in self.forward.fixed),
        )
        return replace(
            self,
            forward=forward,
            inputs=tuple(tensor[chunk] for tensor in self.inputs),
            baseline_sets=self.baseline_sets[chunk],
            f_input=self.f_input[chunk],
            f_baseline=self.f_baseline[chunk],
            known_scales=_rows(self.known_scales, chunk),
        )


@dataclass(frozen=True)
class Attribution:
    """What a method found for the M explanations of a request."""

    attributions: Tensors
    """(M, *S) per input, in units of the output."""
    n_steps: Tensor
    """(M,) int64: points at which the model was asked."""
    errors: Tensors | None = None
    """(M, *S) per input: how far off each value may be; None where a method does not know."""
    rounding: Tensor | None = None
    """(M,) float64: what the sum may be off by for rounding alone; None counts as 0."""
    sides: Tensor | None = None
    """(M, 2) float64: what speaks for the target and what speaks against it, each added up, where
    these are not the sums of the values."""
    set_error: Tensor | None = None
    """(M,): of a set of baselines, how far the mean over them is off that over all that they are
    drawn from, as a share of the norm; NaN of a single one."""

    @property
    def total(self) -> Tensor | None:
        """(M,) float64: the sum, where it is not that of all values."""
        return None if self.sides is None else self.sides.sum(1)

    @cached_property
    def error(self) -> Tensor | None:
        """(M,) float64: the norm of the errors as a share of the norm of the attributions.

        It is 0 where all of these are rounding.
        """
        if self.errors is None:
            return None
        errors, size = norms_of(self.errors), norms_of(self.attributions)
        rounding = torch.zeros_like(size) if self.rounding is None else self.rounding
        is_nothing = (errors <= rounding) & (size <= rounding)
        return torch.where((errors == 0) | is_nothing, 0.0, errors / size)

    def part(self, at: int) -> "Attribution":
        """Return what was found for one of the explanations, as of a request of its own."""
        row = slice(at, at + 1)
        return Attribution(
            tuple(each[row] for each in self.attributions),
            self.n_steps[row],
            _rows(self.errors, row),
            None if self.rounding is None else self.rounding[row],
            None if self.sides is None else self.sides[row],
            None if self.set_error is None else self.set_error[row],
        )


def _rows(each: Tensors | None, rows: slice) -> Tensors | None:
    return None if each is None else tuple(tensor[rows] for tensor in each)


def integrated_gradients(
    request: AttributionRequest,
    *,
    n_steps: int | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    max_steps: int = MAX_STEPS,
) -> Attribution:
    """Attribute the output to each input value, by the midpoint rule.

    Without `n_steps`, rows begin with 30 points and triple them while their error or their delta
    is above the tolerance; the midpoints of n steps are among those of 3n, so no point is computed
    twice, and a row that has met the tolerance costs no further passes.

    The error is how far the answer of 3n points is from that of the n among them. Where the number
    of points is not a multiple of three, one or two count in both.

    Args:
        request: inputs are real-valued; values as after preprocess.
        n_steps: points for every row; None chooses them per row. The error of 1 or 2 is not known.
        tolerance: the largest error, and the largest |delta| as a share of |f_input − f_baseline|.
        max_steps: no row gets more points than this.

    Raises:
        NoGradients: the output does not depend on the input through anything differentiable.

    Source: Sundararajan et al. 2017, section 3, https://arxiv.org/abs/1703.01365
    """
    with recording():
        path = _Path(request)
        steps = n_steps or min(FIRST_STEPS, max_steps)
        used = torch.full((len(request),), steps, device=request.device)
        rows = torch.arange(len(request), device=request.device)
        path.add(rows, _midpoints(steps), _coarse_weights(steps))
        while n_steps is None and 3 * steps <= max_steps:
            rows = rows[~is_met(request, path.found(used), tolerance)[rows]]
            if not len(rows):
                break
            # All open rows are at the same number of steps: one leaves for good once it is met.
            steps *= 3
            used[rows] = steps
            path.refine(rows, steps)
        return path.found(used)


class _Path:
    """Gradients along the straight lines from baselines to inputs, summed point by point."""

    def __init__(self, request: AttributionRequest) -> None:
        self.request = request
        # Tensors made under inference_mode cannot take part in autograd; copies can.
        self.baselines = tuple(tensor.detach().clone() for tensor in request.baselines)
        self.deltas = tuple(
            tensor.detach() - baseline
            for tensor, baseline in zip(request.inputs, self.baselines, strict=True)
        )
        self.sums = tuple(
            torch.zeros_like(delta, dtype=torch.promote_types(delta.dtype, torch.float32))
            for delta in self.deltas
        )
        self.coarse = tuple(map(torch.zeros_like, self.sums))
        """The sums as a third of the points makes them, each of which counts three times."""
        self.sizes = torch.zeros(len(request), dtype=torch.float64, device=request.device)
        """Sizes of what is added up: rounding is a share of them."""

    def add(self, rows: Tensor, alphas: Tensor, weights: Tensor | None = None) -> None:
        """Add gradients at baseline + alpha · delta, for `rows` (R,) and each of `alphas` (A,).

        Args:
            rows: which explanations.
            alphas: places between baseline and input.
            weights: (A,) of each in the coarse sums; none counts there without them.
        """
        which = rows.repeat_interleave(len(alphas))
        where = alphas.to(rows.device).repeat(len(rows))
        heights = None if weights is None else weights.to(rows.device).repeat(len(rows))
        for chunk in chunks(len(which), self.request.chunk_rows):
            self.request.between_chunks()
            row = which[chunk]
            points = tuple(
                baseline[row] + _column(where[chunk].to(delta), delta) * delta[row]
                for baseline, delta in zip(self.baselines, self.deltas, strict=True)
            )
            for point in points:
                point.requires_grad_()
            found = gradients(self.request.forward, points, row)
            for total, coarse, gradient, delta in zip(
                self.sums, self.coarse, found, self.deltas, strict=True
            ):
                gradient = gradient.to(total.dtype)
                total.index_add_(0, row, gradient)
                if heights is not None:
                    coarse.index_add_(0, row, gradient * _column(heights[chunk].to(total), total))
                size = (gradient * delta[row]).flatten(1).abs().sum(1, dtype=torch.float64)
                self.sizes.index_add_(0, row, size)

    def refine(self, rows: Tensor, steps: int) -> None:
        """Triple the points of `rows` to `steps`."""
        for total, coarse in zip(self.sums, self.coarse, strict=True):
            coarse[rows] = 3 * total[rows]
        self.add(rows, _new_midpoints(steps))

    def found(self, steps: Tensor) -> Attribution:
        """Return what the points so far amount to, for the steps (M,) that each row has."""
        attributions, errors = (
            tuple(
                delta * (total / _column(steps, delta))
                for delta, total in zip(self.deltas, totals, strict=True)
            )
            for totals in (self.sums, [a - b for a, b in zip(self.sums, self.coarse, strict=True)])
        )
        ends = self.request.f_input.abs() + self.request.f_baseline.abs()
        unit = max(torch.finfo(delta.dtype).eps for delta in self.deltas)
        return Attribution(
            attributions,
            steps,
            tuple(each.abs() for each in errors) if int(steps.min()) >= 3 else None,
            ROUNDING * unit * (self.sizes / steps + ends),
        )


def gradients(forward: ForwardFunction, points: Tensors, rows: Tensor) -> Tensors:
    """Return the gradient of the output at each point (R, *S); zero for an input without influence.

    Raises:
        NoGradients: none of the inputs has any.
    """
    picked = forward(points, rows)
    found: tuple[Tensor | None, ...] = (None,) * len(points)
    if picked.requires_grad:
        found = torch.autograd.grad(picked.sum(), points, allow_unused=True)
    if all(gradient is None for gradient in found):
        raise NoGradients(
            "no gradient flows from the output to the input: the artifact is not differentiable, "
            "or its forward() cuts the graph (no_grad, argmax, rounding); archive a pt2 export of "
            "the checkpoint with --explain-with, or choose a method without gradients"
        )
    return tuple(
        torch.zeros_like(point) if gradient is None else gradient
        for point, gradient in zip(points, found, strict=True)
    )


@contextmanager
def recording() -> Iterator[None]:
    """Record gradients inside a `with`, also where the caller computes in inference mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def evaluate(
    model: Model, inputs: Tensors, chunk_rows: int, between_chunks: Callable[[], None] | None = None
) -> Tensor:
    """Return the outputs (N, …) that can be explained, for inputs (N, *S), without gradients."""
    found = []
    with torch.no_grad():
        for chunk in chunks(len(inputs[0]), chunk_rows):
            if between_chunks is not None:
                between_chunks()
            found.append(outputs_of(model(*(tensor[chunk] for tensor in inputs))))
    return torch.cat(found)


def outputs_of(output: Output, names: Sequence[str] = ()) -> Tensor:
    """Return the first output of real numbers as (N, K) or with more dimensions.

    Args:
        output: output of a call.
        names: names of the outputs, for the message.

    Raises:
        NoGradients: none holds real numbers.
    """
    found = main_output(output)
    if not found.is_floating_point():
        every = (output,) if isinstance(output, Tensor) else output
        named = zip(names, every, strict=True) if len(names) == len(every) else enumerate(every)
        gives = ", ".join(f"{name}:{type_name(each)}" for name, each in named)
        raise NoGradients(f"the model gives {gives}; only real-valued outputs can be explained")
    return found.unsqueeze(1) if found.dim() == 1 else found


def softmax_of(outputs: Tensor) -> Tensor | None:
    """Return the softmax of two or more classes (N, K); None of other outputs."""
    return outputs.softmax(1) if outputs.dim() == 2 and outputs.shape[1] > 1 else None


def ranges_of(inputs: Tensor) -> Tensor:
    """Return the largest less the smallest value of each row (N, *S): (N, 1, …)."""
    dims = tuple(range(1, inputs.dim()))
    if not dims:
        return torch.zeros_like(inputs)
    return inputs.amax(dims, keepdim=True) - inputs.amin(dims, keepdim=True)


def sums_of(attributions: Tensors) -> Tensor:
    """Add the attributions of each row up, over all inputs: (M,) float64."""
    sums = [each.flatten(1).sum(1, dtype=torch.float64) for each in attributions]
    return torch.stack(sums).sum(0)


def sizes_of(attributions: Tensors) -> Tensor:
    """Add the sizes |a| of the attributions of each row up, over all inputs: (M,) float64."""
    return sums_of(tuple(map(Tensor.abs, attributions)))


def norms_of(attributions: Tensors) -> Tensor:
    """Return the Euclidean norm of each row, over all inputs: (M,) float64."""
    squares = [each.flatten(1).double().square().sum(1) for each in attributions]
    return torch.stack(squares).sum(0).sqrt()


def is_met(request: AttributionRequest, found: Attribution, tolerance: float) -> Tensor:
    """Return for each row (M,) whether error and delta of integrated gradients are within it.

    A delta is, too, that is no more than rounding.
    """
    difference = request.f_input - request.f_baseline
    delta = (sums_of(found.attributions) - difference).abs()
    is_whole = delta <= tolerance * difference.abs()
    if found.rounding is not None:
        is_whole |= delta <= found.rounding
    return is_whole if found.error is None else is_whole & (found.error <= tolerance)


def chunks(count: int, size: int) -> Iterator[slice]:
    """Cut 0 … count into slices of at most `size`."""
    return (slice(begin, begin + size) for begin in range(0, count, size))


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))


def _midpoints(n: int) -> Tensor:
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def _coarse_weights(n: int) -> Tensor:
    """Return how often each of n midpoints counts where every third one stands for three.

    What is left over, one or two at the end, stands for itself.
    """
    weights = torch.zeros(n, dtype=torch.float64)
    threes = 3 * (n // 3)
    weights[1:threes:3] = 3
    weights[threes:] = 1
    return weights


def _new_midpoints(n: int) -> Tensor:
    """Return the midpoints of n steps that are not midpoints of n/3: every third one is."""
    return _midpoints(n)[torch.arange(n) % 3 != 1]


FORWARD_ROWS = 32
"""Rows of a pass without gradients, where nothing is kept, so that memory decides little."""

MOST_ROWS = 64

PASS_BYTES = 1 << 30
"""Kept for one backward pass at most: more rows are not faster, as they miss the caches more."""

MEMORY_SHARE = 4
"""A pass may keep one part in so many of the memory that is free."""

Shapes = tuple[torch.Size, ...]

_row_bytes: WeakKeyDictionary[Artifact, dict[Shapes, int]] = WeakKeyDictionary()


def most_rows(artifact: Artifact) -> int:
    """Return how many rows an artifact takes at once, as far as it says."""
    sizes = (
        rows.max if isinstance(rows, Dim) else rows
        for spec in artifact.inputs
        for rows in spec.shape[:1]
    )
    return min(sizes, default=UNLIMITED)


def gradient_rows(artifact: Artifact, forward: ForwardFunction, inputs: Tensors) -> int:
    """Choose how many points share a pass with gradients.

    The tensors that autograd keeps for one more row are counted once per shape of the inputs.

    Args:
        artifact: what `forward` computes with.
        forward: pass of at least one row.
        inputs: (M, *S) each.
    """
    shapes = tuple(each.shape[1:] for each in inputs)
    known = _row_bytes.setdefault(artifact, {})
    if shapes not in known:
        first = _kept_bytes(forward, inputs, 1)
        more = _kept_bytes(forward, inputs, 2) - first if most_rows(artifact) > 1 else first
        known[shapes] = max(1, more)
    budget = min(PASS_BYTES, free_bytes(inputs[0].device) // MEMORY_SHARE)
    return max(1, min(MOST_ROWS, budget // known[shapes]))


def free_bytes(device: torch.device) -> int:
    """Return the memory that a computation on `device` can still get, at least.

    Of the machine's, what files fill is not counted. Asked of the kernel (sysinfo), for a file of
    procfs may be gone behind a worker's walls.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or its limit is "max"
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text("ascii"))
                       for name in ("max", "current"))  # fmt: skip
        return min(available, max(0, limit - used))
    return available


def _kept_bytes(forward: ForwardFunction, inputs: Tensors, count: int) -> int:
    """Return the size of the storages that autograd keeps of so many rows."""
    rows = torch.zeros(count, dtype=torch.int64, device=inputs[0].device)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with recording(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward(tuple(each.detach()[rows].clone().requires_grad_() for each in inputs), rows)
    return sum(kept.values())
