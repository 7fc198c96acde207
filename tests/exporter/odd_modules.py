"""Modules of unusual make, each with what the bare converters of torch make of it."""

import collections
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.nn.utils import parametrizations, parametrize, weight_norm

NONE: tuple[str, ...] = ()
PT2, ONNX, SCRIPT = ("pt2",), ("onnx",), ("torchscript",)
BOTH, ALL = PT2 + ONNX, PT2 + ONNX + SCRIPT
Build = Callable[[], nn.Module]


class Net(nn.Module):
    """A layer, and what is done with it."""

    def __init__(self, call: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.call = call
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * gradients[0]


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Any:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


@dataclasses.dataclass
class Answer:
    logits: Tensor
    state: Tensor | None = None


class Named(NamedTuple):
    first: Tensor
    second: Tensor


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + x.T


class Property(nn.Module):
    """Reads a property, which scripting reads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @property
    def never(self) -> Any:
        raise AttributeError("there is none")

    @property
    def width(self) -> int:
        return self.layer.out_features

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).view(-1, self.width)


class Slots(nn.Module):
    """Has a __call__ of its own, and a __getattr__."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("layer") if name == "alias" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Any:
        return self.alias(x)


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a b": nn.Linear(4, 4), "c-d": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Any:
        for part in self.parts.values():
            x = part(x)
        return x


class Starred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *tensors: Tensor, **options: Any) -> Any:
        y: Tensor = self.layer(tensors[0])
        return y * options.get("scale", 2)


class Called(nn.Module):
    """Submodules with the names of what a GraphModule has."""

    NAMES = ("meta", "graph", "code", "_codegen", "print_readable", "recompile", "named_things")

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            self.add_module(name, nn.Linear(4, 4))
        self.register_buffer("input", torch.ones(4))
        self.register_buffer("shape", torch.ones(4))
        self.register_parameter("self_", nn.Parameter(torch.ones(4)))

    def forward(self, x: Tensor) -> Any:
        for name in self.NAMES:
            x = self._modules[name](x)  # type: ignore[misc]
        return x * self.input * self.shape * self.self_  # type: ignore[operator]


