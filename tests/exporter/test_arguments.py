from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import onnx
import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import parse_inputs
from modelyard.exporter.arguments import (
    WRAPPED,
    choose_outputs,
    own_name,
    pick,
    take_inputs,
    take_submodule,
)
from modelyard.exporter.errors import ModelError, UsageError
from modelyard.exporter.formats import to_exported_program, to_onnx, to_torchscript
from modelyard.exporter.inspection import describe
from modelyard.exporter.prove.locate import first_difference
from modelyard.exporter.prove.reference import Reference, observe
from modelyard.handlers.models.backends import open_artifact

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


def _observe(model: nn.Module, *inputs: str, names: Sequence[str] = ()) -> Reference:
    signature = parse_inputs(inputs)
    return observe(take_inputs(model.eval(), signature), signature, names, torch.device("cpu"))


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


def test_the_names_of_submodules_do_not_show_the_call_around_the_model() -> None:
    assert own_name(f"{WRAPPED}.layer.0") == "layer.0"
    assert own_name(f"{WRAPPED}.{WRAPPED}.model.layer") == "model.layer"
    assert own_name("model.layer") == "model.layer"


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


@pytest.mark.parametrize(
    ("names", "given", "factors"),
    [
        pytest.param([], ["a_0", "a_1", "b_0", "b_1"], [1, 2, 3, 4], id="none: all"),
        pytest.param(["b_0"], ["b_0"], [3], id="one of them"),
        pytest.param(["b_1", "a_0"], ["b_1", "a_0"], [4, 1], id="in another order"),
        pytest.param(["b"], ["b_0", "b_1"], [3, 4], id="a container"),
        pytest.param(["p", "q", "r", "s"], ["p", "q", "r", "s"], [1, 2, 3, 4], id="new names"),
        pytest.param(["a_0", "q", "r", "s"], ["a_0", "q", "r", "s"], [1, 2, 3, 4], id="some new"),
    ],
)
def test_outputs_are_kept_by_their_name_or_renamed_in_order(
    names: list[str], given: list[str], factors: list[float]
) -> None:
    output = GivesNested()(torch.ones(1))
    outputs = choose_outputs(output, names)
    assert list(outputs.names) == given
    assert [float(tensor) for tensor in pick(output, outputs.keys)] == factors


@pytest.mark.parametrize("names", [["c"], ["a_0", "c"], ["a_0", "a_0"], ["b_1", "p", "q", "r"]])
def test_names_that_are_neither_all_old_nor_all_new_are_wrong_usage(names: list[str]) -> None:
    wrong = r"the model gives 4 outputs, a_0, a_1, b_0, b_1; expected some of these, .* or as many"
    with pytest.raises(UsageError, match=wrong):
        choose_outputs(GivesNested()(torch.ones(1)), names)


class SomeCache:
    """As transformers' own: neither a tensor nor a container of them."""


class GivesCache(nn.Module):
    def forward(self, x: Tensor) -> dict[str, object]:
        return {"logits": 2 * x, "loss": x.sum(), "past": SomeCache(), "steps": 3, "none": None}


def test_a_cache_in_an_output_is_refused_with_what_to_do_and_left_out_when_told(
    tmp_path: Path,
) -> None:
    advice = r"logits: Tensor, loss: Tensor, past: SomeCache.* --output logits, or .*use_cache"
    with pytest.raises(ModelError, match=advice):
        _observe(GivesCache(), "x:float32[batch,3]")
    with pytest.raises(UsageError, match=r'"past" is a SomeCache'):
        choose_outputs(GivesCache()(torch.ones(1)), ["past"])
    reference = _observe(GivesCache(), "x:float32[batch,3]", names=["logits"])
    assert reference.warnings == ()
    _write("onnx", reference, tmp_path / "net.pt2")
    output = open_artifact(tmp_path / "net.pt2", "onnx")(torch.ones(2, 3))
    assert torch.as_tensor(output).tolist() == [[2.0] * 3] * 2


def test_an_output_of_an_inputs_name_gets_one_of_its_own() -> None:
    found = {"sample": torch.ones(1), "variance": torch.ones(1)}
    outputs = choose_outputs(found, (), ["sample", "timestep"])
    assert outputs.names == ("sample_output", "variance")
    assert outputs.keys == ("sample", "variance")
    assert choose_outputs(found, ["sample_output"], ["sample"]).keys == ("sample",)


