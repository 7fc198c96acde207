"""What the bare converters resist, on a model small enough to see why; the libraries at night."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import parse_inputs
from modelyard.exporter.arguments import take_inputs
from modelyard.exporter.formats import to_exported_program, to_onnx
from modelyard.exporter.prove.reference import observe
from modelyard.handlers.models.backends import open_artifact
from modelyard.handlers.proof.agree import compare, run


class LearnedMask(nn.Module):
    """Attention with a learned bias, as in Swin, MaxViT and T5."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 4, 4))
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).reshape(x.shape[0], 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        mask = (2 * self.bias).unsqueeze(0)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, mask)
        return seen.transpose(1, 2).reshape(x.shape[0], 4, -1)


class OneMinus(nn.Module):
    """A number minus integers gives floats, as in XLNet."""

    def forward(self, mask: Tensor) -> Tensor:
        return 1.0 - mask


class StridedGru(nn.Module):
    """A recurrent layer whose length is computed from an input's, as over a spectrogram."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, stride=2)
        self.gru = nn.GRU(4, 3, batch_first=True)

    def forward(self, wave: Tensor) -> Tensor:
        states: Tensor = self.gru(self.conv(wave.unsqueeze(1)).transpose(1, 2))[0]
        return states.mean(1)


class Chunks(nn.Module):
    """A split into parts whose number is computed, as in TabNet's ghost batch-norm."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part - 1 for part in x.chunk(-(-x.shape[0] // 128), 0)])


class Len(nn.Module):
    """Python's own len(), which must be a number, as in FT-Transformer."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), 2, -1).sum(1)


class Numpy(nn.Module):
    """numpy, and a number as a number."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.abs(x.numpy())) * float(x.sum())


class Graphs(nn.Module):
    """As many rows as the largest index says, as PyTorch Geometric pools graphs."""

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        sums = x.new_zeros(int(graph.max()) + 1, x.shape[1])
        return sums.index_add(0, graph, x)[graph]


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "learned mask": (LearnedMask, ["x:float32[batch,4,8]"]),
    "number minus integers": (OneMinus, ["mask:int64[batch,length=2..4]"]),
    "recurrent over a computed length": (StridedGru, ["wave:float32[batch,samples=9..20]"]),
    "computed chunks": (Chunks, ["x:float32[batch,4]"]),
    "len": (Len, ["x:float32[batch,4]"]),
    "numpy": (Numpy, ["x:float32[batch,4]"]),
    "a size read from values": (Graphs, ["x:float32[nodes=2..9,4]", "graph:int64[nodes]"]),
}


def _hugging_face(name: str, **config: Any) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**config))
    return model


LIBRARIES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "swin": (
        lambda: _hugging_face(
            "SwinForImageClassification",
            **{"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1]},
            **{"num_heads": [2, 2], "window_size": 4},
        ),
        ["pixel_values:float32[batch,3,32,32]"],
    ),
    "t5 encoder": (
        lambda: _hugging_face(
            "T5EncoderModel",
            **{"vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64},
            **{"num_layers": 1, "num_heads": 2, "use_cache": False},
        ),
        ["input_ids:int64[batch,length=2..16]"],
    ),
    "xlnet": (
        lambda: _hugging_face(
            "XLNetForSequenceClassification",
            **{"vocab_size": 100, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 64},
        ),
        ["input_ids:int64[batch,length=2..16]", "attention_mask:int64[batch,length]"],
    ),
}


def _agrees_in_both(model: nn.Module, inputs: list[str], folder: Path) -> None:
    """Export to pt2 and ONNX, and compare on every case of the proof, in this process."""
    signature = parse_inputs(inputs)
    reference = observe(take_inputs(model, signature), signature, (), torch.device("cpu"))
    program = to_exported_program.capture(reference.model, reference.signature, reference.example)
    to_exported_program.write(program, folder / "net.pt2")
    to_onnx.write(program, reference.signature, folder / "net.onnx")
    for format in ("pt2", "onnx"):
        artifact = open_artifact(folder / f"net.{format}", format)
        for case in reference.cases:
            for expected, found in zip(case.outputs, run(artifact, case.inputs), strict=True):
                assert found.dtype == expected.dtype
                assert compare(expected, found)["scaled"] <= 1e-4, (format, case.probe)


@pytest.mark.parametrize("name", MODELS)
def test_what_resists_is_written_in_both_default_formats(name: str, tmp_path: Path) -> None:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    _agrees_in_both(build().eval(), inputs, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LIBRARIES)
def test_models_of_libraries_are_written_in_both_default_formats(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    build, inputs = LIBRARIES[name]
    torch.manual_seed(0)
    _agrees_in_both(build().eval(), inputs, tmp_path)
