import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import Batching, parse_inputs
from modelyard.exporter import export
from modelyard.exporter.arguments import flatten
from modelyard.exporter.prove.reference import observe
from modelyard.handlers.models.backends import open_artifact
from modelyard.handlers.proof.agree import run


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
    found = observe(model.eval(), parse_inputs(inputs), outputs, torch.device("cpu"), quick=True)
    assert found.rows is not None

    def answer(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(flatten(found.original(*rows)).values())

    return found.rows.find(answer)


@pytest.mark.parametrize("model", [Row(), PerGroup(), nn.BatchNorm1d(3)])
def test_rows_that_depend_on_themselves_alone_may_share_a_batch(model: nn.Module) -> None:
    assert _batching(model, "x:float32[batch,3]").batchable


@pytest.mark.parametrize(
    ("model", "seen"),
    [
        pytest.param(Column(), 'a row of output "output" changes by ', id="mean of the batch"),
        pytest.param(First(), ", beside ", id="only the first matters"),
        pytest.param(Reversed(), ", beside ", id="order"),
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


# -- an adversary: rows that mix in ways that two batches do not show, and others that only look so


class Of(nn.Module):
    """A function of a row's features, behind a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], wide: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(wide, 6)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def _experts(y: Tensor, capacity: int) -> Tensor:
    """Let each of two experts take so many rows at most, as Switch transformers do."""
    chosen = nn.functional.one_hot((y[:, 0] > 0).long(), 2)
    place = (chosen.cumsum(0) * chosen).sum(-1)
    return torch.where((place <= capacity).unsqueeze(1), y.sin(), y)


def _top(y: Tensor, count: int) -> Tensor:
    """Keep the rows with the highest scores alone."""
    best = y[:, 0].topk(min(count, len(y))).indices
    return torch.zeros_like(y).index_copy(0, best, y[best])


def _below(y: Tensor, limit: float) -> Tensor:
    """Clip gradually once some number is over a limit."""
    most = y.abs().amax()
    return torch.where(most > limit, y * (limit / most), y)


def _eight_bits(y: Tensor) -> Tensor:
    step = y.abs().amax() / 127
    return (y / step).round() * step


def _neighbour(y: Tensor, away: int) -> Tensor:
    """Add a little of the row that lies so many places on."""
    return y + 0.01 * torch.cat([y[away:], torch.zeros_like(y[:away])])[: len(y)]


def _duplicates(y: Tensor) -> Tensor:
    alike = (y.unsqueeze(0) == y.unsqueeze(1)).all(-1).sum(1, keepdim=True)
    return y / alike


def _attention(y: Tensor) -> Tensor:
    return torch.softmax(y @ y.T, -1) @ y


class Gathered(nn.Module):
    """Gives each of two experts its rows together, so that their number follows the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y, chosen = torch.zeros_like(x), (x[:, 0] > 0).long()
        for number, expert in enumerate(self.experts):
            y[chosen == number] = expert(x[chosen == number])
        return y


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean of the batch": lambda y: y - y.mean(0),
    "batch statistics": lambda y: (y - y.mean(0)) / (y.var(0, correction=0) + 1e-5).sqrt(),
    "batch's largest": lambda y: y / y.abs().amax(),
    "column's largest": lambda y: y / y.abs().amax(0).clamp(min=3.0),
    "one step for the batch": _eight_bits,
    "experts of four rows": lambda y: _experts(y, 4),
    "experts of two rows": lambda y: _experts(y, 2),
    "best five": lambda y: _top(y, 5),
    "best seven": lambda y: _top(y, 7),
    "running sum": lambda y: y.cumsum(0),
    "running maximum": lambda y: y.cummax(0).values,
    "sorted": lambda y: y.sort(0).values,
    "rank in the batch": lambda y: y + y.argsort(0).argsort(0) * 0.1,
    "the fourth neighbour": lambda y: _neighbour(y, 4),
    "the seventh neighbour": lambda y: _neighbour(y, 7),
    "attention over the batch": _attention,
    "limit of 50": lambda y: _below(y, 50.0),
    "limit of 500": lambda y: _below(y, 500.0),
    "rows that are equal": _duplicates,
    "size of the batch": lambda y: y * (1 + 0.01 * len(y)),
    "last row": lambda y: y + 0.001 * y[-1:],
    "median": lambda y: y - 0.01 * y.median(0).values,
    "longest of the batch": lambda y: y[:, : int(y[:, 0].abs().amax().clamp(max=5)) + 1],
    "sixth and later": lambda y: torch.cat([y[:5], y[5:] * 1.01]),
}
_RECURRENT = nn.LSTM(2, 8, batch_first=True)
_DEEP = (layer for _ in range(24) for layer in (nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64)))
KEEPS: dict[str, nn.Module] = {
    "wide product": nn.Sequential(nn.Linear(6, 4096), nn.ReLU(), nn.Linear(4096, 3)),
    "deep": nn.Sequential(nn.Linear(6, 64), *_DEEP),
    "batch-norm as it was trained": nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)),
    "layer norm": nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)),
    "softmax": Of(lambda y: y.softmax(-1)),
    "sorted features": Of(lambda y: y.sort(1).values),
    "best features": Of(lambda y: y.topk(3, 1).values),
    "running sum of features": Of(lambda y: y.cumsum(1)),
    "row's largest": Of(lambda y: y / y.abs().amax(1, keepdim=True)),
    "eight bits of each row": Of(lambda y: (y * 127 / (m := y.abs().amax(1, True))).round() * m),
    "attention over features": Of(lambda y: (y.unsqueeze(2) * y.unsqueeze(1)).softmax(-1).sum(2)),
    "recurrent": Of(lambda y: _RECURRENT(y.reshape(-1, 3, 2))[0]),
    "convolution": nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 16, 3, padding=1)),
    "experts without a limit": Of(lambda y: torch.where(y[:, :1] > 0, y.sin(), y.cos())),
    "experts that gather their rows": Gathered(),
    "thresholds": Of(lambda y: torch.where(y.abs().amax(1, keepdim=True) > 50, y / 255, y)),
    "a difference of large numbers": Of(lambda y: (y + 300.0) - 300.0),
    "large offset": Of(lambda y: y + 300.0),
    "tiny": Of(lambda y: y * 1e-6),
    "instance norm": nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2)),
}


