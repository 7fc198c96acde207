"""ONNX model → graph values; modules from what torch's exporter notes, else from node names."""

import ast
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelyard.exporter.graph import Graph, Node, Value, dim_sizes, find_source, parameters_of
from modelyard.handlers.errors import LoadError

_Shape = tuple[int | str, ...]
_Shapes = Mapping[str, tuple[str, _Shape | None]]
"""Value name → dtype and shape."""


def read_onnx(artifact: Path, report: Mapping[str, Any] | None) -> Graph:
    """Read an ONNX model; weights in other files are not opened.

    Raises:
        LoadError: it is not an ONNX model.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        model = onnx.load(artifact, load_external_data=False)
    except DecodeError as error:
        raise LoadError(
            f"{artifact.name} is not an ONNX model ({error}); export it again"
        ) from error
    model = _inferred(model)
    types = _types(model.graph)
    parameters = {one.name: math.prod(one.dims) for one in model.graph.initializer}
    weights = {name: count for name, count in parameters.items() if "." in name}
    sizes = dim_sizes(report) or _one_item(model.graph, types, parameters)
    classes: dict[str, str] = {}
    author = (report or {}).get("model", "")
    nodes = tuple(_nodes(model.graph, types, weights, sizes, classes, author))
    return Graph(
        nodes=nodes,
        inputs=tuple(_value(one.name, types) for one in _inputs(model.graph, parameters)),
        outputs=tuple(_value(one.name, types) for one in model.graph.output),
        classes=classes,
        parameters=weights or parameters,
        sizes=sizes,
        producer=f"{model.producer_name} {model.producer_version}".strip(),
    )


def _inferred(model: Any) -> Any:
    """Add the shapes that follow from the operators; a model that defies that keeps its own."""
    import onnx

    try:
        return onnx.shape_inference.infer_shapes(model)
    except (onnx.shape_inference.InferenceError, ValueError):
        return model


def _types(graph: Any) -> dict[str, tuple[str, _Shape | None]]:
    found = {
        one.name: _type(one.type.tensor_type)
        for one in (*graph.input, *graph.value_info, *graph.output)
    }
    for one in graph.initializer:
        found[one.name] = (_dtype(one.data_type), tuple(one.dims))
    return found


def _type(tensor: Any) -> tuple[str, _Shape | None]:
    if not tensor.HasField("shape"):
        return _dtype(tensor.elem_type), None
    dims = tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?"
        for dim in tensor.shape.dim
    )
    return _dtype(tensor.elem_type), dims


def _dtype(number: int) -> str:
    import onnx

    names = {"FLOAT": "float32", "DOUBLE": "float64"}
    name: str = onnx.TensorProto.DataType.Name(number) if number else ""
    return names.get(name, name.lower())


def _inputs(graph: Any, parameters: Mapping[str, int]) -> list[Any]:
    return [one for one in graph.input if one.name not in parameters]


def _one_item(graph: Any, types: _Shapes, parameters: Mapping[str, int]) -> dict[str, int]:
    """Take a batch of one where no report says what the dims are."""
    shapes = [types[one.name][1] for one in _inputs(graph, parameters)]
    first = shapes[0][0] if shapes and shapes[0] else 1
    return {first: 1} if isinstance(first, str) else {}


def _value(name: str, types: _Shapes) -> Value:
    return Value(name, *types.get(name, ("", None)))


def _nodes(
    graph: Any,
    types: _Shapes,
    weights: Mapping[str, int],
    sizes: Mapping[str, int],
    classes: dict[str, str],
    author: str,
) -> Iterator[Node]:
    makers = {output: node.name for node in graph.node for output in node.output}
    for place, node in enumerate(graph.node):
        stated = {entry.key: entry.value for entry in node.metadata_props}
        path = _note_modules(node, stated, classes)
        rule = stated.get("pkg.onnxscript.rewriter.rule_name", "")
        own = [name for name in node.input if name in weights]
        if rule and own:  # what was fused keeps the name of the second operator
            path = own[0].rpartition(".")[0]
        dtype, shape = types.get(node.output[0], ("", None)) if node.output else ("", None)
        yield Node(
            name=node.name or f"{node.op_type}_{place}",
            operator=f"{node.domain}.{node.op_type}" if node.domain else node.op_type,
            module=path,
            inputs=tuple(makers.get(name, name) for name in node.input if name and name not in own),
            shape=shape if len(node.output) == 1 else None,
            dtype=dtype if len(node.output) == 1 else f"{len(node.output)} values",
            source=find_source(stated.get("pkg.torch.onnx.stack_trace", ""), author),
            flops=_flops(node, types, sizes),
            parameters=parameters_of(own, weights),
            note=rule,
        )


def _note_modules(node: Any, stated: Mapping[str, str], classes: dict[str, str]) -> str:
    """Find the module that a node is in: torch's notes, else a name such as /layer1/conv/Conv."""
    try:
        paths = ast.literal_eval(stated.get("pkg.torch.onnx.name_scopes", "[]"))[:-1]
        kinds = ast.literal_eval(stated.get("pkg.torch.onnx.class_hierarchy", "[]"))[:-1]
    except (ValueError, SyntaxError):
        paths = kinds = []
    if not paths:
        return ".".join(node.name.strip("/").split("/")[:-1])
    for path, kind in zip(paths, kinds, strict=False):
        classes[path] = str(kind).rpartition(".")[2]
    return str(paths[-1])


def _flops(node: Any, types: _Shapes, sizes: Mapping[str, int]) -> int | None:
    """Count two operations per multiplication that is added up; None where a shape is unknown."""
    if node.op_type not in _COUNTED:
        return 0
    shapes = [_at(types.get(name, ("", None))[1], sizes) for name in (*node.input, node.output[0])]
    if any(shape is None for shape in (*shapes[:2], shapes[-1])):
        return None
    known: list[Sequence[int]] = [shape or () for shape in shapes]
    return _count(node, known[:-1], known[-1])


_COUNTED = {"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN"}


def _count(node: Any, inputs: Sequence[Sequence[int]], output: Sequence[int]) -> int:
    if node.op_type == "Conv":  # weight: (out, in per group, *kernel)
        return 2 * math.prod(output) * math.prod(inputs[1][1:])
    if node.op_type == "ConvTranspose":  # weight: (in, out per group, *kernel)
        return 2 * math.prod(inputs[0]) * math.prod(inputs[1][1:])
    if node.op_type in ("LSTM", "GRU", "RNN"):  # (directions, gates * hidden, inputs or hidden)
        steps = inputs[0][0] * inputs[0][1]
        return 2 * steps * (math.prod(inputs[1]) + math.prod(inputs[2]))
    transposed = any(one.name == "transA" and one.i for one in node.attribute)
    return 2 * math.prod(output) * inputs[0][0 if transposed else -1]


def _at(shape: Iterable[int | str] | None, sizes: Mapping[str, int]) -> list[int] | None:
    """Return a shape at the chosen sizes; None where it holds a dim that has none."""
    if shape is None:
        return None
    found = [size if isinstance(size, int) else sizes.get(size) for size in shape]
    known = [size for size in found if size is not None]
    return known if len(known) == len(found) else None
