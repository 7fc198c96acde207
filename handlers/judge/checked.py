"""The calls of a program that torch has read: their constants, and checked ones that stand in.

Kernels trust more than they check, in ways that are found one by one and come in classes: tensors
whose elements share memory, integers so large that sums and products of them wrap around, the one
division whose result does not fit. So each rule here is of a kind of argument, with a short list of
the operators that were shown to need none (`tests/fuzz`). Constants are judged when a program is
loaded; what is known only when it runs is judged by a function that stands in front of the call.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

FAR = 1 << 31
"""How far integers reach: a kernel's sums and products of two of them do not wrap around."""
MOST = 1 << 28
"""The largest number in a tensor that says how many elements to make, and the sum of all."""
LARGEST = 1 << 48
"""The largest product of the numbers of one list."""
_SCALES = (2.0**-20, 2.0**20)

Run = Callable[..., Any]
_Check = Callable[[list[Any], dict[str, Any]], None]
_Place = int | str  # of an argument: its position, or its name

# What reads some of its tensors as if they were contiguous, whatever they are.
_LAID_OUT = re.compile(r"aten\.(native_)?group_norm\.")
# What ordinary models call most, and was shown to take elements that share memory.
_TAKES_ANY = re.compile(
    r"aten\.(linear|matmul|b?mm|(add|badd)b?mm|conv[123]d|convolution|batch_norm|(native_)?layer_norm"
    r"|_?softmax|scaled_dot_product_attention|embedding|cat|stack|mean|sum|where|dropout"
    r"|sym_\w+)\."
)
# What is called in every layer, and was shown to check the integers that it is given.
_SIZED = re.compile(
    r"aten\.(_assert\w*|view|reshape|expand|slice|select|permute|transpose|flatten"
    r"|(un)?squeeze)\."
)
# What an ordinary export gives the largest integer: the end of a slice that has none.
_ANY_INTEGER = re.compile(r"aten\.slice(_scatter)?\.")
_WHOLE_DIVISION = re.compile(r"aten\.(floor_divide|fmod|remainder)_?\.")
_CHANGED: Mapping[str, Callable[[Tensor], Tensor]] = {
    # It divides by a greatest common divisor, which is -1 beside the least integer.
    "lcm": lambda value: value.masked_fill(value == torch.iinfo(value.dtype).min, 0),
    # LAPACK's dgeev writes beyond its memory for numbers of 1e300; infinities torch refuses.
    "linalg_eig": lambda value: value.masked_fill(value.abs() > 1e150, math.inf),
}
"""Operator → what is put in the place of numbers in its tensors that it cannot take."""
_COUNTS: Mapping[str, re.Pattern[str]] = {
    "repeats": re.compile(r"aten\.repeat_interleave\."),
    "self": re.compile(r"aten\.(one_hot|bincount)\."),
    "start": re.compile(r"aten\.narrow\."),
    "tensor_indices_or_sections": re.compile(r"aten\.tensor_split\."),
}
"""Name of an argument → the operators that make as many elements as a tensor there says."""


def number_problem(target: OpOverload, name: str, kind: str, value: Any) -> str | None:
    """Return what is wrong with a number, or a list of them, as an operator's argument.

    Args:
        target: the operator.
        name: name of the argument.
        kind: type of the argument in the operator's schema.
        value: what is given; what is not a number yet is left out.
    """
    values = value if isinstance(value, list | tuple) else [value]
    values = [each for each in values if isinstance(each, int | float)]
    if "int" in kind and not _ANY_INTEGER.match(str(target)):
        if any(abs(each) > FAR for each in values):
            return f"gives {value!r} as {name}, expected whole numbers up to {FAR}"
        if math.prod(abs(each) or 1 for each in values) > LARGEST:
            return f"gives {value!r} as {name}, expected a product up to {LARGEST}"
    if "float" in kind and re.match("scales|scale_factors", name):
        least, most = _SCALES
        if not all(least <= each <= most for each in values):
            return f"gives {value!r} as {name}, expected {least:.0e} to {most:.0e}"
    return None


