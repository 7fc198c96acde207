"""What is the same answer, and by what its numbers are measured."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from modelyard.base.answers import (
    ENOUGH,
    Scales,
    compare_numbers,
    differences,
    is_top_k,
    json_difference,
    pair_up,
)


@pytest.mark.parametrize(
    ("got", "expected", "difference"),
    [
        pytest.param([1000.05, -0.0], [1000.0, 0.0], None, id="within"),
        pytest.param(
            [1e6, 0.9], [1e6, 0.1], "answer[1]: expected 0.1, got 0.9", id="beside a large number"
        ),
        pytest.param(
            [[1e6], [0.9]], [[1e6], [0.1]], "answer[1][0]: expected 0.1, got 0.9", id="in its list"
        ),
        pytest.param(
            {"price": 250000.5, "p_fraud": 0.9},
            {"price": 250000.5, "p_fraud": 0.1},
            "answer.p_fraud: expected 0.1, got 0.9",
            id="in its object",
        ),
        pytest.param(
            {"at": 1763918941.12, "score": 0.9},
            {"at": 1763918941.12, "score": 0.1},
            "answer.score: expected 0.1, got 0.9",
            id="beside a time",
        ),
        pytest.param([1e-12], [1.01e-12], "answer[0]: expected 1.01e-12, got 1e-12", id="small"),
        pytest.param(
            {"a": [900.0], "b": [0.5]},
            {"a": [900.0], "b": [0.6]},
            "answer.b[0]: expected 0.6, got 0.5",
            id="in a list of an object",
        ),
        pytest.param([30522], [30523], "answer[0]: expected 30523, got 30522", id="whole numbers"),
        pytest.param([1], [1.0], None, id="a whole fraction"),
        pytest.param([1.00001], [1], None, id="nearly a whole number"),
        pytest.param([True], [1], "answer[0]: expected 1, got True", id="a truth value"),
        pytest.param([math.nan, math.inf], [math.nan, math.inf], None, id="not finite"),
        pytest.param([math.nan], [0.0], "answer[0]: expected 0.0, got nan", id="not a number"),
        pytest.param("7", 7, "answer: expected 7, got '7'", id="text"),
        pytest.param([1.0], [1.0, 2.0], "answer: expected [1.0, 2.0], got [1.0]", id="length"),
        pytest.param(
            {"a[]": 0.5, "a": [0.5]},
            {"a[]": 0.5, "a": [0.6]},
            "answer.a[0]: expected 0.6, got 0.5",
            id="a key that reads like a list",
        ),
    ],
)
def test_answers_are_compared_as_tensors_are(
    got: Any, expected: Any, difference: str | None
) -> None:
    assert json_difference(got, expected, 1e-4) == difference


@pytest.mark.parametrize(
    ("got", "expected", "moves", "is_same"),
    [
        pytest.param(100.05, 100.0, 0.1, True, id="less than it moves"),
        pytest.param(100.2, 100.0, 0.1, False, id="more than it moves"),
        pytest.param(101.0, 100.0, 0.0, False, id="of what never moves"),
        pytest.param(101.0, 100.0, -5.0, False, id="moves that are no size"),
        pytest.param(0.0105, 0.01, 0.1, True, id="a tenth at most, within"),
        pytest.param(0.02, 0.01, 0.1, False, id="a tenth at most, over"),
        pytest.param(0.0, 0.0, 0.0, True, id="nothing"),
    ],
)
def test_a_number_may_move_as_far_as_is_recorded_and_a_tenth_at_most(
    got: float, expected: float, moves: float, is_same: bool
) -> None:
    difference = json_difference([got], [expected], 1e-6, {"[]": [moves]})
    assert (difference is None) is is_same
    other_sizes = json_difference([got], [expected], 1e-6, {"[]": [moves, moves]})
    assert (other_sizes is None) is (got == expected)  # recorded of another answer


def test_a_scale_is_known_from_enough_answers_on() -> None:
    scales = Scales()
    for at in range(ENOUGH):
        assert scales.answers == at and scales.of("[]", np.zeros(2)) is None
        scales.see([float(at), 2.0 * at])
    scale = scales.of("[]", np.zeros(2))
    assert scale is not None and scale.centre.tolist() == [3.5, 7.0]
    assert scales.of("[]", np.zeros(3)) is None and scales.of("", np.zeros(())) is None


def test_the_worst_number_is_named_and_without_a_difference_none_is() -> None:
    live = {"a": [1.0, 2.0], "b": 5.0}
    same = compare_numbers(pair_up(live, live)[1])
    assert (same.scaled, same.worst, same.error) == (0.0, None, 0.0)
    apart = compare_numbers(pair_up(live, {"a": [1.0, 2.5], "b": 5.1})[1])
    assert apart.scaled == 0.25 and apart.error == pytest.approx(0.25 / math.sqrt(2))
    assert str(apart.worst) == "answer.a[1]: expected 2.0, got 2.5"


def test_what_is_not_finite_differs_from_all_but_itself() -> None:
    values = np.array([1.0, math.nan, math.inf, -math.inf])
    apart = differences(values[:, None], values[None, :])
    assert (apart == np.where(np.eye(4), 0.0, math.inf)).all()


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        ({"a": 0.9, "b": 0.1}, True),
        ({"a": 0.5, "b": 0.5}, True),
        ({"a": 1.0, "b": 0}, True),
        ({"a": 0.9}, False),
        ({"a": 0.1, "b": 0.9}, False),
        ({"a": 1, "b": 0}, False),
        ({"a": 1.5, "b": 0.1}, False),
        ({"a": 0.9, "b": -0.1}, False),
        ({"a": 0.9, "b": True}, False),
        ({}, False),
    ],
    ids=str,
)
def test_a_classification_is_shares_of_labels_the_largest_first(
    value: dict[str, Any], is_one: bool
) -> None:
    assert is_top_k(value) is is_one
