"""Calls by their schema, with what wraps around, cannot be divided, or is scaled to nothing."""

from typing import Any

import torch
from torch import Tensor

from tests.fuzz.programs import FLOATS, INTEGERS, WHOLES, Program

WRAPPING = (
    *(2**63 - 1, -(2**63), 2**62, -(2**62), 2**61 + 1, 2**63 - 8, 2**32, 2**32 + 1, 2**33 - 1),
    *(2**31, 2**31 - 1, -(2**31), -(2**31) - 1, 2**30, 2**28, 2**28 + 1, 2**16, 2**14, -1, 0),
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
    [2**63 - 1] * 6,
    [-(2**63)] * 4,
    [-1] * 3,
)
"""Their sums or products are small again, or 0, where 2^64 is."""
SCALES = (5e-324, 1e-300, 1e-38, 2.0**-20, 2.0**-21, 2.0**20, 1e38, 1e300, 0.5, -0.5, -1e-300)


class Edges(Program):
    """As `Program`, with other values."""

    def _integer(self) -> int:
        return self.random.choice(WRAPPING if self.random.random() < 0.5 else INTEGERS)

    def _mutate(self, call: Any) -> None:
        super()._mutate(call)
        for holder in (call[0], call[1]):
            for key in range(len(holder)) if isinstance(holder, list) else list(holder):
                self._sharpen(holder, key)

    def _sharpen(self, holder: Any, key: Any) -> None:
        value, draw = holder[key], self.random.random()
        if isinstance(value, float) and draw < 0.5:
            holder[key] = self.random.choice(SCALES + FLOATS)
        elif isinstance(value, list) and value and draw < 0.3:
            if all(isinstance(each, int) for each in value):
                holder[key] = self._wrapping(len(value))
            elif all(isinstance(each, float) for each in value):
                holder[key] = [self.random.choice(SCALES + FLOATS) for _ in value]
        elif isinstance(value, dict) and "tensor" in value and draw < 0.4:
            kind = "uint8" if self.random.random() < 0.5 else "int64"
            is_real = value["tensor"].startswith(("float", "bfloat"))
            holder[key] = value | ({"tensor": kind} if is_real else {"hostile": True})

    def _wrapping(self, length: int) -> list[int]:
        drawn = list(self.random.choice(LISTS))
        return (drawn * length)[:length] if self.random.random() < 0.6 else drawn

    def _drawn(self, kind: str, name: str, length: int | None) -> Any:
        draw = self.random.random()
        if draw < 0.4 and kind.removeprefix("Optional[").startswith("List[int]"):
            return self._wrapping(length or 3)
        if draw < 0.5 and "float" in kind and "List" not in kind:
            return self.random.choice(SCALES + FLOATS)
        return super()._drawn(kind, name, length)

    def _tensor(self, spec: dict[str, Any]) -> Tensor:
        made = super()._tensor(spec)
        if made.dtype in WHOLES and made.numel() and self.random.random() < 0.5:
            limits = torch.iinfo(made.dtype)
            values = self._wrapping(max(made.numel(), 1)) if self.random.random() < 0.5 else []
            values = values or [self.random.choice((limits.min, limits.max, -1, 0))]
            wrapped = [limits.min + (each - limits.min) % (1 << limits.bits) for each in values]
            flat = (wrapped * made.numel())[: made.numel()]
            return torch.tensor(flat, dtype=made.dtype).reshape(made.shape)
        return made
