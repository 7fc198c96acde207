"""How far one tensor is from another, in the terms that a certificate uses."""

import math
from typing import Any

import torch
from torch import Tensor


def compare(expected: Tensor, found: Tensor) -> dict[str, Any]:
    """Measure how far `found` is from `expected` (equal shape).

    Values that are not finite must be the same in both; where they are not, every difference is
    infinite.

    Returns:
        max_abs: largest absolute difference.
        scaled: largest over rows (of dim 0) of max|a − b| / max(max|b|, 1).
        largest: largest finite absolute value expected.
        max_rel: max_abs / largest.
        cosine: between the two as vectors.
        rows, same: rows along the last dim, and those whose largest value is at the same place.
        margin: the largest lead, in `expected`, of a row whose largest value moved; 0 without one.
    """
    wanted, got = expected.double().flatten(), found.double().flatten()
    finite = wanted.isfinite()
    if not torch.allclose(got[~finite], wanted[~finite], rtol=0, atol=0, equal_nan=True):
        apart = scaled = largest = math.inf
    elif not finite.any():
        apart = scaled = largest = 0.0
    else:
        scaled = _scaled(expected, found)
        wanted, got = wanted[finite], got[finite]
        apart = (got - wanted).abs().nan_to_num(nan=math.inf, posinf=math.inf).max().item()
        largest = wanted.abs().max().item()
    return {
        "max_abs": apart,
        "scaled": scaled,
        "largest": largest,
        "max_rel": apart / largest if 0 < largest < math.inf else apart,
        "cosine": _cosine(wanted, got),
        **_top1(expected, found),
    }


def _scaled(expected: Tensor, found: Tensor) -> float:
    """Return the largest difference of a row over its largest value, where that is above 1."""
    rows = expected.shape[0] if expected.ndim > 1 else 1
    wanted = expected.double().reshape(rows, -1)
    got = found.double().reshape(rows, -1)
    finite = wanted.isfinite()
    apart = torch.where(finite, (got - wanted).abs(), 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    size = torch.where(finite, wanted.abs(), 0.0).amax(dim=1).clamp(min=1.0)
    return (apart.amax(dim=1) / size).max().item()


def _cosine(wanted: Tensor, got: Tensor) -> float:
    if torch.equal(wanted, got):
        return 1.0
    if not bool(got.isfinite().all()):
        return 0.0
    lengths = (wanted.norm() * got.norm()).item()
    return min(1.0, (wanted @ got).item() / lengths) if lengths else 0.0


def _top1(expected: Tensor, found: Tensor) -> dict[str, Any]:
    ranked = expected.is_floating_point() and expected.ndim > 1 and expected.shape[-1] > 1
    if not ranked or not expected.numel():
        return {"rows": 0, "same": 0, "margin": 0.0}
    same = expected.argmax(dim=-1) == found.argmax(dim=-1)
    best = expected.double().topk(2, dim=-1).values
    leads = (best[..., 0] - best[..., 1])[~same].nan_to_num(nan=0.0)
    return {
        "rows": same.numel(),
        "same": int(same.sum()),
        "margin": leads.max().item() if leads.numel() else 0.0,
    }
