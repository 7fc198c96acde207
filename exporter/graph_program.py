"""Exported program → graph values: shapes in the author's own names, FLOPs per node."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram

from modelyard.exporter.flops import count_flops
from modelyard.exporter.graph import Graph, Node, Value, dim_sizes, find_source, parameters_of
from modelyard.handlers.program.check import load_program

# Size of a dynamic dim that no report names; FLOPs are counted there.
_UNNAMED_SIZE = 2

_Names = Mapping[str, str]
"""A symbol of the program → the name of the dim."""


def read_program(artifact: Path, report: Mapping[str, Any] | None) -> Graph:
    """Read the nodes of a program, those of branches included.

    Raises:
        UnsafeProgram: the file holds more than a program.
    """
    program = load_program(artifact)
    specs = report["signature"]["inputs"] if report else []
    names = _dim_names(program, specs)
    sizes = _sizes(program, names, dim_sizes(report) or _one_item(program))
    parameters = {name: value.numel() for name, value in program.named_parameters()}
    stated = {
        node: target
        for node, target in program.graph_signature.inputs_to_parameters.items()
        if target in parameters
    }
    reader = _Reader(names, sizes, stated, parameters, (report or {}).get("model", ""))
    return Graph(
        nodes=tuple(reader.nodes(program.graph_module, "")),
        inputs=tuple(_user_inputs(program, names)),
        outputs=tuple(_outputs(program, names, report)),
        classes=reader.classes,
        parameters=parameters,
        sizes=sizes,
    )


class _Reader:
    """Turns the nodes of a graph, and of the graphs inside it, into values."""

    def __init__(
        self,
        names: _Names,
        sizes: Mapping[str, int],
        stated: Mapping[str, str],
        parameters: Mapping[str, int],
        model: str,
    ) -> None:
        self.classes: dict[str, str] = {}
        self._names, self._sizes, self._model = names, sizes, model
        self._stated, self._parameters = stated, parameters

    def nodes(self, module: fx.GraphModule, inside: str) -> Iterator[Node]:
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            path = self._module(node) or inside
            yield self._node(node, path)
            for branch in node.all_input_nodes:
                if branch.op == "get_attr" and isinstance(
                    graph := getattr(module, str(branch.target), None), fx.GraphModule
                ):
                    below = f"{path}.{branch.target}" if path else str(branch.target)
                    self.classes[below] = f"branch of {node.name}"
                    yield from self.nodes(graph, below)

    def _module(self, node: fx.Node) -> str:
        """Find the module that a node is in, and note the classes on the way there."""
        path = ""
        for way, kind in (node.meta.get("nn_module_stack") or {}).values():
            if way == kind:  # torch's stand-in, for what it added itself
                return ""
            path = way.partition("@")[0]  # a module that is called twice
            self.classes[path] = str(kind).rpartition(".")[2]
        return path

    def _node(self, node: fx.Node, path: str) -> Node:
        value = node.meta.get("val")
        shape = _shape(value, self._names)
        read = [self._stated[one.name] for one in node.all_input_nodes if one.name in self._stated]
        return Node(
            name=node.name,
            operator=_operator(node.target),
            module=path,
            inputs=tuple(one.name for one in node.all_input_nodes if one.name not in self._stated),
            shape=shape,
            dtype=_dtype(value),
            source=find_source(node.meta.get("stack_trace") or "", self._model),
            flops=_count(node, self._names, self._sizes),
            parameters=parameters_of(read, self._parameters),
        )


def _operator(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else str(target.__name__)


def _dim_names(program: ExportedProgram, specs: list[Mapping[str, Any]]) -> dict[str, str]:
    """Match the program's symbols with the names that the report gives the same axes."""
    names: dict[str, str] = {}
    for node, spec in zip(_placeholders(program), specs, strict=False):
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        for size, name in zip(value.shape, spec["shape"], strict=False):
            if not isinstance(size, int) and isinstance(name, str):
                names.setdefault(str(size), name)
    return names


