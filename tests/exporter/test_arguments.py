from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import parse_inputs
from modelyard.exporter import to_exported_program, to_onnx, to_torchscript
from modelyard.exporter.arguments import flatten, own_name, take_inputs
from modelyard.exporter.errors import ModelError, UsageError
from modelyard.exporter.reference import Reference, observe
from modelyard.handlers.backends import open_artifact

ROWS = ("x:float32[batch,3]", "y:float32[batch,3]")


class Minus(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x - y


class Optional(nn.Module):
    def forward(self, x: Tensor, bias: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        out = x if bias is None else x + bias
        return out if mask is None else out * mask


class Nested(nn.Module):
    """Takes a dict that holds a tuple, and a list."""

    def forward(self, batch: dict[str, Tensor], pair: list[Tensor]) -> Tensor:
        return batch["left"] - 2 * batch["right"] + 4 * pair[0] - 8 * pair[1]


class Deep(nn.Module):
    def forward(self, batch):  # type: ignore[no-untyped-def]
        return batch["pair"][0] - 2 * batch["pair"][1] + 4 * batch["more"]["x"]


class KeywordOnly(nn.Module):
    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return x * scale


@dataclass
class Answer:
    logits: Tensor
    extra: Tensor | None = None


class Pair(NamedTuple):
    mean: Tensor
    total: Tensor


class GivesDataclass(nn.Module):
    def forward(self, x: Tensor) -> Answer:
        return Answer(2 * x)


class GivesNamedTuple(nn.Module):
    def forward(self, x: Tensor) -> Pair:
        return Pair(x.mean(1), x.sum(1))


class GivesNested(nn.Module):
    def forward(self, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {"a": (x, 2 * x), "b": (3 * x, 4 * x)}


def _observe(model: nn.Module, *inputs: str) -> Reference:
    signature = parse_inputs(inputs)
    return observe(take_inputs(model.eval(), signature), signature, (), torch.device("cpu"))


def _write(format: str, reference: Reference, path: Path) -> None:
    model, signature, example = reference.model, reference.signature, reference.example
    if format == "torchscript":
        to_torchscript.write(model, signature, example, path)
        return
    program = to_exported_program.capture(model, signature, example)
    if format == "pt2":
        to_exported_program.write(program, path)
    else:
        to_onnx.write(program, signature, path)


def test_a_model_that_takes_its_inputs_by_place_stays_as_it_is() -> None:
    model = Minus()
    assert take_inputs(model, parse_inputs(ROWS)) is model
    assert take_inputs(model, parse_inputs(["a:float32[batch]", "b:float32[batch]"])) is model


def test_an_input_goes_to_the_argument_of_its_name_whatever_the_order() -> None:
    taken = take_inputs(Minus(), parse_inputs([ROWS[1], ROWS[0]]))
    y, x = torch.ones(2, 3), torch.zeros(2, 3)
    assert torch.equal(taken(y, x), x - y)


def test_an_argument_with_a_default_may_be_left_out() -> None:
    taken = take_inputs(Optional(), parse_inputs(["x:float32[batch]", "mask:bool[batch]"]))
    assert taken(torch.tensor([1.0, 2.0]), torch.tensor([True, False])).tolist() == [1.0, 0.0]


def test_an_argument_that_has_no_place_is_given_by_name() -> None:
    taken = take_inputs(KeywordOnly(), parse_inputs(["x:float32[batch]", "scale:float32[1]"]))
    assert taken(torch.tensor([1.0, 2.0]), torch.tensor([3.0])).tolist() == [3.0, 6.0]


@pytest.mark.parametrize("format", ["pt2", "onnx", "torchscript"])
def test_nested_arguments_become_one_input_each_in_every_format(
    format: str, tmp_path: Path
) -> None:
    ways = ("batch.left", "batch.right", "pair.0", "pair.1")
    reference = _observe(Nested(), *(f"{way}:float32[batch,2]" for way in ways))
    _write(format, reference, tmp_path / "net.pt2")
    artifact = open_artifact(tmp_path / "net.pt2", format)
    assert artifact.input_names == ("batch_left", "batch_right", "pair_0", "pair_1")
    ones = [torch.full((3, 2), 10.0**power) for power in range(4)]
    assert torch.as_tensor(artifact(*ones)).flatten().tolist() == [1 - 20 + 400 - 8000] * 6


def test_dicts_and_tuples_nest_in_each_other() -> None:
    ways = ("batch.pair.1", "batch.more.x", "batch.pair.0")
    signature = parse_inputs([f"{way}:float32[batch]" for way in ways])
    taken = take_inputs(Deep(), signature)
    one, ten, hundred = (torch.tensor([10.0**power]) for power in range(3))
    assert taken(one, ten, hundred).item() == 100 - 2 + 40
    assert signature.to_json()["inputs"][0]["argument"] == "batch.pair.1"


@pytest.mark.parametrize("model", [Nested(), Minus()])
def test_the_names_of_submodules_do_not_show_the_call_around_the_model(model: nn.Module) -> None:
    assert own_name("model.layer.0") == "layer.0"
    assert own_name("model.model.layer") == "layer"
    assert own_name("models.layer") == "models.layer"


@pytest.mark.parametrize(
    ("model", "inputs", "seen"),
    [
        pytest.param(Minus(), ["y:float32[batch]"], "forward() takes x, y", id="one left out"),
        pytest.param(Minus(), [*ROWS, "z:float32[batch]"], "forward() takes x, y", id="one more"),
        pytest.param(
            Minus(), ["z:float32[batch]", "x:float32[batch]"], "forward() takes x, y", id="twice"
        ),
        pytest.param(
            Nested(), ["batch.a:float32[2]", "pair.1:float32[2]"], "without a gap", id="gap"
        ),
        pytest.param(
            Nested(), ["batch.a:float32[2]", "batch:float32[2]"], "is inside of", id="both"
        ),
        pytest.param(
            Nested(), ["batch:float32[2]", "batch.a:float32[2]"], "is a tensor and", id="both ways"
        ),
    ],
)
def test_inputs_that_are_not_forwards_arguments_are_wrong_usage(
    model: nn.Module, inputs: list[str], seen: str
) -> None:
    with pytest.raises(UsageError) as caught:
        take_inputs(model, parse_inputs(inputs))
    assert seen in str(caught.value)


@pytest.mark.parametrize("format", ["pt2", "onnx", "torchscript"])
@pytest.mark.parametrize(
    ("model", "names", "factors"),
    [
        pytest.param(GivesDataclass(), ["logits"], [2.0], id="dataclass"),
        pytest.param(GivesNamedTuple(), ["mean", "total"], [1.0, 3.0], id="named tuple"),
        pytest.param(
            GivesNested(), ["a_0", "a_1", "b_0", "b_1"], [1.0, 2.0, 3.0, 4.0], id="nested"
        ),
    ],
)
def test_outputs_of_any_class_come_as_plain_tensors(
    format: str, model: nn.Module, names: list[str], factors: list[float], tmp_path: Path
) -> None:
    reference = _observe(model, "x:float32[batch,3]")
    assert [spec.name for spec in reference.signature.outputs] == names
    _write(format, reference, tmp_path / "net.pt2")
    output = open_artifact(tmp_path / "net.pt2", format)(torch.ones(2, 3))
    tensors = [output] if isinstance(output, Tensor) else list(output)
    assert [float(tensor.flatten()[0]) for tensor in tensors] == factors


def test_an_output_that_holds_something_else_is_named() -> None:
    with pytest.raises(ModelError, match="gives a dict of logits: Tensor, loss: float; expected"):
        flatten({"logits": torch.ones(1), "loss": 0.5})
    assert list(flatten({"logits": torch.ones(1), "loss": None})) == ["logits"]
