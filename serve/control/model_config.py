"""The archive's model-config.yaml, the caller and the server's settings → how a version is run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import yaml

from modelyard.archiver import Archive
from modelyard.serve.control.sizing import count_gpus
from modelyard.serve.dataplane.lengths import CALL_BYTES
from modelyard.serve.errors import BadModelConfig
from modelyard.serve.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_BATCH_SIZE = 8
"""On a CPU a batch above 8 gains nothing for small networks and costs latency for large ones."""
RETRY_S = 300
"""TorchServe's own time in which a worker that fails may come back."""
FILLS_ROWS = ("text", "text_encoder")
"""Built-in handlers that fill a batch up to its longest request."""
PARALLEL_TYPES = {"pp": "pp", "tp": "tp", "pptp": "pptp", "custom": "custom"}
LAUNCHED_TYPES = ("pp", "tp", "pptp")
"""Parallel types whose workers torchrun starts."""


@dataclass(frozen=True)
class Options:
    """What the caller of the register API said; None leaves it to archive and settings."""

    batch_size: int | None = None
    batch_delay_ms: int | None = None
    response_timeout_s: int | None = None
    startup_timeout_s: int | None = None
    handler: str | None = None
    runtime: str | None = None
    comes_first: bool = False
    """Before the archive in everything, as what a snapshot says."""


@dataclass(frozen=True)
class ModelConfig:
    """How one model version is run. Keys of the YAML file in brackets; they are TorchServe's."""

    workers: int
    """Workers to start; 0 leaves the choice to the server [minWorkers]."""
    most_workers: int
    """Workers that scaling leaves alone [maxWorkers]; 0 as `workers`."""
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
    explain_workers: int = 0
    """Workers that only explain, started with the first explanation; 0 leaves explanations to the
    workers of predictions [explainWorkers]."""
    device_ids: tuple[int, ...] = ()
    """Worker i takes the i-th of these, in turn [deviceIds]."""
    by_length: bool = False
    """Whether a batch is made of requests of like length [batchBy: arrival | length]."""
    needs_ticket: bool = False
    """Whether a request is taken only while a worker is idle [useJobTicket]."""
    has_venv: bool = False
    """Whether the archive asked for an environment of its own [useVenv]."""
    retry_s: int = RETRY_S
    """How long a worker that fails counts as coming back [maxRetryTimeoutInSec]."""
    parallel_type: str = ""
    """Shown only [parallelType]."""
    parallel_level: int = 0
    """Shown only [parallelLevel]."""
    threads: int = 0
    """Of each worker; 0 leaves the choice to the server [workerThreads]."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Key of the file → who says so, for people; keys that nobody says are not there."""
    proven_batch: int | None = field(default=None, compare=False)
    """Largest batch that the export compared, None if unknown."""

    @property
    def uses_gpu(self) -> bool:
        """Whether workers run on CUDA devices."""
        return self.device != "cpu" and count_gpus() > 0

    @property
    def call_bytes(self) -> int | None:
        """What batches of like length reckon with, of `lengths`; None for batches in order."""
        return CALL_BYTES["cuda" if self.uses_gpu else "cpu"] if self.by_length else None


def load_model_config(
    archive: Archive,
    settings: Settings,
    options: Options | None = None,
    name: str | None = None,
    at_start: bool = False,
) -> ModelConfig:
    """Read the archive's configuration file; what it leaves open comes from the settings.

    In TorchServe's dialect a value of the wrong type is warned of and left out, and what the
    setting `models` says of this name and version stands behind the file.

    Args:
        options: what the caller said; batch size and delay stand before the file, timeouts behind.
        name: under which the archive is registered.
        at_start: TorchServe's setting `models` says how many workers only then.

    Raises:
        BadModelConfig: the file is missing or no YAML mapping, a value has the wrong type, or it
            asks for what is not supported.
    """
    file = archive.manifest.config_file
    dialect = settings.torchserve
    own = _parse(archive, file)
    over = settings.model_settings.get(name or archive.manifest.model_name or "", {})
    where = file or "model-config.yaml"
    if over:
        where += " with the setting model_settings"
    values = _Values({**own, **over}, where, dialect is not None)
    said = options or Options()
    # An archive of TorchServe's may keep state that its predictions and explanations share.
    explain_workers = values.integer(
        "explainWorkers", int(archive.manifest.modelyard is not None), least=0
    )
    sealed = archive.manifest.modelyard is not None
    by_length = values.choice(
        "batchBy",
        {"arrival": False, "length": True},
        sealed and (said.handler or archive.manifest.handler) in FILLS_ROWS,
    )
    threads = values.integer("workerThreads", 0, least=0)
    proven = proven_batch(archive)
    if dialect is None:
        config = _ours(values, proven, settings, said)
        values.refuse_unknown(over)
        origins = {key: f"{key} of {file}" for key in own}
        origins |= {key: f"{key} of the setting model_settings" for key in over}
        return replace(
            config,
            explain_workers=explain_workers,
            by_length=by_length,
            threads=threads,
            origins=origins,
            proven_batch=proven,
        )
    listed = dialect.models.get(name or "", {}).get(archive.manifest.model_version, {})
    behind = _Values(listed, "the setting `models`", True)
    config = _torchserves(values, behind, proven, settings, said)
    if at_start and not config.workers:
        workers, most = _pair(behind)
        config = replace(config, workers=workers, most_workers=most)
    return replace(config, explain_workers=explain_workers, by_length=by_length, threads=threads)


