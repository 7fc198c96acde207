"""The server process that `torchserve --start` runs.

Started as `python -P -m modelyard.plugins.torchserve.server`.
"""

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
from modelyard.plugins.torchserve.configuration import load_configuration, read_tls
from modelyard.plugins.torchserve.log4j import find_log_config, read_log_config
from modelyard.plugins.torchserve.logs import Logs, default_config
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve.control.sizing import count_gpus, this_machine
from modelyard.serve.control.state import StateDir
from modelyard.serve.errors import StartError, without_secrets
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
    logger.info("\n%s", "\n".join(_describe(configuration.settings, own)))
    logger.info("%s", own.who_is_let_in)

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


def _describe(settings: Settings, own: TorchServeSettings) -> list[str]:
    """Return the lines of the start-up log that scripts search, in TorchServe's order."""
    machine = this_machine()
    keys = {"number_of_netty_threads": "0", "netty_client_threads": "0", "cpp_log_config": "",
            "prefer_direct_buffer": "false", "workflow_store": settings.model_store, "models": "",
            "system_metrics_cmd": "default"}  # fmt: skip
    text = Path(__file__).with_name("startup.txt").read_text(encoding="utf-8")
    filled = text.format(
        version=TORCHSERVE_VERSION,
        home=Path(__file__).parents[2],
        python=sys.executable,
        machine=machine,
        settings=settings,
        own=own,
        keys={key: own.properties.get(key) or default for key, default in keys.items()},
        models=",".join(map(without_secrets, settings.models)),
        workers=own.default_workers_per_model or machine.gpus or machine.cores,
        allowed_urls=list(own.allowed_urls),
        metrics_mode=own.metrics_mode.upper(),
    )
    words = {"": "N/A", "None": "N/A", "True": "true", "False": "false"}
    pairs = (line.partition(": ") for line in filled.splitlines())
    return [f"{name}: {words.get(value, value)}" for name, _, value in pairs]


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - scripts wait for these lines on standard output


if __name__ == "__main__":
    sys.exit(main())
