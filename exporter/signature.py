"""Names, dtypes, shapes and dynamic dimensions of a model's inputs and outputs.

An input is written `name:dtype[dims]`: `image:float32[batch,1,8,8]`. A dim is a number, or a name,
which makes it dynamic; `length=1..128` gives the range of sizes to prove, 1..8 when absent. A name
that appears twice is one size.

A tensor inside an argument is named by the way to it: `batch.image:float32[…]` is the value under
the key "image" of the dict `batch`, `pair.0:float32[…]` the first tensor of the tuple or list
`pair`. The artifact takes them one by one, as `batch_image` and `pair_0`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from keyword import iskeyword
from typing import Any

import torch

from modelyard.exporter.errors import UsageError

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")
_FORM = "name:dtype[dims], such as image:float32[batch,1,8,8]"
_DIM_FORM = "a size such as 8, a name such as batch, or a name with its range such as batch=1..8"


@dataclass(frozen=True)
class DimRange:
    """The sizes of a dynamic dimension that parity proves, both ends included."""

    min: int = 1
    max: int = 8

    def __str__(self) -> str:
        return f"{self.min}..{self.max}"


@dataclass(frozen=True)
class TensorSpec:
    """One input or output; in `shape`, a name stands for a dynamic dimension."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    path: str = ""
    """Where the tensor stands in forward()'s arguments, when that is inside one: `batch.image`."""

    def __str__(self) -> str:
        return f"{self.path or self.name}:{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def is_float(self) -> bool:
        """Whether it holds floating-point numbers."""
        return DTYPES[self.dtype].is_floating_point

    def sizes(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape with every dynamic dimension at its size in `dims`."""
        return tuple(dims[size] if isinstance(size, str) else size for size in self.shape)

    def to_json(self) -> dict[str, Any]:
        """Return the form that the report holds."""
        found = {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}
        return {**found, "argument": self.path} if self.path else found


@dataclass(frozen=True)
class Batching:
    """Whether requests may share a call: whether each row's output depends on that row alone."""

    batchable: bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return the form that the report holds."""
        return {"batchable": self.batchable, "reason": self.reason}


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs in the order of the call; outputs are empty until the model has run."""

    inputs: tuple[TensorSpec, ...]
    dims: Mapping[str, DimRange] = field(default_factory=dict)
    outputs: tuple[TensorSpec, ...] = ()
    batching: Batching | None = None
    """None until the model has run."""

    @property
    def batch_dim(self) -> int | str:
        """The first dimension of the first input: a dim's name, or its fixed size."""
        return self.inputs[0].shape[0]

    def in_precision(self, dtype: torch.dtype | None) -> "Signature":
        """Return the signature whose floating-point inputs are of `dtype`; None keeps them."""
        if dtype is None:
            return self
        name = str(dtype).removeprefix("torch.")
        inputs = (replace(spec, dtype=name) if spec.is_float else spec for spec in self.inputs)
        return replace(self, inputs=tuple(inputs))

    def to_json(self) -> dict[str, Any]:
        """Return the form that the report holds."""
        found: dict[str, Any] = {
            "inputs": [spec.to_json() for spec in self.inputs],
            "outputs": [spec.to_json() for spec in self.outputs],
            "dims": {name: {"min": dim.min, "max": dim.max} for name, dim in self.dims.items()},
        }
        if self.batching is not None:
            found["batching"] = self.batching.to_json()
        return found


def parse_inputs(texts: Sequence[str]) -> Signature:
    """Read every `--input` of one model.

    Raises:
        UsageError: names the input, the part of it that is wrong, and what was expected there.
    """
    if not texts:
        raise UsageError(f"no --input given; expected one {_FORM} per argument of forward()")
    ranges: dict[str, DimRange | None] = {}
    specs = tuple(_parse_input(text, ranges) for text in texts)
    names = [spec.name for spec in specs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            f'--input "{twice[0]}" is given twice; every input needs a name of its own'
        )
    return Signature(specs, {name: dim or DimRange() for name, dim in ranges.items()})


def _parse_input(text: str, ranges: dict[str, DimRange | None]) -> TensorSpec:
    path, colon, rest = text.partition(":")
    name = path.replace(".", "_")
    if not _PATH.fullmatch(path) or iskeyword(name):
        raise _wrong(text, f'"{path}" is not a name of letters, digits and _', _FORM)
    if not colon:
        raise _wrong(text, f'nothing follows the name "{name}"', _FORM)
    dtype, bracket, dims = rest.partition("[")
    if dtype not in DTYPES:
        raise _wrong(text, f'"{dtype}" is not a dtype', f"one of {', '.join(DTYPES)}")
    if not bracket or not dims.endswith("]"):
        wrong = f'"{bracket}{dims}" after the dtype is not a list of dims in [ ]'
        raise _wrong(text, wrong, _FORM)
    parts = dims.removesuffix("]").split(",")
    shape = tuple(
        _parse_dim(text, position, part.strip(), ranges)
        for position, part in enumerate(parts, start=1)
    )
    return TensorSpec(name, dtype, shape, path if path != name else "")


def _parse_dim(
    text: str, position: int, part: str, ranges: dict[str, DimRange | None]
) -> int | str:
    """Read one dim, and note a named one in `ranges` (None until a range is given)."""
    if part.isdecimal() and int(part) > 0:
        return int(part)
    name, equals, range_text = part.partition("=")
    if not _NAME.fullmatch(name):
        raise _wrong(text, f'dim {position} is "{part}"', _DIM_FORM)
    if not equals:
        ranges.setdefault(name, None)
        return name
    wanted = _parse_range(text, position, part, range_text)
    if ranges.get(name) not in (None, wanted):
        seen = f'dim "{name}" is {wanted} here and {ranges[name]} elsewhere'
        raise _wrong(text, seen, "one range per name")
    ranges[name] = wanted
    return name


def _parse_range(text: str, position: int, part: str, range_text: str) -> DimRange:
    ends = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", range_text)
    if ends is None:
        raise _wrong(text, f'dim {position} is "{part}"', _DIM_FORM)
    low, high = int(ends[1]), int(ends[2])
    if low < 1 or low >= high:
        wrong = f"dim {position} has the range {low}..{high}"
        raise _wrong(
            text, wrong, "1 or more first, then more; a single size is written as a number"
        )
    return DimRange(low, high)


def _wrong(text: str, seen: str, expected: str) -> UsageError:
    return UsageError(f'--input "{text}": {seen}; expected {expected}')
