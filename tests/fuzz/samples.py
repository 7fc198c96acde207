"""torch's own samples of what it tests, each tensor laid out in every way and ending with its page.

The answer for a layout is compared with that for the same values in a contiguous tensor.
"""

import ctypes
import functools
import itertools
import math
import mmap
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.fuzz.programs import Operator, _digest, _tensors, judged

LAYOUTS = ("contiguous", "repeated", "expanded", "every second", "turned")
SAMPLES = 25  # of one operator and type, of which so many are taken:
TAKEN = 3
LARGEST = 1 << 14  # elements of all tensors of one
DTYPES = (*[torch.float32] * 3, torch.float64, torch.int64, torch.uint8, torch.bfloat16, torch.bool)
# Random numbers, which of equal elements an index names, and a matrix's factors differ by layout.
ANY_ANSWER = (
    *("rand", "dropout", "bernoulli", "multinomial", "rrelu", "argsort", "empty"),
    *("exponential", "normal", "_linalg_"),
)
WITH_INDEX = ("median", "mode", "kthvalue", "sort", "topk", "max", "min", "cummax", "cummin")
Call = tuple[Any, Any]
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None)


class Samples:
    """One sample in one layout, through every listed operator that it calls; as `Program`."""

    def __init__(
        self,
        seed: int,
        allowed: Sequence[Operator],
        enter: Callable[[int, int], None] = lambda step, operator: None,
        leave: Callable[[int], None] = lambda operator: None,
        show: Callable[[str], None] | None = None,
        left_out: Collection[int] = (),
    ) -> None:
        self.seed, self.allowed, self.enter, self.leave = seed, allowed, enter, leave
        self.show, self.left_out = show, left_out
        self.random = random.Random(seed)
        self.lacked_memory = False
        self.wrong: list[int] = []
        """Operators whose answer is another one for another layout."""

    def run(self) -> Iterator[tuple[int, str]]:
        """Run it; yield each operator, and a digest of every byte that it gave."""
        places = _places(tuple(each.name for each in self.allowed))
        steps = ((call, pair) for call in _calls(self.seed) for pair in self.variants(*call))
        for step, ((target, *_), (one, other)) in enumerate(steps):
            place = places.get(f"aten.{target._schema.name[6:]}.{target._overloadname}")
            if place is None or place in self.left_out:
                continue
            operator = self.allowed[place]
            if self.show:
                self.show(f"{operator.name} {one}")
            call = judged(operator, *one, self.random.random() < 0.5)
            if call is None:
                continue
            self.enter(step, place)
            try:
                torch.manual_seed(self.seed)
                found = _tensors(call(*one[0], **one[1]))
                self.leave(place)
                torch.manual_seed(self.seed)
                expected = _tensors(operator.stands_in(*other[0], **other[1])) if other else found
            except Exception as error:
                self.lacked_memory |= "allocate memory" in str(error)
                if self.show:
                    self.show(f"  {type(error).__name__}: {str(error)[:300]}")
                continue
            yield place, _digest(found)
            if not _agree(operator.name, found, expected):
                self.wrong.append(place)
                if self.show:
                    self.show(f"  {found} and not {expected}")

    def variants(self, target: Any, args: Any, kwargs: Any) -> Iterator[tuple[Call, Call | None]]:
        """Yield arguments to try, and others that have to give the same."""
        for layout in LAYOUTS:
            yield self._laid_out(layout, args, kwargs)

    def _laid_out(self, layout: str, args: Any, kwargs: Any) -> tuple[Call, Call]:
        """Return the arguments in a layout, and the same values in contiguous tensors."""
        leaves, spec = tree_flatten((args, kwargs))
        ones = [self._tensor(layout, each) if _is_plain(each) else each for each in leaves]
        others = [
            each.clone(memory_format=torch.contiguous_format) if _is_plain(each) else each
            for each in ones
        ]
        return tree_unflatten(ones, spec), tree_unflatten(others, spec)

    def _tensor(self, layout: str, values: Tensor) -> Tensor:
        sizes = list(values.shape)
        if layout == "repeated" and values.numel():
            return at_end(values.flatten()[:1]).expand(sizes or [1]).reshape(sizes)
        if layout == "expanded" and values.numel() and sizes:
            axis = self.random.randrange(len(sizes))
            return at_end(values.narrow(axis, 0, 1)).expand(sizes)
        if layout == "every second" and values.numel():
            flat = values.flatten().repeat_interleave(2)[:-1]
            strides = [2 * step for step in torch.empty(sizes, device="meta").stride()]
            return at_end(flat).as_strided(sizes, strides)
        if layout == "turned":
            order = list(range(len(sizes)))[::-1]
            return at_end(values.permute(order)).permute(order)
        return at_end(values)


