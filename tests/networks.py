"""Networks of real size, from plain torch.nn, for tests and measurements."""

from typing import cast

from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut (He et al. 2015, figure 5)."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = width * 4
        self.narrow = nn.Sequential(nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width))
        self.middle = nn.Sequential(
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        )
        self.widen = nn.Sequential(
            nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(N, inside, H, W) to (N, 4 width, H / stride, W / stride)."""
        inner = self.relu(self.middle(self.relu(self.narrow(x))))
        return cast("Tensor", self.relu(self.widen(inner) + self.shortcut(x)))


class ResNet50(nn.Module):
    """25.6 million parameters; float32 (N, 3, H, W) to logits (N, 1000)."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        inside = 64
        for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for place in range(depth):
                blocks.append(Bottleneck(inside, width, 1 if place else stride))
                inside = width * 4
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inside, classes)

    def forward(self, image: Tensor) -> Tensor:
        """(N, 3, H, W) to (N, classes)."""
        return cast("Tensor", self.head(self.pool(self.blocks(self.stem(image))).flatten(1)))


class TextEncoder(nn.Module):
    """An encoder of BERT's shape; int64 tokens (N, length) to logits (N, 2).

    Args:
        layers: 12 layers of width 768 are BERT-base, 109 million parameters.
    """

    def __init__(self, layers: int = 12, width: int = 768, words: int = 30522) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(512, width)
        layer = nn.TransformerEncoderLayer(
            width, max(width // 64, 1), width * 4, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, length up to 512) to (N, 2), read from the first token."""
        places = self.places.weight[: tokens.shape[1]]
        return cast("Tensor", self.head(self.encoder(self.words(tokens) + places)[:, 0]))
