"""The callbacks, in real trainings of a few steps."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelyard.exporter.errors import ExportError
from modelyard.handlers.models.backends import open_artifact

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK: dict[str, Any] = {"formats": ["onnx"], "quick": True}


def train_lightning(folder: Path, callback: Any, is_broken: bool = False) -> Any:
    import lightning.pytorch as pl

    class Net(pl.LightningModule):  # of no file that could be imported
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.example_input_array = torch.zeros(1, 4)

        def forward(self, x: Tensor) -> Tensor:
            if is_broken and not self.training:
                raise ValueError("broken on purpose")
            scores: Tensor = self.layer(x)
            return scores

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            loss: Tensor = self(batch).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    net = Net()
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            callback,
            pl.callbacks.ModelCheckpoint(folder, save_top_k=-1, filename="{step}"),
        ],
    )
    rows: Any = torch.ones(4, 4)
    trainer.fit(net, torch.utils.data.DataLoader(rows))
    return net


@pytest.mark.slow
@pytest.mark.parametrize(("each", "names"), [(False, ["step=8"]), (True, ["step=4", "step=8"])])
def test_lightnings_checkpoints_are_exported_and_agree(
    each: bool, names: list[str], tmp_path: Path
) -> None:
    from modelyard.plugins.training.lightning import ExportCallback

    net = train_lightning(tmp_path, ExportCallback(each=each, **QUICK))
    assert sorted(path.stem for path in tmp_path.glob("*.onnx")) == names
    rows = torch.rand(2, 4)
    with torch.no_grad():
        found = open_artifact(tmp_path / "step=8.onnx", "onnx")(rows)
        torch.testing.assert_close(found, net.cpu().layer(rows))
    if each:  # an export between two steps leaves the training as it would have been
        alone = train_lightning(tmp_path / "alone", ExportCallback(formats=["none"]))
        assert torch.equal(alone.layer.weight, net.layer.weight)


def test_a_failure_is_said_and_ends_the_training_only_where_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from modelyard.plugins.training.lightning import ExportCallback

    with caplog.at_level(logging.WARNING, "modelyard.training"):
        train_lightning(tmp_path / "one", ExportCallback(**QUICK), is_broken=True)
    (said,) = [each.getMessage() for each in caplog.records if each.name == "modelyard.training"]
    assert "step=8.ckpt was not exported" in said
    assert "broken on purpose" in said
    with pytest.raises(ExportError, match="broken on purpose"):
        train_lightning(tmp_path / "two", ExportCallback(strict=True, **QUICK), is_broken=True)


@pytest.mark.slow
def test_the_checkpoints_of_transformers_trainer_are_exported(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from modelyard.plugins.training.transformers import ExportCallback

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=20, intermediate_size=8, max_position_embeddings=16, **sizes)
    row = {"input_ids": torch.arange(6), "labels": torch.tensor(1)}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    net = BertForSequenceClassification(config)
    callbacks = [ExportCallback(strict=True, **QUICK)]
    Trainer(net, arguments, train_dataset=[row] * 4, callbacks=callbacks).train()
    assert (tmp_path / "checkpoint-2" / "config.json").is_file()
    assert [path.name for path in tmp_path.glob("*.onnx")] == ["checkpoint-2.onnx"]


def test_the_modules_can_be_imported_without_the_trainers() -> None:
    code = """
import sys
for name in ("lightning", "lightning.pytorch", "transformers"):
    sys.modules[name] = None
from modelyard.plugins.training import lightning, transformers
for module in (lightning, transformers):
    try:
        module.ExportCallback()
    except ImportError as error:
        print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line.partition(" ")[0] for line in ran.stdout.splitlines()] == [
        "lightning",
        "transformers",
    ]
