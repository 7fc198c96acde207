"""The calls of a program that torch has read: their constants, and checked ones that stand in."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from modelyard.handlers.judge.guard import guarded, number_problem, numeric

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def checked(name: str) -> Callable[..., Any]:
    """Return the operator `name`.input behind a check of its arguments."""
    run, gates = getattr(torch.ops.aten, name).input, _GATES[name]

    def recurrent(
        x: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        states: list[Tensor] = list(hx) if name == "lstm" else [hx]
        directions = 2 if bidirectional else 1
        hidden, out = states[-1].shape[-1], states[0].shape[-1]
        is_projected = len(states) == 2 and hidden != out
        each = (4 if has_biases else 2) + is_projected
        expected = [x.dim() == 3, num_layers > 0, len(params) == num_layers * directions * each]
        expected += [state.dim() == 3 for state in states]
        expected += [min(hidden, out) > 0, len(states) == (2 if gates == 4 else 1)]
        if all(expected):
            batch = x.shape[0 if batch_first else 1]
            layers = num_layers * directions
            expected += [tuple(s.shape[:2]) == (layers, batch) for s in states]
            rows = gates * hidden
            for layer in range(layers):
                width = x.shape[2] if layer < directions else out * directions
                shapes: list[tuple[int, ...]] = [(rows, width), (rows, out)]
                shapes += [(rows,), (rows,)] if has_biases else []
                shapes += [(out, hidden)] if is_projected else []
                given = params[layer * each : (layer + 1) * each]
                expected += [tuple(p.shape) == s for p, s in zip(given, shapes, strict=True)]
            expected += [tensor.dtype == x.dtype for tensor in (*params, *states)]
            expected += [tensor.device == x.device for tensor in (*params, *states)]
        if not all(expected):
            raise ValueError("weights, states and inputs of a recurrent layer do not go together")
        return run(
            x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )

    recurrent.__name__ = f"checked_{name}"
    return recurrent


def checked_embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Any:
    """Run aten.embedding_bag.padding_idx behind a check of its arguments."""
    fits = (
        (weight.dim(), indices.dim(), offsets.dim()) == (2, 1, 1)
        and (weight.dtype, indices.dtype) == (torch.float32, torch.int64)
        and indices.dtype == offsets.dtype
        and weight.device == indices.device == offsets.device
        and weight.is_contiguous()
        and weight.numel() > 0
        and mode in (0, 1)
        and not (scale_grad_by_freq or sparse or include_last_offset)
        and per_sample_weights is None
        and padding_idx is None
    )
    if fits and offsets.numel():
        ends = torch.cat([offsets, offsets.new_full((1,), indices.numel())])
        fits = bool((offsets[0] == 0) & (ends[1:] >= ends[:-1]).all())
    if fits and indices.numel():
        fits = bool((indices.min() >= 0) & (indices.max() < weight.shape[0]))
    if not fits:
        raise ValueError("table, indices and offsets of a bag of embeddings do not go together")
    return _BAG(weight, indices.contiguous(), offsets.contiguous(), False, mode, False, None)


def checked_assert(condition: Tensor, message: str) -> None:
    """Run aten._assert_async.msg where it fails: on a GPU it would end the whole process's work."""
    if not bool(condition):
        raise ValueError(message)


_BAG = torch.ops.aten.embedding_bag.default
CHECKED: Mapping[Any, Callable[..., Any]] = {
    **{getattr(torch.ops.aten, name).input: checked(name) for name in _GATES},
    torch.ops.aten.embedding_bag.padding_idx: checked_embedding_bag,
    torch.ops.aten._assert_async.msg: checked_assert,
}


_LEGIT = torch.ops.aten._native_batch_norm_legit_no_training.default
_EMPTY = torch.ops.aten.empty.memory_format
_WEIGHT_NORM = torch.ops.aten._weight_norm.default

_KINDS = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "Device": torch.device,
}
_DEVICES = ("cpu", "cuda")
_MODES = {"interpolation_mode": 3, "padding_mode": 3}
"""How many modes `grid_sampler` has: for a number from here on its kernels leave their output
unwritten."""
_STEPS = ("kernel_size", "stride", "padding", "dilation", "output_padding")
_STEPPING = re.compile("conv|max_pool1d")
_MAX_STEP = 1 << 14
_PAD = torch.ops.aten.pad.default


