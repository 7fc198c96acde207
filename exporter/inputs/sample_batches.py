"""Samples as the only source of inputs, where nothing that is made up is a valid one.

They give sizes, the traced example and all cases; where inputs are made of rows, these are also
put into batches of other sizes.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelyard.archiver.signature import Dim, Signature, TensorSpec
from modelyard.exporter.errors import UsageError
from modelyard.exporter.inputs.samples import Sample
from modelyard.handlers.proof.probes import batch_sizes

MIN_CALIBRATION = 32
_HELD_OUT = 4


def regroup(samples: Sequence[Sample], signature: Signature) -> tuple[Sample, ...]:
    """Return the samples, and their rows in batches of 1, 2, a prime, and the largest size.

    Rows of equal sizes share a batch, in the order of the files, and begin anew where there are
    too few. Where inputs are not made of rows, the samples stay alone.
    """
    cases = list(samples)
    batch = signature.batch
    for rows in _rows(samples, signature):
        assert isinstance(batch, Dim)
        sizes = {*batch_sizes(batch, is_reduced=True), min(rows.rows, batch.max)}
        made = (take_rows(rows, batch, size) for size in sorted(sizes) if size in batch)
        cases += [case for case in made if not any(_is_same(case, each) for each in samples)]
    return tuple(cases)


def take_rows(rows: Sample, batch: Dim, size: int, first: int = 0) -> Sample:
    """Return a batch of a size, from row `first` on, over and over where there are too few."""
    places = (torch.arange(size) + first) % rows.rows
    inputs = tuple(tensor[places] for tensor in rows.inputs)
    return replace(rows, inputs=inputs, sizes={**rows.sizes, batch.name: size})


@dataclass(frozen=True)
class Split:
    """Samples in two parts: to calibrate with, and to compare on."""

    calibration: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    rows: int
    """Of the former; a file is one where inputs are not made of rows."""
    held_out_rows: int


def hold_out(samples: Sequence[Sample], signature: Signature) -> Split:
    """Split samples for static quantisation: every fourth row is held out.

    Raises:
        UsageError: there are fewer than 32 rows.
    """
    groups = _rows(samples, signature)
    count = sum(group.rows for group in groups) if groups else len(samples)
    if count < MIN_CALIBRATION:
        unit = "rows" if groups else "files (its inputs are not made of rows)"
        raise UsageError(
            f"--quantize int8-static: --sample gives {count} {unit}; expected {MIN_CALIBRATION} or "
            "more, like those that will come: three of four give the ranges of values, and every "
            "fourth is compared; or use int8-dynamic, which needs none"
        )
    is_held = torch.arange(count) % _HELD_OUT == 0
    held_out_rows = int(is_held.sum())
    if groups:
        masks = torch.split(is_held, [group.rows for group in groups])
        name = samples[0].file if len(samples) == 1 else f"{len(samples)} files"
        parts = [
            tuple(
                replace(batch, file=name)
                for group, mask in zip(groups, masks, strict=True)
                for batch in _in_batches(group, signature, mask == wanted)
            )
            for wanted in (False, True)
        ]
    else:
        numbered = list(zip(is_held.tolist(), samples, strict=True))
        parts = [
            tuple(sample for held, sample in numbered if held == wanted) for wanted in (False, True)
        ]
    return Split(parts[0], parts[1], count - held_out_rows, held_out_rows)


def _in_batches(rows: Sample, signature: Signature, chosen: Tensor) -> Iterator[Sample]:
    """Yield some rows in the largest batches; a last one that is too small begins anew."""
    batch = signature.batch
    assert isinstance(batch, Dim)
    left = int(chosen.sum())
    some = replace(rows, inputs=tuple(tensor[chosen] for tensor in rows.inputs))
    for first in range(0, left, batch.max):
        size = min(batch.max, left - first)
        yield take_rows(some, batch, size if size in batch else batch.max, first)


def choose_example(samples: Sequence[Sample], signature: Signature) -> Sample:
    """Choose the sample to trace with: its sizes are not 1, and differ, as far as there is one."""
    batch = signature.batch
    fixed = {size for spec in signature.inputs for size in spec.shape if isinstance(size, int)}
    tried = [
        take_rows(rows, batch, size)
        for rows in _rows(samples, signature)
        for size in (5, 3, 7, 2)
        if isinstance(batch, Dim) and size in batch
    ]

    def awkward(sample: Sample) -> tuple[int, int]:
        sizes = list(sample.sizes.values())
        return sum(size < 2 for size in sizes), len(sizes) - len(set(sizes) - fixed)

    return min((*tried, *samples), key=awkward)


def two_batches(
    samples: Sequence[Sample], signature: Signature, size: int
) -> tuple[Sample, Sample] | None:
    """Return two batches of a size whose rows differ at every place; None of one row only."""
    batch = signature.batch
    for rows in _rows(samples, signature):
        assert isinstance(batch, Dim)
        one, other = take_rows(rows, batch, size), take_rows(rows, batch, size, first=1)
        pairs = zip(one.inputs, other.inputs, strict=True)
        differ = [(a != b).reshape(size, -1).any(dim=1) for a, b in pairs]
        if bool(torch.stack(differ).any(dim=0).all()):
            return one, other
    return None


def _rows(samples: Sequence[Sample], signature: Signature) -> list[Sample]:
    """Gather the rows of samples whose other sizes are equal; none where inputs have no rows."""
    batch = signature.batch
    if not isinstance(batch, Dim) or not has_rows(signature):
        return []
    alike: defaultdict[tuple[tuple[str, int], ...], list[Sample]] = defaultdict(list)
    for sample in samples:
        others = {name: size for name, size in sample.sizes.items() if name != batch.name}
        alike[tuple(sorted(others.items()))].append(sample)
    groups = []
    for group in alike.values():
        inputs = tuple(map(torch.cat, zip(*(sample.inputs for sample in group), strict=True)))
        sizes = {**group[0].sizes, batch.name: inputs[0].shape[0]}
        groups.append(Sample(", ".join(sample.file for sample in group), inputs, sizes))
    return groups


def has_rows(signature: Signature) -> bool:
    """Return whether inputs are made of rows, in batches of several sizes."""
    batch = signature.batch
    return isinstance(batch, Dim) and not any(why_no_rows(spec, batch) for spec in signature.inputs)


def why_no_rows(spec: TensorSpec, batch: Dim) -> str:
    """Return why an input's places of dim 0 cannot change theirs; empty where they can."""
    if spec.shape[0] != batch:
        return f'input "{spec.name}" has no dim "{batch.name}" in front, so rows cannot be stacked'
    if spec.values and batch.name in (spec.values.low.dim, spec.values.high.dim):
        return f'input "{spec.name}" counts the rows of its batch, so rows cannot be stacked'
    if spec.values and spec.values.order and len(spec.shape) == 1:
        return f'input "{spec.name}" is {spec.values.order}, so rows cannot be stacked as they come'
    return ""


def _is_same(one: Sample, other: Sample) -> bool:
    return all(map(torch.equal, one.inputs, other.inputs))
