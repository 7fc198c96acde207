"""The rule of agreement, at every scale, without an export."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from modelyard.archiver.report import Parity
from modelyard.base.answers import json_difference
from modelyard.handlers.proof.agree import (
    TOLERANCES,
    Rule,
    allowance,
    compare,
    disagreement,
    joint_rules,
    rule_for,
    summary,
)

SCALES = [10.0**power for power in range(-6, 7)]


def rows(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(50, 10, generator=torch.Generator().manual_seed(seed)).double() * scale


def agrees(rule: Rule, expected: Tensor, found: Tensor) -> bool:
    return rule.agrees(rule.merge([compare(expected, found, rule.tolerance)]))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_copy_may_be_off_by_the_tolerance_of_its_dtype_and_by_no_more(
    dtype: str, scale: float
) -> None:
    rule, expected = rule_for(dtype), rows(0, scale)
    largest = expected.abs().amax(1, keepdim=True).clamp(min=1.0)
    assert agrees(rule, expected, expected + 0.99 * rule.tolerance * largest)
    assert not agrees(rule, expected, expected + 1.01 * rule.tolerance * largest)
    one_row = torch.zeros(50, 1)
    one_row[7] = 1.01 * rule.tolerance
    assert not agrees(rule, expected, expected + one_row * largest)


def test_a_large_row_hides_nothing_of_its_neighbour() -> None:
    expected = torch.tensor([[1e6, 0.0], [1.0, 0.0]])
    assert agrees(Rule(1e-4), expected, expected + torch.tensor([[50.0], [0.0]]))
    assert not agrees(Rule(1e-4), expected, expected + torch.tensor([[0.0], [50.0]]))


@pytest.mark.parametrize("scale", SCALES)
def test_two_that_agree_with_a_checkpoint_agree_with_each_other(scale: float) -> None:
    for seed, (a, b) in enumerate([(1e-4, 1e-4), (3e-2, 3e-2), (1e-2, 1e-4), (0.4, 0.5)]):
        parities = [Parity({"y": a}), Parity({"y": b})]
        (joint,) = joint_rules(*parities).values()
        checkpoint = rows(seed, scale)
        largest = checkpoint.abs().amax(1, keepdim=True).clamp(min=1.0)
        for sign in (1, -1):  # the worst case: apart in opposite directions, the twin smaller
            signs = checkpoint.sign() * sign
            one, other = (checkpoint + signs * t * largest for t in (a * 0.999, -b * 0.999))
            assert agrees(Rule(a), checkpoint, one)
            assert agrees(Rule(b), checkpoint, other)
            assert agrees(joint, other, one)
            assert not agrees(joint, other, one + 3 * signs * (a + b) * largest)


@pytest.mark.parametrize("scale", SCALES)
def test_eight_bits_keep_the_largest_value_and_the_direction(scale: float) -> None:
    rule, expected = Rule(1e-4, is_quantized=True), rows(3, scale)
    assert agrees(rule, expected, expected * 1.2)
    assert not agrees(rule, expected, -expected)
    assert not agrees(rule, expected, expected + rows(4, scale))


def test_of_two_largest_values_that_tie_either_is_right() -> None:
    rule = Rule(1e-4, is_quantized=True)
    tied, moved = torch.tensor([[5.0, 5.0001, 0.0]]), torch.tensor([[5.01, 5.0, 0.0]])
    assert agrees(rule, tied, moved)
    assert not agrees(rule, torch.tensor([[5.0, 5.1, 0.0]]), moved)


def test_two_that_approximate_are_judged_as_the_checkpoint_judged_them() -> None:
    """Rows that moved between artifact and twin have moved between artifact and checkpoint."""
    (joint,) = joint_rules(Parity({"y": 1e-4}, is_quantized=True), Parity({"y": 1e-4})).values()
    assert joint.is_quantized
    for seed in range(20):
        checkpoint = rows(seed, 1e-3)  # where many rows tie
        found = checkpoint + rows(seed + 100, 1e-4)
        twin = checkpoint + rows(seed + 200).clamp(-1, 1) * 1e-4
        certified = compare(checkpoint, found, 1e-4)["same"]
        assert compare(twin, found, joint.tolerance)["same"] >= certified


def test_integers_are_equal_at_every_size() -> None:
    rule = rule_for("int64", tolerance=10.0)
    large = torch.tensor([2**60, 5])
    assert agrees(rule, large, large.clone())
    assert not agrees(rule, large, large + torch.tensor([1, 0]))
    assert not agrees(rule_for("bool"), torch.tensor([True]), torch.tensor([False]))


def test_values_that_are_not_finite_are_the_same() -> None:
    expected = torch.tensor([[math.nan, 1.0], [math.inf, -math.inf]])
    assert agrees(Rule(1e-4), expected, expected.clone())
    for other in (1.0, math.inf, -math.inf):
        assert not agrees(Rule(1.0), expected, expected.nan_to_num(nan=other))
    assert not agrees(Rule(1.0), torch.zeros(1), torch.full((1,), math.nan))


def test_another_shape_differs_in_every_measure() -> None:
    for rule in (Rule(1e9), Rule(1e9, is_quantized=True)):
        assert not agrees(rule, torch.zeros(2, 3), torch.zeros(2, 4))


def test_no_rows_agree() -> None:
    assert agrees(Rule(1e-4), torch.zeros(0, 3), torch.zeros(0, 3))


def test_a_disagreement_says_by_how_much_and_where() -> None:
    rule = Rule(1e-4)
    measured = [compare(torch.ones(1, 2) * x, torch.ones(1, 2) * y) for x, y in [(1, 1), (4, 5)]]
    assert disagreement("y", rule, measured, ["here", "there"]) == (
        'output "y": max_abs 1.0e+00 (2.5e-01 scaled to values up to 4) over tolerance 0.0001 at '
        "there"
    )
    assert disagreement("y", Rule(0.3), measured, ["here", "there"]) is None
    assert summary({"y": Rule(0.3)}, {"y": measured}) == (
        "max_abs 1.0e+00 (2.5e-01 scaled), tolerance 0.3"
    )


@pytest.mark.parametrize(
    ("got", "expected", "difference"),
    [
        pytest.param([1000.05, 0.01], [1000.0, 0.0], None, id="a list is a row"),
        pytest.param([[1000.0], [0.05]], [[1000.0], [0.0]], None, id="with its lists"),
        pytest.param([1.0, 0.05], [1.0, 0.0], "answer[1]: expected 0.0, got 0.05", id="too far"),
        pytest.param({"a": 900.05, "b": 0.5}, {"a": 900.0, "b": 0.51}, None, id="an object too"),
        pytest.param(
            {"a": [900.0], "b": [0.5]},
            {"a": [900.0], "b": [0.6]},
            "answer.b[0]: expected 0.6, got 0.5",
            id="its lists are not",
        ),
        pytest.param([30522], [30523], "answer[0]: expected 30523, got 30522", id="whole numbers"),
        pytest.param([1], [1.0], None, id="a whole fraction"),
        pytest.param([True], [1], "answer[0]: expected 1, got True", id="a truth value"),
        pytest.param([math.nan, math.inf], [math.nan, math.inf], None, id="not finite"),
        pytest.param([math.nan], [0.0], "answer[0]: expected 0.0, got nan", id="not a number"),
        pytest.param("7", 7, "answer: expected 7, got '7'", id="text"),
        pytest.param([1.0], [1.0, 2.0], "answer: expected [1.0, 2.0], got [1.0]", id="length"),
    ],
)
def test_answers_are_compared_as_tensors_are(
    got: Any, expected: Any, difference: str | None
) -> None:
    assert json_difference(got, expected, 1e-4) == difference


@pytest.mark.parametrize(
    ("kind", "moved", "allowed"),
    [
        ("random", 5e-5, None),
        ("random", 1e-4, None),
        ("random", 2e-4, 8e-4),
        ("random", 0.5, 1e-3),
        ("sample", 0.5, 1e-3),
        ("zeros", 0.5, 2.0),
        ("zeros", math.inf, None),
    ],
)
def test_an_ill_conditioned_case_is_allowed_ten_tolerances_at_most_on_ordinary_values(
    kind: str, moved: float, allowed: float | None
) -> None:
    found = allowance(Rule(1e-4), kind, moved)
    assert found == (None if allowed is None else pytest.approx(allowed))
    assert allowance(Rule(1e-4, is_quantized=True), kind, moved) is None
