"""Which inputs an export tries, bounded in time and memory, and whoever repeats it.

Costs are counted in arithmetic and bytes and not by the clock, so that equal exports prove the
same. They are measured at the smallest sizes and at the largest of each dim, and thought to grow
by a power of each size.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from modelyard.archiver.report import Extent
from modelyard.archiver.signature import Dim, Signature
from modelyard.handlers.proof.probes import KINDS, Probe, batch_sizes, inner_sizes, sizes_text

# Of one pass over all cases: one to four seconds of a core, once for the checkpoint and again for
# each artifact.
BUDGET_GFLOP = 60.0
# What starting an operator costs, in arithmetic that takes as long.
GFLOP_PER_OPERATOR = 5e-4
# Of the inputs and outputs of one case, which two processes hold at a time.
CASE_BYTES = 256 * 2**20

_FLOAT_KINDS = ("tiny", "negative")
_TRIED: Mapping[Extent, str] = {
    "every": "every batch size in every kind of values",
    "random": "every batch size in random values; edge values at one size",
    "few": "batch 1, 2, a prime and the largest; edge values at one size",
    "quick": "the smallest and the largest sizes, edge values at the smallest: a quick look only",
    "none": "the samples alone; nothing was made up",
}


@dataclass(frozen=True)
class Growth:
    """How an amount grows with the sizes of dims: smallest · Π (size / smallest size) ** power."""

    smallest: float
    powers: Mapping[str, float] = field(default_factory=dict)

    def at(self, sizes: Mapping[str, int], signature: Signature) -> float:
        """Return the amount at these sizes."""
        amount = self.smallest
        for name, power in self.powers.items():
            amount *= (sizes[name] / _floor(signature, name)) ** power
        return amount


def fit_growth(amounts: Sequence[float], signature: Signature) -> Growth:
    """Return the growth through what was measured at each of `end_sizes`, in order."""
    smallest, *largest = (max(amount, 1e-12) for amount in amounts)
    powers = {}
    for (name, dim), amount in zip(_growing(signature), largest, strict=True):
        power = math.log(amount / smallest) / math.log(dim.max / _floor(signature, name))
        powers[name] = max(0.0, power)
    return Growth(smallest, powers)


def end_sizes(signature: Signature) -> Iterator[dict[str, int]]:
    """Yield the smallest sizes, then those with the largest of one dim: each is always tried."""
    smallest = {name: dim.min for name, dim in signature.dims.items()}
    yield smallest
    for name, dim in _growing(signature):
        yield {**smallest, name: dim.max}


@dataclass(frozen=True)
class Plan:
    """What will be tried, and what that costs."""

    probes: tuple[Probe, ...]
    extent: Extent
    gflop: float
    """Estimated arithmetic of one pass over all probes, 1e9 floating-point operations."""
    case_bytes: float
    """Estimated inputs and outputs of the largest case."""
    left_out: tuple[str, ...] = ()
    """Sizes at which a case would hold more than `CASE_BYTES`."""

    def to_json(self) -> dict[str, object]:
        """Return the form that the report holds."""
        return {
            "tried": _TRIED[self.extent],
            "extent": self.extent,
            "reduced": self.extent != "every" or bool(self.left_out),
            "gflop": float(f"{self.gflop:.3g}"),
            "budget_gflop": BUDGET_GFLOP,
            "case_bytes": round(self.case_bytes),
            "budget_bytes": CASE_BYTES,
            **({"left_out": list(self.left_out)} if self.left_out else {}),
        }


ONLY_SAMPLES = Plan((), "none", 0.0, 0.0)
"""Plan of an export in which nothing is made up."""


def plan(signature: Signature, gflop: Growth, size_bytes: Growth, *, quick: bool = False) -> Plan:
    """Choose the probes.

    Args:
        signature: the inputs.
        gflop: arithmetic of one case.
        size_bytes: size of the inputs and outputs of one case.
        quick: try little, whatever it costs.

    Every size of the batch dimension is tried with both ends of all others, in every kind of
    values while one pass stays in the budget; else fewer, down to random values at the smallest
    batch, 2, a prime and the largest, and the other kinds at one size. Each other dim is tried at
    some sizes between its ends, too. Sizes at which a case would hold more than `CASE_BYTES` are
    left out, those of `end_sizes` never.
    """
    ends = [*map(sizes_text, end_sizes(signature))]
    extents: tuple[Extent, ...] = ("quick",) if quick else ("every", "random", "few")
    for extent in extents:
        sizes = {sizes_text(probe.sizes): probe.sizes for probe in choose_probes(signature, extent)}
        held = {text: size_bytes.at(each, signature) for text, each in sizes.items()}
        left_out = [text for text in held if held[text] > CASE_BYTES and text not in ends]
        probes = choose_probes(signature, extent, left_out=left_out)
        cost = sum(gflop.at(probe.sizes, signature) for probe in probes)
        if cost <= BUDGET_GFLOP:
            break
    largest = max(size for text, size in held.items() if text not in left_out)
    return Plan(probes, extent, cost, largest, tuple(left_out))


def choose_probes(
    signature: Signature,
    extent: Extent,
    *,
    among: Sequence[str] = KINDS,
    left_out: Sequence[str] = (),
) -> tuple[Probe, ...]:
    """Return what a plan of this extent tries.

    Args:
        signature: the inputs.
        extent: how much.
        among: kinds of values.
        left_out: sizes of a plan that were too large.
    """
    if extent == "none":
        return ()
    has_floats = any(spec.is_float for spec in signature.inputs)
    kinds = [kind for kind in KINDS if kind in among and (has_floats or kind not in _FLOAT_KINDS)]
    everywhere = kinds if extent == "every" else ["random"]
    probes = [Probe(kind, sizes) for sizes in _all_sizes(signature, extent) for kind in everywhere]
    # Edge values at one size: two rows where that is in the range.
    edge = {
        name: dim.at_least(2) if dim == signature.batch and extent != "quick" else dim.min
        for name, dim in signature.dims.items()
    }
    probes += [Probe(kind, edge) for kind in kinds if kind not in everywhere]
    for name, dim in signature.dims.items() if extent != "quick" else ():
        if dim != signature.batch:
            inner = inner_sizes(dim, is_reduced=extent == "few")
            probes += [Probe("random", edge | {name: size}) for size in inner]
    return tuple(probe for probe in probes if sizes_text(probe.sizes) not in left_out)


def _all_sizes(signature: Signature, extent: Extent) -> Iterator[dict[str, int]]:
    dims = signature.dims
    if extent == "quick":
        yield {name: dim.min for name, dim in dims.items()}
        if _growing(signature):
            yield {name: dim.max for name, dim in dims.items()}
        return
    sizes = {
        name: batch_sizes(dim, is_reduced=extent == "few")
        if dim == signature.batch
        else dict.fromkeys((dim.min, dim.max))
        for name, dim in dims.items()
    }
    for chosen in product(*sizes.values()):
        yield dict(zip(sizes, chosen, strict=True))


def _growing(signature: Signature) -> list[tuple[str, Dim]]:
    """Return the dims that have more than one size, from 1 on."""
    dims = signature.dims.items()
    return [(name, dim) for name, dim in dims if dim.max > _floor(signature, name)]


def _floor(signature: Signature, name: str) -> int:
    """Return a dim's smallest size, from which it grows; 1 where that is 0."""
    return max(1, signature.dims[name].min)
