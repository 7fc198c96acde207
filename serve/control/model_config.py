"""The archive's model-config.yaml, the caller and the server's settings → how a version is run."""

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from modelyard.archiver import Archive
from modelyard.archiver.model_config import keys_without_effect, parse_model_config, unknown_keys
from modelyard.archiver.untrusted.names import REFERENCE_NAME
from modelyard.base.nearest import did_you_mean
from modelyard.serve.control.sizing import count_gpus
from modelyard.serve.dataplane.lengths import CALL_BYTES
from modelyard.serve.dataplane.worker import RunConfig
from modelyard.serve.errors import BadModelConfig, without_secrets
from modelyard.serve.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")
N = TypeVar("N", int, float)
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

DEFAULT_BATCH_SIZE = 8
"""On a CPU a batch above 8 gains nothing for small networks and costs latency for large ones."""
FILLS_ROWS = ("fill_mask", "question_answering", "text", "text_encoder", "token_classifier")
"""Built-in handlers that fill a batch up to its longest request."""


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
    """Whether it goes before the archive in everything, as what a snapshot says."""


@dataclass(frozen=True)
class ModelSpec:
    """A model version that is to be served: a call of the register API, or a line of the state."""

    location: str
    """Location as the caller wrote it: a file of the store, or a URL."""
    name: str | None = None
    """None takes the manifest's."""
    workers: int | None = None
    """None leaves it to the settings, the archive and the chooser (`sizing.py`)."""
    most: int | None = None
    """Workers that scaling leaves alone; None takes as many as are started."""
    options: Options = field(default_factory=Options)
    is_default: bool = False
    at_start: bool = False
    digest: str | None = None
    """Digest of the archive that was served last; another one is not what is to be restored."""
    is_saved: bool = True
    """Whether the next start serves it, as of a `ModelVersion`."""
    niceness: int = 0
    """Niceness of its workers."""

    @property
    def shown(self) -> str:
        """Location as it is stored and shown."""
        return without_secrets(self.location)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(RunConfig):
    """How one model version is run. Keys of the YAML file in brackets."""

    workers: int
    """Workers to start; 0 leaves the choice to the server [minWorkers]."""
    most_workers: int
    """Workers that scaling leaves alone [maxWorkers]; 0 as `workers`."""
    request_timeout_s: float
    """Time from arrival to answer [clientTimeoutInMills]."""
    device: str
    """auto, cpu, cuda or cuda:N [deviceType: cpu | gpu]."""
    explain_workers: int = 0
    """Workers that only explain; 0 leaves explanations to the workers of predictions
    [explainWorkers]."""
    explains_early: bool = False
    """Whether these are started with the others, as somebody asked for them."""
    explain_share: float = 0.0
    """Share of the answered predictions that are explained unasked [explainShare]."""
    device_ids: tuple[int, ...] = ()
    """Worker i takes the i-th of these, in turn [deviceIds]."""
    by_length: bool = False
    """Whether a batch is made of requests of like length [batchBy: arrival | length]."""
    refuses_late: bool = True
    """Whether a request is refused whose answer is not to be expected in its time; else it waits
    until the end, unless its client says how long."""
    has_venv: bool = False
    """Whether the archive requests an environment of its own [useVenv]."""
    parallel_type: str = ""
    """Shown only [parallelType]."""
    parallel_level: int = 0
    """Shown only [parallelLevel]."""
    network: str = "none"
    """Sockets of its workers: none, all. The operator's alone to say [network]."""
    files: str = "own"
    """What its workers reach: own, all; as `network` [files]."""
    keeps_answers: bool = False
    """Whether an answer is given again to the same request. The operator's alone to say
    [cacheAnswers]."""
    ignored_headers: tuple[str, ...] = ()
    """Headers that say nothing to an author's handler, when a request is compared with others
    [cacheIgnores]."""
    is_pinned: bool = False
    """Whether it is loaded at the start and stays, where models are loaded on demand. The
    operator's alone to say [pinned]."""
    artifact: str = ""
    """What predicts in place of the artifact that the manifest names, as the settings say it of
    this model; what the archive says its workers read [artifact]."""
    capacity_rps: float = 0.0
    """Answers per second that `tune` measured for this configuration; 0 where nobody did
    [tunedRate]."""
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
    archive: Archive, settings: Settings, options: Options | None = None, name: str | None = None
) -> ModelConfig:
    """Read the archive's configuration file; what it leaves open comes from the settings.

    Args:
        options: what the caller said; batch size and delay stand before the file.
        name: name under which the archive is registered.

    Raises:
        BadModelConfig: the file is missing or not a YAML mapping, a value has the wrong type, or
            the setting `model_settings` has a key that nothing reads.
    """
    options = options or Options()
    values = Values.of(archive, settings, name)
    proven = proven_batch(archive)
    batch_size = options.batch_size or values.integer("batchSize", DEFAULT_BATCH_SIZE, least=1)
    timeout_ms = values.integer("clientTimeoutInMills", 0, least=0)
    workers = values.integer("minWorkers", 0, least=0)
    config = ModelConfig(
        workers=workers,
        most_workers=max(workers, values.integer("maxWorkers", 0, least=0)),
        batch_size=min(batch_size, proven) if proven else batch_size,
        batch_delay_ms=values.integer("maxBatchDelay", 0, least=0),
        queue_size=values.integer("jobQueueSize", settings.queue_size, least=1),
        request_timeout_s=timeout_ms / 1000 if timeout_ms else settings.request_timeout_s,
        response_timeout_s=values.integer("responseTimeout", settings.response_timeout_s, least=1),
        startup_timeout_s=values.integer("startupTimeout", settings.startup_timeout_s, least=1),
        device=values.choice("deviceType", {"cpu": "cpu", "gpu": "cuda"}, settings.device),
        retry=values.boolean("retry", True),
        origins=values.origins,
        proven_batch=proven,
        **extensions(values, archive, settings, options),
    )
    values.refuse_unknown()
    values.check_keys(archive.manifest.modelyard is not None)
    return config


