"""Placeholders of a pickle → the plain values that they stand for, by an allow-list of names.

What training runs keep beside tensors (numpy numbers, a Namespace, a path, an OmegaConf container)
is read from what the pickle says about it; the library that wrote it is not asked. A name outside
the list stays a `Placeholder`.
"""

import datetime
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.pickles import Global, UnresolvedCall, is_module

_MAX_DEPTH = 40
_MAX_NODES = 200_000
_MAX_MODULE_DEPTH = 200
_MAX_MODULES = 100_000
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


@dataclass(frozen=True)
class Placeholder:
    """A value that was not made, because a name that it needs is on no allow-list."""

    dotted: str

    def __str__(self) -> str:
        return f"<{self.dotted}>"


def to_plain(value: Any, allowed: AbstractSet[str]) -> Any:
    """Return numbers, text, lists, dicts, tensors and placeholders for a value of a pickle.

    Args:
        value: what `pickles.read_pickle` or torch gave.
        allowed: dotted names of the classes that may become values.
    """
    return _convert(value, allowed, iter(range(_MAX_NODES)), 0)


def to_array(value: Any) -> "np.ndarray[Any, Any] | None":
    """Return the numpy array that a placeholder stands for, or None when it is none.

    Only dtypes of plain numbers, and only when shape and bytes agree.
    """
    if not isinstance(value, UnresolvedCall):
        return None
    if value.dotted in RECONSTRUCT and value.state and isinstance(value.state[0], tuple):
        state = value.state[0]
        if len(state) != 5:
            return None
        _, shape, dtype, by_column, content = state
        return _array(shape, dtype, "F" if by_column else "C", content)
    if value.dotted in FROMBUFFER and len(value.args) == 4:
        content, dtype, shape, order = value.args
        return _array(shape, dtype, order, content)
    return None


def stock_class(name: Global) -> type[nn.Module] | None:
    """Return the class that a name of torch's own layers stands for; nothing is imported or run."""
    module = sys.modules.get(name.module)
    if module is None or not name.module.startswith("torch.nn.modules."):
        return None
    found = vars(module).get(name.name)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        return None
    return found if found.__module__ == name.module else None


