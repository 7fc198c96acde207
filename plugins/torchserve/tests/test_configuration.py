"""config.properties, environment and command line → settings."""

import json
import os
from math import inf
from pathlib import Path
from typing import Any

import pytest

from modelyard.plugins.torchserve.arguments import parse_command_line
from modelyard.plugins.torchserve.configuration import (
    BOOLEANS,
    INTEGERS,
    KEYS,
    LISTS,
    NOT_FROM_ENVIRONMENT,
    OF_EVERY_SERVER,
    WITHOUT_EFFECT,
    Configuration,
    load_configuration,
    parse_address,
)
from modelyard.plugins.torchserve.server import limit_gpus
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve.control.sizing import count_gpus
from modelyard.serve.errors import StartError
from modelyard.serve.settings import Address, Settings

MODEL: dict[str, Any] = {
    "defaultVersion": True,
    "marName": "mnist.mar",
    "minWorkers": 1,
    "maxWorkers": 5,
    "batchSize": 5,
    "maxBatchDelay": 200,
    "responseTimeout": 60,
}


def configure(folder: Path, text: str = "", *arguments: str, **environment: str) -> Configuration:
    file = folder / "named.properties"
    file.write_text(text, encoding="utf-8")
    given = parse_command_line(["--ncs", "--ts-config", str(file), *arguments])
    return load_configuration(given, environment, folder)


def settings(folder: Path, text: str = "", *arguments: str, **environment: str) -> Settings:
    return configure(folder, text, *arguments, **environment).settings


def own(folder: Path, text: str = "", *arguments: str, **environment: str) -> TorchServeSettings:
    return configure(folder, text, *arguments, **environment).dialect


# -- which file counts -------------------------------------------------------------------------


def test_the_file_of_the_environment_comes_before_the_named_one(tmp_path: Path) -> None:
    other = tmp_path / "other.properties"
    other.write_text("job_queue_size=7")
    assert settings(tmp_path, "job_queue_size=5", TS_CONFIG_FILE=str(other)).queue_size == 7


def test_config_properties_is_read_where_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.properties").write_text("job_queue_size=5")
    loaded = load_configuration(parse_command_line(["--ncs"]), {}, tmp_path)
    assert loaded.settings.queue_size == 5
    assert loaded.dialect.config_file == tmp_path / "config.properties"


def test_without_any_file_the_defaults_are_torchserves(tmp_path: Path) -> None:
    loaded = load_configuration(parse_command_line(["--ncs"]), {}, tmp_path)
    assert loaded.dialect.config_file is None
    assert [str(address) for address in loaded.dialect.addresses] == [
        "http://127.0.0.1:8080",
        "http://127.0.0.1:8081",
        "http://127.0.0.1:8082",
    ]
    dialect = loaded.dialect
    assert (loaded.settings.queue_size, loaded.settings.response_timeout_s) == (100, 120)
    assert dialect.metrics_mode == "log"
    assert dialect.disable_token_authorization is None
    assert not dialect.enable_model_api
    assert dialect.log_dir == dialect.metrics_dir == tmp_path / "logs"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_text_beyond_ascii_is_read_in_either_encoding(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "c.properties"
    file.write_bytes("default_service_handler=hänger".encode(encoding))
    given = parse_command_line(["--ncs", "--ts-config", str(file)])
    dialect = load_configuration(given, {}, tmp_path).dialect
    assert dialect.default_service_handler == "hänger"


# -- which value counts ------------------------------------------------------------------------


def test_the_command_line_comes_before_the_file(tmp_path: Path) -> None:
    found = settings(
        tmp_path, "model_store=one\nload_models=a", "--model-store", "two", "--models", "b", "c,d"
    )
    assert found.model_store == tmp_path / "two"
    assert found.models == ("b", "c", "d")


def test_the_environment_counts_only_where_the_file_says_so(tmp_path: Path) -> None:
    environment = {"TS_JOB_QUEUE_SIZE": "9", "TS_LOAD_MODELS": "z", "TS_IO_RATIO": "no"}
    text = "job_queue_size=5\n"
    assert settings(tmp_path, text, **environment).queue_size == 5
    allowed = settings(
        tmp_path, text + "enable_envvars_config=TRUE", "--models", "a", **environment
    )
    assert (allowed.queue_size, allowed.models) == (9, ("z",))


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("TS_TOKEN_EXPIRATION_TIME_MIN", "1.5", "token_expiration_min", 1.5),
        ("TS_HEADER_KEY_SEQUENCE_ID", "x-seq", "ts_header_key_sequence_id", "x-seq"),
        ("TS_DISABLE_TOKEN_AUTHORIZATION", "true", "disable_token_authorization", True),
        ("TS_ENABLE_MODEL_API", "true", "enable_model_api", True),
        ("TS_METRICS_MODE", "prometheus", "metrics_mode", "prometheus"),
        ("TS_MODELS", '{"a": {}}', "models", {}),
        ("TS_ALLOWED_URLS", "https://x/.*", "allowed_urls", ()),
    ],
)
def test_variables_and_the_few_that_do_not_follow_the_rule(
    tmp_path: Path, variable: str, value: str, field: str, expected: object
) -> None:
    found = own(tmp_path, "enable_envvars_config=true", **{variable: value})
    assert getattr(found, field) == expected


