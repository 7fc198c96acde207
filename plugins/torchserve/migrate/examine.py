"""Configuration and model store → the report; `torchserve` reads both by the same functions."""

import asyncio
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from modelyard.base.terminal import format_bytes
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
from modelyard.plugins.torchserve.migrate import models
from modelyard.plugins.torchserve.migrate.models import CHANGES, FAILS, WORKS, Finding, Report
from modelyard.plugins.torchserve.policy import TorchServePolicy
from modelyard.serve.control.fetch import UrlRules
from modelyard.serve.control.sizing import available_memory
from modelyard.serve.errors import StartError

SERVER_BYTES = 200 << 20
"""Memory of the server's process, and of the one that workers are forked from."""
LOST = {"plugins_path"}
"""Keys without effect whose work nothing here does."""

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
        looked = list[models.Looked]()
        for each in models.look_at_store(policy, UrlRules(dialect.allowed_urls)):
            on_step(each.spec.location)
            looked.append(each)
        if tries:
            on_step("trials")
            with models.warnings_of_readers():  # what workers print, and how they end
                asyncio.run(models.try_archives(policy, looked))
    if not looked:
        report.findings.append(Finding(CHANGES, "model_store", f"{store} holds no archives"))
    report.findings += [finding for each in looked for finding in each.findings]
    report.models += [each.model for each in looked if each.model is not None]
    report.findings += models.find_workflows(policy, dialect.properties.get("workflow_store"))
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
    there = available_memory()
    cores = len(os.sched_getaffinity(0))
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
        yield Finding(FAILS if subject in LOST else CHANGES, subject, text)
    if own.disable_token_authorization is None and own.inference_address.is_loopback:
        text = "predictions from this machine need none; TorchServe 0.12 asks for one"
        advice = "disable_token_authorization=false asks for it here too"
        yield Finding(CHANGES, "tokens", text, advice)
    elif own.disable_token_authorization:
        yield Finding(WORKS, "tokens", "none are asked for, as the configuration says")
    else:
        yield Finding(WORKS, "tokens", "asked for, as by TorchServe; they are in key_file.json")
    if not own.allowed_urls:
        text = "no model is fetched by URL; without the key TorchServe takes any URL"
        advice = f"name the URLs in allowed_urls, or in the variable {DEFAULT_URLS}"
        yield Finding(CHANGES, "allowed_urls", text, advice)
    ports = " and ".join(str(address.port) for address in own.grpc_addresses)
    yield Finding(WORKS, "gRPC", f"answered on ports {ports}, as TorchServe's clients call it")

    def logs() -> str:
        if (file := find_log_config(None, vmargs, own.directory)) is None:
            return ""
        said.extend(read_log_config(file, environment, own.directory)[1])
        return f"{file.name} is followed"

    vmargs, fit = (
        own.properties.get("vmargs", ""),
        "certificate and key can be read, and fit each other",
    )
    checks: dict[str, Callable[[], object]] = {
        "TLS": lambda: fit if read_tls(own) else "",
        "logs": logs,
        "metrics_config": lambda: TorchServeMetrics(own),
    }
    for subject, check in checks.items():
        with models.warnings_of_readers() as said:
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
