"""Small networks of many kinds, what may be wrong with a copy of each, and what may not matter."""

# mypy: ignore-errors
# Modules hold modules and tensors under any name, which mypy cannot tell apart.

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

Change = Callable[[nn.Module], nn.Module]
"""Makes a copy's network of a network that is its own to change."""


@dataclass(frozen=True)
class Network:
    """A network, how it is called, and the changes that only it can have."""

    build: Callable[[], nn.Module]
    inputs: str
    weights: tuple[str, ...]
    """Names of weights on which every number of the output depends."""
    outputs: tuple[str, ...] = ("y",)
    wrong: dict[str, Change] = field(default_factory=dict)
    fine: dict[str, Change] = field(default_factory=dict)
    """Wrongs smaller than what float32 holds of a number 1,000 spreads away from zero."""
    harmless: dict[str, Change] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    """What the artifact computes in, where that is not the checkpoint's."""
    is_quantized: bool = False
    has_gain: bool = True
    """Whether its outputs may be multiplied and moved."""


class Then(nn.Module):
    """A network, and what is done with its outputs."""

    def __init__(self, net: nn.Module, after: Callable[..., object]) -> None:
        super().__init__()
        self.net, self.after = net, after

    def forward(self, *inputs: Tensor) -> object:
        outputs = self.net(*inputs)
        return self.after(*outputs) if isinstance(outputs, tuple) else self.after(outputs)


def then(after: Callable[..., object]) -> Change:
    return lambda net: Then(net, after)


def on_each(one: Callable[[Tensor], Tensor]) -> Callable[..., object]:
    """Apply a change to every output of real numbers."""

    def apply(*outputs: Tensor) -> object:
        changed = tuple(one(each) if each.is_floating_point() else each for each in outputs)
        return changed if len(changed) > 1 else changed[0]

    return apply


def set_to(**values: object) -> Change:
    """Set attributes of every module that has them."""

    def change(net: nn.Module) -> nn.Module:
        met = 0
        for module in net.modules():
            for name, value in values.items():
                if hasattr(module, name):
                    setattr(module, name, value)
                    met += 1
        assert met, f"{sorted(values)} are there"
        return net

    return change


def replaced(old: type[nn.Module], new: Callable[[nn.Module], nn.Module]) -> Change:
    """Put another module wherever there is one of a kind."""

    def change(net: nn.Module) -> nn.Module:
        for module in list(net.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, old):
                    setattr(module, name, new(child))
        return net

    return change


def weight(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    def apply(net: nn.Module) -> nn.Module:
        with torch.no_grad():
            value = dict(net.named_parameters())[name]
            value.copy_(change(value.clone()))
        return net

    return apply


def turned(values: Tensor) -> Tensor:
    return values.flip(0) if values.shape[0] > 1 else values.flip(-1)


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "x 1.01": lambda values: values * 1.01,
    "permuted": turned,
    "of the other sign": torch.neg,
}
AFTER: dict[str, Callable[..., object]] = {
    "constant": on_each(lambda y: y * 0 + y.flatten()[0]),
    "one column x 1.1": on_each(lambda y: torch.cat([y[..., :-1], y[..., -1:] * 1.1], -1)),
    "rows exchanged": on_each(lambda y: y.flip(0)),
    "the first row alone": on_each(lambda y: y[:1].expand_as(y).contiguous()),
}


class Double(nn.Module):
    """The same in float64 inside."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net.double()

    def forward(self, *inputs: Tensor) -> object:
        given = [each.double() if each.is_floating_point() else each for each in inputs]
        return on_each(lambda y: y.float())(*_tuple(self.net(*given)))


class Half(nn.Module):
    """The same rounded to float16 on the way in."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *inputs: Tensor) -> object:
        given = [each.half().float() if each.is_floating_point() else each for each in inputs]
        return self.net(*given)


def _tuple(outputs: object) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def flushed(y: Tensor) -> Tensor:
    return torch.where(y.abs() < torch.finfo(y.dtype).tiny, torch.zeros_like(y), y)