def _one_item(program: ExportedProgram) -> dict[str, int]:
    """Take a batch of one where no report says what the dims are."""
    values = [node.meta.get("val") for node in _placeholders(program)]
    shapes = [value.shape for value in values if isinstance(value, Tensor) and value.ndim]
    return {str(shapes[0][0]): 1} if shapes and not isinstance(shapes[0][0], int) else {}


def _sizes(program: ExportedProgram, names: _Names, stated: Mapping[str, int]) -> dict[str, int]:
    """Choose a size for every symbol, within its range."""
    sizes: dict[str, int] = {}
    for symbol, limits in program.range_constraints.items():
        name = names.get(str(symbol), str(symbol))
        low = int(limits.lower) if limits.lower.is_Integer else 0
        size = stated.get(name, max(_UNNAMED_SIZE, low))
        sizes[name] = min(size, int(limits.upper)) if limits.upper.is_Integer else size
    return sizes


def _placeholders(program: ExportedProgram) -> list[fx.Node]:
    wanted = set(program.graph_signature.user_inputs)
    return [
        node for node in program.graph.nodes if node.op == "placeholder" and node.name in wanted
    ]


def _count(node: fx.Node, names: _Names, sizes: Mapping[str, int]) -> int | None:
    """Count one node's FLOPs on tensors without values; None where it cannot run without them."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0  # arithmetic on sizes, or a branch, whose nodes are counted themselves
    if not isinstance(node.meta.get("val"), Tensor | tuple | list):
        return 0
    target = node.target
    try:
        with FakeTensorMode():
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda one: _stand_in(one.meta.get("val"), names, sizes)
            )
            return count_flops(lambda: target(*args, **kwargs)).total
    # Operators whose result depends on values say in many ways that they need some.
    except Exception:
        return None


def _stand_in(value: Any, names: _Names, sizes: Mapping[str, int]) -> Any:
    """Make a value of the same type, at the chosen sizes."""
    if isinstance(value, tuple | list):
        return type(value)(_stand_in(one, names, sizes) for one in value)
    if isinstance(value, torch.SymInt):
        return _size(value, names, sizes)
    if not isinstance(value, Tensor):
        return value
    shape = [_size(size, names, sizes) for size in value.shape]
    return torch.empty(shape, dtype=value.dtype, device=value.device)


def _size(size: int | torch.SymInt, names: _Names, sizes: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    values = {
        symbol: sizes.get(names.get(str(symbol), str(symbol)), _UNNAMED_SIZE)
        for symbol in expression.free_symbols
    }
    return int(expression.subs(values))


def _shape(value: object, names: _Names) -> tuple[int | str, ...] | None:
    if not isinstance(value, Tensor):
        return None
    return tuple(size if isinstance(size, int) else _named(size, names) for size in value.shape)


def _named(size: torch.SymInt, names: _Names) -> str:
    """Write a size in the author's names: `4*batch`."""
    expression = size.node.expr
    renamed = {
        symbol: type(symbol)(names[str(symbol)], **symbol.assumptions0)
        for symbol in expression.free_symbols
        if str(symbol) in names
    }
    return str(expression.xreplace(renamed))


def _dtype(value: object) -> str:
    if isinstance(value, Tensor):
        return str(value.dtype).removeprefix("torch.")
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    return "" if value is None else type(value).__name__


def _user_inputs(program: ExportedProgram, names: _Names) -> Iterator[Value]:
    for node in _placeholders(program):
        value = node.meta.get("val")
        yield Value(node.name, _dtype(value), _shape(value, names))


def _outputs(
    program: ExportedProgram, names: _Names, report: Mapping[str, Any] | None
) -> Iterator[Value]:
    stated = [spec["name"] for spec in report["signature"]["outputs"]] if report else []
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    found = [name for name in program.graph_signature.user_outputs if isinstance(name, str)]
    for place, name in enumerate(found):
        value = values.get(name)
        shown = stated[place] if len(stated) == len(found) else name
        yield Value(shown, _dtype(value), _shape(value, names))
