"""What a model does that an artifact cannot keep or an explanation cannot cross, seen in one run.

Every operator passes by, with the line of the author's that asked for it: random numbers,
batch-norm on the statistics of its batch, and work done under `torch.no_grad()`.

Nor does an artifact hold what forward() reads from outside, or keeps from call to call: the day of
the export stays its day, and a counter stands still. Every call of Python and of C passes by
`sys.setprofile`; what is read is reported with the author's line, unless it is read on the way to a
log, a warning, an import or inside torch.
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
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from modelyard.base.scale import Scale
from modelyard.exporter.arguments import own_name
from modelyard.handlers.proof.agree import compare

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
RUNS = 4
_LAST_PLACES = 2.0
# Parts of the names of torch's operators that add up many terms, or do so inside.
_SUMS = (
    *("mm", "addmv", "mv", "dot", "linear", "einsum", "convolution", "mkldnn", "attention"),
    *("sum", "mean", "var", "std", "norm", "softmax", "pool", "upsample", "lstm", "gru", "rnn"),
)


class Drawn(NamedTuple):
    """Random numbers that a model draws."""

    place: str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Watched:
    """What one run showed; each entry is a place in the author's code, "" when not known."""

    random: dict[str, Drawn] = field(default_factory=dict)
    """Operator that draws random numbers → what it draws first."""
    batch_norm: list[str] = field(default_factory=list)
    """Places that normalise by the statistics of the batch."""
    cut: list[str] = field(default_factory=list)
    """Places where gradients end under torch.no_grad()."""
    custom: dict[str, str] = field(default_factory=dict)
    """torch.autograd.Function of the author's → place of its call."""
    precisions: set[torch.dtype] = field(default_factory=set)
    """The floating-point dtypes of what operators gave."""
    reads: dict[tuple[str, str], str] = field(default_factory=dict)
    """What is read from outside, and the author's line → the name of what read it first."""
    kept: list[str] = field(default_factory=list)
    """What the run changed, with the value before and after it."""
    has_gradients: bool = True
    """Whether gradients are on, as Python code set them."""

    def warnings(self) -> list[str]:
        """Return in a sentence each what the author may want to change."""
        lines = [
            f"forward() draws random numbers{drawn.place} ({operator}), so outputs may not repeat; "
            "draw them outside and pass them as an input"
            for operator, drawn in self.random.items()
        ]
        lines += [
            f"gradients end{place}, under torch.no_grad() inside forward(), so explanations would "
            "leave that part out; remove it there and use it around the call"
            for place in dict.fromkeys(self.cut)
        ]
        lines += [
            f"the backward() of {name}{place} is in no artifact: it holds the operators of its "
            "forward(), and explanations take their gradients"
            for name, place in self.custom.items()
        ]
        lines += [
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


def watch(model: nn.Module, inputs: Sequence[Tensor]) -> Watched:
    """Run the model once and note what it does; a failure ends the watching, without an error.

    Args:
        model: a model in eval mode, which has run before.
        inputs: not changed.
    """
    seen = Watched()
    # Products are not leaves, so that a model may still write into its input.
    given = [
        tensor.clone().requires_grad_() * 1 if tensor.is_floating_point() else tensor.clone()
        for tensor in inputs
    ]
    try:
        with warnings.catch_warnings(), torch.enable_grad(), _outside_watched(model, seen):
            warnings.simplefilter("ignore")  # the run before this one gave them
            with EachOperator(_watching(seen)):
                model(*given)
    # Gradients are not promised yet: a model may fail in any way where it now asks for them.
    except Exception:
        seen.precisions.clear()
    return seen


@dataclass
class Counted:
    """What a run does."""

    gflop: float = 0.0
    """Arithmetic, 1e9 floating-point operations; of matrix products, convolutions, attention."""
    operators: int = 0
    names: set[str] = field(default_factory=set)
    """Operators that were run, without their overloads."""


@contextmanager
def count(formulas: dict[Any, Any] | None = None) -> Iterator[Counted]:
    """Count what is run in this context; it is known once that is left.

    Args:
        formulas: operator → its arithmetic by shapes, beside torch's own.
    """
    counted = Counted()
    flops = FlopCounterMode(display=False, custom_mapping=formulas)

    def run(func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        counted.operators += 1
        counted.names.add(func.name().partition("::")[2].partition(".")[0])
        return func(*args, **given)

    with flops, EachOperator(run):
        yield counted
    counted.gflop = flops.get_total_flops() / 1e9


def plain_tensors(model: nn.Module) -> list[str]:
    """Name the tensors that are neither parameter nor buffer, so in no checkpoint."""
    return [
        ".".join(filter(None, (own_name(name), attribute)))
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor)
    ]


def in_train_mode(model: nn.Module) -> list[str]:
    """Name the layers that act otherwise in training and are left in that mode."""
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
    return [
        f'"{own_name(name)}" ({type(module).__name__})'
        for name, module in model.named_modules()
        if module.training and isinstance(module, kinds)
    ]


class EachOperator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hand every operator that is dispatched in this context to a function, with its arguments.

    Args:
        run: returns what the operator is to give.
    """

    def __init__(self, run: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._run(func, args, kwargs or {})


def _watching(seen: Watched) -> Callable[..., Any]:
    """Return what runs an operator and notes in `seen` what it does."""

    def run(func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        name = func.name().removeprefix("aten::")
        # Attention is marked as random for the dropout that it may do, and repeats without.
        is_random = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name
        if "batch_norm" in name and _argument(func, args, given, "training"):
            seen.batch_norm.append(_author_place())
        if not torch.is_grad_enabled() and _cuts(func, args):
            # The author's torch.no_grad(), or the autograd.Function whose forward() sets it.
            functions = _functions()
            frame = next((each for each in _frames() if each.f_code in functions), None)
            if frame is not None:
                seen.custom.setdefault(functions[frame.f_code], _author_place(frame))
            elif not seen.has_gradients:  # else an operator turned them off inside itself
                seen.cut.append(_author_place())
        result = func(*args, **given)
        seen.precisions |= {
            each.dtype for each in tree_leaves(result)
            if isinstance(each, Tensor) and each.is_floating_point()
        }  # fmt: skip
        if is_random and isinstance(drawn := result, Tensor):
            dtype, shape = str(drawn.dtype).removeprefix("torch."), tuple(drawn.shape)
            place = _author_place()
            seen.random.setdefault(name.partition(".")[0], Drawn(place, dtype, shape))
        return result

    return run


def _functions() -> dict[object, str]:
    """Return the code of each forward() of an autograd.Function → the name of its class.

    What calls it, `apply`, has no frame from torch 2.15 on.
    """
    kinds: list[Any] = [torch.autograd.Function]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {getattr(kind.forward, "__code__", None): kind.__name__ for kind in reversed(kinds)}


def _frames(frame: FrameType | None = None) -> Iterator[FrameType]:
    """Yield the frames of the model's run, the innermost first, from those outside of `frame`."""
    frame = frame or sys._getframe(1)
    while (frame := frame.f_back) is not None:
        file = frame.f_code.co_filename
        if file != __file__ and file.startswith(_OURS):
            return
        yield frame


def _author_place(frame: FrameType | None = None) -> str:
    """Name the innermost line of the stack that is not torch's: " at net.py:12"; "" without one."""
    for outer in _frames(frame):
        file = outer.f_code.co_filename
        if not file.startswith((_OURS, _TORCH, "<")):
            return f" at {Path(file).name}:{outer.f_lineno}"
    return ""


def _cuts(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator gives, from a tensor with gradients, another without."""
    differentiable = any(
        isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()
        for value in args
    )
    gives_numbers = any("Tensor" in str(result.type) for result in func._schema.returns)
    return differentiable and gives_numbers and not func.name().startswith("aten::detach")


def _argument(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> object:
    """Return an operator's argument by the name that its schema has for it."""
    names = [argument.name for argument in func._schema.arguments]
    return {**kwargs, **dict(zip(names, args, strict=False))}.get(name)


def measure_sensitivity(
    run: Callable[[tuple[Tensor, ...]], Sequence[Tensor]],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    scales: Sequence[Scale],
) -> list[float]:
    """Return per output how far it moves at most when its sums are rounded otherwise, scaled.

    Every library adds in an order of its own, so that sums end a few units in the last place apart.
    A model whose answer that changes has no one answer: a normalisation of what is constant divides
    rounding errors by nothing. Here each result of a sum (matrix product, convolution, mean, norm,
    softmax …) is moved by up to two units in the last place, in a direction drawn from a fixed
    seed: Monte Carlo arithmetic. What is zero stays zero, and other operators are as they were.

    Source: D. S. Parker, Monte Carlo Arithmetic, UCLA CSD-970002, 1997.

    Args:
        run: the model.
        inputs: those of one case.
        outputs: what it gives for them undisturbed.
        scales: by which each is measured.
    """
    moved = [0.0] * len(outputs)
    for seed in range(RUNS):
        generator = torch.Generator().manual_seed(seed)
        with _rounded(generator):
            disturbed = run(tuple(_disturb(tensor, generator) for tensor in inputs))
        apart = (
            compare(one, other, scale=scale)["scaled"]
            for one, other, scale in zip(outputs, disturbed, scales, strict=True)
        )
        moved = [max(one, two) for one, two in zip(moved, apart, strict=True)]
    return moved


def _rounded(generator: torch.Generator) -> EachOperator:
    """Round what sums give in a direction of its own."""

    def run(func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        result = func(*args, **given)
        name = func.name().removeprefix("aten::").partition(".")[0]
        # An operator that writes into its input gives that, whose other views must follow.
        if name.endswith("_") or not any(part in name for part in _SUMS):
            return result
        if isinstance(result, tuple):
            return tuple(_disturb(value, generator) for value in result)
        return _disturb(result, generator)

    return EachOperator(run)


def _disturb(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float64):
        return value
    moves = torch.rand(value.shape, generator=generator, dtype=value.dtype).to(value.device)
    return value * (1 + (2 * moves - 1) * _LAST_PLACES * torch.finfo(value.dtype).eps)


# -- what it reads from outside and keeps from call to call ----------------------------------------

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


@contextmanager
def _outside_watched(model: nn.Module, seen: Watched) -> Iterator[None]:
    """Note what is read and kept in this context, and leave everything as it was.

    The model should have run before, so that what it makes once is there.
    """

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

    before, profile, drawn = _state(model), sys.getprofile(), _drawn()
    with _numpy_watched(seen):
        sys.setprofile(hook)
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


def _note(seen: Watched, what: str, name: str, frame: FrameType | None) -> None:
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
def _numpy_watched(seen: Watched) -> Iterator[None]:
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
