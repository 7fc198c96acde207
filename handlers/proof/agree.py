"""The one rule that says whether outputs agree: of an export, a verification, a twin, an answer.

A copy agrees when |a − b| of every number is within the tolerance times the number's own unit,
which `modelyard.base.scale` learns from what the reference gives for all inputs; integers
are equal, and values that are not finite are the same.

A quantised artifact is not a copy but an approximation: it agrees when the largest value is at the
same place in 99 % of the rows and the error of every case is at most 0.15: the root mean square of
|a − b| over the size that numbers have at that place. Whoever compares it later holds it to the
error that its report measured. Where the two largest values lie within what the tolerance allows,
either is right.

A case in which the checkpoint's own answer moves by more than the tolerance when its sums are
rounded otherwise is ill-conditioned: no two libraries agree there. It is judged by that movement,
which the export measures and the report states for each such case. On ordinary values at most ten
times the tolerance is allowed.

The export's report states the tolerance of each output, which rule was used and those cases;
whoever compares later reads them there.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelyard.archiver.report import TOLERANCES, Parity, joint_tolerance
from modelyard.base.scale import ROUNDING, Numbers, Scale, ScaleLearner, one_place, over
from modelyard.handlers.models.backends import Artifact, as_tuple
from modelyard.handlers.proof.probes import USUAL_KINDS, Probe

MIN_TOP1_AGREEMENT = 0.99
# Values that are compared at a time: some ten copies of them in float64 are made.
_PIECE = 2**20
MAX_ERROR = 0.15
# Where a last place is so large beside the tolerance.
_ROUNDING = {torch.float16: 1.0, torch.bfloat16: 1.0}
# Kernels of 8 bits saturate otherwise on another processor.
_ELSEWHERE = 2.0

# Largest scaled movement of its own that a case may have without being ill-conditioned.
_STEADY = 1e-4
# An artifact may go further than the few movements that were tried.
_ALLOWED_TIMES = 4.0
# Values as a model gets them in use, and how many tolerances they are ever allowed.
ORDINARY_KINDS = ("random", "sample")
_ORDINARY_TIMES = 10.0

ILL_CONDITIONED_RULE = (
    f"{_ALLOWED_TIMES:g} times what the checkpoint's own output moves when its sums are rounded "
    f"otherwise, where that is over the tolerance and {_STEADY:g}; for ordinary values at most "
    f"{_ORDINARY_TIMES:g} times the tolerance"
)
SCALED_RULE = (
    "|a-b| <= tolerance * (max(spread, |b-centre|) + 0.02 |b|) for every number, spread and centre "
    "of its place over all inputs"
)
QUANTIZED_RULE = (
    f"top-1 agreement >= {MIN_TOP1_AGREEMENT} over all rows and an error <= {MAX_ERROR} in every "
    "case: quantised weights approximate"
)


@dataclass(frozen=True)
class Difference:
    """How far one output is from what it is compared with, over one or more cases."""

    max_abs: float
    """Largest absolute difference of one value."""
    max_rel: float
    """Largest ratio, over the cases, of the absolute difference to the largest value."""
    scaled: float
    """Largest difference of a number over its unit."""
    error: float
    """Largest error, over the cases: the root mean square of differences over the sizes there."""
    top1_agreement: float | None
    """Share of rows whose largest value is at the same place, or is a tie; None without ranks."""
    top1_margin: float | None
    """Largest lead of a row whose largest value moved."""
    tolerance: float
    """Largest `scaled` that agrees."""


@dataclass(frozen=True)
class Rule:
    """How far one output may be from what it is compared with."""

    tolerance: float
    is_quantized: bool = False
    allowed: Mapping[str, float] = field(default_factory=dict)
    """Ill-conditioned case, as messages name it → the largest scaled difference that agrees."""
    max_error: float = MAX_ERROR
    """Largest error of a case that agrees, where quantised weights approximate."""
    scale: Scale | None = None
    """What numbers are measured by, where a report says it."""

    def agrees(self, found: Difference) -> bool:
        """Judge what was measured."""
        if not self.is_quantized:
            return found.scaled <= self.tolerance
        agreement = 1.0 if found.top1_agreement is None else found.top1_agreement
        return agreement >= MIN_TOP1_AGREEMENT and found.error <= self.max_error

    def wrong(self, measured: Sequence[Mapping[str, Any]], cases: Sequence[object]) -> list[int]:
        """Return the places of the cases in which a copy differs by more than is allowed."""
        largest = sys.float_info.max  # what is not finite in one of the two only is never right
        return [
            place
            for place, (found, case) in enumerate(zip(measured, cases, strict=True))
            if not found["scaled"] <= min(self.allowed.get(str(case), self.tolerance), largest)
        ]

    def merge(
        self, measured: Sequence[Mapping[str, Any]], cases: Sequence[object] = ()
    ) -> Difference:
        """Gather what `compare` measured, case by case; of those that the tolerance judges.

        Args:
            measured: one for each case.
            cases: cases as messages name them; may be absent where none is ill-conditioned.
        """
        ill = [str(case) in self.allowed for case in cases] or [False] * len(measured)
        if not all(ill):
            measured = [found for found, is_ill in zip(measured, ill, strict=True) if not is_ill]
        rows = sum(case["rows"] for case in measured)
        names = ("max_abs", "max_rel", "scaled", "error")
        return Difference(
            **{name: max(case[name] for case in measured) for name in names},
            top1_agreement=sum(case["same"] for case in measured) / rows if rows else None,
            top1_margin=max(case["margin"] for case in measured) if rows else None,
            tolerance=self.tolerance,
        )


def rule_for(
    dtype: str,
    tolerance: float | None = None,
    is_quantized: bool = False,
    is_double: bool = False,
) -> Rule:
    """Return the rule of an export.

    Args:
        dtype: dtype of the output.
        tolerance: replaces that of floats.
        is_quantized: judge as an approximation.
        is_double: the model computes in float64 alone; else a float64 output may be a float32
            number in a wider dtype, and is judged as one.
    """
    if dtype not in TOLERANCES:
        return Rule(0.0, is_quantized)
    if dtype == "float64" and not is_double:
        dtype = "float32"
    return Rule(TOLERANCES[dtype] if tolerance is None else tolerance, is_quantized)


def allowance(rule: Rule, kind: str, moved: float) -> float | None:
    """Return what an ill-conditioned case is allowed; None for one that the tolerance judges.

    Args:
        rule: rule of one output.
        kind: kind of the case's values.
        moved: how far the checkpoint's own output moved.
    """
    if rule.is_quantized or not max(rule.tolerance, _STEADY) < moved < math.inf:
        return None
    allowed = _ALLOWED_TIMES * moved
    return min(allowed, _ORDINARY_TIMES * rule.tolerance) if kind in ORDINARY_KINDS else allowed


def joint_rules(one: Parity, other: Parity) -> dict[str, Rule]:
    """Return how far two artifacts of one checkpoint may be apart, by the outputs of the first.

    Each is as far from the checkpoint as its report allows; `other` is what `one` is compared with.
    Its rows may be smaller than the checkpoint's by its own tolerance, by which they are scaled. A
    case that is ill-conditioned for one is so for both: that is the checkpoint's own.
    """
    is_quantized = one.is_quantized or other.is_quantized
    pairs = zip(one.tolerances.items(), other.tolerances.items(), strict=True)
    rules = {}
    for (name, a), (other_name, b) in pairs:
        ill = [one.allowed.get(name, {}), other.allowed.get(other_name, {})]
        allowed = {
            case: joint_tolerance(*[max(each.get(case, 0.0) for each in ill)] * 2)
            for case in {**ill[0], **ill[1]}
        }
        errors = [report.errors.get(each) for report, each in ((one, name), (other, other_name))]
        measured = [error for error in errors if error is not None]
        most = min(MAX_ERROR, _ELSEWHERE * sum(measured)) if len(measured) == 2 else MAX_ERROR
        stated = other.scales.get(other_name)
        scale = Scale.from_json(stated) if stated else None
        rules[name] = Rule(joint_tolerance(a, b), is_quantized, allowed, most, scale)
    return rules


class OutputScales:
    """The scales of all outputs of a reference, learnt case by case.

    Ordinary values are measured by themselves where there are enough: a quotient that is 1e6 on
    zeros is still around 1 in use. Numbers as large as those of some kinds of values teach nothing
    about any others.
    """

    def __init__(self) -> None:
        self._learners: dict[str, list[ScaleLearner]] = {}

    def see(self, kind: str, outputs: Sequence[Tensor]) -> None:
        """Learn from the outputs of one case."""
        teaches = ("usual",) if kind in USUAL_KINDS else (kind,)
        names = (*teaches, "ordinary") if kind in ORDINARY_KINDS else teaches
        for name in names:
            learners = self._learners.setdefault(name, [])
            learners += [ScaleLearner() for _ in outputs[len(learners) :]]
        for place, output in enumerate(outputs):
            numbers = _numbers(output)
            for name in names:
                if (learner := self._learners[name][place]).fits(numbers):
                    learner.see(numbers)
            del numbers  # before there are those of the next

    def of(self, kind: str = "random") -> list[Scale]:
        """Return the scale of each output in cases of a kind."""
        usual = self._learners.get("usual", [])
        own = self._learners.get("ordinary" if kind in ORDINARY_KINDS else kind, usual)
        return [
            (other if other.is_enough else one).scale()
            if kind in USUAL_KINDS
            else one.scale().wider(other.scale())
            for one, other in zip(usual, own, strict=True)
        ]


def within_reason(rule: Rule, cases: Sequence[Probe]) -> Rule:
    """Return a rule of a report without what no export would have allowed in its cases."""
    most = {
        str(case): _ORDINARY_TIMES * rule.tolerance for case in cases if case.kind in ORDINARY_KINDS
    }
    allowed = {case: min(moved, most.get(case, moved)) for case, moved in rule.allowed.items()}
    return replace(rule, allowed=allowed)


def compare(
    expected: Tensor, found: Tensor, tolerance: float = 0.0, scale: Scale | None = None
) -> dict[str, Any]:
    """Measure how far `found` is from `expected`.

    Where the shapes differ, or values that are not finite, differences are infinite. Little memory
    is taken beside the two, however large they are.

    Args:
        expected: what `found` is scaled by.
        found: array of any floating-point or integer dtype.
        tolerance: rows whose two largest values are closer than this explains are ties.
        scale: what the reference gave for many inputs; by `expected` alone when absent.

    Returns:
        max_abs: largest absolute difference.
        scaled: largest difference of a number over its unit.
        largest: largest finite absolute value expected.
        max_rel: max_abs / largest.
        error: root mean square of the differences over the sizes of numbers at their place.
        rows, same: rows along the last dim, and those whose largest value is at the same place.
        margin: the largest lead, in `expected`, of a row whose largest value moved; 0 without one.
    """
    if expected.shape != found.shape:
        apart = dict.fromkeys(("max_abs", "scaled", "largest", "max_rel", "error"), math.inf)
        return {**apart, "rows": 1, "same": 0, "margin": math.inf}
    sums = _Sums()
    if expected.numel():
        if scale is None or not scale.fits(expected.shape):
            scale = one_place(_numbers(expected))
        rows = expected.shape[0] if expected.ndim > 1 else 1
        rounding = max(_ROUNDING.get(each.dtype, ROUNDING) for each in (expected, found))
        for places, wanted, got in _pieces(expected, found, rows, scale):
            sums.add(places, wanted, got, rounding)
    largest = sums.largest if sums.holes_agree else math.inf
    return {
        "max_abs": sums.max_abs,
        "scaled": sums.scaled,
        "largest": largest,
        "max_rel": sums.max_abs / largest if 0 < largest < math.inf else sums.max_abs,
        "error": math.sqrt(sums.squares / max(1, expected.numel())),
        **_top1(expected, found, scale, tolerance),
    }


class _Sums:
    """What is gathered of two tensors, piece by piece."""

    def __init__(self) -> None:
        self.max_abs = self.scaled = self.largest = self.squares = 0.0
        self.holes_agree = True

    def add(self, places: Scale, wanted: Tensor, got: Tensor, rounding: float) -> None:
        """Add a piece (rows, K) of what is expected and what is there."""
        differences = _differences(wanted, got)
        finite = wanted.isfinite()
        if not bool(finite.all()):
            same = (wanted == got) | (wanted.isnan() & got.isnan())
            self.holes_agree &= bool((finite | same).all())
            differences = torch.where(finite, differences, torch.where(same, 0.0, math.inf))
            wanted = torch.where(finite, wanted, 0.0)
        apart = _numbers(differences.nan_to_num(nan=math.inf, posinf=math.inf))
        expected = _numbers(wanted)
        self.largest = max(self.largest, float(np.abs(expected).max()))
        if apart.any():
            self.max_abs = max(self.max_abs, float(apart.max()))
            self.scaled = max(
                self.scaled, float(over(apart, places.units(expected, rounding)).max())
            )
            self.squares += float(np.square(over(apart, places.sizes(expected))).sum())


def _numbers(tensor: Tensor) -> Numbers:
    numbers: Numbers = tensor.detach().double().cpu().numpy()
    return numbers


def split(tensor: Tensor) -> Sequence[Tensor]:
    """Return a tensor's values in pieces: what is computed of one takes little memory."""
    pieces: Sequence[Tensor] = torch.split(tensor.flatten(), _PIECE)
    return pieces


