"""torch.export's `.pt2` → its weights and signature, from JSON and raw bytes alone.

`torch.export.load` unpickles sample inputs and some weights, evaluates shape expressions and
compiles guards. Nothing here does; what would be unpickled or is native code is named.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.pickles import BadPickle
from modelyard.exporter.ingest.rebuild import is_known
from modelyard.exporter.ingest.source import Entry, Source, read_directory, read_entry
from modelyard.exporter.ingest.strict_json import MAX_BYTES, parse_object
from modelyard.exporter.ingest.torch_file import read_torch_file

_NATIVE = re.compile(r"\.(so|dylib|dll|o|cubin|ptx|cpp)$|/aotinductor/")
_DTYPES: Mapping[int, torch.dtype] = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.complex32,
    10: torch.complex64,
    11: torch.complex128,
    12: torch.bool,
    13: torch.bfloat16,
    28: torch.uint16,
    29: torch.float8_e4m3fn,
    30: torch.float8_e5m2,
    31: torch.float8_e4m3fnuz,
    32: torch.float8_e5m2fnuz,
    33: torch.float8_e8m0fnu,
    34: torch.uint32,
    35: torch.uint64,
}


@dataclass(frozen=True)
class ExportedProgram:
    """What a `.pt2` says of itself."""

    tensors: Mapping[str, Tensor]
    inputs: tuple[Mapping[str, Any], ...]
    """`name`, `dtype` and `shape` of each; a dynamic size is a symbol's name."""
    outputs: tuple[Mapping[str, Any], ...]
    dims: Mapping[str, Mapping[str, int | None]]
    """Symbol → its smallest and largest size."""
    torch_version: str | None
    schema_version: str | None
    operators: int
    unsafe: tuple[str, ...]
    """What would run code when torch loads it, a phrase each."""
    refused: tuple[str, ...]
    """Names that its pickles want imported."""


def read_exported_program(source: Source) -> ExportedProgram:
    """Read a package's JSON and map its weights.

    Raises:
        CheckpointError: it holds no program, or its JSON or weights are damaged.
    """
    entries = read_directory(source)
    unsafe = [f"native code in {name}" for name in entries if _NATIVE.search(name)]
    refused: set[str] = set()
    tensors: dict[str, Tensor] = {}
    for name, entry in entries.items():
        if "/data/sample_inputs/" in f"/{name}" and entry.size:
            wanted = _wanted(source, entry)
            refused |= wanted
            if wanted:
                unsafe.append(f"sample inputs that want {', '.join(sorted(wanted))}")
        elif name.endswith("_weights_config.json"):
            found, pickled = _read_weights(source, entries, entry)
            tensors.update(found)
            unsafe += [f"the weight {weight!r}, stored as a pickle" for weight in pickled]
        elif name.endswith("_constants_config.json"):
            config = parse_object(read_entry(source, entry, limit=MAX_BYTES), name)
            unsafe += [
                f"the constant {constant!r}, stored as a pickle"
                for constant, value in (config.get("config") or {}).items()
                if not isinstance(value, dict) or _is_pickled(value)
            ]
    model = next((e for n, e in entries.items() if re.search(r"(^|/)models/[^/]+\.json$", n)), None)
    program = {} if model is None else _read_json(source, model)
    if not program and not unsafe:
        raise CheckpointError(f'"{source.name}" holds no exported program; export it again')
    return _describe(program, tensors, tuple(unsafe), tuple(sorted(refused)))


def _read_json(source: Source, entry: Entry) -> dict[str, Any]:
    return parse_object(read_entry(source, entry, limit=MAX_BYTES), entry.name)


def _wanted(source: Source, entry: Entry) -> set[str]:
    part = source.part(entry.name, entry.start, entry.stored)
    try:
        return {name for name in read_torch_file(part).wanted if not is_known(name)}
    except (CheckpointError, BadPickle):
        return {"?"}


def _is_pickled(value: Mapping[str, Any]) -> bool:
    return bool(value.get("use_pickle")) or not isinstance(value.get("tensor_meta"), dict)


