from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import parse_inputs
from modelyard.exporter.errors import ConversionError
from modelyard.exporter.formats import to_exported_program, to_onnx, to_torchscript
from modelyard.exporter.formats.to_exported_program import any_length
from modelyard.exporter.prove.reference import observe
from modelyard.handlers.models.backends import open_artifact
from modelyard.handlers.proof.agree import compare


class Recurrent(nn.Module):
    """Words through a table and a recurrent layer, both of its outputs in use."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.layer = layer

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        states, last = self.layer(self.table(tokens))
        hidden = last[0] if isinstance(last, tuple) else last
        return states.sum(-1), hidden[-1]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(4, 3, batch_first=True),
    "deep lstm in two directions": lambda: nn.LSTM(
        4, 3, num_layers=2, bidirectional=True, batch_first=True
    ),
    "gru": lambda: nn.GRU(4, 3, batch_first=True),
    "rnn": lambda: nn.RNN(4, 3, batch_first=True),
}


DIAGONAL = {
    ("lstm", "pt2"), ("deep lstm in two directions", "onnx"), ("gru", "torchscript"),
    ("rnn", "pt2"), ("rnn", "onnx"),
}  # fmt: skip


def _cases() -> Iterator[Any]:
    for layer in LAYERS:
        for format in ("pt2", "onnx", "torchscript"):
            marks = [] if (layer, format) in DIAGONAL else [pytest.mark.nightly]
            yield pytest.param(layer, format, id=f"{layer} as {format}", marks=marks)


@pytest.mark.parametrize(("layer", "format"), list(_cases()))
def test_every_length_gives_what_the_model_gives(layer: str, format: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Recurrent(LAYERS[layer]()).eval()
    signature = parse_inputs(["tokens:int64[batch,length=1..30]"])
    reference = observe(model, signature, (), torch.device("cpu"))
    path = tmp_path / "net.pt2"
    if format == "torchscript":
        to_torchscript.write(model, reference.signature, reference.example, path)
    else:
        program = to_exported_program.capture(model, reference.signature, reference.example)
        if format == "pt2":
            to_exported_program.write(program, path)
        elif layer == "rnn":
            with pytest.raises(ConversionError, match=r"has no form for nn\.RNN"):
                to_onnx.write(program, reference.signature, path)
            return
        else:
            to_onnx.write(program, reference.signature, path)
    artifact = open_artifact(path, format)
    for rows, length in ((1, 1), (1, 13), (3, 2), (4, 29), (2, 64)):
        tokens = torch.randint(0, 20, (rows, length))
        with torch.no_grad():
            wanted, got = model(tokens), artifact(tokens)
        for one, two in zip(wanted, got, strict=True):
            assert compare(one, torch.as_tensor(two))["scaled"] < 1e-5


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_a_projection_and_time_in_front_keep_their_shapes() -> None:
    layer = nn.LSTM(4, 6, proj_size=2).eval()
    signature = parse_inputs(["x:float32[length,5,4]"])
    reference = observe(layer, signature, (), torch.device("cpu"))
    program = to_exported_program.capture(reference.model, reference.signature, reference.example)
    states, hidden, cell = program.module()(torch.ones(11, 5, 4))
    assert torch.equal(states, layer(torch.ones(11, 5, 4))[0])
    assert (hidden.shape, cell.shape) == ((1, 5, 2), (1, 5, 6))


def test_outside_the_context_nothing_is_changed() -> None:
    operators = (torch.ops.aten.lstm.input, torch.ops.aten.gru.input)
    before = [dict(operator.py_kernels) for operator in operators]
    with pytest.raises(ZeroDivisionError), any_length():
        assert [dict(operator.py_kernels) for operator in operators] != before
        _ = 1 / 0
    assert [dict(operator.py_kernels) for operator in operators] == before