def _pieces(
    expected: Tensor, found: Tensor, rows: int, scale: Scale
) -> Iterator[tuple[Scale, Tensor, Tensor]]:
    """Yield values in both, and their scale: so few that what is computed of them is small."""
    one, two = expected.reshape(rows, -1), found.reshape(rows, -1)
    places = [_spread_out(each, expected.shape, rows) for each in (scale.centre, scale.spread)]
    width = min(one.shape[1], _PIECE)
    height = max(1, _PIECE // width)
    for top in range(0, rows, height):
        for left in range(0, one.shape[1], width):
            at = slice(top, top + height), slice(left, left + width)
            yield Scale(*(each[at] for each in places)), one[at], two[at]


def _spread_out(places: Numbers, shape: Sequence[int], rows: int) -> Numbers:
    """Return one number of a scale for each number (rows, K) of an output, without copies."""
    columns = math.prod(shape) // rows
    if places.size == 1:
        return np.broadcast_to(places.reshape(1, 1), (rows, columns))
    if len(shape) > 1 and len(places) == 1:  # a row for all
        row = np.broadcast_to(places[0], shape[1:]).reshape(1, -1)
        return np.broadcast_to(row, (rows, columns))
    return np.broadcast_to(places, shape).reshape(rows, columns)


def _differences(expected: Tensor, found: Tensor) -> Tensor:
    """Return |found − expected| of each value in float64; of long integers without rounding."""
    is_real = expected.is_floating_point() or found.is_floating_point()
    kind = torch.float64 if is_real else torch.int64
    return (found.to(kind) - expected.to(kind)).abs().double()


def _top1(expected: Tensor, found: Tensor, scale: Scale | None, tolerance: float) -> dict[str, Any]:
    ranked = expected.is_floating_point() and expected.ndim > 1 and expected.shape[-1] > 1
    if scale is None or not ranked:
        return {"rows": 0, "same": 0, "margin": 0.0}
    wanted = expected.reshape(-1, expected.shape[-1])
    first, other = wanted.argmax(dim=-1), found.reshape(wanted.shape).argmax(dim=-1)
    moved = (first != other).nonzero().flatten()
    ties, margin = 0, 0.0
    for part in torch.split(moved, max(1, _PIECE // wanted.shape[1])) if len(moved) else ():
        at = torch.stack([first[part], other[part]], 1)
        both = (np.broadcast_to(each, expected.shape) for each in (scale.centre, scale.spread))
        rows = (each.reshape(wanted.shape)[part.numpy()] for each in both)
        places = (np.take_along_axis(each, at.numpy(), 1) for each in rows)
        values = _numbers(wanted[part].gather(1, at))
        leads = np.nan_to_num(values[:, 0] - values[:, 1], nan=0.0)
        units = Scale(*places).units(values)
        ties += int((leads <= tolerance * units.sum(1)).sum())  # as far as both may be off
        margin = max(margin, float(leads.max()))
    return {"rows": len(wanted), "same": len(wanted) - len(moved) + ties, "margin": margin}


def worst(measured: Sequence[Mapping[str, Any]]) -> int:
    """Choose the case that differs most; of equal ones, the one of the largest values."""
    return max(
        range(len(measured)),
        # Rounded, since the same relative difference is not the same number twice.
        key=lambda case: (float(f"{measured[case]['scaled']:.1e}"), measured[case]["max_abs"]),
    )


def disagreement(
    name: str, rule: Rule, measured: Sequence[Mapping[str, Any]], cases: Sequence[object]
) -> str | None:
    """Return by how much and in which case an output differs most; None when it agrees."""
    if rule.is_quantized:
        found = rule.merge(measured)
        if rule.agrees(found):
            return None
        return (
            f'output "{name}": top-1 agreement {found.top1_agreement}, largest error '
            f"{found.error:.3g}; expected {MIN_TOP1_AGREEMENT} or more and {rule.max_error:.3g} or "
            "less"
        )
    wrong = rule.wrong(measured, cases)
    if not wrong:
        return None
    case = wrong[worst([measured[place] for place in wrong])]
    return (
        f'output "{name}": max_abs {measured[case]["max_abs"]:.1e} '
        f"({measured[case]['scaled']:.1e} scaled, values up to {measured[case]['largest']:.3g}) "
        f"over tolerance {rule.tolerance:.3g} at {cases[case]}"
    )


def summary(
    rules: Mapping[str, Rule],
    measured: Mapping[str, Sequence[Mapping[str, Any]]],
    cases: Sequence[object] = (),
) -> str:
    """Return how far outputs that agree are apart at most, beside what is allowed."""
    found = [rule.merge(measured[name], cases) for name, rule in rules.items()]
    if any(rule.is_quantized for rule in rules.values()):
        shares = [each.top1_agreement for each in found if each.top1_agreement is not None]
        error = max(each.error for each in found)
        return f"top-1 agreement {min(shares, default=1.0):.4g}, largest error {error:.2g}"
    furthest = max(found, key=lambda each: each.scaled - each.tolerance)
    ill = {case for rule in rules.values() for case in rule.allowed}
    return (
        f"max_abs {furthest.max_abs:.1e} ({furthest.scaled:.1e} scaled), "
        f"tolerance {furthest.tolerance:.3g}"
    ) + (f", without {len(ill)} in which the checkpoint is ill-conditioned" if ill else "")


def run(artifact: Artifact, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return an artifact's outputs on the CPU."""
    with torch.no_grad():
        output = artifact(*(value.to(artifact.device) for value in inputs))
    return [value.detach().cpu() for value in as_tuple(output)]
