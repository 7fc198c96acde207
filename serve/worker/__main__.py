"""Start a worker: `python -P -m modelyard.serve.worker FD`; `boot.py` says what else there is.

`--parent PID` before it says whose child it must be: who dies while Python starts is not noticed.
"""

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import weakref
from typing import NoReturn

from modelyard.serve.walls.raising import die_with_parent


def main() -> int:
    """Tie this process's life to the server's, before anything that takes time is imported."""
    parent = None
    if sys.argv[1] == "--parent":
        parent = int(sys.argv[2])
        del sys.argv[1:3]
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started it
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    from modelyard.serve.worker import boot

    try:
        return boot.run(sys.argv[1:])
    except (EOFError, ConnectionError):
        return 0  # the server has gone


def leave(code: int) -> NoReturn:
    """End as Python does, without taking apart what was imported.

    A forked worker would copy most of the memory that it shares for that, and 29 MB of it for
    torch's finalizers alone, which take its operators out of a table that ends with the process.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    for each in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        each.atexit = each.atexit and each.func.__module__ != "torch.library"
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
