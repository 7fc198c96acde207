"""A Lightning module as its users write it."""

import lightning
import torch
from torch import Tensor, nn


class LitNet(lightning.LightningModule):
    """A classifier that keeps its hyper-parameters."""

    def __init__(self, hidden: int, n_classes: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(12, hidden), nn.ReLU(), nn.Linear(hidden, n_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())