def at_end(values: Tensor) -> Tensor:
    """Return a copy in contiguous memory that ends where a page does that may not be touched."""
    count = values.numel() * values.element_size()
    if not count:
        return values.clone()
    size = -(-count // _PAGE) * _PAGE
    memory = mmap.mmap(-1, size + _PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert _libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(_PAGE), 0) == 0
    made = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=size - count)
    return made.view(values.dtype).view(values.shape).copy_(values)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized


@functools.cache
def _places(names: tuple[str, ...]) -> dict[str, int]:
    return {name: place for place, name in enumerate(names)}


@functools.lru_cache(1)
def _calls(seed: int) -> list[tuple[Any, Any, Any]]:
    """Return the calls of torch's operators that some samples of one of them make."""
    info, draw = op_db[seed % len(op_db)], random.Random(f"calls {seed}")
    dtypes = [each for each in DTYPES if each in info.dtypes]
    found: list[tuple[Any, Any, Any]] = []
    torch.manual_seed(seed)
    try:
        sample_inputs: Any = info.sample_inputs
        samples = sample_inputs("cpu", draw.choice(dtypes), requires_grad=False)
        kept = list(itertools.islice(samples, SAMPLES))
        for sample in draw.sample(kept, min(TAKEN, len(kept))):
            found += _calls_of(info.op, sample, draw.random() < 0.5)
    # Samples of what this machine lacks, and what cannot be traced.
    except Exception:
        return found
    return found


def _calls_of(
    operation: Callable[..., Any], sample: Any, is_composed: bool
) -> list[tuple[Any, Any, Any]]:
    given, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    spots = [i for i, each in enumerate(given) if isinstance(each, Tensor)]
    tensors = [given[spot].detach().clone() for spot in spots]
    if sum(each.numel() for each in tensors) > LARGEST:
        return []

    def call(*tensors: Tensor) -> Any:
        leaves = list(given)
        for spot, tensor in zip(spots, tensors, strict=True):
            leaves[spot] = tensor
        first, args, kwargs = tree_unflatten(leaves, spec)
        return operation(first, *args, **kwargs)

    record = _Record(make_fx(call, pre_dispatch=is_composed)(*tensors))
    record.run(*tensors)
    return record.found


class _Record(torch.fx.Interpreter):
    def __init__(self, graph: Any) -> None:
        super().__init__(graph)
        self.found: list[tuple[Any, Any, Any]] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
            # What the call changes in place is kept as it was.
            leaves, spec = tree_flatten((args, dict(kwargs)))
            own = [each.clone() if isinstance(each, Tensor) else each for each in leaves]
            self.found.append((target, *tree_unflatten(own, spec)))
        return super().call_function(target, args, kwargs)


def _agree(name: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    word = name.split(".")[1]
    if any(each in word for each in ANY_ANSWER) or len(found) != len(expected):
        return True
    pairs = list(zip(found, expected, strict=True))
    for one, other in pairs[:1] if word in WITH_INDEX else pairs:
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.layout is not torch.strided or not one.numel():
            continue
        limit = 1e-4 if one.dtype in (torch.float32, torch.complex64) else 1e-7
        is_coarse = one.dtype in (torch.bfloat16, torch.float16) or "norm" in word
        limit = 4e-2 if is_coarse else limit  # a norm of equal numbers is made of rounding errors
        if not one.is_floating_point() and not one.is_complex():
            if not torch.equal(one, other):
                return False
            continue
        finite = other[other.isfinite()].abs()
        scale = float(finite.max()) if finite.numel() else 1.0
        if not torch.allclose(one, other, limit, limit * max(scale, 1), equal_nan=True):
            return math.isnan(scale)
    return True
