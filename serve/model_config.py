"""The archive's model-config.yaml and the server's settings → how one model version is run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from archiver import Archive
from serve.errors import BadModelConfig
from serve.settings import Settings

DEFAULT_BATCH_SIZE = 8
"""On a CPU a batch above 8 gains nothing for small networks and costs latency for large ones."""


@dataclass(frozen=True)
class ModelConfig:
    """How one model version is run. Keys of the YAML file in brackets; they are TorchServe's."""

    workers: int
    """Workers to start; 0 leaves the choice to the server [minWorkers]."""
    batch_size: int
    """Largest batch, never above what the export's report proved [batchSize]."""
    batch_delay_ms: int
    """Longest time that a batch waits for more requests; 0 waits for none [maxBatchDelay]."""
    queue_size: int
    """Requests that may wait [jobQueueSize]."""
    request_timeout_s: float
    """From arrival to answer [clientTimeoutInMills]."""
    response_timeout_s: float
    """For one batch in a worker [responseTimeout, seconds]."""
    startup_timeout_s: float
    """To load [startupTimeout, seconds]."""
    device: str
    """auto, cpu, cuda or cuda:N [deviceType: cpu | gpu]."""
    retry: bool
    """Whether a request that a worker died with is tried once more, alone [retry]."""


def load_model_config(archive: Archive, settings: Settings) -> ModelConfig:
    """Read the archive's configuration file, defaults from the settings.

    Raises:
        BadModelConfig: the file is missing or no YAML mapping, or a value has the wrong type.
    """
    file = archive.manifest.config_file
    values = _Values(_parse(archive, file), file or "model-config.yaml")
    proven = proven_batch(archive)
    batch_size = values.integer("batchSize", DEFAULT_BATCH_SIZE, least=1)
    device = values.choice("deviceType", {"cpu": "cpu", "gpu": "cuda"}, settings.device)
    timeout_ms = values.integer("clientTimeoutInMills", 0, least=0)
    return ModelConfig(
        workers=values.integer("minWorkers", 0, least=0),
        batch_size=min(batch_size, proven) if proven else batch_size,
        batch_delay_ms=values.integer("maxBatchDelay", 0, least=0),
        queue_size=values.integer("jobQueueSize", settings.queue_size, least=1),
        request_timeout_s=timeout_ms / 1000 if timeout_ms else settings.request_timeout_s,
        response_timeout_s=values.seconds("responseTimeout", settings.response_timeout_s),
        startup_timeout_s=values.seconds("startupTimeout", settings.startup_timeout_s),
        device=device,
        retry=values.boolean("retry", True),
    )


def proven_batch(archive: Archive) -> int | None:
    """Return the largest batch that the export compared, None if unknown.

    1 for a fixed batch, and for a model whose rows mix: it is served one request at a time.
    """
    seal = archive.manifest.modelyard
    signature = seal.signature if seal else None
    if signature is None or not signature.inputs or not signature.inputs[0].shape:
        return None
    if signature.batching and not signature.batching.batchable:
        return 1
    batch = signature.inputs[0].shape[0]
    return signature.dims[batch].max if isinstance(batch, str) else 1


def default_workers(device: str, models: int) -> int:
    """Return workers per model where nothing else is said.

    One per GPU; else one thread each, all models together no more threads than cores.
    """
    if device != "cpu" and (gpus := count_gpus()):
        return gpus if device in ("auto", "cuda") else 1
    return max(1, len(os.sched_getaffinity(0)) // max(1, models))


def count_gpus() -> int:
    """Return how many NVIDIA devices a worker would see, without asking CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([index for index in visible.split(",") if index.strip() not in ("", "-1")])
    return sum(1 for file in Path("/dev").glob("nvidia*") if file.name[6:].isdigit())


def threads_per_worker() -> int:
    """Return the threads of a worker.

    Always 1: two one-thread workers beat one two-thread worker on every model that was measured,
    and thread teams collapse when anything else runs on their cores.
    """
    return 1


def _parse(archive: Archive, file: str | None) -> dict[str, Any]:
    if not file:
        return {}
    if file not in archive.names:
        raise BadModelConfig(f"the manifest names {file}, which the archive does not hold")
    try:
        config = yaml.safe_load(archive.read(file))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadModelConfig(f"{file} is no YAML: {error}") from error
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise BadModelConfig(f"{file}: expected `key: value` lines, got {type(config).__name__}")
    return config


class _Values:
    """Typed look-ups that name the key when its value is wrong."""

    def __init__(self, values: dict[str, Any], file: str) -> None:
        self._values = values
        self._file = file

    def integer(self, key: str, default: int, least: int) -> int:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadModelConfig(
                f"{self._file}: {key}: expected a whole number from {least} up, got {value!r}"
            )
        return value

    def seconds(self, key: str, default: float) -> float:
        return self.integer(key, 1, least=1) if key in self._values else default

    def boolean(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise BadModelConfig(f"{self._file}: {key}: expected true or false, got {value!r}")
        return value

    def choice(self, key: str, meanings: dict[str, str], default: str) -> str:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in meanings:
            raise BadModelConfig(
                f"{self._file}: {key}: expected {' or '.join(meanings)}, got {value!r}"
            )
        return meanings[value]
