"""Keys of `model-config.yaml`: which of them mean something, and where."""

from collections.abc import Mapping
from typing import Any

from modelyard.archiver.untrusted.yaml import parse_yaml
from modelyard.base.nearest import did_you_mean

BATCH_INVARIANT = "batchInvariant"
HANDLERS_KEYS = ("handler", "pt2", "onnx", BATCH_INVARIANT)
"""What the worker reads."""
SERVERS_KEYS = (
    *("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "jobQueueSize"),
    *("clientTimeoutInMills", "responseTimeout", "startupTimeout", "deviceType", "retry"),
    *("workerThreads", "batchBy", "explainWorkers", "explainShare", "artifact"),
    *("tunedRate", "tunedCosts"),
)
OPERATORS_KEYS = ("network", "files", "cacheAnswers", "cacheIgnores", "pinned")
"""What the setting `model_settings` may say, and an archive may not."""
OTHERS_KEYS = (
    *("deviceIds", "parallelType", "parallelLevel", "torchrun", "batchDelay"),
    *("useJobTicket", "useVenv", "maxRetryTimeoutInSec"),
    *("sequenceBatching", "continuousBatching", "asyncCommunication"),
)
"""What a server of another dialect reads, and ours does not."""
_KNOWN = (*HANDLERS_KEYS, *SERVERS_KEYS, *OTHERS_KEYS)


def parse_model_config(data: bytes, file: str) -> dict[str, Any]:
    """Parse a file of `key: value` lines; an empty one has no keys.

    Raises:
        ValueError: it is something else; the message names the file and the place.
    """
    try:
        config = parse_yaml(data)
    except ValueError as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from error
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise ValueError(f"{file}: expected `key: value` lines, got {type(config).__name__}")
    return config


def unknown_keys(config: Mapping[str, Any], file: str) -> list[str]:
    """Return a sentence for each key that nothing reads, with the one that was likely meant.

    What stands below `handler` is for the handler to judge, when it is loaded.
    """
    advice = "; leave it out, or put what the handler reads below `handler`"
    unknown = [str(key) for key in config if key not in _KNOWN and key not in OPERATORS_KEYS]
    read = "is not a key that the server reads"
    return [f"{file}: {key} {read}{did_you_mean(key, _KNOWN) or advice}" for key in unknown]


def keys_without_effect(config: Mapping[str, Any], file: str) -> list[str]:
    """Return a sentence for each key that means something, but not to `modelyard serve`."""
    only = {key: "the setting model_settings may say it" for key in OPERATORS_KEYS}
    only |= {key: "the command torchserve reads it" for key in OTHERS_KEYS}
    return [
        f"{file}: {key} has no effect with modelyard serve: only {only[key]}"
        for key in config
        if key in only
    ]
