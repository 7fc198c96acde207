"""What torch's own two calls make of a model: torch.export.export and torch.onnx.export."""

import copy
import inspect
import logging
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from modelyard.archiver.signature import Dim, Signature, TensorSpec

CLOSE = 1e-3  # of an output's spread over all cases
_ROUNDING = 1e-6  # of its largest value, below which float32 says nothing
Values = tuple[Tensor, ...]
Run = Callable[[Values], list[Tensor]]


def make_inputs(signature: Signature, sizes: dict[str, int], seed: int) -> Values:
    """Return inputs that the model takes; not the exporter's own."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(_make(spec, sizes, generator) for spec in signature.inputs)


def _make(spec: TensorSpec, sizes: dict[str, int], generator: torch.Generator) -> Tensor:
    shape, dtype = spec.sizes(sizes), getattr(torch, spec.dtype)
    if "mask" in spec.name:
        values = torch.randint(0, 2, shape, generator=generator)
        values[..., 0] = 1
        return values.to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    low, high = spec.values.ends(sizes) if spec.values else (0, 1)
    return torch.randint(int(low), int(high) + 1, shape, generator=generator).to(dtype)


def choose_sizes(signature: Signature) -> list[dict[str, int]]:
    """Return the sizes to trace with, then those to judge at: a smaller batch, both ends."""
    dims = signature.dims.items()
    drawn = random.Random(0)
    ends = [{name: getattr(dim, end) for name, dim in dims} for end in ("min", "max")]
    middle = [{name: drawn.choice(dim.sizes(2)) for name, dim in dims} for _ in range(2)]
    traced = middle[0] | {name: dim.max for name, dim in dims if name == "batch"}
    return [traced, *ends, middle[1] | {name: 2 for name, _ in dims if name == "batch"}]


class Bare:
    """A model and how its user calls it."""

    def __init__(self, model: Any, signature: Signature, constants: dict[str, Any]) -> None:
        self.model, self.signature, self.constants = model, signature, constants
        takes = inspect.signature(model.forward).parameters
        self.by_name = all(spec.name in takes for spec in signature.inputs)
        self.names = [spec.name for spec in signature.inputs]

    def arguments(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call; complex ones are made of their real views."""
        specs = zip(inputs, self.signature.inputs, strict=True)
        inputs = [
            torch.view_as_complex(each) if spec.view and isinstance(each, Tensor) else each
            for each, spec in specs
        ]
        if not self.by_name:
            return tuple(inputs), dict(self.constants)
        return (), {**dict(zip(self.names, inputs, strict=True)), **self.constants}

    def __call__(self, inputs: Values) -> list[Tensor]:
        """Return the tensors that the model gives."""
        args, kwargs = self.arguments(inputs)
        with torch.no_grad():
            return _tensors(self.model(*args, **kwargs))

    def of(self, model: Any) -> "Bare":
        """Return what calls another model in the same way."""
        other = copy.copy(self)
        other.model = model
        return other

    def dynamic_shapes(self, any_size: bool = False) -> Any:
        """Return the dims that may vary, with their ranges or without."""
        free = torch.export.Dim.DYNAMIC
        dims = {n: free if any_size else _dim(dim) for n, dim in self.signature.dims.items()}
        args, kwargs = self.arguments(
            [
                {i: dims[size.name] for i, size in enumerate(spec.shape) if isinstance(size, Dim)}
                for spec in self.signature.inputs
            ]
        )
        kwargs |= dict.fromkeys(self.constants)
        return kwargs if self.by_name else args