class Words(nn.Module):
    """Python's own words as names."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("class", "lambda", "import", "None", "print", "x"):
            self.add_module(name, nn.Linear(4, 4))
        self.register_buffer("def", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        for part in self._modules.values():
            x = part(x)  # type: ignore[misc]
        return x * self._buffers["def"]  # type: ignore[operator]


def hooked() -> nn.Module:
    net = Net(lambda s, x: s.layer(x))
    net.layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    net.layer.register_forward_hook(lambda module, args, output: output + 1)
    net.register_forward_hook(lambda module, args, output: output.relu())
    return net


def old_weight_norm() -> nn.Module:
    net = Net(lambda s, x: s.layer(x))
    net.layer = weight_norm(net.layer)
    return net


def with_parametrization(kind: Callable[[nn.Module], nn.Module]) -> nn.Module:
    net = Net(lambda s, x: s.layer(x))
    net.layer = kind(net.layer)  # type: ignore[assignment]
    return net


def symmetric() -> nn.Module:
    net = Net(lambda s, x: s.layer(x))
    parametrize.register_parametrization(net.layer, "weight", Symmetric())
    return net


def scripted_part() -> nn.Module:
    return Net(lambda s, x: s.part(s.layer(x)), part=torch.jit.script(nn.Linear(4, 3)))


def frozen_part() -> nn.Module:
    part = torch.jit.freeze(torch.jit.script(nn.Linear(4, 3).eval()))
    return Net(lambda s, x: s.part(s.layer(x)), part=part)


def traced_part() -> nn.Module:
    part = torch.jit.trace(nn.Linear(4, 3), torch.rand(2, 4))  # type: ignore[no-untyped-call]
    return Net(lambda s, x: s.part(s.layer(x)), part=part)


def tied() -> nn.Module:
    net = Net(lambda s, x: s.other(s.layer(x)), other=nn.Linear(4, 4))
    net.other.weight = net.layer.weight  # type: ignore[union-attr]
    return net


def windows(x: Tensor) -> Any:
    """Pad to whole windows of three, as attention over windows does."""
    n = x.shape[0]
    return F.pad(x, (0, 0, 0, math.ceil(n / 3) * 3 - n)).view(-1, 3, 4).mean(1).sum(0) + x


def gives_parts(s: Any, x: Tensor) -> Iterator[Tensor]:
    yield from s.layer(x).split(2, 1)


def y(s: Any, x: Tensor) -> Tensor:
    """Return what most of these make their output of."""
    out: Tensor = s.layer(x)
    return out


ODD: dict[str, tuple[Build, tuple[str, ...]]] = {
    "autograd.Function": (lambda: Net(lambda s, x: apply(Square, y(s, x))), BOTH),
    "autograd.Function with setup_context": (
        lambda: Net(lambda s, x: apply(Straight, y(s, x))),
        BOTH,
    ),
    "names of GraphModule": (Called, SCRIPT),
    "words of Python": (Words, NONE),
    "hooks": (hooked, ALL),
    "weight_norm of old": (old_weight_norm, ALL),
    "weight_norm": (lambda: with_parametrization(parametrizations.weight_norm), ALL),
    "spectral_norm": (lambda: with_parametrization(parametrizations.spectral_norm), ALL),
    "orthogonal": (
        lambda: with_parametrization(parametrizations.orthogonal),
        ("pt2", "torchscript"),
    ),
    "own parametrization": (symmetric, ALL),
    "scripted part": (scripted_part, SCRIPT),
    "frozen part": (frozen_part, NONE),
    "traced part": (traced_part, ALL),
    "tied weights": (tied, ALL),
    "property": (Property, ALL),
    "__getattr__": (Slots, ALL),
    "ModuleDict with spaces": (Loop, NONE),
    "*args, **kwargs": (Starred, ALL),
    "dataclass": (lambda: Net(lambda s, x: Answer(y(s, x), x.sum())), NONE),
    "dataclass with None": (lambda: Net(lambda s, x: Answer(y(s, x))), NONE),
    "namedtuple": (lambda: Net(lambda s, x: Named(y(s, x), x)), ONNX + SCRIPT),
    "None beside it": (lambda: Net(lambda s, x: (y(s, x), None)), BOTH),
    "numbers beside it": (lambda: Net(lambda s, x: {"a": y(s, x), "n": 3, "s": "text"}), NONE),
    "nested": (lambda: Net(lambda s, x: {"a": [y(s, x), (x, {"b": x + 1})]}), BOTH),
    "OrderedDict": (lambda: Net(lambda s, x: collections.OrderedDict(b=y(s, x), a=x)), ALL),
    "defaultdict": (lambda: Net(lambda s, x: collections.defaultdict(list, a=y(s, x))), ALL),
    "the input itself": (lambda: Net(lambda s, x: (y(s, x), x)), ALL),
    "one output twice": (lambda: Net(lambda s, x: (lambda z: (z, z))(y(s, x))), ALL),
    "a weight": (lambda: Net(lambda s, x: (y(s, x), s.layer.weight)), ALL),
    "a view of a weight": (lambda: Net(lambda s, x: (y(s, x), s.layer.weight[0])), ALL),
    "0-d": (lambda: Net(lambda s, x: y(s, x).mean()), ALL),
    "0-d beside it": (lambda: Net(lambda s, x: (y(s, x), y(s, x).argmax())), ALL),
    "complex": (lambda: Net(lambda s, x: torch.fft.rfft(y(s, x))), ALL),
    "bfloat16": (lambda: Net(lambda s, x: y(s, x).bfloat16()), PT2 + SCRIPT),
    "float16": (lambda: Net(lambda s, x: y(s, x).half()), ALL),
    "float64": (lambda: Net(lambda s, x: y(s, x).double() * 2), ALL),
    "bool": (lambda: Net(lambda s, x: y(s, x) > 0), ALL),
    "uint8": (lambda: Net(lambda s, x: (y(s, x).sigmoid() * 255).to(torch.uint8)), ALL),
    "sparse": (lambda: Net(lambda s, x: y(s, x).to_sparse()), NONE),
    "nested tensor": (lambda: Net(lambda s, x: torch.nested.nested_tensor([y(s, x)[0]])), NONE),
    "a string": (lambda: Net(lambda s, x: "answer"), NONE),
    "nothing": (lambda: Net(lambda s, x: None), NONE),
    "a generator": (lambda: Net(gives_parts), NONE),
    "a set": (lambda: Net(lambda s, x: {y(s, x)}), NONE),
    "numpy's array": (lambda: Net(lambda s, x: y(s, x).numpy()), NONE),
    "a list of numbers": (lambda: Net(lambda s, x: y(s, x).tolist()), NONE),
    "an object": (lambda: Net(lambda s, x: object()), NONE),
    "ceil": (lambda: Net(lambda s, x: windows(y(s, x))), ONNX),
    "floor": (lambda: Net(lambda s, x: y(s, x)[: math.floor(x.shape[0] / 2) + 1].sum(0) + x), ONNX),
    "round": (lambda: Net(lambda s, x: y(s, x)[: round(x.shape[0] * 0.5) + 1].sum(0) + x), NONE),
    "sqrt": (lambda: Net(lambda s, x: y(s, x) / math.sqrt(x.shape[1])), ALL),
    "sqrt of the rows": (lambda: Net(lambda s, x: y(s, x) / x.shape[0] ** 0.5), ALL),
    "assert of values": (lambda: Net(lambda s, x: asserted(y(s, x))), ALL),
    "_assert_async": (lambda: Net(lambda s, x: asserted_later(y(s, x))), ALL),
    "check of a size": (lambda: Net(lambda s, x: checked(y(s, x))), BOTH),
    "print": (lambda: Net(lambda s, x: (sys.stderr.write("seen"), y(s, x))[1]), ALL),
    "no_grad": (lambda: Net(torch.no_grad()(y)), ALL),
    "autocast": (lambda: Net(autocast), ALL),
    "checkpoint": (lambda: Net(recomputed), ALL),
    "vmap": (lambda: Net(lambda s, x: torch.vmap(s.layer)(x)), ALL),
    "cond": (lambda: Net(lambda s, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))), BOTH),
    "functional_call": (lambda: Net(called), BOTH),
    "einsum of three": (
        lambda: Net(lambda s, x: torch.einsum("bi,ij,bj->b", x, s.layer.weight, x)),
        ALL,
    ),
    "in-place on the input": (lambda: Net(lambda s, x: y(s, x.mul_(2))), ALL),
    "a buffer that counts": (lambda: Net(counting, calls=torch.zeros(())), NONE),
    "a lambda as a part": (lambda: Net(lambda s, x: s.f(y(s, x)), f=lambda t: t * 2), ALL),
    "setattr of a tensor": (lambda: Net(remembers), ALL),
    "lazy": (lambda: Net(lambda s, x: s.lazy(y(s, x)), lazy=made(nn.LazyLinear(3))), ALL),
    "compiled": (lambda: Net(lambda s, x: s.fast(x), fast=torch.compile(nn.Linear(4, 2))), BOTH),
    "interpolate by 0.4": (lambda: Net(smaller), ALL),
    "istft": (lambda: Net(waves), PT2 + SCRIPT),
    "TensorDict": (lambda: Net(lambda s, x: Batch(y(s, x))), ALL),
}
"""Name → what builds it, of `x:float32[batch,4]`; and the formats in which bare calls are right."""


class Batch(collections.UserDict):  # type: ignore[type-arg]
    """A mapping that has items and no iteration, as a TensorDict over no dims."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__({"logits": logits})

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("iteration over a 0-d tensordict")

    def items(self) -> Any:
        return self.data.items()


