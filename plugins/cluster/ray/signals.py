"""What a cell's server measures, read again and again: how busy it is, and all else for Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from modelyard.plugins.cluster.ray.forward import ServerGone, Upstream

logger = logging.getLogger("ray.serve")

EVERY_S = 2.0


class Signals:
    """Reads the server's metrics again and again.

    Args:
        metrics: the server's metrics API.
        token: token that it asks for.
        publish: is called with what was read.
        every_s: between two readings.
    """

    def __init__(
        self,
        metrics: Upstream,
        token: str,
        publish: Callable[[Iterable[Metric]], None],
        every_s: float = EVERY_S,
    ) -> None:
        self._metrics = metrics
        self._token = token
        self._publish = publish
        self._every_s = every_s
        self._seconds: dict[str, tuple[float, float]] = {}
        self.busy = 0.0
        """Share of its workers' time that the busiest model used lately."""
        self.in_flight = 0.0
        """Requests that wait or were being answered when it was last asked."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End the reading."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._metrics.close()

    async def _run(self) -> None:
        failed = ""
        while True:
            try:
                _, text = await self._metrics.get("/metrics", self._token)
                families = list(text_string_to_metric_families(text.decode()))
                self.busy = self._weigh(families, time.monotonic())
                self.in_flight = sum(
                    sample.value
                    for family in families
                    if family.name == "modelyard_requests_in_flight"
                    for sample in family.samples
                )
                self._publish(families)
                failed = ""
            except (ServerGone, OSError, EOFError, ValueError) as error:
                if failed != str(error):
                    failed = str(error)
                    logger.warning("cannot read the metrics of the cell's server: %s", failed)
            await asyncio.sleep(self._every_s)

    def _weigh(self, families: Iterable[Metric], now: float) -> float:
        busy: dict[str, float] = defaultdict(float)
        workers: dict[str, float] = defaultdict(float)
        for family in families:
            for sample in family.samples:
                if sample.name == "modelyard_worker_busy_seconds_total":
                    busy[sample.labels["model"]] += sample.value
                elif sample.name == "modelyard_ready_workers":
                    workers[sample.labels["model"]] += sample.value
        shares = [0.0]
        for model, seconds in busy.items():
            before, then = self._seconds.get(model, (seconds, now))
            if now > then and workers[model]:
                shares.append((seconds - before) / (now - then) / workers[model])
            self._seconds[model] = seconds, now
        return min(1.0, max(shares))
