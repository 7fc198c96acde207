"""Faults put in on purpose: every one must be refused, and named as far as it can be."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import parse_inputs
from modelyard.exporter import CheckpointError, ConversionError, ModelError, ParityError, export
from modelyard.exporter.formats import to_exported_program, to_onnx, to_torchscript
from modelyard.exporter.prove.checker import Checker
from modelyard.exporter.prove.locate import first_difference
from modelyard.exporter.prove.parity import check
from modelyard.exporter.prove.reference import Reference, observe

Author = Callable[[str], tuple[Path, str]]
FORMATS = ("pt2", "onnx", "torchscript")


class Net(nn.Module):
    """Two convolutions with batch-norm, dropout and a head: something to break in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU())
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6, 5)

    def forward(self, image: Tensor) -> Tensor:
        seen = self.second(self.first(image)).mean((2, 3))
        out: Tensor = self.head(self.drop(seen))
        return out


class SwappedChannels(nn.Module):
    """Takes blue, green, red for red, green, blue."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.net(image.flip(1))
        return out


def _net() -> Net:
    torch.manual_seed(0)
    net = Net()
    norm = net.first[1]
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return net.eval()


def _changed_weight(net: Net) -> nn.Module:
    with torch.no_grad():
        net.get_parameter("second.0.weight")[0, 0, 0, 0] += 0.5
    return net


def _dropped_buffer(net: Net) -> nn.Module:
    """Leave out what batch-norm has learnt of its inputs."""
    norm = net.first[1]
    assert isinstance(norm, nn.BatchNorm2d)
    norm.reset_running_stats()
    return net


def _train_mode(net: Net) -> nn.Module:
    net.first[1].train()
    return net


def _dropout_on(net: Net) -> nn.Module:
    net.drop.train()
    return net


def _half_the_head(net: Net) -> nn.Module:
    with torch.no_grad():
        net.head.weight[2] /= 2
    return net


FAULTS: dict[str, tuple[Callable[[Net], nn.Module], str]] = {
    "a changed weight": (_changed_weight, "second.0"),
    "a dropped buffer": (_dropped_buffer, "first.1"),
    "batch-norm in train mode": (_train_mode, "first.1"),
    "dropout on": (_dropout_on, "drop"),
    "half a row of the head": (_half_the_head, "head"),
    "swapped channels": (SwappedChannels, ""),
}


# ONNX leaves out what only training does, and a worker puts TorchScript into eval mode.
NOT_HELD = ("batch-norm in train mode", "dropout on")
IN_ONNX = {"a changed weight": "onnx"}


def _reference(text: str = "image:float32[batch=1..3,3,8,8]") -> Reference:
    return observe(_net(), parse_inputs([text]), ["classes"], torch.device("cpu"))


def _write(format: str, model: nn.Module, reference: Reference, path: Path) -> None:
    """Write the doctored model as the exporter would write the honest one."""
    signature, example = reference.signature, reference.example
    if format == "torchscript":
        to_torchscript.write(model, signature, example, path)
        return
    program = to_exported_program.capture(model, signature, example)
    if format == "pt2":
        to_exported_program.write(program, path)
    else:
        to_onnx.write(program, signature, path)


def _cases() -> Iterator[Any]:
    """Yield every fault in every format that can hold it: by day once, at night all."""
    for fault in FAULTS:
        for format in FORMATS:
            if format != "pt2" and fault in NOT_HELD:
                continue
            by_day = "pt2" if fault in NOT_HELD else IN_ONNX.get(fault, "torchscript")
            marks = [] if format == by_day else [pytest.mark.nightly]
            yield pytest.param(fault, format, id=f"{fault} in {format}", marks=marks)


@pytest.mark.parametrize(("fault", "format"), list(_cases()))
def test_a_doctored_artifact_is_refused_with_the_layer_where_it_leaves_the_model(
    fault: str, format: str, checker: Checker, tmp_path: Path
) -> None:
    doctor, layer = FAULTS[fault]
    reference = _reference()
    artifact = tmp_path / "net.pt2"
    _write(format, doctor(copy.deepcopy(_net())), reference, artifact)
    with pytest.raises(ParityError, match=rf'^{format}: output "classes": max_abs ') as caught:
        check(
            artifact,
            format,
            reference,
            checker,
            locate=lambda case: first_difference(artifact, format, reference, case),
        )
    # In the whole swapped model every layer sees something else.
    if layer:
        assert f'the first submodule that differs is "{layer}" (' in str(caught.value)


@pytest.mark.parametrize(
    "format",
    [
        pytest.param("pt2", marks=pytest.mark.nightly),
        pytest.param("onnx", marks=pytest.mark.nightly),
        "torchscript",
    ],
)
def test_an_honest_artifact_passes_the_same_gate(
    format: str, checker: Checker, tmp_path: Path
) -> None:
    reference = _reference()
    _write(format, _net(), reference, tmp_path / "net.pt2")
    assert check(tmp_path / "net.pt2", format, reference, checker).max_abs <= 1e-5


def test_a_dim_specialised_to_one_is_refused(checker: Checker, tmp_path: Path) -> None:
    reference = _reference()
    program = torch.export.export(_net(), (torch.ones(1, 3, 8, 8),))
    to_exported_program.write(program, tmp_path / "net.pt2")
    with pytest.raises(ParityError, match=r"does not run at batch=2 .*the artifact takes image"):
        check(tmp_path / "net.pt2", "pt2", reference, checker)


def test_a_model_that_specialises_a_dim_to_one_is_refused_by_its_name(author: Author) -> None:
    checkpoint, model = author("""