def call_problem(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the constants of a call.

    To torch a dtype is a number, and a number that is not a dtype leads outside a table; some
    kernels take a tensor for granted where None is given; convolutions and max_pool1d multiply
    their steps unchecked; and circular padding by a negative number leaves elements of the output
    unwritten.
    """
    arguments = target._schema.arguments
    given = [*zip(arguments, args, strict=False)]
    given += [(each, kwargs[each.name]) for each in arguments if each.name in kwargs]
    values = {argument.name: value for argument, value in given}
    pads, is_circle = values.get("pad"), values.get("mode") == "circular"
    if target is _PAD and is_circle and not _are_steps(pads, least=0):
        return f"pads by {pads!r} in a circle, expected 0 to {_MAX_STEP}"
    for argument, value in given:
        if (modes := _MODES.get(argument.name)) and value not in range(modes):
            return f"gives {value!r} where {argument.name} is one of {modes} modes"
        stated = str(cast("Any", argument).real_type)
        if value is None:
            if not stated.startswith("Optional["):
                return f"gives nothing where {argument.name} is a {stated}"
            continue
        if argument.name in _STEPS and _STEPPING.search(str(target)) and not _are_steps(value):
            return f"gives {value!r} as {argument.name}, expected numbers up to {_MAX_STEP}"
        if problem := number_problem(target, argument.name, stated, value):
            return problem
        kind = _KINDS.get(stated.removeprefix("Optional[").removesuffix("]"))
        if kind is None:
            continue
        if not isinstance(value, kind):
            return f"gives {value!r} where {argument.name} is a {stated}"
        if kind is torch.layout and value != torch.strided:
            return f"makes a tensor of the layout {value}"
        if isinstance(value, torch.device) and value.type not in _DEVICES:
            return f"makes a tensor on the device {value}"
    return None


def _are_steps(value: object, least: int = -_MAX_STEP) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return isinstance(value, str) or all(
        isinstance(each, int) and least <= each <= _MAX_STEP for each in values
    )


def calls(program: torch.export.ExportedProgram) -> list[Node]:
    """List every call of an operator or of arithmetic, those of branches and loops too."""
    return [
        node
        for part in program.graph_module.modules()
        if isinstance(part, GraphModule)
        for node in part.graph.nodes
        if node.op == "call_function" and not isinstance(node.target, HigherOrderOperator)
    ]


def use_checked(program: torch.export.ExportedProgram) -> None:
    """Replace the operators of `REPLACED` in a program just loaded, and guard all others.

    Raises:
        ValueError: the program uses what inference does not compute.
    """
    for node in calls(program):
        if replace := _REPLACEMENTS.get(node.target):
            replace(node)
    for node in calls(program):
        target = cast("Any", node.target)
        if isinstance(target, OpOverload):
            node.target = guarded(target, CHECKED.get(target, target), node.args, node.kwargs)
        elif target is not operator.getitem:
            node.target = numeric(target)
        elif type(node.args[1]) is not int:
            raise ValueError(f"it takes the part {node.args[1]} of a result, which is not a number")
    for part in program.graph_module.modules():
        if isinstance(part, GraphModule):
            part.recompile()


def _batch_norm(node: Node) -> None:
    """Replace what reads as many statistics as the input has channels, however few there are."""
    *tensors, momentum, eps = node.args
    with node.graph.inserting_before(node):
        checked = node.graph.call_function(
            torch.ops.aten.batch_norm.default, (*tensors, False, momentum, eps, False)
        )
    checked.meta = {**node.meta, "val": node.meta["val"][0]}
    for user in list(node.users):
        if user.target is not operator.getitem or (user.args[1] != 0 and user.users):
            raise ValueError("it gives more than inference computes")
        user.replace_all_uses_with(checked)
        node.graph.erase_node(user)
        if user.args[1] == 0:
            checked._rename(user.name)
    node.graph.erase_node(node)


def _weight_norm(node: Node) -> None:
    """Replace what reads as many lengths as there are rows: v * (g / |v|), which broadcasts."""
    aten = torch.ops.aten
    v, g = cast("tuple[Node, Node]", node.args[:2])
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    axes = [axis for axis in range(v.meta["val"].dim()) if axis != dim]
    with node.graph.inserting_before(node):
        call = node.graph.call_function
        norm = call(aten.linalg_vector_norm.default, (v, 2, None if dim == -1 else axes, True))
        ratio = call(aten.div.Tensor, (g, norm))
        checked = call(aten.mul.Tensor, (v, ratio))
    for each in (norm, ratio):
        each.meta = {**node.meta, "val": g.meta["val"]}
    checked.meta = dict(node.meta)
    node.replace_all_uses_with(checked)
    node.graph.erase_node(node)
    checked._rename(node.name)


def _zeros(node: Node) -> None:
    """Replace memory that nobody wrote, which shows what was there before, by zeros."""
    target, kwargs = _ZEROS[node.target], dict(node.kwargs)
    if node.target is _EMPTY:
        kwargs.pop("memory_format", None)
    with node.graph.inserting_before(node):
        zeros = node.graph.call_function(target, node.args, kwargs)
    zeros.meta = dict(node.meta)
    node.replace_all_uses_with(zeros)
    node.graph.erase_node(node)
    zeros._rename(node.name)


_ZEROS: Mapping[Any, Any] = {
    _EMPTY: torch.ops.aten.zeros.default,
    torch.ops.aten.empty_like.default: torch.ops.aten.zeros_like.default,
    torch.ops.aten.new_empty.default: torch.ops.aten.new_zeros.default,
}
_REPLACEMENTS: Mapping[Any, Callable[[Node], None]] = {
    **dict.fromkeys(_ZEROS, _zeros),
    _LEGIT: _batch_norm,
    _WEIGHT_NORM: _weight_norm,
}
REPLACED = frozenset(map(str, [*_REPLACEMENTS, *CHECKED]))
"""Operators that a program may call, and that are never run."""