def test_allowed_urls_come_from_the_environment_only_with_a_second_key(tmp_path: Path) -> None:
    text = "enable_envvars_config=true\nuse_env_allowed_urls=true\nallowed_urls=file:///a"
    found = own(tmp_path, text, TS_ALLOWED_URLS="https://x/.*,http://y/.*")
    assert found.allowed_urls == ("https://x/.*", "http://y/.*")


def test_no_url_is_allowed_unless_the_configuration_or_its_default_says_so(tmp_path: Path) -> None:
    assert own(tmp_path).allowed_urls == ()
    default = {"MODELYARD_ALLOWED_URLS": "https://x/.*"}
    assert own(tmp_path, **default).allowed_urls == ("https://x/.*",)
    assert own(tmp_path, "allowed_urls=https://y/.*", **default).allowed_urls == ("https://y/.*",)


def test_the_open_inference_protocol_is_always_read_from_the_environment(tmp_path: Path) -> None:
    assert own(tmp_path, TS_OPEN_INFERENCE_PROTOCOL="oip").ts_open_inference_protocol == "oip"


def test_the_two_switches_only_turn_things_on(tmp_path: Path) -> None:
    text = "enable_model_api=false\ndisable_token_authorization=false"
    off = own(tmp_path, text)
    assert (off.enable_model_api, off.disable_token_authorization) == (False, False)
    on = own(tmp_path, text, "--enable-model-api", "--disable-token-auth")
    assert (on.enable_model_api, on.disable_token_authorization) == (True, True)
    assert own(tmp_path, "enable_model_api=true").enable_model_api


def test_variables_in_values_are_filled_in(tmp_path: Path) -> None:
    assert settings(tmp_path, "job_queue_size=$$SIZE$$", SIZE="3").queue_size == 3
    with pytest.raises(StartError, match="Invalid Environment Variable SIZE"):
        settings(tmp_path, "job_queue_size=$$SIZE$$")


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", sorted(INTEGERS))
def test_a_number_that_is_none_stops_the_start(tmp_path: Path, key: str) -> None:
    for text in ("many", "1.5", "", str(INTEGERS[key] - 1)):
        with pytest.raises(StartError, match=f"{key}: expected a whole number from"):
            settings(tmp_path, f"{key}={text}")


@pytest.mark.parametrize("key", sorted(BOOLEANS))
def test_a_boolean_is_true_for_true_alone(tmp_path: Path, key: str) -> None:
    assert not any("expected" in note for note in configure(tmp_path, f"{key}=True").notices)
    loaded = configure(tmp_path, f"{key}=yes")
    assert f"{key}: expected true or false, got 'yes'; it is false" in loaded.notices


def test_every_key_is_honoured_or_said_to_have_no_effect() -> None:
    elsewhere = {
        "allowed_hosts",
        "debug",
        "default_response_timeout",
        "default_startup_timeout",
        "enable_envvars_config",
        "install_py_dep_per_model",
        "job_queue_size",
        "keystore_type",
        "load_models",
        "max_request_size",
        "model_store",
        "use_env_allowed_urls",
    }
    only_in_snapshots = {"model_server_home", "python", "tsConfigFile", "version"}
    fields = set(TorchServeSettings.model_fields) | OF_EVERY_SERVER | LISTS
    assert (KEYS & fields) | set(WITHOUT_EFFECT) | elsewhere | only_in_snapshots == KEYS
    assert NOT_FROM_ENVIRONMENT <= KEYS


def test_walls_are_as_everywhere_but_for_files(tmp_path: Path) -> None:
    assert settings(tmp_path, "").files == "all"
    text = "files=own\nnetwork=none\nrequire_sandbox=true\npass_variables=A, B_*\nread_paths=/data"
    closed = settings(tmp_path, text)
    assert (closed.files, closed.network, closed.require_sandbox) == ("own", "none", True)
    assert closed.pass_variables == ("A", "B_*") and closed.read_paths == (Path("/data"),)
    assert settings(tmp_path, "sandbox=yes").sandbox
    with pytest.raises(StartError, match=r"sandbox: .*'maybe'"):
        settings(tmp_path, "sandbox=maybe")


