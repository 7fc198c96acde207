"""An installation → the report. `torchserve` reads configuration and archives alike."""

import asyncio
import logging
import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from time import monotonic

import psutil
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from modelyard.archiver import Archive, ArchiveError, open_archive
from modelyard.archiver.source_checks import known_modules, parse_source, unmet_imports
from modelyard.base.extras import is_installed
from modelyard.base.terminal import format_bytes
from modelyard.plugins.torchserve import NO_WORKFLOWS
from modelyard.plugins.torchserve.archiver.archive import BUILTIN_HANDLERS
from modelyard.plugins.torchserve.archiver.refused import REASONS, refused_imports
from modelyard.plugins.torchserve.arguments import CommandLine
from modelyard.plugins.torchserve.configuration import (
    DEFAULT_URLS,
    KEYS,
    WITHOUT_EFFECT,
    Configuration,
    load_configuration,
    read_tls,
)
from modelyard.plugins.torchserve.log4j import find_log_config, read_log_config
from modelyard.plugins.torchserve.metrics import TorchServeMetrics
from modelyard.plugins.torchserve.migrate.workflows import UnreadableWorkflow, describe_workflow
from modelyard.plugins.torchserve.policy import (
    TORCHSERVE_SUFFIXES,
    TorchServePolicy,
    find_as_torchserve,
)
from modelyard.serve.control import build, preload, sizing
from modelyard.serve.control.model_config import ModelConfig, ModelSpec
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import Registry
from modelyard.serve.control.sizing import available_memory
from modelyard.serve.control.store import find_in_store, list_archives
from modelyard.serve.control.urls import UrlRules, is_url, parse_url, split_digest
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.dataplane.worker import WorkerPolicy
from modelyard.serve.errors import LoadFailed, ServeError, StartError, UrlRefused

FORKED_BYTES = 50 << 20
"""What a worker adds that is forked, beside its model; others import torch, and take more."""
PLAIN_BYTES = 20 << 20
"""Memory of a worker whose handler needs no torch."""
INSTALL = (
    "install it beside Modelyard; or name it in the archive's requirements, and set "
    "install_py_dep_per_model=true"
)
OLD_TORCH = (
    "try the handler without that line: models that TorchScript, ONNX or a state dict holds are "
    "read by newer versions of torch"
)
SHARED = ("torch", "modelyard")
"""Packages that an environment of an archive's own must not bring in another version."""


WORKS, CHANGES, FAILS = "works", "changes", "fails"
"""What becomes of something in the move."""


@dataclass(frozen=True)
class Finding:
    """One thing that works, changes, or will not work."""

    status: str
    subject: str
    """A key of the configuration, or a model and its version."""
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Model:
    """A version that the start serves."""

    name: str
    version: str
    file: str
    workers: int
    batch_size: int
    memory_bytes: int
    """Memory of all its workers; an estimate, or what one took in a trial, times the workers."""
    is_measured: bool = False


@dataclass
class Report:
    """Everything that was found."""

    findings: list[Finding] = field(default_factory=list)
    models: list[Model] = field(default_factory=list)

    def count(self, status: str) -> int:
        """Return how many findings have this status."""
        return sum(each.status == status for each in self.findings)


@contextmanager
def warnings_of_readers() -> Iterator[list[str]]:
    """Collect what the server's readers would write to its log."""
    said: list[str] = []
    logger, collector = logging.getLogger("modelyard"), logging.Handler(logging.WARNING)
    collector.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(collector)
    try:
        yield said
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagates


@dataclass
class Looked:
    """What was found about one archive."""

    spec: ModelSpec
    findings: list[Finding]
    model: Model | None = None
    """Model as it is served at the start, where it can be; what works of it is the last finding."""


