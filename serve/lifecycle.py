"""Register, scale and remove model versions; remember what was acknowledged."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from archiver import Archive, open_archive
from archiver.manifest import MANIFEST_NAME, check_name, check_version
from archiver.signature import check_signature, read_trusted_keys
from serve.batcher import EXPLAIN, PREDICT, Batcher
from serve.environment import interpreter_for
from serve.errors import BadRequest, ServeError
from serve.metrics import Metrics, VersionMetrics
from serve.model_config import (
    ModelConfig,
    default_workers,
    load_model_config,
    threads_per_worker,
)
from serve.pool import Plan, Pool
from serve.registry import ModelVersion, Registry
from serve.settings import Settings
from serve.state import StateDir, write_json
from serve.store import find_archive, list_archives, parse_model_option
from serve.torchserve.settings import TorchServeSettings

logger = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1 << 30
"""Largest answer accepted from a worker."""
SCHEMA = 1

Report = Callable[[str, str], None]
"""Called with a model's name and what happens to it, for progress."""


class Lifecycle:
    """Changes to what is served. Each change of one model waits for the one before it."""

    def __init__(self, settings: Settings, registry: Registry, metrics: Metrics) -> None:
        self._settings = settings
        self._registry = registry
        self._metrics = metrics
        self._state = StateDir(settings.state_dir)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def start(self, report: Report) -> None:
        """Register what the settings name, or what was served last when they name nothing.

        Raises:
            ServeError, ArchiveError: the first model that cannot be served.
        """
        entries = self._asked_for() if self._settings.models else self._last_served()
        for entry in entries:
            file, name = entry["file"], entry.get("name")
            report(name or file, "loading")
            model = await self._register(file, name, entry.get("workers"), len(entries))
            if entry.get("default"):
                self._registry.set_default(model.name, model.version)
            report(model.name, f"version {model.version}, {len(model.pool.seats)} workers ready")
        self._save()

    def _asked_for(self) -> list[dict[str, Any]]:
        options: Sequence[str] = self._settings.models
        if [option.upper() for option in options] == ["ALL"]:
            options = list_archives(self._settings.model_store)
        pairs = [parse_model_option(option) for option in options]
        return [{"name": name, "file": file} for name, file in pairs]

    def _last_served(self) -> list[dict[str, Any]]:
        try:
            content = json.loads(self._state.models_file.read_text(encoding="utf-8"))
            return [entry for entry in content["models"] if _is_entry(entry)]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.error("cannot read %s (%s); nothing restored", self._state.models_file, error)
            return []

    async def register(
        self, location: str, name: str | None = None, workers: int | None = None
    ) -> ModelVersion:
        """Check an archive of the model store, unpack it, start its workers, and serve it.

        Args:
            location: its file name.
            name: to register it under; None takes the manifest's.
            workers: how many; None takes the settings', else the archive's, else by cores.

        Raises:
            ArchiveError, ServeError: nothing was changed.
        """
        model = await self._register(location, name, workers, len(self._registry) + 1)
        self._save()
        return model

    async def _register(
        self, location: str, name: str | None, workers: int | None, models: int
    ) -> ModelVersion:
        """Register without remembering it; `models` is how many share the cores."""
        file = find_archive(self._settings.model_store, location)
        archive = await asyncio.to_thread(open_archive, file)
        with archive:
            self._check_signature(archive)
            chosen = name or archive.manifest.model_name or file.stem
            check_name(chosen)
            check_version(archive.manifest.model_version)
            config = load_model_config(archive, self._settings)
            if workers is None:
                workers = self._settings.workers or config.workers
                workers = workers or default_workers(config.device, models)
            async with self._locks[chosen]:
                self._registry.refuse_duplicate(chosen, archive.manifest.model_version)
                async with self._unpacked(archive, chosen) as folder:
                    interpreter = await asyncio.to_thread(
                        interpreter_for,
                        archive,
                        folder,
                        self._state.root / "environments",
                        self._settings.install_requirements,
                    )
                    model = self._build(archive, chosen, file.name, config, folder, interpreter)
                    try:
                        await model.pool.scale(workers, 0)
                    except BaseException:
                        await model.pool.stop(0)
                        model.metrics.remove()
                        raise
                    self._registry.add(model)
        logger.info("%s registered, archive %s", model.pool.plan.label, model.digest)
        return model

    async def scale(self, model: ModelVersion, workers: int) -> None:
        """Have this many workers, ready or ended, before it returns."""
        async with self._locks[model.name]:
            await model.pool.scale(workers, self._settings.drain_timeout_s)
            self._save()

    async def unregister(self, model: ModelVersion) -> None:
        """Answer what was accepted, end the workers, remove the unpacked files."""
        async with self._locks[model.name]:
            self._registry.remove(model)
            self._save()
            await self._end(model, self._settings.drain_timeout_s)
        logger.info("%s unregistered", model.pool.plan.label)

    def set_default(self, name: str, version: str) -> None:
        """Make a version the one that answers when a request names none."""
        self._registry.set_default(name, version)
        self._save()

    async def stop(self, drain_timeout_s: float) -> None:
        """End all workers; what is registered stays remembered."""
        await asyncio.gather(*(self._end(model, drain_timeout_s) for model in self._registry))

    async def _end(self, model: ModelVersion, drain_timeout_s: float) -> None:
        await model.pool.stop(drain_timeout_s)
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

    def _build(
        self,
        archive: Archive,
        name: str,
        file: str,
        config: ModelConfig,
        folder: Path,
        interpreter: str,
    ) -> ModelVersion:
        """Connect the objects of one model version; nothing is started yet."""
        manifest = archive.manifest
        if not manifest.handler:
            raise BadRequest(f"{file}: the manifest names no handler")
        seal = manifest.modelyard
        label = f"{name} {manifest.model_version}"
        log_dir = self._state.log_file.parent / f"{name}-{manifest.model_version}"
        log_dir.mkdir(mode=0o700, exist_ok=True)
        raw_manifest = json.loads(archive.read(MANIFEST_NAME))
        own = self._settings.torchserve
        plan = Plan(
            label=label,
            load={
                "name": name,
                "folder": str(folder),
                "manifest": raw_manifest,
                "handler": manifest.handler,
                "config_file": manifest.config_file,
                "device": config.device,
                "batch_size": config.batch_size,
                "golden": [asdict(golden) for golden in seal.golden] if seal else [],
                **self._dialect(),
            },
            log_dir=log_dir,
            threads=threads_per_worker(),
            batch_size=config.batch_size,
            startup_timeout_s=config.startup_timeout_s,
            response_timeout_s=config.response_timeout_s,
            retry=config.retry,
            max_reply_bytes=MAX_REPLY_BYTES,
            interpreter=interpreter,
            hidden_variables=own.blacklist_env_vars if own else None,
            variables=_torchserve_variables(own) if own else {},
        )
        metrics = VersionMetrics(self._metrics, name, manifest.model_version)
        pool = Pool(plan, metrics)
        predictions, explanations = (
            Batcher(
                pool,
                kind,
                metrics.kinds[kind],
                batch_size=config.batch_size,
                delay_s=config.batch_delay_ms / 1000,
                queue_size=config.queue_size,
            )
            for kind in (PREDICT, EXPLAIN)
        )
        pool.feed((predictions, explanations))
        return ModelVersion(
            name=name,
            version=manifest.model_version,
            file=file,
            digest=archive.digest,
            manifest=raw_manifest,
            config=config,
            folder=folder,
            pool=pool,
            batchers=(predictions, explanations),
            metrics=metrics,
        )

    def _dialect(self) -> dict[str, Any]:
        """Return what LOAD says of TorchServe's dialect."""
        own, metrics = self._settings.torchserve, self._metrics.torchserve
        if own is None or metrics is None:
            return {"dialect": "modelyard"}
        return {
            "dialect": "torchserve",
            "envelope": own.service_envelope,
            "decode_input": own.decode_input_request,
            "limit_max_image_pixels": own.limit_max_image_pixels,
            "max_response_bytes": own.max_response_size,
            "metrics": {
                "mode": own.metrics_mode,
                "declared": metrics.model_metrics,
                "auto_detect": own.model_metrics_auto_detect,
            },
        }

    @asynccontextmanager
    async def _unpacked(self, archive: Archive, name: str) -> AsyncIterator[Path]:
        """Unpack into a fresh folder, which goes again when the block fails."""
        folder = self._state.unpacked / f"{name}-{secrets.token_hex(4)}"
        try:
            await asyncio.to_thread(archive.unpack, folder)
            yield folder
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise

    def _save(self) -> None:
        """Write what is registered; a change is acknowledged only after this."""
        models = [
            {
                "name": model.name,
                "version": model.version,
                "file": model.file,
                "digest": model.digest,
                "workers": len(model.pool.seats),
                "default": self._registry.is_default(model),
            }
            for model in self._registry
        ]
        try:
            write_json(self._state.models_file, {"schema": SCHEMA, "models": models})
        except OSError as error:
            raise ServeError(f"the change could not be saved: {error.strerror}") from error


def _is_entry(entry: Any) -> bool:
    """Tell whether a line of the saved state can be restored."""
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
    }
