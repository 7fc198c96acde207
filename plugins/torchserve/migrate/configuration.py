"""The configuration of an installation → findings; `torchserve` reads it by the same functions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

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
from modelyard.plugins.torchserve.migrate.findings import (
    CHANGES,
    FAILS,
    WORKS,
    Finding,
    warnings_of_readers,
)
from modelyard.serve.errors import StartError

LOST = {"plugins_path"}
"""Keys without effect whose work nothing here does."""


def read_configuration(
    options: CommandLine, environment: Mapping[str, str], directory: Path
) -> tuple[Configuration, list[Finding]]:
    """Return what `torchserve` would start with, and what is to be said of it.

    A configuration with which it would not start is passed over; the models are looked at with
    the defaults then.
    """
    # The file that is named here counts, whatever the environment names.
    variables = {key: value for key, value in environment.items() if key != "TS_CONFIG_FILE"}
    try:
        configuration = load_configuration(options, variables, directory)
    except StartError as error:
        without = CommandLine(**{**vars(options), "ts_config": os.devnull})
        advice = "the start ends with this; mend it first: its other keys were not looked at"
        found = [Finding(FAILS, *_split(str(error)), advice)]
        return load_configuration(without, variables, directory), found
    return configuration, list(_examine(configuration, variables))


def _examine(configuration: Configuration, environment: Mapping[str, str]) -> Iterator[Finding]:
    own = configuration.dialect
    used = sorted(own.properties.keys() & KEYS - WITHOUT_EFFECT.keys())
    if used:
        yield Finding(WORKS, "keys", "mean what they did: " + ", ".join(used))
    for notice in configuration.notices:
        subject, text = _split(notice)
        yield Finding(FAILS if subject in LOST else CHANGES, subject, text)
    yield from _tokens(configuration)
    if not own.allowed_urls:
        yield Finding(
            CHANGES,
            "allowed_urls",
            "no model is fetched by URL; without the key TorchServe takes any URL",
            f"name the URLs in allowed_urls, or in the variable {DEFAULT_URLS}",
        )
    ports = " and ".join(str(address.port) for address in own.grpc_addresses)
    yield Finding(WORKS, "gRPC", f"answered on ports {ports}, as TorchServe's clients call it")
    yield from _tls(configuration)
    yield from _logs(configuration, environment)
    try:
        TorchServeMetrics(own)
    except StartError as error:
        yield Finding(FAILS, "metrics_config", str(error))


def _tokens(configuration: Configuration) -> Iterator[Finding]:
    own = configuration.dialect
    if own.disable_token_authorization is None and own.inference_address.is_loopback:
        yield Finding(
            CHANGES,
            "tokens",
            "predictions from this machine need none; TorchServe 0.12 asks for one",
            "disable_token_authorization=false asks for it here too",
        )
    elif own.disable_token_authorization:
        yield Finding(WORKS, "tokens", "none are asked for, as the configuration says")
    else:
        yield Finding(WORKS, "tokens", "asked for, as by TorchServe; they are in key_file.json")


def _tls(configuration: Configuration) -> Iterator[Finding]:
    own = configuration.dialect
    try:
        with warnings_of_readers() as said:
            has_tls = read_tls(own) is not None
    except StartError as error:
        yield Finding(FAILS, "TLS", str(error))
        return
    yield from (Finding(CHANGES, "TLS", text) for text in said)
    if has_tls and not said:
        yield Finding(WORKS, "TLS", "certificate and key can be read, and fit each other")


def _logs(configuration: Configuration, environment: Mapping[str, str]) -> Iterator[Finding]:
    own = configuration.dialect
    file = find_log_config(None, own.properties.get("vmargs", ""), own.directory)
    if file is None:
        return
    try:
        _, unfollowed = read_log_config(file, environment, own.directory)
    except StartError as error:
        yield Finding(FAILS, "logs", str(error))
        return
    yield from (Finding(CHANGES, "logs", text) for text in unfollowed)
    if not unfollowed:
        yield Finding(WORKS, "logs", f"{file.name} is followed")


def _split(text: str) -> tuple[str, str]:
    """Return the key that a sentence begins with, and the rest of it."""
    if match := re.fullmatch(r"(\w+)(?:: | (?=has no effect|is not a key))(.*)", text, re.DOTALL):
        return match[1], match[2]
    return "configuration", text
