"""An archive → a model version: its folder, pools, queues and what its workers start with."""

import asyncio
import json
import logging
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from modelyard.archiver import Archive
from modelyard.archiver.errors import NotProven, RefusedArchive
from modelyard.archiver.proven import Unproven, find_unproven
from modelyard.archiver.signing import find_signer, read_trusted_keys
from modelyard.archiver.untrusted.names import MANIFEST_NAME, check_version
from modelyard.serve.control.model_config import ModelConfig, ModelSpec
from modelyard.serve.control.preload import OUR_HANDLERS, choose_preload
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.control.sandbox import Sandbox, own_variables
from modelyard.serve.control.sizing import is_on_gpu, this_machine
from modelyard.serve.control.store import file_stem
from modelyard.serve.control.urls import is_url, split_digest
from modelyard.serve.dataplane.batcher import Batcher
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.cache import AnswerStore, VersionAnswers
from modelyard.serve.dataplane.call import EXPLAIN, PREDICT
from modelyard.serve.dataplane.metrics import Metrics, VersionMetrics
from modelyard.serve.dataplane.pool import Pool
from modelyard.serve.dataplane.worker import WorkerPlan
from modelyard.serve.errors import BadModelConfig, BadRequest, StartError
from modelyard.serve.policy import Policy

logger = logging.getLogger(__name__)

STEPS = "generate"
"""The built-in handler whose loop has a process to itself."""
EXPLAINERS_NICENESS = 10
"""An explanation takes seconds of a core; predictions on the same core go first."""


@dataclass(frozen=True)
class Admitted:
    """An open archive that may be served."""

    archive: Archive
    spec: ModelSpec
    """What the caller said."""
    name: str
    """Name to serve it under."""
    config: ModelConfig
    """How it is run."""
    unproven: Unproven | None
    """Why nobody has proven what runs here."""
    is_fetched: bool
    """Whether its file came from elsewhere."""


def admit(archive: Archive, spec: ModelSpec, policy: Policy, is_fetched: bool = False) -> Admitted:
    """Return an archive as it may be served.

    Raises:
        ArchiveError: its signature or its version is missing, wrong, or not one that is trusted;
            or it was not proven on the versions that are here, and only what was is served.
        ServeError: its name or configuration is wrong.
        StartError: it is to be restored, and has changed.
    """
    settings = policy.settings
    if is_url(spec.location) and split_digest(spec.location)[1] not in (None, archive.digest):
        raise RefusedArchive(f"{archive.path} has the digest {archive.digest}; remove that file")
    if spec.digest not in (None, archive.digest):
        changed = (
            f"{archive.path.name} is not the archive that was served last: its digest is "
            f"{archive.digest}, models.json has {spec.digest}"
        )
        if not settings.accept_changed:
            raise StartError(
                f"{changed}; put that one back, accept what has changed with --accept-changed, or "
                "name what to serve with --models"
            )
        logger.warning("%s; accepted, as the setting accept_changed says", changed)
    if settings.require_signature and settings.trusted_keys is not None:
        # Read each time, so a key can be added or taken out while serving.
        signer = find_signer(archive, read_trusted_keys(settings.trusted_keys))
        logger.info("%s is signed by the trusted key %s", archive.path.name, signer)
    name = policy.choose_name(archive, spec)
    check_version(archive.manifest.model_version)
    config = policy.configure(archive, spec, name)
    unproven = find_unproven(archive.manifest, archive.read, config.artifact)
    if unproven and settings.require_proven:
        advice = "install that version, or export and archive it again here"
        if unproven.reason != "versions":
            advice = "archive what `modelyard export` wrote, with its report beside it"
        raise NotProven(
            f"{archive.path.name}: {unproven.text}; this server serves only what was proven on its "
            f"own versions (require_proven): {advice}"
        )
    return Admitted(archive, spec, name, config, unproven, is_fetched)