class Net(nn.Module):
    def forward(self, x):
        return x if x.shape[0] == 1 else sum([x for _ in range(x.shape[0])])
""")
    with pytest.raises(ConversionError, match=r'fixes dim "batch" of input "x" to 5 at net\.py:7'):
        export(checkpoint, model, ["x:float32[batch,3]"], output_dir=checkpoint.parent / "out")


NORM = """
class Net(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(3)
"""


def test_a_buffer_dropped_from_the_checkpoint_is_refused_by_its_name(author: Author) -> None:
    checkpoint, model = author(NORM)
    state = torch.load(checkpoint, weights_only=True)
    del state["running_var"]
    torch.save(state, checkpoint)
    with pytest.raises(CheckpointError, match="running_var"):
        export(checkpoint, model, ["x:float32[batch,3]"], output_dir=checkpoint.parent / "out")


WIDE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.small = nn.Linear(3, 3)
        self.wide = nn.Linear(3, 3)
        with torch.no_grad():
            self.wide.weight.fill_(60000.0)

    def forward(self, x):
        return torch.tanh(self.wide(self.small(x)) / 1e5)
"""


@pytest.mark.parametrize("format", [pytest.param("pt2", marks=pytest.mark.nightly), "torchscript"])
def test_values_that_overflow_in_float16_are_named_with_their_layer(
    format: str, author: Author
) -> None:
    checkpoint, model = author(WIDE)
    with pytest.raises(ParityError) as caught:
        export(
            checkpoint,
            model,
            ["x:float32[batch,3]"],
            output_dir=checkpoint.parent / "out",
            formats=[format],
            dtype="fp16",
        )
    assert '"wide" (Linear), by inf' in str(caught.value)
    assert "float16 ends at 65504: use --dtype bf16" in str(caught.value)


def test_a_weight_that_overflows_in_float16_is_named(author: Author) -> None:
    checkpoint, model = author(WIDE.replace("60000.0", "70000.0"))
    with pytest.raises(ModelError, match=r'weight "wide\.weight" holds 7e\+04, and float16 ends'):
        export(
            checkpoint,
            model,
            ["x:float32[batch,3]"],
            output_dir=checkpoint.parent / "out",
            dtype="fp16",
        )