def extensions(
    values: "Values", archive: Archive, settings: Settings, options: Options
) -> dict[str, Any]:
    """Return the fields of a configuration whose keys are ours, in every dialect.

    Raises:
        BadModelConfig: the archive, or its settings, ask for what it lacks.
    """
    is_sealed = archive.manifest.modelyard is not None
    fills_rows = is_sealed and (options.handler or archive.manifest.handler) in FILLS_ROWS
    # An archive without our seal may keep state that predictions and explanations share.
    explain_workers = values.integer("explainWorkers", int(is_sealed), least=0)
    can_explain = bool(explain_workers) and REFERENCE_NAME in archive.names
    share = values.number("explainShare", settings.explain_share if can_explain else 0.0, 1)
    if share and not can_explain:
        lacks = "a reference: archive it again with --reference FILE"
        raise BadModelConfig(
            f"{values.file}: explainShare is {share:g}, which needs "
            + (lacks if explain_workers else "explainWorkers of 1 or more")
        )
    return {
        "explain_workers": explain_workers,
        "explains_early": explain_workers > 0 and ("explainWorkers" in values.values or share > 0),
        "explain_share": share,
        "by_length": values.choice("batchBy", {"arrival": False, "length": True}, fills_rows),
        "threads": values.integer("workerThreads", 0, least=0),
        "artifact": values.of_operator(
            "artifact", "", Kind(("", *archive.names).__contains__, "a file of the archive")
        ),
        "network": values.of_operator("network", settings.network_of(is_sealed), NETWORK),
        "files": values.of_operator("files", settings.files, FILES),
        "capacity_rps": values.number("tunedRate", 0),
        "keeps_answers": values.of_operator("cacheAnswers", False, BOOLEAN),
        "is_pinned": values.of_operator("pinned", False, BOOLEAN),
        "ignored_headers": tuple(
            name.lower() for name in values.of_operator("cacheIgnores", [], HEADERS)
        ),
    }


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
        return parse_model_config(archive.read(file), file)
    except ValueError as error:
        raise BadModelConfig(str(error)) from error


def _are_headers(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(name, str) and _HEADER_NAME.fullmatch(name) for name in value
    )


class Kind(NamedTuple):
    """What a value may be."""

    is_right: Callable[[Any], bool]
    expected: str
    """The same in words."""


BOOLEAN = Kind(lambda value: isinstance(value, bool), "true or false")
NETWORK = Kind(("none", "all").__contains__, "none or all")
FILES = Kind(("own", "all").__contains__, "own or all")
HEADERS = Kind(_are_headers, "a list of names of headers")


