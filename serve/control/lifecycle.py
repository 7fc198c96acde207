"""Register, scale and remove model versions; remember what was acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import secrets
import shutil
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from modelyard.archiver import Archive, ArchiveError, open_archive
from modelyard.archiver.manifest import MANIFEST_NAME, check_name, check_version
from modelyard.archiver.signing import check_signature, read_trusted_keys
from modelyard.serve.control.environment import interpreter_for
from modelyard.serve.control.model_config import ModelConfig, Options, load_model_config
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.control.sizing import (
    Allocation,
    Machine,
    ResourceRequest,
    choose,
    describe_excess,
    this_machine,
)
from modelyard.serve.control.state import StateDir, write_json
from modelyard.serve.control.store import (
    SUFFIXES,
    TORCHSERVES_SUFFIXES,
    check_torchserves_name,
    file_stem,
    find_archive,
    find_as_torchserve,
    list_archives,
    name_of_file,
    parse_model_option,
    refuse_relative,
)
from modelyard.serve.dataplane.batcher import Batcher
from modelyard.serve.dataplane.call import EXPLAIN, PREDICT
from modelyard.serve.dataplane.metrics import Metrics, VersionMetrics
from modelyard.serve.dataplane.pool import Plan, Pool
from modelyard.serve.errors import (
    BadRequest,
    CleanupTimedOut,
    FileNotInStore,
    LoadFailed,
    RequirementsFailed,
    ServeError,
    StartError,
)
from modelyard.serve.settings import Settings
from modelyard.serve.torchserve.fetch import UrlRules, clear_leftovers, fetch_archive, is_url
from modelyard.serve.torchserve.settings import TorchServeSettings
from modelyard.serve.torchserve.snapshot import Snapshots, parse_model_snapshot

logger = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1 << 30
"""Largest answer accepted from a worker."""
SCHEMA = 1
EXPLAINERS_NICENESS = 10
"""An explanation takes seconds of a core; predictions on the same core go first."""

Report = Callable[[str, str], None]
"""Called with a model's name and what happens to it, for progress."""


@dataclass(frozen=True)
class ModelSpec:
    """A model version that is to be served: a call of the register API, or a line of the state."""

    location: str
    """As the caller wrote it: a file of the store, or a URL."""
    name: str | None = None
    """None takes the manifest's."""
    workers: int | None = None
    """None leaves it to the settings, the archive and the chooser (`serve/control/sizing.py`)."""
    most: int | None = None
    """Workers that scaling leaves alone; None takes as many as are started."""
    options: Options = field(default_factory=Options)
    url: str | None = None
    """What it was fetched from, before the server was started again."""
    is_default: bool = False
    at_start: bool = False


@dataclass(frozen=True)
class PlannedModel:
    """One model version of a start that has not happened."""

    name: str
    version: str
    file: str
    config: ModelConfig
    allocation: Allocation


@dataclass(frozen=True)
class StartPlan:
    """What a start would start."""

    machine: Machine
    models: Sequence[PlannedModel]
    warning: str | None


class StartupAllocator:
    """Shares the cores out among the models of one start, once each has asked for its part."""

    def __init__(self, machine: Machine, count: int) -> None:
        self._machine = machine
        self._count = count
        self._requests: list[ResourceRequest] = []
        self._complete = asyncio.Event()

    async def allocate(self, request: ResourceRequest) -> Allocation:
        """Return what one model gets; where nobody said how many workers, after all have asked."""
        at = len(self._requests)
        self._requests.append(request)
        if len(self._requests) == self._count:
            self._complete.set()
        if request.workers is None:
            await self._complete.wait()
        return choose(self._machine, self._requests)[at]

    @property
    def warning(self) -> str | None:
        """Why it is too much, or None."""
        return describe_excess(self._machine, choose(self._machine, self._requests))


