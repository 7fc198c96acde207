"""Register, scale and remove model versions: at the start of a server, and while it runs."""

import asyncio
import contextlib
import gc
import itertools
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from modelyard.archiver import Archive, ArchiveError, open_archive
from modelyard.serve import errors
from modelyard.serve.control import sizing
from modelyard.serve.control.build import Admitted, Builder, admit, expose
from modelyard.serve.control.demand import Demand
from modelyard.serve.control.model_config import ModelSpec, Options
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.dataplane.pool import Pool
from modelyard.serve.errors import ServeError, is_disk_full
from modelyard.serve.policy import Policy

GARBAGE_S = 1.0
"""Time after which what a version leaves behind is collected: 2 ms where few models are served."""
logger = logging.getLogger(__name__)


class Lifecycle:
    """Changes to what is served. Each change of one model waits for the one before it."""

    def __init__(
        self,
        policy: Policy,
        registry: Registry,
        metrics: Metrics,
        budget: AnswerBudget | None = None,
    ) -> None:
        self.policy = policy
        self.registry = registry
        self._settings = policy.settings
        self._builder = Builder(policy, metrics, budget)
        self._demand: Demand | None = None
        """Loads models at their first request, where the settings want that."""
        if policy.settings.max_loaded_models:
            self._demand = Demand(registry, metrics, policy.settings)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._unlisted: set[Pool] = set()
        """Pools of versions that come or go: not in the registry, and to be stopped like it."""
        self._loading: Counter[str] = Counter()
        self._collecting: asyncio.TimerHandle | None = None
        self._numbers, self._newest = itertools.count(1), 0
        """Numbers of what is saved, and that of the newest that is written."""
        self._writing, self._saving = threading.Lock(), asyncio.Lock()
        self._next_save: asyncio.Task[None] | None = None
        """The next write, which takes what is registered when the one before it has ended."""
        self._ending: set[asyncio.Task[None]] = set()
        """Ends of versions whose place another has taken."""

    async def register(
        self,
        location: str,
        name: str | None = None,
        workers: int | None = None,
        options: Options | None = None,
        synchronous: bool = True,
    ) -> ModelVersion:
        """Check an archive that a location names, unpack it, start its workers, serve it.

        Args:
            name: to register it under; None takes the manifest's.
            workers: how many; None takes the settings', else the archive's, else by cores.
            synchronous: False serves it while its workers are loading.

        Raises:
            ArchiveError, ServeError: nothing was changed.
        """
        spec = ModelSpec(location, name, workers, options=options or Options())
        return await self.add(spec, None, waits=synchronous, saves=True)

    async def add(
        self,
        spec: ModelSpec,
        allocator: sizing.StartupAllocator | None,
        waits: bool,
        saves: bool = False,
        check: Callable[[Archive], None] | None = None,
    ) -> ModelVersion:
        """Serve a model version; the store and all else are as before when that fails.

        Args:
            allocator: allocator at a start, of all its models.
            waits: whether to wait for its workers to be ready.
            saves: whether the change is remembered.
            check: called with the archive before anything else; what it raises ends this.

        Raises:
            ArchiveError, ServeError.
        """
        is_fetched = False
        try:
            file, is_fetched = await self.policy.locate(spec.location)
            # What nobody trusted has signed is not written.
            unpacked = None if self._settings.require_signature else self.policy.state.unpacked
            archive = await asyncio.to_thread(
                open_archive, file, needs_manifest=self.policy.needs_manifest, staging=unpacked
            )
            with archive:
                if check is not None:
                    check(archive)
                admitted = await asyncio.to_thread(admit, archive, spec, self.policy, is_fetched)
                return await self._add(admitted, allocator, waits, saves)
        except BaseException as error:
            if isinstance(error, ArchiveError | ServeError):
                self.registry.tell("not registered", spec.name or spec.shown, "", str(error))
            if is_fetched:
                file.unlink(missing_ok=True)
            if is_disk_full(error) and not isinstance(error, errors.StorageFull):
                root = self.policy.state.root
                raise errors.StorageFull(f"{error}; the disk of {root} is full") from error
            raise

    async def _add(
        self,
        admitted: Admitted,
        allocator: sizing.StartupAllocator | None,
        waits: bool,
        saves: bool,
    ) -> ModelVersion:
        spec, config, name = admitted.spec, admitted.config, admitted.name
        version = admitted.archive.manifest.model_version
        if allocator and self.policy.is_strict:
            allocator.claim(name, version, spec.shown)
        share = allocator.allocate if allocator else partial(self._beside, name)
        size = await self.policy.size(spec, config, name, share)
        admitted = replace(admitted, config=replace(config, threads=size.threads))
        async with self._counted(name, size.total_threads), self._lock(name):
            self.registry.refuse_duplicate(name, version)
            async with self._builder.build(admitted) as model:
                if self._demand is not None:
                    self._demand.watch(model)
                try:
                    async with self._starting(model.pool):
                        if self._demand is None or config.is_pinned or (waits and not allocator):
                            async with self._place(model, size.workers):
                                await model.pool.scale(size.workers, 0, most=size.most, wait=waits)
                        else:
                            model.pool.least, model.pool.most = size.workers, size.workers
                        model.expect_explanations()
                        with self.registry.change(name):
                            self.registry.add(model)
                            if saves:
                                await self._save_soon()
                except BaseException as error:
                    model.metrics.remove()
                    if isinstance(error, errors.LoadFailed):
                        error.model = name, model.version
                    raise
        if config.explains_early:
            model.load_explainers()
        logger.info("%s registered, archive %s", model.pool.plan.label, model.digest)
        if model.warning:
            logger.warning("%s", model.warning)
        return model

    async def replace(self, model: ModelVersion, file: Path) -> ModelVersion:
        """Serve another archive as a version that is served; the old one answers what it has.

        What is remembered for the next start is still the archive of the store.

        Args:
            model: the version.
            file: an archive of the same name and version, outside of the store.

        Raises:
            ArchiveError, ServeError: the new one cannot be served; nothing was changed.
        """
        spec = ModelSpec(model.file, model.name, options=model.options)
        archive = await asyncio.to_thread(open_archive, file)
        with archive:
            admitted = await asyncio.to_thread(admit, archive, spec, self.policy)
            config = replace(admitted.config, threads=model.config.threads)
            async with self._lock(model.name):
                self.registry.refuse_gone(model)
                self.registry.refuse_held(model)
                admitted = replace(admitted, config=config, unproven=model.unproven)
                async with self._builder.build(admitted, model.metrics) as fresh:
                    fresh.file, fresh.url, fresh.digest = model.file, model.url, model.digest
                    if self._demand is not None:
                        self._demand.watch(fresh)
                    async with self._starting(fresh.pool):
                        async with self._place(fresh, model.pool.least):
                            await fresh.pool.scale(model.pool.least, 0, most=model.pool.most)
                        fresh.expect_explanations()
                        self.registry.swap(model, fresh)
        expose(fresh)
        if fresh.config.explains_early:
            fresh.load_explainers()
        self._unlisted.update(model.pools)
        task = asyncio.create_task(self._end(model, self._settings.drain_timeout_s, False))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return fresh

    async def _beside(self, name: str, request: sizing.ResourceRequest) -> sizing.Allocation:
        """Return the allocation of a model that is registered while others are served.

        Versions of one model do not count against each other: a new one that got only what the old
        one leaves would be too small on the day that it takes over.
        """
        taken = sum(count for other, count in self._loading.items() if other != name)
        taken += sum(
            model.pool.least * model.pool.plan.run.threads
            for model in self.registry
            if model.name != name and model.pool.slots
        )
        machine = sizing.machine_of(self._settings.servers)
        (allocation,) = sizing.choose(machine, [request], taken)
        if (warning := sizing.describe_excess(machine, [allocation], taken)) is not None:
            logger.warning("%s: %s", name, warning)
        return allocation

    @asynccontextmanager
    async def _starting(self, pool: Pool) -> AsyncIterator[None]:
        """Know of a pool that no list has yet; end it where the block fails."""
        self._unlisted.add(pool)
        try:
            yield
        except BaseException:
            await pool.stop(0)
            raise
        finally:
            self._unlisted.discard(pool)

    @asynccontextmanager
    async def _place(self, model: ModelVersion, workers: int) -> AsyncIterator[None]:
        """Have room for a model that gets workers, where not all are loaded at once.

        Raises:
            Unavailable: every other one has requests for all the time of a start, or stays.
        """
        if self._demand is None or not workers or model.pool.slots:
            yield
            return
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(model.config.startup_timeout_s):
                    await stack.enter_async_context(self._demand.place(model.pool))
            except TimeoutError as error:
                raise errors.Unavailable(
                    "every model that is loaded has requests, and stays"
                ) from error
            yield

    @asynccontextmanager
    async def _counted(self, name: str, threads: int) -> AsyncIterator[None]:
        """Count a model's threads for others that are registered while it loads."""
        self._loading[name] += threads
        try:
            yield
        finally:
            self._loading[name] -= threads
            self._loading += Counter()  # without those that are 0

    async def scale(
        self, model: ModelVersion, least: int, most: int | None = None, synchronous: bool = True
    ) -> None:
        """Have at least `least` workers and at most `most`, by default exactly `least`.

        Args:
            synchronous: False returns as soon as the change is saved; workers come and go then, and
                one that cannot load is tried again.

        Raises:
            LoadFailed: a new worker could not load; nothing was changed.
            Conflict: none are to answer, and the version is held.
        """
        async with self._lock(model.name):
            self.registry.refuse_gone(model)
            if least == 0:
                self.registry.refuse_held(model)
            pool = model.pool
            before = pool.least, pool.most
            drain_s = self._settings.drain_timeout_s
            try:
                async with self._place(model, least):
                    await pool.scale(least, drain_s, most=most, wait=synchronous)
                model.expect_explanations()
                if least == 0 and model.explainers is not None:
                    await model.explainers.scale(0, drain_s, wait=synchronous)
                await self._save_soon()
            except BaseException:
                pool.least, pool.most = before
                raise

    async def renew(self, model: ModelVersion, least: int, niceness: int) -> None:
        """Have workers of this niceness in the place of a version's, which answer what they hold.

        Raises:
            LoadFailed: a new worker could not load; nothing was changed.
        """
        async with self._lock(model.name):
            self.registry.refuse_gone(model)
            pool = model.pool
            await pool.renew(
                replace(pool.plan, niceness=niceness), least, self._settings.drain_timeout_s
            )

    async def unregister(self, model: ModelVersion, saves: bool = True) -> None:
        """Answer what was accepted, end the workers, remove the unpacked files.

        Args:
            saves: whether the change is remembered.

        Raises:
            CleanupTimedOut: its workers have not ended in time; it is not served any more.
        """
        async with self._lock(model.name):
            self._unlisted.update(model.pools)  # a stop meanwhile ends them too
            try:
                with self.registry.change(model.name):
                    self.registry.remove(model)
                    if saves:
                        await self._save_soon()
            except BaseException:
                self._unlisted.difference_update(model.pools)
                raise
            self.registry.announce(model, False)
            if model.is_downloaded and not any(m.file == model.file for m in self.registry):
                (self._settings.model_store / model.file).unlink(missing_ok=True)
            try:
                async with asyncio.timeout(self.policy.unregister_timeout_s):
                    await self._end(model, self._settings.drain_timeout_s)
            except TimeoutError as error:
                raise errors.CleanupTimedOut(
                    f"Timed out while cleaning resources: {model.name}"
                ) from error
        logger.info("%s unregistered", model.pool.plan.label)

    def set_default(self, name: str, version: str) -> None:
        """Make a version the one that answers when a request names none.

        Raises:
            Conflict: one of both is held.
        """
        for model in (self.registry.get(name), self.registry.get(name, version)):
            self.registry.refuse_held(model)
        with self.registry.change(name):
            self.registry.set_default(name, version)
            self.save()

    async def stop(self, drain_timeout_s: float) -> None:
        """End all workers; what is registered stays remembered."""
        self.policy.remember("shutdown", self.registry)()
        await asyncio.gather(
            *(pool.stop(drain_timeout_s) for pool in self._unlisted),
            *(self._end(model, drain_timeout_s, forgets_metrics=False) for model in self.registry),
        )
        if self.policy.fork_server is not None:
            await self.policy.fork_server.stop()

    async def _end(
        self, model: ModelVersion, drain_timeout_s: float, forgets_metrics: bool = True
    ) -> None:
        if model.answers is not None:
            model.answers.close()
        pools = model.pools
        self._unlisted.update(pools)
        try:
            await asyncio.gather(*(pool.stop(drain_timeout_s) for pool in pools))
        finally:
            self._unlisted.difference_update(pools)
        if forgets_metrics:
            model.metrics.remove()
        await asyncio.to_thread(self._builder.sandbox.forget, model.folder)
        # Once this has returned, which refers to it: its pools, batchers and workers are cycles,
        # and the server seldom looks for those (`GARBAGE`).
        if self._collecting is None:
            self._collecting = asyncio.get_running_loop().call_later(GARBAGE_S, self._collect)

    def _collect(self) -> None:
        self._collecting = None
        gc.collect()

    def _lock(self, name: str) -> asyncio.Lock:
        """Return the lock of a model, which whoever holds it or waits for it keeps."""
        return self._locks.setdefault(name, asyncio.Lock())

    def save(self) -> None:
        """Remember what is registered. Blocking.

        Raises:
            ServeError: it could not be written.
        """
        self._prepare_save()()

    def _prepare_save(self) -> Callable[[], None]:
        """Return what writes what is registered now, unless newer is written already. Blocking."""
        write, number = self.policy.remember("snapshot", self.registry), next(self._numbers)

        def save() -> None:
            with self._writing:
                if number > self._newest:
                    write()
                    self._newest = number

        return save

    async def _save_soon(self) -> None:
        """Remember what is registered, beside the loop; a write serves all who wait for it.

        Raises:
            ServeError: it could not be written.
        """
        if self._next_save is None:
            self._next_save = asyncio.create_task(self._save_next())
        try:
            await asyncio.shield(self._next_save)
        except BaseException:  # whoever waits undoes the change now, which may be written already
            asyncio.get_running_loop().call_soon(self._save_again)
            raise

    async def _save_next(self) -> None:
        async with self._saving:
            self._next_save = None
            await asyncio.to_thread(self._prepare_save())

    def _save_again(self) -> None:
        with contextlib.suppress(ServeError):  # whoever made the change has had the error already
            self.save()


# -- the start of a server ---------------------------------------------------------------------


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
    allocator = sizing.StartupAllocator(sizing.machine_of(policy.settings.servers), len(specs))
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
    policy.remember("startup", registry)()
    warnings = [model.warning for model in models if model is not None and model.warning]
    if allocator.warning is not None:
        logger.warning("%s", allocator.warning)
        warnings.append(allocator.warning)
    return warnings


async def _start(
    lifecycle: Lifecycle, spec: ModelSpec, allocator: sizing.StartupAllocator, report: Report
) -> ModelVersion | None:
    report(spec.name or spec.shown, "loading")
    try:
        model = await lifecycle.add(spec, allocator, waits=lifecycle.policy.is_strict)
    except (ServeError, ArchiveError) as error:
        if lifecycle.policy.is_strict:
            raise
        logger.error("Failed to load model: %s: %s", spec.shown, error)
        return None
    report(model.name, f"version {model.version}, {model.pool.ready_count} workers ready")
    return model