def _ours(values: _Values, proven: int | None, settings: Settings, said: Options) -> ModelConfig:
    batch_size = said.batch_size or values.integer("batchSize", DEFAULT_BATCH_SIZE, least=1)
    device = values.choice("deviceType", {"cpu": "cpu", "gpu": "cuda"}, settings.device)
    timeout_ms = values.integer("clientTimeoutInMills", 0, least=0)
    workers = values.integer("minWorkers", 0, least=0)
    return ModelConfig(
        workers=workers,
        most_workers=max(workers, values.integer("maxWorkers", 0, least=0)),
        batch_size=min(batch_size, proven) if proven else batch_size,
        batch_delay_ms=values.integer("maxBatchDelay", 0, least=0),
        queue_size=values.integer("jobQueueSize", settings.queue_size, least=1),
        request_timeout_s=timeout_ms / 1000 if timeout_ms else settings.request_timeout_s,
        response_timeout_s=values.seconds("responseTimeout", settings.response_timeout_s),
        startup_timeout_s=values.seconds("startupTimeout", settings.startup_timeout_s),
        device=device,
        retry=values.boolean("retry", True),
    )


def _torchserves(
    values: _Values, listed: _Values, proven: int | None, settings: Settings, said: Options
) -> ModelConfig:
    """Apply TorchServe's defaults and order: file, setting `models`, caller, server.

    The caller's batch size and delay come first.
    """
    for key in ("sequenceBatching", "continuousBatching", "asyncCommunication"):
        if values.boolean(key, False):
            raise BadModelConfig(
                f"{values.file}: {key} is not supported; serve this model without it, or stay "
                "with TorchServe for it"
            )
    parallel_type = values.choice("parallelType", PARALLEL_TYPES, "")
    parallel_level = values.integer("parallelLevel", 0, least=0) if parallel_type else 0
    if parallel_level and parallel_type in LAUNCHED_TYPES:
        raise BadModelConfig(
            f"{values.file}: parallelType {parallel_type}: a worker of several processes is not "
            "supported; `custom` starts one process"
        )
    workers, most = _pair(values)
    timeout_ms = values.integer("clientTimeoutInMills", 0, least=0)
    delay = values.integer("maxBatchDelay", 0, least=0) or listed.integer("maxBatchDelay", 0, 0)
    batch_size = said.batch_size or values.at_least_1("batchSize")
    batch_size = batch_size or listed.at_least_1("batchSize") or 1

    def seconds(key: str, caller: int | None, server: float) -> float:
        if said.comes_first and caller:
            return caller
        return values.integer(key, 0, 1) or listed.integer(key, 0, 1) or caller or server

    return ModelConfig(
        workers=workers,
        most_workers=most,
        batch_size=min(batch_size, proven) if proven else batch_size,
        batch_delay_ms=said.batch_delay_ms if said.batch_delay_ms is not None else delay or 100,
        queue_size=values.integer("jobQueueSize", settings.queue_size, least=1),
        request_timeout_s=timeout_ms / 1000 if timeout_ms else math.inf,
        response_timeout_s=seconds(
            "responseTimeout", said.response_timeout_s, settings.response_timeout_s
        ),
        startup_timeout_s=seconds(
            "startupTimeout", said.startup_timeout_s, settings.startup_timeout_s
        ),
        device=_device(values, settings.device),
        retry=values.boolean("retry", True),
        device_ids=_device_ids(values),
        needs_ticket=values.boolean("useJobTicket", False),
        has_venv=values.boolean("useVenv", False),
        retry_s=values.integer("maxRetryTimeoutInSec", RETRY_S, least=1),
        parallel_type=parallel_type,
        parallel_level=parallel_level,
    )


