"""Networks that the coverage of error bars is measured on: half of them outside its design.

Each is trained for a second or two on tables and scans that scikit-learn ships, or has random
weights where it says so. `NETWORKS` has their names; `build` makes one.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Explained:
    """A network and the rows that are explained, from the baseline zero."""

    model: nn.Module
    """float32 rows (N, *S) to outputs (N, K)."""
    inputs: Tensor
    """(N, *S) float32."""
    is_classifier: bool = True
    """The largest output is explained, else the first."""

    @property
    def targets(self) -> Tensor:
        """(N,) int64: which output of each row."""
        with torch.no_grad():
            outputs = self.model(self.inputs)
        return outputs.argmax(1) if self.is_classifier else torch.zeros(len(outputs)).long()


@cache
def table(name: str) -> tuple[Tensor, Tensor]:
    """Return standardised rows and their targets: classes, or a standardised number."""
    from sklearn import datasets

    rows, targets = getattr(datasets, f"load_{name}")(return_X_y=True)
    x = torch.tensor(rows, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    if name == "diabetes":
        y = torch.tensor(targets, dtype=torch.float32)
        return x, ((y - y.mean()) / y.std())[:, None]
    return x, torch.tensor(targets)


@cache
def scans() -> tuple[Tensor, Tensor]:
    """Return scans of digits (N, 1, 8, 8) from 0 to 1, and their classes."""
    from sklearn.datasets import load_digits

    rows, targets = load_digits(return_X_y=True)
    return torch.tensor(rows, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(targets)


def fit(net: nn.Module, x: Tensor, y: Tensor, steps: int = 200, rate: float = 0.01) -> nn.Module:
    """Train a network on all rows, 256 at a time."""
    loss = functional.mse_loss if y.is_floating_point() else functional.cross_entropy
    net.train()
    optimizer = torch.optim.Adam(net.parameters(), rate)
    for _ in range(steps):
        rows = torch.randint(len(x), (min(256, len(x)),))
        optimizer.zero_grad()
        torch.autograd.backward(loss(net(x[rows]), y[rows]))
        optimizer.step()
    return net.eval().requires_grad_(False)


class Lambda(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Tensor], **tensors: Tensor | nn.Module) -> None:
        super().__init__()
        self.function = function
        self.names = list(tensors)
        for name, each in tensors.items():
            if isinstance(each, nn.Module):
                self.add_module(name, each)
            else:
                self.register_parameter(name, nn.Parameter(each))

    def forward(self, x: Tensor) -> Tensor:
        """(N, …) to what the function makes of it."""
        return self.function(x, *(getattr(self, name) for name in self.names))


def mlp(*sizes: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers with a function between each two."""
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(sizes):
        layers += [nn.Linear(inside, outside), act()]
    return nn.Sequential(*layers[:-1])


def on_table(name: str, make: Callable[[int, int], nn.Module], count: int = 40) -> Explained:
    """Train on a table what `make` makes of its numbers of columns and outputs."""
    x, y = table(name)
    is_classifier = not y.is_floating_point()
    outputs = int(y.max()) + 1 if is_classifier else y.shape[1]
    rows = torch.randperm(len(x))[:count]
    return Explained(fit(make(x.shape[1], outputs), x, y), x[rows], is_classifier)


def on_scans(net: nn.Module, count: int = 20, flat: bool = False, steps: int = 200) -> Explained:
    """Train on scans of digits."""
    x, y = scans()
    x = x.flatten(1) if flat else x
    return Explained(fit(net, x, y, steps, 0.005), x[torch.randperm(len(x))[:count]])


def random(net: nn.Module, inputs: Tensor, gain: float = 1.0) -> Explained:
    """Take a network with random weights, made larger by a factor."""
    with torch.no_grad():
        for each in net.parameters():
            each.mul_(gain)
    return Explained(net.eval().requires_grad_(False), inputs, False)


def relu(name: str, hidden: int) -> Explained:
    """Return the smallest network that people serve."""
    return on_table(name, lambda ins, outs: mlp(ins, hidden, outs))


def dead_relu() -> Explained:
    """Return a network whose ReLUs are mostly off."""
    net = mlp(12, 32, 32, 4)
    with torch.no_grad():
        for at in (0, 2):
            cast("nn.Linear", net[at]).bias.sub_(1.2)
    return random(net, 2 * torch.randn(60, 12), 2.0)


