"""How many cells: a policy for Ray's autoscaler, which runs it in its controller."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class CellScaling:
    """As many cells as bring the signals to their targets; Ray holds the limits and the delays.

    Args:
        busy: share of the workers' time that is to be used.
        in_flight: requests that a cell is to have; None leaves them out.
    """

    def __init__(self, busy: float, in_flight: float | None = None) -> None:
        self._targets = {"busy": busy, "in_flight": in_flight or math.inf}

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of cells, as a fraction that Ray rounds up, and no state.

        Args:
            context: Ray's `AutoscalingContext`; a cell that has just started is not in its metrics.
        """
        running = context.current_num_replicas
        measured: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        needed = [
            running * sum(cells.values()) / len(cells) / target
            for name, target in self._targets.items()
            if (cells := measured.get(name))
        ]
        return (max(needed) if needed else context.target_num_replicas), {}
