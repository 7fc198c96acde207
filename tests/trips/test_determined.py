"""A training platform's checkpoint: model definition, configuration, weights, to an answer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from modelyard.archiver import open_archive
from modelyard.archiver.cli import archive_app
from modelyard.exporter import export

pytestmark = pytest.mark.usefixtures("one_checker")

DEFINITION = """
from torch import nn


class Net(nn.Module):
    def __init__(self, hidden=7):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def forward(self, row):
        return self.layers(row)
"""


def _write(folder: Path, weights: str) -> nn.Module:
    """Write the folder as the platform does; the class is built with its hyper-parameters."""
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "model_def.py").write_text(DEFINITION)
    space: dict[str, Any] = {}
    exec(DEFINITION, space)
    torch.manual_seed(0)
    net: nn.Module = space["Net"](hidden=5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = {
        "models_state_dict": [net.state_dict()],
        "optimizers_state_dict": [optimizer.state_dict()],
        "lr_schedulers_state_dict": [schedule.state_dict()],
        "callbacks": {},
        "rng_state": {
            "cpu_rng_state": torch.random.get_rng_state(),
            "np_rng_state": np.random.get_state(),
            "random_rng_state": random.getstate(),
        },
    }
    torch.save(state, folder / weights)
    configuration = {"name": "digits", "hyperparameters": {"hidden": {"type": "const", "val": 5}}}
    load = {"trial_type": "PyTorchTrial", "experiment_config": configuration}
    load |= {"hparams": {"hidden": 5}, "trial_cls_spec": "model_def:Trial"}
    (folder / "load_data.json").write_text(json.dumps(load))
    metadata = {"determined_version": "0.38.0", "framework": "torch-2.13.0", "format": "pickle"}
    (folder / "metadata.json").write_text(json.dumps(metadata | {"steps_completed": 2}))
    return net


@pytest.mark.parametrize(
    "weights", ["state-dict.pth", pytest.param("state_dict.pth", marks=pytest.mark.nightly)]
)
def test_a_folder_of_the_platform_is_served(weights: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    net = _write(folder, weights)
    (report,) = export(
        folder,
        f"{folder / 'code' / 'model_def.py'}:Net",
        (),
        output_dir=tmp_path,
        formats=["torchscript"],
        quick=True,
    )
    assert report.to_json()["checkpoint"]["writer"] == "Determined 0.38.0"
    (tmp_path / "row.json").write_text("[0.5, -1.0, 2.0, 1.0]")
    arguments = [
        *("value", "--artifact", str(report.artifact), "--handler", "base_handler"),
        *("--example", str(tmp_path / "row.json"), "-o", str(tmp_path / "store")),
    ]
    archived = CliRunner().invoke(archive_app, arguments)
    assert archived.exit_code == 0, archived.stderr
    with open_archive(tmp_path / "store" / "value.mar") as archive:
        answer = json.loads(archive.read("MAR-INF/golden/0.expected.json"))["answer"]
    expected = net.eval()(torch.tensor([[0.5, -1.0, 2.0, 1.0]]))[0].tolist()
    assert answer == pytest.approx(expected, abs=1e-5)