class Values:
    """Typed look-ups that name the key when its value is wrong.

    Args:
        settings: keys of the server's own that stand before those of the file.
        is_lenient: a wrong value is warned of and its default taken; else it is an error.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        file: str,
        is_lenient: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._settings = settings or {}
        self._of_file = values
        self.values = {**values, **self._settings}
        self.file = self._file = file
        self._is_lenient = is_lenient
        self._known: set[str] = set()
        self.origins = {key: f"{key} of {file}" for key in values}
        """Key → who says so, for people."""
        if self._settings:
            self.file += " with the setting model_settings"
            self.origins |= {key: f"{key} of the setting model_settings" for key in self._settings}

    @classmethod
    def of(
        cls, archive: Archive, settings: Settings, name: str | None, is_lenient: bool = False
    ) -> "Values":
        """Read the archive's file, and what the settings say of a model of this name.

        Raises:
            BadModelConfig: the file is missing or not a YAML mapping.
        """
        file = archive.manifest.config_file
        of_model = settings.model_settings.get(name or archive.manifest.model_name or "")
        return cls(_parse(archive, file), file or "model-config.yaml", is_lenient, of_model)

    def refuse_unknown(self) -> None:
        """Refuse keys of the settings that nothing has read."""
        if unknown := sorted(map(str, set(self._settings) - self._known)):
            raise BadModelConfig(
                f"the setting model_settings: the server reads no {', '.join(unknown)}; it reads "
                + ", ".join(sorted(self._known))
                + did_you_mean(unknown[0], self._known)
            )

    def check_keys(self, is_sealed: bool) -> None:
        """Refuse keys of the archive's file that nothing reads, or log a warning.

        Handlers of archives without our seal read keys of their own in any place.

        Raises:
            BadModelConfig: the first of them.
        """
        unknown = unknown_keys(self._of_file, self._file)
        if is_sealed and not self._is_lenient:
            if unknown:
                raise BadModelConfig("; ".join(unknown))
            unknown = keys_without_effect(self._of_file, self._file)
        for problem in unknown:
            logger.warning("%s", problem)

    def _checked(self, key: str, default: Any, kind: Kind) -> Any:
        """Return what is said of a key; the default where nothing is, or, leniently, if wrong."""
        self._known.add(key)
        value = self.values.get(key, default)
        if key not in self.values or kind.is_right(value):
            return value
        problem = f"{self.file}: {key}: expected {kind.expected}, got {value!r}"
        if not self._is_lenient:
            raise BadModelConfig(problem)
        logger.warning("%s; it is left out", problem)
        return default

    def integer(self, key: str, default: N, least: int) -> N:
        """Return a whole number that is no less than `least`."""
        kind = Kind(lambda value: type(value) is int and value >= least,
                    f"a whole number from {least} up")  # fmt: skip
        value: N = self._checked(key, default, kind)
        return value

    def at_least_1(self, key: str) -> int:
        """Return 0 where nothing is said; what is written below 1 means 1."""
        kind = Kind(lambda value: value is None or type(value) is int, "a whole number")
        value = self._checked(key, None, kind)
        return 0 if value is None else max(1, value)

    def number(self, key: str, default: float, most: float = math.inf) -> float:
        """Return a number from 0 to `most`, and finite."""
        kind = Kind(
            lambda value: type(value) in (int, float) and 0 <= value <= most and value < math.inf,
            "a number from 0 up" if most == math.inf else f"a number from 0 to {most:g}",
        )
        return float(self._checked(key, default, kind))

    def boolean(self, key: str, default: bool) -> bool:
        """Return true or false."""
        return bool(self._checked(key, default, BOOLEAN))

    def choice(self, key: str, meanings: dict[str, T], default: T) -> T:
        """Return what one of the words means."""
        kind = Kind((None, *meanings).__contains__, " or ".join(meanings))
        value = self._checked(key, None, kind)
        return default if value is None else meanings[value]

    def of_operator(self, key: str, default: Any, kind: Kind) -> Any:
        """Return what the settings say of the model; what the archive says is not asked."""
        self._known.add(key)
        value = self._settings.get(key, default)
        if not kind.is_right(value):
            raise BadModelConfig(f"model_settings: {key}: expected {kind.expected}, got {value!r}")
        return value
