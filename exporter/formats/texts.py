"""Texts and maps at the ends of an ONNX file → numbers, so that tensors alone go in and come out.

scikit-learn's files take columns of texts and give labels as texts and probabilities as maps
(ZipMap). Which texts a column may be and what the classes are called is in the file: a text goes in
as its place among the column's categories, one behind them stands for every other text, and a
label comes out as its place among the classes. The file itself, with texts and maps, is what the
numbers are compared with.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.onnx_file import as_texts, attribute_of, dtype_of, nodes_of

_STRING = "string"
_ML = "ai.onnx.ml"
# What hands a text on as it is, and what compares it with those that it states.
_PASSES = frozenset(
    ("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Cast", "Split", "Where")
)
_COMPARES: Mapping[str, str] = {
    "OneHotEncoder": "cats_strings",
    "LabelEncoder": "keys_strings",
    "CategoryMapper": "cats_strings",
}
_ADVICE = (
    "; expected columns of categories: turn other texts into numbers before the file, or serve the "
    "pipeline itself as a callable (docs/your-own-model.md)"
)


@dataclass(frozen=True)
class Ends:
    """What the numbers of a rewritten file stand for."""

    columns: Mapping[str, Sequence[tuple[str, Sequence[str]]]] = field(default_factory=dict)
    """Input of texts → for each of its columns the input of numbers, and the texts by place, the
    last of which stands for all others."""
    classes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Output of texts or of maps → the classes by place."""

    @property
    def texts(self) -> dict[str, Sequence[str]]:
        """Texts of each input of numbers that stands for some."""
        return {name: texts for columns in self.columns.values() for name, texts in columns}

    def feed(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return what the file itself takes, for inputs of the rewritten one."""
        feed = {name: value for name, value in given.items() if name not in self.texts}
        for name, columns in self.columns.items():
            parts = [np.array(texts, dtype=object)[given[own]] for own, texts in columns]
            feed[name] = np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        return feed

    def read(self, name: str, value: Any) -> np.ndarray:
        """Return an output of the file itself as the rewritten one gives it."""
        classes = self.classes.get(name)
        if classes is None:
            return np.asarray(value)
        if isinstance(value, list):
            return np.array([[row[one] for one in classes] for row in value], dtype=np.float32)
        places = {one: at for at, one in enumerate(classes)}
        return np.array([places[one] for one in value.flat], dtype=np.int64).reshape(value.shape)


def as_numbers(model: Any, file: str) -> tuple[Any, Ends]:
    """Return a file of the same numbers without texts and maps at its ends.

    An output whose classes the file does not state stays as it is.

    Raises:
        CheckpointError: an input is of texts that are no categories.
    """
    is_text = {each.name: _is_text(each) for each in (*model.graph.input, *model.graph.output)}
    maps = {node.output[0]: node for node in model.graph.node if node.op_type == "ZipMap"}
    if not any(is_text.values()) and not any(each.name in maps for each in model.graph.output):
        return model, Ends()
    original, model = model, type(model)()
    model.CopyFrom(original)
    columns = _columns(model, file)
    classes: dict[str, Sequence[Any]] = {}
    for value in model.graph.output:
        if value.name in maps:
            classes[value.name] = _without_map(model, value, maps[value.name])
        elif is_text[value.name] and (names := _classes_of(model, value.name)):
            classes[value.name] = names
            _encode(model, value, names)
    for name, parts in columns.items():
        _decode(model, name, parts)
    return model, Ends(columns, classes)


def _is_text(value: Any) -> bool:
    return dtype_of(value.type.tensor_type.elem_type) == _STRING


def _columns(model: Any, file: str) -> dict[str, list[tuple[str, Sequence[str]]]]:
    """Return the categories of each column of texts, by following it to what compares it."""
    from onnx import numpy_helper

    owners: dict[str, list[set[str]]] = {}
    columns: dict[str, list[set[str]]] = {}
    for value in model.graph.input:
        if _is_text(value):
            dims = value.type.tensor_type.shape.dim
            count = dims[1].dim_value or 1 if len(dims) > 1 else 1
            columns[value.name] = owners[value.name] = [set() for _ in range(count)]
    weights = {each.name: each for each in model.graph.initializer}
    for node in nodes_of(model):
        reached = [owners[name] for name in node.input if name in owners]
        if not reached:
            continue
        through = [column for each in reached for column in each]
        stated: Iterable[bytes] = ()
        if node.op_type in _COMPARES:
            stated = attribute_of(node, _COMPARES[node.op_type], ())
        elif node.op_type == "Equal":
            stated = [text for name in node.input if name in weights
                      for text in weights[name].string_data]  # fmt: skip
        elif node.op_type in ("ArrayFeatureExtractor", "Gather"):
            stated_at = weights.get(node.input[1])
            places: Any = () if stated_at is None else numpy_helper.to_array(stated_at).flat
            through = [through[int(at)] for at in places if at < len(through)] or through
        elif node.op_type not in (*_PASSES, "Concat"):
            raise CheckpointError(
                f'"{file}" reads the texts of its input {" or ".join(columns)} by {node.op_type}'
                f"{_ADVICE}"
            )
        for column in through:
            column.update(as_texts(stated))
        if not stated:
            owners |= dict.fromkeys(node.output, through)
    read = {name for node in nodes_of(model) for name in node.input}
    for name, each in columns.items():
        if name in read and not all(each):
            raise CheckpointError(f'"{file}" states no categories of its input "{name}"{_ADVICE}')
    return {name: list(_named(name, each)) for name, each in columns.items()}


def _named(name: str, columns: Sequence[set[str]]) -> Iterable[tuple[str, Sequence[str]]]:
    for at, texts in enumerate(columns):
        other = "?"
        while other in texts:
            other += "?"
        yield name if len(columns) == 1 else f"{name}_{at}", (*sorted(texts), other)


def _without_map(model: Any, value: Any, node: Any) -> list[Any]:
    """Give the tensor that a ZipMap takes in its place; return the keys of the map."""
    import onnx

    keys: list[Any] = as_texts(attribute_of(node, "classlabels_strings", ()))
    keys = keys or list(attribute_of(node, "classlabels_int64s", ()))
    model.graph.node.append(onnx.helper.make_node("Identity", [node.input[0]], [value.name]))
    model.graph.node.remove(node)
    kind = onnx.TensorProto.FLOAT
    value.type.CopyFrom(onnx.helper.make_tensor_type_proto(kind, [None, len(keys)]))
    return keys


def _classes_of(model: Any, name: str) -> list[str]:
    """Return the texts that an output may be, by following it back to where they are stated."""
    producers = {output: node for node in model.graph.node for output in node.output}
    weights = {each.name: each for each in model.graph.initializer}
    waiting = [name]
    while waiting:
        at = waiting.pop()
        if at in weights and (texts := list(weights[at].string_data)):
            return as_texts(texts)
        if (node := producers.get(at)) is None:
            continue
        for key in ("classlabels_strings", "values_strings"):
            if texts := list(attribute_of(node, key, ())):
                return list(dict.fromkeys(as_texts(texts)))
        waiting += node.input
    return []


def _encode(model: Any, value: Any, names: Sequence[str]) -> None:
    """Give the places of texts among the classes in their place."""
    import onnx

    texts = _rename(model, value.name)
    places = list(range(len(names)))
    node = onnx.helper.make_node(
        "LabelEncoder", [texts], [value.name],
        domain=_ML, keys_strings=names, values_int64s=places,
    )  # fmt: skip
    own = [each for each in model.opset_import if each.domain == _ML]
    if own and own[0].version < 2:
        if any(each.op_type == "LabelEncoder" for each in nodes_of(model)):
            raise CheckpointError(
                f'output "{value.name}" is of texts, in a file of ai.onnx.ml 1; expected version 2 '
                'or later: convert it again with target_opset={"": 18, "ai.onnx.ml": 3}'
            )
        own[0].version = 2  # in which LabelEncoder alone is another
    elif not own:
        model.opset_import.append(onnx.helper.make_opsetid(_ML, 2))
    model.graph.node.append(node)
    value.type.tensor_type.elem_type = onnx.TensorProto.INT64


def _decode(model: Any, name: str, columns: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Take the places of texts among a column's categories in their place."""
    import onnx

    (value,) = (each for each in model.graph.input if each.name == name)
    texts = _rename(model, name)
    kept = list(value.type.tensor_type.shape.dim)
    nodes, parts = [], []
    for own, categories in columns:
        table, part = f"{own}_categories", f"{own}_text" if len(columns) > 1 else texts
        weight = onnx.numpy_helper.from_array(np.array(categories, dtype=object), table)
        model.graph.initializer.append(weight)
        nodes.append(onnx.helper.make_node("Gather", [table, own], [part]))
        parts.append(part)
        added = model.graph.input.add(name=own)
        added.type.tensor_type.elem_type = onnx.TensorProto.INT64
        added.type.tensor_type.shape.dim.extend(kept[:1])
        if len(kept) > 1:
            added.type.tensor_type.shape.dim.add().dim_value = 1
    if len(parts) > 1:
        nodes.append(onnx.helper.make_node("Concat", parts, [texts], axis=1))
    for node in reversed(nodes):
        model.graph.node.insert(0, node)
    model.graph.input.remove(value)


def _rename(model: Any, name: str) -> str:
    """Give a value another name, which nothing else in the file has; return it."""
    new = f"{name}_texts"
    for node in nodes_of(model):
        for names in (node.input, node.output):
            for at, each in enumerate(names):
                if each == name:
                    names[at] = new
    return new
