"""The fork server: import what workers need, and fork one for each request of the server.

No code of an archive runs here, no thread is started, and no device is touched: what is forked is
as good as new. A worker is forked twice, so that its parent, which ends at once, leaves it to the
server: the server then learns of its end as of any child's.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import select
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from modelyard.handlers import BUILT_IN
from modelyard.serve.dataplane.heap import trim
from modelyard.serve.walls.raising import count_threads, die_with_parent
from modelyard.serve.worker.dialect import find_dialect

MODULES: Mapping[str, tuple[str, ...]] = {
    "torch": (
        "torch",
        "numpy",
        *(place.partition(":")[0] for place in BUILT_IN.values()),
        # What pillow imports with the first image that it opens.
        *(f"PIL.{name}ImagePlugin" for name in ("Bmp", "Gif", "Jpeg", "Ppm", "Png")),
    ),
    # What loading an exported program imports, most of it while it loads.
    "program": (
        "sympy",
        "torch.fx.experimental.symbolic_shapes",
        "torch._dynamo",
        "torch._export.serde.serialize",
        "torch.export._trace",
        "torch.export.pt2_archive._package",
        "torch.fx.experimental.validator",
        "torch._inductor.sizevars",
        "sympy.tensor.tensor",
    ),
    "onnx": ("onnxruntime",),
}
"""What is imported ahead."""


class CannotFork(Exception):
    """This process is not what workers may be forked from, and will not be."""


_POLL_S = 0.0005
_fresh: frozenset[str] = frozenset()
"""Modules that every worker has imported when its archive's come in reach."""


def serve(fd: int) -> int:
    """Fork workers; return in each of them, with its socket.

    Raises:
        EOFError: the server has closed its end.
    """
    global _fresh
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)
    server = os.getppid()
    gc.disable()  # until it is frozen; collections while importing would find little
    find_dialect()
    _fresh = frozenset(sys.modules)
    ahead: deque[str] = deque()
    """Modules that a worker to come will need, while nobody waits for one."""
    while True:
        if ahead and not select.select([control], [], [], 0)[0]:
            with contextlib.suppress(Exception):  # whoever asks for a worker is told
                _import([ahead.popleft()])
            continue
        message, descriptors, _, _ = socket.recv_fds(control, 1, 4)
        if not message:
            raise EOFError
        with os.fdopen(descriptors[0], "rb") as file:
            request = json.load(file)
        ahead.extend(name for key in request["later"] for name in MODULES[key])
        if "environment" not in request:
            continue
        try:
            _prepare(request)
            worker = _fork(server)
        except Exception as error:
            refusal = {
                "refused": f"{type(error).__name__}: {error}",
                "is_final": isinstance(error, CannotFork),
            }
            control.send(json.dumps(refusal).encode())
        else:
            if not worker:
                control.close()
                return _become(request["environment"], *descriptors[1:])
            control.send(json.dumps({"pid": worker}).encode())
        for descriptor in descriptors[1:]:
            os.close(descriptor)


def _prepare(request: dict[str, Any]) -> None:
    """Import what a worker needs.

    Raises:
        CannotFork, Exception: a worker that is forked now would not be as a fresh one.
    """
    _import([name for key in request["modules"] for name in MODULES[key]])
    imported = {name for name in sys.modules if name not in _fresh}
    if clashing := imported.intersection(request["own"]):
        raise RuntimeError(f"the archive has modules named {', '.join(sorted(clashing))}")


def _import(names: Iterable[str]) -> None:
    """Import what is missing, where a worker can still be forked.

    Raises:
        CannotFork: none can.
    """
    _check_threads()
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        with contextlib.suppress(ImportError):  # torch moves its own from version to version
            importlib.import_module(name)
    if missing:
        gc.freeze()  # a collection writes to each object that it looks at, and so copies its page
        trim()
    _check_threads()


def _check_threads() -> None:
    if (threads := count_threads()) > 1:
        raise CannotFork(f"{threads} threads run where there must be one")


def _fork(server: int) -> int:
    """Fork a child of the server; return its process id, and 0 in it.

    Raises:
        OSError: the system has no room for it.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            text = pipe.read()
        os.waitpid(between, 0)
        if not text.isdigit():
            raise OSError(text.decode())
        return int(text)
    own = os.getpid()
    try:
        worker = os.fork()
        text = str(worker).encode()
    except OSError as error:
        worker, text = -1, str(error).encode()
    if worker:
        try:
            os.write(writing, text)
        finally:
            os._exit(0)
    os.close(reading)
    os.close(writing)
    while os.getppid() == own:
        time.sleep(_POLL_S)
    die_with_parent(server)
    return 0


def _become(environment: dict[str, str], connection: int, stdout: int, stderr: int) -> int:
    """Make this fork what a fresh worker is; return its socket."""
    gc.enable()
    os.setsid()
    for descriptor, target in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = [str(connection)]
    tempfile.tempdir = None  # it is by the variables that another was chosen
    _draw_seeds()
    return connection


def _draw_seeds() -> None:
    """Draw anew what was drawn at an import; Python's own generator does so by itself."""
    if multiprocessing := sys.modules.get("multiprocessing"):
        multiprocessing.current_process().authkey = os.urandom(32)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


def set_threads() -> None:
    """Set what torch and numpy have read from the environment when they were imported, as one."""
    count = int(os.environ["OMP_NUM_THREADS"])
    if count == 1:
        return
    torch = sys.modules.get("torch")
    if torch and torch.get_num_threads() != count:
        torch.set_num_threads(count)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for library in set(re.findall(r"/\S*openblas\S*\.so\S*", maps)):
        openblas = ctypes.CDLL(library)
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads"):
            if hasattr(openblas, name):
                getattr(openblas, name)(count)
