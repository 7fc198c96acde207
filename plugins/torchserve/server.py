"""The server process that `torchserve --start` runs.

Started as `python -P -m modelyard.plugins.torchserve.server`.
"""

from __future__ import annotations

import itertools
import logging
import os
import stat
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from modelyard.plugins.torchserve import TORCHSERVE_VERSION, launcher
from modelyard.plugins.torchserve.arguments import parse_command_line
from modelyard.plugins.torchserve.configuration import (
    Configuration,
    load_configuration,
    read_tls,
)
from modelyard.plugins.torchserve.log4j import find_log_config, read_log_config
from modelyard.plugins.torchserve.log_config import default_config
from modelyard.plugins.torchserve.logs import Logs
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve.control.sizing import count_gpus, this_machine
from modelyard.serve.control.state import StateDir
from modelyard.serve.errors import StartError
from modelyard.serve.settings import Settings

logger = logging.getLogger("modelyard.plugins.torchserve.server")


def main() -> int:
    """Serve until SIGTERM; the arguments are a descriptor to write to at the start, and flags."""
    started, *arguments = sys.argv[1:]
    options = parse_command_line(arguments)
    try:
        configuration = load_configuration(options, os.environ, Path.cwd())
        own = configuration.dialect
        if own.certificate_file or own.keystore:
            read_tls(own)  # what it cannot use ends the start before the ports are named
        _claim(configuration.settings.state_dir)
        logs, unfollowed = _open_logs(options.log_config, own)
    except StartError as error:
        _print(f"Invalid configuration: {error}")
        return 1
    threading.current_thread().name = "main"
    if StateDir(configuration.settings.state_dir).is_locked():
        _print(launcher.ALREADY_RUNNING)
        return 1
    if own.number_of_gpu is not None:
        limit_gpus(own.number_of_gpu)
    logs.start()
    for notice in (*unfollowed, *configuration.notices):
        logger.warning("%s", notice)
    logger.info("\n%s", "\n".join(_describe(configuration, own)))
    if not own.disable_token_authorization:
        is_open = own.disable_token_authorization is None and own.inference_address.is_loopback
        logger.info(
            "requests need the keys of %s%s; --disable-token-auth lets everybody in",
            own.directory / "key_file.json",
            ", those for predictions from this machine none" if is_open else "",
        )

    def report(event: dict[str, Any]) -> None:
        if event["event"] == "locked":
            launcher.write_pid()
        elif event["event"] == "started":
            _print("Model server started.")
            if started != "-":
                os.write(int(started), b"1")
                os.close(int(started))
        elif event["event"] == "error":
            _print(event["message"])

    # The web framework, once it is sure to be needed.
    from modelyard.plugins.torchserve.app import create_server
    from modelyard.serve.server import run

    code = run(configuration.settings, report, partial(create_server, own, logs))
    logger.info("Torchserve stopped.")
    logs.close()
    launcher.remove_pid()
    return code


def limit_gpus(count: int) -> None:
    """Let this process, and the workers that inherit its environment, see the first GPUs only."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = map(str, range(count_gpus())) if visible is None else visible.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(itertools.islice(seen, count))


def _claim(folder: Path) -> None:
    """Make the server's folder in a temp folder where others may write too."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        there = folder.lstat()
    except OSError as error:
        raise StartError(f"cannot use the folder {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid():
        raise StartError(f"{folder} belongs to somebody else; set TEMP to a folder of your own")


def _open_logs(option: str | None, own: TorchServeSettings) -> tuple[Logs, list[str]]:
    """Open what is logged to; return also what of a log4j configuration is not followed."""
    config, unfollowed = default_config(own.log_dir, own.metrics_dir), list[str]()
    file = find_log_config(option, own.properties.get("vmargs", ""), own.directory)
    if file is not None:
        config, unfollowed = read_log_config(file, os.environ, own.directory)
    try:
        return Logs(config), unfollowed
    except OSError as error:
        raise StartError(
            f"cannot write logs to {error.filename}: {error.strerror}; LOG_LOCATION and "
            "METRICS_LOCATION name other folders"
        ) from error


def _describe(configuration: Configuration, own: TorchServeSettings) -> list[str]:
    """Return the lines of the start-up log that scripts search, in TorchServe's order."""
    settings: Settings = configuration.settings

    def written(key: str, default: object = "N/A") -> str:
        return own.properties.get(key) or str(default)

    machine = this_machine()
    facts: dict[str, object] = {
        "Torchserve version": TORCHSERVE_VERSION,
        "TS Home": Path(__file__).parents[2],
        "Current directory": own.directory,
        "Temp directory": settings.state_dir.parent,
        "Metrics config path": own.metrics_config or "N/A",
        "Number of GPUs": machine.gpus,
        "Number of CPUs": machine.cores,
        "Max heap size": "N/A",
        "Python executable": sys.executable,
        "Config file": configuration.dialect.config_file or "N/A",
        "Inference address": own.inference_address,
        "Management address": own.management_address,
        "Metrics address": own.metrics_address,
        "gRPC inference address": own.grpc_addresses[0],
        "gRPC management address": own.grpc_addresses[1],
        "Model Store": settings.model_store,
        "Initial Models": ",".join(settings.models) or "N/A",
        "Log dir": own.log_dir,
        "Metrics dir": own.metrics_dir,
        "Netty threads": written("number_of_netty_threads", 0),
        "Netty client threads": written("netty_client_threads", 0),
        "Default workers per model": own.default_workers_per_model or machine.gpus or machine.cores,
        "Blacklist Regex": own.blacklist_env_vars or "N/A",
        "Maximum Response Size": own.max_response_size,
        "Maximum Request Size": settings.max_request_bytes,
        "Limit Maximum Image Pixels": _flag(own.limit_max_image_pixels),
        "Prefer direct buffer": written("prefer_direct_buffer", "false"),
        "Allowed Urls": list(own.allowed_urls),
        "Custom python dependency for model allowed": _flag(settings.install_requirements),
        "Enable metrics API": _flag(own.enable_metrics_api),
        "Metrics mode": own.metrics_mode.upper(),
        "Disable system metrics": _flag(own.disable_system_metrics),
        "Workflow Store": written("workflow_store", settings.model_store),
        "CPP log config": written("cpp_log_config"),
        "Model config": written("models"),
        "System metrics command": written("system_metrics_cmd", "default"),
        "Model API enabled": _flag(own.enable_model_api),
    }
    return [f"{name}: {fact}" for name, fact in facts.items()]


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - scripts wait for these lines on standard output


if __name__ == "__main__":
    sys.exit(main())
