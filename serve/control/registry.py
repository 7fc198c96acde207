"""Model name → versions → state. A table without I/O; the only owner of the default version."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from modelyard.archiver.proven import Unproven, describe_repeated
from modelyard.serve.control.model_config import ModelConfig, Options
from modelyard.serve.dataplane.batcher import Batcher
from modelyard.serve.dataplane.cache import VersionAnswers
from modelyard.serve.dataplane.metrics import VersionMetrics
from modelyard.serve.dataplane.pool import Pool
from modelyard.serve.errors import Conflict, DefaultVersion, ModelNotFound, VersionNotFound


class Split(Protocol):
    """What sends the requests for one model that name no version to one of two."""

    def choose(self, id: str, headers: Iterable[tuple[bytes, bytes]]) -> "ModelVersion":
        """Return the version that answers a request of this id and these headers."""


@dataclass
class ModelVersion:
    """One archive registered under a name, with everything that runs it."""

    name: str
    version: str
    file: str
    """Name of the archive in the model store."""
    url: str
    """URL as it was registered; the file's name unless it was fetched."""
    digest: str
    """SHA-256 that names the archive's content."""
    manifest: dict[str, Any] | None
    """None in an archive without one, which only another dialect serves."""
    runtime: str
    options: Options
    """What the caller said."""
    config: ModelConfig
    folder: Path
    """Folder that the archive is unpacked in."""
    pool: Pool
    batchers: tuple[Batcher, Batcher]
    """Batchers for predictions and explanations."""
    metrics: VersionMetrics
    answers: VersionAnswers | None = None
    """Its answers that are kept; None where none are."""
    explainers: Pool | None = None
    """Workers that only explain; None where those of predictions do that too."""
    at_start: bool = False
    """Whether the server's start loaded it."""
    takes_our_options: bool = False
    """Whether its handler is one of ours, which knows all options of an explanation."""
    is_downloaded: bool = False
    """Whether its file was fetched, and goes when it is unregistered."""
    held: str = ""
    """Why nobody may remove it, end its workers or make another one the default, as a sentence;
    empty where anybody may."""
    is_saved: bool = True
    """Whether the next start serves it; else it is up to whoever has registered it."""
    unproven: Unproven | None = None
    """Why nobody has proven what runs here; None where it was proven on these versions."""
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def request_timeout_s(self) -> float:
        """The longest that a call may take."""
        return self.config.request_timeout_s

    @property
    def warning(self) -> str:
        """What to know of a model that was proven on other versions; empty for all others."""
        if self.unproven is None or self.unproven.reason != "versions":
            return ""
        # A worker is ready when it has answered all golden requests as expected.
        golden = len(self.pool.plan.load["golden"]) if self.pool.ready_count else 0
        return (
            f"{self.name} {self.version}: {self.unproven.text}; {describe_repeated(golden)}; "
            f"`modelyard verify {self.file}` repeats what can be, an export on these versions "
            "proves it anew"
        )

    @property
    def pools(self) -> list[Pool]:
        """Its workers, those that only explain behind the others."""
        return [pool for pool in (self.pool, self.explainers) if pool is not None]

    @property
    def state(self) -> tuple[str, str]:
        """READY, LOADING or UNAVAILABLE, as the Open Inference Protocol has it, and why."""
        pool = self.pool
        if pool.ready_count:
            return "READY", ""
        if (reason := pool.why_none) is not None:
            return "UNAVAILABLE", reason
        if pool.slots or pool.is_awaited:
            return "LOADING", "no worker is ready"
        return "UNAVAILABLE", UNLOADED

    @property
    def takes_requests(self) -> bool:
        """Whether a worker is ready, or the first request starts one."""
        return self.pool.ready_count > 0 or (self.pool.load is not None and not self.pool.why_none)

    def load_explainers(self) -> None:
        """Start the workers that only explain, unless they are there or the model has none.

        What is queued meanwhile waits for them.
        """
        if self.explainers is not None and self.pool.slots:
            self.explainers.open()
        elif self.pool.load is not None:
            self.pool.load()

    def expect_explanations(self) -> None:
        """Have the first explanation start the workers for it, unless the model has no workers."""
        if self.explainers is not None:
            self.explainers.least = self.config.explain_workers if self.pool.least else 0
            self.explainers.most = self.explainers.least
            self.explainers.load = self.load_explainers


UNLOADED = "unloaded: the first request loads it"
SHOWN = 10
"""Names in a message."""


def _list(text: str, names: Collection[str]) -> str:
    """Return a sentence with names, as many as a reader takes in."""
    if not names:
        return "no model is served"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{text} {', '.join(islice(names, SHOWN))}{more}"


