"""Configuration and model store → the report."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from modelyard.base.terminal import format_bytes
from modelyard.plugins.torchserve.arguments import CommandLine
from modelyard.plugins.torchserve.configuration import Configuration
from modelyard.plugins.torchserve.metrics import TorchServeMetrics
from modelyard.plugins.torchserve.migrate.configuration import read_configuration
from modelyard.plugins.torchserve.migrate.findings import (
    CHANGES,
    FAILS,
    WORKS,
    Finding,
    Report,
    warnings_of_readers,
)
from modelyard.plugins.torchserve.migrate.models import Looked, find_workflows, look_at_store
from modelyard.plugins.torchserve.migrate.trial import Trial, try_archives
from modelyard.plugins.torchserve.policy import TorchServePolicy
from modelyard.serve.control.fetch import UrlRules
from modelyard.serve.control.model_config import ModelSpec
from modelyard.serve.control.sizing import available_memory
from modelyard.serve.errors import StartError

SERVER_BYTES = 200 << 20
"""Of the server's process, and of the one that workers are forked from."""

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
        options: with which `torchserve` would be started.
        environment: its variables.
        directory: where it would be started.
        tries: a worker is started for each archive that can be served, where its code does run.
        on_step: for progress.
    """
    on_step("configuration")
    configuration, findings = read_configuration(options, environment, directory)
    report = Report(findings)
    store = configuration.settings.model_store
    if missing := _why_no_store(configuration, options):
        if configuration.file != Path(os.devnull):  # else it was passed over with the other keys
            report.findings.append(Finding(FAILS, "model_store", missing))
        return report
    with tempfile.TemporaryDirectory(prefix="modelyard-") as folder:
        policy = _policy(configuration, Path(folder) / "state")
        looked: list[Looked] = []
        for each in look_at_store(policy, UrlRules(configuration.dialect.allowed_urls)):
            on_step(each.spec.location)
            looked.append(each)
        trials: dict[ModelSpec, Trial] = {}
        if tries:
            on_step("trials")
            specs = [each.spec for each in looked if each.can_try]
            with warnings_of_readers():  # what workers print, and how they end
                asyncio.run(try_archives(policy, specs, trials.__setitem__))
    if not looked:
        report.findings.append(Finding(CHANGES, "model_store", f"{store} holds no archives"))
    for each in looked:
        _add(report, each, trials.get(each.spec))
    report.findings += find_workflows(
        policy, configuration.dialect.properties.get("workflow_store")
    )
    report.findings += _memory(report)
    return report


def _why_no_store(configuration: Configuration, options: CommandLine) -> str | None:
    if not (options.model_store or configuration.dialect.properties.get("model_store")):
        return "neither the command nor the configuration names a folder of archives"
    store = configuration.settings.model_store
    return None if store.is_dir() else f"there is no folder {store}"


def _policy(configuration: Configuration, state: Path) -> TorchServePolicy:
    dialect = configuration.dialect
    try:
        metrics = TorchServeMetrics(dialect)
    except StartError:  # a finding by now
        metrics = TorchServeMetrics(dialect.model_copy(update={"metrics_config": None}))
    settings = configuration.settings.model_copy(update={"state_dir": state})
    return TorchServePolicy(settings, dialect, metrics)


def _add(report: Report, looked: Looked, trial: Trial | None) -> None:
    """Take what was found about one archive, with what came of its trial."""
    model = looked.model
    for finding in looked.findings:
        if trial is None or finding.status != WORKS:
            report.findings.append(finding)
        elif trial.error is not None:
            error = trial.error.removeprefix(f"{finding.subject}: ")
            report.findings.append(replace(finding, status=FAILS, text=error))
            model = None
        else:
            took = (
                f"; loads in {trial.seconds:.1f} s, {format_bytes(trial.memory_bytes)} of its own"
            )
            report.findings.append(replace(finding, text=finding.text + took))
    if model is not None and trial is not None:
        taken = trial.memory_bytes * model.workers
        model = replace(model, memory_bytes=taken, is_measured=True)
    if model is not None:
        report.models.append(model)


def _memory(report: Report) -> list[Finding]:
    if not report.models:
        return []
    workers = sum(model.workers for model in report.models)
    needed = SERVER_BYTES + sum(model.memory_bytes for model in report.models)
    there = available_memory()
    cores = len(os.sched_getaffinity(0))
    text = (
        f"{workers} worker{'s' * (workers != 1)} on {cores} core{'s' * (cores != 1)}, about "
        f"{format_bytes(needed)} with the server; {format_bytes(there)} available"
    )
    if needed > there:
        advice = "start fewer: default_workers_per_model, or minWorkers of the archives"
        return [Finding(FAILS, "memory", text, advice)]
    return [Finding(WORKS, "memory", text)]
