"""What TorchServe decides otherwise than we do."""

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from modelyard.archiver import Archive, ArchiveError
from modelyard.plugins.torchserve import store as locations
from modelyard.plugins.torchserve.logs import WorkerPipes
from modelyard.plugins.torchserve.metrics import TorchServeMetrics
from modelyard.plugins.torchserve.model_config import load_torchserve_config
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.plugins.torchserve.snapshot import Snapshots, parse_model_snapshot, parse_notes
from modelyard.serve import errors
from modelyard.serve.control.fetch import clear_leftovers, fetch_archive, in_daemon
from modelyard.serve.control.model_config import ModelConfig, ModelSpec, Options
from modelyard.serve.control.registry import Registry
from modelyard.serve.control.saved import as_notes
from modelyard.serve.control.sizing import Allocation, ResourceRequest, choose, this_machine
from modelyard.serve.control.store import list_archives
from modelyard.serve.control.urls import UrlRules, is_url
from modelyard.serve.dataplane.worker import Output, WorkerPolicy
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
            options = list_archives(store, locations.TORCHSERVE_SUFFIXES)
        parts = [option.partition("=") for option in options]
        pairs = [(name, rest) if equals else (None, name) for name, equals, rest in parts]
        if not is_trial:
            for _, location in pairs:
                if not is_url(location):
                    locations.refuse_missing(store, location)
        return [ModelSpec(location, name, at_start=True) for name, location in pairs]

    def notes_at_start(self) -> dict[str, Callable[[], Any]]:
        """Return what a snapshot remembers beside the models."""
        return as_notes(parse_notes(self._dialect.model_snapshot))

    async def locate(self, location: str) -> tuple[Path, bool]:
        """Return an archive of the store; what a URL names is fetched into it."""
        store = self.settings.model_store
        if not is_url(location):
            return locations.find_as_torchserve(store, location), False
        locations.refuse_relative(location)
        rules = UrlRules(self._dialect.allowed_urls)
        fetch = partial(fetch_archive, location, store, rules)
        return await in_daemon(fetch, partial(Path.unlink, missing_ok=True)), True

    def choose_name(self, archive: Archive, spec: ModelSpec) -> str:
        """Return the caller's name, the manifest's, or at the start the file's."""
        name = spec.name or archive.manifest.model_name
        if name is None:
            if not spec.at_start:
                raise ArchiveError("Model name is not defined.")
            name = locations.name_of_file(archive.path.name)
        locations.check_torchserve_name(name)
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
        file = locations.find_as_torchserve(store, entry["marName"])
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
