"""The calls of a pickle that give values: torch's own, each made again with checked arguments.

Torch's functions of the same names do as the file tells them, also where that reads beyond a
storage or allocates without end. Here every size, stride and offset is compared with the bytes
that are there, before a tensor is made of them.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelyard.exporter.ingest.pickles import (
    NOT_REBUILT,
    BadPickle,
    Global,
    UnresolvedCall,
    hashable,
)
from modelyard.exporter.ingest.plain import to_array

_MAX_DIMS = 64
_MAX_NUMEL = 1 << 48


@dataclass(frozen=True, eq=False)
class Storage:
    """Bytes that tensors share, and the type that the file gives them."""

    untyped: torch.UntypedStorage
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Count the bytes that are really there."""
        return self.untyped.nbytes()


class Rebuilder:
    """Returns the values of torch's own calls; keeps the checks that need the storages' content.

    Args:
        storages_are_filled: false while the content follows later in the file (legacy format).
    """

    def __init__(self, *, storages_are_filled: bool = True) -> None:
        self._sparse: list[tuple[Any, Any]] = []
        self._calls: dict[str, Callable[..., Any]] = {
            **_CALLS,
            **dict.fromkeys(_FROM_TYPE, self._rebuild_from_type),
            _SPARSE: self._rebuild_sparse,
            _NESTED: _rebuild_nested if storages_are_filled else lambda *_: NOT_REBUILT,
        }

    def __call__(self, function: Global, args: tuple[Any, ...]) -> Any:
        """Return the call's value, or `NOT_REBUILT` for a call of anything else.

        Raises:
            BadPickle: the call is one of torch's, and its arguments are not what torch writes.
        """
        made = self._calls.get(function.dotted)
        return NOT_REBUILT if made is None else made(*args)

    def check_contents(self) -> None:
        """Check what could not be checked before every storage had its content.

        Raises:
            BadPickle: a sparse tensor whose indices leave it.
        """
        for layout, data in self._sparse:
            _rebuild_sparse(layout, data, is_checked=True)

    def _rebuild_sparse(self, layout: Any, data: Any) -> Tensor:
        self._sparse.append((layout, data))
        return _rebuild_sparse(layout, data)

    def _rebuild_from_type(self, function: Any, kind: Any, args: Any, _state: Any) -> Any:
        """Rebuild a tensor with attributes; of a subclass, nothing."""
        is_plain = isinstance(kind, Global) and kind.dotted in _TENSOR_CLASSES
        is_call = isinstance(function, Global) and isinstance(args, tuple)
        return self(function, args) if is_plain and is_call else NOT_REBUILT


def global_value(name: Global) -> Any:
    """Return the value of a name that is a constant of torch (a dtype, say), else the name."""
    return _CONSTANTS.get(name.dotted, name)


def storage_dtype(kind: Any) -> torch.dtype:
    """Return the element type of a storage class that the file names.

    Raises:
        BadPickle: it names no storage class of torch.
    """
    if isinstance(kind, Global) and kind.module in _STORAGE_MODULES:
        dtype = _STORAGES.get(kind.name)
        if dtype is not None:
            return dtype
    seen = kind.dotted if isinstance(kind, Global) else type(kind).__name__
    raise BadPickle(f"a storage of type {seen}")


def is_known(dotted: str) -> bool:
    """Return whether this reader gives a value for a name, so that it is not a refused global."""
    module, _, name = dotted.rpartition(".")
    return dotted in KNOWN or (module in _STORAGE_MODULES and name in _STORAGES)