class Registry:
    """The registered model versions."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, ModelVersion]] = {}
        self._defaults: dict[str, str] = {}
        self.splits: dict[str, Split] = {}
        """Model → what chooses, while two versions answer for it."""
        self.on_change: list[Callable[[ModelVersion, bool], None]] = []
        """Called with a version that is added, which it may refuse by raising, and True; and with
        one that was removed, and False."""
        self.on_event: list[Callable[[Mapping[str, Any]], None]] = []
        """Called with what happens besides: its `kind`, `model`, `version`, a `text` for people,
        and what else is known of it."""
        self.notes: dict[str, Callable[[], Any]] = {}
        """What is remembered beside the models: name → what returns its JSON, empty for nothing."""
        self.lacks_all = False
        """Every model of the start failed, and none was registered since."""

    def get(self, name: str, version: str | None = None) -> ModelVersion:
        """Return a model version, the default one unless named.

        Raises:
            ModelNotFound, VersionNotFound.
        """
        versions = self._models.get(name)
        if versions is None:
            raise ModelNotFound(name, served=_list("this server has", sorted(self._models)))
        model = versions.get(version if version is not None else self._defaults[name])
        if model is None:
            raise VersionNotFound(name, str(version), _list("it has", versions))
        return model

    def versions(self, name: str) -> list[ModelVersion]:
        """Return all versions of a model, in the order of registration."""
        self.get(name)
        return list(self._models[name].values())

    def is_default(self, model: ModelVersion) -> bool:
        """Return whether requests that name no version go to this one."""
        return self._defaults.get(model.name) == model.version

    def noted(self) -> dict[str, Any]:
        """Return what is remembered beside the models."""
        return {name: value for name, note in self.notes.items() if (value := note())}

    def refuse_duplicate(self, name: str, version: str) -> None:
        """Raise Conflict when the version is registered already."""
        if version in self._models.get(name, {}):
            raise Conflict(f"Model version {version} is already registered for model {name}")

    def refuse_gone(self, model: ModelVersion) -> None:
        """Raise when a version has been removed, by somebody who was faster.

        Raises:
            ModelNotFound, VersionNotFound.
        """
        if self.get(model.name, model.version) is not model:
            raise VersionNotFound(model.name, model.version)

    def refuse_held(self, model: ModelVersion) -> None:
        """Raise Conflict when a version is held."""
        if model.held:
            raise Conflict(model.held)

    def announce(self, model: ModelVersion, is_there: bool) -> None:
        """Call what wants to know of a version that comes, or has gone."""
        for call in self.on_change:
            call(model, is_there)

    def tell(self, kind: str, model: str, version: str, text: str, **more: Any) -> None:
        """Call what wants to know of an event."""
        event = {"kind": kind, "model": model, "version": version, "text": text, **more}
        for call in self.on_event:
            call(event)

    def add(self, model: ModelVersion) -> None:
        """Register; the first version of a name becomes its default."""
        self.refuse_duplicate(model.name, model.version)
        self.announce(model, True)
        self._models.setdefault(model.name, {})[model.version] = model
        self._defaults.setdefault(model.name, model.version)
        self.lacks_all = False

    def swap(self, model: ModelVersion, other: ModelVersion) -> None:
        """Put another version of the same name and number in the place of one."""
        self.refuse_gone(model)
        self.refuse_held(model)
        self.announce(model, False)
        self.announce(other, True)
        self._models[model.name][model.version] = other

    def remove(self, model: ModelVersion) -> None:
        """Forget a version."""
        self.refuse_gone(model)
        self.refuse_held(model)
        versions = self._models[model.name]
        if self.is_default(model) and len(versions) > 1:
            raise DefaultVersion(f"Cannot remove default version for model {model.name}")
        del versions[model.version]
        if not versions:
            del self._models[model.name], self._defaults[model.name]

    def arrange(self, models: Iterable[ModelVersion]) -> None:
        """Put versions in this order; they were registered at once, in whatever order that gave."""
        for model in models:
            versions = self._models[model.name]
            versions[model.version] = versions.pop(model.version)

    def set_default(self, name: str, version: str) -> None:
        """Make a version the one that answers when a request names none."""
        self._defaults[name] = self.get(name, version).version

    @contextmanager
    def change(self, name: str) -> Iterator[None]:
        """Undo what a block changes of a model when the block fails."""
        before, default = dict(self._models.get(name, {})), self._defaults.get(name)
        try:
            yield
        except BaseException:
            now = self._models.pop(name, {})
            self._defaults.pop(name, None)
            if default is not None:
                self._models[name], self._defaults[name] = before, default
            for model in (now[each] for each in now if before.get(each) is not now[each]):
                self.announce(model, False)
            raise

    def __iter__(self) -> Iterator[ModelVersion]:
        """Yield all versions, models in the order of their names."""
        for name in sorted(self._models):
            yield from self._models[name].values()

    def __len__(self) -> int:
        return sum(map(len, self._models.values()))
