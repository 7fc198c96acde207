"""Which integers a model takes, found by trying or stated in --input."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from modelyard.archiver.signature import parse_inputs
from modelyard.exporter.errors import ModelError
from modelyard.exporter.inputs.tried import find_values
from modelyard.exporter.prove.reference import Reference, observe

X = "x:float32[nodes=10..40,8]"
EDGES = "edge_index:int64[2,edges=5..90]"
IDS = "ids:int64[batch,length=2..9]"
LENGTHS = "lengths:int64[batch]"


class Graph(nn.Module):
    """Passes messages along the edges; loops are dropped and set anew, as GCNConv does it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        real = (source != target).nonzero().flatten()
        sent = self.linear(x).index_select(0, source[real])
        out: Tensor = self.linear(x).index_add(0, target[real], sent)
        return out


class Packed(nn.Module):
    def __init__(self, is_sorted: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4)
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self.is_sorted = is_sorted

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        rows = pack_padded_sequence(
            self.table(ids), lengths, batch_first=True, enforce_sorted=self.is_sorted
        )
        out, _ = self.lstm(rows)
        padded, _ = pad_packed_sequence(out, batch_first=True, total_length=ids.shape[1])
        return padded


class Bags(nn.Module):
    """Takes all rows' tokens in one list, and where each row begins."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(30, 4)

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        out: Tensor = self.table(tokens, offsets)
        return out


class Kinds(nn.Module):
    """Has a weight for three numbers only."""

    def forward(self, kind: Tensor) -> Tensor:
        if not set(kind.flatten().tolist()) <= {40, 43, 47}:
            raise ValueError("unknown kind")
        return kind.float()


class Shifted(nn.Module):
    """Gives no finite number for 0."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return x / n


def _find(model: nn.Module, *texts: str) -> dict[str, str]:
    found = find_values(model.eval(), parse_inputs(texts))
    return {name: str(values) for name, values in found.items()}


def _observe(model: nn.Module, *texts: str) -> Reference:
    return observe(model.eval(), parse_inputs(texts), (), torch.device("cpu"))


@pytest.mark.parametrize(
    ("model", "inputs", "found"),
    [
        pytest.param(Graph(), [X, EDGES], {"edge_index": "<nodes"}, id="graph"),
        pytest.param(
            Packed(), [IDS, LENGTHS], {"ids": "=0..49", "lengths": "=1..length"}, id="packed"
        ),
        pytest.param(
            nn.Embedding(50, 2), ["ids:int32[batch,3]"], {"ids": "=0..49"}, id="table's size"
        ),
        pytest.param(
            Shifted(),
            ["x:float32[batch]", "n:int64[batch]"],
            {"n": "=0..999"},
            id="not finite at 0",
        ),
        pytest.param(Graph(), [X, f"{EDGES}<nodes"], {}, id="nothing to find"),
    ],
)
def test_integers_are_found_by_trying(
    model: nn.Module, inputs: Sequence[str], found: dict[str, str]
) -> None:
    assert _find(model, *inputs) == found


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        pytest.param(Graph(), [X, f"{EDGES}<nodes"], id="graph"),
        pytest.param(Packed(), [f"{IDS}<50", f"{LENGTHS}=1..length"], id="packed"),
        pytest.param(
            Packed(is_sorted=True), [f"{IDS}<50", f"{LENGTHS}=1..length,falling"], id="sorted"
        ),
        pytest.param(
            Bags(),
            ["tokens:int64[total=4..40]<30", "offsets:int64[rows]=0..total,rising"],
            id="ragged",
        ),
        pytest.param(Kinds(), ["kind:int64[batch]=40,43,47"], id="set"),
    ],
)
def test_every_case_of_a_stated_range_is_one_that_the_model_takes(
    model: nn.Module, inputs: Sequence[str]
) -> None:
    reference = _observe(model, *inputs)
    assert len(reference.cases.probes) > 20
    assert reference.found == {}


class OnlyZero(nn.Module):
    def forward(self, kind: Tensor) -> Tensor:
        if (kind > 0).any():
            raise ValueError("unknown kind")
        return kind.float()


def test_a_model_that_takes_no_integers_that_are_made_up_says_what_to_write() -> None:
    with pytest.raises(ModelError) as caught:
        _observe(Kinds(), "kind:int64[batch]")
    assert str(caught.value) == (
        'the model cannot take input "kind" int64[5] at batch=5 (random values): ValueError: '
        "unknown kind; change --input to what forward() expects: dtype, shape, range of a dim, or "
        "the integers it takes, as in --input 'kind:int64[batch=1..8]=0..999', or compare on real "
        "inputs alone: --sample FILE --sample-only"
    )


def test_one_input_for_which_nothing_fits_is_named_with_what_was_tried() -> None:
    with pytest.raises(ModelError) as caught:
        _find(OnlyZero(), "kind:int64[batch,words=2..7]")
    assert str(caught.value) == (
        'the model takes no range of integers that was tried as input "kind" (0..999, 0..255, '
        "0..99, <words, <batch, 0..9, 0..1, 1..1000 and 6 more): ValueError: unknown kind; say "
        "which it takes, as in --input 'kind:int64[batch=1..8,words=2..7]=0..999', or compare on "
        "real inputs alone: --sample FILE --sample-only"
    )
