"""config.properties, environment and command line → the server's settings.

A value is taken from the environment (where the file says `enable_envvars_config=true`), else the
command line, else the file, else it is TorchServe's default.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import getuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from modelyard.base.nearest import did_you_mean
from modelyard.plugins.torchserve.arguments import CommandLine
from modelyard.plugins.torchserve.properties import fill_variables, parse_properties
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.plugins.torchserve.snapshot import (
    SNAPSHOT_FOLDER,
    find_snapshots,
    parse_model_snapshot,
)
from modelyard.serve.errors import StartError
from modelyard.serve.settings import Address, Settings, describe_problems

if TYPE_CHECKING:
    from modelyard.serve.http.tls import TlsContext

_DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("keys.yaml").read_bytes())
INTEGERS: dict[str, int] = _DATA["integers"]
"""Key → the least that it may be."""
BOOLEANS = {*_DATA["booleans"]}
NOT_FROM_ENVIRONMENT = {*_DATA["not_from_environment"]}
WITHOUT_EFFECT: dict[str, str] = _DATA["without_effect"]
"""Keys that are accepted, and why nothing follows from them."""
OF_EVERY_SERVER, LISTS = {*_DATA["of_every_server"]}, {*_DATA["lists"]}
"""Keys that are settings of every server."""
KEYS = {
    *INTEGERS, *BOOLEANS, *OF_EVERY_SERVER, *LISTS, *_DATA["texts"], *WITHOUT_EFFECT,
    *(TorchServeSettings.model_fields.keys() - _DATA["places"]),
}  # fmt: skip
DEFAULT_URLS = "MODELYARD_ALLOWED_URLS"
"""Environment variable with `allowed_urls` for configurations that do not say it: TorchServe's own
default, any URL, is unsafe, and ours is none."""

ADDRESS = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9a-f:]+\]|[^:/]+)(:(?P<port>\d+))?|unix:(?P<path>/.*)",
    re.IGNORECASE,
)
HOST = re.compile(r"[\w.-]+|\[?[0-9A-Fa-f:.]+\]?")
PORTS = {
    "inference_address": (80, 443),
    "management_address": (8081, 8444),
    "metrics_address": (8082, 8445),
}
"""Ports where the address has none: of http, of https."""

FILES = ("certificate_file", "private_key_file", "keystore", "metrics_config")

UNLIMITED_S = 10 * 365 * 86400.0
"""TorchServe has no limit for the time that a request waits."""


@dataclass(frozen=True)
class Configuration:
    """What all sources together say."""

    settings: Settings
    dialect: TorchServeSettings
    notices: list[str]
    """Notices for the log, once there is one."""


def load_configuration(
    options: CommandLine, environment: Mapping[str, str], directory: Path
) -> Configuration:
    """Read every source.

    Args:
        options: those of the command line.
        environment: all environment variables.
        directory: where the command was called; relative paths start there.

    Raises:
        StartError: something is wrong; the message names the key.
    """
    notices: list[str] = []
    log_dir = directory / environment.get("LOG_LOCATION", "logs")
    file, values = _read(options, environment, directory, log_dir, notices)
    values |= _from_command_line(options)
    if _is_true(values.get("enable_envvars_config")):
        values |= _from_environment(values, environment)
    elif protocol := environment.get("TS_OPEN_INFERENCE_PROTOCOL"):
        values["ts_open_inference_protocol"] = protocol
    typed = dict(_typed(values, notices))
    own: dict[str, Any] = {
        key: typed[key] for key in typed.keys() & TorchServeSettings.model_fields.keys()
    }
    parsers: dict[str, Callable[[str, str], Any]] = dict.fromkeys(PORTS, parse_address)
    parsers |= dict.fromkeys(FILES, lambda key, text: directory / text)
    parsers |= dict.fromkeys(("models", "model_snapshot"), _parse_json)
    own |= {key: parse(key, own[key]) for key, parse in parsers.items() if key in own}
    if "model_snapshot" in own:
        parse_model_snapshot(own["model_snapshot"])
    own["allowed_urls"] = _split(typed.get("allowed_urls", environment.get(DEFAULT_URLS, "")))
    for key in ("allowed_urls", "blacklist_env_vars"):
        _check_patterns(key, own.get(key) or ())
    _check_tls(typed, own)
    for key in ("grpc_inference_address", "grpc_management_address"):
        if key in own and not HOST.fullmatch(own[key]):
            raise StartError(
                f"{key}: expected a host name or an IP address without http:// and port, "
                f"got {own[key]!r}"
            )
    if own.get("metrics_mode", "log") not in ("log", "prometheus", "legacy"):
        notices.append(f"metrics_mode: {own['metrics_mode']!r} is unknown; it is log")
        own["metrics_mode"] = "log"
    if typed.get("debug"):
        notices.append("debug: each model gets one worker; workers start by themselves")
        own["default_workers_per_model"] = 1
    snapshots = None if options.no_config_snapshots else log_dir / SNAPSHOT_FOLDER
    common = {
        "model_store": directory / typed.get("model_store", ""),
        "models": _split(typed.get("load_models", "")),
        "allowed_hosts": _split(typed.get("allowed_hosts", "")),
        "state_dir": Path(environment.get("TEMP") or tempfile.gettempdir())
        / f".modelyard-torchserve-{getuid()}",  # one server for each temp folder
        "device": "cpu" if typed.get("number_of_gpu") == 0 else None,
        "queue_size": typed.get("job_queue_size"),
        "request_timeout_s": UNLIMITED_S,
        "response_timeout_s": typed.get("default_response_timeout"),
        "startup_timeout_s": typed.get("default_startup_timeout"),
        "max_request_bytes": typed.get("max_request_size"),
        "install_requirements": typed.get("install_py_dep_per_model"),
        "files": typed.get("files", "all"),  # handlers write beside models, and read home folders
        **{key: typed[key] for key in OF_EVERY_SERVER & typed.keys()},
        **{key: _split(typed[key]) for key in LISTS & typed.keys()},
    }
    try:
        settings = Settings(**{key: value for key, value in common.items() if value is not None})
        dialect = TorchServeSettings(
            **own,
            properties=values,
            directory=directory,
            config_file=file,
            snapshot_dir=snapshots,
            log_dir=log_dir,
            metrics_dir=directory / environment.get("METRICS_LOCATION", "logs"),
        )
    except ValidationError as error:
        raise StartError(describe_problems(error)) from error
    return Configuration(settings, dialect, notices)


def parse_address(key: str, text: str) -> Address:
    """Read the address of one API.

    Raises:
        StartError: it is not an address, or its port is over 65535.
    """
    match = ADDRESS.fullmatch(text.strip())
    if match is None:
        raise StartError(
            f"Invalid binding address: {text} ({key} takes http[s]://host[:port] or unix:/path)"
        )
    if match["path"]:
        return Address(path=Path(match["path"]))
    is_tls = match["scheme"].lower() == "https"
    port = int(match["port"]) if match["port"] else PORTS[key][is_tls]
    if port > 65535:
        raise StartError(f"Invalid port number: {text}")
    return Address(match["host"].strip("[]"), port, is_tls=is_tls)


# -- the sources -------------------------------------------------------------------------------


def _read(
    options: CommandLine,
    environment: Mapping[str, str],
    directory: Path,
    log_dir: Path,
    notices: list[str],
) -> tuple[Path | None, dict[str, str]]:
    """Return the configuration file that counts, and what it says."""
    if named := environment.get("TS_CONFIG_FILE") or options.ts_config:
        return directory / named, _read_file(directory / named, environment)
    if not options.no_config_snapshots:
        for snapshot in find_snapshots(log_dir / SNAPSHOT_FOLDER):
            try:
                values = _read_file(snapshot, environment)
                parse_model_snapshot(_parse_json("model_snapshot", values["model_snapshot"]))
            except (StartError, KeyError) as error:
                notices.append(f"{snapshot} cannot be restored: {error}; trying the one before it")
                continue
            notices.append(
                f"restoring {snapshot}, its addresses, models and all; config.properties and "
                "--models have no effect. Start with --ncs to begin afresh"
            )
            return snapshot, values
    default = directory / "config.properties"
    return (default, _read_file(default, environment)) if default.is_file() else (None, {})


def _read_file(file: Path, environment: Mapping[str, str]) -> dict[str, str]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise StartError(f"Unable to read configuration file {file}: {error.strerror}") from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return fill_variables(parse_properties(text), environment)


def _from_command_line(options: CommandLine) -> dict[str, str]:
    keys = ("model_store", "workflow_store", "cpp_log_config", "plugins_path")
    values: dict[str, str | None] = {key: getattr(options, key) for key in keys} | {
        "load_models": ",".join(options.models) if options.models else None,
        "disable_token_authorization": "true" if options.disable_token_auth else None,
        "enable_model_api": "true" if options.enable_model_api else None,
    }
    return {key: value for key, value in values.items() if value is not None}


def _from_environment(values: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    barred = {*NOT_FROM_ENVIRONMENT, "allowed_urls"}
    if _is_true(values.get("use_env_allowed_urls")):
        barred.remove("allowed_urls")
    names = {key: _DATA["variables"].get(key, f"TS_{key.upper()}") for key in KEYS - barred}
    return {key: environment[name] for key, name in names.items() if name in environment}


# -- values ------------------------------------------------------------------------------------


def _typed(values: Mapping[str, str], notices: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield keys with values of their type, and say which keys have no effect."""
    for key, text in values.items():
        if key in WITHOUT_EFFECT:
            notices.append(f"{key} has no effect: {WITHOUT_EFFECT[key]}")
        if key in INTEGERS:
            yield key, _integer(key, text)
        elif key in BOOLEANS:
            if text.strip().lower() not in ("true", "false"):
                notices.append(f"{key}: expected true or false, got {text!r}; it is false")
            yield key, _is_true(text)
        elif key in KEYS:
            if text.strip():
                yield key, text.strip()
        else:
            near = did_you_mean(key, KEYS)
            notices.append(f"{key} is not a key of config.properties and has no effect{near}")


