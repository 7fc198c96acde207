"""Whose word counts in TorchServe's dialect, and what a wrong value does there."""

from __future__ import annotations

import json
import logging
import zipfile
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver import open_archive
from modelyard.archiver.model_config import OPERATORS_KEYS, OTHERS_KEYS, SERVERS_KEYS
from modelyard.plugins.torchserve import policy
from modelyard.plugins.torchserve.policy import load_torchserve_config
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve.control.model_config import ModelConfig, ModelSpec, Options
from modelyard.serve.errors import BadModelConfig
from modelyard.serve.settings import Settings
from tests.serve.test_model_config import keys_read


def load(
    folder: Path,
    yaml: str | None = None,
    listed: dict[str, Any] | None = None,
    at_start: bool = False,
    settings: dict[str, Any] | None = None,
    batch_delay: str = "busy",
    **said: Any,
) -> ModelConfig:
    """Read the configuration of an archive with this file, in TorchServe's dialect."""
    model = {"modelName": "m", "handler": "h.py"}
    with zipfile.ZipFile(folder / "m.mar", "w") as zipped:
        if yaml is not None:
            model["configFile"] = "c.yaml"
            zipped.writestr("c.yaml", yaml)
        zipped.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
    dialect = TorchServeSettings.model_validate(
        {"directory": folder, "models": {"m": {"1.0": listed or {}}}, "batch_delay": batch_delay}
    )
    common = Settings.model_validate({"device": "cpu", **(settings or {})})
    spec = ModelSpec("m.mar", options=Options(**said), at_start=at_start)
    with open_archive(folder / "m.mar") as archive:
        return load_torchserve_config(archive, common, dialect, spec, "m")


def test_torchserves_defaults(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.batch_size, config.batch_delay_ms, config.workers) == (1, 100, 0)
    assert (config.response_timeout_s, config.startup_timeout_s) == (120, 120)
    assert (config.queue_size, config.retry_s) == (100, 300)
    assert config.request_timeout_s == float("inf")


@pytest.mark.parametrize(
    ("server", "yaml", "gathers_bursts"),
    [
        ("busy", None, True),
        ("always", None, False),
        ("busy", "batchDelay: always", False),
        ("always", "batchDelay: busy", True),
    ],
)
def test_the_delay_is_waited_out_only_where_somebody_says_so(
    tmp_path: Path, server: str, yaml: str | None, gathers_bursts: bool
) -> None:
    config = load(tmp_path, yaml, batch_delay=server)
    assert config.gathers_bursts == gathers_bursts
    assert config.batch_delay_ms == 100


YAML = "batchSize: 3\nmaxBatchDelay: 30\nresponseTimeout: 33\nstartupTimeout: 34\n"
LISTED = {"batchSize": 5, "maxBatchDelay": 50, "responseTimeout": 55, "startupTimeout": 56}
SAID = {
    "batch_size": 7,
    "batch_delay_ms": 0,
    "response_timeout_s": 77,
    "startup_timeout_s": 78,
}


@pytest.mark.parametrize(
    ("yaml", "listed", "said", "expected"),
    [
        (YAML, LISTED, SAID, (7, 0, 33, 34)),
        (YAML, LISTED, {}, (3, 30, 33, 34)),
        (None, LISTED, SAID, (7, 0, 55, 56)),
        (None, LISTED, {}, (5, 50, 55, 56)),
        (None, {}, SAID, (7, 0, 77, 78)),
        ("topk: 3", {}, SAID, (7, 0, 77, 78)),
        (None, {}, {}, (1, 100, 21, 22)),
        (YAML, LISTED, {**SAID, "comes_first": True}, (7, 0, 77, 78)),
    ],
    ids=["all", "yaml", "api and models", "models", "api", "other keys", "server", "snapshot"],
)
def test_the_order_of_those_who_speak(
    tmp_path: Path,
    yaml: str | None,
    listed: dict[str, Any],
    said: dict[str, Any],
    expected: tuple[int, ...],
) -> None:
    server = {"response_timeout_s": 21, "startup_timeout_s": 22}
    config = load(tmp_path, yaml, listed, settings=server, **said)
    assert expected == (
        config.batch_size,
        config.batch_delay_ms,
        config.response_timeout_s,
        config.startup_timeout_s,
    )


@pytest.mark.parametrize(
    ("yaml", "listed", "at_start", "expected"),
    [
        ("minWorkers: 2\nmaxWorkers: 4", {"minWorkers": 1, "maxWorkers": 1}, True, (2, 4)),
        ("minWorkers: 2", {"minWorkers": 1, "maxWorkers": 3}, True, (1, 3)),
        ("minWorkers: 4\nmaxWorkers: 2", {}, True, (0, 0)),
        ("minWorkers: -4\nmaxWorkers: 2", {}, True, (1, 2)),
        (None, {"minWorkers": 1, "maxWorkers": 3}, True, (1, 3)),
        (None, {"minWorkers": 1, "maxWorkers": 3}, False, (0, 0)),
    ],
)
def test_workers_come_in_pairs(
    tmp_path: Path,
    yaml: str | None,
    listed: dict[str, Any],
    at_start: bool,
    expected: tuple[int, int],
) -> None:
    config = load(tmp_path, yaml, listed, at_start)
    assert (config.workers, config.most_workers) == expected


@pytest.mark.parametrize(
    "line",
    [
        "batchSize: many",
        "maxBatchDelay: -1",
        "responseTimeout: 0",
        "jobQueueSize: 0",
        "useJobTicket: 1",
        "minWorkers: one",
        "deviceType: tpu",
        "deviceIds: 3",
        "deviceIds: [64]",
        "parallelType: xx",
        "maxRetryTimeoutInSec: soon",
    ],
)
def test_a_value_of_the_wrong_type_is_warned_of_and_left_out(
    tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = load(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, line) == plain
    named = {"deviceIds: [64]": "Invalid deviceId:64", "deviceType: tpu": "Invalid deviceType: tpu"}
    assert named.get(line, line.partition(":")[0]) in caplog.text


@pytest.mark.parametrize(
    "yaml",
    [
        "sequenceBatching: true",
        "continuousBatching: true",
        "asyncCommunication: true",
        "parallelType: tp\nparallelLevel: 2",
        "parallelType: pp\ntorchrun:\n  nproc-per-node: 4",
        "no: [yaml",
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, yaml: str) -> None:
    with pytest.raises(BadModelConfig, match=yaml.partition(":")[0] if "no:" not in yaml else "c"):
        load(tmp_path, yaml)


def test_every_key_that_is_read_is_known() -> None:
    read = keys_read(policy)
    assert len(read) > 12
    assert read <= {*SERVERS_KEYS, *OPERATORS_KEYS, *OTHERS_KEYS}
    assert {*OTHERS_KEYS} - read <= {"sequenceBatching", "continuousBatching",
                                     "asyncCommunication", "batchDelay"}  # fmt: skip
