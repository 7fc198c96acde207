"""Numbers that are probabilities already: seen by what a model gives, or asked for."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from modelyard.archiver.signature import parse_inputs
from modelyard.handlers.base import Classifier
from modelyard.handlers.proof.bounds import Bounds
from modelyard.handlers.proof.doubt import doubt

ROWS = torch.linspace(-3, 3, 24).reshape(8, 3)
WEIGHTS = torch.tensor([[1.0, -2.0], [0.5, 1.0], [-1.0, 0.0]])


def handler(model: Callable[[Tensor], Tensor], **attributes: Any) -> Classifier:
    """Return what `doubt` reads of a handler."""
    stated = {"knows_kind": False, "output_kind": "logits", "report": None, "inputs": ()}
    made = types.SimpleNamespace(inference=model, **(stated | attributes))
    return cast("Classifier", made)


def softmax(rows: Tensor) -> Tensor:
    return (rows @ WEIGHTS).softmax(1)


def sigmoid(rows: Tensor) -> Tensor:
    return (rows @ WEIGHTS).sigmoid()


def logits(rows: Tensor) -> Tensor:
    return rows @ WEIGHTS


INPUTS = parse_inputs(["x:float32[batch,3]"]).inputs


@pytest.mark.parametrize("seen", [[ROWS[:1]], []], ids=["an example", "made up"])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (softmax, "numbers between 0 and 1 that add up to 1 whatever it reads"),
        (sigmoid, "numbers between 0 and 1 whatever it reads"),
        (logits, None),
    ],
)
def test_a_last_step_is_seen_by_what_it_gives(
    model: Callable[[Tensor], Tensor], said: str | None, seen: Sequence[Tensor]
) -> None:
    found = doubt(handler(model, inputs=INPUTS), seen)
    assert said in found if said and found else found is said


def test_an_artifact_that_states_nothing_is_asked_about() -> None:
    found = doubt(handler(softmax), [])
    assert found is not None
    assert found.startswith("nothing says whether the model's numbers are logits")
    # Token ids do not vary by themselves, and one row is one row.
    ids = torch.tensor([[1, 2, 3]])
    assert doubt(handler(lambda rows: softmax(rows.float())), [ids]) == found


def test_an_archive_that_says_it_is_believed() -> None:
    assert doubt(handler(softmax, knows_kind=True), [ROWS]) is None
    assert doubt(handler(softmax, output_kind="values"), [ROWS]) is None


def test_what_is_not_finite_or_of_another_shape_says_nothing() -> None:
    bounds = Bounds()
    bounds.see(torch.full((9, 2), torch.nan))
    assert not bounds.is_enough and not bounds.are_others
    bounds.see(torch.rand(9, 2, 2))
    assert bounds.are_others
    same = Bounds()
    same.see(torch.full((9, 2), 0.5))  # of weights that are all zero
    assert not same.is_enough
