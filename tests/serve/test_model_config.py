import hashlib
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from modelyard.archiver import open_archive, write_archive
from modelyard.archiver.model_config import OPERATORS_KEYS, SERVERS_KEYS
from modelyard.serve.control import model_config
from modelyard.serve.control.model_config import (
    DEFAULT_BATCH_SIZE,
    ModelConfig,
    load_model_config,
    proven_batch,
)
from modelyard.serve.errors import BadModelConfig
from modelyard.serve.settings import Settings, load_settings

Load = Callable[..., ModelConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write an archive as TorchServe's archiver does, with this model-config.yaml, and read it."""

    def read(text: str | None, config_file: str | None = "c.yaml", **set_: Any) -> ModelConfig:
        model = {"modelName": "m", "handler": "h.py", "modelVersion": "1.0"}
        if config_file is not None:
            model["configFile"] = config_file
        file = tmp_path / "m.mar"
        with zipfile.ZipFile(file, "w") as zipped:
            manifest = {"runtime": "python", "model": model, "archiverVersion": "0.12.0"}
            zipped.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
            zipped.writestr("h.py", "")
            if text is not None:
                zipped.writestr("c.yaml", text)
        settings: Settings = load_settings(set_, None, {})
        with open_archive(file) as archive:
            return load_model_config(archive, settings)

    return read


def test_torchserves_keys_say_how_a_model_is_run(load: Load) -> None:
    text = (
        "minWorkers: 3\nmaxWorkers: 5\nbatchSize: 4\nmaxBatchDelay: 50\njobQueueSize: 7\n"
        "responseTimeout: 9\nstartupTimeout: 11\nclientTimeoutInMills: 1500\n"
        "deviceType: cpu\nretry: false\nworkerThreads: 2\n"
    )
    assert load(text, device="cuda") == ModelConfig(
        workers=3,
        most_workers=5,
        network="all",
        batch_size=4,
        batch_delay_ms=50,
        queue_size=7,
        request_timeout_s=1.5,
        response_timeout_s=9,
        startup_timeout_s=11,
        device="cpu",
        retry=False,
        threads=2,
    )


@pytest.mark.parametrize(
    ("text", "call_bytes"), [("", None), ("batchBy: arrival", None), ("batchBy: length", 48)]
)
def test_batches_are_of_like_length_where_the_archive_asks(
    load: Load, text: str, call_bytes: int | None
) -> None:
    assert load(text).call_bytes == call_bytes


def test_a_call_costs_more_on_a_gpu(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert load("batchBy: length", device="cuda").call_bytes == 8192
    assert load("batchBy: length\ndeviceType: cpu", device="cuda").call_bytes == 48


@pytest.mark.parametrize(
    ("handler", "text", "by_length"),
    [
        ("text", "{}\n", True),
        ("text", "batchBy: arrival\n", False),
        ("tabular", "{}\n", False),
    ],
)
def test_the_built_in_handlers_of_texts_ask_for_batches_of_like_length(
    tmp_path: Path, handler: str, text: str, by_length: bool
) -> None:
    artifact, config = tmp_path / "weights.bin", tmp_path / "model-config.yaml"
    artifact.write_bytes(b"none")
    config.write_text(text)
    file = write_archive("m", version="1.0", artifact=artifact, handler=handler,
                         output_dir=tmp_path, config_file=config)  # fmt: skip
    with open_archive(file) as archive:
        assert load_model_config(archive, load_settings({}, None, {})).by_length is by_length


def test_the_setting_model_settings_goes_before_the_archive(load: Load) -> None:
    over = {"m": {"batchSize": 2, "workerThreads": 3}, "other": {"batchSize": 5}}
    config = load("batchSize: 4\njobQueueSize: 7\nhandler: {of: its own}", model_settings=over)
    assert (config.batch_size, config.threads, config.queue_size) == (2, 3, 7)
    assert config.origins["batchSize"] == "batchSize of the setting model_settings"
    assert config.origins["jobQueueSize"] == "jobQueueSize of c.yaml"


def test_a_wrong_model_setting_is_named(load: Load) -> None:
    with pytest.raises(BadModelConfig, match="model_settings: batchSize: expected"):
        load("{}", model_settings={"m": {"batchSize": 0}})
    with pytest.raises(
        BadModelConfig, match="the server reads no batchsize; it reads artifact, batchBy, "
    ):
        load("{}", model_settings={"m": {"batchsize": 1}})


@pytest.mark.parametrize(("text", "config_file"), [("", "c.yaml"), ("{}", "c.yaml"), (None, None)])
def test_what_is_not_said_comes_from_the_settings(
    load: Load, text: str | None, config_file: str | None
) -> None:
    config = load(text, config_file, queue_size=5, request_timeout_s=7, device="cuda:1")
    assert (config.queue_size, config.request_timeout_s, config.device) == (5, 7, "cuda:1")
    assert config.batch_size == DEFAULT_BATCH_SIZE
    assert config.batch_delay_ms == 0
    assert config.retry is True


def test_only_what_has_a_reference_is_explained_unasked(load: Load) -> None:
    assert load("{}", explain_share=0.5).explain_share == 0
    with pytest.raises(
        BadModelConfig, match=r"explainShare is 0\.1, .* explainWorkers of 1 or more"
    ):
        load("explainShare: 0.1")
    with pytest.raises(BadModelConfig, match="needs a reference: archive it again with --referenc"):
        load("explainShare: 0.1\nexplainWorkers: 1")


def test_a_time_of_the_settings_may_be_a_fraction_of_a_second(load: Load) -> None:
    config = load("{}", response_timeout_s=0.5, startup_timeout_s=1.5)
    assert (config.response_timeout_s, config.startup_timeout_s) == (0.5, 1.5)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("batchSize: 0", "batchSize"),
        ("batchSize: many", "batchSize"),
        ("batchSize: 1.5", "batchSize"),
        ("batchSize: true", "batchSize"),
        ("batchSize: null", "batchSize"),
        ("minWorkers: -1", "minWorkers"),
        ("maxBatchDelay: [1]", "maxBatchDelay"),
        ("jobQueueSize: 0", "jobQueueSize"),
        ("responseTimeout: 0", "responseTimeout"),
        ("startupTimeout: 0", "startupTimeout"),
        ("clientTimeoutInMills: -1", "clientTimeoutInMills"),
        ("deviceType: tpu", "deviceType"),
        ("deviceType: [cpu]", "deviceType"),
        ("retry: maybe", "retry"),
        ("retry: 1", "retry"),
        ("workerThreads: -1", "workerThreads"),
        ("explainShare: 1.5", "explainShare"),
        ("explainShare: true", "explainShare"),
    ],
)
def test_a_wrong_value_is_named(load: Load, text: str, key: str) -> None:
    with pytest.raises(BadModelConfig, match=rf"c\.yaml: {key}: expected .*, got "):
        load(text)


