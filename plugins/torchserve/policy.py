"""What TorchServe decides otherwise than we do: of workers, models, their settings and names."""

import logging
import math
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from modelyard.archiver import Archive, ArchiveError
from modelyard.archiver.errors import BadName
from modelyard.archiver.untrusted.names import quoted
from modelyard.plugins.torchserve.logs import WorkerPipes
from modelyard.plugins.torchserve.metrics import TorchServeMetrics
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.plugins.torchserve.snapshot import Snapshots, parse_model_snapshot, parse_notes
from modelyard.serve import errors
from modelyard.serve.control import model_config as common
from modelyard.serve.control.fetch import clear_leftovers, fetch_archive, in_daemon
from modelyard.serve.control.model_config import ModelConfig, ModelSpec, Options, Values
from modelyard.serve.control.registry import Registry
from modelyard.serve.control.saved import as_notes
from modelyard.serve.control.sizing import (
    Allocation,
    ResourceRequest,
    choose,
    count_gpus,
    this_machine,
)
from modelyard.serve.control.store import (
    SUFFIXES,
    describe_store,
    file_stem,
    find_in_store,
    list_archives,
)
from modelyard.serve.control.urls import UrlRules, is_url
from modelyard.serve.dataplane.worker import Output, WorkerPolicy
from modelyard.serve.errors import BadModelConfig, FileNotInStore, StartError
from modelyard.serve.policy import Policy, Share
from modelyard.serve.settings import ENV_PREFIX, Settings
from modelyard.serve.walls.environment import PASSED

logger = logging.getLogger(__name__)