def apply(function: Any, x: Tensor) -> Any:
    return function.apply(x)


def asserted(x: Tensor) -> Any:
    check: Any = torch._assert
    check(x.shape[1] == 4, "four columns")
    return x * 2


def asserted_later(x: Tensor) -> Any:
    torch._assert_async((x.abs() < 1e9).all(), "too large")
    return x * 2


def checked(x: Tensor) -> Any:
    check: Any = torch._check
    check(x.shape[0] > 0)
    return x * 2


def autocast(s: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        return y(s, x)


def recomputed(s: Any, x: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(s.layer, x, use_reentrant=False)


def called(s: Any, x: Tensor) -> Any:
    return torch.func.functional_call(s.layer, {"weight": s.layer.weight * 2}, (x,))


def counting(s: Any, x: Tensor) -> Any:
    s.calls += 1
    return y(s, x) * s.calls


def remembers(s: Any, x: Tensor) -> Any:
    s.last = y(s, x)
    return s.last * 2


def made(part: nn.Module) -> nn.Module:
    part(torch.rand(2, 4))
    return part


def smaller(s: Any, x: Tensor) -> Tensor:
    return F.interpolate(y(s, x)[:, None, None].expand(-1, 1, 9, 4), scale_factor=0.4)


def waves(s: Any, x: Tensor) -> Tensor:
    spectrum = torch.complex(y(s, x), x)[:, :3, None].expand(-1, 3, 8)
    return torch.istft(spectrum, 4, 2, window=torch.hann_window(4))


def build(name: str) -> nn.Module:
    """Return a module by its name, with weights that are the same in each process."""
    torch.manual_seed(0)
    return ODD[name][0]().eval()
