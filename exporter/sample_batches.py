"""Samples as the only source of inputs, where nothing that is made up is a valid one.

They give sizes, the traced example and all cases; where inputs are made of rows, these are also
put into batches of other sizes.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch

from modelyard.archiver.signature import Dim, Signature, TensorSpec
from modelyard.exporter.samples import Sample
from modelyard.handlers.probes import batch_sizes


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
    if not isinstance(batch, Dim) or any(why_no_rows(spec, batch) for spec in signature.inputs):
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
