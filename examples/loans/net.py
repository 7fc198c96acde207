"""The network of the loans example: a hidden layer."""

import torch
from torch import nn


class LoansNet(nn.Module):
    """Tell loans that are repaid from those that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        """Map scaled features (N, 4) to logits (N, 2): repaid, not repaid."""
        logits: torch.Tensor = self.layers(row)
        return logits