def test_a_number_beside_the_outputs_is_left_out_and_said() -> None:
    outputs = choose_outputs({"logits": torch.ones(1), "loss": 0.5, "none": None}, [])
    assert outputs.names == ("logits",)
    assert outputs.notes == (
        'output "loss" is left out: it is 0.5, a float, and an artifact gives tensors of numbers',
    )
    with pytest.raises(ModelError, match="gives a dict of loss: float; expected tensors"):
        choose_outputs({"loss": 0.5}, [])


class Complex(nn.Module):
    """Turns complex numbers, and gives their conjugates and sizes."""

    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.tensor([1j, -1j, 2.0]))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return (z * self.turn).conj(), z.abs()


@pytest.mark.parametrize("format", ["pt2", "onnx", "torchscript"])
def test_complex_numbers_go_in_and_out_as_their_real_view(format: str, tmp_path: Path) -> None:
    reference = _observe(Complex(), "z:complex64[batch,3]")
    assert [str(spec) for spec in reference.signature.outputs] == [
        "output_0:complex64[batch=1..8,3]",
        "output_1:float32[batch=1..8,3]",
    ]
    assert reference.signature.outputs[0].dtype == "float32"
    assert reference.signature.outputs[0].shape[1:] == (3, 2)
    _write(format, reference, tmp_path / "net.pt2")
    z = torch.tensor([[1 + 2j, 3 - 4j, 1j], [0, 1, -1]])
    turned, size = open_artifact(tmp_path / "net.pt2", format)(torch.view_as_real(z))
    conjugates = torch.tensor([[-2 - 1j, -4 + 3j, -2j], [0, 1j, -2]])
    torch.testing.assert_close(torch.view_as_complex(turned.contiguous()), conjugates)
    torch.testing.assert_close(size, z.abs())


class Whole(nn.Module):
    """Its own attribute has the name that a wrapper would take first."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(3, 4), nn.ReLU())})
        self.head = nn.Linear(4, 2)

    def forward(self, batch: dict[str, Tensor]) -> Answer:
        return Answer(self.head(self.model["encoder"](batch["x"])))


def test_names_inside_an_artifact_are_the_models_own(tmp_path: Path) -> None:
    model = Whole()
    signature = parse_inputs(["batch.x:float32[n,3]"])
    reference = observe(
        take_inputs(model.eval(), signature), signature, ["scores"], torch.device("cpu")
    )
    program = to_exported_program.capture(reference.model, reference.signature, reference.example)
    to_exported_program.write(program, tmp_path / "net.pt2")
    to_onnx.write(program, reference.signature, tmp_path / "net.onnx")
    content = describe(tmp_path / "net.pt2")
    assert [entry["name"] for entry in content["tensors"]] == list(model.state_dict())
    for file in ("net.pt2", "net.onnx"):
        assert b"wrapped_model" not in (tmp_path / file).read_bytes()
    loaded = torch.export.load(tmp_path / "net.pt2")
    with to_exported_program.quiet():
        unwrapped = dict(torch.export.unflatten(loaded).named_modules())
    assert {"model.encoder.0", "head"} <= set(unwrapped)
    stacks = [node.meta.get("nn_module_stack") for node in loaded.graph.nodes]
    roots = {next(iter(stack.values())) for stack in stacks if stack}
    assert roots == {("", f"{Whole.__module__}.Whole")}
    graph = onnx.load(tmp_path / "net.onnx").graph
    assert set(model.state_dict()) <= {weight.name for weight in graph.initializer}
    model.head.bias.data += 1  # what the artifact no longer gives, from the head on
    (case, *_) = reference.cases
    for format in ("pt2", "onnx"):
        named = first_difference(tmp_path / f"net.{format}", format, reference, case)
        assert named.startswith('the first submodule that differs is "head" (Linear), by ')


def test_a_part_of_a_model_is_found_by_its_path() -> None:
    model = Whole()
    assert take_submodule(model, "model.encoder.0") is model.model["encoder"][0]  # type: ignore[index]
    for path, seen in (
        ("model.decoder.0", '"model" has encoder'),
        ("heads", "Whole has model, head"),
        ("head.weight", '"head" has no parts'),
        ("model", "is a ModuleDict without forward"),
    ):
        with pytest.raises(UsageError) as caught:
            take_submodule(model, path)
        assert seen in str(caught.value)
