"""Boot one worker, or run an archive once.

`python -P -m modelyard.serve.worker FD`, or `… --check FOLDER`; `… --fork-server FD` boots many.

Authors import their files by plain names, some of them late, so the archive's folder leads the path
for the worker's life. Ours are below `modelyard.`, where no such name meets them; the one name that
both have is `ts`:

1. tie this process's life to the server's;
2. import the `ts` shim, with the working folder off the path (`-P`);
3. put the archive's folder in front of the path and work there, as TorchServe does.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from modelyard.serve.dataplane import wire
from modelyard.serve.worker import check, load, loop, steps, torchserve
from modelyard.serve.worker.codec import MOST_SAID, is_out_of_memory
from modelyard.serve.worker.golden import check_golden

PR_SET_PDEATHSIG = 1


def main(fd: int) -> int:
    """Load what the server's first frame names, then serve until its end of the socket closes."""
    _die_with_parent()
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    reader = loop.Reader(connection)
    message = wire.decode_control(reader.read()[0])
    if torchserve.is_dialect(message):
        torchserve.begin_log()
    try:
        load.import_shim()
        _enter(Path(message["folder"]))
        service = load.load_service(message)
        reader.poll_s = message["poll_us"] / 1e6
        check_golden(service, message["golden"])
    except BaseException as error:
        traceback.print_exc()
        reason = load.describe(error, Path(message["folder"]))
        failed = {"message": reason[:MOST_SAID], "out_of_memory": _lacks_memory(error)}
        connection.sendall(wire.encode_control(wire.FAILED, failed))
        return 1
    ready = {"protocol": wire.PROTOCOL, "pid": os.getpid(), "device": service.device}
    connection.sendall(wire.encode_control(wire.READY, ready))
    (loop if service.steps is None else steps).run(reader, service)
    return 0


def _lacks_memory(error: BaseException) -> bool:
    """Return whether a load failed for memory; CUDA's own errors are RuntimeErrors that name it."""
    return is_out_of_memory(error) or (isinstance(error, RuntimeError) and "CUDA" in str(error))


def check_archive(exchange: Path) -> int:
    """Load the unpacked archive that `exchange/task.json` names, run it, leave `result.json`.

    The archiver calls this before it writes an archive and when it verifies one. What goes wrong
    is in the result; the exit code only says that there is one.
    """
    _die_with_parent()
    task = json.loads((exchange / "task.json").read_bytes())
    folder = Path(task["load"]["folder"])
    try:
        load.import_shim()
        _enter(folder)
        result = check.run(task)
    except BaseException as error:
        traceback.print_exc()
        result = {"error": load.describe(error, folder)}
    (exchange / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return 0


def fork_workers(fd: int) -> int:
    """Be the fork server; return in each worker that it forks, with the worker's socket."""
    _die_with_parent()
    from modelyard.serve.worker import forks

    return forks.serve(fd)


def _die_with_parent() -> None:
    """Tie this process's life to the one that started it, and leave Ctrl-C to that one."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")


def _enter(folder: Path) -> None:
    """Make the archive's folder the working folder and the first place for imports."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    # For processes that the handler starts.
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), inherited)))


if __name__ == "__main__":
    try:
        if sys.argv[1] == "--check":
            sys.exit(check_archive(Path(sys.argv[2])))
        if sys.argv[1] == "--fork-server":
            sys.exit(main(fork_workers(int(sys.argv[2]))))
        sys.exit(main(int(sys.argv[1])))
    except (EOFError, ConnectionError):
        sys.exit(0)  # the server has gone