class TorchServePolicy(Policy):
    """The decisions of a server in TorchServe's dialect."""

    needs_manifest = False

    def __init__(
        self, settings: Settings, dialect: TorchServeSettings, metrics: TorchServeMetrics
    ) -> None:
        super().__init__(settings, TorchServeWorkers(metrics))
        self._dialect = dialect
        self.is_strict = dialect.strict_start
        self._snapshots = Snapshots(dialect)
        self.default_handler = dialect.default_service_handler
        self.unregister_timeout_s = dialect.unregister_model_timeout
        self.max_answer_bytes = dialect.max_response_size
        if not settings.pass_variables:  # else what is listed, as everywhere
            others = (name for name in os.environ if not name.startswith(ENV_PREFIX))
            self.passed_variables = (*PASSED, *others)
        self.hidden_variables = dialect.blacklist_env_vars
        self.worker_variables = {
            "TS_DECODE_INPUT_REQUEST": str(dialect.decode_input_request).lower(),
            **dict.fromkeys(("TS_IPEX_ENABLE", "TS_IPEX_GPU_ENABLE"), "false"),
            "TS_REQUEST_SEQUENCE_ID": dialect.ts_header_key_sequence_id,
            "TS_REQUEST_SEQUENCE_START": dialect.ts_header_key_sequence_start,
            "TS_REQUEST_SEQUENCE_END": dialect.ts_header_key_sequence_end,
        }
        self.worker_keys = {
            "dialect": "torchserve",
            "envelope": dialect.service_envelope,
            "decode_input": dialect.decode_input_request,
            "limit_max_image_pixels": dialect.limit_max_image_pixels,
            "metrics": {"declared": metrics.model_metrics},
        }

    def models_at_start(self, is_trial: bool = False) -> list[ModelSpec]:
        """Return what a snapshot loads, else what the settings name.

        Raises:
            StartError: the store lacks one of the archives.
        """
        store, options = self.settings.model_store, list(self.settings.models)
        if not is_trial:
            clear_leftovers(store)
        if self._dialect.model_snapshot is not None:
            snapshot = parse_model_snapshot(self._dialect.model_snapshot)
            return [_from_snapshot(store, *entry) for entry in snapshot]
        if [option.upper() for option in options] == ["ALL"]:
            options = list_archives(store, TORCHSERVE_SUFFIXES)
        parts = [option.partition("=") for option in options]
        pairs = [(name, rest) if equals else (None, name) for name, equals, rest in parts]
        if not is_trial:
            for _, location in pairs:
                if not is_url(location):
                    refuse_missing(store, location)
        return [ModelSpec(location, name, at_start=True) for name, location in pairs]

    def notes_at_start(self) -> dict[str, Callable[[], Any]]:
        """Return what a snapshot remembers beside the models."""
        return as_notes(parse_notes(self._dialect.model_snapshot))

    async def locate(self, location: str) -> tuple[Path, bool]:
        """Return an archive of the store; what a URL names is fetched into it."""
        store = self.settings.model_store
        if not is_url(location):
            return find_as_torchserve(store, location), False
        refuse_relative(location)
        rules = UrlRules(self._dialect.allowed_urls)
        fetch = partial(fetch_archive, location, store, rules)
        return await in_daemon(fetch, partial(Path.unlink, missing_ok=True)), True

    def choose_name(self, archive: Archive, spec: ModelSpec) -> str:
        """Return the caller's name, the manifest's, or at the start the file's."""
        name = spec.name or archive.manifest.model_name
        if name is None:
            if not spec.at_start:
                raise ArchiveError("Model name is not defined.")
            name = name_of_file(archive.path.name)
        check_torchserve_name(name)
        return name

    def configure(self, archive: Archive, spec: ModelSpec, name: str) -> ModelConfig:
        """Return how a model version is run."""
        return load_torchserve_config(archive, self.settings, self._dialect, spec, name)

    async def size(
        self, spec: ModelSpec, config: ModelConfig, name: str, share: Share
    ) -> Allocation:
        """Return the workers that caller, archive or server say; models do not share the cores.

        Over the register API there are none where nobody says anything.
        """
        workers, most = config.workers, config.most_workers
        if spec.workers is not None:
            workers, most = spec.workers, spec.most or 0
        elif not workers:
            workers = self._dialect.default_workers_per_model
            if not workers and spec.at_start:
                workers = choose(this_machine(), [ResourceRequest(config.device)])[0].workers
        return Allocation(workers, config.threads or 1, most=max(workers, most))

    def interpreter(self, archive: Archive, folder: Path, name: str) -> str:
        """Return the Python of a version's workers."""
        try:
            return super().interpreter(archive, folder, name)
        except errors.RequirementsFailed as error:
            text = f"Custom pip package installation failed for model {name}"
            raise errors.RequirementsFailed(text) from error

    def remember(self, event: str, registry: Registry) -> Callable[[], None]:
        """Return what writes a snapshot; one that cannot be written is logged and no more."""
        return self._snapshots.take(event, registry)


class TorchServeWorkers(WorkerPolicy):
    """Workers whose output, life and end are logged as TorchServe's users search for them."""

    counts_handed_over = True

    def __init__(self, metrics: TorchServeMetrics) -> None:
        self._metrics = metrics
        self._recovering: set[str] = set()
        """Names of workers that are being started again."""

    def open_output(self, log: Path, worker: str) -> Output:
        """Return pipes whose lines go to the log of models."""
        return WorkerPipes(worker)

    def failed(self, error: Exception) -> None:
        """Log why a worker could not load, without what its own lines have said.

        Scripts read up to an exception's name, once for each try, and want the traceback by then.
        """
        text = str(error)
        if isinstance(error, errors.HandlerFailed):
            text = f"{text.partition(': ')[0]}: the traceback above says why"
        logger.error("Backend worker error: %s", text)

    def loaded(self, worker: str, seconds: float) -> None:
        """Log the worker's new state, and report how long it took to load."""
        self._metrics.worker_loaded(worker, seconds)
        if worker in self._recovering:
            self._recovering.remove(worker)
            logger.info("Auto recovery succeeded, reset recoveryStartTS")
        logger.info("%s State change WORKER_STARTED -> WORKER_MODEL_LOADED", worker)

    def ended(self, worker: str) -> None:
        """Log that the worker ended."""
        logger.info("%s Worker disconnected.", worker)
        logger.info("%s Backend worker process died.", worker)

    def retries(self, worker: str, id: int, pause_s: float) -> None:
        """Log when the worker is started again."""
        if worker not in self._recovering:
            self._recovering.add(worker)
            logger.info("Auto recovery start timestamp: %d", time.time() * 1000)
        logger.info("%s Retry worker: %d in %g seconds.", worker, id, pause_s)

    def silence(self, limit_s: float) -> errors.ServeError:
        """Return the error of a worker that died."""
        logger.info("Number or consecutive unsuccessful inference 1")
        return errors.WorkerDied()


