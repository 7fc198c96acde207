"""What a dialect decides of models. These are our own decisions; another dialect overrides them."""

import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.archiver.untrusted.names import check_name
from modelyard.base.threads import thread_environment
from modelyard.serve.control.environment import interpreter_for
from modelyard.serve.control.fetch import in_daemon, parse_source, place
from modelyard.serve.control.model_config import ModelConfig, ModelSpec, load_model_config
from modelyard.serve.control.saved import describe_models, read_models, read_notes, write_models
from modelyard.serve.control.sizing import Allocation, ResourceRequest, share_of
from modelyard.serve.control.state import StateDir
from modelyard.serve.control.store import find_archive, list_archives, parse_model_option
from modelyard.serve.control.urls import UrlRules, is_url
from modelyard.serve.dataplane.process import ForkServer
from modelyard.serve.dataplane.worker import WorkerPolicy
from modelyard.serve.errors import without_secrets
from modelyard.serve.settings import Settings
from modelyard.serve.walls.environment import PASSED, choose_variables

if TYPE_CHECKING:
    from modelyard.archiver import Archive
    from modelyard.serve.control.registry import Registry

Share = Callable[[ResourceRequest], Awaitable[Allocation]]
"""Returns a model's part of the machine, beside the others that start with it or run already."""


class Policy:
    """The decisions of one server.

    Args:
        workers: what is decided of workers while they run.
    """

    is_strict = True
    """A start opens the ports, ends when all workers are ready, and fails with the first model that
    cannot be served. Else it opens the ports when the archives are registered, leaves out those
    that cannot be, and workers load while the server serves."""
    needs_manifest = True
    """Whether an archive without a manifest is refused."""
    default_handler: str | None = None
    """Handler of archives that name none."""
    unregister_timeout_s: float | None = None
    """Time in which the workers of a version that is removed must have ended."""
    passed_variables: tuple[str, ...] = PASSED
    """Names and patterns of the server's variables that workers get."""
    hidden_variables: str | None = None
    """Regular expression; variables whose whole name it matches are kept from workers."""
    worker_variables: Mapping[str, str] = {}
    """Variables of the workers' environment, beside the server's."""

    def __init__(self, settings: Settings, workers: WorkerPolicy | None = None) -> None:
        self.settings = settings
        self.state = StateDir(settings.state_dir)
        self._trusted: set[str] = set()
        """Locations that whoever starts the server names, or that were accepted before."""
        self.fork_server: ForkServer | None = None
        """What forks workers, once it was begun with."""
        self.max_answer_bytes = settings.max_response_bytes
        """Size of one answer, or of one chunk of it."""
        self.workers = workers or WorkerPolicy()
        self.workers.log_bytes, self.workers.log_keep = settings.log_bytes, settings.log_keep
        self.worker_keys: dict[str, Any] = {"max_image_pixels": settings.max_image_pixels}
        """Keys of the message with which workers load."""

    def models_at_start(self, is_trial: bool = False) -> list[ModelSpec]:
        """Return what the settings name, or what was served last when they name nothing.

        Args:
            is_trial: files stay as they are.
        """
        options = list(self.settings.models)
        specs = [] if options else read_models(self.state, is_trial)
        if [option.upper() for option in options] == ["ALL"]:
            options = list_archives(self.settings.model_store)
        pairs = map(parse_model_option, options)
        specs += [ModelSpec(location, name, at_start=True) for name, location in pairs]
        self._trusted.update(spec.location for spec in specs)
        return specs

    def notes_at_start(self) -> dict[str, Callable[[], Any]]:
        """Return what is remembered beside the models, whether or not models are named."""
        return read_notes(self.state)

    async def locate(self, location: str) -> tuple[Path, bool]:
        """Return the archive that a location names, and whether it was fetched just now.

        Raises:
            ServeError, ArchiveError: there is none that may be served.
        """
        return await in_daemon(partial(self.find, location)), False

    def find(self, location: str) -> Path:
        """Return the archive that a location names; fetch it into the cache if need be. Blocking.

        Raises:
            ServeError, ArchiveError: there is none that may be served.
        """
        if not is_url(location):
            return find_archive(self.settings.model_store, location)
        rules = None if location in self._trusted else UrlRules(self.settings.allowed_urls)
        file = place(parse_source(location), self.settings.cache_dir, rules)
        if (name := without_secrets(location)) != location:
            self._trusted.add(name)  # by which it is found again, and nothing is fetched
        return file

    def choose_name(self, archive: "Archive", spec: ModelSpec) -> str:
        """Return the name under which an archive is registered.

        Raises:
            ArchiveError: it has none, or one that breaks the rule for names.
        """
        name = spec.name or archive.manifest.model_name or archive.path.stem
        check_name(name)
        return name

    def configure(self, archive: "Archive", spec: ModelSpec, name: str) -> ModelConfig:
        """Return how a model version is run.

        Raises:
            BadModelConfig: something that says so is wrong.
        """
        return load_model_config(archive, self.settings, spec.options, name)

    async def size(
        self, spec: ModelSpec, config: ModelConfig, name: str, share: Share
    ) -> Allocation:
        """Return the workers of a model version, and the threads of each."""
        return await share(self.request(spec, config, name))

    def request(self, spec: ModelSpec, config: ModelConfig, name: str) -> ResourceRequest:
        """Return what caller, settings and archive say of a model's size."""
        workers, workers_from = spec.workers, "stated at its registration"
        if workers is None and "minWorkers" in self.settings.model_settings.get(name, {}):
            workers, workers_from = config.workers or None, config.origins["minWorkers"]
        elif workers is None and self.settings.workers:
            workers, workers_from = self.settings.workers, "the setting workers"
        elif workers is None and config.workers:
            workers, workers_from = config.workers, config.origins["minWorkers"]
        if spec.workers is None and workers is not None and (servers := self.settings.servers) > 1:
            workers = share_of(workers, servers)
            workers_from += f", shared by {servers} servers"
        threads_from = config.origins.get("workerThreads", "")
        return ResourceRequest(config.device, workers, workers_from, config.threads, threads_from)

    def interpreter(self, archive: "Archive", folder: Path, name: str) -> str:
        """Return the Python of a version's workers; it has what the archive requires. Blocking.

        Raises:
            BadRequest: something is missing and may not or cannot be installed.
        """
        environments = self.state.root / "environments"
        return interpreter_for(archive, folder, environments, self.settings.install_requirements)

    def environment(self, threads: int) -> dict[str, str]:
        """Return the environment of workers that run so many threads."""
        everything = () if self.settings.sandbox else os.environ
        passed = (*self.passed_variables, *self.settings.pass_variables, *everything)
        return {
            **choose_variables(os.environ, passed, self.hidden_variables),
            **self.worker_variables,
            **thread_environment(threads),
            "PYTHONUNBUFFERED": "1",
            # It sends what it sees to its maker, by a thread, so that nothing can be forked.
            "ORT_DISABLE_TELEMETRY": "1",
        }

    def remember(self, event: str, registry: "Registry") -> Callable[[], None]:
        """Return what writes what is registered now; a change is acknowledged only after that.

        It blocks, and raises a ServeError where nothing could be written.

        Args:
            event: startup; snapshot after each change; shutdown.
        """
        if event == "shutdown":
            return lambda: None
        return partial(write_models, self.state, describe_models(registry))
