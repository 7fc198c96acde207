"""The tour's digit classifier as LightningModule, with its training."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F  # noqa: N812
from net import layers
from torch import Tensor


class CNNModel(pl.LightningModule):
    """The same layers."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.cnn(x)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.nll_loss(self.cnn(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.002)
