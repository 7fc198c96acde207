"""Further inputs than those of an export: a kernel may be wrong where random numbers never are.

Each is made of ordinary inputs of the export at sizes that it tried, so that the model takes it:
what is stated of an input (its range, its order, a mask) still holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from modelyard.archiver.report import Extent
from modelyard.archiver.signature import Dim, Signature, TensorSpec
from modelyard.handlers.proof.probes import Probe, make_inputs, sizes_text

LARGE_BATCH = 8


def _alike(x: Tensor, dim: int) -> Tensor:
    """Repeat what stands first along all dims from one on."""
    first = (slice(None),) * min(dim, x.ndim) + (slice(0, 1),) * (x.ndim - dim)
    return x[first].expand_as(x)


def _channel(x: Tensor, row: int | None) -> Tensor:
    """Keep one channel, or in each row one; all others are zeros."""
    kept, channels = torch.zeros_like(x), x.shape[min(1, x.ndim - 1)]
    for at in range(len(x)):
        place = (at, at % channels if row is None else row % channels)[: x.ndim]
        kept[place] = x[place]
    return kept


def _last(x: Tensor, ones: float) -> Tensor:
    return torch.cat((x[:-1], torch.full_like(x[-1:], ones)))


OF_PLACES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "others": lambda x: x,
    "one number": lambda x: _alike(x, 0),
    "one number a row": lambda x: _alike(x, 1),
    "one number a channel": lambda x: _alike(x, 2),
    "equal rows": lambda x: x[:1].expand_as(x),
    "rows in reverse": lambda x: x.flip(0),
}
"""Values where others were: of any input without an order of its own."""
OF_NUMBERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "ones": torch.ones_like,
    "halves": lambda x: torch.full_like(x, 0.5),
    "minus ones": lambda x: -torch.ones_like(x),
    "positive": torch.abs,
    "3 or -3": lambda x: 3 * x.sign(),
    "whole numbers": lambda x: (4 * x).round(),
    "rising": lambda x: x.sort(dim=-1).values,
    "1000 times": lambda x: 1000 * x,
    "a 1000th": lambda x: x / 1000,
    "the last row zeros": lambda x: _last(x, 0.0),
    "the last row ones": lambda x: _last(x, 1.0),
    "the first channel": lambda x: _channel(x, 0),
    "the last channel": lambda x: _channel(x, -1),
    "a channel each row": lambda x: _channel(x, None),
}
"""Further ones of floats; what lies beyond a range that is stated is its end."""


@dataclass(frozen=True)
class Further(Probe):
    """One of these inputs; `kind` names how it is made."""

    draw: int = 0
    """Another gives other random numbers."""

    def __str__(self) -> str:
        return f"{sizes_text(self.sizes)} ({self.kind}{f', draw {self.draw}' * bool(self.draw)})"

    def inputs(self, signature: Signature) -> tuple[Tensor, ...]:
        """Make them: equal arguments give equal values."""
        made = make_inputs(signature, Probe("random", self.sizes), seed=crc32(str(self).encode()))
        return tuple(map(self._made, signature.inputs, made))

    def _made(self, spec: TensorSpec, values: Tensor) -> Tensor:
        stated = spec.values
        is_bound = spec.open_value is not None or bool(stated and stated.order)
        if is_bound or not values.ndim or not values.numel():
            return values
        if self.kind in OF_PLACES:
            return OF_PLACES[self.kind](values).contiguous()
        if not spec.is_float or (stated and stated.among):
            return values
        made = OF_NUMBERS[self.kind](values)
        refused = (spec.limits.low, spec.limits.high) if spec.limits else (None, None)
        ends = stated.ends(self.sizes) if stated else refused
        return made if ends == (None, None) else made.clamp(*ends)


def further_inputs(
    signature: Signature, extent: Extent, tried: Sequence[Probe], draws: int = 1
) -> Iterator[Further]:
    """Yield them, at one size that the export tried or at two where it tried all.

    Args:
        signature: the inputs, with the values that were tried.
        extent: how much the export tried.
        tried: what it tried.
        draws: how many of each.
    """
    has_floats = any(spec.is_float for spec in signature.inputs)
    kinds = [*OF_PLACES, *(OF_NUMBERS if has_floats else ())]
    name = signature.batch.name if isinstance(signature.batch, Dim) else ""
    sizes = {sizes_text(each.sizes): each.sizes for each in tried if each.kind != "sample"}
    rows = {text: each.get(name, 1) for text, each in sizes.items()}
    chosen = [next((text for text in sizes if rows[text] > 1), next(iter(sizes), None))]
    if extent == "every" and sizes:
        chosen.append(max(sizes, key=lambda text: (rows[text] <= LARGE_BATCH, rows[text])))
    for text in dict.fromkeys(filter(None, chosen)):
        yield from (Further(kind, sizes[text], draw) for draw in range(draws) for kind in kinds)


def rounded_otherwise(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return inputs that are up to two units in the last place away; what is zero stays."""
    generator = torch.Generator().manual_seed(0)

    def moved(values: Tensor) -> Tensor:
        if not values.is_floating_point():
            return values
        by = 2 * torch.rand(values.shape, generator=generator, dtype=torch.float64) - 1
        return (values.double() * (1 + 2 * torch.finfo(values.dtype).eps * by)).to(values.dtype)

    return [moved(each) for each in inputs]
