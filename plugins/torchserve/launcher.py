"""The server's process as the command `torchserve` sees it: its pid file, its start, its end.

Nothing but the standard library: the command answers before a web framework could be imported.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SERVER_MODULE = "modelyard.plugins.torchserve.server"
POLL_S = 0.02
ALREADY_RUNNING = "TorchServe is already running, please use torchserve --stop to stop TorchServe."


def pid_file() -> Path:
    """Return where the running server's process id is; one server for each temp folder."""
    return Path(tempfile.gettempdir()) / ".model_server.pid"


def read_pid() -> int | None:
    """Return the number in the pid file; 0 where there is something else, None without file."""
    try:
        return int(pid_file().read_text(encoding="ascii").split()[0])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, IndexError):
        return 0


def write_pid() -> None:
    """Name this process as the running server; called by a server that holds its folder's lock."""
    pid_file().write_text(str(os.getpid()), encoding="ascii")


def remove_pid() -> None:
    """Take the pid file away, unless it names another server by now."""
    if read_pid() == os.getpid():
        pid_file().unlink(missing_ok=True)


def is_server(pid: int) -> bool:
    """Return whether a process is a server of ours that has not ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return SERVER_MODULE.encode() in command.split(b"\0")  # empty when only its exit code is left


def wait_for_end(pid: int, timeout_s: float) -> bool:
    """Wait for a server's process to end; return whether it did."""
    deadline = time.monotonic() + timeout_s
    while is_server(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def start_detached(arguments: Sequence[str]) -> int:
    """Start a server and wait until its ports are open.

    Returns:
        0; or the exit code of a server that could not start. It has said why on our output.
    """
    reading, writing = os.pipe()
    process = subprocess.Popen(
        _command(arguments, str(writing)),
        stdin=subprocess.DEVNULL,
        pass_fds=[writing],
        start_new_session=True,
    )
    os.close(writing)
    has_started = os.read(reading, 1)  # nothing when it has ended
    os.close(reading)
    if has_started:
        return 0
    return process.wait() or 1


def become_server(arguments: Sequence[str]) -> None:
    """Replace this process by a server, so that signals and exit codes need no go-between."""
    sys.stdout.flush()
    os.execv(sys.executable, _command(arguments, "-"))


def _command(arguments: Sequence[str], started: str) -> list[str]:
    return [sys.executable, "-P", "-m", SERVER_MODULE, started, *arguments]
