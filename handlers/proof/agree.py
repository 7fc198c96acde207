"""The one rule that says whether outputs agree: of an export, a verification, a twin, an answer.

A copy agrees when, over every row of every output, e = max|a − b| / max(max|b|, 1) stays within the
tolerance, which is absolute up to values of 1 and relative above; integers are equal, and values
that are not finite are the same. A row is what one request gets: one place of dim 0.

A quantised artifact is not a copy but an approximation: it agrees when the largest value is at the
same place in 99 % of the rows and the cosine is 0.99 in every case. Where the two largest values
lie within what the tolerance allows, either is right.

A case in which the checkpoint's own answer moves by more than the tolerance when its sums are
rounded otherwise is ill-conditioned: no two libraries agree there. It is judged by that movement,
which the export measures and the report states for each such case. On ordinary values at most ten
times the tolerance is allowed, and half of them must agree by the tolerance alone.

The export's report states the tolerance of each output, which rule was used and those cases;
whoever compares later reads them there.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modelyard.archiver.report import Parity, joint_tolerance
from modelyard.handlers.models.backends import Artifact

# Largest allowed scaled difference, by the dtype of the output. Integers must be equal.
# That of float64 is for models that compute in nothing coarser, see `rule_for`.
TOLERANCES = {"float64": 1e-8, "float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
MIN_TOP1_AGREEMENT = 0.99
# Values that are compared at a time: some ten copies of them in float64 are made.
_PIECE = 2**20
MIN_COSINE = 0.99

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
    f"{_ORDINARY_TIMES:g} times the tolerance, in at most half of them"
)
SCALED_RULE = "max|a-b| <= tolerance * max(max|b|, 1) for every row of every output"
QUANTIZED_RULE = (
    f"top-1 agreement >= {MIN_TOP1_AGREEMENT} over all rows and cosine >= {MIN_COSINE} in every "
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
    """Largest difference of a row over its largest value, where that is above 1."""
    cosine: float
    """Smallest cosine, over the cases, between the two outputs as vectors."""
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

    def agrees(self, found: Difference) -> bool:
        """Judge what was measured."""
        if not self.is_quantized:
            return found.scaled <= self.tolerance
        agreement = 1.0 if found.top1_agreement is None else found.top1_agreement
        return agreement >= MIN_TOP1_AGREEMENT and found.cosine >= MIN_COSINE

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
        return Difference(
            max_abs=max(case["max_abs"] for case in measured),
            max_rel=max(case["max_rel"] for case in measured),
            scaled=max(case["scaled"] for case in measured),
            cosine=min(case["cosine"] for case in measured),
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
        rules[name] = Rule(joint_tolerance(a, b), is_quantized, allowed)
    return rules


def compare(expected: Tensor, found: Tensor, tolerance: float = 0.0) -> dict[str, Any]:
    """Measure how far `found` is from `expected`.

    Where the shapes differ, or values that are not finite, differences are infinite. Little memory
    is taken beside the two, however large they are.

    Args:
        expected: what `found` is scaled by.
        found: array of any floating-point or integer dtype.
        tolerance: rows whose two largest values are closer than this explains are ties.

    Returns:
        max_abs: largest absolute difference.
        scaled: largest over rows (of dim 0) of max|a − b| / max(max|b|, 1).
        largest: largest finite absolute value expected.
        max_rel: max_abs / largest.
        cosine: between the two as vectors.
        rows, same: rows along the last dim, and those whose largest value is at the same place.
        margin: the largest lead, in `expected`, of a row whose largest value moved; 0 without one.
    """
    if expected.shape != found.shape:
        apart = dict.fromkeys(("max_abs", "scaled", "largest", "max_rel"), math.inf)
        return {**apart, "cosine": 0.0, "rows": 1, "same": 0, "margin": math.inf}
    sums = _Sums(expected.shape[0] if expected.ndim > 1 else 1)
    for rows, wanted, got in _pieces(expected, found, len(sums.sizes)):
        sums.add(rows, wanted, got)
    scaled = (sums.apart / sums.sizes).max().item() if expected.numel() else 0.0
    max_abs = sums.apart.max().item() if expected.numel() else 0.0
    largest = sums.largest if sums.holes_agree else math.inf
    return {
        "max_abs": max_abs,
        "scaled": scaled,
        "largest": largest,
        "max_rel": max_abs / largest if 0 < largest < math.inf else max_abs,
        "cosine": sums.cosine(),
        **_top1(expected, found, sums.sizes, tolerance),
    }


class _Sums:
    """What is gathered of two tensors, piece by piece.

    Args:
        rows: rows of dim 0.
    """

    def __init__(self, rows: int) -> None:
        self.apart = torch.zeros(rows, dtype=torch.float64)
        """Largest difference of each row; infinite where a value that is not finite differs."""
        self.sizes = torch.ones(rows, dtype=torch.float64)
        """What each is divided by: its largest value, or 1."""
        self.largest = 0.0
        self.holes_agree = True
        self._dot = self._wanted = self._got = 0.0
        self._is_equal = True

    def add(self, rows: slice, wanted: Tensor, got: Tensor) -> None:
        """Add a piece (rows, K) of what is expected and what is there."""
        differences = _differences(wanted, got)
        wanted, got = wanted.double(), got.double()
        finite = wanted.isfinite()
        if not bool(finite.all()):
            same = (wanted == got) | (wanted.isnan() & got.isnan())
            self.holes_agree &= bool((finite | same).all())
            differences = torch.where(finite, differences, torch.where(same, 0.0, math.inf))
            wanted, got = (torch.where(finite, values, 0.0) for values in (wanted, got))
        differences = differences.nan_to_num(nan=math.inf, posinf=math.inf)
        self._is_equal &= not bool(differences.any())
        sizes = wanted.abs().amax(dim=1)
        self.apart[rows] = self.apart[rows].maximum(differences.amax(dim=1))
        self.sizes[rows] = self.sizes[rows].maximum(sizes)
        self.largest = max(self.largest, sizes.max().item())
        wanted, got = wanted.flatten(), got.flatten()
        self._dot += (wanted @ got).item()
        self._wanted += (wanted @ wanted).item()
        self._got += (got @ got).item()

    def cosine(self) -> float:
        """Return the cosine between the two as vectors."""
        if self._is_equal:
            return 1.0
        lengths = math.sqrt(self._wanted) * math.sqrt(self._got)
        return min(1.0, self._dot / lengths) if 0 < lengths < math.inf else 0.0


def split(tensor: Tensor) -> Sequence[Tensor]:
    """Return a tensor's values in pieces: what is computed of one takes little memory."""
    pieces: Sequence[Tensor] = torch.split(tensor.flatten(), _PIECE)
    return pieces


