"""What a cell's server measures: for Ray's autoscaler, and among Ray's own metrics.

Ray's metrics are scraped where a cluster is watched already, and carry the cell as `ReplicaId`, so
no port of a cell needs to be found.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray.serve.metrics import Gauge

from modelyard.serve.ray.forward import ServerGone, Upstream

logger = logging.getLogger("ray.serve")

EVERY_S = 2.0
MOST_SERIES = 5000
"""Of a cell; what handlers measure may have labels without end."""
OF_THE_PROCESS = ("process_", "python_")
"""Ray has its own of its processes."""
BUSY = "busy"
IN_FLIGHT = "in_flight"


class Signals:
    """Reads the server's metrics again and again.

    Args:
        metrics: the server's metrics API.
        token: that it asks for.
    """

    def __init__(self, metrics: Upstream, token: str) -> None:
        self._metrics = metrics
        self._token = token
        self._gauges: dict[str, Any] = {}
        self._busy: dict[str, tuple[float, float]] = {}
        self.load: dict[str, float] = {BUSY: 0.0, IN_FLIGHT: 0.0}
        """Share of its workers' time that the busiest model used; requests in the server."""
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
                self.load = self._weigh(families, time.monotonic())
                self._publish(families)
                failed = ""
            except (ServerGone, OSError, EOFError, ValueError) as error:
                if failed != str(error):
                    failed = str(error)
                    logger.warning("cannot read the metrics of the cell's server: %s", failed)
            await asyncio.sleep(EVERY_S)

    def _weigh(self, families: Iterable[Metric], now: float) -> dict[str, float]:
        busy: dict[str, float] = defaultdict(float)
        workers: dict[str, float] = defaultdict(float)
        in_flight = 0.0
        for family in families:
            for sample in family.samples:
                if sample.name == "modelyard_worker_busy_seconds_total":
                    busy[sample.labels["model"]] += sample.value
                elif sample.name == "modelyard_ready_workers":
                    workers[sample.labels["model"]] += sample.value
                elif sample.name == "modelyard_requests_in_flight":
                    in_flight += sample.value
        shares = [0.0]
        for model, seconds in busy.items():
            before, then = self._busy.get(model, (seconds, now))
            if now > then and workers[model]:
                shares.append((seconds - before) / (now - then) / workers[model])
            self._busy[model] = seconds, now
        return {BUSY: min(1.0, max(shares)), IN_FLIGHT: in_flight}

    def _publish(self, families: Iterable[Metric]) -> None:
        """Set a gauge of Ray for each sample: rates and quantiles are of samples, not of kinds."""
        count = 0
        for family in families:
            if family.name.startswith(OF_THE_PROCESS):
                continue
            for sample in family.samples:
                count += 1
                if count > MOST_SERIES:
                    return
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    gauge = Gauge(sample.name, family.documentation, tuple(sample.labels))
                    self._gauges[sample.name] = gauge
                gauge.set(sample.value, sample.labels)
