"""A tiny convolutional network for 28 x 28 grey pictures; its weights are random, from a seed."""

import torch
from torch import Tensor, nn


class TinyNet(nn.Module):
    """Two convolutions and a linear layer: 10 outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, 10),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Map images (N, 1, 28, 28) to logits (N, 10)."""
        logits: Tensor = self.layers(image)
        return logits
