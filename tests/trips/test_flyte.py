"""Values of a workflow engine: what flytekit's own transformers store, from the file to an answer.

flytekit stores a tensor and a module with `torch.save`, and a checkpoint as one dict: the state
dicts under two names, the hyper-parameters beside them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from modelyard.archiver import open_archive
from modelyard.archiver.cli import archive_app
from modelyard.exporter import CheckpointError, export

pytestmark = pytest.mark.usefixtures("one_checker")

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, hidden, dropout=0.5):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Dropout(dropout), nn.Linear(hidden, 2))

    def forward(self, row):
        return self.layers(row)
"""


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l0 = nn.Linear(4, 3)
        self.l1 = nn.BatchNorm1d(3)


@dataclasses.dataclass
class AsDataclass:
    hidden: int
    dropout: float


class AsNamedTuple(NamedTuple):
    hidden: int
    dropout: float


def _answered(artifact: Path, row: list[float], folder: Path) -> list[float]:
    """Archive it; a worker answers the row, which becomes a golden request."""
    (folder / "row.json").write_text(json.dumps(row))
    arguments = [
        *("value", "--artifact", str(artifact), "--handler", "base_handler"),
        *("--example", str(folder / "row.json"), "-o", str(folder / "store")),
    ]
    archived = CliRunner().invoke(archive_app, arguments)
    assert archived.exit_code == 0, archived.stderr
    with open_archive(folder / "store" / "value.mar") as archive:
        golden = json.loads(archive.read("MAR-INF/golden/0.expected.json"))
    answer: list[float] = golden["answer"]
    return answer


def test_a_tensor_is_refused_by_what_it_is(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    with pytest.raises(CheckpointError, match=r"one tensor .*PyTorchTensor"):
        export(tmp_path / "tensor.pt", None, (), output_dir=tmp_path / "out")


@pytest.mark.parametrize(
    ("part", "features"), [pytest.param("l0", 4, marks=pytest.mark.nightly), ("l1", 3)]
)
def test_a_part_of_a_module_says_its_sizes_and_is_served(
    part: str, features: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    layer = getattr(MyModel(), part)
    layer(torch.randn(8, features))  # statistics of training
    torch.save(layer, tmp_path / "value.pt")
    out = tmp_path / "out"
    (report,) = export(
        tmp_path / "value.pt", None, (), output_dir=out, formats=["torchscript"], quick=True
    )
    assert [str(spec) for spec in report.signature.inputs] == [
        f"input:float32[batch=1..8,{features}]"
    ]
    row = [0.5, -1.0, 2.0, 1.0][:features]
    expected = layer.eval()(torch.tensor([row]))[0].tolist()
    assert _answered(report.artifact, row, tmp_path) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "as_dict",
    [
        pytest.param(
            lambda: dataclasses.asdict(AsDataclass(5, 0.1)),
            id="dataclass",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            lambda: AsNamedTuple(5, 0.1)._asdict(), id="named tuple", marks=pytest.mark.nightly
        ),
        pytest.param(lambda: {"hidden": 5, "dropout": 0.1}, id="dict", marks=pytest.mark.nightly),
    ],
)
def test_a_checkpoint_builds_its_class_by_its_hyper_parameters(
    as_dict: Callable[[], Mapping[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(NET)
    space: dict[str, Any] = {}
    exec(NET, space)
    torch.manual_seed(0)
    net = space["Net"](**as_dict())
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    states = {"module_state_dict": net.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    torch.save({**states, **as_dict()}, tmp_path / "value.pt")
    (report,) = export(
        tmp_path / "value.pt",
        f"{tmp_path / 'net.py'}:Net",
        (),
        output_dir=tmp_path / "out",
        formats=["torchscript"],
        quick=True,
    )
    row = [0.5, -1.0, 2.0, 1.0]
    expected = net.eval()(torch.tensor([row]))[0].tolist()
    assert _answered(report.artifact, row, tmp_path) == pytest.approx(expected, abs=1e-5)
