"""Networks as people write them, of which a command is proposed: a model file for `--model`."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class NumClasses(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.fc = nn.Linear(8, num_classes)

    def forward(self, image: Tensor) -> Any:
        return self.fc(self.body(image).flatten(1))


class ChannelsAndClasses(nn.Module):
    def __init__(self, in_channels: int, n_classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 6, 3)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(6, n_classes)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.drop(F.relu(self.conv(x)).mean((2, 3))))


class WidthAndOut(nn.Module):
    def __init__(self, in_features: int, hidden: int, out_features: int) -> None:
        super().__init__()
        self.first = nn.Linear(in_features, hidden)
        self.last = nn.Linear(hidden, out_features)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.first(x)))


class VocabAndDim(nn.Module):
    def __init__(self, vocab_size: int, embed_dim: int, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embed_dim)
        self.fc = nn.Linear(embed_dim, num_classes)

    def forward(self, tokens: Tensor) -> Any:
        return self.fc(self.embedding(tokens).mean(1))


class ListIn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(6, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, parts: list[Tensor]) -> Any:
        return self.out(F.relu(self.a(parts[0]) + self.b(parts[1])))


class DictIn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Conv2d(3, 4, 3)
        self.read = nn.Linear(5, 4)

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.see(batch["image"]).mean((2, 3)) + self.read(batch["facts"])


class TextDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, batch: dict[str, Tensor]) -> Any:
        mask = batch["attention_mask"].unsqueeze(-1).float()
        return self.out((self.table(batch["input_ids"]) * mask).sum(1) / mask.sum(1).clamp(min=1))


class TextCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(80, 8)
        self.convs = nn.ModuleList(nn.Conv1d(8, 4, size) for size in (2, 3, 4))
        self.out = nn.Linear(12, 2)

    def forward(self, ids: Tensor) -> Any:
        x = self.table(ids).transpose(1, 2)
        return self.out(torch.cat([F.relu(conv(x)).amax(2) for conv in self.convs], 1))


class Signal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 5, stride=2)
        self.out = nn.Linear(4 * 62, 3)

    def forward(self, signal: Tensor) -> Any:
        return self.out(F.relu(self.conv(signal)).flatten(1))


class Waveform(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv1d(1, 8, 80, stride=16), nn.ReLU(), nn.Conv1d(8, 8, 9, stride=4), nn.ReLU()
        )
        self.out = nn.Linear(8, 5)

    def forward(self, waveform: Tensor) -> Any:
        return self.out(self.convs(waveform.unsqueeze(1)).mean(2))


class Spectrogram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.rnn = nn.GRU(4 * 40, 8, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, mel: Tensor) -> Any:
        x = F.relu(self.conv(mel)).permute(0, 3, 1, 2).flatten(2)
        return self.out(self.rnn(x)[0].mean(1))


class Flat28(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.out = nn.Linear(4 * 13 * 13, 10)

    def forward(self, x: Tensor) -> Any:
        return self.out(F.max_pool2d(F.relu(self.conv(x)), 2).view(-1, 4 * 13 * 13))


class FlatLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(784, 16)
        self.decode = nn.Linear(16, 784)

    def forward(self, x: Tensor) -> Any:
        return torch.sigmoid(self.decode(F.relu(self.encode(x.view(x.size(0), -1)))))


class Conv3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 4, 3, padding=1)
        self.out = nn.Linear(4, 2)

    def forward(self, volume: Tensor) -> Any:
        return self.out(F.relu(self.conv(volume)).mean((2, 3, 4)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, padding=1)
        self.mid = nn.Conv2d(4, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Any:
        skip = F.relu(self.down(x))
        deep = self.up(F.relu(self.mid(F.max_pool2d(skip, 2))))
        return self.out(torch.cat([skip, deep], 1))


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 8, stride=8)
        self.cls = nn.Parameter(torch.randn(1, 1, 16))
        self.places = nn.Parameter(torch.randn(1, 17, 16))
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1, enable_nested_tensor=False
        )
        self.head = nn.Linear(16, 5)

    def forward(self, pixels: Tensor) -> Any:
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.blocks(x)[:, 0])


class TextTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 16, padding_idx=0)
        self.places = nn.Embedding(64, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.words(input_ids) + self.places(places)
        hidden = self.blocks(hidden)
        if attention_mask is not None:
            hidden = hidden * attention_mask.unsqueeze(-1)
        return self.head(hidden.mean(1))


class MaskNeeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        x = self.words(ids)
        y, _ = self.attend(x, x, x, need_weights=False)
        return self.head((y * mask.unsqueeze(-1).to(y.dtype)).sum(1))


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(90, 16)
        self.places = nn.Parameter(torch.randn(32, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 90)

    def forward(self, idx: Tensor) -> Any:
        length = idx.shape[1]
        x = self.words(idx) + self.places[:length]
        mask = torch.full((length, length), -math.inf, device=idx.device).triu(1)
        return self.head(self.layer(x, src_mask=mask))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, series: Tensor) -> Any:
        return self.out(self.lstm(series)[0][:, -1])


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.gru(x)[0])


class Gnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(7, 8)
        self.b = nn.Linear(8, 3)

    def _spread(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index[0], edge_index[1]
        return x.index_add(0, target, x[source])

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        x = F.relu(self._spread(self.a(x), edge_index))
        return self.b(self._spread(x, edge_index))


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(40, 8)
        self.items = nn.Embedding(70, 8)

    def forward(self, user_ids: Tensor, item_ids: Tensor) -> Any:
        return (self.users(user_ids) * self.items(item_ids)).sum(-1)


class WideAndDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(40, 8)
        self.items = nn.Embedding(70, 8)
        self.deep = nn.Sequential(nn.Linear(8 + 8 + 5, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user: Tensor, item: Tensor, facts: Tensor) -> Any:
        return self.deep(torch.cat([self.users(user), self.items(item), facts], -1)).squeeze(-1)


class Categories(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 4) for size in (5, 9, 3))
        self.out = nn.Sequential(nn.Linear(12 + 6, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, categories: Tensor, numbers: Tensor) -> Any:
        parts = [table(categories[:, at]) for at, table in enumerate(self.tables)]
        return self.out(torch.cat([*parts, numbers], 1))


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2))

    def forward(self, first: Tensor, second: Tensor) -> Any:
        return F.cosine_similarity(self.see(first).flatten(1), self.see(second).flatten(1))


class ImageAndText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.words = nn.Embedding(60, 4)
        self.out = nn.Linear(8, 2)

    def forward(self, image: Tensor, tokens: Tensor) -> Any:
        return self.out(torch.cat([self.see(image).flatten(1), self.words(tokens).mean(1)], 1))


class Series(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(5, 16)
        self.places = nn.Parameter(torch.randn(1, 24, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.out = nn.Linear(24 * 16, 6)

    def forward(self, past: Tensor) -> Any:
        return self.out(self.layer(self.into(past) + self.places).flatten(1))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(9)
        self.out = nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.norm(x))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        return self.out((x + self.attend(y, y, y)[0]).mean(1))


class Noised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(100, 8)
        self.into = nn.Conv2d(3, 8, 3, padding=1)
        self.out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Any:
        return self.out(F.silu(self.into(x) + self.time(t)[:, :, None, None]))


def half(net: nn.Module) -> Any:
    """Save as many serve large ones: every weight float16."""
    return net.half().state_dict()


def double(net: nn.Module) -> Any:
    """Save what was trained in float64."""
    return net.double().state_dict()


def loop(net: nn.Module) -> Any:
    """Save as a training loop does, with the names of its classes."""
    return {"epoch": 3, "model_state_dict": net.state_dict(), "classes": ["cat", "dog", "owl"]}


def plain(net: nn.Module) -> Any:
    """Save the weights alone."""
    return net.state_dict()


CASES: Mapping[str, tuple[type[nn.Module], tuple[Any, ...], Callable[[nn.Module], Any]]] = {
    **{
        kind.__name__: (kind, (), plain)
        for kind in (
            *(Mlp, ListIn, DictIn, TextDict, TextCnn, Signal, Waveform, Spectrogram, Flat28),
            *(FlatLinear, Conv3d, UNet, Patches, TextTransformer, MaskNeeded, Causal, Lstm, Gru),
            *(Gnn, Factors, WideAndDeep, Categories, Siamese, ImageAndText, Series, Normed),
            *(Attends, Noised),
        )
    },
    "classes": (NumClasses, (7,), plain),
    "channels and classes": (ChannelsAndClasses, (4, 6), plain),
    "widths": (WidthAndOut, (9, 20, 4), plain),
    "words": (VocabAndDim, (77, 12, 5), plain),
    "half": (Mlp, (), half),
    "half of pictures": (Flat28, (), half),
    "double": (Lstm, (), double),
    "a loop": (NumClasses, (3,), loop),
}