def test_it_drains_as_every_server(tmp_path: Path) -> None:
    assert settings(tmp_path, "drain_delay_s=5.5").drain_delay_s == 5.5
    with pytest.raises(StartError, match=r"drain_delay_s: .*'soon'"):
        settings(tmp_path, "drain_delay_s=soon")


def test_where_grpc_listens(tmp_path: Path) -> None:
    default = own(tmp_path)
    assert default.grpc_addresses == (Address("127.0.0.1", 7070), Address("127.0.0.1", 7071))
    assert default.grpc_ages == ((inf, inf), (inf, inf))
    text = (
        "inference_address=http://0.0.0.0:80\ngrpc_inference_address=0.0.0.0\n"
        "grpc_inference_port=9000\ngrpc_management_address=[::1]\nenable_grpc_ssl=true\n"
        "grpc_inference_max_connection_age_ms=1500\n"
        "grpc_management_max_connection_age_grace_ms=200\n"
    )
    set_by_file = own(tmp_path, text)
    assert set_by_file.grpc_addresses == (
        Address("0.0.0.0", 9000, is_tls=True), Address("::1", 7071, is_tls=True)
    )  # fmt: skip
    assert set_by_file.grpc_ages == ((1.5, inf), (inf, 0.2))
    assert configure(tmp_path, text).notices == []
    by_variable = own(tmp_path, "enable_envvars_config=true", TS_GRPC_INFERENCE_PORT="9001")
    assert by_variable.grpc_inference_port == 9001


@pytest.mark.parametrize("key", ["io_ratio", "number_of_netty_threads"])
def test_a_key_without_effect_is_accepted_and_the_log_says_why(tmp_path: Path, key: str) -> None:
    assert any(
        note.startswith(f"{key} has no effect:") for note in configure(tmp_path, f"{key}=1").notices
    )


def test_an_unknown_key_is_named_with_the_one_that_was_meant(tmp_path: Path) -> None:
    (note,) = configure(tmp_path, "job_queue_siz=4").notices
    assert note.endswith("did you mean job_queue_size?")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models={", "models: expected JSON"),
        ('models={"a": 1}', "models.a"),
        ("model_snapshot=[]", "expected a JSON object"),
        ("token_expiration_min=soon", "token_expiration_min"),
        ("service_envelope=box", "service_envelope"),
        ("allowed_urls=http://(", "not a regular expression"),
        ("blacklist_env_vars=[", "not a regular expression"),
        ("certificate_file=c.pem", "go together"),
        ("grpc_inference_address=http://0.0.0.0", "grpc_inference_address: .*without http"),
        ("grpc_management_port=70000", "grpc_management_port"),
        ("grpc_inference_port=none", "whole number"),
        ("grpc_inference_max_connection_age_ms=0", "whole number"),
        ("keystore=no.p12", "keystore: file not found"),
        ("keystore_type=JKS", "expected PKCS12"),
        ("metrics_config=no.yaml", "metrics_config: file not found"),
    ],
)
def test_a_wrong_value_stops_the_start(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(StartError, match=message):
        settings(tmp_path, text)


def test_an_unknown_metrics_mode_is_log(tmp_path: Path) -> None:
    loaded = configure(tmp_path, "metrics_mode=graphite")
    assert loaded.dialect.metrics_mode == "log"
    assert loaded.notices


def test_no_gpu_means_the_cpu(tmp_path: Path) -> None:
    assert settings(tmp_path, "number_of_gpu=0").device == "cpu"
    assert settings(tmp_path).device == "auto"


@pytest.mark.parametrize(
    ("visible", "count", "left"),
    [("4,5,6", 2, "4,5"), ("4", 2, "4"), ("", 2, ""), ("4,5", 0, "")],
)
def test_fewer_gpus_than_there_are(
    visible: str, count: int, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    limit_gpus(count)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left
    assert count_gpus() == len(left.replace(",", ""))


# -- addresses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("inference_address", "http://0.0.0.0:8085", Address("0.0.0.0", 8085)),
        ("inference_address", "http://host", Address("host", 80)),
        ("inference_address", "HTTPS://host", Address("host", 443, is_tls=True)),
        ("management_address", "http://host", Address("host", 8081)),
        ("management_address", "https://host", Address("host", 8444, is_tls=True)),
        ("metrics_address", "http://host", Address("host", 8082)),
        ("metrics_address", "https://host", Address("host", 8445, is_tls=True)),
        ("metrics_address", "unix:/tmp/m.sock", Address(path=Path("/tmp/m.sock"))),
        ("metrics_address", "http://[::1]:1", Address("::1", 1)),
    ],
)
def test_addresses(key: str, text: str, expected: Address) -> None:
    assert parse_address(key, text) == expected