def tensor_on(
    storage: Any, offset: Any, size: Any, stride: Any, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a tensor on a storage that holds all of it.

    Raises:
        BadPickle: it would leave its storage, or sizes and strides are not such.
    """
    if not isinstance(storage, Storage):
        raise BadPickle(f"a tensor on a {type(storage).__name__}")
    dtype = dtype or storage.dtype
    size, stride = _sizes(size), _sizes(stride)
    _check_extent(size, stride, _count(offset), storage.nbytes // dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage.untyped, offset, size, stride)


def _check_extent(size: Sequence[int], stride: Sequence[int], offset: int, available: int) -> None:
    if len(size) != len(stride):
        raise BadPickle(f"{len(size)} sizes with {len(stride)} strides")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    needed = last + 1 if all(size) else 0
    if needed > available or offset > max(available, needed):
        raise BadPickle(
            f"a tensor of shape {list(size)} that needs {max(needed, offset)} elements, where "
            f"{available} are stored"
        )


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > _MAX_DIMS:
        raise BadPickle("a shape that is not a tuple of numbers")
    size = tuple(_count(n) for n in value)
    if math.prod(size) > _MAX_NUMEL or any(n > _MAX_NUMEL for n in size):
        raise BadPickle(f"a tensor of shape {list(size)}")
    return size


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise BadPickle(f"{str(value)[:40]} where a count belongs")
    return value


def _dtype(value: Any) -> torch.dtype:
    value = global_value(value) if isinstance(value, Global) else value
    if not isinstance(value, torch.dtype):
        raise BadPickle(f"a {type(value).__name__} where a dtype belongs")
    return value


def _rebuild_v2(*args: Any) -> Tensor:
    """Rebuild from storage, offset, size, stride and, of later versions, gradient, hooks, bits."""
    return _rebuild_v3(*args[:6], None, *args[6:])


def _rebuild_v3(*args: Any) -> Tensor:
    """Rebuild as before, of a dtype that stands behind the hooks and is not the storage's."""
    if not 4 <= len(args) <= 8:
        raise BadPickle(f"a tensor of {len(args)} parts")
    storage, offset, size, stride, _, _, dtype, metadata = (*args, *[None] * 4)[:8]
    dtype = None if dtype is None else _dtype(dtype)
    tensor = tensor_on(storage, offset, size, stride, dtype)
    if not isinstance(metadata, Mapping):
        return tensor
    if metadata.get("conj") is True and tensor.is_complex():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if metadata.get("neg") is True else tensor


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    if not isinstance(data, Tensor):
        raise BadPickle(f"a parameter that is a {type(data).__name__}")
    return data


def _rebuild_quantized(
    storage: Any, offset: Any, size: Any, stride: Any, scheme: Any, *_: Any
) -> Any:
    if not isinstance(storage, Storage) or not isinstance(scheme, tuple) or len(scheme) < 3:
        raise BadPickle("a quantised tensor without its parameters")
    size, stride = _sizes(size), _sizes(stride)
    _check_extent(size, stride, _count(offset), storage.nbytes // storage.dtype.itemsize)
    # Made at its full size first, so a shape that only strides of 0 could fill is none.
    if math.prod(size) > storage.nbytes:
        raise BadPickle(f"a quantised tensor of shape {list(size)} on {storage.nbytes} bytes")
    kind, *rest = scheme
    kind = global_value(kind) if isinstance(kind, Global) else kind
    if kind == torch.per_tensor_affine:
        scale, zero_point = rest
        if not isinstance(scale, float | int) or type(zero_point) is not int:
            raise BadPickle("a quantised tensor without its scale")
        empty = torch._empty_affine_quantized(
            size, scale=scale, zero_point=zero_point, dtype=storage.dtype
        )
    elif kind in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        scales, zero_points, axis = rest
        if not 0 <= _count(axis) < len(size) or not all(
            isinstance(value, Tensor) and value.numel() == size[axis]
            for value in (scales, zero_points)
        ):
            raise BadPickle("a quantised tensor whose scales do not fit it")
        empty = torch._empty_per_channel_affine_quantized(
            size, scales=scales, zero_points=zero_points, axis=axis, dtype=storage.dtype
        )
    else:
        return NOT_REBUILT
    return empty.set_(storage.untyped, offset, size, stride)


def _rebuild_on_cpu(data: Any, dtype: Any, *_: Any) -> Any:
    """Rebuild the tensor of a device that has no storages of its own (XLA)."""
    if isinstance(data, UnresolvedCall):
        array = to_array(data)
        if array is None:
            return NOT_REBUILT
        data = torch.from_numpy(array.copy())
    if not isinstance(data, Tensor) or data.layout is not torch.strided:
        return NOT_REBUILT
    return data.to(_dtype(dtype))


def _rebuild_sparse(layout: Any, data: Any, is_checked: bool = False) -> Tensor:
    if not isinstance(data, tuple) or not all(
        isinstance(part, Tensor) and part.layout is torch.strided for part in data[:2]
    ):
        raise BadPickle("a sparse tensor without indices")
    try:
        if layout is torch.sparse_coo and len(data) in (3, 4):
            indices, values, size, *rest = data
            merged = rest[0] if rest and isinstance(rest[0], bool) else None
            return torch.sparse_coo_tensor(
                indices, values, _sizes(size), is_coalesced=merged, check_invariants=is_checked
            )
        if layout in _COMPRESSED and len(data) == 4 and isinstance(data[2], Tensor):
            outer, inner, values, size = data
            return torch.sparse_compressed_tensor(
                outer, inner, values, _sizes(size), layout=layout, check_invariants=is_checked
            )
    except RuntimeError as error:
        raise BadPickle(f"a sparse tensor that is wrong: {error}") from error
    raise BadPickle(f"a sparse tensor of layout {layout}")


def _rebuild_nested(buffer: Any, sizes: Any, strides: Any, offsets: Any) -> Tensor:
    parts = (buffer, sizes, strides, offsets)
    if not all(isinstance(part, Tensor) and part.layout is torch.strided for part in parts):
        raise BadPickle("a nested tensor without its sizes")
    if buffer.ndim != 1 or not buffer.is_contiguous() or sizes.shape != strides.shape:
        raise BadPickle("a nested tensor whose sizes do not fit")
    if sizes.dtype is not torch.int64 or strides.dtype is not torch.int64 or sizes.ndim != 2:
        raise BadPickle("a nested tensor whose sizes are not integers")
    if offsets.dtype is not torch.int64 or offsets.shape != sizes.shape[:1]:
        raise BadPickle("a nested tensor whose offsets do not fit")
    rows = zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True)
    for size, stride, offset in rows:
        _check_extent(_sizes(size), _sizes(stride), _count(offset), buffer.numel())
    # Copies: what was checked must not be what the file changes through a shared storage.
    return torch._nested_view_from_buffer(buffer, sizes.clone(), strides.clone(), offsets.clone())


def _make_counter(counts: Any = ()) -> Any:
    made: Counter[Any] = Counter()
    dict.update(made, _pairs(counts))  # not Counter's own, which would count the pairs
    return made


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise BadPickle("a dict that is not made of pairs")
    return [(hashable(key), item) for key, item in pairs]


def _make_device(kind: Any, index: Any = None) -> Any:
    if not isinstance(kind, str) or not (index is None or type(index) is int):
        raise BadPickle("a device without a name")
    try:
        return torch.device(kind if index is None else f"{kind}:{index}")
    except RuntimeError as error:
        raise BadPickle(f"device {kind!r}") from error


def _get_layout(name: Any) -> Any:
    for layout in (torch.strided, torch.sparse_coo, *_COMPRESSED):
        if str(layout) == name:
            return layout
    raise BadPickle(f"layout {name!r}")


def _encode(text: Any, codec: Any = "utf-8") -> Any:
    """Return bytes, which protocol 2 writes as text and this call."""
    if not isinstance(text, str) or codec not in ("latin1", "latin-1", "ascii", "utf-8"):
        return NOT_REBUILT
    return text.encode(codec, "strict" if codec != "utf-8" else "surrogatepass")


def _make_bytearray(content: Any = b"", codec: Any = None) -> Any:
    if isinstance(content, str) and codec in ("latin1", "latin-1"):
        content = content.encode("latin-1")
    # Not a number, which would be a size to allocate.
    return bytearray(content) if isinstance(content, bytes | bytearray) else NOT_REBUILT


def _make_set(items: Any = ()) -> Any:
    if not isinstance(items, list | tuple | set | frozenset):
        return NOT_REBUILT
    return {hashable(item) for item in items}


def _make_complex(real: Any, imaginary: Any = 0.0) -> Any:
    return complex(real, imaginary) if isinstance(real, float | int) else NOT_REBUILT


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_SPARSE = "torch._utils._rebuild_sparse_tensor"
_NESTED = "torch._utils._rebuild_nested_tensor"
_FROM_TYPE = ("torch._tensor._rebuild_from_type_v2", "torch.tensor._rebuild_from_type_v2")
_TENSOR_CLASSES = (
    *("torch.Tensor", "torch._tensor.Tensor"),
    *("torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"),
)

_CALLS: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _rebuild_v2,
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._utils._rebuild_qtensor": _rebuild_quantized,
    "torch._utils._rebuild_meta_tensor_no_storage": lambda dtype, size, stride, *_: (
        torch.empty_strided(_sizes(size), _sizes(stride), dtype=_dtype(dtype), device="meta")
    ),
    "torch._utils._rebuild_device_tensor_from_numpy": _rebuild_on_cpu,
    "torch._utils._rebuild_xla_tensor": _rebuild_on_cpu,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _rebuild_on_cpu,
    "torch.serialization._get_layout": _get_layout,
    "torch.Size": lambda sizes=(): torch.Size(_sizes(sizes)),
    "torch.device": _make_device,
    "collections.OrderedDict": lambda pairs=(): OrderedDict(_pairs(pairs)),
    "collections.Counter": _make_counter,
    "_codecs.encode": _encode,
    "builtins.bytearray": _make_bytearray,
    "builtins.set": _make_set,
    "builtins.complex": _make_complex,
}

_DTYPES: Mapping[str, torch.dtype] = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_SCHEMES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.qscheme)}
_CONSTANTS: Mapping[str, Any] = {**_DTYPES, **_SCHEMES}

_STORAGE_MODULES = frozenset(["torch", "torch.cuda", "torch.storage"])
_STORAGES: Mapping[str, torch.dtype] = {
    kind.__name__: dtype
    for kind in torch._storage_classes
    if isinstance(dtype := getattr(kind, "_dtype", None), torch.dtype)
} | dict.fromkeys(("UntypedStorage", "_UntypedStorage"), torch.uint8)

KNOWN = frozenset([*_CALLS, *_CONSTANTS, _SPARSE, _NESTED, *_FROM_TYPE, *_TENSOR_CLASSES])
"""Names that torch's own weights-only loader takes too, and that get a value here."""
