"""What torch's own two calls make of a model: torch.export.export and torch.onnx.export."""

import inspect
import logging
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from modelyard.archiver.signature import Dim, Signature, TensorSpec

CLOSE = 1e-3  # of an output's largest value, or of 1
Values = tuple[Tensor, ...]


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

    def __init__(self, model: nn.Module, signature: Signature, constants: dict[str, Any]) -> None:
        self.model, self.signature, self.constants = model, signature, constants
        takes = inspect.signature(model.forward).parameters
        self.by_name = all(spec.name in takes for spec in signature.inputs)
        self.names = [spec.name for spec in signature.inputs]

    def arguments(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call."""
        if not self.by_name:
            return tuple(inputs), dict(self.constants)
        return (), {**dict(zip(self.names, inputs, strict=True)), **self.constants}

    def __call__(self, inputs: Values) -> list[Tensor]:
        """Return the tensors that the model gives."""
        args, kwargs = self.arguments(inputs)
        with torch.no_grad():
            return _tensors(self.model(*args, **kwargs))

    def dynamic_shapes(self) -> Any:
        """Return the dims that may vary, with their ranges."""
        dims = {name: _dim(dim) for name, dim in self.signature.dims.items()}
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


def judge(bare: Bare, run: Callable[[Values], list[Tensor]]) -> str:
    """Compare with the model at other sizes than it was traced with; return "ok" or what is not."""
    for seed, sizes in enumerate(choose_sizes(bare.signature)):
        inputs = make_inputs(bare.signature, sizes, seed)
        try:
            expected = bare(inputs)
        except Exception as error:
            return f"FAIL of the model itself: {_line(error)}"
        try:
            found = run(inputs)
        except Exception as error:
            return f"WRONG at {sizes}: {_line(error)}"
        if problem := difference(expected, found):
            return f"WRONG at {sizes}: {problem}"
    return "ok"


def difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> str:
    """Return how outputs differ; empty where they agree."""
    if len(expected) != len(found):
        return f"{len(found)} outputs, not {len(expected)}"
    for one, other in zip(expected, found, strict=True):
        if one.shape != other.shape:
            return f"shape {list(other.shape)}, not {list(one.shape)}"
        if one.is_complex():
            one, other = torch.view_as_real(one), torch.view_as_real(other)
        one, other = one.double(), other.double()
        limit = CLOSE * max(1.0, float(one.abs().nan_to_num(0).max()) if one.numel() else 0.0)
        if not torch.allclose(one, other, rtol=0, atol=limit, equal_nan=True):
            return f"by {float((one - other).abs().max()):.1e}"
    return ""


def call_both(bare: Bare, folder: Path) -> dict[str, str]:
    """Return the verdict on each call."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    example = make_inputs(bare.signature, choose_sizes(bare.signature)[0], 0)
    return {"pt2": _try(_pt2, bare, example, folder), "onnx": _try(_onnx, bare, example, folder)}


def _try(call: Callable[..., Any], bare: Bare, example: Values, folder: Path) -> str:
    try:
        run = call(bare, example, folder)
    except Exception as error:
        return f"FAIL {_line(error)}"
    return judge(bare, run)


def _line(error: BaseException) -> str:
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    text = next((line.strip() for line in str(root).splitlines() if line.strip()), "")
    return f"{type(root).__name__}: {text}"[:160]


def _pt2(bare: Bare, example: Values, folder: Path) -> Callable[[Values], list[Tensor]]:
    args, kwargs = bare.arguments(example)
    shapes = bare.dynamic_shapes()
    program = torch.export.export(bare.model, args, kwargs, dynamic_shapes=shapes)
    module = program.module()

    def run(inputs: Values) -> list[Tensor]:
        args, kwargs = bare.arguments(inputs)
        with torch.no_grad():
            return _tensors(module(*args, **kwargs))

    return run


def _onnx(bare: Bare, example: Values, folder: Path) -> Callable[[Values], list[Tensor]]:
    import onnxruntime

    args, kwargs = bare.arguments(example)
    file = folder / "bare.onnx"
    torch.onnx.export(
        bare.model,
        args,
        file,
        kwargs=kwargs,
        dynamo=True,
        dynamic_shapes=bare.dynamic_shapes(),
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
