"""What forward() reads from outside or keeps from call to call is named, and honest code is not.

What is missed is held here: threads, iterators, and generators that an object holds, where the
answer does not change (else the model is refused: it gives two answers to one input).
"""

import contextlib
import datetime
import functools
import importlib
import inspect
import itertools
import json
import logging
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import rand
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

from modelyard.exporter.prove.watch import watch

HERE, TEXT = Path(__file__).name, __file__
calls = 0


class Net(nn.Module):
    """Adds what its step gives."""

    seen = 0

    def __init__(self, step: Callable[["Net", Tensor], Any]) -> None:
        super().__init__()
        self.step, self.count = step, 0
        self.table: Tensor | None = None
        self.history: list[int] = []
        self.known: dict[int, Tensor] = {}
        self.register_buffer("runs", torch.zeros(2))
        self.rng = np.random.default_rng(0)
        self.lock, self.steps = threading.Lock(), itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        more = self.step(self, x)
        return x + more if isinstance(more, Tensor | float | int) else x


def _global(net: Net, x: Tensor) -> None:
    global calls
    calls += 1


def _class(net: Net, x: Tensor) -> None:
    Net.seen += 1


def _count(net: Net, x: Tensor) -> None:
    net.count += 1


def _reassign(net: Net, x: Tensor) -> None:
    net.register_buffer("runs", net.get_buffer("runs") + 1)


def _read(net: Net, x: Tensor) -> Any:
    with open(TEXT) as file:  # noqa: PTH123
        return len(file.readline())


def _in_a_thread(net: Net, x: Tensor) -> None:
    thread = threading.Thread(target=time.time)
    thread.start()
    thread.join()


kept = {"calls": itertools.count()}
READS: dict[str, tuple[Callable[[Net, Tensor], Any], str]] = {
    "time": (lambda net, x: time.time(), "the clock"),
    "time in ns": (lambda net, x: time.time_ns() % 7, "the clock"),
    "imported from time": (lambda net, x: monotonic(), "the clock"),
    "for a profile": (lambda net, x: [time.perf_counter()], "the clock"),
    "local time": (lambda net, x: time.localtime().tm_hour, "the clock"),
    "now": (lambda net, x: datetime.datetime.now().hour, "the clock"),
    "now, elsewhere": (lambda net, x: datetime.datetime.now(datetime.UTC).hour, "the clock"),
    "today": (lambda net, x: datetime.date.today().day, "the clock"),
    "a variable": (lambda net, x: len(os.environ["PATH"]), "the environment"),
    "getenv": (lambda net, x: os.getenv("MODELYARD_NONE"), "the environment"),
    "is it set": (lambda net, x: "MODELYARD_NONE" in os.environ, "the environment"),
    "all variables": (lambda net, x: len(dict(os.environ)), "the environment"),
    "a file": (_read, "files"),
    "a path": (lambda net, x: len(Path(TEXT).read_text()), "files"),
    "is it there": (lambda net, x: Path(TEXT).exists(), "files"),
    "when it was written": (lambda net, x: Path(TEXT).stat().st_mtime, "files"),
    "a folder": (lambda net, x: len(list(Path().iterdir())), "files"),
    "numpy's file": (lambda net, x: np.fromfile(TEXT, np.uint8)[0].item(), "files"),
    "numpy's text": (lambda net, x: np.loadtxt(["1"]) + _read(net, x), "files"),
    "torch's file": (lambda net, x: _torch_load(), "files"),
    "random": (lambda net, x: random.random(), "random numbers of Python"),
    "choice": (lambda net, x: random.choice([1, 2]), "random numbers of Python"),
    "secrets": (lambda net, x: secrets.randbelow(9), "random numbers of Python"),
    "uuid": (lambda net, x: uuid.uuid4().int % 9, "random numbers of Python"),
    "urandom": (lambda net, x: os.urandom(1)[0], "random numbers of Python"),
    "a generator of no seed": (lambda net, x: np.random.default_rng().random(), "of Python"),
    "numpy.rand": (lambda net, x: np.random.rand(), "random numbers of numpy"),
    "numpy.normal": (lambda net, x: float(np.random.normal(size=1)[0]), "of numpy"),
    "a socket": (lambda net, x: socket.socket().close(), "the network"),
    "a host's name": (lambda net, x: len(socket.gethostname()), "the network"),
    "a process": (lambda net, x: subprocess.run(["true"], check=True).returncode, "the process"),
    "its number": (lambda net, x: os.getpid(), "the process"),
    "the folder": (lambda net, x: len(Path.cwd().parts), "the process"),
}
KEEPS: dict[str, tuple[Callable[[Net, Tensor], Any], str]] = {
    "a counter": (_count, "self.count (1, then 2)"),
    "a buffer": (
        lambda net, x: [net.get_buffer("runs").add_(1)],
        "self.runs (a tensor, then a tensor)",
    ),
    "another buffer": (_reassign, "self.runs (a tensor, then a tensor)"),
    "a list": (lambda net, x: net.history.append(1), "self.history (1 entries, then 2 entries)"),
    "a global": (_global, "test_outside.calls ("),
    "a class": (_class, "Net.seen ("),
}
MISSED: dict[str, Callable[[Net, Tensor], Any]] = {
    "a thread": _in_a_thread,
    "a generator of its own": lambda net, x: net.rng.random(),
    "an iterator": lambda net, x: next(net.steps),
    "an iterator in a dict": lambda net, x: next(kept["calls"]),
}


