import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from modelyard.serve.errors import StartError
from modelyard.serve.settings import default_state_dir, load_settings, unknown_variables


def write(folder: Path, text: str) -> Path:
    file = folder / "modelyard.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_the_command_line_wins_over_environment_file_and_default(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 1\nmanagement_port: 2\nmetrics_port: 3\n")
    environment = {"MODELYARD_PORT": "11", "MODELYARD_MANAGEMENT_PORT": "12"}
    settings = load_settings({"port": 21, "management_port": None}, file, environment)
    assert (settings.port, settings.management_port, settings.metrics_port) == (21, 12, 3)
    assert settings.queue_size == 100


def test_the_default_model_store_is_that_of_the_folder_where_it_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings({}, None, {}).model_store == tmp_path / "model_store"


def test_nothing_set_listens_on_loopback_only() -> None:
    settings = load_settings({}, None, {})
    assert settings.host == "127.0.0.1"
    assert settings.is_loopback
    assert settings.auth == "auto"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", "65536"),
        ("port", "-1"),
        ("port", "http"),
        ("device", "gpu"),
        ("device", "cuda:x"),
        ("auth", "sometimes"),
        ("workers", "-1"),
        ("queue_size", "0"),
        ("request_timeout_s", "0"),
        ("drain_timeout_s", "-1"),
        ("max_request_bytes", "0"),
        ("model_settings", "3"),
    ],
)
def test_a_wrong_value_is_named_wherever_it_comes_from(
    tmp_path: Path, field: str, value: str
) -> None:
    sources: list[tuple[dict[str, Any], Path | None, dict[str, str]]] = [
        ({field: value}, None, {}),
        ({}, write(tmp_path, f"{field}: {value}\n"), {}),
        ({}, None, {f"MODELYARD_{field.upper()}": value}),
    ]
    names = (
        f"--{field.replace('_', '-')}",
        f"{field} in {tmp_path / 'modelyard.yaml'}",
        f"MODELYARD_{field.upper()}",
    )
    for name, (command_line, file, environment) in zip(names, sources, strict=True):
        with pytest.raises(StartError, match=f"wrong settings: {name}: .*got '?{value}'?"):
            load_settings(command_line, file, environment)


def test_every_wrong_value_is_named_at_once() -> None:
    with pytest.raises(StartError, match=r"--port: .*; --workers: "):
        load_settings({"port": -1, "workers": -1}, None, {})


def test_an_unknown_name_in_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        StartError, match=r"portt in .*: there is no such setting; did you mean port\?"
    ):
        load_settings({}, write(tmp_path, "portt: 8080\n"), {})
    with pytest.raises(StartError, match=r"8080 in .*yaml: there is no such setting$"):
        load_settings({}, write(tmp_path, "8080: port\n"), {})


@pytest.mark.parametrize("text", ["- port\n", "port\n", "7\n"])
def test_a_file_without_names_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(StartError, match="holds no `name: value` lines"):
        load_settings({}, write(tmp_path, text), {})


@pytest.mark.parametrize("text", ["a: [", "!!python/object/apply:os.getcwd []\n"])
def test_a_file_that_is_no_safe_yaml_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(StartError, match="cannot read the configuration file"):
        load_settings({}, write(tmp_path, text), {})


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file"):
        load_settings({}, tmp_path / "nowhere.yaml", {})


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert load_settings({}, write(tmp_path, ""), {}) == load_settings({}, None, {})


@pytest.mark.parametrize("text", ["a,b=c.mar", "a b=c.mar", "a, b=c.mar"])
def test_models_are_split_at_commas_and_spaces(text: str) -> None:
    settings = load_settings({}, None, {"MODELYARD_MODELS": text})
    assert settings.models == ("a", "b=c.mar")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.1", False),
        ("localhost.example.org", False),
    ],
)
def test_only_loopback_addresses_are_loopback(host: str, expected: bool) -> None:
    assert load_settings({"host": host}, None, {}).is_loopback is expected


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_settings({}, None, {}).port = 1


def test_the_state_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / "modelyard"
    assert load_settings({}, None, {}).state_dir == tmp_path / "modelyard"


def test_relative_folders_are_taken_from_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings({"model_store": Path("store")}, None, {})
    assert settings.model_store == tmp_path / "store"


def test_settings_of_models_are_a_mapping_in_a_file_and_yaml_in_the_environment(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, "model_settings:\n  m: {minWorkers: 2}\n")
    assert load_settings({}, file, {}).model_settings == {"m": {"minWorkers": 2}}
    environment = {"MODELYARD_MODEL_SETTINGS": "{m: {batchSize: 4}}"}
    assert load_settings({}, file, environment).model_settings == {"m": {"batchSize": 4}}
    with pytest.raises(StartError, match=r"MODEL_SETTINGS: not valid YAML: line 1, column 2"):
        load_settings({}, None, {"MODELYARD_MODEL_SETTINGS": "{"})


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "null", "https://*.x"])
def test_an_origin_is_a_scheme_a_host_and_a_port(origin: str) -> None:
    with pytest.raises(
        StartError, match=rf"expected an origin, as in https.*got .{re.escape(origin)}"
    ):
        load_settings({"allowed_origins": (origin,)}, None, {})


def test_every_page_may_not_do_everything_by_mistake() -> None:
    both = {"allowed_origins": "*", "auth": "never"}
    with pytest.raises(StartError, match="let every web page replace the models"):
        load_settings(both, None, {})
    assert load_settings({**both, "insecure": True}, None, {}).allowed_origins == ("*",)
    assert load_settings({"allowed_origins": "*"}, None, {}).auth == "auto"


def test_broken_yaml_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"yaml: line 2, column 3: expected ',' or '\]'"):
        load_settings({}, write(tmp_path, "a: [\n b"), {})


def test_a_variable_that_sets_nothing_is_named_with_the_one_that_is_meant() -> None:
    environment = {
        "MODELYARD_WORKRS": "3", "MODELYARD_ZZZ": "1", "MODELYARD_PORT": "1", "OTHER": "1",
        "MODELYARD_TOKEN": "of the commands", "MODELYARD_SIGNING_KEY": "of the archiver",
    }  # fmt: skip
    assert unknown_variables(environment) == [
        "the variable MODELYARD_WORKRS is not a setting and has no effect; "
        "did you mean MODELYARD_WORKERS?",
        "the variable MODELYARD_ZZZ is not a setting and has no effect",
    ]