def look_at_store(policy: TorchServePolicy, rules: UrlRules) -> Iterator[Looked]:
    """Yield what becomes of each archive: those of the start, then the others of the store.

    Args:
        policy: policy of the server that would serve them.
        rules: what may be fetched.
    """
    store, specs = policy.settings.model_store, list[ModelSpec]()
    try:
        specs = policy.models_at_start(is_trial=True)
    except ServeError as error:
        yield Looked(ModelSpec(""), [Finding(FAILS, "model_snapshot", str(error))])
    named = {find_in_store(store, spec.location.rpartition("/")[2]) for spec in specs}
    yield from (_look(policy, spec, rules, is_loaded=True) for spec in specs)
    for name in list_archives(store, TORCHSERVE_SUFFIXES):
        if store / name not in named:
            yield _look(policy, ModelSpec(name), rules, is_loaded=False)


def find_workflows(policy: TorchServePolicy, workflow_store: str | None) -> Iterator[Finding]:
    """Yield a finding for each archive of a workflow: what it does, and what to do instead."""
    folders = {policy.settings.model_store, Path(workflow_store or policy.settings.model_store)}
    for file in sorted(file for folder in folders for file in folder.glob("*.war")):
        try:
            done, advice = describe_workflow(file)
        except UnreadableWorkflow as error:
            done, advice = f"it cannot be read: {error}", "make it anew, or ask who made it"
        yield Finding(FAILS, file.name, f"{NO_WORKFLOWS}: {done}", advice)


async def try_archives(policy: TorchServePolicy, looked: Iterable[Looked]) -> None:
    """Load each archive that can be served in a worker, behind the walls of the server.

    Args:
        policy: policy of the server that would serve them, with a state folder of its own.
        looked: archives of the store, to which is added what came of it.
    """
    policy.state.create()
    policy.workers = WorkerPolicy()  # what they print goes to files of that folder
    lifecycle = Lifecycle(policy, Registry(), Metrics())
    try:
        for each in looked:
            if not is_url(each.spec.location) and all(f.status != FAILS for f in each.findings):
                await _try(lifecycle, each)
    finally:
        await lifecycle.stop(0)


async def _try(lifecycle: Lifecycle, looked: Looked) -> None:
    works, began = looked.findings.pop(), monotonic()
    try:
        model = await lifecycle.add(replace(looked.spec, workers=1, most=1), None, waits=True)
    except (LoadFailed, ServeError, ArchiveError) as error:
        text = str(error).removeprefix(f"{works.subject}: ")
        looked.findings.append(replace(works, status=FAILS, text=text))
        looked.model = None
        return
    took_s = monotonic() - began
    pids = [slot.worker.pid for slot in model.pool.slots if slot.worker is not None]
    taken = sum(int(psutil.Process(pid).memory_full_info().uss) for pid in pids)
    await lifecycle.unregister(model)
    text = f"{works.text}; loads in {took_s:.1f} s, {format_bytes(taken)} of its own"
    looked.findings.append(replace(works, text=text))
    if (at_start := looked.model) is not None:
        memory = taken * at_start.workers
        looked.model = replace(at_start, memory_bytes=memory, is_measured=True)


def _look(policy: TorchServePolicy, spec: ModelSpec, rules: UrlRules, is_loaded: bool) -> Looked:
    if is_url(spec.location):
        text = f"{spec.shown} may be fetched; it was not looked at"
        finding = Finding(WORKS, "load_models", text)
        try:
            rules.matching(parse_url(split_digest(spec.location)[0]))
        except UrlRefused as error:
            advice = f"{error.reason}; add one to allowed_urls"
            finding = Finding(FAILS, "load_models", str(error), advice)
        return Looked(spec, [finding])
    try:
        file = find_as_torchserve(policy.settings.model_store, spec.location)
        with open_archive(file, needs_manifest=policy.needs_manifest) as archive:
            return _look_inside(policy, spec, archive, is_loaded)
    except (ServeError, ArchiveError, OSError) as error:
        return Looked(spec, [Finding(FAILS, spec.name or spec.location, str(error))])