def _pieces(expected: Tensor, found: Tensor, rows: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield which rows, and their values in both: so few that what is computed of them is small."""
    if not expected.numel():
        return
    one, two = expected.reshape(rows, -1), found.reshape(rows, -1)
    width = min(one.shape[1], _PIECE)
    height = max(1, _PIECE // width)
    for top in range(0, rows, height):
        for left in range(0, one.shape[1], width):
            at = slice(top, top + height), slice(left, left + width)
            yield at[0], one[at], two[at]


def _differences(expected: Tensor, found: Tensor) -> Tensor:
    """Return |found − expected| of each value in float64; of long integers without rounding."""
    is_real = expected.is_floating_point() or found.is_floating_point()
    kind = torch.float64 if is_real else torch.int64
    return (found.to(kind) - expected.to(kind)).abs().double()


def _top1(expected: Tensor, found: Tensor, sizes: Tensor, tolerance: float) -> dict[str, Any]:
    ranked = expected.is_floating_point() and expected.ndim > 1 and expected.shape[-1] > 1
    if not ranked or not expected.numel():
        return {"rows": 0, "same": 0, "margin": 0.0}
    wanted = expected.reshape(-1, expected.shape[-1])
    moved = wanted.argmax(dim=-1) != found.reshape(wanted.shape).argmax(dim=-1)
    places = moved.nonzero().flatten()
    some = max(1, _PIECE // wanted.shape[1])
    leads = torch.cat([_leads(wanted[part]) for part in torch.split(places, some)])
    ties = 2 * tolerance * sizes[places // (len(wanted) // len(sizes))]
    return {
        "rows": len(moved),
        "same": len(moved) - int((leads > ties).sum()),
        "margin": leads.max().item() if len(leads) else 0.0,
    }


def _leads(rows: Tensor) -> Tensor:
    """Return how far the largest value of each row (N, K) is above the next."""
    best = rows.double().topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]).nan_to_num(nan=0.0)


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
            f'output "{name}": top-1 agreement {found.top1_agreement}, smallest cosine '
            f"{found.cosine:.4f}; expected {MIN_TOP1_AGREEMENT} and {MIN_COSINE} or more"
        )
    wrong = rule.wrong(measured, cases)
    if not wrong:
        return None
    case = wrong[worst([measured[place] for place in wrong])]
    return (
        f'output "{name}": max_abs {measured[case]["max_abs"]:.1e} '
        f"({measured[case]['scaled']:.1e} scaled to values up to {measured[case]['largest']:.3g}) "
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
        cosine = min(each.cosine for each in found)
        return f"top-1 agreement {min(shares, default=1.0):.4g}, smallest cosine {cosine:.4f}"
    furthest = max(found, key=lambda each: each.scaled - each.tolerance)
    ill = {case for rule in rules.values() for case in rule.allowed}
    return (
        f"max_abs {furthest.max_abs:.1e} ({furthest.scaled:.1e} scaled), "
        f"tolerance {furthest.tolerance:.3g}"
    ) + (f", without {len(ill)} in which the checkpoint is ill-conditioned" if ill else "")


def run(artifact: Artifact, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return an artifact's outputs on the CPU, computed in full precision."""
    with full_precision(artifact.device), torch.no_grad():
        output = artifact(*(value.to(artifact.device) for value in inputs))
    outputs = (output,) if isinstance(output, Tensor) else output
    return [value.detach().cpu() for value in outputs]


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Keep CUDA convolutions from rounding float32 to TensorFloat-32, 1e-3 apart, meanwhile."""
    if device.type != "cuda":
        return nullcontext()
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
