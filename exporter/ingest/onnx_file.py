"""An ONNX file → its protobuf with every weight inside, checked; nothing of it is run."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelyard.archiver.signature import DTYPES
from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.source import Source, inside
from modelyard.handlers.judge.onnx_file import check_onnx, inside_folder

ONNX = "ONNX"
# The largest file that protobuf, and so a single .onnx, can be.
MAX_BYTES = 2**31 - 1


@dataclass(frozen=True)
class Value:
    """An input or output of a file."""

    name: str
    dtype: str | None
    """The name that a signature has for it; None for what is not a tensor of numbers."""
    kind: str
    """Its type, for messages: the dtype, or `sequence`, `map`."""
    shape: tuple[int | str | None, ...] | None
    """Size, or name, or neither, of each dim; None of what has none."""


def parse_onnx(source: Source) -> Any:
    """Parse a file alone.

    Raises:
        CheckpointError: it is not one.
    """
    import onnx

    try:
        return onnx.load_model_from_string(bytes(source.data))
    # protobuf has an error class of its own for every way in which bytes can be wrong.
    except Exception as error:
        raise CheckpointError(f'"{source.name}" is not an ONNX model: {error}') from error


def read_onnx(source: Source) -> tuple[Any, tuple[Path, ...]]:
    """Read a file, and the files of weights beside it.

    Returns:
        The model with every weight inside, and the files that were read.

    Raises:
        CheckpointError: ONNX's checker refuses it, it needs operators that no worker has, or
            weights lie outside of its folder, are missing, or are too many for one file.
    """
    import onnx

    assert source.path is not None
    name, folder = source.name, source.path.parent
    findings, files = check_onnx(source.path, _beside)
    if findings:
        listed = "; ".join(f"{part}: {problem}" for part, problem in findings)
        raise CheckpointError(
            f'"{name}" is refused: {listed}. Expected operators of ONNX, and files beside it: '
            "export its checkpoint anew"
        )
    size_bytes = sum(path.stat().st_size for path in (source.path, *files))
    if size_bytes > MAX_BYTES:
        raise CheckpointError(
            f'"{name}" and its weights are {size_bytes / 1e9:.1f} GB, which do not fit in one ONNX '
            "file of at most 2 GB; export its checkpoint with --format pt2"
        )
    model = parse_onnx(source)
    try:
        onnx.external_data_helper.load_external_data_for_model(model, str(folder))
        onnx.checker.check_model(model)
    # A part of its weights may lie anywhere in the file that it names, or outside of it.
    except (onnx.checker.ValidationError, ValueError, OSError) as error:
        text = " ".join(str(error).split())
        raise CheckpointError(
            f'"{name}" is refused by ONNX\'s own checker: {text:.300}; convert its checkpoint anew'
        ) from error
    return model, (source.path, *files)


def _beside(folder: Path, place: str) -> Path:
    """Return the path of a file of weights; the hub's links are followed."""
    try:
        return inside_folder(folder, place)
    except ValueError:
        if not (folder / place).is_symlink():
            raise
        return inside(folder, place)


def locations(tensor: Any) -> list[str]:
    """Return in which file the values of a tensor lie; nothing where they are inside."""
    return [entry.value for entry in tensor.external_data if entry.key == "location"]


def inputs_of(model: Any) -> list[Value]:
    """Return what has to be given: an input with an initializer has its value."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [_value(each) for each in model.graph.input if each.name not in weights]


def outputs_of(model: Any) -> list[Value]:
    """Return what the file gives."""
    return [_value(each) for each in model.graph.output]


def labels_of(model: Any) -> dict[int, str]:
    """Return the names of the classes that a classifier inside the file gives, by their places."""
    return {at: name for at, name in enumerate(classes_of(model)) if isinstance(name, str)}


def classes_of(model: Any) -> list[Any]:
    """Return the classes of a classifier inside the file, texts or whole numbers."""
    for key in ("classlabels_strings", "classlabels_int64s", "classlabels_ints"):
        for node in nodes_of(model):
            if classes := attribute_of(node, key, ()):
                return as_texts(classes) if key == "classlabels_strings" else list(classes)
    return []


def as_texts(values: Iterable[bytes]) -> list[str]:
    """Return what an attribute or a weight of texts holds."""
    return [value.decode("utf-8", "replace") for value in values]


def attribute_of(node: Any, name: str, otherwise: Any) -> Any:
    """Return the value of a node's attribute."""
    from onnx.helper import get_attribute_value

    found = (get_attribute_value(each) for each in node.attribute if each.name == name)
    return next(found, otherwise)


def names_in(model: Any) -> set[str]:
    """Return every name of a value in the file."""
    return {name for node in nodes_of(model) for name in (*node.input, *node.output)} | {
        each.name for each in (*model.graph.input, *model.graph.output, *model.graph.initializer)
    }


def is_quantized(model: Any) -> bool:
    """Return whether it computes with quantised values, whose rounding optimisations move."""
    return any("Quantize" in node.op_type or "Integer" in node.op_type for node in nodes_of(model))


def dtype_of(number: int) -> str:
    """Return the name of an element type, as a signature has it."""
    import onnx

    names: Mapping[int, str] = {
        value: name.lower() for name, value in onnx.TensorProto.DataType.items()
    }
    name = names.get(number, str(number))
    return {"float": "float32", "double": "float64"}.get(name, name)


def _value(value: Any) -> Value:
    which = value.type.WhichOneof("value") or "value without a type"
    if which != "tensor_type":
        return Value(value.name, None, which.removesuffix("_type"), None)
    kind = value.type.tensor_type
    dtype = dtype_of(kind.elem_type)
    shape = tuple(_size(dim) for dim in kind.shape.dim) if kind.HasField("shape") else None
    return Value(value.name, dtype if dtype in DTYPES else None, dtype, shape)


def _size(dim: Any) -> int | str | None:
    return int(dim.dim_value) if dim.dim_value > 0 else dim.dim_param or None


def nodes_of(model: Any) -> Iterator[Any]:
    """Yield every node of a file, those of its subgraphs and functions too."""
    for owner in (model.graph, *model.functions):
        yield from _nodes_in(owner.node)


def _nodes_in(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _nodes_in(graph.node)
