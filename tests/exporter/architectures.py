"""Five models as people bring them, and how each is exported; also a model file for `--model`."""

import importlib
import runpy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

NETWORKS = Path(__file__).parent.parent / "networks.py"


class Cnn(nn.Module):
    """Convolutions with batch-norm and dropout, for 28x28 pictures."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
        )
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(512, classes)

    def forward(self, image: Tensor) -> Tensor:
        """(N, 1, 28, 28) to (N, classes)."""
        return cast("Tensor", self.head(self.drop(self.features(image).flatten(1))))


class LstmClassifier(nn.Module):
    """Words to an embedding, two directions, two layers, the mean over the length."""

    def __init__(self, words: int = 500, width: int = 32, classes: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, length) to (N, classes)."""
        states, _ = self.lstm(self.table(tokens))
        return cast("Tensor", self.head(states.mean(1)))


class TwoInTwoOut(nn.Module):
    """A picture and numbers about it, to classes and a score."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Conv2d(3, 8, 3)
        self.read = nn.Linear(5, 8)
        self.classes = nn.Linear(8, 7)
        self.score = nn.Linear(8, 1)

    def forward(self, picture: Tensor, facts: Tensor) -> tuple[Tensor, Tensor]:
        """(N, 3, H, W) and (N, 5) to (N, 7) and (N,)."""
        seen = torch.relu(self.see(picture)).mean((2, 3))
        both = seen + torch.tanh(self.read(facts))
        return self.classes(both), self.score(both).squeeze(1)


def bert(layers: int = 12, width: int = 768, words: int = 30522) -> nn.Module:
    """Build BERT from a configuration, with random weights; 12 layers of 768 are its base size."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.BertConfig(
        vocab_size=words,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        intermediate_size=4 * width,
        num_labels=3,
    )
    return cast("nn.Module", transformers.BertForSequenceClassification(config))


@dataclass(frozen=True)
class Architecture:
    """One model and the arguments of its export."""

    model: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    args: Mapping[str, Any] = field(default_factory=dict)


_WORDS = ("input_ids:int64[batch,length=2..24]", "attention_mask:int64[batch,length]")

SMALL = {
    "cnn": Architecture(f"{__file__}:Cnn", ("image:float32[batch,1,28,28]",), ("logits",)),
    "lstm": Architecture(
        f"{__file__}:LstmClassifier", ("tokens:int64[batch,length=1..40]",), ("logits",)
    ),
    "two": Architecture(
        f"{__file__}:TwoInTwoOut",
        ("picture:float32[batch,3,height=8..16,width=8..16]", "facts:float32[batch,5]"),
        ("classes", "score"),
    ),
    "small bert": Architecture(
        f"{__file__}:bert", _WORDS, ("logits",), {"layers": 2, "width": 64, "words": 1000}
    ),
}
LARGE = {
    "resnet50": Architecture(
        f"{NETWORKS}:ResNet50", ("image:float32[batch,3,224,224]",), ("logits",)
    ),
    "bert": Architecture(f"{__file__}:bert", _WORDS, ("logits",)),
}
FORMATS = ("pt2", "onnx", "torchscript", "aoti")


def save_checkpoint(architecture: Architecture, folder: Path) -> Path:
    """Build the model from a fixed seed and save its state dict, as a training run would."""
    file, _, name = architecture.model.rpartition(":")
    torch.manual_seed(0)
    model: nn.Module = runpy.run_path(file)[name](**architecture.args)
    # Batch-norm that has never seen data is nearly the identity, and would hide being left out.
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    checkpoint = folder / "model.ckpt"
    torch.save(model.state_dict(), checkpoint)
    return checkpoint
