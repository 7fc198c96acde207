"""How a model version is run in TorchServe's dialect: its defaults, and whose word counts there."""

import logging
import math

from modelyard.archiver import Archive
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve.control import model_config as common
from modelyard.serve.control.model_config import ModelConfig, ModelSpec, Values
from modelyard.serve.control.sizing import count_gpus
from modelyard.serve.errors import BadModelConfig
from modelyard.serve.settings import Settings

logger = logging.getLogger(__name__)

RETRY_S = 300
"""Time in which a worker that fails may come back."""
LAUNCHED_TYPES = ("pp", "tp", "pptp")
"""Parallel types whose workers torchrun starts."""
PARALLEL_TYPES = {name: name for name in (*LAUNCHED_TYPES, "custom")}


def load_torchserve_config(
    archive: Archive, settings: Settings, dialect: TorchServeSettings, spec: ModelSpec, name: str
) -> ModelConfig:
    """Read a configuration: from the file, the setting `models`, the caller, the server.

    The caller's batch size and delay come first. A value of the wrong type is warned of and left
    out.

    Raises:
        BadModelConfig: the file is missing or not a YAML mapping, or it asks for what is not
            supported.
    """
    values = Values.of(archive, settings, name, is_lenient=True)
    values.check_keys(archive.manifest.modelyard is not None)
    of_name = dialect.models.get(name, {})
    listed = Values(
        of_name.get(archive.manifest.model_version, {}), "the setting `models`", is_lenient=True
    )
    for key in ("sequenceBatching", "continuousBatching", "asyncCommunication"):
        if values.boolean(key, False):
            raise BadModelConfig(
                f"{values.file}: {key} is not supported; serve this model without it, or stay "
                "with TorchServe for it"
            )
    parallel_type = values.choice("parallelType", PARALLEL_TYPES, "")
    parallel_level = values.integer("parallelLevel", 0, least=0) if parallel_type else 0
    torchrun = values.values.get("torchrun")
    processes = torchrun.get("nproc-per-node") if isinstance(torchrun, dict) else 0
    processes = processes if isinstance(processes, int) else 0
    if (parallel_level or processes > 1) and parallel_type in LAUNCHED_TYPES:
        said = f"torchrun with {processes} processes" if processes > 1 else ""
        raise BadModelConfig(
            f"{values.file}: {said or f'parallelType {parallel_type}'}: a worker of several "
            "processes is not supported; `parallelType: custom` starts one process"
        )
    workers, most = _workers(values)
    if spec.at_start and not workers:  # only then the setting `models` says how many
        workers, most = _workers(listed)
    options, proven = spec.options, common.proven_batch(archive)
    timeout_ms = values.integer("clientTimeoutInMills", 0, least=0)
    delay = values.integer("maxBatchDelay", 0, least=0) or listed.integer("maxBatchDelay", 0, 0)
    batch_size = options.batch_size or values.at_least_1("batchSize")
    batch_size = batch_size or listed.at_least_1("batchSize") or 1

    def seconds(key: str, name: str) -> float:
        caller: int | None = getattr(options, name)
        if options.comes_first and caller:
            return caller
        of_archive = values.integer(key, 0, 1) or listed.integer(key, 0, 1)
        return float(of_archive or caller or getattr(settings, name))

    return ModelConfig(
        workers=workers,
        most_workers=most,
        batch_size=min(batch_size, proven) if proven else batch_size,
        batch_delay_ms=delay or 100 if options.batch_delay_ms is None else options.batch_delay_ms,
        gathers_bursts=values.choice(
            "batchDelay", {"busy": True, "always": False}, dialect.batch_delay == "busy"
        ),
        queue_size=values.integer("jobQueueSize", settings.queue_size, least=1),
        request_timeout_s=timeout_ms / 1000 if timeout_ms else math.inf,
        refuses_late=False,
        response_timeout_s=seconds("responseTimeout", "response_timeout_s"),
        startup_timeout_s=seconds("startupTimeout", "startup_timeout_s"),
        device=_device(values, settings.device),
        retry=values.boolean("retry", True),
        device_ids=_device_ids(values),
        needs_ticket=values.boolean("useJobTicket", False),
        has_venv=values.boolean("useVenv", False),
        retry_s=values.integer("maxRetryTimeoutInSec", RETRY_S, least=1),
        parallel_type=parallel_type,
        parallel_level=parallel_level,
        **common.extensions(values, archive, settings, options),
    )


def _workers(values: Values) -> tuple[int, int]:
    """Return minWorkers and maxWorkers where both make sense together, else zeros."""
    least, most = values.at_least_1("minWorkers"), values.integer("maxWorkers", 0, least=0)
    if 0 < least <= most:
        return least, most
    if least or most:
        logger.warning("Invalid model config in mar, minWorkers:%d, maxWorkers:%d", least, most)
    return 0, 0


def _device(values: Values, server: str) -> str:
    kind = values.values.get("deviceType")
    if kind is not None and kind not in ("cpu", "gpu"):
        logger.warning("Invalid deviceType: %s, should be cpu, or gpu", kind)
        return server
    if kind is None or server == "cpu":
        return server
    return "cuda" if kind == "gpu" and count_gpus() else "cpu"


def _device_ids(values: Values) -> tuple[int, ...]:
    ids = values.values.get("deviceIds", [])
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        logger.warning("%s: deviceIds: expected a list of numbers, got %r", values.file, ids)
        return ()
    for each in set(ids) - set(range(count_gpus())):
        logger.warning("Invalid deviceId:%d, ignore deviceIds list", each)
        return ()
    return tuple(ids)