def _look_inside(
    policy: TorchServePolicy, spec: ModelSpec, archive: Archive, is_loaded: bool
) -> Looked:
    with warnings_of_readers() as said:
        admitted = build.admit(archive, spec, policy)
    name, config = admitted.name, admitted.config
    label = f"{name} {archive.manifest.model_version}"
    findings = [Finding(CHANGES, label, text) for text in said]
    findings += _look_at_code(policy, archive, label)
    if any(each.status == FAILS for each in findings):
        return Looked(spec, findings)
    model = asyncio.run(_size(policy, spec, archive, config, name)) if is_loaded else None
    handler = archive.manifest.handler or policy.default_handler
    text = f"{archive.path.name}, handler {handler}"
    findings.append(Finding(WORKS, label, text if model else f"{text}; not loaded at the start"))
    return Looked(spec, findings, model)


async def _size(
    policy: TorchServePolicy, spec: ModelSpec, archive: Archive, config: ModelConfig, name: str
) -> Model:
    size = await policy.size(spec, config, name, _nobody_shares)
    each = PLAIN_BYTES
    manifest = archive.manifest
    contents = manifest, archive.files, archive.read
    if not config.uses_gpu and preload.choose_preload(*contents, manifest.handler):
        each = FORKED_BYTES
    elif config.uses_gpu or any(preload.NEEDS_TORCH.search(code) for _, code in _sources(archive)):
        each = sizing.WORKER_BYTES
    weights = sum(f.size_bytes for f in archive.files if f.name == manifest.serialized_file)
    # Weights that a handler of ours loads are mapped once; an author's may copy them.
    copies = min(1, size.workers) if manifest.handler in BUILTIN_HANDLERS else size.workers
    memory = size.workers * each + copies * weights
    return Model(
        name, manifest.model_version, archive.path.name, size.workers, config.batch_size, memory
    )


async def _nobody_shares(request: sizing.ResourceRequest) -> sizing.Allocation:
    raise AssertionError("models do not share the cores in this dialect")


# -- the code ----------------------------------------------------------------------------------


def _look_at_code(policy: TorchServePolicy, archive: Archive, label: str) -> Iterator[Finding]:
    manifest = archive.manifest
    handler = manifest.handler or policy.default_handler
    wrong = None
    if manifest.runtime == "LSP":
        wrong = "the runtime is LSP: C++ handlers do not run here"
    elif not handler:
        wrong = "the manifest names no handler"
    elif handler in REASONS:
        wrong = f"the handler {handler} is not served: {REASONS[handler]}"
    if wrong or not handler:
        yield Finding(FAILS, label, str(wrong))
        return
    packages = yield from _look_at_requirements(policy, archive, label)
    if handler == "text_classifier" and "source_vocab.pt" in archive.names:
        text = "source_vocab.pt must be a plain dict of token to index: nothing is unpickled"
        advice = "--try says whether it is; `torch.save(vocabulary.get_stoi(), …)` writes one"
        yield Finding(CHANGES, label, text, advice)
    if handler in BUILTIN_HANDLERS:
        return
    stem = handler.partition(":")[0].removesuffix(".py")
    main = next((n for n in archive.names if n.removesuffix(".py") == stem and n != stem), None)
    if main is None:
        yield Finding(FAILS, label, f"the archive lacks its handler, {stem}.py")
        return
    known = known_modules(archive.names, packages)
    for file, code in _sources(archive):
        tree = parse_source(file, code)
        status = FAILS if file in (main, manifest.model_file) else CHANGES
        if tree is None:
            yield Finding(status, label, f"{file} is not Python that this interpreter reads")
            continue
        for name, line in refused_imports(tree):
            where = f"{file}:{line} imports {name}, which is not served"
            yield Finding(status, label, f"{where}: {REASONS[name]}")
        for unmet in unmet_imports(file, tree, known):
            where = f"{unmet.file}:{unmet.line} imports {unmet.module}, which"
            if unmet.module.startswith("ts."):
                advice = "do without it, or pack a copy under a name of your own"
                yield Finding(status, label, f"{where} workers do not have", advice)
            elif not is_installed(unmet.module):
                yield Finding(status, label, f"{where} is not installed here", INSTALL)


