"""The tour's digit classifier: 1 x 28 x 28, ten classes."""

from torch import Tensor, nn


class CNN(nn.Module):
    """Plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.cnn(x)  # type: ignore[no-any-return]


def layers() -> nn.Sequential:
    """Return the network, new."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
        nn.LogSoftmax(dim=1),
    )