@pytest.mark.parametrize("text", ["foo", "host:80", "ftp://h", "http://", "http://h/x", "unix:m"])
def test_what_is_no_address_is_refused_in_torchserves_words(tmp_path: Path, text: str) -> None:
    with pytest.raises(StartError, match=f"Invalid binding address: {text}"):
        settings(tmp_path, f"metrics_address={text}")


def test_a_port_beyond_the_last_is_refused() -> None:
    with pytest.raises(StartError, match="Invalid port number"):
        parse_address("inference_address", "http://h:65536")


# -- snapshots ---------------------------------------------------------------------------------


def snapshot(folder: Path, stamp: str, text: str) -> Path:
    file = folder / "logs" / "config" / f"{stamp}-shutdown.cfg"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def model_snapshot(**models: Any) -> str:
    return "model_snapshot=" + json.dumps({"modelCount": len(models), "models": models})


def test_the_newest_snapshot_replaces_config_properties(tmp_path: Path) -> None:
    (tmp_path / "config.properties").write_text("job_queue_size=5\nmax_request_size=5")
    snapshot(tmp_path, "20260101000000000", "job_queue_size=6\n" + model_snapshot())
    newest = snapshot(
        tmp_path, "20260102000000000", "job_queue_size=7\n" + model_snapshot(a={"1.0": MODEL})
    )
    snapshot(tmp_path, "no-time", "job_queue_size=8")
    loaded = load_configuration(parse_command_line(["--models", "b"]), {}, tmp_path)
    assert loaded.dialect.config_file == newest
    assert (loaded.settings.queue_size, loaded.settings.max_request_bytes) == (7, 6_553_500)
    assert loaded.dialect.model_snapshot is not None
    assert any("restoring" in note and "--ncs" in note for note in loaded.notices)


@pytest.mark.parametrize("broken", ["", "model_snapshot={", 'model_snapshot={"models": 1}'])
def test_a_damaged_snapshot_gives_way_to_the_one_before_it(tmp_path: Path, broken: str) -> None:
    before = snapshot(tmp_path, "20260101000000000", model_snapshot())
    snapshot(tmp_path, "20260102000000000", broken)
    loaded = load_configuration(parse_command_line([]), {}, tmp_path)
    assert loaded.dialect.config_file == before
    assert "cannot be restored" in loaded.notices[0]


@pytest.mark.parametrize("arguments", [["--ncs"], ["--ts-config", "named.properties"]])
def test_no_snapshot_is_restored_over_a_named_file_or_with_ncs(
    tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "named.properties").write_text("job_queue_size=5")
    (tmp_path / "config.properties").write_text("job_queue_size=5")
    snapshot(tmp_path, "20260101000000000", "job_queue_size=7\n" + model_snapshot())
    loaded = load_configuration(parse_command_line(arguments), {}, tmp_path)
    assert loaded.settings.queue_size == 5


def test_a_snapshot_in_a_named_file_is_read_even_with_ncs(tmp_path: Path) -> None:
    text = r"""
inference_address=http\://0.0.0.0\:8085
model_snapshot={"name":"startup.cfg","modelCount":1,"models":{"mnist":{"1.0":{\
  "defaultVersion":true,"marName":"mnist.mar","minWorkers":1,"maxWorkers":5,\
  "batchSize":5,"maxBatchDelay":200,"responseTimeout":60}}}}
"""
    found = own(tmp_path, text).model_snapshot
    assert found is not None and found["models"]["mnist"]["1.0"] == MODEL


@pytest.mark.parametrize("key", ["defaultVersion", "marName", "minWorkers", "batchSize"])
def test_a_snapshot_without_a_required_key_is_refused(tmp_path: Path, key: str) -> None:
    entry = {name: value for name, value in MODEL.items() if name != key}
    with pytest.raises(StartError, match=f"mnist 1.0: {key}: expected"):
        settings(tmp_path, model_snapshot(mnist={"1.0": entry}))


def test_a_count_of_zero_loads_nothing(tmp_path: Path) -> None:
    text = "model_snapshot=" + json.dumps({"modelCount": 0, "models": {"a": {"1": {}}}})
    assert own(tmp_path, text).model_snapshot is not None
