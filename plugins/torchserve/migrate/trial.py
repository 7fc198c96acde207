"""Start one worker for each archive as the server would, behind the same walls, and end it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from time import monotonic

import psutil

from modelyard.archiver import ArchiveError
from modelyard.plugins.torchserve.policy import TorchServePolicy
from modelyard.serve.control.model_config import ModelSpec
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import Registry
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.dataplane.process import Orphans
from modelyard.serve.dataplane.worker import WorkerPolicy
from modelyard.serve.errors import LoadFailed, ServeError


@dataclass(frozen=True)
class Trial:
    """What came of starting a worker."""

    error: str | None
    """The load's own words; None where the worker was ready."""
    seconds: float = 0.0
    memory_bytes: int = 0
    """Its own, beside what it shares with other workers."""


async def try_archives(
    policy: TorchServePolicy,
    specs: Iterable[ModelSpec],
    report: Callable[[ModelSpec, Trial], None],
) -> None:
    """Load each archive in a worker of its own, one after the other.

    Args:
        policy: of the server that would serve them, with a state folder of its own.
        specs: archives of the store.
        report: called with what came of each.
    """
    policy.state.create()
    policy.workers = WorkerPolicy()  # what they print goes to files of that folder
    orphans = Orphans()
    lifecycle = Lifecycle(policy, Registry(), Metrics())
    try:
        for spec in specs:
            report(spec, await _try(lifecycle, spec))
    finally:
        await lifecycle.stop(0)
        await orphans.stop()


async def _try(lifecycle: Lifecycle, spec: ModelSpec) -> Trial:
    began = monotonic()
    try:
        model = await lifecycle.add(replace(spec, workers=1, most=1), None, waits=True)
    except (LoadFailed, ServeError, ArchiveError) as error:
        return Trial(str(error))
    took_s = monotonic() - began
    pids = [slot.worker.pid for slot in model.pool.slots if slot.worker is not None]
    taken = sum(int(psutil.Process(pid).memory_full_info().uss) for pid in pids)
    await lifecycle.unregister(model)
    return Trial(None, took_s, taken)