@pytest.mark.parametrize(
    "text", ["- 1", "text", "a: [", "!!python/object/apply:os.getcwd []", "a: \x07"]
)
def test_a_file_that_is_no_safe_mapping_is_refused(load: Load, text: str) -> None:
    with pytest.raises(BadModelConfig, match=r"c\.yaml"):
        load(text)


def test_a_file_that_is_not_there_is_named(load: Load) -> None:
    with pytest.raises(BadModelConfig, match=r"c\.yaml, which the archive does not hold"):
        load(None, "c.yaml")


def test_a_batch_is_never_larger_than_the_export_proved(
    digits_store: Path, tmp_path: Path, digits_artifacts: dict[str, Path]
) -> None:
    from modelyard.archiver import write_archive

    config = tmp_path / "model-config.yaml"
    for asked, expected in ((4, 4), (8, 8), (64, 8)):
        config.write_text(f"batchSize: {asked}\n", encoding="utf-8")
        file = write_archive(
            "digits",
            version="1",
            artifact=digits_artifacts["pt2"],
            handler="image_classifier",
            output_dir=tmp_path,
            config_file=config,
            force=True,
        )
        with open_archive(file) as archive:
            assert load_model_config(archive, load_settings({}, None, {})).batch_size == expected


@pytest.mark.parametrize(
    ("batching", "largest"),
    [
        pytest.param({}, 5, id="an export that did not look"),
        pytest.param({"batching": {"batchable": True, "reason": "alone"}}, 5, id="batchable"),
        pytest.param({"batching": {"batchable": False, "reason": "rows mix"}}, 1, id="rows mix"),
    ],
)
def test_a_model_whose_rows_mix_is_served_one_request_at_a_time(
    batching: dict[str, Any], largest: int, tmp_path: Path
) -> None:
    signature = {
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 2]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 2]}],
        "dims": {"batch": {"min": 1, "max": 5}},
        **batching,
    }
    manifest = {
        "runtime": "python",
        "model": {"modelName": "m", "handler": "h.py", "modelVersion": "1.0"},
        "modelyard": {
            "schema": 1,
            "digests": {"h.py": hashlib.sha256(b"").hexdigest()},
            "report": None,
            "signature": signature,
            "explain": None,
            "golden": [],
            "requirements": [],
        },
    }
    with zipfile.ZipFile(tmp_path / "m.mar", "w") as zipped:
        zipped.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        zipped.writestr("h.py", "")
    with open_archive(tmp_path / "m.mar") as archive:
        assert proven_batch(archive) == largest
        assert load_model_config(archive, load_settings({}, None, {})).batch_size == largest


def test_what_a_model_reaches_is_for_the_operator_to_say(load: Load) -> None:
    claimed = load("network: all\nfiles: all\n", network="none")
    assert (claimed.network, claimed.files) == ("none", "own")
    opened = load("{}", network="none", model_settings={"m": {"network": "all", "files": "all"}})
    assert (opened.network, opened.files) == ("all", "all")
    with pytest.raises(BadModelConfig, match="network: expected none or all, got 'some'"):
        load("{}", model_settings={"m": {"network": "some"}})


def keys_read(*modules: ModuleType) -> set[str]:
    """Return the keys of a configuration that these modules ask for."""
    sources = (Path(str(module.__file__)).read_text() for module in modules)
    pattern = r'(?:values|listed)\.[a-z_.]+\(\s*"([a-zA-Z]+)"'
    return {key for source in sources for key in re.findall(pattern, source)}


def test_every_key_that_is_read_is_known() -> None:
    read = keys_read(model_config)
    known = {*SERVERS_KEYS, *OPERATORS_KEYS}
    assert len(read) > 18
    assert known - read <= {"tunedCosts"}
    assert read <= known
