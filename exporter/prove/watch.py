"""What a model does that an artifact cannot keep or an explanation cannot cross, seen in one run.

Every operator passes by, with the line of the author's that asked for it: random numbers,
batch-norm on the statistics of its batch, and work done under `torch.no_grad()`.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from modelyard.base.scale import Scale
from modelyard.exporter.arguments import own_name
from modelyard.exporter.prove.outside import Outside, watch_outside
from modelyard.handlers.proof.agree import compare

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
RUNS = 4
_LAST_PLACES = 2.0
# Parts of the names of torch's operators that add up many terms, or do so inside.
_SUMS = (
    *("mm", "addmv", "mv", "dot", "linear", "einsum", "convolution", "mkldnn", "attention"),
    *("sum", "mean", "var", "std", "norm", "softmax", "pool", "upsample", "lstm", "gru", "rnn"),
)


class Drawn(NamedTuple):
    """Random numbers that a model draws."""

    place: str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Watched:
    """What one run showed; each entry is a place in the author's code, "" when not known."""

    random: dict[str, Drawn] = field(default_factory=dict)
    """Operator that draws random numbers → what it draws first."""
    batch_norm: list[str] = field(default_factory=list)
    """Places that normalise by the statistics of the batch."""
    cut: list[str] = field(default_factory=list)
    """Places where gradients end under torch.no_grad()."""
    custom: dict[str, str] = field(default_factory=dict)
    """torch.autograd.Function of the author's → place of its call."""
    precisions: set[torch.dtype] = field(default_factory=set)
    """The floating-point dtypes of what operators gave."""
    outside: Outside = field(default_factory=Outside)
    """What it read from outside, and kept from call to call."""

    def warnings(self) -> list[str]:
        """Return in a sentence each what the author may want to change."""
        lines = [
            f"forward() draws random numbers{drawn.place} ({operator}), so outputs may not repeat; "
            "draw them outside and pass them as an input"
            for operator, drawn in self.random.items()
        ]
        lines += [
            f"gradients end{place}, under torch.no_grad() inside forward(), so explanations would "
            "leave that part out; remove it there and use it around the call"
            for place in dict.fromkeys(self.cut)
        ]
        lines += [
            f"the backward() of {name}{place} is in no artifact: it holds the operators of its "
            "forward(), and explanations take their gradients"
            for name, place in self.custom.items()
        ]
        return [*lines, *self.outside.warnings()]


def watch(model: nn.Module, inputs: Sequence[Tensor]) -> Watched:
    """Run the model once and note what it does; a failure ends the watching, without an error.

    Args:
        model: a model in eval mode, which has run before.
        inputs: not changed.
    """
    seen = Watched()
    # Products are not leaves, so that a model may still write into its input.
    given = [
        tensor.clone().requires_grad_() * 1 if tensor.is_floating_point() else tensor.clone()
        for tensor in inputs
    ]
    try:
        outside = watch_outside(model, seen.outside)
        with warnings.catch_warnings(), torch.enable_grad(), outside:
            warnings.simplefilter("ignore")  # the run before this one gave them
            with EachOperator(_watching(seen)):
                model(*given)
    # Gradients are not promised yet: a model may fail in any way where it now asks for them.
    except Exception:
        seen.precisions.clear()
    return seen


@dataclass
class Counted:
    """What a run does."""

    gflop: float = 0.0
    """Arithmetic, 1e9 floating-point operations; of matrix products, convolutions, attention."""
    operators: int = 0
    names: set[str] = field(default_factory=set)
    """Operators that were run, without their overloads."""


@contextmanager
def count(formulas: dict[Any, Any] | None = None) -> Iterator[Counted]:
    """Count what is run in this context; it is known once that is left.

    Args:
        formulas: operator → its arithmetic by shapes, beside torch's own.
    """
    counted = Counted()
    flops = FlopCounterMode(display=False, custom_mapping=formulas)

    def run(func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        counted.operators += 1
        counted.names.add(func.name().partition("::")[2].partition(".")[0])
        return func(*args, **given)

    with flops, EachOperator(run):
        yield counted
    counted.gflop = flops.get_total_flops() / 1e9


def plain_tensors(model: nn.Module) -> list[str]:
    """Name the tensors that are neither parameter nor buffer, so in no checkpoint."""
    return [
        ".".join(filter(None, (own_name(name), attribute)))
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor)
    ]


def in_train_mode(model: nn.Module) -> list[str]:
    """Name the layers that act otherwise in training and are left in that mode."""
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
    return [
        f'"{own_name(name)}" ({type(module).__name__})'
        for name, module in model.named_modules()
        if module.training and isinstance(module, kinds)
    ]


