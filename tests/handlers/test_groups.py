"""Several values as one feature: columns of a category, words of several tokens, windows."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from modelyard.handlers.explain.attribute.attribution import (
    Attribution,
    AttributionRequest,
    ForwardFunction,
    sums_of,
)
from modelyard.handlers.explain.attribute.methods import METHODS
from tests.shared import FURTHER

GROUP = torch.tensor([0, 1, 1, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9, 9])
"""Ten features of sixteen values."""
SHAPES = ((1,),)
WEIGHTS = torch.linspace(-2, 3, 16, dtype=torch.float64)
ONES, ZEROS = torch.ones(1, 16, dtype=torch.float64), torch.zeros(1, 16, dtype=torch.float64)


def function(x: Tensor) -> Tensor:
    """A sum, products of two to four values and a kink, so that sets of every size matter."""
    products = x[:, 1] * x[:, 5] * x[:, 9] * x[:, 13] + 2 * x[:, 2] * x[:, 7]
    return (x @ WEIGHTS).tanh() + products + (x[:, 12] + x[:, 15] - 1).relu()


def request(rows: int = 8) -> AttributionRequest:
    return AttributionRequest(
        ForwardFunction(function, torch.tensor([0])),
        (ONES,),
        ((ZEROS,),),
        function(ONES),
        function(ZEROS),
        chunk_rows=rows,
    )


def run(method: str, **settings: object) -> Attribution:
    return METHODS[method].run(request(), shapes=SHAPES, groups=[GROUP], **settings)


def by_group(values: Tensor) -> Tensor:
    return torch.zeros(10, dtype=torch.float64).index_add_(0, GROUP, values.double())


@pytest.fixture(scope="module")
def shapley() -> Tensor:
    """By definition: the mean over who came before, of what each group adds."""
    sets = torch.tensor(list(itertools.product([0.0, 1.0], repeat=10))).double()
    worth = function(sets[:, GROUP])
    place = 2 ** torch.arange(9, -1, -1)
    values = []
    for player in range(10):
        without = sets[sets[:, player] == 0]
        at = (without.long() * place).sum(1)
        weight = torch.tensor(
            [1 / (10 * math.comb(9, int(size))) for size in without.sum(1)], dtype=torch.float64
        )
        values.append((weight * (worth[at + place[player]] - worth[at])).sum())
    return torch.stack(values)


@FURTHER
def test_all_sets_of_ten_groups_are_exact(shapley: Tensor) -> None:
    found = run("kernel_shap", n_samples=1024)
    assert torch.allclose(by_group(found.attributions[0][0]), shapley, rtol=0, atol=1e-12)
    assert found.n_steps.tolist() == [1022]
    assert found.error is not None
    assert float(found.error) == 0.0
    # What a group has is shared evenly among its values.
    assert len(set(found.attributions[0][0][13:].tolist())) == 1
    assert float(sums_of(found.attributions)) == pytest.approx(float(shapley.sum()))


@pytest.mark.parametrize("n_samples", [60, 300])
@FURTHER
def test_fewer_sets_of_groups_are_within_their_standard_error(
    shapley: Tensor, n_samples: int
) -> None:
    apart, errors = [], []
    for seed in range(30):
        found = run("kernel_shap", n_samples=n_samples, seed=seed)
        assert found.errors is not None
        apart.append(by_group(found.attributions[0][0]) - shapley)
        errors.append(by_group(found.errors[0][0]))
    share = (torch.stack(apart).abs() / torch.stack(errors)).flatten()
    assert 0.5 < float((share < 1).double().mean()) < 0.93
    assert float((share < 2).double().mean()) > 0.85


@pytest.mark.parametrize("method", ["feature_ablation", "occlusion"])
def test_a_group_is_replaced_as_a_whole(method: str) -> None:
    found = run(method)
    falls = []
    for group in range(10):
        without = ONES.clone()
        without[0, group == GROUP] = 0
        falls.append(function(ONES) - function(without))
    expected = torch.cat(falls)
    assert torch.allclose(by_group(found.attributions[0][0]), expected)
    assert found.n_steps.tolist() == [10]
    assert found.total is not None
    assert float(found.total) == pytest.approx(float(expected.sum()))


def test_a_window_of_groups_moves_by_groups() -> None:
    """Each group has the mean fall of the windows that hold it."""
    found = METHODS["occlusion"].run(request(), shapes=((4,),), groups=[GROUP], stride=3)
    falls = []
    for begin in (0, 3, 6):
        without = ONES.clone()
        without[0, (begin <= GROUP) & (begin + 4 > GROUP)] = 0
        falls.append(float(function(ONES) - function(without)))
    first, second, third = falls
    middle, last = (first + second) / 2, (second + third) / 2
    expected = [first] * 3 + [middle] + [second] * 2 + [last] + [third] * 3
    assert by_group(found.attributions[0][0]).tolist() == pytest.approx(expected)
