"""torch's own samples with what wraps around, cannot be divided, or is scaled to nothing.

Of a call that works, some arguments are exchanged by their kind in the operator's schema; sums and
products of what stands in a list are small where 2^64 is 0.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.programs import FLOATS, WHOLES
from tests.fuzz.samples import Call, Samples, at_end

VARIANTS = 12  # of one call
INTEGERS = (
    *(2**63 - 1, -(2**63), 2**62, -(2**62), 2**61 + 1, 2**63 - 8, 2**32, 2**32 + 1, 2**33 - 1),
    *(2**31, 2**31 - 1, -(2**31), -(2**31) - 1, 2**30, 2**28, 2**16, 2**14, -1, 0, 1, 2, 3, 7),
)
LISTS = (
    [2**62] * 4 + [3],
    [2**63 - 1, 2**63 - 1, 4],
    [-(2**63), -(2**63), 5],
    [2**61] * 8 + [1, 2],
    [2**31] * 3,
    [2**32, 2**32, 3],
    [2**16] * 4,
    [2**21, 2**21, 2**22],
    [2**63 - 1],
    [-(2**63)],
    [-1],
    [1, -1],
    [0],
)
SCALES = (5e-324, 1e-300, 1e-38, 2.0**-20, 2.0**-21, 2.0**20, 1e38, 1e300, 0.5, -0.5, -1e-300)
MODES = ("trunc", "floor", "none", "mean", "sum", "constant", "reflect", "replicate", "circular")


class Edges(Samples):
    """Calls of one operator's samples, as `Samples`, with other values."""

    def variants(self, target: Any, args: Any, kwargs: Any) -> Iterator[tuple[Call, Call | None]]:
        """Yield the arguments with some of them exchanged."""
        arguments = target._schema.arguments
        for _ in range(VARIANTS):
            is_byte, share = self.random.random() < 0.3, self.random.choice((0.3, 0.6, 1.0))
            kinds = [str(each.real_type) for each in arguments]
            own = [
                self._other(value, kind, is_byte, share)
                for value, kind in zip(args, kinds, strict=False)
            ]
            # What was left out is given, too.
            for argument, kind in list(zip(arguments, kinds, strict=True))[len(own) :]:
                if argument.kwarg_only or self.random.random() < 0.5:
                    break
                own.append(self._other(argument.default_value, kind, is_byte, share))
            named = {
                each.name: self._other(kwargs[each.name], kind, is_byte, share)
                for each, kind in zip(arguments, kinds, strict=True)
                if each.name in kwargs
            }
            yield (own, named), None

    def _other(self, value: Any, kind: str, is_byte: bool, share: float) -> Any:
        if isinstance(value, Tensor):
            return at_end(self._tensor_like(value, is_byte, share))
        if isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
            return [self._other(each, kind, is_byte, share) for each in value]
        if self.random.random() > share or isinstance(value, bool):
            return value
        length = len(value) if isinstance(value, list | tuple) else 2
        if "List[int]" in kind:
            if self.random.random() < 0.5:
                return self._wrapping(length)
            own = list(value or [1] * length)
            if own:
                own[self.random.randrange(len(own))] = self.random.choice(INTEGERS)
            return own
        if "List[float]" in kind:
            return [self.random.choice(SCALES + FLOATS) for _ in range(length)]
        if "int" in kind:
            return self.random.choice(INTEGERS)
        if "float" in kind or "number" in kind:
            return self.random.choice(SCALES + FLOATS + INTEGERS)
        return self.random.choice(MODES) if "str" in kind else value

    def _tensor_like(self, value: Tensor, is_byte: bool, share: float) -> Tensor:
        if is_byte and value.is_floating_point():
            value = value.clamp(0, 200).to(torch.uint8)
        if not value.numel() or self.random.random() > share:
            return value
        if value.dtype in WHOLES:
            limits = torch.iinfo(value.dtype)
            wrapped = [
                limits.min + (each - limits.min) % (1 << limits.bits)
                for each in self._wrapping(value.numel())
            ]
            if self.random.random() < 0.3:
                wrapped = [self.random.choice((limits.min, limits.max, -1 if limits.min else 1))]
            flat = (wrapped * value.numel())[: value.numel()]
            return torch.tensor(flat, dtype=value.dtype).reshape(value.shape)
        if value.is_floating_point() and self.random.random() < 0.5:
            value = value.clone(memory_format=torch.contiguous_format)
            hostile = torch.tensor(self.random.choice(FLOATS), dtype=torch.float64)
            value.view(-1)[self.random.randrange(value.numel())] = hostile.to(value.dtype)
        return value

    def _wrapping(self, length: int) -> list[int]:
        drawn = self.random.choice(LISTS)
        return (drawn * length)[: max(length, 1)] if self.random.random() < 0.9 else list(drawn)