HARMLESS: dict[str, Change] = {
    "as it is": lambda net: net,
    "a last place": then(on_each(lambda y: torch.nextafter(y, torch.full_like(y, math.inf)))),
    "denormals flushed": then(on_each(flushed)),
    "negative zeros": then(on_each(lambda y: torch.where(y == 0, -torch.zeros_like(y), y))),
    "x 3 / 3": then(on_each(lambda y: y * 3 / 3)),
    "channels last": lambda net: net.to(memory_format=torch.channels_last),
}


class Mlp(nn.Module):
    def __init__(self, act: nn.Module, after: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(6, 32), act, nn.Linear(32, 5)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.two(self.act(self.one(x))))


def reordered(net: nn.Module) -> nn.Module:
    """Exchange the hidden units of a perceptron: the same sums in another order."""
    with torch.no_grad():
        for value, dim in ((net.one.weight, 0), (net.one.bias, 0), (net.two.weight, 1)):
            value.copy_(value.flip(dim))
    return net


def shifted(net: nn.Module) -> nn.Module:
    """Drop what a softmax does not see: a shift of all logits."""
    with torch.no_grad():
        net.two.bias.add_(3.0)
    return net


class Split(nn.Module):
    """A linear layer whose sums are made of four parts."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(x.chunk(4, -1), self.linear.weight.chunk(4, -1), strict=True)
        total = sum(one @ two.T for one, two in parts)
        return total if self.linear.bias is None else total + self.linear.bias


class HardlyVaries(nn.Module):
    """Sums that nearly cancel, of numbers that vary by a thousandth: mostly rounding is left."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(6, 64), nn.Identity(), nn.Linear(64, 5)
        with torch.no_grad():
            self.one.weight.mul_(1e-3)
            self.one.bias.mul_(1e-3).add_(1)
            self.two.bias.copy_(-self.two.weight.sum(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.act(self.one(x)))


class Cnn(nn.Module):
    def __init__(self, act: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), act()
        self.second, self.head, self.residual = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5), True
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)
            self.norm.bias.normal_()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.conv(x)))
        after = self.second(h)
        h = after + h if self.residual else after
        return self.head(h.mean((2, 3)))


def fused(net: nn.Module) -> nn.Module:
    net.conv = torch.nn.utils.fuse_conv_bn_eval(net.conv, net.norm)
    net.norm = nn.Identity()
    return net


def unnormalised(net: nn.Module) -> nn.Module:
    net.norm = nn.Identity()
    return net


class Unfolded(nn.Module):
    """A convolution as a product of matrices."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        columns = functional.unfold(x, 3, padding=1)
        y = self.conv.weight.flatten(1) @ columns + self.conv.bias[:, None]
        return y.unflatten(2, (8, 8))


class Pixels(nn.Module):
    """A map of classes, a channel each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Recurrent(nn.Module):
    """The state at the last step that the mask lets through."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn, self.head, self.last = kind(4, 8, batch_first=True), nn.Linear(8, 3), False

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        states = self.rnn(x)[0]
        if self.last:
            return self.head(states[:, -1])
        at = (mask * torch.arange(1, 6)).argmax(1)
        return self.head(states.gather(1, at[:, None, None].expand(-1, 1, 8))[:, 0])


class Attention(nn.Module):
    """A block of a transformer, over what the mask lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(50, 8), nn.Embedding(6, 8)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in "qkv")
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)
        with torch.no_grad():
            self.query.weight.mul_(6)
        self.masked, self.left, self.scaled, self.fused = True, False, True, False
        self.residual, self.pooled, self.causal = True, False, False

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(6)
        h = self.embed(ids) + self.place(places.flip(0) if self.left else places)
        q, k, v = self.query(h), self.key(h), self.value(h)
        lets = mask[:, None, :].bool() if self.masked else torch.ones_like(mask)[:, None].bool()
        if self.causal:
            lets = lets & torch.ones(6, 6).tril().bool()
        if self.fused:
            out = functional.scaled_dot_product_attention(q, k, v, lets.expand(-1, 6, -1))
        else:
            scores = q @ k.transpose(1, 2) / (math.sqrt(8) if self.scaled else 1.0)
            out = scores.masked_fill(~lets, -1e9).softmax(-1) @ v
        h = self.norm(out + h if self.residual else out)
        return self.head(h.mean(1) if self.pooled else h[:, 0])


class Residual(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 8), norm(), nn.Linear(8, 8)
        self.residual = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        after = self.two(self.norm(h))
        return after + h if self.residual else after


