"""What a file cannot hold or a program may not call, in terms of what it can and may.

Operators: each function takes its operator's arguments, and `NotImplemented` leaves the call as
it is; all others are decomposed by torch. Sizes: torch saves programs that call some functions of
Python's numbers, and no others.
"""

import copy
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

aten = torch.ops.aten

_EMPTY_SEGMENT = {"sum": 0.0, "prod": 1.0, "mean": math.nan, "max": -math.inf, "min": math.inf}
_REDUCTIONS = {"max": "amax", "min": "amin"}


def _places(size: Sequence[int], stride: Sequence[int], offset: int | None) -> Tensor:
    """Return the place of each element in memory."""
    places = torch.full([1] * len(size), offset or 0)
    for axis, (count, step) in enumerate(zip(size, stride, strict=True)):
        shape = [-1 if each == axis else 1 for each in range(len(size))]
        places = places + (torch.arange(count) * step).view(shape)
    return places


def _as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    """Read by indices, which are checked; a tensor that is all of its memory has no more."""
    return x.flatten()[_places(size, stride, storage_offset)] if _is_whole(x) else NotImplemented


def _as_strided_scatter(
    x: Tensor,
    source: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Any:
    if not _is_whole(x):
        return NotImplemented
    places = _places(size, stride, storage_offset).flatten()
    return x.flatten().index_put((places,), source.flatten()).view(x.shape)


def _is_whole(x: Tensor) -> bool:
    return x.is_contiguous() and x.storage_offset() == 0


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    flat = x.flatten().index_put((index.flatten(),), source.flatten(), accumulate)
    return flat.view(x.shape)


def _segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Any:
    if lengths is None and offsets is not None:
        lengths = offsets.diff()
    if lengths is None or lengths.dim() != 1 or (reduce == "mean" and initial is not None):
        return NotImplemented
    count, rest = lengths.shape[0], data.shape[1:]
    segment = torch.arange(count).repeat_interleave(lengths, output_size=data.shape[0])
    empty = _EMPTY_SEGMENT[reduce] if initial is None else initial
    return data.new_full((count, *rest), empty).scatter_reduce(
        0,
        segment.view(-1, *(1 for _ in rest)).expand(data.shape),
        data,
        _REDUCTIONS.get(reduce, reduce),
        include_self=reduce != "mean",
    )


def _rrelu(
    x: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: object = None,
) -> tuple[Tensor, Tensor]:
    """Take the mean slope, as evaluation does."""
    return NotImplemented if training else (aten.leaky_relu(x, (lower + upper) / 2), noise)


IN_LISTED: Mapping[Any, Callable[..., Any]] = {
    aten.as_strided.default: _as_strided,
    aten.as_strided_scatter.default: _as_strided_scatter,
    aten.put.default: _put,
    aten.segment_reduce.default: _segment_reduce,
    aten.rrelu_with_noise_functional.default: _rrelu,
    # Its own kernel ends the process at a NaN, which this one refuses.
    aten.linalg_eigvals.default: lambda x: aten.linalg_eig(x)[0],
}


# -- sizes -----------------------------------------------------------------------------------------


class _Before:
    """Calls of numbers that are put before a node, each with the value that a trace gives it."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        with self._node.graph.inserting_before(self._node):
            made = self._node.graph.call_function(function, args)
        values = (each.meta["val"] if isinstance(each, Node) else each for each in args)
        made.meta = {**self._node.meta, "val": function(*values)}
        return made


def _floor(call: _Before, x: Any) -> Any:
    whole = call(math.trunc, x)
    return call(torch.sym_ite, call(operator.le, whole, x), whole, call(operator.sub, whole, 1))


def _round(call: _Before, x: Any, digits: None = None) -> Any:
    """Round halves to even numbers."""
    up = _floor(call, call(operator.add, x, 0.5))
    is_half = call(operator.eq, call(operator.sub, call(torch.sym_float, up), x), 0.5)
    is_odd = call(operator.eq, call(operator.mod, up, 2), 1)
    both = call(operator.and_, is_half, is_odd)
    return call(torch.sym_ite, both, call(operator.sub, up, 1), up)


_SIZES: Mapping[Any, Callable[..., Any]] = {
    math.ceil: lambda call, x: call(operator.neg, _floor(call, call(operator.neg, x))),
    math.floor: _floor,
    operator.abs: lambda call, x: call(torch.sym_max, x, call(operator.neg, x)),
    round: _round,
}


def plain_sizes(program: ExportedProgram) -> ExportedProgram:
    """Return a program that torch can save: itself, or a copy that computes its sizes otherwise."""
    if not any(node.target in _SIZES for node in nodes_of(program.graph_module)):
        return program
    module = copy.deepcopy(program.graph_module)
    for node in [node for node in nodes_of(module) if node.target in _SIZES]:
        made = _SIZES[node.target](_Before(node), *node.args)
        made.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(made)
        node.graph.erase_node(node)
    for part in module.modules():
        if isinstance(part, GraphModule):
            part.recompile()
    return program._update(module, program.graph_signature)


def nodes_of(module: GraphModule) -> list[Node]:
    """Return the nodes of a graph and of those inside of it."""
    parts = (part for part in module.modules() if isinstance(part, GraphModule))
    return [node for part in parts for node in part.graph.nodes]