def _convert(value: Any, allowed: AbstractSet[str], left: Iterator[int], depth: int) -> Any:
    if depth > _MAX_DEPTH or next(left, None) is None:
        return Placeholder("too deeply nested")

    def inner(item: Any) -> Any:
        return _convert(item, allowed, left, depth + 1)

    if isinstance(value, UnresolvedCall):
        maker = _MAKERS.get(value.dotted) if value.dotted in allowed else None
        made = _UNMADE if maker is None else maker(value)
        return Placeholder(value.dotted) if made is _UNMADE else inner(made)
    if isinstance(value, Global):
        if value.dotted in allowed:
            return value.dotted
        found = stock_class(value) if "torch.nn.*" in allowed else None
        return found or Placeholder(value.dotted)
    if isinstance(value, Mapping):
        return {_key(key): inner(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and not isinstance(value, torch.Size):
        items = [inner(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value.item() if isinstance(value, np.generic) else value


def _key(key: Any) -> Any:
    if isinstance(key, str | int | float | bool | None):
        return key
    if isinstance(key, Global):
        return key.dotted  # Lightning before 1.x: a callback's class
    return f"<{key.dotted}>" if isinstance(key, UnresolvedCall) else str(key)


_UNMADE = object()


def _dict_items(value: UnresolvedCall) -> Any:
    found = dict(arg) if value.args and isinstance(arg := value.args[0], Mapping) else {}
    found.update((key, item) for key, item in value.pairs if isinstance(key, str | int | Global))
    return found


def _path(value: UnresolvedCall) -> Any:
    parts = [part for part in value.args if isinstance(part, str)]
    head = "/" if parts[:1] == ["/"] else ""
    return head + "/".join(part for part in parts if part != "/")


def _sequence(value: UnresolvedCall) -> Any:
    items = value.args[0] if value.args and isinstance(value.args[0], list | tuple) else []
    return [*items, *value.items]


def _written(value: UnresolvedCall) -> Any:
    # Not a range object: a list would be made of it, as long as the file likes.
    return f"{value.dotted.removeprefix('builtins.')}({', '.join(map(str, value.args))})"


def _moment(kind: Callable[..., Any]) -> Callable[[UnresolvedCall], Any]:
    def make(value: UnresolvedCall) -> Any:
        try:
            return kind(*value.args).isoformat()
        except (TypeError, ValueError):
            return _UNMADE

    return make


def _duration(value: UnresolvedCall) -> Any:
    numbers = [part for part in value.args if isinstance(part, int | float)]
    try:
        return str(datetime.timedelta(*numbers[:3]))
    except (OverflowError, TypeError):
        return _UNMADE


def _omega(value: UnresolvedCall) -> Any:
    """Return what a container or a node of OmegaConf holds."""
    return value.attributes.get("_content", value.attributes.get("_val"))


def _scalar(value: UnresolvedCall) -> Any:
    if len(value.args) != 2:
        return _UNMADE
    dtype, content = value.args
    array = _array((), dtype, "C", content)
    return _UNMADE if array is None else array.item()


def _to_array(value: UnresolvedCall) -> Any:
    array = to_array(value)
    return _UNMADE if array is None else array if array.ndim else array.item()


def _array(shape: Any, dtype: Any, order: Any, content: Any) -> "np.ndarray[Any, Any] | None":
    found = _numpy_dtype(dtype)
    if found is None or not isinstance(content, bytes | bytearray) or order not in ("C", "F"):
        return None
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        return None
    if math.prod(shape) * found.itemsize != len(content):
        return None
    return np.frombuffer(content, found).reshape(shape, order=order)


def _numpy_dtype(value: Any) -> "np.dtype[Any] | None":
    """Read a dtype of plain numbers: never one of objects or records, whose state can lie."""
    if isinstance(value, UnresolvedCall) and value.dotted == "numpy.dtype" and value.args:
        code = value.args[0]
        state = value.state[0] if value.state else ()
        swapped = isinstance(state, tuple) and len(state) > 1 and state[1] == ">"
        if isinstance(code, str) and code in _DTYPE_CODES:
            dtype = np.dtype(code)
            return dtype.newbyteorder(">") if swapped else dtype
    if isinstance(value, UnresolvedCall | Global) and value.dotted.startswith("numpy.dtypes."):
        name = value.dotted.removeprefix("numpy.dtypes.").removesuffix("DType").lower()
        return np.dtype(name) if name in _DTYPE_NAMES else None
    return None


_DTYPE_CODES = frozenset(
    ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
)
_DTYPE_NAMES = frozenset(np.dtype(code).name for code in _DTYPE_CODES if "c" not in code)
_OMEGACONF_NODES = [
    f"omegaconf.nodes.{kind}Node"
    for kind in ("Any", "Boolean", "Bytes", "Enum", "Float", "Integer", "Path", "String")
]


def _both(module: str, name: str) -> Sequence[str]:
    """Name a function of numpy as numpy 1 and as numpy 2 write it."""
    return (f"numpy.core.{module}.{name}", f"numpy._core.{module}.{name}")


RECONSTRUCT = frozenset(_both("multiarray", "_reconstruct"))
FROMBUFFER = frozenset(_both("numeric", "_frombuffer"))
SCALARS = frozenset(_both("multiarray", "scalar"))

_MAKERS: Mapping[str, Callable[[UnresolvedCall], Any]] = {
    name: maker
    for maker, names in (
        (_to_array, " ".join(RECONSTRUCT | FROMBUFFER)),
        (_scalar, " ".join(SCALARS)),
        (lambda value: getattr(_numpy_dtype(value), "name", _UNMADE), "numpy.dtype"),
        (lambda value: value.attributes, "argparse.Namespace types.SimpleNamespace"),
        (_path, "pathlib.PosixPath pathlib.PurePosixPath pathlib._local.PosixPath"),
        (_path, "pathlib.WindowsPath pathlib.PureWindowsPath"),
        (_dict_items, "collections.defaultdict builtins.dict"),
        (_dict_items, "lightning.fabric.utilities.data.AttributeDict"),
        (_dict_items, "lightning_fabric.utilities.data.AttributeDict"),
        (_dict_items, "pytorch_lightning.utilities.parsing.AttributeDict"),
        (_sequence, "builtins.list builtins.frozenset collections.deque"),
        (_written, "builtins.range builtins.slice"),
        (_moment(datetime.datetime), "datetime.datetime"),
        (_moment(datetime.date), "datetime.date"),
        (_moment(datetime.time), "datetime.time"),
        (_duration, "datetime.timedelta"),
        (_omega, "omegaconf.dictconfig.DictConfig omegaconf.listconfig.ListConfig"),
        (_omega, " ".join(_OMEGACONF_NODES)),
    )
    for name in names.split()
}


# -- a pickled `nn.Module` → its state dict, or the module itself where torch has its class --------


def state_dict(tree: UnresolvedCall) -> dict[str, Tensor]:
    """Return what `module.state_dict()` would: names, order and tensors; no hook of it runs."""
    state: dict[str, Tensor] = {}
    for prefix, module in _walk(tree):
        attributes = module.attributes
        left_out = attributes.get("_non_persistent_buffers_set")
        left_out = left_out if isinstance(left_out, set | list) else ()
        for group, skipped in (("_parameters", ()), ("_buffers", left_out)):
            for name, tensor in _items(attributes.get(group)):
                if isinstance(tensor, Tensor) and name not in skipped:
                    state[prefix + name] = tensor.detach()
    return state


def _walk(tree: UnresolvedCall) -> Iterator[tuple[str, UnresolvedCall]]:
    """Yield each module with its prefix, parents first.

    Raises:
        CheckpointError: a module that holds itself, or more of them than any network has.
    """
    waiting: list[tuple[str, UnresolvedCall, int]] = [("", tree, 0)]
    for _ in range(_MAX_MODULES):
        if not waiting:
            return
        prefix, module, depth = waiting.pop()
        yield prefix, module
        children = _items(module.attributes.get("_modules"))
        if depth < _MAX_MODULE_DEPTH:
            waiting += [
                (f"{prefix}{name}.", child, depth + 1)
                for name, child in reversed(children)
                if is_module(child)
            ]
    raise CheckpointError(
        f"it holds over {_MAX_MODULES} modules, or itself; save model.state_dict() alone"
    )


def _items(value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        return []
    return [(key, item) for key, item in value.items() if isinstance(key, str)]


def build_stock(tree: UnresolvedCall) -> nn.Module | None:
    """Build a module whose classes are all torch.nn's own; None when one is not, or has code.

    Each is made empty and given its plain attributes; hooks and functions are none.
    """
    try:
        return _build(tree, 0)
    # torch's own __setstate__ meets what a file of another version, or a hostile one, left out.
    except Exception:
        return None


class _NotStock(ValueError):
    """A class, a function or a value that is not torch.nn's own."""


def _build(tree: Any, depth: int) -> nn.Module:
    if not isinstance(tree, UnresolvedCall):
        raise _NotStock(type(tree).__name__)
    found = stock_class(tree.function) if isinstance(tree.function, Global) else None
    if found is None or tree.args or depth > _MAX_MODULE_DEPTH:
        raise _NotStock(tree.dotted)
    module = found.__new__(found)
    nn.Module.__init__(module)
    state = {name: _attribute(name, value, depth) for name, value in tree.attributes.items()}
    module.__setstate__(state)  # type: ignore[no-untyped-call]
    return module


def _attribute(name: str, value: Any, depth: int) -> Any:
    if name == "_parameters":
        return {key: _parameter(item) for key, item in _items(value)}
    if name == "_buffers":
        return {key: item if isinstance(item, Tensor) else None for key, item in _items(value)}
    if name == "_modules":
        parts = dict(_items(value))
        return {
            key: None if part is None else _build(part, depth + 1) for key, part in parts.items()
        }
    if name.endswith(_HOOKS):
        if value:
            raise _NotStock(name)
        return {}
    return _plain_attribute(value)


def _parameter(value: Any) -> nn.Parameter | None:
    if not isinstance(value, Tensor):
        return None
    return nn.Parameter(value, requires_grad=value.is_floating_point())


def _plain_attribute(value: Any) -> Any:
    if isinstance(value, list | tuple | set):
        return type(value)(_plain_attribute(item) for item in value)
    if isinstance(value, Global) and (function := _FUNCTIONS.get(value.dotted)) is not None:
        return function
    if isinstance(value, bool | int | float | str | torch.dtype | torch.Size | None):
        return value
    raise _NotStock(type(value).__name__)


# What torch.nn's transformer layers keep as an attribute.
_FUNCTIONS: Mapping[str, Any] = {
    "torch.nn.functional.relu": nn.functional.relu,
    "torch.nn.functional.gelu": nn.functional.gelu,
    "torch._C._nn.gelu": nn.functional.gelu,
}
