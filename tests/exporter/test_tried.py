"""Inputs that are found by what layers take, and by what runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modelyard.exporter.inputs.tried import TriedInputs, find_inputs


class Rows(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Conv2d(3, 8, 3, stride=2)
        self.read = nn.Linear(5, 8)
        self.head = nn.Linear(8 * 7 * 7 + 8, 2)

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([self.see(image).flatten(1), self.read(table)], 1))
        return out


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.read = nn.LSTM(8, 6, batch_first=True)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = (self.read(self.table(ids))[0] * mask[..., None]).mean(1)
        return out


class Flat(nn.Module):
    """A picture that nothing says the channels of."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 2)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(image.flatten(1))
        return out


class Scaled(nn.Module):
    """Scales its pictures by what it holds, which rows of numbers would run through as well."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, 3, 1, 1))
        self.see = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, 2)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.see(image - self.mean).mean((2, 3)))
        return out


class Branches(nn.Module):
    """Looks at values, which tensors without any do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.hear = nn.Conv1d(2, 4, 3)
        self.head = nn.Linear(4 * 98, 2)

    def forward(self, wave: Tensor) -> Tensor:
        if wave.sum() > 0:
            wave = wave * 2
        out: Tensor = self.head(self.hear(wave).flatten(1))
        return out


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize(
    ("model", "inputs", "is_only"),
    [
        (Rows(), ["input:float32[batch,4]"], True),
        (Two(), ["image:float32[batch,3,16,16]", "table:float32[batch,5]"], True),
        (Words(), ["ids:int64[batch,length=2..32]<50", "mask:int64[batch,length=2..32]"], True),
        (Flat(), ["image:float32[batch,64]"], False),
        (Scaled(), ["image:float32[batch,3,224,224]"], False),
        (Branches(), ["wave:float32[batch,2,100]"], True),
        (nn.Conv2d(3, 4, 3), ["input:float32[batch,3,224,224]"], False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_layers_take_and_runs_is_found(
    model: nn.Module, inputs: list[str], is_only: bool
) -> None:
    assert find_inputs(model.eval()) == TriedInputs(tuple(inputs), is_only)


def test_nothing_is_found_where_no_layer_says_anything() -> None:
    assert find_inputs(Opaque().eval()) is None