def _torch_load() -> int:
    with contextlib.suppress(Exception):
        torch.load(TEXT)
    return 0


@functools.cache
def table(size: int) -> Tensor:
    return torch.ones(size)


def _lazy(net: Net, x: Tensor) -> Tensor:
    if net.table is None:
        net.table = torch.ones(3)
        net.count = int(os.environ.get("MODELYARD_NONE", "3"))
    return net.table


def _cached(net: Net, x: Tensor) -> Tensor:
    if len(x) not in net.known:
        net.known[len(x)] = torch.ones(3) * time.time()
    return net.known[len(x)]


def _imports(net: Net, x: Tensor) -> int:
    with contextlib.suppress(ImportError):
        importlib.import_module("this_is_not_there")
    import colorsys

    return len(colorsys.__name__)


def _locked(net: Net, x: Tensor) -> Tensor:
    with net.lock:
        return x * 2


def _logs(net: Net, x: Tensor) -> None:
    logging.getLogger("net").warning("%s rows", len(x))


def _profiled(net: Net, x: Tensor) -> Tensor:
    with torch.profiler.record_function("step"):
        return x * 2


HARMLESS: dict[str, Callable[[Net, Tensor], Any]] = {
    "nothing": lambda net, x: x,
    "a table that is made once": _lazy,
    "a cache by size": _cached,
    "a cache of functools": lambda net, x: table(3),
    "a log": _logs,
    "a warning": lambda net, x: warnings.warn("rows", UserWarning, stacklevel=1),
    "an import": _imports,
    "a lock": _locked,
    "a profile of torch's": _profiled,
    "a generator with a seed": lambda net, x: random.Random(0).random(),
    "numpy's constants": lambda net, x: torch.from_numpy(np.linspace(0, np.pi, 3)).float(),
    "a signature": lambda net, x: len(inspect.signature(net.forward).parameters),
    "paths": lambda net, x: len(os.path.join("a", "b")),  # noqa: PTH118
    "JSON": lambda net, x: json.loads("[1]")[0],
    "normalize": lambda net, x: normalize(x, dim=1),
    "cosine_similarity": lambda net, x: cosine_similarity(x, x * 2).sum(),
    "a layer": lambda net, x: nn.functional.layer_norm(x, (3,)),
    "an attribute of the same value": lambda net, x: setattr(net, "count", 3),
    "inside torch": lambda net, x: torch.get_num_threads() * 0,
    "gradients asked for": lambda net, x: x.requires_grad and torch.is_grad_enabled(),
}


def _warnings(step: Callable[[Net, Tensor], Any]) -> list[str]:
    net = Net(step).eval()
    functions, profile = dict(vars(np.random)), sys.getprofile()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net(torch.ones(2, 3))
        found = watch(net, [torch.ones(2, 3)]).warnings()
    assert vars(np.random) == functions and sys.getprofile() is profile
    return found


@pytest.mark.parametrize("name", READS)
def test_what_is_read_from_outside_is_named_with_its_line(name: str) -> None:
    step, what = READS[name]
    found = _warnings(step)
    assert any(what in each and f" at {HERE}:" in each for each in found), found


@pytest.mark.parametrize("name", KEEPS)
def test_what_changes_in_every_call_is_named(name: str) -> None:
    step, what = KEEPS[name]
    (found,) = _warnings(step)
    assert what in found


@pytest.mark.parametrize("name", HARMLESS)
def test_what_no_answer_hangs_on_is_not_named(name: str) -> None:
    assert _warnings(HARMLESS[name]) == []


@pytest.mark.parametrize(
    ("step", "what"),
    [
        pytest.param(lambda net, x: rand(), "random numbers of numpy", id="imported from numpy"),
        pytest.param(lambda net, x: random.gauss(0, 1), "random numbers of Python", id="kept back"),
    ],
)
def test_what_leaves_no_trace_but_a_moved_state_is_named_without_its_line(
    step: Callable[[Net, Tensor], Any], what: str
) -> None:
    (found,) = _warnings(step)
    assert found.startswith(f"forward() reads {what} (its state moved)")


@pytest.mark.parametrize("name", MISSED)
def test_what_is_missed_is_known(name: str) -> None:
    assert _warnings(MISSED[name]) == []


def test_a_run_that_fails_leaves_everything_as_it_was() -> None:
    def fails(net: Net, x: Tensor) -> None:
        if x.requires_grad:
            raise ValueError("it is watched")

    assert _warnings(fails) == []
