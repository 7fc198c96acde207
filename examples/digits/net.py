"""The network of the digits example: three small convolutions and a linear layer."""

import torch
from torch import nn


class DigitsNet(nn.Module):
    """Classify the ten handwritten digits apart.

    Args:
        channels: feature maps after the first, second and third convolution.
    """

    def __init__(self, channels: tuple[int, int, int] = (16, 32, 64)) -> None:
        super().__init__()
        first, second, third = channels
        self.features = nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            nn.Conv2d(first, second, 3, padding=1),
            nn.BatchNorm2d(second),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(second, third, 3, padding=1),
            nn.BatchNorm2d(third),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.dropout = nn.Dropout(0.25)
        self.logits = nn.Linear(third * 2 * 2, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Map scans (N, 1, 8, 8) in [0, 1], 0 = paper and 1 = ink, to logits (N, 10)."""
        features = self.dropout(self.features(image).flatten(1))
        logits: torch.Tensor = self.logits(features)
        return logits