def test_an_adversarys_networks_are_told_apart() -> None:
    torch.manual_seed(0)
    rows: list[tuple[str, nn.Module, bool]] = [
        *((name, Of(function), True) for name, function in MIXES.items()),
        *((name, network, False) for name, network in KEEPS.items()),
    ]
    misses: list[str] = []
    alarms: list[str] = []
    for name, network, mixes in rows:
        found = _batching(network, "x:float32[batch=1..8,6]")
        sys.stdout.write(f"{'mixes' if mixes else 'keeps':6}{name:34}{found.reason}\n")
        if found.batchable is mixes:
            (misses if mixes else alarms).append(name)
    sys.stdout.write(f"misses: {misses}, false alarms: {alarms}\n")
    assert (misses, alarms) == ([], [])


CAPACITY = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.expert = nn.Linear(6, 2), nn.Linear(6, 6)

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        chosen = torch.stack([p[:, 0] >= p[:, 1], p[:, 0] < p[:, 1]], 1).long()
        place = (chosen.cumsum(0) * chosen).sum(-1)
        return torch.where((place <= 4)[:, None], self.expert(x) * p.amax(-1, keepdim=True), x)
"""
DENSE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        return 200 * self.layers(x)
"""
RECURRENT = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(3, 8, batch_first=True)

    def forward(self, x):
        return self.layer(x.reshape(-1, 2, 3))[0][:, -1]
"""


@pytest.mark.parametrize(
    ("source", "quantize", "is_batchable"),
    [
        pytest.param(CAPACITY, None, False, id="experts"),
        pytest.param(
            *(DENSE, "int8-dynamic", True), id="a scale for each row", marks=pytest.mark.nightly
        ),
        pytest.param(RECURRENT, "int8-dynamic", False, id="one scale inside of an LSTM"),
    ],
)
def test_what_is_served_is_judged_and_not_the_checkpoint(
    source: str,
    quantize: str | None,
    is_batchable: bool,
    author: Callable[[str], tuple[Path, str]],
    tmp_path: Path,
) -> None:
    checkpoint, model = author(source)
    (report,) = export(
        checkpoint,
        model,
        "x:float32[batch,6]",
        output_dir=tmp_path,
        formats="onnx",
        quantize=quantize,
        quick=True,
    )
    found = report.signature.batching
    assert found is not None
    assert found.batchable is is_batchable
    artifact = open_artifact(tmp_path / "net.onnx", "onnx")
    rows = torch.randn(1, 6, generator=torch.Generator().manual_seed(1)).repeat(8, 1)
    rows[:7] *= 1000  # of one expert, all of them
    (together,), (alone,) = run(artifact, [rows]), run(artifact, [rows[7:]])
    apart = float((together[7:] - alone).abs().max() / alone.abs().max())
    assert (apart < 1e-5) is is_batchable
