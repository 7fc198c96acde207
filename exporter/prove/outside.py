"""What forward() reads from outside, and what it keeps from call to call: seen in one run.

An artifact holds neither: the day of the export stays its day, and a counter stands still. Every
call of Python and of C passes by `sys.setprofile`; what the names below give is reported with the
author's line, unless it is read on the way to a log, a warning, an import or inside torch.
"""

import builtins
import datetime
import os
import random
import socket
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelyard.exporter.arguments import own_name

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_NUMPY = str(Path(np.__file__).parent)
_STANDARD = sysconfig.get_path("stdlib")
_LIBRARIES = ("site-packages", "dist-packages")
# What reads clocks and files to tell somebody, to wait or to import, and not for an answer.
_QUIET = (
    *(f"{_STANDARD}/{name}.py" for name in ("warnings", "linecache", "traceback", "tokenize")),
    *(f"{_STANDARD}/{name}.py" for name in ("inspect", "threading", "queue")),
    *(f"{_STANDARD}/{name}" for name in ("logging", "importlib", "concurrent", "multiprocessing")),
    *("<frozen importlib", _TORCH),
)

_CLOCK, _ENVIRONMENT, _FILES = "the clock", "the environment", "files"
_CHANCE, _NETWORK, _PROCESS = "random numbers of Python", "the network", "the process"
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
_NUMBERS = "random numbers of numpy"
_IN_C: dict[str, tuple[Any, ...]] = {
    _CLOCK: (
        *(getattr(time, name + more) for name in _CLOCKS for more in ("", "_ns")),
        *(time.localtime, time.gmtime, time.ctime, time.strftime, datetime.date.today),
        *(datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today),
    ),
    _FILES: (builtins.open, os.open, os.listdir, os.scandir, os.stat, os.access, np.fromfile),
    _CHANCE: (random.random, random.getrandbits, os.urandom),
    _NETWORK: (socket.gethostname, socket.getaddrinfo),
    _PROCESS: (os.getpid, os.getppid, os.getcwd, os.uname, os.cpu_count, os.getloadavg),
}
_IN_PYTHON: dict[str, tuple[Any, ...]] = {
    _ENVIRONMENT: (os.environ.__getitem__, os.environ.__iter__),
    _FILES: (torch.load,),
    _NETWORK: (socket.socket.__init__,),
    _PROCESS: (subprocess.Popen.__init__,),
}
_OF_C = {each: what for what, all_ in _IN_C.items() for each in all_}
_OF_CODE = {each.__code__: what for what, all_ in _IN_PYTHON.items() for each in all_}
_SET_GRAD = torch._C._set_grad_enabled
_MOST_VALUES = 1 << 16


@dataclass
class Outside:
    """What one run read and kept, and whether gradients are on as Python code set them."""

    reads: dict[tuple[str, str], str] = field(default_factory=dict)
    """What is read, and the author's line → the name of what read it first."""
    kept: list[str] = field(default_factory=list)
    """What the run changed, with the value before and after it."""
    has_gradients: bool = True

    def warnings(self) -> list[str]:
        """Return in a sentence each what an artifact will not do."""
        lines = [
            f"forward() reads {what}{place} ({name}), and an artifact keeps what that was at the "
            "export, if it keeps it at all; take it as an input"
            for (what, place), name in self.reads.items()
        ]
        lines += [
            f"forward() changes {each} in every call, which the artifact does not do for its "
            "caller; take it as an input and give it as an output"
            for each in self.kept
        ]
        return lines


@contextmanager
def watch_outside(model: nn.Module, seen: Outside) -> Iterator[None]:
    """Note what is read and kept in this context, and leave everything as it was.

    The model should have run before, so that what it makes once is there.
    """
    before, profile, drawn = _state(model), sys.getprofile(), _drawn()
    with _numpy_watched(seen):
        sys.setprofile(_hook(seen))
        try:
            yield
        finally:
            sys.setprofile(profile)
    for what, state in _drawn().items():
        if state != drawn[what] and not any(each == what for each, _ in seen.reads):
            seen.reads[what, ""] = "its state moved"
    after = _state(model)
    seen.kept = [
        f"{name} ({_shown(before[name])}, then {_shown(after[name])})"
        for name in before.keys() & after.keys()
        if not _same(before[name], after[name])
    ]


def _hook(seen: Outside) -> Callable[[FrameType, str, Any], None]:
    def hook(frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            if frame.f_code in _OF_CODE:
                _note(seen, _OF_CODE[frame.f_code], frame.f_code.co_qualname, frame.f_back)
        elif event == "c_call":
            if function in _OF_C:
                owner = getattr(function, "__module__", None) or type(function.__self__).__name__
                _note(seen, _OF_C[function], f"{owner}.{function.__name__}", frame)
        elif event == "c_return" and function is _SET_GRAD:
            seen.has_gradients = torch.is_grad_enabled()

    return hook


def _note(seen: Outside, what: str, name: str, frame: FrameType | None) -> None:
    """Note a reader, if the frames from the one that calls it show it to be the author's."""
    place = library = ""
    while frame is not None and not place:
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            break
        if file.startswith(_QUIET):
            return
        is_library = any(part in file for part in _LIBRARIES)
        if not (file.startswith((_STANDARD, "<frozen")) and not is_library):
            line = f" at {Path(file).name}:{frame.f_lineno}"
            if not is_library:
                place = line
            elif not file.startswith(_NUMPY):
                library = library or line
        frame = frame.f_back
    if place or library:
        seen.reads.setdefault((what, place or library), name)


@contextmanager
def _numpy_watched(seen: Outside) -> Iterator[None]:
    """Let numpy's functions of one state for all, which no profiler sees, note their callers."""

    def noting(name: str, function: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            _note(seen, _NUMBERS, f"numpy.random.{name}", sys._getframe(1))
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name, function in list(vars(np.random).items()):
            if isinstance(getattr(function, "__self__", None), np.random.RandomState):
                setattr(np.random, name, noting(name, function))
                stack.callback(setattr, np.random, name, function)
        yield


def _drawn() -> dict[str, object]:
    """Return the states of the generators that all code shares."""
    _, keys, *others = np.random.get_state()
    return {_CHANCE: random.getstate(), _NUMBERS: (np.asarray(keys).tobytes(), *others)}


def _state(model: nn.Module) -> dict[str, Any]:
    """Return what may be kept from call to call, of the model, its classes and their modules."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in (*vars(module).items(), *module._buffers.items()):
            found[".".join(filter(None, ("self", own_name(name), key)))] = _summary(value)
        for cls in type(module).__mro__:
            if cls.__module__.partition(".")[0] not in ("torch", "builtins"):
                own = getattr(vars(cls).get("forward"), "__globals__", {})
                for where, values in ((cls.__name__, vars(cls)), (cls.__module__, own)):
                    found |= {
                        f"{where}.{key}": _summary(each)
                        for key, each in values.items()
                        if not key.startswith("__")
                    }
    return {name: value for name, value in found.items() if value is not None}


def _summary(value: Any) -> Any:
    """Return what shows a change: plain values themselves, of others how many there are."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | dict | set | deque):
        return f"{len(value)} entries"
    if isinstance(value, Tensor) and value.numel() <= _MOST_VALUES:
        return value.detach().clone()
    return None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
    return type(one) is type(other) and bool(one == other or one != one)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() != 1:
        return "a tensor"
    return str(value.item() if isinstance(value, Tensor) else value)[:40]
