"""Networks with operators that a stranger's program may not call: written in terms of others."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from modelyard.exporter.formats.to_exported_program import write
from modelyard.handlers.judge.check import load_program


class Calls(nn.Module):
    """A network that makes one call."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


CELL = nn.LSTMCell(6, 4)
NETWORKS: dict[str, nn.Module] = {
    "LSTMCell": Calls(lambda x: CELL(x)[0]),
    "GRUCell": nn.GRUCell(6, 4),
    "Dropout2d": nn.Sequential(nn.Unflatten(1, (6, 1, 1)), nn.Dropout2d(inplace=True)),
    "Mish": nn.Sequential(nn.Linear(6, 2), nn.Mish(inplace=True)),
    "scatter_": Calls(lambda x: torch.zeros_like(x).scatter_(1, x.argsort(1), x)),
    "index_add_": Calls(lambda x: torch.zeros(6).index_add_(0, torch.tensor([1, 1]), x[0, :2]) + x),
    "triu_": Calls(lambda x: torch.ones(6, 6).triu_(1) + x.sum()),
    "cumsum_": Calls(lambda x: (x * 1).cumsum_(1)),
    "nanmean": Calls(lambda x: x.nanmean(1)),
    "hann_window": Calls(lambda x: x * torch.hann_window(6)),
    "mse_loss": Calls(lambda x: functional.mse_loss(x, x * 2, reduction="none")),
    "shift": Calls(lambda x: (x * 8).long() >> 1),
}

BY_DAY = ("GRUCell", "Dropout2d", "scatter_", "shift")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in BY_DAY else pytest.mark.nightly) for kind in NETWORKS],
)
def test_a_network_is_written_so_that_nobody_has_to_trust_it(kind: str, tmp_path: Path) -> None:
    model, x = NETWORKS[kind].eval(), torch.rand(3, 6)
    dims = ({0: torch.export.Dim.DYNAMIC},)
    assert write(torch.export.export(model, (x,), dynamic_shapes=dims), tmp_path / "net.pt2") == {}
    more = torch.rand(5, 6)
    found = load_program(tmp_path / "net.pt2").module(check_guards=False)(more)
    torch.testing.assert_close(found, model(more))


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_decomposed_is_written_as_it_is(tmp_path: Path) -> None:
    model = Calls(lambda x: x.as_strided((2, 3), (6, 1)))
    program = torch.export.export(model, (torch.rand(3, 6),))
    assert write(program, tmp_path / "net.pt2") == {
        "trusted_operators": ["aten.as_strided.default"]
    }