def _sources(archive: Archive) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the author's files that are not too long to be looked at."""
    for file in archive.files:
        if file.name.endswith(".py") and file.size_bytes <= preload.MAX_SOURCE_BYTES:
            yield file.name, archive.read(file.name)


def _look_at_requirements(
    policy: TorchServePolicy, archive: Archive, label: str
) -> Generator[Finding, None, list[str]]:
    """Yield what becomes of an archive's requirements; return the packages that it will have."""
    file = archive.manifest.requirements_file
    if not file or file not in archive.names:
        return []
    if not policy.settings.install_requirements:
        yield Finding(WORKS, label, f"{file} is passed over: install_py_dep_per_model is not true")
        return []
    requirements = list(_requirements(archive.read(file).decode("utf-8", "replace")))
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        if name in SHARED and not requirement.specifier.contains(version(name), prereleases=True):
            text = f"{file} wants {requirement}; workers run on {name} {version(name)}"
            yield Finding(FAILS, label, text, OLD_TORCH)
    count = len(requirements)
    text = (
        f"its {count} requirement{'s' * (count != 1)} get an environment of their own, which sees "
        "the server's packages; nothing is installed beside the model"
    )
    yield Finding(CHANGES, label, text)
    return [requirement.name for requirement in requirements]


def _requirements(text: str) -> Iterator[Requirement]:
    """Yield the lines that name a package; options and addresses are pip's affair."""
    for line in text.splitlines():
        try:
            yield Requirement(line.partition(" #")[0].partition("--hash")[0].strip(" \\"))
        except InvalidRequirement:
            continue


# -- the report --------------------------------------------------------------------------------


SERVER_BYTES = 200 << 20
"""Memory of the server's process, and of the one that workers are forked from."""
OnStep = Callable[[str], None]
"""Called with what is looked at now."""


def examine(
    options: CommandLine,
    environment: Mapping[str, str],
    directory: Path,
    tries: bool = False,
    on_step: OnStep = lambda text: None,
) -> Report:
    """Return what works, what changes and what will not; nothing of an archive is run.

    Args:
        options: options with which `torchserve` would be started.
        environment: its variables.
        directory: where it would be started.
        tries: a worker is started for each archive that can be served, where its code does run.
        on_step: callback for progress.
    """
    on_step("configuration")
    # The file that is named here counts, whatever the environment names.
    variables = {key: value for key, value in environment.items() if key != "TS_CONFIG_FILE"}
    report, is_read = Report(), True
    try:
        configuration = load_configuration(options, variables, directory)
        report.findings += _examine(configuration, variables)
    except StartError as error:
        advice = "the start ends with this; mend it first: its other keys were not looked at"
        report.findings.append(Finding(FAILS, *_split(str(error)), advice))
        without, is_read = CommandLine(**{**vars(options), "ts_config": os.devnull}), False
        configuration = load_configuration(without, variables, directory)
    store, dialect = configuration.settings.model_store, configuration.dialect
    missing = None if store.is_dir() else f"there is no folder {store}"
    if not (options.model_store or dialect.properties.get("model_store")):
        missing = "neither the command nor the configuration names a folder of archives"
    if missing:
        report.findings += [Finding(FAILS, "model_store", missing)] * is_read
        return report
    with tempfile.TemporaryDirectory(prefix="modelyard-") as folder:
        policy = _policy(configuration, Path(folder) / "state")
        looked = list[Looked]()
        for each in look_at_store(policy, UrlRules(dialect.allowed_urls)):
            on_step(each.spec.location)
            looked.append(each)
        if tries:
            on_step("trials")
            with warnings_of_readers():  # what workers print, and how they end
                asyncio.run(try_archives(policy, looked))
    if not looked:
        report.findings.append(Finding(CHANGES, "model_store", f"{store} holds no archives"))
    report.findings += [finding for each in looked for finding in each.findings]
    report.models += [each.model for each in looked if each.model is not None]
    report.findings += find_workflows(policy, dialect.properties.get("workflow_store"))
    if report.models:
        report.findings.append(_memory(report))
    return report