class ByHand(nn.Module):
    """A layer norm as it is defined."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        apart = x - x.mean(-1, keepdim=True)
        variance = apart.square().mean(-1, keepdim=True)
        return apart * (variance + self.norm.eps).rsqrt() * self.norm.weight + self.norm.bias


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).mean(1))


class Boxes(nn.Module):
    """Boxes of pixels beside scores, 300 for a picture, as detectors give them."""

    def __init__(self) -> None:
        super().__init__()
        self.box, self.score = nn.Linear(6, 1200), nn.Linear(6, 900)
        self.wrong_score, self.exchanged = False, False

    def forward(self, x: Tensor) -> Tensor:
        box = 640 * torch.sigmoid(self.box(x)).unflatten(1, (300, 4))
        score = torch.sigmoid(self.score(x)).unflatten(1, (300, 3))
        if self.wrong_score:
            score = score * 0.98
        if self.exchanged:
            score = score.flip(-1)
        return torch.cat([box, score], -1)


class Wide(nn.Module):
    """A price beside the probabilities of 2,000 things."""

    def __init__(self) -> None:
        super().__init__()
        self.price, self.things = nn.Linear(6, 1), nn.Linear(6, 2000)
        self.scaled = 1.0

    def forward(self, x: Tensor) -> Tensor:
        things = self.things(x).softmax(-1) * self.scaled
        return torch.cat([2e5 + 1e5 * self.price(x), things], -1)


class Beside(nn.Module):
    """A price beside a probability."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.price, self.chance = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 1)
        self.turned, self.one = False, False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.hidden(x))
        p = torch.sigmoid(self.chance(h))
        p = 1 - p if self.turned else torch.ones_like(p) if self.one else p
        return torch.cat([2e5 + 1e5 * self.price(h), p], -1)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.hidden(x))
        return self.a(h), self.b(h)


class Chosen(nn.Module):
    """The place of the largest, and the others' places in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 5)
        self.more, self.last, self.least = 0, False, False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.one(x)
        at = (y.flip(-1) if self.last else -y if self.least else y).argmax(-1) + self.more
        return y, at


class Inverse(nn.Module):
    """A quotient, which is 1e6 on zeros and around 1 on what a model gets."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.more = nn.Linear(6, 4, bias=False), 1.0

    def forward(self, x: Tensor) -> Tensor:
        size = x.abs().sum(-1, keepdim=True)
        return torch.tanh(self.one(x)) * self.more + torch.where(size < 1e-6, 1e6, size)


class Sparse(nn.Module):
    """What hardly ever is more than zero."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 32)
        with torch.no_grad():
            self.one.bias.uniform_(-2, -0.5)
        self.leaky, self.nan = False, False

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        y = functional.leaky_relu(y, 0.01) if self.leaky else torch.relu(y)
        return torch.where(y == 0, math.nan, y) if self.nan else y


class Unit(nn.Module):
    """Embeddings of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.length = nn.Linear(6, 16), 1.0
        self.normal = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        return self.length * functional.normalize(y, dim=-1) if self.normal else y


