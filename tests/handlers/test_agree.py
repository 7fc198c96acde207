"""The rule of agreement, at every scale, without an export."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from modelyard.archiver.report import TOLERANCES, Parity, joint_tolerance
from modelyard.base.scale import Scale
from modelyard.handlers.proof.agree import (
    OutputScales,
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


def learnt(seed: int, scale: float = 1.0, offset: float = 0.0) -> tuple[Scale, Tensor]:
    """Return the scale of numbers of a spread and centre, and some more of them."""
    scales = OutputScales()
    for case in range(20):
        scales.see("random", [rows(100 * seed + case, scale)[: 3 + case] + offset])
    return scales.of()[0], rows(seed, scale) + offset


def agrees(rule: Rule, expected: Tensor, found: Tensor, scale: Scale | None = None) -> bool:
    return rule.agrees(rule.merge([compare(expected, found, rule.tolerance, scale)]))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_copy_may_be_off_by_the_tolerance_of_its_dtype_and_by_no_more(
    dtype: str, scale: float
) -> None:
    rule, (learned, expected) = rule_for(dtype), learnt(0, scale)
    units = torch.from_numpy(learned.units(expected.numpy()))
    assert agrees(rule, expected, expected + 0.99 * rule.tolerance * units, learned)
    assert not agrees(rule, expected, expected + 1.01 * rule.tolerance * units, learned)
    one = torch.zeros(50, 10)
    one[7, 3] = 1.01 * rule.tolerance
    assert not agrees(rule, expected, expected + one * units, learned)


@pytest.mark.parametrize("scale", [10.0**power for power in range(-12, 13, 3)])
@pytest.mark.parametrize("offset", [0.0, 100.0], ids=["around zero", "far from zero"])
def test_neither_a_gain_nor_an_offset_hides_a_wrong_copy(scale: float, offset: float) -> None:
    learned, expected = learnt(1, scale, offset * scale)
    honest = expected.float().double()
    middle = learned.centre.mean()
    wrongs = {
        "zero": expected * 0,
        "the mean": torch.full_like(expected, float(middle)),
        "1 % more": middle + (expected - middle) * 1.01,
        "two places exchanged": expected[:, [1, 0, *range(2, 10)]],
        "two rows exchanged": expected[[1, 0, *range(2, 50)]],
    }
    assert agrees(Rule(1e-4), expected, honest, learned)
    missed = [
        name for name, wrong in wrongs.items() if agrees(Rule(1e-4), expected, wrong, learned)
    ]
    assert missed == []


def _softmax(seed: int, scale: float) -> Tensor:
    logits = torch.randn(6, 50_000, generator=torch.Generator().manual_seed(seed))
    return logits.softmax(-1).double() * scale


def _dead(seed: int, scale: float) -> Tensor:
    return rows(seed, scale) * torch.tensor([1.0] * 9 + [0.0]).double()


OUTPUTS: dict[str, Callable[[int, float], Tensor]] = {
    "around zero": rows,
    "300 and 2": lambda seed, scale: (300 + 2 * rows(seed)) * scale,
    "one dead": _dead,
    "one place": lambda seed, scale: rows(seed, scale)[:, :1],
    "mostly zero": lambda seed, scale: (rows(seed) - 1.5).relu() * scale,
    "nine sizes at once": lambda seed, scale: rows(seed, scale) * 10.0 ** torch.arange(-5, 5),
    "a softmax of 50,000": _softmax,
}
WRONGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "zeros": lambda expected, mean: expected * 0,
    "the mean of each place": lambda expected, mean: mean.expand_as(expected),
    "the mean of all": lambda expected, mean: torch.full_like(expected, float(mean.mean())),
    "ones": lambda expected, mean: torch.ones_like(expected),
    "1 % more": lambda expected, mean: mean + (expected - mean) * 1.01,
    "rows exchanged": lambda expected, mean: expected.roll(1, 0),
    "one row of zeros": lambda expected, mean: torch.cat([expected[:1] * 0, expected[1:]]),
    "NaN": lambda expected, mean: torch.cat([expected[:1] * math.nan, expected[1:]]),
    "infinity": lambda expected, mean: torch.cat([expected[:1] + math.inf, expected[1:]]),
    "bfloat16": lambda expected, mean: expected.bfloat16().double(),
}


@pytest.mark.parametrize("scale", [10.0**power for power in range(-12, 13, 6)])
@pytest.mark.parametrize("name", OUTPUTS)
def test_of_outputs_of_every_size_a_constant_is_refused_and_noise_is_not(
    name: str, scale: float
) -> None:
    scales, draw = OutputScales(), OUTPUTS[name]
    cases = [draw(seed, scale) for seed in range(4)]
    for case in cases:
        scales.see("random", [case])
    (learned,), mean, expected = scales.of(), torch.cat(cases).mean(0, keepdim=True), cases[-1]
    rule = Rule(1e-4)
    missed = [
        wrong
        for wrong, made in WRONGS.items()
        if agrees(rule, expected, made(expected, mean), learned)
    ]
    assert missed == []
    noise = 1 + 3e-7 * torch.randn(expected.shape, generator=torch.Generator().manual_seed(9))
    assert agrees(rule, expected, expected * noise, learned)
    assert agrees(rule, expected, expected.float().double(), learned)


@pytest.mark.parametrize("other", [1, -1, 2**40])
def test_one_integer_that_is_off_is_refused(other: int) -> None:
    expected = torch.arange(-500, 500).reshape(100, 10) * 2**33
    rule, wrong = rule_for("int64"), expected.clone()
    wrong[7, 3] += other
    assert agrees(rule, expected, expected.clone()) and not agrees(rule, expected, wrong)


def test_a_large_number_hides_nothing_of_its_neighbours() -> None:
    columns = torch.tensor([1e6, 1.0, 1e-6] + [1.0] * 7).double()
    scales = OutputScales()
    for case in range(10):
        scales.see("random", [rows(case)[: 2 + case] * columns])
    (learned,), expected = scales.of(), rows(50) * columns
    assert agrees(Rule(1e-4), expected, expected.float().double(), learned)
    for place in range(10):
        wrong = expected.clone()
        wrong[:, place] *= 1.01
        assert not agrees(Rule(1e-4), expected, wrong, learned)


@pytest.mark.parametrize("scale", SCALES)
def test_two_that_agree_with_a_checkpoint_agree_with_each_other(scale: float) -> None:
    for seed, (a, b) in enumerate([(1e-4, 1e-4), (3e-2, 3e-2), (1e-2, 1e-4)]):
        (joint,) = joint_rules(Parity({"y": a}), Parity({"y": b})).values()
        learned, checkpoint = learnt(seed, scale)
        units = torch.from_numpy(learned.units(checkpoint.numpy()))
        for sign in (1, -1):  # the worst case: apart in opposite directions
            signs = (checkpoint - torch.from_numpy(learned.centre)).sign() * sign
            one, other = (checkpoint + signs * t * units for t in (a * 0.999, -b * 0.999))
            assert agrees(Rule(a), checkpoint, one, learned)
            assert agrees(Rule(b), checkpoint, other, learned)
            assert agrees(joint, other, one, learned)
            assert not agrees(joint, other, one + 3 * signs * (a + b) * units, learned)


@pytest.mark.parametrize("scale", SCALES)
def test_eight_bits_keep_the_largest_value_and_every_size(scale: float) -> None:
    rule, (learned, expected) = Rule(1e-4, is_quantized=True), learnt(3, scale)
    assert agrees(rule, expected, expected * 1.1, learned)
    for wrong in (-expected, expected + rows(4, scale), expected * 1.4, expected * 10):
        assert not agrees(rule, expected, wrong, learned)


def test_eight_bits_are_held_to_what_their_report_measured() -> None:
    learned, expected = learnt(5)
    off = expected * (1 + 0.02 * rows(6))
    measured = compare(expected, off, 1e-4, learned)["error"]
    reports = [
        Parity({"y": 1e-4}, is_quantized=True, errors={"y": measured}),
        Parity({"y": 1e-4}, errors={"y": 1e-7}),
    ]
    (joint,) = joint_rules(*reports).values()
    assert joint.max_error == pytest.approx(2 * measured, rel=1e-3)
    error = compare(expected, expected + 3 * (off - expected), 1e-4, learned)["error"]
    assert joint.max_error < error < Rule(1e-4, is_quantized=True).max_error


def test_of_two_largest_values_that_tie_either_is_right() -> None:
    rule = Rule(1e-4, is_quantized=True)
    tied, moved = torch.tensor([[5.0, 5.0001, 0.0]]), torch.tensor([[5.01, 5.0, 0.0]])
    assert agrees(rule, tied, moved)
    assert not agrees(rule, torch.tensor([[5.0, 5.1, 0.0]]), moved)


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


@pytest.mark.parametrize(
    ("expected", "found", "measured"),
    [
        pytest.param(
            [0.5, -0.25], [0.6, -0.25],
            {"max_abs": 0.1, "largest": 0.5, "max_rel": 0.2, "rows": 0, "same": 0, "margin": 0},
            id="a row, which has no rank",
        ),
        pytest.param(
            [[math.nan, 0.5]], [[math.nan, 0.5]],
            {"max_abs": 0, "largest": 0.5, "max_rel": 0, "rows": 1, "same": 1, "margin": 0},
            id="the same, not all finite",
        ),
        pytest.param(
            [[5.0, 4.0], [1.0, 2.0]], [[4.0, 5.0], [1.0, 2.0]],
            {"max_abs": 1, "largest": 5, "max_rel": 0.2, "rows": 2, "same": 1, "margin": 1},
            id="a largest value that moved",
        ),
        pytest.param(
            [[5.0, 5.0, 1.0]], [[4.0, 5.0, 1.0]],
            {"max_abs": 1, "rows": 1, "same": 1, "margin": 0},
            id="two largest that tie",
        ),
        pytest.param(
            [[0.0], [0.0]], [[0.0], [0.5]],
            {"max_abs": 0.5, "largest": 0, "max_rel": 0.5, "rows": 0, "same": 0, "margin": 0},
            id="zeros, a column",
        ),
    ],
)  # fmt: skip
def test_what_is_measured(
    expected: list[Any], found: list[Any], measured: dict[str, float]
) -> None:
    result = compare(torch.tensor(expected), torch.tensor(found))
    assert {name: result[name] for name in measured} == pytest.approx(measured)


def test_another_shape_differs_in_every_measure() -> None:
    measured = compare(torch.zeros(2, 3), torch.zeros(2, 4))
    assert (measured.pop("rows"), measured.pop("same")) == (1, 0)
    assert set(measured.values()) == {math.inf}
    for rule in (Rule(1e9), Rule(1e9, is_quantized=True)):
        assert not agrees(rule, torch.zeros(2, 3), torch.zeros(2, 4))


def test_no_rows_agree() -> None:
    assert agrees(Rule(1e-4), torch.zeros(0, 3), torch.zeros(0, 3))
    assert set(compare(torch.zeros(0, 3), torch.zeros(0, 3)).values()) == {0}


def test_eight_bits_without_ranks_are_judged_by_their_error() -> None:
    rule, values = Rule(1e-4, is_quantized=True), torch.tensor([1.0, 2.0, 3.0])
    assert agrees(rule, values, values * 1.01)
    assert not agrees(rule, values, -values)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_wider_dtype_is_judged_by_what_the_model_computes_in(dtype: str) -> None:
    judged_as = "float32" if dtype == "float64" else dtype
    assert rule_for(dtype).tolerance == TOLERANCES[judged_as]
    assert rule_for(dtype, is_double=True).tolerance == TOLERANCES[dtype]
    assert rule_for(dtype, tolerance=0.5).tolerance == 0.5


def test_a_case_that_is_ill_conditioned_for_one_of_two_is_so_for_both() -> None:
    one = Parity({"y": 1e-4, "z": 1e-4}, allowed={"y": {"case 1": 0.02, "case 2": 0.3}})
    other = Parity({"a": 1e-4, "b": 1e-4}, allowed={"a": {"case 2": 0.1, "case 3": 1.5}})
    joint = joint_rules(one, other)
    assert joint["y"].allowed == {
        "case 1": joint_tolerance(0.02, 0.02), "case 2": joint_tolerance(0.3, 0.3),
        "case 3": math.inf,
    }  # fmt: skip
    assert joint["z"].allowed == {}


def test_a_disagreement_says_by_how_much_and_where() -> None:
    rule = Rule(1e-4)
    measured = [compare(torch.ones(1, 2) * x, torch.ones(1, 2) * y) for x, y in [(1, 1), (4, 5)]]
    assert disagreement("y", rule, measured, ["here", "there"]) == (
        'output "y": max_abs 1.0e+00 (2.5e-01 scaled, values up to 4) over tolerance 0.0001 at '
        "there"
    )
    assert disagreement("y", Rule(0.3), measured, ["here", "there"]) is None
    assert summary({"y": Rule(0.3)}, {"y": measured}) == (
        "max_abs 1.0e+00 (2.5e-01 scaled), tolerance 0.3"
    )


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