def _policy(configuration: Configuration, state: Path) -> TorchServePolicy:
    dialect = configuration.dialect
    try:
        metrics = TorchServeMetrics(dialect)
    except StartError:  # a finding by now
        metrics = TorchServeMetrics(dialect.model_copy(update={"metrics_config": None}))
    settings = configuration.settings.model_copy(update={"state_dir": state})
    return TorchServePolicy(settings, dialect, metrics)


def _memory(report: Report) -> Finding:
    workers = sum(model.workers for model in report.models)
    needed = SERVER_BYTES + sum(model.memory_bytes for model in report.models)
    there, cores = available_memory(), len(os.sched_getaffinity(0))
    text = (
        f"{workers} worker{'s' * (workers != 1)} on {cores} core{'s' * (cores != 1)}, about "
        f"{format_bytes(needed)} with the server; {format_bytes(there)} available"
    )
    if needed <= there:
        return Finding(WORKS, "memory", text)
    advice = "start fewer: default_workers_per_model, or minWorkers of the archives"
    return Finding(FAILS, "memory", text, advice)


# -- the configuration -------------------------------------------------------------------------


def _examine(configuration: Configuration, environment: Mapping[str, str]) -> Iterator[Finding]:
    own = configuration.dialect
    if used := sorted(own.properties.keys() & KEYS - WITHOUT_EFFECT.keys()):
        yield Finding(WORKS, "keys", "mean what they did: " + ", ".join(used))
    for notice in configuration.notices:
        subject, text = _split(notice)
        # Of the keys without effect this one's work is done by nothing here.
        yield Finding(FAILS if subject == "plugins_path" else CHANGES, subject, text)
    asks = "; TorchServe 0.12 asks everybody" if own.is_open else ""
    yield Finding(CHANGES if asks else WORKS, "tokens", own.who_is_let_in + asks)
    here = own.inference_address
    if here.is_loopback and not (here.path or configuration.settings.allowed_hosts):
        text = "only localhost and addresses name this server; TorchServe takes any Host"
        advice = "allowed_hosts names what a proxy passes on: an upstream, the name of the site"
        yield Finding(CHANGES, "names", text, advice)
    if not own.allowed_urls:
        text = "no model is fetched by URL; without the key TorchServe takes any URL"
        advice = f"name the URLs in allowed_urls, or in the variable {DEFAULT_URLS}"
        yield Finding(CHANGES, "allowed_urls", text, advice)
    ports = " and ".join(str(address.port) for address in own.grpc_addresses)
    yield Finding(WORKS, "gRPC", f"answered on ports {ports}, as TorchServe's clients call it")

    def logs() -> str:
        if (file := find_log_config(None, own.properties.get("vmargs", ""), own.directory)) is None:
            return ""
        said.extend(read_log_config(file, environment, own.directory)[1])
        return f"{file.name} is followed"

    fit = "certificate and key can be read, and fit each other"
    checks: dict[str, Callable[[], object]] = {
        "TLS": lambda: fit if read_tls(own) else "",
        "logs": logs,
        "metrics_config": lambda: TorchServeMetrics(own),
    }
    for subject, check in checks.items():
        with warnings_of_readers() as said:
            try:
                works = check()
            except StartError as error:
                yield Finding(FAILS, subject, str(error))
                continue
        yield from (Finding(CHANGES, subject, text) for text in said)
        if isinstance(works, str) and works and not said:
            yield Finding(WORKS, subject, works)


def _split(text: str) -> tuple[str, str]:
    """Return the key that a sentence begins with, and the rest of it."""
    if match := re.fullmatch(r"(\w+)(?:: | (?=has no effect|is not a key))(.*)", text, re.DOTALL):
        return match[1], match[2]
    return "configuration", text
