from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import Batching, parse_inputs
from modelyard.exporter.prove.reference import observe


class Row(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Column(nn.Module):
    """Takes away the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class First(nn.Module):
    """Lets the first row alone and adds it to all others."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:1], x[1:] + x[:1]])


class Reversed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(0)


class OnTheBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        twice = torch.stack([x, 2 * x], 2)
        return nn.functional.batch_norm(twice, None, None, training=True)


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0)


class Against(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.T


class Shared(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale


class Widest(nn.Module):
    """Gives as many columns as its largest value says."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : int(x.abs().max().item()) + 1]


class PerGroup(nn.Module):
    """Normalises each row by itself, through the same operator as batch-norm."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.instance_norm(x.unsqueeze(1)).squeeze(1)


class WithLoss(nn.Module):
    """Gives what each row has, and a loss of them all."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": x.square().mean(), "twice": 2 * x, "half": x / 2}


class WithMean(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"twice": 2 * x, "apart": x - x.mean(0)}


def _batching(model: nn.Module, *inputs: str, outputs: Sequence[str] = ()) -> Batching:
    found = observe(model.eval(), parse_inputs(inputs), outputs, torch.device("cpu"))
    assert found.signature.batching is not None
    assert found.signature.to_json()["batching"] == vars(found.signature.batching)
    return found.signature.batching


@pytest.mark.parametrize("model", [Row(), PerGroup(), nn.BatchNorm1d(3)])
def test_rows_that_depend_on_themselves_alone_may_share_a_batch(model: nn.Module) -> None:
    assert _batching(model, "x:float32[batch,3]").batchable


@pytest.mark.parametrize(
    ("model", "seen"),
    [
        pytest.param(Column(), 'a row of output "output" changes by ', id="mean of the batch"),
        pytest.param(First(), "with the other rows of its batch", id="only the first matters"),
        pytest.param(Reversed(), "with the other rows of its batch", id="order"),
        pytest.param(OnTheBatch(), "statistics of its batch at test_batching.py:", id="batch-norm"),
        pytest.param(Sum(), 'output "output" has no dim "batch" in front', id="sum"),
        pytest.param(Against(), "has rows as long as the batch", id="all against all"),
    ],
)
@pytest.mark.parametrize("dim", ["batch", "batch=3..5"])
def test_rows_that_mix_are_found_and_named(model: nn.Module, seen: str, dim: str) -> None:
    found = _batching(model, f"x:float32[{dim},3]")
    assert not found.batchable
    assert seen in found.reason


@pytest.mark.parametrize(
    ("model", "at_fault", "keep"),
    [
        pytest.param(WithLoss(), '"loss" has no dim "batch"', ["twice", "half"], id="no rows"),
        pytest.param(WithMean(), 'a row of output "apart" changes by', ["twice"], id="rows mix"),
    ],
)
def test_outputs_that_keep_requests_apart_are_named_with_those_to_keep(
    model: nn.Module, at_fault: str, keep: list[str]
) -> None:
    found = _batching(model, "x:float32[batch,3]")
    assert not found.batchable
    assert at_fault in found.reason
    assert found.reason.endswith("; try" + "".join(f" --output {name}" for name in keep))
    assert _batching(model, "x:float32[batch,3]", outputs=keep).batchable


def test_no_other_outputs_are_named_where_these_were_asked_for() -> None:
    found = _batching(WithLoss(), "x:float32[batch,3]", outputs=["twice", "loss"])
    assert (found.batchable, found.reason) == (
        False,
        'output "loss" has no dim "batch" in front, so no row per request',
    )


def test_an_input_that_all_rows_share_keeps_requests_apart() -> None:
    found = _batching(Shared(), "x:float32[batch,3]", "scale:float32[3]")
    assert (found.batchable, found.reason) == (
        False,
        'input "scale" has no dim "batch" in front, so rows cannot be stacked',
    )


def test_a_fixed_batch_is_not_batchable() -> None:
    found = _batching(Row(), "x:float32[2,3]")
    assert (found.batchable, found.reason) == (False, 'the first dim of input "x" is fixed to 2')


def test_rows_whose_shape_follows_the_values_of_others_are_found() -> None:
    found = _batching(Widest(), "x:float32[batch,5]")
    assert not found.batchable
    assert "changes its shape or becomes NaN" in found.reason
