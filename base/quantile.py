"""The quantile of measurements, as every figure of ours is one."""

import math
from collections.abc import Sequence


def nearest_rank(values: Sequence[float], share: float) -> float:
    """Return the smallest of the sorted values that `share` of them do not exceed; no mean of two.

    Infinite where there are no values.
    """
    if not values:
        return math.inf
    return values[min(max(math.ceil(share * len(values)), 1), len(values)) - 1]
