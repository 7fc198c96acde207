from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import parse_inputs
from modelyard.exporter.errors import ModelError
from modelyard.exporter.prove.reference import observe
from modelyard.exporter.prove.watch import count

HERE = Path(__file__).name


class Draws(nn.Module):
    """Draws numbers that it does not use, so that its outputs repeat."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * torch.randn(x.shape)


class Drops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


class Cuts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = 2 * x
        out: Tensor = self.layer(x)
        return out


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(3)
        self.register_buffer("kept", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Stays(nn.Module):
    """Has layers that eval() does not reach."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def train(self, mode: bool = True) -> "Stays":
        return super().train(True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Surrogate(torch.autograd.Function):
    """A step, whose gradient is said to be 1, as spiking networks have it."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return (x * x > 1).to(x.dtype)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Steps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        once: Tensor = Surrogate.apply(x)  # type: ignore[no-untyped-call]
        twice: Tensor = Surrogate.apply(once + x)  # type: ignore[no-untyped-call]
        return twice


def _warnings(model: nn.Module) -> tuple[str, ...]:
    signature = parse_inputs(["x:float32[batch,3]"])
    return observe(model.eval(), signature, (), torch.device("cpu")).warnings


@pytest.mark.parametrize(
    ("model", "seen"),
    [
        pytest.param(Draws(), f"draws random numbers at {HERE}:19 (randn)", id="random"),
        pytest.param(Cuts(), f"gradients end at {HERE}:34, under torch.no_grad()", id="no grad"),
        pytest.param(
            Steps(), f"the backward() of Surrogate at {HERE}:78 is in no artifact", id="function"
        ),
        pytest.param(Constant(), '"scale" is a tensor outside the state dict', id="plain tensor"),
    ],
)
def test_what_the_author_may_want_to_change_is_said_once_with_its_line(
    model: nn.Module, seen: str
) -> None:
    (warning,) = _warnings(model)
    assert seen in warning


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 2),
        nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.LayerNorm(8)),
        nn.TransformerEncoderLayer(3, 1, 4, batch_first=True),
    ],
    ids=["linear", "dropout in eval mode", "attention"],
)
def test_an_ordinary_model_gets_no_warning(model: nn.Module) -> None:
    assert _warnings(model) == ()


def test_dropout_that_stays_on_is_refused_with_its_line() -> None:
    with pytest.raises(ModelError, match=rf"remove what is random in forward\(\) at {HERE}:24"):
        _warnings(Drops())


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.Dropout(0.0)])
def test_a_layer_left_in_train_mode_is_refused_by_its_name(layer: nn.Module) -> None:
    with pytest.raises(ModelError, match=rf'"layer" \({type(layer).__name__}\) stay in train mode'):
        _warnings(Stays(layer))


def test_the_arithmetic_of_a_matrix_product_is_counted() -> None:
    with count() as counted:
        nn.Linear(100, 10)(torch.ones(5, 100)).relu()
    assert counted.gflop == 2 * 5 * 100 * 10 / 1e9
    assert counted.operators >= 3