def _dim(dim: Dim) -> Any:
    if dim.step == 1:
        return torch.export.Dim(dim.name, min=dim.min, max=dim.max)
    steps = torch.export.Dim(f"_{dim.name}", min=dim.min // dim.step, max=dim.max // dim.step)
    return dim.step * steps


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def judge(bare: Bare, run: Run) -> str:
    """Compare with the model at other sizes than it was traced with; return "ok" or what is not."""
    sizes = choose_sizes(bare.signature)
    cases = [make_inputs(bare.signature, each, seed) for seed, each in enumerate(sizes)]
    try:
        expected = [bare(inputs) for inputs in cases]
    except Exception as error:
        return f"FAIL of the model itself: {_line(error)}"
    limits = [_limit(tensors) for tensors in zip(*expected, strict=False)]
    for each, inputs, outputs in zip(sizes, cases, expected, strict=True):
        try:
            found = run(inputs)
        except Exception as error:
            return f"WRONG at {each}: {_line(error)}"
        if problem := difference(outputs, found, limits):
            return f"WRONG at {each}: {problem}"
    return "ok"


def difference(
    expected: Sequence[Tensor], found: Sequence[Tensor], limits: Sequence[float] | None = None
) -> str:
    """Return how outputs differ; empty where they agree. Without limits: by their own spread."""
    if len(expected) != len(found):
        return f"{len(found)} outputs, not {len(expected)}"
    limits = limits or [_limit([one]) for one in expected]
    for one, other, limit in zip(expected, found, limits, strict=True):
        one, other = _numbers(one), _numbers(other)
        if one.shape != other.shape:
            return f"shape {list(other.shape)}, not {list(one.shape)}"
        if not torch.allclose(one, other, rtol=0, atol=limit, equal_nan=True):
            return f"by {float((one - other).abs().max()):.1e}, where {limit:.1e} is allowed"
    return ""


def _limit(tensors: Sequence[Tensor]) -> float:
    """Return by how much an output may differ, given its values in all cases."""
    values = torch.cat([_numbers(each).flatten() for each in tensors])
    values = values[values.isfinite()]
    if not values.numel():
        return 0.0
    spread = float(values.max() - values.min())
    return max(CLOSE * spread, _ROUNDING * float(values.abs().max()))


def _numbers(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def call_both(bare: Bare, folder: Path) -> dict[str, str]:
    """Return the verdict on each call."""
    return {kind: call(bare, folder, kind) for kind in ("pt2", "onnx")}


def call(bare: Bare, folder: Path, kind: str) -> str:
    """Return the verdict on what one of torch's own calls writes, `{kind} dynamic` included."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    example = make_inputs(bare.signature, choose_sizes(bare.signature)[0], 0)
    kind, _, is_dynamic = kind.partition(" ")
    shapes = bare.dynamic_shapes(any_size=bool(is_dynamic))
    try:
        run = _CALLS[kind](bare, example, shapes, folder)
    except Exception as error:
        return f"FAIL {_line(error)}"
    return judge(bare, run)


def _line(error: BaseException) -> str:
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    text = next((line.strip() for line in str(root).splitlines() if line.strip()), "")
    return f"{type(root).__name__}: {text}"[:160]


def _pt2(bare: Bare, example: Values, shapes: Any, folder: Path) -> Run:
    args, kwargs = bare.arguments(example)
    program = torch.export.export(bare.model, args, kwargs, dynamic_shapes=shapes)
    torch.export.save(program, folder / "bare.pt2")
    return bare.of(torch.export.load(folder / "bare.pt2").module())


def _script(bare: Bare, example: Values, shapes: Any, folder: Path) -> Run:
    return bare.of(_saved(torch.jit.script(bare.model), folder))


def _trace(bare: Bare, example: Values, shapes: Any, folder: Path) -> Run:
    args, kwargs = bare.arguments(example)
    by = {"example_kwarg_inputs": kwargs} if kwargs else {"example_inputs": args}
    traced = torch.jit.trace(bare.model, **by, strict=False)  # type: ignore[no-untyped-call]
    return bare.of(_saved(traced, folder))


def _saved(program: Any, folder: Path) -> Any:
    torch.jit.save(program, folder / "bare.ts")
    return torch.jit.load(folder / "bare.ts")  # type: ignore[no-untyped-call]


def _onnx(bare: Bare, example: Values, shapes: Any, folder: Path) -> Run:
    import onnxruntime

    args, kwargs = bare.arguments(example)
    file = folder / "bare.onnx"
    torch.onnx.export(
        bare.model,
        args,
        file,
        kwargs=kwargs,
        dynamo=True,
        dynamic_shapes=shapes,
        verbose=False,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options)
    takes = [node.name for node in session.get_inputs()]

    def run(inputs: Values) -> list[Tensor]:
        by_name = dict(zip(bare.names, inputs, strict=True))
        feed = {
            name: by_name.get(name, inputs[min(i, len(inputs) - 1)]).numpy()
            for i, name in enumerate(takes)
        }
        return [torch.from_numpy(np.asarray(each)) for each in session.run(None, feed)]

    return run


_CALLS: dict[str, Callable[..., Run]] = {
    "pt2": _pt2,
    "onnx": _onnx,
    "script": _script,
    "trace": _trace,
}
