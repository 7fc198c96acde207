"""One output as a function of the inputs: the share of each value, and the rows of a pass."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from modelyard.archiver.signature import UNLIMITED, Dim
from modelyard.handlers.errors import NoGradients
from modelyard.handlers.models.backends import Artifact, Output, as_tuple, main_output, type_name

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
        part = partial(_rows, chunk)
        forward = replace(self.forward, **part(self.forward, "targets", "weights", "fixed"))
        own = part(self, "inputs", "f_input", "f_baseline", "known_scales")
        return replace(self, forward=forward, baseline_sets=self.baseline_sets[chunk], **own)


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

    hidden: Tensor | None = None
    """(M,) float64: what the output changes by on the way beyond what the gradients allow."""
    path_delta: Tensor | None = None
    """(M,) float64: the largest gap between the output on the way and the sum up to there, as a
    share of how far the output goes from the baseline's."""

    differences: Tensors | None = None
    """(M, *S) per input: how far each value is from what a third of the points made of it, with
    its sign, where the method has such thirds."""

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
        return Attribution(**_rows(slice(at, at + 1), self, *(each.name for each in fields(self))))


def _rows(rows: slice, owner: object, *names: str) -> dict[str, Any]:
    """Return some rows of fields by their names, of each of several tensors; nothing of None."""
    found = ((name, getattr(owner, name)) for name in names)
    return {
        name: tuple(tensor[rows] for tensor in each) if isinstance(each, tuple) else each[rows]
        for name, each in found
        if each is not None
    }


def gradients(forward: ForwardFunction, points: Tensors, rows: Tensor) -> Tensors:
    """Return the gradient of the output at each point (R, *S); zero for an input without influence.

    Raises:
        NoGradients: none of the inputs has any.
    """
    return outputs_and_gradients(forward, points, rows)[1]


def outputs_and_gradients(
    forward: ForwardFunction, points: Tensors, rows: Tensor
) -> tuple[Tensor, Tensors]:
    """Return the output at each point (R,) too, see `gradients`."""
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
    return picked.detach(), tuple(
        torch.zeros_like(point) if gradient is None else gradient
        for point, gradient in zip(points, found, strict=True)
    )


def product(slopes: Tensor, ways: Tensor) -> Tensor:
    """Return slopes times ways; 0 where there is no way, whatever the slope: it may be NaN."""
    return torch.where(ways == 0, torch.zeros_like(slopes), slopes * ways)


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
        every = as_tuple(output)
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
    """Return for each row (M,) whether error and deltas of integrated gradients are within it.

    A delta is, too, that is no more than rounding, and a gap on the path whose bends explain it.
    """
    difference = request.f_input - request.f_baseline
    delta = (sums_of(found.attributions) - difference).abs()
    is_whole = delta <= tolerance * difference.abs()
    if found.rounding is not None:
        is_whole |= delta <= found.rounding
    if found.path_delta is not None and found.hidden is not None:
        is_whole &= (found.path_delta <= tolerance) | (found.hidden == 0)
    return is_whole if found.error is None else is_whole & (found.error <= tolerance)


def stopwatch(budget_ms: int | None) -> Callable[[float], bool]:
    """Start to measure; what is returned says whether more work ends within the budget.

    It is called with how much work that is, as a multiple of what was done so far.
    """
    begin = time.monotonic()

    def fits(more: float) -> bool:
        spent = time.monotonic() - begin
        return budget_ms is None or spent * (1 + more) * 1000 <= budget_ms

    return fits


def chunks(count: int, size: int) -> Iterator[slice]:
    """Cut 0 … count into slices of at most `size`."""
    return (slice(begin, begin + size) for begin in range(0, count, size))


def column(values: Tensor, like: Tensor) -> Tensor:
    """Return one number a row (R,), as it is multiplied with (R, …)."""
    return values.view(-1, *[1] * (like.dim() - 1))


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
    with suppress(OSError, ValueError):  # no cgroup v2, or its limit is "max"
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