class Lifecycle:
    """Changes to what is served. Each change of one model waits for the one before it."""

    def __init__(self, settings: Settings, registry: Registry, metrics: Metrics) -> None:
        self._settings = settings
        self._dialect = settings.torchserve
        self._registry = registry
        self._metrics = metrics
        self._state = StateDir(settings.state_dir)
        self._snapshots = Snapshots(self._dialect) if self._dialect else None
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._unlisted: set[Pool] = set()
        """Of versions that are coming or going: not in the registry, and to be stopped like it."""
        self._machine = this_machine()
        self._loading: Counter[str] = Counter()
        self.warnings: list[str] = []
        """What the start found that whoever started it should know."""

    # -- the start -----------------------------------------------------------------------------

    async def start(self, report: Report) -> None:
        """Register what the settings name, or what was served last when they name nothing.

        All at once; the workers of one model load beside those of another. In TorchServe's dialect
        it returns when the archives are registered: a model that cannot be is left out and the
        log says why, and workers load while the server serves.

        Raises:
            ServeError, ArchiveError: the first model that cannot be served.
        """
        clear_leftovers(self._settings.model_store)
        spec = self._specs()
        allocator = StartupAllocator(self._machine, len(spec))
        starts = [self._start_one(each, allocator, report) for each in spec]
        tasks = [asyncio.ensure_future(start) for start in starts]
        try:
            models = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        defaults: dict[str, str] = {}
        for each, model in zip(spec, models, strict=True):
            if model is not None and (each.is_default or model.name not in defaults):
                defaults[model.name] = model.version
        self._registry.arrange(model for model in models if model is not None)
        for name, version in defaults.items():
            self._registry.set_default(name, version)
        self._save("startup")
        if (warning := allocator.warning) is not None:
            logger.warning("%s", warning)
            self.warnings.append(warning)

    def plan(self) -> StartPlan:
        """Return what `start` would start, and start nothing.

        Raises:
            ServeError, ArchiveError: the first model that could not be served.
        """
        read: list[tuple[str, Archive, ModelConfig]] = []
        requests: list[ResourceRequest] = []
        for spec in self._specs(is_trial=True):
            with open_archive(find_archive(self._settings.model_store, spec.location)) as archive:
                self._check_signature(archive)
                name = self._choose_name(archive, spec)
                config = load_model_config(archive, self._settings, spec.options, name)
            read.append((name, archive, config))
            requests.append(self._request(spec, config, name))
        allocations = choose(self._machine, requests)
        models = [
            PlannedModel(
                name, archive.manifest.model_version, archive.path.name, config, allocation
            )
            for (name, archive, config), allocation in zip(read, allocations, strict=True)
        ]
        return StartPlan(self._machine, models, describe_excess(self._machine, allocations))

    async def _start_one(
        self, spec: ModelSpec, allocator: StartupAllocator, report: Report
    ) -> ModelVersion | None:
        report(spec.name or spec.location, "loading")
        try:
            model = await self._locate_and_register(spec, allocator, waits=self._dialect is None)
        except (ServeError, ArchiveError) as error:
            if self._dialect is None:
                raise
            logger.error("Failed to load model: %s: %s", spec.location, error)
            return None
        report(model.name, f"version {model.version}, {model.pool.ready_count} workers ready")
        return model

    def _specs(self, is_trial: bool = False) -> list[ModelSpec]:
        """Return what the start is to serve; on trial, files stay as they are."""
        dialect, store = self._dialect, self._settings.model_store
        if dialect and dialect.model_snapshot is not None:
            snapshot = parse_model_snapshot(dialect.model_snapshot)
            return [_from_snapshot(store, *entry) for entry in snapshot]
        if not self._settings.models:
            return [] if dialect else self._last_served(is_trial)
        options: Sequence[str] = self._settings.models
        if [option.upper() for option in options] == ["ALL"]:
            options = list_archives(store, TORCHSERVES_SUFFIXES if dialect else SUFFIXES)
        if dialect is None:
            pairs = [parse_model_option(option) for option in options]
        else:
            parts = [option.partition("=") for option in options]
            pairs = [(name, rest) if equals else (None, name) for name, equals, rest in parts]
        return [ModelSpec(location, name, at_start=True) for name, location in pairs]

    def _last_served(self, is_trial: bool) -> list[ModelSpec]:
        """Return what the last change left; before it, where that file is damaged."""
        for file in (self._state.models_file, self._state.previous_models_file):
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
                models = content["models"]
                if (schema := content.get("schema", SCHEMA)) > SCHEMA:
                    raise ValueError(f"its schema is {schema}, this version reads {SCHEMA}")
                return [_from_entry(entry) for entry in models if _is_entry(entry)]
            except FileNotFoundError:
                continue
            except (OSError, ValueError, LookupError, TypeError) as error:
                logger.error("cannot read %s (%s); nothing restored from it", file, error)
                if is_trial:
                    continue
                with contextlib.suppress(OSError):  # the next change would write over it
                    file.replace(file.with_suffix(".damaged.json"))
        return []

    # -- changes -------------------------------------------------------------------------------

    async def register(
        self,
        location: str,
        name: str | None = None,
        workers: int | None = None,
        options: Options | None = None,
        synchronous: bool = True,
    ) -> ModelVersion:
        """Check an archive of the model store or a URL, unpack it, start its workers, serve it.

        Args:
            location: its file name, or where to fetch it from.
            name: to register it under; None takes the manifest's.
            workers: how many; None takes the settings', else the archive's, else by cores.
            synchronous: False serves it while its workers are loading.

        Raises:
            ArchiveError, ServeError: nothing was changed.
        """
        spec = ModelSpec(location, name, workers, options=options or Options())
        return await self._locate_and_register(spec, None, waits=synchronous, saves=True)

    async def _locate_and_register(
        self, spec: ModelSpec, allocator: StartupAllocator | None, waits: bool, saves: bool = False
    ) -> ModelVersion:
        """Fetch what must be fetched; the store is as before when that or the rest fails."""
        store = self._settings.model_store
        if self._dialect is None:
            file = find_archive(store, spec.location)
        elif is_url(spec.location):
            refuse_relative(spec.location)
            rules = UrlRules(self._dialect.allowed_urls)
            file = await _in_daemon(partial(fetch_archive, spec.location, store, rules))
            spec = replace(spec, url=spec.location)
            try:
                return await self._register(file, spec, allocator, waits, saves)
            except BaseException:
                file.unlink(missing_ok=True)
                raise
        else:
            file = find_as_torchserve(store, spec.location)
        return await self._register(file, spec, allocator, waits, saves)

    async def _register(
        self,
        file: Path,
        spec: ModelSpec,
        allocator: StartupAllocator | None,
        waits: bool,
        saves: bool,
    ) -> ModelVersion:
        """Register a file of the store, at a start beside the others of that start."""
        archive = await asyncio.to_thread(open_archive, file, needs_manifest=self._dialect is None)
        with archive:
            self._check_signature(archive)
            name = self._choose_name(archive, spec)
            config = load_model_config(archive, self._settings, spec.options, name, spec.at_start)
            if self._dialect is not None:
                workers, most = self._count_workers(spec, config)
                threads = config.threads or 1
            else:
                request = self._request(spec, config, name)
                allocation = (
                    await allocator.allocate(request) if allocator else self._beside(name, request)
                )
                workers, threads = allocation.workers, allocation.threads
                most = workers
            config = replace(config, threads=threads)
            async with self._counted(name, workers * threads), self._locks[name]:
                self._registry.refuse_duplicate(name, archive.manifest.model_version)
                async with self._unpacked(archive, name) as folder:
                    interpreter = await self._interpreter(archive, folder, name)
                    model = self._build(archive, name, spec, config, folder, interpreter)
                    self._unlisted.add(model.pool)
                    try:
                        await model.pool.scale(workers, 0, most=most, wait=waits)
                        with self._registry.change():
                            self._registry.add(model)
                            if saves:
                                self._save()
                    except BaseException as error:
                        await model.pool.stop(0)
                        model.metrics.remove()
                        if isinstance(error, LoadFailed):
                            error.model = name, model.version
                        raise
                    finally:
                        self._unlisted.discard(model.pool)
        logger.info("%s registered, archive %s", model.pool.plan.label, model.digest)
        return model

    def _choose_name(self, archive: Archive, spec: ModelSpec) -> str:
        name = spec.name or archive.manifest.model_name
        if self._dialect is None:
            name = name or archive.path.stem
            check_name(name)
        elif name is None:
            if not spec.at_start:
                raise ArchiveError("Model name is not defined.")
            name = name_of_file(archive.path.name)
        if self._dialect is not None:
            check_torchserves_name(name)
        check_version(archive.manifest.model_version)
        return name

    def _request(self, spec: ModelSpec, config: ModelConfig, name: str) -> ResourceRequest:
        """Return what is said of a version: by the caller, the settings, the archive."""
        workers, said_by = spec.workers, "asked for at its registration"
        if workers is None and "minWorkers" in self._settings.model_settings.get(name, {}):
            workers, said_by = config.workers or None, config.origins["minWorkers"]
        elif workers is None and self._settings.workers:
            workers, said_by = self._settings.workers, "the setting workers"
        elif workers is None and config.workers:
            workers, said_by = config.workers, config.origins["minWorkers"]
        return ResourceRequest(
            config.device,
            workers,
            said_by,
            config.threads,
            config.origins.get("workerThreads", ""),
        )

    def _beside(self, name: str, request: ResourceRequest) -> Allocation:
        """Return the allocation of a model that is registered while others are served.

        Versions of one model do not count against each other: a new one that got only what the old
        one leaves would be too small on the day that it takes over.
        """
        taken = sum(count for other, count in self._loading.items() if other != name)
        taken += sum(
            model.pool.least * model.pool.plan.threads
            for model in self._registry
            if model.name != name
        )
        (allocation,) = choose(self._machine, [request], taken)
        if (warning := describe_excess(self._machine, [allocation], taken)) is not None:
            logger.warning("%s: %s", name, warning)
        return allocation

    @asynccontextmanager
    async def _counted(self, name: str, threads: int) -> AsyncIterator[None]:
        """Count a model's threads for others that are registered while it loads."""
        self._loading[name] += threads
        try:
            yield
        finally:
            self._loading[name] -= threads

    def _count_workers(self, spec: ModelSpec, config: ModelConfig) -> tuple[int, int]:
        """Return the least and the most workers of a version in TorchServe's dialect.

        What the caller says comes first, then the archive, then the server: over the register API
        none where nobody says anything.
        """
        assert self._dialect is not None
        if spec.workers is not None:
            return spec.workers, max(spec.workers, spec.most or 0)
        if config.workers:
            return config.workers, config.most_workers
        workers = self._dialect.default_workers_per_model
        if not workers and spec.at_start:
            (allocation,) = choose(self._machine, [ResourceRequest(config.device)])
            workers = allocation.workers
        return workers, workers

    async def scale(
        self, model: ModelVersion, least: int, most: int | None = None, synchronous: bool = True
    ) -> None:
        """Have at least `least` workers and at most `most`, by default exactly `least`.

        Args:
            synchronous: False returns as soon as the change is saved; workers come and go then, and
                one that cannot load is tried again.

        Raises:
            LoadFailed: a new worker could not load; nothing was changed.
        """
        async with self._locks[model.name]:
            self._registry.refuse_gone(model)
            pool = model.pool
            before = pool.least, pool.most
            drain_s = self._settings.drain_timeout_s
            try:
                await pool.scale(least, drain_s, most=most, wait=synchronous)
                if least == 0 and model.explainers is not None:
                    await model.explainers.scale(0, drain_s, wait=synchronous)
                self._save()
            except BaseException:
                pool.least, pool.most = before
                raise

    async def unregister(self, model: ModelVersion) -> None:
        """Answer what was accepted, end the workers, remove the unpacked files.

        Raises:
            CleanupTimedOut: its workers have not ended in time; it is not served any more.
        """
        async with self._locks[model.name]:
            with self._registry.change():
                self._registry.remove(model)
                self._save()
            if model.is_downloaded and not any(m.file == model.file for m in self._registry):
                (self._settings.model_store / model.file).unlink(missing_ok=True)
            limit_s = self._dialect.unregister_model_timeout if self._dialect else None
            try:
                async with asyncio.timeout(limit_s):
                    await self._end(model, self._settings.drain_timeout_s)
            except TimeoutError as error:
                raise CleanupTimedOut(model.name) from error
        logger.info("%s unregistered", model.pool.plan.label)

    def set_default(self, name: str, version: str) -> None:
        """Make a version the one that answers when a request names none."""
        with self._registry.change():
            self._registry.set_default(name, version)
            self._save()

    async def stop(self, drain_timeout_s: float) -> None:
        """End all workers; what is registered stays remembered."""
        if self._snapshots is not None:
            self._snapshots.write("shutdown", self._registry)
        await asyncio.gather(
            *(pool.stop(drain_timeout_s) for pool in self._unlisted),
            *(self._end(model, drain_timeout_s) for model in self._registry),
        )

    async def _end(self, model: ModelVersion, drain_timeout_s: float) -> None:
        pools = [pool for pool in (model.pool, model.explainers) if pool is not None]
        self._unlisted.update(pools)
        try:
            await asyncio.gather(*(pool.stop(drain_timeout_s) for pool in pools))
        finally:
            self._unlisted.difference_update(pools)
        model.metrics.remove()
        await asyncio.to_thread(shutil.rmtree, model.folder, ignore_errors=True)

    def _check_signature(self, archive: Archive) -> None:
        """Refuse an archive that no trusted key signed, where the settings ask for that.

        The file of keys is read each time, so a key can be added or taken out while serving.
        """
        keys = self._settings.trusted_keys
        if self._settings.require_signature and keys is not None:
            signer = check_signature(archive, read_trusted_keys(keys))
            logger.info("%s is signed by the trusted key %s", archive.path.name, signer[:12])

    async def _interpreter(self, archive: Archive, folder: Path, name: str) -> str:
        """Return the Python of the workers; it has what the archive requires."""
        environments = self._state.root / "environments"
        try:
            return await asyncio.to_thread(
                interpreter_for, archive, folder, environments, self._settings.install_requirements
            )
        except RequirementsFailed as error:
            if self._dialect is None:
                raise
            text = f"Custom pip package installation failed for model {name}"
            raise RequirementsFailed(text) from error

    def _build(
        self,
        archive: Archive,
        name: str,
        spec: ModelSpec,
        config: ModelConfig,
        folder: Path,
        interpreter: str,
    ) -> ModelVersion:
        """Connect the objects of one model version; nothing is started yet."""
        manifest, file = archive.manifest, archive.path.name
        handler = spec.options.handler or manifest.handler
        if self._dialect is not None:
            handler = handler or self._dialect.default_service_handler
        if not handler:
            raise BadRequest(f"{file}: the manifest names no handler")
        seal = manifest.modelyard
        label = f"{name} {manifest.model_version}"
        log_dir = self._state.log_file.parent / f"{file_stem(name)}-{manifest.model_version}"
        log_dir.mkdir(mode=0o700, exist_ok=True)
        has_manifest = MANIFEST_NAME in archive.names
        raw_manifest = json.loads(archive.read(MANIFEST_NAME)) if has_manifest else None
        plan = Plan(
            label=label,
            load={
                "name": name,
                "folder": str(folder),
                "manifest": raw_manifest,
                "handler": handler,
                "config_file": manifest.config_file,
                "device": config.device,
                "device_ids": list(config.device_ids),
                "batch_size": config.batch_size,
                "by_length": config.by_length,
                "poll_us": self._settings.worker_poll_us if not self._machine.has_quota else 0,
                "golden": [asdict(golden) for golden in seal.golden] if seal else [],
                **self._dialect_keys(),
            },
            log_dir=log_dir,
            threads=config.threads,
            batch_size=config.batch_size,
            startup_timeout_s=config.startup_timeout_s,
            response_timeout_s=config.response_timeout_s,
            retry=config.retry,
            max_reply_bytes=MAX_REPLY_BYTES,
            interpreter=interpreter,
            hidden_variables=self._dialect.blacklist_env_vars if self._dialect else None,
            variables=_torchserve_variables(self._dialect) if self._dialect else {},
            retry_window_s=config.retry_s if self._dialect else math.inf,
        )
        metrics = VersionMetrics(self._metrics, name, manifest.model_version)
        pool = Pool(plan, metrics)
        metrics.watch_workers(lambda: pool.ready_count)
        explainers = None
        if config.explain_workers:
            apart = replace(plan, log_stem="explainer", niceness=EXPLAINERS_NICENESS)
            explainers = Pool(apart, metrics)
        predictions, explanations = (
            Batcher(
                explainers if explainers and kind == EXPLAIN else pool,
                kind,
                metrics.kinds[kind],
                batch_size=config.batch_size,
                delay_s=config.batch_delay_ms / 1000,
                queue_size=config.queue_size,
                needs_ticket=config.needs_ticket,
                call_bytes=config.call_bytes,
            )
            for kind in (PREDICT, EXPLAIN)
        )
        if explainers is None:
            pool.feed((predictions, explanations))
        else:
            pool.feed((predictions,))
            explainers.feed((explanations,))
        return ModelVersion(
            name=name,
            version=manifest.model_version,
            file=file,
            url=spec.url or file,
            digest=archive.digest,
            manifest=raw_manifest,
            runtime=spec.options.runtime or manifest.runtime,
            options=spec.options,
            config=config,
            folder=folder,
            pool=pool,
            explainers=explainers,
            batchers=(predictions, explanations),
            metrics=metrics,
            at_start=spec.at_start,
            is_downloaded=spec.url is not None,
        )

    def _dialect_keys(self) -> dict[str, Any]:
        """Return what a worker is told of TorchServe's dialect."""
        dialect, metrics = self._dialect, self._metrics.torchserve
        if dialect is None:
            return {"dialect": "modelyard"}
        return {
            "dialect": "torchserve",
            "envelope": dialect.service_envelope,
            "decode_input": dialect.decode_input_request,
            "limit_max_image_pixels": dialect.limit_max_image_pixels,
            "max_response_bytes": dialect.max_response_size,
            "metrics": {"declared": metrics.model_metrics if metrics else None},
        }

    @asynccontextmanager
    async def _unpacked(self, archive: Archive, name: str) -> AsyncIterator[Path]:
        """Unpack into a fresh folder, which goes again when the block fails."""
        folder = self._state.unpacked / f"{file_stem(name)}-{secrets.token_hex(4)}"
        try:
            await asyncio.to_thread(archive.unpack, folder)
            yield folder
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise

    def _save(self, event: str = "snapshot") -> None:
        """Write what is registered; a change is acknowledged only after this."""
        if self._snapshots is not None:
            self._snapshots.write(event, self._registry)
            return
        models = [
            {
                "name": model.name,
                "version": model.version,
                "file": model.file,
                "digest": model.digest,
                "workers": model.pool.least,
                "default": self._registry.is_default(model),
            }
            for model in self._registry
        ]
        file, previous = self._state.models_file, self._state.previous_models_file
        try:
            with contextlib.suppress(OSError):
                previous.unlink(missing_ok=True)
                os.link(file, previous)
            write_json(file, {"schema": SCHEMA, "models": models})
        except OSError as error:
            raise ServeError(f"the change could not be saved: {error.strerror}") from error


