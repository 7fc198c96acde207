"""Programs of allowed operators with hostile constants and inputs: drawn from a seed, and run."""

import hashlib
import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from modelyard.handlers.judge.checked import CHECKED, call_problem, guarded

CALLS = Path(__file__).with_name("calls.json")
MAX_STEPS = 4
LARGEST_KEPT = 1 << 18  # elements of a result that later steps may take
SEEN_BYTES = 1 << 16

Json = Any
INTEGERS = (-1, 0, 1, 2, 3, 5, 7, -2, -3, 64, 255, 1 << 20)
HUGE = (2**31 - 1, 2**31, -(2**31), 2**32 + 1, 2**40, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, 1e30, 1e308, float("inf"), -float("inf"), float("nan"))
WORDS = ("none", "mean", "sum", "constant", "reflect", "replicate", "circular", "tanh", "trunc")
MORE_WORDS = (
    "floor",
    "linear",
    "bilinear",
    "ij",
    "xy",
    "ortho",
    "i,j->ij",
    "...ij->...ji",
    "ii->i",
)
REALS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLES = (torch.int64, torch.int32, torch.uint8, torch.int8, torch.int16)
DTYPES = (*REALS, *WHOLES, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16)


@dataclass(frozen=True)
class Operator:
    """One allowed operator."""

    name: str
    """As in a `.pt2`, without `torch.ops.`."""
    run: torch._ops.OpOverload
    stands_in: Callable[..., Any]
    """What is called in its place."""
    calls: Sequence[Json]
    """Calls of it that a real export holds."""


def operators(names: Sequence[str]) -> list[Operator]:
    """Return those of the named operators that this torch has."""
    known = json.loads(CALLS.read_text(encoding="utf-8")) if CALLS.exists() else {}
    found = []
    for name in names:
        target: Any = torch.ops
        for part in name.split("."):
            target = getattr(target, part, None)
        if isinstance(target, torch._ops.OpOverload):
            stands_in = CHECKED.get(target, target)
            found.append(Operator(name, target, stands_in, known.get(f"torch.ops.{name}", ())))
    return found


