"""The command `torchserve`: TorchServe's flags, messages and exit codes.

argparse, as TorchServe: prefixes of flags and exit code 2 are part of what scripts rely on.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from modelyard.plugins.torchserve import TORCHSERVE_VERSION, launcher
from modelyard.plugins.torchserve.arguments import CommandLine, parse_command_line
from modelyard.plugins.torchserve.properties import fill_variables, parse_properties
from modelyard.serve.errors import StartError

STOP_TIMEOUT_S = 60.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Start or stop the server; exit code 0 done, 1 refused or failed, 2 wrong usage."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_command_line(arguments)
    running = _running()
    if options.version:
        print(f"TorchServe Version is {TORCHSERVE_VERSION}")
    elif options.stop:
        _stop(running, options.foreground)
    else:
        if running is not None:
            print(launcher.ALREADY_RUNNING)
            sys.exit(1)
        try:
            _check_paths(options)
        except StartError as error:
            print(error)
            sys.exit(1)
        if options.foreground:
            launcher.become_server(arguments)
        sys.exit(launcher.start_detached(arguments))


def _running() -> int | None:
    """Return the process id of the server that runs, and take away what a dead one left."""
    pid = launcher.read_pid()
    if pid is None or launcher.is_server(pid):
        return pid
    if pid <= 0 or not Path(f"/proc/{pid}").exists():
        print("Removing orphan pid file.")
        launcher.pid_file().unlink(missing_ok=True)
    return None


def _stop(pid: int | None, foreground: bool) -> None:
    """End the server after it has answered what it accepted.

    TorchServe prints its last line first and leaves the process to itself; a restart right after
    that finds the ports taken.
    """
    if pid is None:
        print("TorchServe is not currently running.")
        return
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        print("TorchServe already stopped.")
    except PermissionError:
        print(f"TorchServe runs as another user, who must stop it: pid {pid}.")
        sys.exit(1)
    else:
        Path("key_file.json").unlink(missing_ok=True)
        if not launcher.wait_for_end(pid, STOP_TIMEOUT_S):
            print("Stopping TorchServe took too long.")
        elif not foreground:
            print("TorchServe has stopped.")
    launcher.pid_file().unlink(missing_ok=True)


def _check_paths(options: CommandLine) -> None:
    """Refuse what is not there, with TorchServe's words.

    Raises:
        StartError: the first of them.
    """
    _check_file("--log-config", options.log_config)
    temp = os.environ.get("TEMP")
    if temp and not Path(temp).is_dir():
        raise StartError(f"Invalid temp directory: {temp}, please check TEMP environment variable.")
    config = os.environ.get("TS_CONFIG_FILE") or options.ts_config
    _check_file("--ts-config", config)
    written = _read_config(Path(config)) if config else {}
    if vmargs := written.get("vmargs"):
        print(f"Warning: TorchServe is using non-default JVM parameters: {vmargs}")
    store = options.model_store or written.get("model_store")
    if not store:
        raise StartError("Missing mandatory parameter --model-store")
    if not Path(store).is_dir():
        raise StartError(f"--model-store directory not found: {store}")
    if options.workflow_store and not Path(options.workflow_store).is_dir():
        raise StartError(f"--workflow-store directory not found: {options.workflow_store}")
    _check_file("--cpp-log-config", options.cpp_log_config)


def _check_file(flag: str, name: str | None) -> None:
    if name and not Path(name).is_file():
        raise StartError(f"{flag} file not found: {name}")


def _read_config(file: Path) -> dict[str, str]:
    """Return what the file says; the server reports what is wrong with it."""
    with contextlib.suppress(OSError, ValueError, StartError):
        return fill_variables(parse_properties(file.read_text(encoding="utf-8")), os.environ)
    return {}


if __name__ == "__main__":
    main()