def _read_weights(
    source: Source, entries: Mapping[str, Entry], config: Entry
) -> tuple[dict[str, Tensor], list[str]]:
    folder = config.name.rpartition("/")[0]
    tensors: dict[str, Tensor] = {}
    pickled: list[str] = []
    storages: dict[str, torch.UntypedStorage] = {}
    content = _read_json(source, config).get("config")
    for name, value in (content if isinstance(content, dict) else {}).items():
        if not isinstance(value, dict) or _is_pickled(value):
            pickled.append(name)
            continue
        payload = entries.get(f"{folder}/{value.get('path_name')}")
        if payload is None:
            raise CheckpointError(f'"{source.name}": the weight "{name}" is missing')
        if payload.name not in storages:
            storages[payload.name] = source.storage(payload.start, payload.size)
        tensors[name] = _tensor(source, name, storages[payload.name], value["tensor_meta"])
    return tensors, pickled


def _tensor(
    source: Source, name: str, storage: torch.UntypedStorage, meta: Mapping[str, Any]
) -> Tensor:
    dtype = _DTYPES.get(meta.get("dtype") or 0)
    sizes, strides = _ints(meta.get("sizes")), _ints(meta.get("strides"))
    offset = _ints([meta.get("storage_offset")])
    if dtype is None or sizes is None or strides is None or offset is None:
        raise CheckpointError(f'"{source.name}": the weight "{name}" has no fixed shape')
    if len(sizes) != len(strides) or len(sizes) > 64:
        raise CheckpointError(f'"{source.name}": the weight "{name}" has no fixed shape')
    last = offset[0] + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    if all(sizes) and (last + 1) * dtype.itemsize > storage.nbytes():
        raise CheckpointError(
            f'"{source.name}" is refused: the weight "{name}" of shape {sizes} leaves its '
            f"{storage.nbytes()} bytes"
        )
    return torch.empty(0, dtype=dtype).set_(storage, offset[0], sizes, strides)


def _ints(values: Any) -> list[int] | None:
    if not isinstance(values, list):
        return None
    found = [value.get("as_int") if isinstance(value, dict) else None for value in values]
    if not all(type(number) is int and 0 <= number < 1 << 48 for number in found):
        return None
    return [number for number in found if number is not None]


def _describe(
    program: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    unsafe: tuple[str, ...],
    refused: tuple[str, ...],
) -> ExportedProgram:
    module = _dict(program.get("graph_module"))
    graph = _dict(module.get("graph"))
    values = _dict(graph.get("tensor_values"))
    signature = _dict(module.get("signature"))
    schema = _dict(program.get("schema_version"))
    return ExportedProgram(
        tensors=tensors,
        inputs=_arguments(signature.get("input_specs"), "user_input", values),
        outputs=_arguments(signature.get("output_specs"), "user_output", values),
        dims=_dims(program.get("range_constraints")),
        torch_version=_text(program.get("torch_version")),
        schema_version=f"{schema['major']}.{schema.get('minor')}" if "major" in schema else None,
        operators=len(_list(graph.get("nodes"))),
        unsafe=unsafe,
        refused=refused,
    )


def _arguments(specs: Any, kind: str, values: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    found = []
    for spec in _list(specs):
        if not isinstance(spec, dict) or kind not in spec:
            continue
        name = _text(_dict(_dict(_dict(spec[kind]).get("arg")).get("as_tensor")).get("name"))
        meta = _dict(values.get(name or ""))
        dtype = _DTYPES.get(meta.get("dtype") or 0)
        shape = [_size(size) for size in _list(meta.get("sizes"))]
        found.append(
            {"name": name, "dtype": str(dtype).removeprefix("torch.") if dtype else None}
            | {"shape": shape}
        )
    return tuple(found)


def _size(size: Any) -> int | str:
    value = _dict(size)
    if type(value.get("as_int")) is int:
        return int(value["as_int"])
    text = _text(_dict(value.get("as_expr")).get("expr_str")) or "?"
    symbol = re.match(r"Symbol\('(\w+)'", text)
    return symbol.group(1) if symbol else text[:80]


def _dims(constraints: Any) -> dict[str, dict[str, int | None]]:
    found = {}
    for name, span in _dict(constraints).items():
        symbol = re.match(r"Symbol\('(\w+)'", name)
        found[symbol.group(1) if symbol else name[:80]] = {
            "min": _dict(span).get("min_val"),
            "max": _dict(span).get("max_val"),
        }
    return found


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