class Builder:
    """Builds the model versions of one server."""

    def __init__(
        self, policy: Policy, metrics: Metrics, budget: AnswerBudget | None = None
    ) -> None:
        self._policy = policy
        self._budget = budget
        self._metrics = metrics
        self._answers = AnswerStore(policy.settings.answer_cache_bytes)
        self.sandbox = Sandbox(policy.settings)

    @asynccontextmanager
    async def build(
        self, admitted: Admitted, metrics: VersionMetrics | None = None
    ) -> AsyncIterator[ModelVersion]:
        """Unpack an archive and connect what runs it; nothing is started yet.

        When the block fails its folder goes again.

        Args:
            admitted: the archive.
            metrics: metrics of the version in whose place this one comes; `expose` then connects
                them.

        Raises:
            ArchiveError, BadRequest: it cannot be served.
        """
        archive, name = admitted.archive, admitted.name
        folder = self._policy.state.unpacked / f"{file_stem(name)}-{secrets.token_hex(4)}"
        try:
            await asyncio.to_thread(archive.unpack, folder)
            python = await asyncio.to_thread(self._policy.interpreter, archive, folder, name)
            plan = await asyncio.to_thread(self._plan, admitted, folder, python)
            yield self._connect(admitted, plan, metrics)
        except BaseException:
            await asyncio.to_thread(self.sandbox.forget, folder)
            raise

    def _connect(
        self, admitted: Admitted, plan: WorkerPlan, before: VersionMetrics | None
    ) -> ModelVersion:
        spec, config, name = admitted.spec, admitted.config, admitted.name
        manifest, file = admitted.archive.manifest, admitted.archive.path.name
        if is_url(spec.location) and not admitted.is_fetched:
            file = spec.shown  # by which the next start finds it in the cache
        handler = plan.load["handler"]
        predicting = plan
        if config.explain_workers:
            predicting = replace(plan, load={**plan.load, "only_predicts": True})
        metrics = before or VersionMetrics(self._metrics, name, manifest.model_version)
        pool = Pool(predicting, metrics, self._policy.workers, self._budget)
        explainers = None
        if config.explain_workers:
            preload = plan.preload.whole if plan.preload else None
            apart = replace(
                plan, log_stem="explainer", niceness=EXPLAINERS_NICENESS, preload=preload
            )
            explainers = Pool(apart, metrics, self._policy.workers, self._budget)
        predictions, explanations = (
            Batcher(
                explainers if explainers and kind == EXPLAIN else pool,
                kind,
                metrics.kinds[kind],
                config,
                call_bytes=config.call_bytes,
                shares=self._policy.settings.priority_shares,
            )
            for kind in (PREDICT, EXPLAIN)
        )
        is_ours = manifest.modelyard is not None and handler in OUR_HANDLERS
        answers = None
        if config.keeps_answers:
            if handler == STEPS:
                raise BadModelConfig(
                    f"model_settings: cacheAnswers: the handler {STEPS} of {file} draws what it "
                    "answers; expected a model that answers the same request with the same"
                )
            ignored = [name.encode() for name in config.ignored_headers]
            answers = VersionAnswers(self._answers, is_ours, ignored)
        if explainers is None:
            pool.feed((predictions, explanations))
        else:
            pool.feed((predictions,))
            explainers.feed((explanations,))
        model = ModelVersion(
            name=name,
            version=manifest.model_version,
            file=file,
            url=spec.shown if admitted.is_fetched else file,
            digest=admitted.archive.digest,
            manifest=plan.load["manifest"],
            runtime=spec.options.runtime or manifest.runtime,
            options=spec.options,
            config=config,
            folder=Path(plan.load["folder"]),
            pool=pool,
            explainers=explainers,
            batchers=(predictions, explanations),
            metrics=metrics,
            takes_our_options=is_ours,
            answers=answers,
            at_start=spec.at_start,
            is_saved=spec.is_saved,
            is_downloaded=admitted.is_fetched,
            unproven=admitted.unproven,
        )
        if before is None:
            artifact = manifest.serialized_file or ""
            metrics.describe(model.digest, artifact.rpartition(".")[2], config.capacity_rps)
            if model.unproven:
                metrics.doubt(model.unproven.reason)
            expose(model)
        return model

    def _plan(self, admitted: Admitted, folder: Path, interpreter: str) -> WorkerPlan:
        """Return what the workers are started with."""
        archive, spec, config = admitted.archive, admitted.spec, admitted.config
        manifest, name, policy = archive.manifest, admitted.name, self._policy
        handler = spec.options.handler or manifest.handler or policy.default_handler
        if not handler:
            raise BadRequest(f"{archive.path.name}: the manifest names no handler")
        version, seal = manifest.model_version, manifest.modelyard
        log_dir = policy.state.log_file.parent / f"{file_stem(name)}-{version}"
        log_dir.mkdir(mode=0o700, exist_ok=True)
        machine, is_own = this_machine(), interpreter == sys.executable
        is_forked, preload = is_own and not is_on_gpu(machine, config.device), None
        if is_forked:
            preload = choose_preload(manifest, archive.files, archive.read, handler)
            if preload and not config.explain_workers:
                preload = preload.whole
        has_manifest = MANIFEST_NAME in archive.names
        environment = policy.environment(config.threads)
        walls = self.sandbox.plan(folder, config.network, config.files, may_write=seal is None)
        if walls is not None and not walls.has_files:
            environment |= own_variables(folder)
            if not is_own:
                walls = replace(walls, reads=(*walls.reads, str(Path(interpreter).parents[1])))
        return WorkerPlan(
            label=f"{name} {version}",
            load={
                "name": name,
                "folder": str(folder),
                "manifest": json.loads(archive.read(MANIFEST_NAME)) if has_manifest else None,
                "handler": handler,
                "config_file": manifest.config_file,
                "device": config.device,
                "device_ids": list(config.device_ids),
                "batch_size": config.batch_size,
                "by_length": config.by_length,
                "artifact": config.artifact,
                "poll_us": 0 if machine.has_quota else policy.settings.worker_poll_us,
                "nvtx": policy.settings.nvtx,
                "max_response_bytes": policy.max_answer_bytes,
                "golden": [asdict(golden) for golden in seal.golden] if seal else [],
                "walls": asdict(walls) if walls else None,
                "interpreter": None if is_own else interpreter,
                **policy.worker_keys,
            },
            log_dir=log_dir,
            run=config,
            max_answer_bytes=policy.max_answer_bytes,
            environment=environment,
            niceness=spec.niceness,
            fork_server=policy.fork_server if is_forked else None,
            preload=preload,
        )


def expose(model: ModelVersion) -> None:
    """Have a version's workers and its requests counted at each scrape."""
    pool = model.pool
    model.metrics.watch_workers(lambda: pool.ready_count, lambda: pool.busy_s)
    if model.answers is not None:
        model.metrics.watch_cache(model.answers)
    predictions, explanations = model.batchers
    _watch(model.metrics, predictions, pool, PREDICT)
    _watch(model.metrics, explanations, model.explainers or pool, EXPLAIN)


def _watch(metrics: VersionMetrics, batcher: Batcher, pool: Pool, kind: int) -> None:
    watch = metrics.kinds[kind].watch
    watch("requests_in_flight", lambda: batcher.queued + pool.in_flight(kind))
    watch("queue_oldest_seconds", lambda: batcher.oldest_s)
