"""Commands, and the servers that they start, in forks of an interpreter with their imports made.

To import what a command needs takes 0.3 s of a core, what a server needs 0.7 s: most of what a
server costs a test. A fork is a process as any other, but for what `/proc` says of its variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from types import SimpleNamespace
from typing import Any

from modelyard.base.plugins import registered
from modelyard.cli import commands, main
from modelyard.serve import server
from modelyard.serve.tools import handle

LATER = (
    *("modelyard.serve.app", "modelyard.serve.control.reload", "modelyard.serve.control.sandbox"),
    *("modelyard.serve.tools.client", "modelyard.serve.tools.models_cli"),
    *("modelyard.plugins.grpc.health", "pydantic.v1"),
)
"""What commands and servers import only when they use it."""


def wait_for_command(requests: socket.socket) -> list[str]:
    """Return, in a fork of its own, the arguments of a command.

    A request is the arguments and the working folder, with three files: the command's output and
    errors, and a pipe that gets its process id and its exit code.
    """
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 16, 3)
        if not message:
            sys.exit()
        if not os.fork():
            break
        for file in files:
            os.close(file)
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stdout, stderr, told = files
    if pid := os.fork():
        for file in (stdout, stderr):
            os.close(file)
        os.write(told, b"%d\n" % pid)
        os.write(told, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for file in files:
        os.close(file)
    words, folder = json.loads(message)
    os.chdir(folder)
    return list(words)


def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """Start a program; a server as a fork."""
    if command[-2:] == [*handle.SERVER]:
        options["preexec_fn"] = become_server
    return subprocess.Popen(command, **options)


def become_server() -> None:
    """Run a server in place of the interpreter that was to be started, whose files are there."""
    os.closerange(3, 1 << 12)  # among them the one whose end says that the start went well
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # as a new interpreter does; Popen undid it
        signal.signal(ignored, signal.SIG_IGN)
    code = 1
    try:
        code = server.main()
    except Exception:
        traceback.print_exc()
    ctypes.pythonapi.Py_Exit(code)  # as at the end of a program: threads are waited for


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for entry in (*registered("faces").values(), *registered("observers").values()):
        entry.load()
    commands()
    for module in LATER:
        with contextlib.suppress(ImportError):  # core is tested without plug-ins, too
            importlib.import_module(module)
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        words = wait_for_command(requests)
    setattr(handle, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))  # noqa: B010
    sys.argv = ["modelyard", *words]
    main(words)