def _split(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))


def _integer(key: str, text: str) -> int:
    least = INTEGERS[key]
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise StartError(f"{key}: expected a whole number from {least} up, got {text!r}")
    return value


def _is_true(text: str | None) -> bool:
    return text is not None and text.strip().lower() == "true"


def _parse_json(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise StartError(f"{key}: expected JSON, {error}") from error


def _check_patterns(key: str, patterns: str | tuple[str, ...]) -> None:
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise StartError(f"{key}: {pattern!r} is not a regular expression: {error}") from error


def _check_tls(typed: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if ("certificate_file" in typed) != ("private_key_file" in typed):
        raise StartError("certificate_file and private_key_file go together; one is missing")
    if (kind := typed.get("keystore_type", "PKCS12")).upper() != "PKCS12":
        raise StartError(
            f"keystore_type: expected PKCS12, got {kind}; `keytool -importkeystore "
            "-deststoretype PKCS12` converts the keystore"
        )
    for key in FILES:
        if own.get(key) and not own[key].is_file():
            raise StartError(f"{key}: file not found: {own[key]}")


def read_tls(own: TorchServeSettings) -> Callable[[], "TlsContext"] | None:
    """Return what returns the context of the addresses with TLS; None where there are none.

    Raises:
        StartError: key or certificate cannot be used.
    """
    from modelyard.serve.http.tls import watched_tls

    hosts = [each.host for each in (*own.addresses, *own.grpc_addresses) if each.is_tls]
    files = own.certificate_file, own.private_key_file, own.keystore, own.keystore_pass
    return watched_tls(hosts, *files) if hosts else None
