"""The inputs on which checkpoint and artifact are compared, and the one that is traced.

All are made from a fixed seed. Kinds: `random` (floats from a standard normal distribution),
`zeros`, `large` (four times random; the largest integers that the model takes; all true), and for
floats `tiny` (next to the smallest number of the dtype, half of them denormal) and `negative`.
Where an input's values are stated, all are among them: `zeros` are then the smallest integers.

A mask (an input of integers or flags with "mask" in its name) holds 0 and 1, and always lets the
first position through: attention over nothing has no answer that two libraries would agree on.

Which of them are tried, says `modelyard.handlers.proof.plan`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from modelyard.archiver.signature import Dim, Signature, TensorSpec
from modelyard.archiver.values import End, Values
from modelyard.handlers.models.backends import torch_dtype

KINDS = ("random", "zeros", "large", "tiny", "negative")
USUAL_KINDS = ("random", "sample", "zeros", "tiny", "negative")
"""Kinds whose outputs teach something for other inputs: those of others may be far larger."""
LARGE = 4.0
# Up to here every size is tried; a wider range is tried at its start, at doublings and at its end.
ALL_SIZES_UP_TO = 32
_FLAGS = Values(End(0), End(1))


@dataclass(frozen=True)
class Probe:
    """One input to try: `sizes` of the dynamic dimensions, and how the values are made.

    The kind `sample` is a file's: its values are not made here.
    """

    kind: str
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        return f"{sizes_text(self.sizes)} ({self.kind} values)"


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Write sizes of dims, as reports and messages do."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "the fixed shape"


def make_case(signature: Signature, probe: Probe) -> tuple[Tensor, ...]:
    """Make the inputs of a probe: the same for an export and for whoever repeats it."""
    return make_inputs(signature, probe, seed=crc32(str(probe).encode()))


def example_sizes(signature: Signature) -> dict[str, int]:
    """Choose the sizes to trace with: never 1, and equal to no other size where possible.

    A tracer takes a dimension of size 1, or two of equal size, for something that always holds.
    """
    taken = {size for spec in signature.inputs for size in spec.shape if isinstance(size, int)}
    chosen: dict[str, int] = {}
    for name, dim in signature.dims.items():
        candidates = [size for size in (5, 3, 7, dim.min, dim.max) if size > 1 and size in dim]
        candidates += dim.sizes(2)
        free = (size for size in candidates if size not in taken)
        chosen[name] = next(free, candidates[0] if candidates else dim.max)
        taken.add(chosen[name])
    return chosen


def make_inputs(signature: Signature, probe: Probe, *, seed: int = 0) -> tuple[Tensor, ...]:
    """Make one tensor per input on the CPU; equal arguments give equal values.

    Args:
        signature: the inputs; integers without stated values are 0 and 1.
        probe: sizes and kind.
        seed: another seed gives other random values.
    """
    generator = torch.Generator().manual_seed(seed)
    return tuple(_values(spec, probe.sizes, probe.kind, generator) for spec in signature.inputs)


def _values(
    spec: TensorSpec, sizes: Mapping[str, int], kind: str, generator: torch.Generator
) -> Tensor:
    dtype, shape = torch_dtype(spec.dtype), spec.sizes(sizes)
    if dtype.is_floating_point and spec.values is None:
        return _floats(torch.randn(shape, generator=generator), kind, dtype)
    stated = spec.values or _FLAGS
    low, high = stated.ends(sizes)
    if stated.among:
        places = _integers(shape, kind, 0, len(stated.among) - 1, generator)
        values = torch.tensor(stated.among, dtype=dtype)[places]
    elif dtype.is_floating_point:
        values = _floats_between(shape, kind, low, high, generator).to(dtype)
    else:
        values = _integers(shape, kind, int(low), int(high), generator).to(dtype)
    if stated.order:
        values = values.sort(dim=-1, descending=stated.order == "falling").values
    if stated.order == "rising" and values.numel():
        values[..., 0] = low
    let_through = spec.open_value
    if let_through in stated.among or (
        let_through is not None and not stated.among and low <= let_through <= high
    ):
        values[..., 0] = let_through
    return values


def _integers(
    shape: tuple[int, ...], kind: str, low: int, high: int, generator: torch.Generator
) -> Tensor:
    if kind in ("zeros", "large"):
        return torch.full(shape, high if kind == "large" else low)
    return torch.randint(low, high + 1, shape, generator=generator)


def _floats_between(
    shape: tuple[int, ...], kind: str, low: float, high: float, generator: torch.Generator
) -> Tensor:
    """Make float64 values of a range: where it holds none of a kind, those that come next to it."""
    if kind == "random":
        values = torch.rand(shape, generator=generator, dtype=torch.float64)
        return low + (high - low) * values
    if kind == "tiny":
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (normal * torch.finfo(torch.float32).tiny).clamp(low, high)
    value = {"zeros": min(max(0.0, low), high), "large": high, "negative": low}[kind]
    return torch.full(shape, value, dtype=torch.float64)


def _floats(normal: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    if kind == "zeros":
        normal = torch.zeros_like(normal)
    elif kind == "large":
        normal = normal * LARGE
    elif kind == "tiny":
        normal = normal.double() * torch.finfo(dtype).tiny
    elif kind == "negative":
        normal = -normal.abs()
    return normal.to(dtype)


def batch_sizes(dim: Dim, *, is_reduced: bool) -> tuple[int, ...]:
    """Return the sizes of the batch dimension to try."""
    if is_reduced:
        return tuple(sorted({dim.min, dim.at_least(2), *_largest_prime(dim), dim.max}))
    sizes = dim.sizes()
    if len(sizes) <= ALL_SIZES_UP_TO:
        return tuple(sizes)
    doublings = [2**power for power in range(dim.max.bit_length()) if 2**power in dim]
    first = sizes[: ALL_SIZES_UP_TO // 2]
    return tuple(sorted({*first, *doublings, *_largest_prime(dim), dim.max}))


def inner_sizes(dim: Dim, *, is_reduced: bool) -> tuple[int, ...]:
    """Return sizes between the ends of a dim: odd ones, and multiples of 2, 4, 8 and 16 alone.

    What networks pad, fold or cut to goes by these; where a range is wide, one of each.

    Args:
        dim: dim that is not the batch's.
        is_reduced: the smallest of each, instead of some that lie apart.
    """
    inner = dim.sizes()[1:-1]
    chosen = []
    for at, power in enumerate((16, 8, 4, 2, 1)):
        alike = [size for size in inner if size % power == 0 and (power == 16 or size // power % 2)]
        if alike:
            chosen.append(alike[0 if is_reduced else len(alike) * (2 * at + 1) // 10])
    return tuple(sorted(chosen))


def _largest_prime(dim: Dim) -> tuple[int, ...]:
    """Find the largest odd prime below the end of the range: a size that no tile divides."""
    for size in reversed(dim.sizes(3)[:-1]):
        if all(size % factor for factor in range(2, int(size**0.5) + 1)):
            return (size,)
    return ()