def _pair(values: _Values) -> tuple[int, int]:
    """Return minWorkers and maxWorkers where both make sense together, else zeros."""
    least, most = values.at_least_1("minWorkers"), values.integer("maxWorkers", 0, least=0)
    if 0 < least <= most:
        return least, most
    if least or most:
        logger.warning("Invalid model config in mar, minWorkers:%d, maxWorkers:%d", least, most)
    return 0, 0


def _device(values: _Values, server: str) -> str:
    wanted = values.values.get("deviceType")
    if wanted is not None and wanted not in ("cpu", "gpu"):
        logger.warning("Invalid deviceType: %s, should be cpu, or gpu", wanted)
        return server
    if wanted is None or server == "cpu":
        return server
    return "cuda" if wanted == "gpu" and count_gpus() else "cpu"


def _device_ids(values: _Values) -> tuple[int, ...]:
    ids = values.values.get("deviceIds", [])
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        logger.warning("%s: deviceIds: expected a list of numbers, got %r", values.file, ids)
        return ()
    there = range(count_gpus())
    for each in ids:
        if each not in there:
            logger.warning("Invalid deviceId:%d, ignore deviceIds list", each)
            return ()
    return tuple(ids)


def proven_batch(archive: Archive) -> int | None:
    """Return the largest batch that may be served by the export's report, None if unknown."""
    seal = archive.manifest.modelyard
    return seal.signature.proven_batch if seal and seal.signature else None


def _parse(archive: Archive, file: str | None) -> dict[str, Any]:
    if not file:
        return {}
    if file not in archive.names:
        raise BadModelConfig(f"the manifest names {file}, which the archive does not hold")
    try:
        config = yaml.safe_load(archive.read(file))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadModelConfig(f"{file} is not valid YAML: {error}") from error
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise BadModelConfig(f"{file}: expected `key: value` lines, got {type(config).__name__}")
    return config


class _Values:
    """Typed look-ups that name the key when its value is wrong.

    Args:
        is_lenient: a wrong value is warned of and its default taken; else it is an error.
    """

    def __init__(self, values: Mapping[str, Any], file: str, is_lenient: bool) -> None:
        self.values = values
        self.file = file
        self._is_lenient = is_lenient
        self._asked: set[str] = set()

    def refuse_unknown(self, given: Mapping[str, Any]) -> None:
        """Refuse keys that nobody has asked for.

        An archive's file may hold keys for its handler; what only the server reads may not.
        """
        if unknown := sorted(map(str, set(given) - self._asked)):
            raise BadModelConfig(
                f"the setting model_settings: the server reads no {', '.join(unknown)}; it reads "
                + ", ".join(sorted(self._asked))
            )

    def _get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return self.values.get(key, default)

    def integer(self, key: str, default: int, least: int) -> int:
        value = self._get(key, default)
        if key in self.values and not (type(value) is int and value >= least):
            return self._wrong(key, f"a whole number from {least} up", default)
        return int(value)

    def at_least_1(self, key: str) -> int:
        """Return 0 where nothing is said; what is written below 1 means 1, as in TorchServe."""
        value = self._get(key)
        if value is None:
            return 0
        return max(1, value) if type(value) is int else self._wrong(key, "a whole number", 0)

    def seconds(self, key: str, default: float) -> float:
        found = self.integer(key, 1, least=1)
        return found if key in self.values else default

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        return value if isinstance(value, bool) else self._wrong(key, "true or false", default)

    def choice(self, key: str, meanings: dict[str, T], default: T) -> T:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in meanings:
            return self._wrong(key, " or ".join(meanings), default)
        return meanings[value]

    def _wrong(self, key: str, expected: str, default: T) -> T:
        problem = f"{self.file}: {key}: expected {expected}, got {self.values[key]!r}"
        if not self._is_lenient:
            raise BadModelConfig(problem)
        logger.warning("%s; it is left out", problem)
        return default
