"""A histogram for the hot path: a bisection and two additions, no lock.

prometheus_client's own observe goes through all bounds and takes two locks, five times the cost.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString


class Histogram:
    """One series: observations counted by the first bound that is not below them."""

    __slots__ = ("_bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}
        """Bucket → the latest value that is known where it comes from."""

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def quantile(self, q: float) -> float:
        """Return the value that a share `q` of them does not exceed, interpolated in its bucket.

        The largest bound where it is above that, 0 where nothing was observed.
        """
        wanted = q * sum(self.counts)
        below, low = 0, 0.0
        for bound, count in zip(self._bounds, self.counts, strict=False):
            if count and below + count >= wanted:
                return low + (bound - low) * max(0.0, wanted - below) / count
            below, low = below + count, bound
        return low if below or self.counts[-1] else 0.0

    def exemplify(self, value: float, trace_id: str) -> None:
        """Name the trace of a value, which is counted already."""
        bucket = bisect_left(self._bounds, value)
        self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())


class Histograms(Collector):
    """A histogram for each combination of its labels' values; used on one thread.

    Args:
        name: as it is exposed.
        text: for the HELP line.
        labels: their names.
        bounds: of the buckets, rising; one for all that is larger is added.
        registry: what exposes it.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._about = name, text
        self._labelnames = labels  # as prometheus_client's own metrics call it
        self._bounds = bounds
        self._series: dict[tuple[str, ...], Histogram] = {}
        registry.register(self)

    def labels(self, *values: str) -> Histogram:
        """Return the series of these values, a new one where there is none."""
        return self._series.setdefault(values, Histogram(self._bounds))

    def remove(self, *values: str) -> None:
        """Forget a series."""
        del self._series[values]

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Return the name."""
        return [HistogramMetricFamily(*self._about, labels=self._labelnames)]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Return all series."""
        family = HistogramMetricFamily(*self._about, labels=self._labelnames)
        bounds = [
            floatToGoString(bound)  # type: ignore[no-untyped-call]
            for bound in (*self._bounds, math.inf)
        ]
        for values, series in self._series.items():
            counts = zip(bounds, accumulate(series.counts), strict=True)
            buckets = [
                (*each, series.exemplars[at]) if at in series.exemplars else each
                for at, each in enumerate(counts)
            ]
            family.add_metric(values, buckets, series.total)
        return [family]