class EachOperator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hand every operator that is dispatched in this context to a function, with its arguments.

    Args:
        run: returns what the operator is to give.
    """

    def __init__(self, run: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._run(func, args, kwargs or {})


def _watching(seen: Watched) -> Callable[..., Any]:
    """Return what runs an operator and notes in `seen` what it does."""

    def run(func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        name = func.name().removeprefix("aten::")
        # Attention is marked as random for the dropout that it may do, and repeats without.
        is_random = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name
        if "batch_norm" in name and _argument(func, args, given, "training"):
            seen.batch_norm.append(_author_place())
        if not torch.is_grad_enabled() and _cuts(func, args):
            # The author's torch.no_grad(), or the autograd.Function whose forward() sets it.
            functions = _functions()
            frame = next((each for each in _frames() if each.f_code in functions), None)
            if frame is not None:
                seen.custom.setdefault(functions[frame.f_code], _author_place(frame))
            elif not seen.outside.has_gradients:  # else an operator turned them off inside itself
                seen.cut.append(_author_place())
        result = func(*args, **given)
        seen.precisions |= {
            each.dtype for each in tree_leaves(result)
            if isinstance(each, Tensor) and each.is_floating_point()
        }  # fmt: skip
        if is_random and isinstance(drawn := result, Tensor):
            dtype, shape = str(drawn.dtype).removeprefix("torch."), tuple(drawn.shape)
            place = _author_place()
            seen.random.setdefault(name.partition(".")[0], Drawn(place, dtype, shape))
        return result

    return run


def _functions() -> dict[object, str]:
    """Return the code of each forward() of an autograd.Function → the name of its class.

    What calls it, `apply`, has no frame from torch 2.15 on.
    """
    kinds: list[Any] = [torch.autograd.Function]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {getattr(kind.forward, "__code__", None): kind.__name__ for kind in reversed(kinds)}


def _frames(frame: FrameType | None = None) -> Iterator[FrameType]:
    """Yield the frames of the model's run, the innermost first, from those outside of `frame`."""
    frame = frame or sys._getframe(1)
    while (frame := frame.f_back) is not None:
        file = frame.f_code.co_filename
        if file != __file__ and file.startswith(_OURS):
            return
        yield frame


def _author_place(frame: FrameType | None = None) -> str:
    """Name the innermost line of the stack that is not torch's: " at net.py:12"; "" without one."""
    for outer in _frames(frame):
        file = outer.f_code.co_filename
        if not file.startswith((_OURS, _TORCH, "<")):
            return f" at {Path(file).name}:{outer.f_lineno}"
    return ""


def _cuts(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator gives, from a tensor with gradients, another without."""
    differentiable = any(
        isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()
        for value in args
    )
    gives_numbers = any("Tensor" in str(result.type) for result in func._schema.returns)
    return differentiable and gives_numbers and not func.name().startswith("aten::detach")


def _argument(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> object:
    """Return an operator's argument by the name that its schema has for it."""
    names = [argument.name for argument in func._schema.arguments]
    return {**kwargs, **dict(zip(names, args, strict=False))}.get(name)


def measure_sensitivity(
    run: Callable[[tuple[Tensor, ...]], Sequence[Tensor]],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    scales: Sequence[Scale],
) -> list[float]:
    """Return per output how far it moves at most when its sums are rounded otherwise, scaled.

    Every library adds in an order of its own, so that sums end a few units in the last place apart.
    A model whose answer that changes has no one answer: a normalisation of what is constant divides
    rounding errors by nothing. Here each result of a sum (matrix product, convolution, mean, norm,
    softmax …) is moved by up to two units in the last place, in a direction drawn from a fixed
    seed: Monte Carlo arithmetic. What is zero stays zero, and other operators are as they were.

    Source: D. S. Parker, Monte Carlo Arithmetic, UCLA CSD-970002, 1997.

    Args:
        run: the model.
        inputs: those of one case.
        outputs: what it gives for them undisturbed.
        scales: by which each is measured.
    """
    moved = [0.0] * len(outputs)
    for seed in range(RUNS):
        generator = torch.Generator().manual_seed(seed)
        with _rounded(generator):
            disturbed = run(tuple(_disturb(tensor, generator) for tensor in inputs))
        apart = (
            compare(one, other, scale=scale)["scaled"]
            for one, other, scale in zip(outputs, disturbed, scales, strict=True)
        )
        moved = [max(one, two) for one, two in zip(moved, apart, strict=True)]
    return moved


def _rounded(generator: torch.Generator) -> EachOperator:
    """Round what sums give in a direction of its own."""

    def run(func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        result = func(*args, **given)
        name = func.name().removeprefix("aten::").partition(".")[0]
        # An operator that writes into its input gives that, whose other views must follow.
        if name.endswith("_") or not any(part in name for part in _SUMS):
            return result
        if isinstance(result, tuple):
            return tuple(_disturb(value, generator) for value in result)
        return _disturb(result, generator)

    return EachOperator(run)


def _disturb(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float64):
        return value
    moves = torch.rand(value.shape, generator=generator, dtype=value.dtype).to(value.device)
    return value * (1 + (2 * moves - 1) * _LAST_PLACES * torch.finfo(value.dtype).eps)
