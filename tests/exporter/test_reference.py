import inspect
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import Dim, parse_inputs
from modelyard.exporter.errors import ModelError, UsageError
from modelyard.exporter.prove.reference import Reference, observe

CPU = torch.device("cpu")


class Add(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return left + right, (left * right).sum(1)


class Named(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"double": 2 * x, "half": x / 2}


class Lookup(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.table(tokens)
        return out


class Bytes(nn.Module):
    """Has no table that would say how far its integers go."""

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.one_hot(tokens, 256).float()


class Masked(nn.Module):
    def forward(self, mask: Tensor) -> Tensor:
        return ((1.0 - mask) * torch.finfo(torch.float32).min).softmax(-1)


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool1d(x, 2)


class Samples(nn.Module):
    """As a variational autoencoder: its answer is drawn."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


HERE = f"test_reference.py:{inspect.getsourcelines(Samples)[1] + 4}"


class Speaks(nn.Module):
    """As text to speech: how long its answer is changes from run to run."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs = self.runs % 4 + 1
        return x[:, : self.runs]


class Forgets(Speaks):
    """Gives another number of outputs in each run."""

    def forward(self, x: Tensor) -> Tensor:
        self.runs = self.runs % 4 + 1
        return (x,) * self.runs  # type: ignore[return-value]


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, training=True)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


class Rounds(Remembers):
    """Adds in another order in each run."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls * 1e-7)


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Nan(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.nan


class Text(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, bytes]:
        return x, b"text"


class Growing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if len(x) > 1 else x[0]


def _observe(model: nn.Module, inputs: Sequence[str], names: Sequence[str] = ()) -> Reference:
    return observe(model.eval(), parse_inputs(inputs), names, CPU)


def test_outputs_get_their_dtypes_and_the_dims_that_they_follow() -> None:
    inputs = ["left:float32[batch,width]", "right:float32[batch,width]"]
    reference = _observe(Add(), inputs, ["sum", "dot"])
    assert [str(spec) for spec in reference.signature.outputs] == [
        "sum:float32[batch=1..8,width=1..8]",
        "dot:float32[batch=1..8]",
    ]


def test_a_size_that_follows_no_input_dim_gets_a_name_of_its_own() -> None:
    reference = _observe(Pooled(), ["x:float32[batch,3,length=8..16]"])
    assert reference.signature.outputs[0].shape == (Dim("batch", 1, 8), 3, Dim("output_2"))
    assert set(reference.signature.dims) == {"batch", "length"}


def test_outputs_are_named_after_what_the_model_gives() -> None:
    (one,) = _observe(nn.Identity(), ["x:float32[batch]"]).signature.outputs
    two = _observe(Add(), ["left:float32[batch,2]", "right:float32[batch,2]"]).signature.outputs
    own = _observe(Named(), ["x:float32[batch]"]).signature.outputs
    assert one.name == "output"
    assert [spec.name for spec in two] == ["output_0", "output_1"]
    assert [spec.name for spec in own] == ["double", "half"]


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"], ["a", "a"]])
def test_another_number_of_output_names_is_wrong_usage(names: list[str]) -> None:
    inputs = ["left:float32[batch,2]", "right:float32[batch,2]"]
    with pytest.raises(UsageError, match="the model gives 2 outputs"):
        _observe(Add(), inputs, names)


@pytest.mark.parametrize(("words", "largest"), [(5000, 4999), (300, 299), (64, 63), (2, 1)])
def test_integers_go_as_high_as_the_model_takes(words: int, largest: int) -> None:
    reference = _observe(Lookup(words), ["tokens:int64[batch,length]"])
    assert max(int(case.inputs[0].max()) for case in reference.cases) == largest


def test_integers_without_a_table_go_as_high_as_a_usual_bound() -> None:
    reference = _observe(Bytes(), ["tokens:int64[batch]"])
    assert str(reference.found["tokens"]) == "=0..255"


def test_integers_that_make_everything_infinite_are_not_used() -> None:
    reference = _observe(Masked(), ["mask:int64[batch,length=2..8]"])
    assert max(int(case.inputs[0].max()) for case in reference.cases) == 1


def test_a_model_that_writes_into_its_input_gets_a_copy() -> None:
    reference = _observe(Writes(), ["x:float32[batch]"])
    assert all(torch.equal(case.outputs[0], 2 * case.inputs[0]) for case in reference.cases)


@pytest.mark.parametrize(
    ("model", "inputs", "seen"),
    [
        pytest.param(
            nn.Linear(3, 2),
            ["x:float32[batch,4]"],
            'input "x" float32[5,4] at batch=5 (random values): RuntimeError: ',
            id="shape",
        ),
        pytest.param(nn.Linear(3, 2), ["x:int64[batch,3]"], 'input "x" int64[5,3]', id="dtype"),
        pytest.param(
            Add(), ["left:float32[batch,2]"], "missing 1 required positional", id="too few"
        ),
        pytest.param(
            nn.Linear(3, 2),
            ["x:float32[batch,width=3..4]"],
            'input "x" float32[1,4] at batch=1, width=4 (random values)',
            id="size at the end of a range",
        ),
        pytest.param(Random(), ["x:float32[batch,64]"], 'output "output" differs by', id="dropout"),
        pytest.param(
            Samples(),
            ["x:float32[batch,6]"],
            f"forward() draws random numbers at {HERE} (randn_like); take them as an argument "
            "instead, noise for example, and add --input 'noise:float32[batch,6]'",
            id="random by nature",
        ),
        pytest.param(
            Speaks(),
            ["x:float32[batch,4]"],
            'output "output" is float32[5,1] in one run and float32[5,3] in the next on one input',
            id="size that changes",
        ),
        pytest.param(Forgets(), ["x:float32[batch]"], "1 outputs in one run and 3 in", id="number"),
        pytest.param(
            Remembers(),
            ["x:float32[batch]"],
            "forward() changes self.calls (1, then 2) in every call; take it as an input",
            id="state",
        ),
        pytest.param(Nan(), ["x:float32[batch]"], "no finite value on any of 40", id="nan"),
        pytest.param(Text(), ["x:float32[batch]"], "a tuple of 0: Tensor, 1: bytes", id="text"),
        pytest.param(Growing(), ["x:float32[batch,2]"], "with 1 dims or float32 with 2", id="dims"),
    ],
)
def test_a_model_that_cannot_be_compared_is_refused(
    model: nn.Module, inputs: list[str], seen: str
) -> None:
    with pytest.raises(ModelError) as caught:
        _observe(model, inputs)
    assert seen in str(caught.value)


def test_what_moves_by_less_than_an_artifact_may_is_said_and_not_refused() -> None:
    warnings = _observe(Rounds(), ["x:float32[batch,3]"]).warnings
    assert any("moves by" in each and "between two runs on one input" in each for each in warnings)
    assert any("forward() changes self.calls (1, then 2)" in each for each in warnings)


def test_values_that_the_dtype_of_the_artifact_does_not_hold_are_refused() -> None:
    inputs = parse_inputs(["x:float32[batch]=0..1e5"])
    with pytest.raises(UsageError) as caught:
        observe(nn.Identity().eval(), inputs, (), CPU, dtype=torch.float16)
    assert str(caught.value) == (
        '--dtype: the values of input "x": they go from 0 to 100000.0, and float16 from -65504.0 '
        "to 65504.0"
    )


class Heads(nn.Module):
    """One head for each way in which numbers may end."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "shares": x.softmax(1),
            "chances": x.sigmoid(),
            "one": x[:, :1].sigmoid(),
            "logits": 2 * x,
            "flat": 0.5 + 0.01 * x,  # between 0 and 1 in every usual case
            "map": x[:, None].softmax(2),
        }


def test_probabilities_are_found_by_what_the_model_gives() -> None:
    found = _observe(Heads(), ["x:float32[batch,3]"]).probabilities
    assert found == {
        "shares": True, "chances": True, "one": True, "logits": False, "flat": False
    }  # fmt: skip


def test_what_token_ids_give_between_0_and_1_stays_open() -> None:
    class Half(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return 0.5 + 0.001 * tokens[:, :1].float()

    assert _observe(Half(), ["tokens:int64[batch,4]<100"]).probabilities == {}