async def _in_daemon(fetch: Callable[[], Path]) -> Path:
    """Run in a thread that a server which is being stopped does not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Path] = loop.create_future()

    def settle(path: Path | None, error: BaseException | None) -> None:
        if done.cancelled():
            discard(path)
        elif error is not None:
            done.set_exception(error)
        else:
            assert path is not None
            done.set_result(path)

    def discard(path: Path | None) -> None:
        if path is not None:
            path.unlink(missing_ok=True)

    def run() -> None:
        path: Path | None = None
        error: BaseException | None = None
        try:
            path = fetch()
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(settle, path, error)
        except RuntimeError:  # the loop has ended
            discard(path)

    threading.Thread(target=run, daemon=True, name="fetch").start()
    return await done


def _from_entry(entry: dict[str, Any]) -> ModelSpec:
    """Return what a line of the saved state asks for."""
    return ModelSpec(
        entry["file"],
        entry.get("name"),
        entry.get("workers"),
        is_default=bool(entry.get("default")),
    )


def _from_snapshot(store: Path, name: str, version: str, entry: dict[str, Any]) -> ModelSpec:
    """Return what a snapshot asks for; it comes before the archive's own configuration.

    Raises:
        StartError: the store does not hold the archive.
    """
    try:
        file = find_as_torchserve(store, entry["marName"])
    except FileNotInStore as error:
        raise StartError(
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


def _is_entry(entry: Any) -> bool:
    """Return whether a line of the saved state can be restored."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("file"), str)
        and isinstance(entry.get("name"), str | None)
        and isinstance(entry.get("workers"), int | None)
    )


def _torchserve_variables(own: TorchServeSettings) -> dict[str, str]:
    """Return what TorchServe adds to the environment of its workers."""
    return {
        "TS_DECODE_INPUT_REQUEST": str(own.decode_input_request).lower(),
        "TS_IPEX_ENABLE": "false",
        "TS_IPEX_GPU_ENABLE": "false",
        "TS_REQUEST_SEQUENCE_ID": own.ts_header_key_sequence_id,
        "TS_REQUEST_SEQUENCE_START": own.ts_header_key_sequence_start,
        "TS_REQUEST_SEQUENCE_END": own.ts_header_key_sequence_end,
    }
