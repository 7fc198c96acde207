"""Models that are loaded by their first request, and unloaded to make room for others."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.control.sizing import machine_of, share_of
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.dataplane.pool import Pool
from modelyard.serve.errors import Draining, ServeError, Unavailable
from modelyard.serve.settings import Settings

logger = logging.getLogger(__name__)

LOOK_S = 0.02
"""Time from one look for a model that may go to the next, while every one has requests."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Time for which a model that could not be loaded is not tried again; twice as long each time."""


class Demand:
    """Decides which of a server's models have workers: those that were used last, and the pinned.

    One that has requests never goes, nor while one waits. Loads come one after the other, on four
    cores and more some at once, which leave half of the cores to what is served.
    """

    def __init__(self, registry: Registry, metrics: Metrics, settings: Settings) -> None:
        self._registry = registry
        self._most = share_of(settings.max_loaded_models, settings.servers)
        self._turns = asyncio.Semaphore(max(1, machine_of(settings.servers).cores // 2))
        self._loads: dict[Pool, asyncio.Task[None]] = {}
        self._coming: set[Pool] = set()
        """Pools that have a place, and no worker that is ready yet."""
        self._ending: asyncio.Future[Any] | None = None
        """End of the model that went last, which the next one to go waits for."""
        self._pauses: WeakKeyDictionary[Pool, float] = WeakKeyDictionary()
        """Pool → how long the next pause is, of those that could not be loaded."""
        metrics["loaded_models"].watch(lambda: len(self._loaded()))
        self._done, self._failed = map(metrics["model_loads"].count, ("loaded", "failed"))
        self._unloads = metrics["model_unloads"].count()

    def watch(self, model: ModelVersion) -> None:
        """Load a model whenever a request waits for it."""
        if not model.config.is_pinned:
            model.pool.load = partial(self._begin, model)

    @asynccontextmanager
    async def place(
        self, pool: Pool, is_wanted: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[None]:
        """Have room for a model's workers, which the block starts.

        Args:
            is_wanted: whether anybody still waits for it; else the block begins without room.

        Raises:
            Unavailable: nothing may ever go.
        """
        while is_wanted():
            others = [each for each in self._loaded() if each.pool is not pool]
            if len({each.pool for each in others} | self._coming) < self._most:
                break
            stays = [each for each in others if each.config.is_pinned or each.held]
            if len(stays) >= self._most:
                raise Unavailable(f"all {self._most} models that may be loaded at once "
                                  "(max_loaded_models) are pinned or held")  # fmt: skip
            idle = [each for each in others if each not in stays and self._may_go(each)]
            if not idle:
                await asyncio.sleep(LOOK_S)
            elif self._ending is not None and not self._ending.done():
                await asyncio.wait([self._ending])
            else:
                self._unload(min(idle, key=lambda each: each.pool.used_at))
        self._coming.add(pool)
        try:
            yield
        finally:
            self._coming.discard(pool)

    def _loaded(self) -> list[ModelVersion]:
        return [each for each in self._registry if any(pool.open_slots for pool in each.pools)]

    def _may_go(self, model: ModelVersion) -> bool:
        return model.pool not in self._coming and all(pool.is_idle for pool in model.pools)

    def _unload(self, model: ModelVersion) -> None:
        """End a model's workers, while the one in whose place it was starts."""
        logger.info("%s is unloaded", model.pool.plan.label)
        self._unloads.inc()
        self._ending = asyncio.gather(*[pool.unload() for pool in model.pools])

    def _begin(self, model: ModelVersion) -> None:
        """Load a model, unless that is under way."""
        if model.pool not in self._loads:
            self._loads[model.pool] = asyncio.create_task(self._load(model))

    async def _load(self, model: ModelVersion) -> None:
        pool = model.pool

        def is_wanted() -> bool:
            return any(each.is_awaited for each in model.pools)

        try:
            async with self._turns, self.place(pool, is_wanted):
                if is_wanted():
                    await pool.scale(pool.least, 0, most=pool.most)
                    self._done.inc()
                    self._pauses.pop(pool, None)
        except Draining:  # it is being removed, and whoever waits has been told
            return
        except (ServeError, OSError) as error:
            self._fail(model, error)
        finally:
            del self._loads[pool]
        for each in model.pools:
            each.pump()

    def _fail(self, model: ModelVersion, error: Exception) -> None:
        """Refuse what waits for a model and what comes, until it is tried again."""
        self._failed.inc()
        pool = model.pool
        pause_s = self._pauses.get(pool, FIRST_PAUSE_S)
        self._pauses[pool] = min(2 * pause_s, LONGEST_PAUSE_S)
        pool.policy.failed(error)
        reason = (f"{pool.plan.label} could not be loaded, and is not tried again for "
                  f"{pause_s:g} s: {error}")  # fmt: skip
        for each in model.pools:
            each.load_failure = reason
            each.refuse(Unavailable(reason, retry_after_s=math.ceil(pause_s)))
        asyncio.get_running_loop().call_later(pause_s, _forgive, model)


def _forgive(model: ModelVersion) -> None:
    for pool in model.pools:
        pool.load_failure = None
