"""torch.export's `.pt2` → its weights and signature, from JSON and raw bytes alone.

`torch.export.load` unpickles sample inputs and some weights, evaluates shape expressions and
compiles guards. Nothing here does; whether it would run code is judged by `handlers.program`, as
before a worker loads it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.pickles import BadPickle
from modelyard.exporter.ingest.rebuild import Storage, is_known, tensor_on
from modelyard.exporter.ingest.source import MAX_JSON_BYTES, Source, parse_object
from modelyard.exporter.ingest.torch_file import TorchZip, read_torch_file
from modelyard.exporter.ingest.value import as_dict, as_text
from modelyard.handlers.judge.check import DTYPES, check

_MOST = 8  # the end of a range that the program leaves open
_MOST_STATED = 64  # of one that it states, which may be longer: each size costs time to prove


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
    findings: tuple[str, ...]
    """Why a worker refuses to load it; `part: what is wrong`."""
    refused: tuple[str, ...]
    """Names that its pickles want imported."""

    @property
    def input_lines(self) -> tuple[str, ...]:
        """Its inputs as `--input` is written; nothing where one has no such form."""
        lines = []
        names: dict[int | str, str] = {}
        for place, value in enumerate(self.inputs):
            for axis, size in enumerate(value["shape"]):
                names.setdefault(size, "batch" if place == axis == 0 else f"{value['name']}_{axis}")
            sizes = [self._dim(size, names[size]) for size in value["shape"]]
            if value["name"] is None or value["dtype"] is None or None in sizes:
                return ()
            lines.append(f"{value['name']}:{value['dtype']}[{','.join(map(str, sizes))}]")
        return tuple(lines)

    def _dim(self, size: int | str, name: str) -> str | None:
        if isinstance(size, int):
            return str(size)
        span = self.dims.get(size)
        if span is None or not all(type(end) in (int, NoneType) for end in span.values()):
            return None  # an expression of other sizes, or nothing that is a range
        low = max(span["min"] or 1, 1)
        # A lower limit of 2 is the tracer's own assumption, not the model's.
        low = 1 if low == 2 else low
        most = span["max"]
        high = max(_MOST, low + 1) if most is None else min(most, max(_MOST_STATED, 2 * low))
        return f"{name}={low}..{high}" if high > low else str(low)


def read_exported_program(source: Source) -> ExportedProgram:
    """Read a package's JSON and map its weights.

    Raises:
        CheckpointError: it holds no program, or its JSON or weights are damaged.
    """
    findings = tuple(f"{part}: {problem}" for part, problem in check(source))
    container = TorchZip(source, may_deflate=lambda name: True)
    refused: set[str] = set()
    tensors: dict[str, Tensor] = {}
    program: dict[str, Any] = {}
    for name, entry in container.entries.items():
        if "/data/sample_inputs/" in f"/{name}" and entry.size_bytes:
            refused |= _wanted(container.part(name))
        elif name.endswith("_weights_config.json"):
            tensors.update(_read_weights(container, name))
        elif not program and re.search(r"(^|/)models/[^/]+\.json$", name):
            program = _read_json(container, name)
    if not program and not findings:
        raise CheckpointError(f'"{source.name}" holds no exported program; export it again')
    return _describe(program, tensors, findings, tuple(sorted(refused)))


def _read_json(container: TorchZip, name: str) -> dict[str, Any]:
    return parse_object(container.read(name, limit=MAX_JSON_BYTES), name)


def _wanted(samples: Source) -> set[str]:
    try:
        return {name for name in read_torch_file(samples).wanted if not is_known(name)}
    except (CheckpointError, BadPickle):
        return {"?"}


def _read_weights(container: TorchZip, config: str) -> dict[str, Tensor]:
    folder = config.rpartition("/")[0]
    tensors: dict[str, Tensor] = {}
    storages: dict[str, torch.UntypedStorage] = {}
    for name, value in as_dict(_read_json(container, config).get("config")).items():
        meta = as_dict(value).get("tensor_meta")
        if not isinstance(meta, dict) or value.get("use_pickle"):
            continue  # a pickle, which is among the findings
        payload = f"{folder}/{value.get('path_name')}"
        if payload not in container.entries:
            raise CheckpointError(f'"{container.source.name}": the weight "{name}" is missing')
        if payload not in storages:
            storages[payload] = container.storage(payload)
        tensors[name] = _tensor(container.source, name, storages[payload], meta)
    return tensors


def _tensor(
    source: Source, name: str, storage: torch.UntypedStorage, meta: Mapping[str, Any]
) -> Tensor:
    dtype = DTYPES.get(meta.get("dtype") or 0)
    sizes, strides = _ints(meta.get("sizes")), _ints(meta.get("strides"))
    offset = _ints([meta.get("storage_offset")])
    if dtype is None or None in (*sizes, *strides, *offset):
        raise CheckpointError(f'"{source.name}": the weight "{name}" has no fixed shape')
    try:
        return tensor_on(Storage(storage, dtype), offset[0], sizes, strides)
    except BadPickle as error:
        raise CheckpointError(
            f'"{source.name}" is refused: the weight "{name}" of shape {sizes} leaves its '
            f"{storage.nbytes()} bytes: {error}"
        ) from error


def _ints(values: Any) -> list[int | None]:
    if not isinstance(values, list):
        return [None]
    numbers = [as_dict(value).get("as_int") for value in values]
    return [number if type(number) is int and number >= 0 else None for number in numbers]


def _describe(
    program: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    findings: tuple[str, ...],
    refused: tuple[str, ...],
) -> ExportedProgram:
    module = as_dict(program.get("graph_module"))
    graph = as_dict(module.get("graph"))
    values = as_dict(graph.get("tensor_values"))
    signature = as_dict(module.get("signature"))
    schema = as_dict(program.get("schema_version"))
    return ExportedProgram(
        tensors=tensors,
        inputs=_arguments(signature.get("input_specs"), "user_input", values),
        outputs=_arguments(signature.get("output_specs"), "user_output", values),
        dims=_dims(program.get("range_constraints")),
        torch_version=as_text(program.get("torch_version")),
        schema_version=f"{schema['major']}.{schema.get('minor')}" if "major" in schema else None,
        operators=len(_list(graph.get("nodes"))),
        findings=findings,
        refused=refused,
    )


def _arguments(specs: Any, kind: str, values: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    arguments = []
    for spec in _list(specs):
        if not isinstance(spec, dict) or kind not in spec:
            continue
        tensor = as_dict(as_dict(as_dict(spec[kind]).get("arg")).get("as_tensor"))
        name = as_text(tensor.get("name"))
        meta = as_dict(values.get(name or ""))
        dtype = DTYPES.get(meta.get("dtype") or 0)
        shape = [_size(size) for size in _list(meta.get("sizes"))]
        element = str(dtype).removeprefix("torch.") if dtype else None
        arguments.append({"name": name, "dtype": element, "shape": shape})
    return tuple(arguments)


def _size(size: Any) -> int | str:
    value = as_dict(size)
    if type(value.get("as_int")) is int:
        return int(value["as_int"])
    return _symbol(as_text(as_dict(value.get("as_expr")).get("expr_str")) or "?")


def _dims(constraints: Any) -> dict[str, dict[str, int | None]]:
    return {
        _symbol(name): {end: as_dict(span).get(f"{end}_val") for end in ("min", "max")}
        for name, span in as_dict(constraints).items()
    }


def _symbol(text: str) -> str:
    """Return the name of a size that varies; of an expression, its text."""
    symbol = re.match(r"Symbol\('(\w+)'", text)
    return symbol.group(1) if symbol else text[:80]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
