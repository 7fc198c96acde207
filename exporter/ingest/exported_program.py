"""torch.export's `.pt2` → its weights and signature, from JSON and raw bytes alone.

`torch.export.load` unpickles sample inputs and some weights, evaluates shape expressions and
compiles guards. Nothing here does; whether it would run code is judged by `handlers.program`, as
before a worker loads it.
"""

import re
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.pickles import BadPickle
from modelyard.exporter.ingest.rebuild import Storage, is_known, tensor_on
from modelyard.exporter.ingest.source import MAX_JSON_BYTES, Source, parse_object
from modelyard.exporter.ingest.torch_file import TorchZip, read_torch_file
from modelyard.exporter.ingest.value import ParsedCheckpoint, Weights, as_dict, as_text
from modelyard.handlers.judge.check import DTYPES, check

PROGRAM = "exported program"
_MOST = 8  # the end of a range that the program leaves open
_MOST_STATED = 64  # of one that it states, which may be longer: each size costs time to prove


def read_exported_program(source: Source) -> ParsedCheckpoint:
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
    module = as_dict(program.get("graph_module"))
    graph, signature = as_dict(module.get("graph")), as_dict(module.get("signature"))
    values, schema = as_dict(graph.get("tensor_values")), as_dict(program.get("schema_version"))
    inputs = _arguments(signature.get("input_specs"), "user_input", values)
    dims = _dims(program.get("range_constraints"))
    version = f"{schema['major']}.{schema.get('minor')}" if "major" in schema else None
    return ParsedCheckpoint(
        kind=PROGRAM,
        loader="json",
        weights={"": Weights(tensors)},
        writer="torch.export",
        writer_version=as_text(program.get("torch_version")),
        inputs=_input_lines(inputs, dims),
        refused=tuple(sorted(refused)),
        findings=findings,
        about={
            "inputs": inputs,
            "outputs": _arguments(signature.get("output_specs"), "user_output", values),
            "dims": dims,
            "operators": len(_list(graph.get("nodes"))),
            "schema_version": version,
        },
    )


def _input_lines(
    inputs: Sequence[Mapping[str, Any]], dims: Mapping[str, Mapping[str, int | None]]
) -> tuple[str, ...]:
    """Return inputs as `--input` is written; nothing where one has no such form."""
    lines = []
    names: dict[int | str, str] = {}
    for place, value in enumerate(inputs):
        for axis, size in enumerate(value["shape"]):
            names.setdefault(size, "batch" if place == axis == 0 else f"{value['name']}_{axis}")
        sizes = [_dim(size, names[size], dims) for size in value["shape"]]
        if value["name"] is None or value["dtype"] is None or None in sizes:
            return ()
        lines.append(f"{value['name']}:{value['dtype']}[{','.join(map(str, sizes))}]")
    return tuple(lines)


def _dim(size: int | str, name: str, dims: Mapping[str, Mapping[str, int | None]]) -> str | None:
    if isinstance(size, int):
        return str(size)
    span = dims.get(size)
    if span is None or not all(type(end) in (int, NoneType) for end in span.values()):
        return None  # an expression of other sizes, or nothing that is a range
    low = max(span["min"] or 1, 1)
    # A lower limit of 2 is the tracer's own assumption, not the model's.
    low = 1 if low == 2 else low
    most = span["max"]
    high = max(_MOST, low + 1) if most is None else min(most, max(_MOST_STATED, 2 * low))
    return f"{name}={low}..{high}" if high > low else str(low)


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
        try:
            payload, meta = f"{folder}/{value['path_name']}", value["tensor_meta"]
            if payload not in storages:
                storages[payload] = container.storage(payload)
            storage = Storage(storages[payload], DTYPES[meta["dtype"]])
            sizes, steps = ([n["as_int"] for n in meta[key]] for key in ("sizes", "strides"))
            tensors[name] = tensor_on(storage, meta["storage_offset"]["as_int"], sizes, steps)
        # A pickle, or what has no place in the file: it is among the findings.
        except (AttributeError, BadPickle, KeyError, TypeError):
            continue
    return tensors


def _arguments(specs: Any, kind: str, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return `name`, `dtype` and `shape` of each; a dynamic size is a symbol's name."""
    arguments: list[Mapping[str, Any]] = []
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
    return arguments


def _size(size: Any) -> int | str:
    value = as_dict(size)
    if type(value.get("as_int")) is int:
        return int(value["as_int"])
    return _symbol(as_text(as_dict(value.get("as_expr")).get("expr_str")) or "?")


def _dims(constraints: Any) -> dict[str, dict[str, int | None]]:
    """Return symbol → its smallest and largest size."""
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