def guarded(target: OpOverload, run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Run:
    """Return what to call for an operator: `run` itself where its arguments can do no harm.

    Args:
        target: the operator.
        run: what is called for it so far.
        args: arguments as a program has them: constants, and nodes for what is known later.
        kwargs: those by name.
    """
    checks = list(_checks(target, args, kwargs))
    if not checks:
        return run

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # nothing is known yet
            return run(*args, **kwargs)
        given = list(args)
        for check in checks:
            check(given, kwargs)
        return run(*given, **kwargs)

    call.__name__ = f"guarded_{target._schema.name.rpartition(':')[2]}"
    return call


def numeric(run: Run) -> Run:
    """Return arithmetic of sizes that refuses tensors, for which it would be an operator."""

    def call(*args: Any) -> Any:
        if any(isinstance(each, Tensor) for each in args):
            raise ValueError(f"{run.__name__} computes with sizes, and was given a tensor")
        return run(*args)

    call.__name__ = f"numeric_{run.__name__}"
    return call


def _checks(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[_Check]:
    name, schema = str(target), target._schema
    is_pointwise = torch.Tag.pointwise in target.tags
    is_view = any(each.alias_info and not each.alias_info.is_write for each in schema.returns)
    takes_any = is_pointwise or is_view or _TAKES_ANY.match(name)
    for index, argument in enumerate(schema.arguments):
        place: _Place = index if index < len(args) else argument.name
        given = args[index] if index < len(args) else kwargs.get(argument.name)
        kind = str(cast("Any", argument).real_type)
        if not _is_open(given):
            continue
        if "Tensor" in kind:
            # torch itself looks at the memory of what is written to.
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if not takes_any and not is_written:
                yield _changed(place, partial(_lay_out, bool(_LAID_OUT.match(name))))
            if (change := _CHANGED.get(name.split(".")[1])) is not None:
                yield _changed(place, change)
            if (counting := _COUNTS.get(argument.name)) and counting.match(name):
                yield _changed(place, partial(_count, argument.name))
        elif ("int" in kind or "float" in kind) and not _SIZED.match(name):
            yield _changed(place, partial(_number, target, argument.name, kind))
    divisor = args[1] if len(args) > 1 else kwargs.get("other")
    if (_WHOLE_DIVISION.match(name) or kwargs.get("rounding_mode")) and (
        _is_open(divisor) or divisor == -1
    ):
        yield partial(_divide, schema.arguments[0].alias_info is not None)


def _is_open(value: Any) -> bool:
    """Return whether an argument is known only when the program runs."""
    return isinstance(value, Node) or (
        isinstance(value, list | tuple) and any(map(_is_open, value))
    )


def _changed(place: _Place, change: Callable[[Any], Any]) -> _Check:
    """Return a check that may put another value in place of an argument, or raise."""

    def check(args: list[Any], kwargs: dict[str, Any]) -> None:
        if isinstance(place, int):
            args[place] = change(args[place])
        else:
            kwargs[place] = change(kwargs[place])

    return check


def _lay_out(is_strict: bool, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.is_contiguous() or not (is_strict or _overlaps(value)):
            return value
        return value.contiguous()
    is_list = isinstance(value, list | tuple)
    return [_lay_out(is_strict, each) for each in value] if is_list else value


def _overlaps(tensor: Tensor) -> bool:
    """Return whether elements of a tensor may share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _number(target: OpOverload, name: str, kind: str, value: Any) -> Any:
    if problem := number_problem(target, name, kind, value):
        raise ValueError(f"{target} {problem}")
    return value


def _count(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() and not value.is_floating_point():
        least, most = (int(each) for each in value.aminmax())
        total = int(value.sum()) if name == "repeats" else most
        if max(-least, most, total) > MOST:
            raise ValueError(
                f"{name} holds {least} to {most}, expected numbers up to {MOST} in all"
            )
    return value


def _divide(is_written: bool, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Divide opposites by 1 instead of integers by -1: the least integer has no opposite."""
    left, right = args[0], args[1] if len(args) > 1 else kwargs["other"]
    for each in (left, right):
        if each.is_floating_point() if isinstance(each, Tensor) else isinstance(each, float):
            return
    is_minus = torch.as_tensor(right == -1)
    if not is_minus.any():
        return
    if isinstance(left, Tensor):
        wide = left.to(torch.result_type(left, right))
        turned = torch.where(is_minus.to(wide.device), -wide, wide)
        args[0] = left.copy_(turned) if is_written else turned
    one = right.masked_fill(is_minus, 1) if isinstance(right, Tensor) else 1
    if len(args) > 1:
        args[1] = one
    else:
        kwargs["other"] = one


# -- what stands in for an operator ----------------------------------------------------------------

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def checked(name: str) -> Callable[..., Any]:
    """Return the operator `name`.input behind a check of its arguments."""
    run, gates = getattr(torch.ops.aten, name).input, _GATES[name]

    def recurrent(*args: Any) -> Any:
        x, hx, params, has_biases, num_layers, _, _, bidirectional, batch_first = args
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
        return run(*args)

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