def gain() -> Explained:
    """Return a network with outputs of 1e6 times a usual one's."""
    x, y = table("breast_cancer")
    net = fit(mlp(30, 32, 2), x, y)
    return Explained(nn.Sequential(net, Lambda(lambda z: 1e6 * z)), x[:40])


class ViT(nn.Module):
    """Patches of 2 by 2 through an encoder."""

    def __init__(self, width: int = 24, act: str = "gelu") -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, 2, 2)
        self.places = nn.Parameter(0.1 * torch.randn(1, 16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 48, 0.0, act, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 8, 8) to (N, 10)."""
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.places
        return cast("Tensor", self.head(self.encoder(tokens).mean(1)))


class Recurrent(nn.Module):
    """The rows of a scan, one after the other."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cells = kind(8, 24, batch_first=True)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 8, 8) to (N, 10)."""
        # In training mode, as other kernels have no gradient.
        return cast("Tensor", self.head(self.cells(x[:, 0])[0][:, -1]))


class TextFromEmbeddings(nn.Module):
    """An encoder of ReLUs over the vectors of 12 tokens; random weights."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, "relu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.places = nn.Parameter(torch.randn(12, 32))
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 12, 32) to (N, 2)."""
        return cast("Tensor", self.head(self.encoder(x + self.places)[:, 0]))


class MaskedAttention(nn.Module):
    """One query over eight tokens, of which those that are 0 are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(8, 16), nn.Linear(8, 16)
        self.query = nn.Parameter(torch.randn(16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 8, 8) to (N, 10)."""
        x = x[:, 0]
        scores = self.key(x) @ self.query
        scores = scores.masked_fill(x.detach().abs().sum(2) == 0, -1e4)
        return cast("Tensor", self.head((scores.softmax(1)[:, None] @ self.value(x))[:, 0].tanh()))


class Residual(nn.Module):
    """ReLU blocks beside shortcuts."""

    def __init__(self, ins: int, outs: int, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(ins, width)
        self.blocks = nn.ModuleList(mlp(width, width, width) for _ in range(4))
        self.head = nn.Linear(width, outs)

    def forward(self, x: Tensor) -> Tensor:
        """(N, ins) to (N, outs)."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x.relu())
        return cast("Tensor", self.head(x))


class UNet(nn.Module):
    """A picture to a picture of the same size, one level deep; the number is one pixel's."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 16, 16) to (N, 512)."""
        wide = self.down(x).relu()
        deep = self.deep(functional.max_pool2d(wide, 2)).relu()
        return cast("Tensor", self.last(torch.cat([wide, self.up(deep)], 1)).flatten(1))


def unet() -> Explained:
    """Train it to find the bright places of noisy scans; the centre's number is explained."""
    x, _ = scans()
    x = functional.interpolate(x, scale_factor=2) + 0.1 * torch.randn(len(x), 1, 16, 16)
    bright = (functional.avg_pool2d(x, 3, 1, 1) > 0.5).float()
    net = fit(UNet(), x[:600], torch.cat([1 - bright, bright], 1)[:600].flatten(1), 80)
    centre = Lambda(lambda z: z[:, 256 + 8 * 16 + 8, None])
    return Explained(nn.Sequential(net, centre), x[600:624], False)


class GCN(nn.Module):
    """Ten nodes of four features and their adjacency, both explained, as one row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 140) to (N, 2)."""
        nodes, edges = x[:, :40].view(-1, 10, 4), x[:, 40:].view(-1, 10, 10)
        edges = edges + torch.eye(10).to(x)
        edges = edges / edges.sum(2, keepdim=True)
        inner = (edges @ self.first(nodes)).relu()
        return cast("Tensor", (edges @ self.second(inner)).mean(1))


def gcn() -> Explained:
    """Take graphs at random."""
    nodes, edges = torch.randn(40, 40), (torch.rand(40, 100) < 0.3).float()
    return random(GCN(), torch.cat([nodes, edges], 1), 2.0)


def forest(steepness: float) -> Explained:
    """Return trees of four levels with soft splits, whose leaves were trained."""

    def make(ins: int, outs: int) -> nn.Module:
        features = torch.randint(ins, (12, 4))
        thresholds = nn.Parameter(0.7 * torch.randn(12, 4), requires_grad=False)
        leaves = nn.Parameter(torch.randn(12, 16, outs) / 4)
        bits = torch.tensor(
            [[leaf >> level & 1 for level in range(4)] for leaf in range(16)]
        ).bool()

        def fall(x: Tensor, thresholds: Tensor, leaves: Tensor) -> Tensor:
            goes = (steepness * (x[:, features] - thresholds.detach())).sigmoid()
            share = torch.where(bits, goes[:, :, None], 1 - goes[:, :, None]).prod(3)
            return torch.einsum("ntl,tlo->no", share, leaves)

        return Lambda(fall, thresholds=thresholds, leaves=leaves)

    return on_table("diabetes", make)


class Siren(nn.Module):
    """Sines of 20 times a linear map (Sitzmann et al. 2020)."""

    def __init__(self, ins: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(ins, 32), nn.Linear(32, 32)])
        with torch.no_grad():
            for at, layer in enumerate(self.layers):
                bound = 1 / ins if at == 0 else math.sqrt(6 / 32) / 20
                cast("nn.Linear", layer).weight.uniform_(-bound, bound)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, ins) to (N, 1)."""
        for layer in self.layers:
            x = (20 * layer(x)).sin()
        return cast("Tensor", self.head(x))


def rbf(ins: int, outs: int) -> nn.Module:
    """Return bells around rows of the table."""
    centres = table("wine")[0][:24].clone()
    return Lambda(
        lambda x, c, w: (-(x[:, None] - c).square().sum(2) / 8).exp() @ w,
        centres=centres, weights=torch.randn(24, outs),
    )  # fmt: skip


def siamese() -> Explained:
    """Return the uplift of a treatment: the same network asked twice."""
    net = mlp(11, 24, 24, 1, act=nn.Tanh)
    x, y = table("diabetes")
    treated = (torch.rand(len(x), 1) < 0.5).float()
    fit(net, torch.cat([x, treated], 1), y * (1 + treated))
    both = Lambda(
        lambda x, n: (
            n(functional.pad(x, (0, 1), value=1.0)) - n(functional.pad(x, (0, 1), value=0.0))
        ),
        net=net,
    )
    return Explained(both, x[:40], False)


class Experts(nn.Module):
    """A mixture of experts, of which the two best are asked, or all."""

    def __init__(self, ins: int, outs: int, most: int) -> None:
        super().__init__()
        self.gate = nn.Linear(ins, 6)
        self.experts = nn.ModuleList(mlp(ins, 12, outs) for _ in range(6))
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        """(N, ins) to (N, outs)."""
        scores = self.gate(x)
        least = scores.topk(self.most, 1).values[:, -1:]
        shares = scores.masked_fill(scores < least, -torch.inf).softmax(1)
        found = torch.stack([each(x) for each in self.experts], 2)
        return cast("Tensor", (found * shares[:, None]).sum(2))


class Splines(nn.Module):
    """A layer of KAN: a piecewise linear function of each feature by itself, and sums of these."""

    def __init__(self, ins: int, outs: int, knots: int = 9) -> None:
        super().__init__()
        self.knots = nn.Parameter(torch.linspace(-3, 3, knots), requires_grad=False)
        self.heights = nn.Parameter(torch.randn(ins, knots, outs) / ins)

    def forward(self, x: Tensor) -> Tensor:
        """(N, ins) to (N, outs)."""
        hats = (1 - (x[:, :, None] - self.knots).abs() / 0.75).relu()
        return torch.einsum("nik,iko->no", hats, self.heights)


def process(power: int) -> Explained:
    """Return the mean of a Gaussian process; a Matérn kernel has a kink in its slope."""
    x, y = table("diabetes")
    centres = x[:120]

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        apart = ((a[:, None] - b).square().sum(2) + 1e-12).sqrt() / 3
        return (-apart.square() / 2).exp() if power == 2 else (1 + apart) * (-apart).exp()

    weights = torch.linalg.solve(kernel(centres, centres) + 0.3 * torch.eye(120), y[:120])
    net = Lambda(lambda x, c, w: kernel(x, c) @ w, centres=centres, weights=weights)
    return random(net, x[150:190])


class Series(nn.Module):
    """Convolutions over time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(8, 8, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4),
        )  # fmt: skip
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 64) to (N, 3)."""
        return cast("Tensor", self.head(self.layers(x[:, None]).flatten(1)))


def series() -> Explained:
    """Train it to tell waves, saws and squares apart."""
    time = torch.linspace(0, 1, 64) * 2 * torch.pi * torch.randint(1, 5, (900, 1))
    time = time + 6 * torch.rand(900, 1)
    y = torch.randint(3, (900,))
    shapes = torch.stack([time.sin(), (time / torch.pi) % 2 - 1, time.sin().sign()])
    x = shapes[y, torch.arange(900)] + 0.2 * torch.randn(900, 64)
    return Explained(fit(Series(), x, y), x[:30])


def convolutional(act: Callable[[], nn.Module], norm: bool = False, pool: bool = True) -> nn.Module:
    """Return a small network of convolutions for scans."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8) if norm else nn.Identity(), act(),
        nn.MaxPool2d(2) if pool else nn.AvgPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16) if norm else nn.Identity(), act(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def lenet() -> nn.Module:
    """Return the network of the digits example, untrained."""
    from examples.digits.net import DigitsNet

    return DigitsNet()


def roots(ins: int, outs: int) -> nn.Module:
    """Return sums of roots of absolute values."""
    return Lambda(
        lambda x, a, b: (x @ a).abs().add(1e-3).sqrt() @ b + (x @ a[:, :outs]).abs(),
        first=torch.randn(ins, 16) / 3, second=torch.randn(16, outs) / 4,
    )  # fmt: skip


def norms(ins: int, outs: int) -> nn.Module:
    """Return two layers with layer norm between them."""
    return nn.Sequential(
        nn.Linear(ins, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32),
        nn.GELU(), nn.Linear(32, outs),
    )  # fmt: skip


def cosine(ins: int, outs: int) -> nn.Module:
    """Return the cosines to what stands for each class."""
    return Lambda(
        lambda x, net, p: 8 * functional.cosine_similarity(net(x)[:, None], p, dim=2),
        net=mlp(ins, 24, 12), prototypes=torch.randn(outs, 12),
    )  # fmt: skip


_MAKERS: Mapping[str, Callable[[], Explained]] = {
    # Named in the review of 779e163.
    **{
        f"ReLU {hidden}, {name}": partial(relu, name, hidden)
        for hidden in (4, 8, 16, 32)
        for name in ("breast_cancer", "diabetes", "wine")
    },
    "mostly dead ReLU 12-32-32-4": dead_relu,
    "ReLU 30-64-64-2": lambda: on_table("breast_cancer", lambda i, o: mlp(i, 64, 64, o)),
    "gain of 1e6": gain,
    "hardtanh, hardsigmoid": lambda: on_scans(
        nn.Sequential(nn.Linear(64, 32), nn.Hardtanh(), nn.Linear(32, 32), nn.Hardsigmoid(),
                      nn.Linear(32, 10)), 40, flat=True),
    "ViT": lambda: on_scans(ViT(), 12, steps=60),
    "LSTM": lambda: on_scans(Recurrent(nn.LSTM), 20),
    "text transformer": lambda: random(TextFromEmbeddings(), torch.randn(16, 12, 32), 1.3),
    "tanh": lambda: on_table("breast_cancer", lambda i, o: mlp(i, 24, 24, o, act=nn.Tanh)),
    "SiLU": lambda: on_table("diabetes", lambda i, o: mlp(i, 32, 32, o, act=nn.SiLU)),
    "RBF": lambda: on_table("wine", rbf),
    "siamese uplift": siamese,
    "SIREN": lambda: on_table("diabetes", lambda i, o: Siren(i)),
    "soft forest, k = 40": lambda: forest(40.0),
    "soft forest, k = 400": lambda: forest(400.0),
    "GCN": gcn,
    "U-Net, a pixel": unet,
    # Not named there.
    "mixture of experts": lambda: on_table("wine", lambda i, o: Experts(i, o, 6)),
    "experts, the best two": lambda: on_table("breast_cancer", lambda i, o: Experts(i, o, 2)),
    "GLU": lambda: on_table("diabetes", lambda i, o: nn.Sequential(
        nn.Linear(i, 48), nn.GLU(), nn.Linear(24, 48), nn.GLU(), nn.Linear(24, o))),
    "GELU": lambda: on_table("wine", lambda i, o: mlp(i, 32, 32, o, act=nn.GELU)),
    "CNN, max-pooling": lambda: on_scans(convolutional(nn.ReLU)),
    "CNN, batch norm": lambda: on_scans(convolutional(nn.ReLU, norm=True, pool=False)),
    "CNN of the digits example": lambda: on_scans(lenet(), 16, steps=60),
    "CNN, hard swish": lambda: on_scans(convolutional(nn.Hardswish, norm=True)),
    "leaky ReLU": lambda: on_table("diabetes", lambda i, o: mlp(
        i, 24, 24, o, act=partial(nn.LeakyReLU, 0.1))),
    "PReLU 6, wine": lambda: on_table("wine", lambda i, o: mlp(i, 6, o, act=nn.PReLU)),
    "ELU": lambda: on_table("breast_cancer", lambda i, o: mlp(i, 24, 24, o, act=nn.ELU)),
    "softplus": lambda: on_table("diabetes", lambda i, o: mlp(i, 24, 24, o, act=nn.Softplus)),
    "masked attention": lambda: on_scans(MaskedAttention()),
    "residual ReLU": lambda: on_table("breast_cancer", Residual),
    "GRU": lambda: on_scans(Recurrent(nn.GRU)),
    "tanh RNN": lambda: on_scans(Recurrent(nn.RNN)),
    "ViT, ReLU": lambda: on_scans(ViT(16, "relu"), 12, steps=60),
    "1-d convolutions": series,
    "linear splines (KAN)": lambda: on_table("wine", Splines),
    "polynomial": lambda: on_table("diabetes", lambda i, o: Lambda(
        lambda x, a, b: (x @ a).pow(3) @ b + (x @ a).square() @ b / 2,
        a=torch.randn(i, 8) / 5, b=torch.randn(8, o) / 5)),
    "roots of |x|": lambda: on_table("wine", roots),
    "quantiles": lambda: on_table("diabetes", lambda i, o: nn.Sequential(
        mlp(i, 12, 3), Lambda(
            lambda z: z[:, :1] + functional.softplus(z[:, 1:2]) + z[:, 2:].relu()))),
    "Gaussian process, RBF": lambda: process(2),
    "Gaussian process, Matérn": lambda: process(1),
    "cosine similarity": lambda: on_table("wine", cosine),
    "layer norm": lambda: on_table("breast_cancer", norms),
    "product of experts": lambda: on_table("wine", lambda i, o: Lambda(
        lambda x, a, b: functional.logsigmoid(a(x)) + functional.logsigmoid(b(x)),
        a=mlp(i, 12, o), b=mlp(i, 12, o))),
    "steep sigmoid gates": lambda: on_table("diabetes", lambda i, o: Lambda(
        lambda x, g, v: ((30 * g(x)).sigmoid() * v(x)).sum(1, keepdim=True),
        gates=nn.Linear(i, 8), values=nn.Linear(i, 8))),
    "steep hinges": lambda: on_table("diabetes", lambda i, o: Lambda(
        lambda x, a, b: (20 * (x @ a - 0.3)).clamp(0, 1) @ b,
        a=torch.randn(i, 10) / 4, b=torch.randn(10, o) / 4)),
    "maxout": lambda: on_table("wine", lambda i, o: Lambda(
        lambda x, a, b: b(a(x).view(-1, 12, 4).amax(2)), a=nn.Linear(i, 48), b=nn.Linear(12, o))),
    "deep set with max": lambda: on_scans(Lambda(
        lambda x, a, b: b(a(x[:, 0]).amax(1)), a=mlp(8, 24, 24), b=mlp(24, 24, 10))),
    "min of max (lattice)": lambda: on_table("breast_cancer", lambda i, o: Lambda(
        lambda x, a: a(x).view(-1, o, 4, 4).amax(3).amin(2), a=nn.Linear(i, 16 * o))),
    "Fourier features": lambda: on_table("diabetes", lambda i, o: Lambda(
        lambda x, a, b: b(torch.cat([(x @ a).sin(), (x @ a).cos()], 1)),
        a=torch.randn(i, 24), b=nn.Linear(48, o))),
    "probability of ReLU 16": lambda: on_table("wine", lambda i, o: nn.Sequential(
        mlp(i, 16, o), nn.Softmax(1))),
}  # fmt: skip

NETWORKS = tuple(_MAKERS)
NAMED = NETWORKS[: NETWORKS.index("mixture of experts")]
"""Those of the review whose findings the bar answers."""
DESIGN = NETWORKS[::2]
"""Those that it was designed on; the other half was looked at when it was done."""


def build(name: str) -> Explained:
    """Build one, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(name) + 31 * NETWORKS.index(name))
        return _MAKERS[name]()
