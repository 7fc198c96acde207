"""Networks of a user of MLflow, of classes of their own."""

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        scores: Tensor = self.head(x)
        return scores


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.cells = nn.GRU(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.cells(self.words(ids))[0][:, -1])
        return scores


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        pooled: Tensor = self.layer(rows).mean(1)
        return pooled
