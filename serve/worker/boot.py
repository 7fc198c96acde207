"""Boot one worker, or run an archive once.

`python -P -m modelyard.serve.worker FD`, or `… --check FD FD`; `… --fork-server FD` boots many.

Authors import their files by plain names, some of them late, so the archive's folder leads the path
for the worker's life. Ours are below `modelyard.`, where no such name meets them; those that a
dialect brings come before:

1. raise the walls, with one thread, and nothing of the archive opened;
2. have a dialect's names be found, with the working folder off the path (`-P`);
3. put the archive's folder in front of the path and work there.
"""

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from modelyard.handlers.ranges import mark_ranges
from modelyard.serve.dataplane import wire
from modelyard.serve.walls.raising import Walls, raise_walls
from modelyard.serve.worker import load, loop, steps
from modelyard.serve.worker.codec import MOST_SAID, is_out_of_memory
from modelyard.serve.worker.dialect import find_dialect
from modelyard.serve.worker.golden import WrongAnswer, check_golden, replay_golden
from modelyard.serve.worker.reaper import fork_worker


def run(arguments: Sequence[str]) -> int:
    """Do what the command line says, and return the exit code."""
    if arguments[0] == "--check":
        return check_archive(int(arguments[1]), int(arguments[2]))
    if arguments[0] == "--fork-server":
        return fork_workers(int(arguments[1]))
    connection = _join(arguments[0])
    if len(arguments) == 1:
        return _begin(connection)
    with os.fdopen(int(arguments[1]), "rb") as file:  # from `_change_interpreter`
        message = json.load(file)
    return _serve(connection, loop.Reader(connection), message)


def fork_workers(fd: int) -> int:
    """Be the fork server; in each worker that it forks, be that."""
    from modelyard.serve.worker import forks

    # Threads may start here, so not before the walls stand.
    return _begin(_join(forks.serve(fd)), forks.set_threads)


def _join(fd: int | str) -> socket.socket:
    connection = socket.socket(fileno=int(fd))
    connection.set_inheritable(False)
    return connection


def _begin(connection: socket.socket, prepare: Callable[[], None] = lambda: None) -> int:
    """Read the server's first frame, and raise the walls that it asks for; then `prepare`.

    What goes on is a child of the process that the server knows.
    """
    reader = loop.Reader(connection)
    message = wire.decode_control(reader.read()[0])
    fork_worker()
    try:
        if walls := message["walls"]:
            raise_walls(Walls.of_message(walls))
        prepare()
        if interpreter := message["interpreter"]:
            _change_interpreter(interpreter, connection, message)
    except OSError as error:
        return _fail(connection, message, error)
    return _serve(connection, reader, message)


def _change_interpreter(interpreter: str, connection: socket.socket, message: Any) -> None:
    """Go on in the interpreter that has what the archive requires, which may run code at its start.

    Walls that stand go on standing.
    """
    file = os.memfd_create("message")
    os.write(file, json.dumps({**message, "interpreter": None}).encode())
    os.lseek(file, 0, os.SEEK_SET)
    for descriptor in (file, connection.fileno()):
        os.set_inheritable(descriptor, True)
    command = [interpreter, "-P", "-m", "modelyard.serve.worker", str(connection.fileno())]
    os.execv(interpreter, [*command, str(file)])


def _serve(connection: socket.socket, reader: loop.Reader, message: dict[str, Any]) -> int:
    """Load what the server's first frame names, then serve until its end of the socket closes."""
    try:
        dialect = find_dialect()
        if message.get("dialect"):
            dialect.begin_log()
        _enter(Path(message["folder"]))
        service = _load(connection, reader, message)
    except BaseException as error:
        return _fail(connection, message, error)
    (loop if service.steps is None else steps).run(reader, service)
    return 0


def _load(connection: socket.socket, reader: loop.Reader, message: dict[str, Any]) -> load.Service:
    """Load what the server names, and answer that it is ready."""
    service = load.load_service(message)
    reader.poll_s = message["poll_us"] / 1e6
    if message.get("nvtx"):
        mark_ranges(service.device)
    check_golden(service, message["golden"])
    ready = {"protocol": wire.PROTOCOL, "pid": os.getpid(), "device": service.device,
             "steps": service.steps is not None}  # fmt: skip
    connection.sendall(wire.encode_control(wire.READY, ready))
    return replace(service, replay=partial(replay_golden, service, message["golden"]))


def _fail(connection: socket.socket, message: dict[str, Any], error: BaseException) -> int:
    """Log why the model cannot be served, and answer the server with one line of it."""
    traceback.print_exception(error)
    reason = load.describe(error, Path(message["folder"]))
    # CUDA's own errors of memory are RuntimeErrors that name it.
    lacks_memory = is_out_of_memory(error) or (
        isinstance(error, RuntimeError) and "CUDA" in str(error)
    )
    failed = {"message": reason[:MOST_SAID], "out_of_memory": lacks_memory,
              "golden": isinstance(error, WrongAnswer)}  # fmt: skip
    connection.sendall(wire.encode_control(wire.FAILED, failed))
    return 1


def check_archive(task_fd: int, result_fd: int) -> int:
    """Run the unpacked archive that a task names, behind its walls, and write what came of it.

    `serve/rehearse.py` starts it, with files that are open already. What goes wrong is in the
    result; the exit code only says that there is one.
    """
    for descriptor in (task_fd, result_fd):
        os.set_inheritable(descriptor, False)
    with os.fdopen(task_fd, "rb") as file:
        task = json.load(file)
    folder = Path(task["load"]["folder"])
    fork_worker()
    try:
        if walls := task["walls"]:
            raise_walls(Walls.of_message(walls))
        from modelyard.serve.worker import check  # and numpy, which a worker may do without

        find_dialect()
        _enter(folder)
        result = check.run(task)
    except BaseException as error:
        traceback.print_exc()
        result = {"error": load.describe(error, folder)}
    with os.fdopen(result_fd, "w", encoding="utf-8") as file:
        json.dump(result, file)
    return 0


def _enter(folder: Path) -> None:
    """Make the archive's folder the working folder and the first place for imports."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    # For processes that the handler starts.
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), inherited)))
