"""An explanation → the share that each named part of the input has in it."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from modelyard.handlers.explain.request.model import ExplainedModel
from modelyard.handlers.explain.request.options import ExplainOptions

STEPS = 30
"""Of integrated gradients: shares are averaged over many explanations, so each may be coarse."""
ROWS = 8
"""That share a pass: whoever waits for the worker waits for the end of one."""

_ROWS_OF_REGIONS = ("top", "middle", "bottom")
_COLUMNS_OF_REGIONS = ("left", "centre", "right")


def options_of_shares(version: ExplainedModel) -> ExplainOptions:
    """Return how shares are explained: with gradients, where the archive has what gives them."""
    options = ExplainOptions(internal_batch_size=ROWS)
    if version.twin is None or not version.twin.is_differentiable:
        return replace(options, method="feature_ablation")
    return replace(options, n_steps=STEPS)


def shares_of(parts: Mapping[str, float]) -> dict[str, float]:
    """Return each part's share of the sum of |attributions|; nothing where that is 0."""
    total = sum(map(abs, parts.values()))
    return {name: abs(value) / total for name, value in parts.items()} if total else {}


def regions(attributions: Tensor) -> dict[str, float]:
    """Return the sum of |attributions| (C, H, W) in each ninth of a picture."""
    sizes = attributions.abs().double().sum(0)
    return {
        f"{row} {column}": float(cell.sum())
        for row, band in zip(_ROWS_OF_REGIONS, sizes.tensor_split(3), strict=True)
        for column, cell in zip(_COLUMNS_OF_REGIONS, band.tensor_split(3, 1), strict=True)
    }
