"""What a start would start, for people and as data: `modelyard serve start --explain-plan`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from modelyard.archiver import open_archive
from modelyard.serve.control import sizing
from modelyard.serve.control.build import Admitted, admit
from modelyard.serve.control.model_config import ModelConfig
from modelyard.serve.policy import Policy
from modelyard.serve.settings import Settings


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
    policy, machine = Policy(settings), sizing.machine_of(settings.servers)
    read: list[Admitted] = []
    warnings = list(settings.warnings)
    specs = policy.models_at_start(is_trial=True)
    allocator = sizing.StartupAllocator(machine, len(specs))
    for spec in specs:
        with open_archive(policy.find(spec.location)) as archive:
            found = admit(archive, spec, policy)
        allocator.claim(found.name, archive.manifest.model_version, spec.location)
        if found.unproven and found.unproven.reason == "versions":
            warnings.append(f"{found.name}: {found.unproven.text}")
        read.append(found)
    requests = [policy.request(each.spec, each.config, each.name) for each in read]
    allocations = sizing.choose(machine, requests)
    models = [
        PlannedModel(each.name, each.archive.manifest.model_version, each.archive.path.name,
                     each.config, allocation)
        for each, allocation in zip(read, allocations, strict=True)
    ]  # fmt: skip
    if excess := sizing.describe_excess(machine, allocations):
        warnings.append(excess)
    return StartPlan(machine, models, warnings)


def explain(plan: StartPlan) -> dict[str, Any]:
    """Return the plan as JSON: each model's settings as `{"value": …, "why": …}`."""
    return {
        "machine": {
            "cores": plan.machine.cores,
            "why": plan.machine.limit,
            "cuda_devices": plan.machine.gpus,
        },
        "models": [
            {
                "name": model.name,
                "version": model.version,
                "file": model.file,
                **{
                    key: {"value": value, "why": why}
                    for key, value, why in _rows(model, plan.machine)
                },
            }
            for model in plan.models
        ],
        "threads": _threads(plan),
        "warnings": list(plan.warnings),
    }


def plan_table(plan: StartPlan) -> Iterator[Table | Text]:
    """Yield the same as lines and tables for a terminal."""
    machine = plan.machine
    devices = f"{machine.gpus} CUDA devices" if machine.gpus else "no CUDA device"
    yield Text(f"cores: {machine.cores} ({machine.limit}); {devices}")
    if not plan.models:
        yield Text("no models: name them with --models, or nothing was served last")
        return
    table = Table("model", "setting", "value", "why")
    for model in plan.models:
        first = f"{model.name} {model.version}"
        for key, value, why in _rows(model, machine):
            table.add_row(Text(first), key.replace("_", " "), Text(str(value)), Text(why))
            first = ""
        table.add_section()
    yield table
    yield Text(f"threads of all workers: {_threads(plan)} on {machine.cores} cores")


def _threads(plan: StartPlan) -> int:
    return sum(model.allocation.total_threads for model in plan.models)


def _rows(model: PlannedModel, machine: sizing.Machine) -> Iterator[tuple[str, str | int, str]]:
    config, allocation = model.config, model.allocation
    yield "device", *_device(config, machine)
    yield "workers", allocation.workers, allocation.why_workers
    yield "threads", allocation.threads, allocation.why_threads
    yield "batch_size", config.batch_size, _why_batch(config)
    origin = config.origins.get
    why = origin("maxBatchDelay", "default: a free worker takes what waits at once")
    yield "batch_delay_ms", config.batch_delay_ms, why
    yield "queue_size", config.queue_size, origin("jobQueueSize", "the setting queue_size")
    if config.explain_workers:
        why = origin("explainWorkers", "default")
        is_early = config.explains_early
        start = "once the others are ready" if is_early else "for the first explanation"
        why += f"; started {start}, at a lower priority, not counted below"
        yield "explain_workers", config.explain_workers, why
    if config.explain_share:
        why = origin("explainShare", "the setting explain_share")
        yield "explain_share", f"{config.explain_share:g}", why


def _device(config: ModelConfig, machine: sizing.Machine) -> tuple[str, str]:
    said = config.origins.get("deviceType", f"the setting device: {config.device}")
    if sizing.is_on_gpu(machine, config.device):
        return config.device.replace("auto", "cuda"), said
    if config.device == "auto":
        return "cpu", f"{said}, and no CUDA device is seen"
    if config.device != "cpu":
        said += ", but no CUDA device is seen: its workers will say so"
    return config.device, said


def _why_batch(config: ModelConfig) -> str:
    why = config.origins.get("batchSize", "default")
    if config.batch_size == config.proven_batch:
        why += "; the export proved no more"
    return why
