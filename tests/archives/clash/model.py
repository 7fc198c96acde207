"""The class of the pickled checkpoint."""

from torch import nn


class Doubler(nn.Module):
    def forward(self, x):
        return 2 * x
