"""The start of a server: what it is to serve, in what size, and serving it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelyard.archiver import Archive, ArchiveError, open_archive
from modelyard.serve.control import sizing
from modelyard.serve.control.build import admit
from modelyard.serve.control.model_config import ModelConfig, ModelSpec
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.control.store import find_archive
from modelyard.serve.errors import ServeError
from modelyard.serve.policy import Policy
from modelyard.serve.settings import Settings

logger = logging.getLogger(__name__)

Report = Callable[[str, str], None]
"""Called with a model's name and what happens to it, for progress."""


async def restore(lifecycle: Lifecycle, report: Report) -> list[str]:
    """Register what is to be served, all at once, and return warnings for whoever started it.

    The workers of one model load beside those of another.

    Raises:
        ServeError, ArchiveError: the first model that cannot be served, where that ends the start.
    """
    policy, registry = lifecycle.policy, lifecycle.registry
    specs = policy.models_at_start()
    registry.notes = policy.notes_at_start()
    allocator = sizing.StartupAllocator(sizing.this_machine(), len(specs))
    starts = [_start(lifecycle, spec, allocator, report) for spec in specs]
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        models = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    defaults: dict[str, str] = {}
    for spec, model in zip(specs, models, strict=True):
        if model is not None and (spec.is_default or model.name not in defaults):
            defaults[model.name] = model.version
    registry.arrange(model for model in models if model is not None)
    for name, version in defaults.items():
        registry.set_default(name, version)
    registry.lacks_all = bool(specs) and all(model is None for model in models)
    policy.remember("startup", registry)
    warnings = [model.warning for model in models if model is not None and model.warning]
    if allocator.warning is not None:
        logger.warning("%s", allocator.warning)
        warnings.append(allocator.warning)
    return warnings


async def _start(
    lifecycle: Lifecycle, spec: ModelSpec, allocator: sizing.StartupAllocator, report: Report
) -> ModelVersion | None:
    report(spec.name or spec.location, "loading")
    try:
        model = await lifecycle.add(spec, allocator, waits=lifecycle.policy.is_strict)
    except (ServeError, ArchiveError) as error:
        if lifecycle.policy.is_strict:
            raise
        logger.error("Failed to load model: %s: %s", spec.location, error)
        return None
    report(model.name, f"version {model.version}, {model.pool.ready_count} workers ready")
    return model


@dataclass(frozen=True)
class PlannedModel:
    """One model version of a start that has not happened."""

    name: str
    version: str
    file: str
    config: ModelConfig
    allocation: sizing.Allocation


@dataclass(frozen=True)
class StartPlan:
    """What a start would start."""

    machine: sizing.Machine
    models: Sequence[PlannedModel]
    warnings: Sequence[str]


def plan_start(settings: Settings) -> StartPlan:
    """Return what a start with these settings would start, and start nothing.

    Raises:
        ServeError, ArchiveError: the first model that could not be served.
    """
    policy, machine = Policy(settings), sizing.this_machine()
    read: list[tuple[str, Archive, ModelConfig]] = []
    requests: list[sizing.ResourceRequest] = []
    warnings = list(settings.warnings)
    specs = policy.models_at_start(is_trial=True)
    allocator = sizing.StartupAllocator(machine, len(specs))
    for spec in specs:
        with open_archive(find_archive(settings.model_store, spec.location)) as archive:
            name, config, unproven = admit(archive, spec, policy)
            allocator.claim(name, archive.manifest.model_version, spec.location)
        if unproven and unproven.reason == "versions":
            warnings.append(f"{name}: {unproven.text}")
        read.append((name, archive, config))
        requests.append(policy.request(spec, config, name))
    allocations = sizing.choose(machine, requests)
    models = [
        PlannedModel(name, archive.manifest.model_version, archive.path.name, config, allocation)
        for (name, archive, config), allocation in zip(read, allocations, strict=True)
    ]
    if excess := sizing.describe_excess(machine, allocations):
        warnings.append(excess)
    return StartPlan(machine, models, warnings)
