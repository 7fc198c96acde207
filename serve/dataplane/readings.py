"""Values that are read at each scrape, so that nothing is kept up to date between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

Family = GaugeMetricFamily | CounterMetricFamily


class Readings(Collector):
    """A gauge or a counter with a function for each combination of its labels' values.

    Args:
        kind: which of the two.
        name: name as it is exposed; of a counter without its `_total`.
        text: text for the HELP line.
        labels: their names.
        registry: what exposes it.
    """

    def __init__(
        self,
        kind: type[Family],
        name: str,
        text: str,
        labels: Sequence[str],
        registry: CollectorRegistry,
    ) -> None:
        self._kind = kind
        self._about = name, text
        self._labelnames = labels  # as prometheus_client's own metrics call it
        self._series: dict[tuple[str, ...], Callable[[], float]] = {}
        registry.register(self)

    def watch(self, labels: tuple[str, ...], read: Callable[[], float]) -> None:
        """Read the series of these values from `read`."""
        self._series[labels] = read

    def remove(self, *labels: str) -> None:
        """Forget a series, where there is one."""
        self._series.pop(labels, None)

    def describe(self) -> Iterable[Family]:
        """Return the name."""
        return [self._kind(*self._about, labels=self._labelnames)]

    def collect(self) -> Iterable[Family]:
        """Return all series, read now."""
        family = self._kind(*self._about, labels=self._labelnames)
        for labels, read in self._series.items():
            family.add_metric(labels, read())
        return [family]
