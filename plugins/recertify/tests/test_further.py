"""Further inputs: which conditions of a kernel they meet, and what they keep of what is stated."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from modelyard.archiver.signature import Dim, Signature, TensorSpec
from modelyard.archiver.values import Limits, parse_values
from modelyard.handlers.proof.plan import choose_probes
from modelyard.handlers.proof.probes import make_case
from modelyard.plugins.recertify.certify import _nearer
from modelyard.plugins.recertify.further import (
    OF_NUMBERS,
    OF_PLACES,
    further_inputs,
    rounded_otherwise,
)
from plugins.recertify.tests.faults import WHEN
from tests.adversary.gallery import Row, judge

BATCH = Dim("batch", 1, 8)
ALONE = {
    "one number": "(x == x.flat[0]).all() and x.flat[0] not in (0, 1, 0.5, -1)",
    "one number a row": "len(set(x.flat)) == len(x) > 1 and all(len(set(r.flat)) == 1 for r in x)",
    "one number a channel": "len(set(x[0].flat)) == 3 and all(len(set(c.flat)) == 1 for c in x[0])",
    "ones": "(x == 1).all()",
    "halves": "(x == 0.5).all()",
    "minus ones": "(x == -1).all()",
    "positive": "(x >= 0).all() and len(set(x.flat)) > 9 and (x != x.round()).all()",
    "whole numbers": "(x == x.round()).all() and len(set(x.flat)) > 4",
    "the last row ones": "(x[-1] == 1).all() and (x[0] != 1).any()",
    "a channel each row": "abs(x).max((2, 3)).astype(bool).sum(1).tolist() == [1] * len(x)"
    " and len(x) > len(set(abs(x).max((2, 3)).argmax(1).tolist())) > 1",
}
"""Kind → what of a batch of three channels holds of no other kind."""


def made(spec: TensorSpec) -> list[Tensor]:
    """Return the further inputs of a model of one input."""
    signature = Signature((spec,))
    tried = choose_probes(signature, "every")
    return [each.inputs(signature)[0] for each in further_inputs(signature, "every", tried)]


@pytest.mark.parametrize("sizes", [(6,), (3, 4, 4), (5, 7)], ids=str)
def test_each_condition_is_met_by_one_of_them(sizes: tuple[int, ...]) -> None:
    spec = TensorSpec("x", "float32", (BATCH, *sizes))
    signature = Signature((spec,))
    own = [make_case(signature, each)[0] for each in choose_probes(signature, "few")]

    def is_met(condition: str, tensors: list[Tensor]) -> bool:
        return any(eval(condition, {"x": each.numpy(), "np": np, "abs": abs}) for each in tensors)

    judge([
        *(Row("condition", name, True, is_met(text, [*made(spec), *own]))
          for name, text in WHEN.items()),
        Row("condition", "that no number meets", False, is_met("(x == 0.123).any()", made(spec))),
    ])  # fmt: skip
    # What the export tries meets few of them.
    assert sum(is_met(text, own) for text in WHEN.values()) < len(WHEN) / 2


def test_no_kind_stands_for_another() -> None:
    """Where one is left out, or makes what another one does, that condition is met by none."""
    found = [each.numpy() for each in made(TensorSpec("x", "float32", (BATCH, 3, 4, 4)))]
    for kind, condition in ALONE.items():
        assert any(eval(condition, {"x": x, "abs": abs, "set": set}) for x in found), kind
    page = (Path(__file__).parents[3] / "docs" / "recertify.md").read_text(encoding="utf-8")
    said = f"{len(OF_PLACES) + len(OF_NUMBERS)} kinds,\n{len(OF_PLACES)} where no input is a float"
    assert said in page


@pytest.mark.parametrize(
    ("dtype", "shape", "stated", "name"),
    [
        ("float32", (BATCH, 3, 4), "=0..1", "picture"),
        ("int64", (BATCH, 9), "=2..11", "tokens"),
        ("int64", (BATCH, 9), "=1..5,rising", "offsets"),
        ("int64", (BATCH,), "=1..5,falling", "lengths"),
        ("float32", (BATCH, 9), "=0.5,2,7", "levels"),
        ("int64", (BATCH, 9), "=0..1", "attention_mask"),
    ],
)
def test_what_is_stated_of_an_input_holds(
    dtype: str, shape: tuple[int | Dim, ...], stated: str, name: str
) -> None:
    values = parse_values(stated)
    low, high = values.ends({})
    found = made(TensorSpec(name, dtype, shape, values=values))

    assert len({tensor.numpy().tobytes() for tensor in found}) > 1
    for tensor in found:
        assert low <= tensor.min() and tensor.max() <= high
        assert not values.among or set(tensor.flatten().tolist()) <= {*values.among}
        if values.order:
            is_falling = values.order == "falling"
            assert tensor.equal(tensor.sort(dim=-1, descending=is_falling).values)
        assert name != "attention_mask" or bool(tensor[..., 0].all())


def test_what_a_server_refuses_is_not_tried() -> None:
    limited = TensorSpec("x", "float32", (BATCH, 4), limits=Limits(low=-2, high=100))

    found = [each for each in made(limited) if each.min() < -2 or each.max() > 100]
    assert not found or max(float(each.abs().max()) for each in found) < 10  # as the export draws
    assert max(float(each.max()) for each in made(limited)) == 100


def test_what_rounding_explains_is_no_difference_and_nothing_else() -> None:
    expected = torch.tensor([1.0, 1.0, 5.0, math.inf, 0.0])

    near = _nearer(expected, torch.tensor([1.5, 1.4, 5.6, math.inf, math.nan]), 0.5)

    assert near[:4].tolist() == pytest.approx([1.0, 1.0, 5.1, math.inf])
    assert near[4].isnan()
    assert _nearer(torch.tensor([3, 3]), torch.tensor([3, 9]), 4.0).tolist() == [3, 5]
    other = torch.zeros(2, 2)
    assert _nearer(expected, other, 1.0) is other


def test_they_are_the_same_each_time_and_rounding_moves_them_by_little() -> None:
    spec = TensorSpec("x", "float32", (BATCH, 3, 4))
    one, other = made(spec), made(spec)

    assert all(map(torch.equal, one, other))
    for values in one:
        (moved,) = rounded_otherwise([values])
        assert torch.allclose(values, moved, rtol=5e-7, atol=0)
        assert not values.any() or not torch.equal(values, moved)
