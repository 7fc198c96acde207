"""Whether a model's numbers are probabilities already, by what it gives for many inputs.

A model of another tool, and a torch model that ends in a softmax or a sigmoid, gives
probabilities; a handler that takes them for logits would take a softmax of them again.
"""

import torch
from torch import Tensor

from modelyard.handlers.models.rows import SUM_SLACK

LEAST_ROWS = 8
"""Rows that are looked at before anything is said of a model."""


class Bounds:
    """What all rows (N, K) of an output that were seen have in common."""

    def __init__(self) -> None:
        self._rows = 0
        self._adds_up = True
        self._low = float("inf")
        self._high = float("-inf")

    def see(self, output: Tensor) -> None:
        """Look at the rows of one call; what is not finite says nothing."""
        if output.dim() != 2 or not output.is_floating_point():
            self._rows += 1
            self._adds_up, self._high = False, float("inf")
            return
        rows = output.double()
        rows = rows[torch.isfinite(rows).all(dim=1)]
        if not rows.numel():
            return
        self._rows += len(rows)
        self._adds_up &= bool(((rows.sum(1) - 1).abs() <= SUM_SLACK).all())
        self._low = min(self._low, float(rows.min()))
        self._high = max(self._high, float(rows.max()))

    @property
    def is_enough(self) -> bool:
        """Whether rows that differ were seen, and enough of them."""
        return self._rows >= LEAST_ROWS and self._low < self._high

    @property
    def are_shares(self) -> bool:
        """Whether every row is of numbers from 0 that add up to 1: a softmax gives such."""
        return self.is_enough and self._adds_up and self._low >= -SUM_SLACK

    @property
    def are_chances(self) -> bool:
        """Whether every number lies between 0 and 1, as a sigmoid's."""
        return self.is_enough and self._low >= 0 and self._high <= 1

    @property
    def are_others(self) -> bool:
        """Whether a number was seen that no probability is."""
        return self._rows > 0 and not (self._low >= -SUM_SLACK and self._high <= 1 + SUM_SLACK)
