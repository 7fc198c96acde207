"""Checks in front of kernels, by the kinds of their arguments: memory, integers, divisions.

Kernels trust more than they check, in ways that are found one by one and come in classes: tensors
whose elements share memory, integers so large that sums and products of them wrap around, the one
division whose result does not fit. So each rule here is of a kind of argument, with a short list of
the operators that were shown to need none (`tests/fuzz`). Constants are judged when a program is
loaded; what is known only when it runs is judged by a function that stands in front of the call.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

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
# What divides by a greatest common divisor, which is -1 beside the least integer.
_MULTIPLE = re.compile(r"aten\.lcm\.")
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
            if _MULTIPLE.match(name):
                yield _changed(place, _without_least)
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


def _without_least(value: Tensor) -> Tensor:
    """Put 0 in the place of the least integer, no multiple of which its dtype holds."""
    return value.masked_fill(value == torch.iinfo(value.dtype).min, 0)


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