def _from_snapshot(store: Path, name: str, version: str, entry: dict[str, Any]) -> ModelSpec:
    """Return what a snapshot names; it comes before the archive's own configuration.

    Raises:
        StartError: the store does not hold the archive.
    """
    try:
        file = find_as_torchserve(store, entry["marName"])
    except errors.FileNotInStore as error:
        raise errors.StartError(
            f"Model archive file for model :{name}, version :{version} not found in model store"
        ) from error
    return ModelSpec(
        file.name,
        name,
        entry["minWorkers"],
        entry["maxWorkers"],
        Options(
            batch_size=entry["batchSize"],
            batch_delay_ms=entry["maxBatchDelay"],
            response_timeout_s=entry.get("responseTimeout"),
            startup_timeout_s=entry.get("startupTimeout"),
            runtime=entry.get("runtimeType"),
            comes_first=True,
        ),
        is_default=entry["defaultVersion"],
    )


# -- how a model version is run: its defaults, and whose word counts -------------------------------


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


# -- what locations and names mean -----------------------------------------------------------------


TORCHSERVE_SUFFIXES = (*SUFFIXES, ".model")
MAX_QUOTED_NAME = 200
"""Most of a file name's 255 bytes that the model's name takes, in logs and unpacked files."""


def find_as_torchserve(store: Path, location: str) -> Path:
    """Return the archive that a location names; a name that is not there, that name and a suffix.

    Of a path only the last part counts, so nothing outside the store is reached.

    Raises:
        FileNotInStore: nothing is there; TorchServe's words.
    """
    refuse_relative(location)
    name = location.rstrip("/").rpartition("/")[2]
    is_name = name.isprintable() and name and not name.startswith(".") and "://" not in location
    if not is_name or (archive := find_in_store(store, name)) is None:
        raise FileNotInStore(f"Model not found at: {location}")
    return archive


def refuse_missing(store: Path, location: str) -> None:
    """Refuse a start with a model that the store does not have.

    A file name in a store without archives passes, as in TorchServe: they may come later.

    Raises:
        StartError: the message names what is there.
    """
    try:
        find_as_torchserve(store, location)
    except FileNotInStore as error:
        if location.endswith(TORCHSERVE_SUFFIXES) and not list_archives(store, TORCHSERVE_SUFFIXES):
            return
        raise StartError(f"{error}; {describe_store(store, TORCHSERVE_SUFFIXES)}") from error


def refuse_relative(location: str) -> None:
    """Raise FileNotInStore for a location that is empty or climbs; TorchServe's words."""
    if not location:
        raise FileNotInStore("empty url")
    if ".." in location:
        raise FileNotInStore(f"Relative path is not allowed in url: {location}")


def check_torchserve_name(name: str) -> None:
    """Refuse what cannot be one part of a path; TorchServe takes any other name over its API.

    Raises:
        BadName: the message says what is taken.
    """
    is_plain = name.isprintable() and not set(name) & set("/\\") and name not in (".", "..")
    if not name.strip() or not is_plain or len(file_stem(name)) > MAX_QUOTED_NAME:
        raise BadName(
            f"model name {quoted(name)}: expected printable characters without '/' and '\\', and "
            f"no more than {MAX_QUOTED_NAME} bytes where special ones take three"
        )


def name_of_file(file: str) -> str:
    """Return the name that TorchServe gives at its start to an archive that states none."""
    has_suffix = ".mar" in file or ".model" in file
    stem = file.rpartition(".")[0] if has_suffix else file
    return re.sub(r"\W|^_", "_", stem)