def judged(
    operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], is_sent: bool
) -> Callable[..., Any] | None:
    """Return what a program runs for a call, as `load_program` does; None where it is refused.

    Args:
        operator: the operator.
        args: arguments of the call.
        kwargs: those by name.
        is_sent: whether numbers come with a request, instead of as constants of the program.
    """
    kinds = (Tensor, int, float) if is_sent else (Tensor,)
    node = torch.fx.Graph().placeholder("x")

    def known(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [known(each) for each in value]
        return node if isinstance(value, kinds) and not isinstance(value, bool) else value

    stated = [known(each) for each in args], {name: known(each) for name, each in kwargs.items()}
    if call_problem(operator.run, *stated):
        return None
    return guarded(operator.run, operator.stands_in, *stated)


class Program:
    """A few calls, the later ones of what the earlier ones gave; equal for equal seeds.

    Args:
        seed: of everything in it.
        allowed: what it may call.
        enter: is told each step before it runs: its number, and its operator's.
        leave: is told each operator whose call has returned.
    """

    def __init__(
        self,
        seed: int,
        allowed: Sequence[Operator],
        enter: Callable[[int, int], None] = lambda step, operator: None,
        leave: Callable[[int], None] = lambda operator: None,
        show: Callable[[str], None] | None = None,
        left_out: Collection[int] = (),
    ) -> None:
        self.seed, self.allowed, self.left_out = seed, allowed, left_out
        self.enter, self.leave, self.show = enter, leave, show
        self.random = random.Random(seed)
        self.kept: list[Tensor] = []
        self.lacked_memory = False
        """Whether a step failed that another time may not."""
        self.wrong: list[int] = []
        """Operators whose answer is known to be another one."""
        self.wants_gradients = self.random.random() < 0.2

    def run(self) -> Iterator[tuple[int, str]]:
        """Run it; yield each step's operator, and a digest of every byte that the step gave."""
        torch.manual_seed(self.seed)
        steps = self.random.randint(1, MAX_STEPS)
        differentiable: list[Tensor] = []
        with torch.set_grad_enabled(self.wants_gradients):
            for step in range(steps):
                self.random = random.Random(f"{self.seed} {step}")
                chosen = self.random.randrange(len(self.allowed))
                if chosen in self.left_out:
                    continue
                operator = self.allowed[chosen]
                try:
                    args, kwargs = self._arguments(operator)
                    call = judged(operator, args, kwargs, self.random.random() < 0.5)
                    if call is None:
                        continue
                    if self.show:
                        self.show(f"{operator.name} {args} {kwargs}")
                    self.enter(step, chosen)
                    results = _tensors(call(*args, **kwargs))
                    self.leave(chosen)
                    yield chosen, _digest(results)
                except Exception as error:
                    self.lacked_memory |= "allocate memory" in str(error)
                    if self.show:
                        self.show(f"  {type(error).__name__}: {str(error)[:300]}")
                    continue
                self.kept += [each for each in results if each.numel() <= LARGEST_KEPT]
                differentiable += [each for each in results if each.requires_grad]
            if differentiable:
                self.enter(steps, len(self.allowed))
                try:
                    total = torch.stack([each.abs().sum().double() for each in differentiable[-3:]])
                    leaves = [each for each in self.kept if each.requires_grad and each.is_leaf]
                    gradients = torch.autograd.grad(total.sum(), leaves, allow_unused=True)
                    yield (
                        len(self.allowed),
                        _digest([each for each in gradients if each is not None]),
                    )
                except Exception as error:
                    if self.show:
                        self.show(f"  backward: {type(error).__name__}: {str(error)[:300]}")

    def _arguments(self, operator: Operator) -> tuple[list[Any], dict[str, Any]]:
        if operator.calls and self.random.random() < 0.75:
            call = json.loads(json.dumps(self.random.choice(operator.calls)))
            for _ in range(self.random.choice((0, 1, 1, 1, 2, 3))):
                self._mutate(call)
            args, kwargs = call
            return [self._value(each) for each in args], {
                name: self._value(each) for name, each in kwargs.items()
            }
        positional, by_name = [], {}
        for argument in operator.run._schema.arguments:
            if argument.has_default_value() and self.random.random() < 0.4:
                if argument.kwarg_only:
                    continue
                positional.append(argument.default_value)
                continue
            value = self._drawn(str(argument.type), argument.name, cast("Any", argument).N)
            if argument.kwarg_only:
                by_name[argument.name] = value
            else:
                positional.append(value)
        return positional, by_name

    # -- calls of real exports, changed ------------------------------------------------------------

    def _mutate(self, call: Json) -> None:
        """Change one place of a call: a constant, a tensor's type, sizes, values or layout."""
        places = list(_places(call))
        if not places:
            return
        holder, key = self.random.choice(places)
        value, draw = holder[key], self.random.random()
        if isinstance(value, dict) and "tensor" in value:
            holder[key] = self._changed_tensor(value)
        elif isinstance(value, list):
            if value and draw < 0.3:
                value.pop(self.random.randrange(len(value)))
            elif value and draw < 0.6:
                value.append(self.random.choice(value))
            else:
                holder[key] = [self._integer() for _ in range(self.random.randint(0, 5))]
        elif isinstance(value, bool):
            holder[key] = not value
        elif isinstance(value, int):
            holder[key] = self._integer() if draw < 0.8 else self.random.choice(FLOATS)
        elif isinstance(value, float):
            holder[key] = self.random.choice(FLOATS)
        elif isinstance(value, str):
            holder[key] = self.random.choice(WORDS + MORE_WORDS)
        elif value is None:
            holder[key] = self._integer() if draw < 0.5 else self._spec()

    def _changed_tensor(self, spec: dict[str, Any]) -> dict[str, Any] | None:
        draw, size = self.random.random(), list(spec["size"])
        if draw < 0.35:
            return spec | {"hostile": True}
        if draw < 0.65:
            if size and self.random.random() < 0.8:
                axis = self.random.randrange(len(size))
                size[axis] = self.random.choice((0, 1, 2, size[axis] + 1, max(size[axis] - 1, 0)))
            elif size and self.random.random() < 0.5:
                size.pop()
            else:
                size.append(self.random.choice((0, 1, 3)))
            return {"tensor": spec["tensor"], "size": size}
        if draw < 0.8:
            return spec | {"tensor": _name(self.random.choice(DTYPES))}
        if draw < 0.9:
            return spec | {"layout": self.random.choice(("expanded", "turned", "sliced"))}
        return None if draw < 0.94 else spec | {"kept": True}

    def _value(self, stated: Json) -> Any:
        """Return an argument as a call states it."""
        if isinstance(stated, list):
            return [self._value(each) for each in stated]
        if not isinstance(stated, dict):
            return stated
        if "tensor" not in stated:
            ((kind, text),) = stated.items()
            if kind == "float":
                return float(text)
            return torch.device("cpu") if kind == "device" else getattr(torch, text)
        if self.kept and (stated.get("kept") or self.random.random() < 0.15):
            return self.random.choice(self.kept)
        return self._tensor(stated)

    # -- tensors -----------------------------------------------------------------------------------

    def _spec(self) -> dict[str, Any]:
        sizes = [
            self.random.choice((0, 1, 1, 2, 3, 4, 8)) for _ in range(self.random.randint(0, 5))
        ]
        dtype = self.random.choice((torch.float32, torch.float32, torch.int64, *DTYPES))
        hostile = self.random.random() < 0.3
        return {"tensor": _name(dtype), "size": sizes, "hostile": hostile}

    def _tensor(self, spec: dict[str, Any]) -> Tensor:
        dtype, sizes = getattr(torch, spec["tensor"]), [max(0, int(n)) for n in spec["size"]]
        layout = spec.get("layout")
        if layout == "expanded" and sizes:
            sizes = [1, *sizes[1:]]
        if layout == "sliced" and sizes:
            sizes = [*sizes[:-1], sizes[-1] * 2 + 1]
        count = 1
        for size in sizes:
            count *= size
        generator = torch.Generator().manual_seed(self.random.getrandbits(40))
        if dtype.is_floating_point or dtype.is_complex:
            values = torch.randn(count, generator=generator)
        else:
            values = torch.randint(0, 3, (count,), generator=generator)
        if spec.get("hostile") and count:
            values = values.double() if dtype.is_floating_point else values
            for _ in range(min(count, 4)):
                place = self.random.randrange(count)
                if values.is_floating_point():
                    values[place] = self.random.choice(FLOATS)
                else:
                    values[place] = self._integer()
        made = values.to(dtype).reshape(sizes)
        if layout == "expanded" and sizes:
            made = made.expand(spec["size"][0], *made.shape[1:])
        elif layout == "sliced" and sizes:
            made = made[..., 1::2]
        elif layout == "turned" and len(sizes) > 1:
            made = made.transpose(0, -1).contiguous().transpose(0, -1)
        elif "stride" in spec and not spec.get("layout"):
            made = _laid_out(made, spec["size"], spec["stride"])
        if self.wants_gradients and made.is_floating_point():
            made = made.detach().requires_grad_(self.random.random() < 0.7)
            if made.requires_grad:
                self.kept.append(made)
        return made

    # -- arguments by their type -------------------------------------------------------------------

    def _integer(self) -> int:
        if self.random.random() < 0.25:
            return self.random.choice(HUGE)
        return self.random.choice(INTEGERS)

    def _drawn(self, kind: str, name: str, length: int | None) -> Any:
        draw = self.random.random()
        if kind.startswith("Optional["):
            kind = kind[9:-1]
            if draw < 0.3:
                return None
        if kind.startswith("List["):
            most = self.random.randint(0, 4) if not length or draw < 0.1 else length
            return [self._drawn(kind[5:-1], name, None) for _ in range(most)]
        if kind == "Tensor":
            if self.kept and draw < 0.5:
                return self.random.choice(self.kept)
            return self._tensor(self._spec())
        if name == "dtype":
            return self.random.choice(DTYPES)
        if name in ("layout", "pin_memory", "device", "generator", "memory_format"):
            return None
        if kind in ("int", "SymInt"):
            return self._integer()
        if kind in ("float", "number", "Scalar", "SymFloat"):
            return self.random.choice((*FLOATS, self._integer()))
        if kind in ("bool", "SymBool"):
            return draw < 0.5
        return self.random.choice(WORDS + MORE_WORDS) if kind == "str" else None


def _places(value: Json) -> Iterator[tuple[Any, Any]]:
    """Yield (holder, key) of everything in a call that can be changed."""
    items: Iterator[tuple[Any, Any]]
    if isinstance(value, dict):
        items = iter([] if "tensor" in value else value.items())
    else:
        items = enumerate(value)
    for key, item in items:
        is_shown = isinstance(item, dict) and "tensor" not in item and key != 1
        if not is_shown and not (isinstance(item, dict) and "tensor" not in item):
            yield value, key
        if isinstance(item, list) or (isinstance(item, dict) and "tensor" not in item):
            yield from _places(item)


def _laid_out(made: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the tensor in another order of memory, where it stays dense."""
    order = sorted(range(len(size)), key=lambda axis: -stride[axis])
    inverse = sorted(range(len(size)), key=lambda position: order[position])
    return made.permute(order).contiguous().permute(inverse)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(output: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _digest(results: Sequence[Tensor]) -> str:
    """Read what a call gave, up to some size: a view of the outside is read here at the latest."""
    digest = hashlib.blake2b(digest_size=8)
    for result in results:
        digest.update(f"{result.dtype}{tuple(result.shape)}".encode())
        if result.layout is not torch.strided or result.device.type != "cpu":
            continue
        with torch.no_grad():
            flat = result.detach().resolve_conj().resolve_neg()
            if flat.numel() > LARGEST_KEPT:
                flat = flat.reshape(-1)[:SEEN_BYTES] if flat.is_contiguous() else flat.flatten()[:1]
            dense = flat.flatten().clone(memory_format=torch.contiguous_format)
            digest.update(dense.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