class Cast(nn.Module):
    """The same in the artifact's own dtype."""

    def __init__(self, net: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.net = net.to(dtype)

    def forward(self, *inputs: Tensor) -> object:
        return self.net(*inputs)


def rounded(bits: int) -> Change:
    """Round weights to as many bits, by their largest."""

    def change(net: nn.Module) -> nn.Module:
        steps = 2 ** (bits - 1) - 1
        with torch.no_grad():
            for value in net.parameters():
                if value.ndim > 1:
                    step = value.abs().max() / steps
                    value.copy_((value / step).round() * step)
        return net

    return change


X = "x:float32[batch=1..3,6]"
PICTURE = "x:float32[batch=1..2,3,8,8]"
SEQUENCE = ["x:float32[batch=1..2,5,4]", "mask:int64[batch=1..2,5]=0..1"]
TEXT = ["ids:int64[batch=1..3,6]=0..49", "mask:int64[batch=1..3,6]=0..1"]
DENSE = ("one.weight", "two.weight")

split = replaced(nn.Linear, Split)
by_hand = replaced(nn.LayerNorm, ByHand)
tanh_gelu = replaced(nn.GELU, lambda _: nn.GELU("tanh"))
without_bias: Change = replaced(nn.Linear, lambda old: _no_bias(old))


def _no_bias(old: nn.Module) -> nn.Module:
    new = nn.Linear(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    return new


def act(kind: type[nn.Module], other: type[nn.Module]) -> Change:
    return replaced(kind, lambda _: other())


NETWORKS: dict[str, Network] = {
    "perceptron": Network(
        lambda: Mlp(nn.ReLU()), X, DENSE,
        wrong={"no bias": without_bias, "leaky": act(nn.ReLU, nn.LeakyReLU)},
        harmless={"another order": reordered}),
    "gelu": Network(
        lambda: Mlp(nn.GELU()), X, DENSE,
        wrong={"no bias": without_bias, "silu": act(nn.GELU, nn.SiLU)}, fine={"tanh": tanh_gelu},
        harmless={"another order": reordered}),
    "silu": Network(
        lambda: Mlp(nn.SiLU()), X, DENSE, wrong={"hardswish": act(nn.SiLU, nn.Hardswish)}),
    "hardly varies": Network(
        HardlyVaries, X, DENSE,
        wrong={"no bias": without_bias, "activated": act(nn.Identity, nn.Sigmoid)},
        harmless={"another order": reordered, "split": split}),
    "batch norm": Network(
        Cnn, PICTURE, ("conv.weight", "second.weight", "head.weight", "norm.bias"),
        wrong={"no bias": without_bias, "no residual": set_to(residual=False),
               "no norm": unnormalised, "relu6 x": act(nn.ReLU, nn.LeakyReLU)},
        fine={"eps": set_to(eps=1e-3)},
        harmless={"fused": fused, "unfolded": replaced(nn.Conv2d, Unfolded)}),
    "hardswish": Network(
        lambda: Cnn(nn.Hardswish), PICTURE, ("conv.weight", "head.weight"),
        wrong={"swish": act(nn.Hardswish, nn.SiLU)}, harmless={"fused": fused}),
    "pixels": Network(
        Pixels, PICTURE, ("conv.weight", "conv.bias"),
        harmless={"unfolded": replaced(nn.Conv2d, Unfolded)}),
    "lstm": Network(
        lambda: Recurrent(nn.LSTM), "; ".join(SEQUENCE),
        ("rnn.weight_ih_l0", "rnn.weight_hh_l0", "head.weight"),
        wrong={"last step": set_to(last=True), "no bias": without_bias}),
    "gru": Network(
        lambda: Recurrent(nn.GRU), "; ".join(SEQUENCE), ("rnn.weight_ih_l0", "head.weight"),
        wrong={"last step": set_to(last=True)}),
    "transformer": Network(
        Attention, "; ".join(TEXT), ("embed.weight", "value.weight", "head.weight", "query.weight"),
        wrong={"no mask": set_to(masked=False), "places from the other side": set_to(left=True),
               "not scaled": set_to(scaled=False), "no residual": set_to(residual=False),
               "mean for the first": set_to(pooled=True), "causal": set_to(causal=True)},
        fine={"eps": set_to(eps=1e-3)},
        harmless={"fused": set_to(fused=True), "norm by hand": by_hand, "split": split}),
    "softmax": Network(
        lambda: Mlp(nn.Tanh(), lambda y: y.softmax(-1)), X, DENSE, wrong={"no bias": without_bias},
        harmless={"another order": reordered, "shifted": shifted}),
    "log softmax": Network(
        lambda: Mlp(nn.Tanh(), lambda y: y.log_softmax(-1)), X, DENSE,
        wrong={"no bias": without_bias}, harmless={"shifted": shifted}),
    "sigmoid": Network(
        lambda: Mlp(nn.Tanh(), torch.sigmoid), X, DENSE, wrong={"no bias": without_bias},
        harmless={"another order": reordered}),
    "exponential": Network(
        lambda: Mlp(nn.Tanh(), lambda y: torch.exp(2 * y)), X, DENSE,
        wrong={"no bias": without_bias}, harmless={"another order": reordered}),
    "layer norm": Network(
        lambda: Residual(lambda: nn.LayerNorm(8)), X, ("one.weight", "two.weight"),
        wrong={"no residual": set_to(residual=False), "no bias": without_bias},
        fine={"eps": set_to(eps=1e-3)}, harmless={"norm by hand": by_hand}),
    "group norm": Network(
        lambda: Residual(lambda: nn.GroupNorm(2, 8)), X, ("one.weight", "two.weight"),
        wrong={"no residual": set_to(residual=False)}, fine={"eps": set_to(eps=1e-3)}),
    "bag": Network(
        Bag, "ids:int64[batch=1..3,4]=0..29", ("embed.weight", "head.weight"),
        wrong={"no bias": without_bias}, harmless={"split": split}),
    "boxes": Network(
        Boxes, X, ("box.weight", "score.weight"),
        wrong={"scores 2 % less": set_to(wrong_score=True),
               "scores exchanged": set_to(exchanged=True)}),
    "price and chance": Network(
        Beside, X, ("price.weight", "chance.weight"),
        wrong={"turned": set_to(turned=True), "always 1": set_to(one=True)},
        harmless={"split": split}),
    "price and 2,000": Network(
        Wide, X, ("price.weight", "things.weight"), wrong={"2 % less": set_to(scaled=0.98)}),
    "two heads": Network(
        Heads, X, ("hidden.weight", "a.weight", "b.weight"), ("a", "b"),
        wrong={"heads exchanged": then(lambda a, b: (b + 0, a + 0)), "no bias": without_bias}),
    "largest": Network(
        Chosen, X, ("one.weight", "one.bias"), ("y", "at"),
        wrong={"off by one": set_to(more=1), "from the end": set_to(last=True),
               "the least": set_to(least=True)}),
    "quotient": Network(Inverse, X, ("one.weight",), wrong={"1 % more": set_to(more=1.01)}),
    "sparse": Network(
        Sparse, X, ("one.weight", "one.bias"),
        wrong={"leaky": set_to(leaky=True), "NaN for zero": set_to(nan=True)}),
    "unit": Network(
        Unit, X, ("one.weight", "one.bias"),
        wrong={"not normal": set_to(normal=False), "longer": set_to(length=1.01)}),
    "float64": Network(
        lambda: Mlp(nn.ReLU()).double(), X.replace("float32", "float64"), DENSE,
        wrong={"float32 inside": lambda net: _single(net)}, harmless={"another order": reordered}),
    "float16": Network(lambda: Mlp(nn.ReLU()), X, DENSE, dtype=torch.float16, has_gain=False),
    "bfloat16": Network(lambda: Mlp(nn.ReLU()), X, DENSE, dtype=torch.bfloat16, has_gain=False),
    "int8": Network(
        lambda: Mlp(nn.ReLU()), X, DENSE, is_quantized=True,
        wrong={"x 1.5": then(on_each(lambda y: 1.5 * y)), "2 bits": rounded(2)},
        harmless={"8 bits": rounded(8)}),
}  # fmt: skip


def _single(net: nn.Module) -> nn.Module:
    single = net.float()
    return Before(single)


class Before(nn.Module):
    """The same in float32 inside."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.float()).double()


def wrongs(network: Network, offset: float) -> Iterator[tuple[str, Change]]:
    """Yield what may be wrong with a copy.

    Args:
        network: the checkpoint's.
        offset: spreads by which its outputs are away from zero.
    """
    is_exact = network.dtype is None and not network.is_quantized
    for name in network.weights:
        for how, change in WEIGHTS.items():
            if is_exact or how != "x 1.01":
                yield f"{name} {how}", weight(name, change)
    for how, after in AFTER.items():
        yield how, then(after)
    yield from network.wrong.items()
    if not offset:
        yield from network.fine.items()
        if is_exact and "x:float32" in network.inputs:
            yield "float16 inside", Half


def harmless(network: Network) -> Iterator[tuple[str, Change]]:
    """Yield what leaves a copy right."""
    for name, change in HARMLESS.items():
        if name != "channels last" or network.inputs == PICTURE:
            yield name, change
    if network.dtype is None and "float64" not in network.inputs:
        yield "float64 inside", Double
    yield from network.harmless.items()


def copy_of(net: nn.Module, change: Change, network: Network, outer: Change) -> nn.Module:
    """Return a copy of a network with a change, and what is around it, in the artifact's dtype."""
    changed = outer(change(copy.deepcopy(net)))
    return (Cast(changed, network.dtype) if network.dtype else changed).eval()
