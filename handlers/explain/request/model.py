"""A model version as explanations know it: what its handler says of inputs and outputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from modelyard.handlers.errors import BadInput
from modelyard.handlers.explain.attribute.attribution import (
    Tensors,
    outputs_of,
    ranges_of,
    softmax_of,
)
from modelyard.handlers.explain.request.region import Region
from modelyard.handlers.models.backends import Artifact, Output
from modelyard.handlers.proof.agree import Rule


@dataclass(frozen=True)
class Target:
    """A weighted sum of the numbers (…) that one request's outputs are."""

    places: Tensor
    """(K,) int64, in the flattened numbers."""
    weights: Tensor
    """(K,) float64"""
    name: int | str | None = None
    """As an answer has it; None where it is a place alone."""
    label: str | None = None
    """What people read; None leaves it to the common rule."""
    output: str | None = None
    """Where the numbers are of several outputs, the name of that which holds it."""


def at_place(place: int, output: str | None = None) -> Target:
    """Return the target that is one number."""
    return Target(torch.tensor([place]), torch.ones(1, dtype=torch.float64), output=output)


def sum_over(
    numbers: Tensor,
    name: int | str,
    label: str,
    output: str | None = None,
    *,
    is_mean: bool = False,
) -> Target:
    """Return the target that is a sum of numbers, or their mean.

    Args:
        numbers: (…) true for those that count.
        name: as an answer has it.
        label: what people read.
        output: as of `Target`.
        is_mean: divide by how many they are.
    """
    places = numbers.flatten().nonzero().flatten().cpu()
    weight = 1 / max(1, len(places)) if is_mean else 1.0
    return Target(
        places, torch.full(places.shape, weight, dtype=torch.float64), name, label, output
    )


def common_region(index: int, region: Region, sizes: tuple[int, ...]) -> Tensor:
    """Return which places of an output are inside a region that is measured in its places."""
    return region.inside(sizes)


@dataclass(frozen=True)
class ExplainedModel:
    """A model version as its handler knows it."""

    artifact: Artifact
    """What predictions come from."""
    twin: Artifact | None
    """What gradients come from: the artifact itself, another one, or nothing."""
    agreement: Rule | None
    """How far the two may be apart; None where they are one, or the reports state nothing."""
    label: Callable[[int], str]
    """Output index → its name."""
    baselines: Callable[[str, Tensors, int], Tensors]
    """Name, one request's inputs (1, …) and seed → as many tensors (B, …)."""
    window: Callable[[torch.Size, int | None], tuple[int, ...]]
    """Shape of a row and side → shape of a window."""
    score: Callable[[Any], Tensor] = outputs_of
    """Outputs of a call → the numbers (N, …) of which one per row is explained."""
    probabilities: Callable[[Tensor], Tensor | None] = softmax_of
    """These numbers → the probabilities that predictions give for them; None where they do not."""
    find_target: Callable[[int, str, Tensor, Tensor | None], Sequence[Target] | None] = (
        lambda row, target, scores, inside: None
    )
    """Row, `target`, scores (…) and which places of all dimensions but that of the classes are in
    the region → what is explained; None leaves it to the common rule."""
    name_place: Callable[[int, tuple[int, ...]], str] | None = None
    """Row and place among scores of more than one dimension → its name."""
    scales: Callable[[Tensor], Tensor] = ranges_of
    """Values of an input (N, *S) → by how much they vary (N, …), which noise is a share of."""
    default_baseline: str = "zero"
    embedded: int | None = None
    """Place of the token ids, which are explained where they have become embeddings."""
    between_chunks: Callable[[], None] = field(default=lambda: None)
    find_region: Callable[[int, Region, tuple[int, ...]], Tensor] = common_region
    """Row, region and sizes of an output without its classes → which places are inside."""
    class_dim: int = 0
    """Which dimension of scores (…) of more than one is that of the classes."""
    groups: Callable[[int, torch.Size], Tensor | None] = lambda row, sizes: None
    """Row and shape (*S) of what is explained → the number of the group of each value, from 0 in
    their order: words, categories; None where values have places in dimensions instead."""
    output_names: tuple[str, ...] = ()
    """In the order of a call's outputs; empty where nobody knows."""
    output_name: str | None = None
    """Of the output that `score` takes its numbers from; None where that is of several."""
    is_of_probabilities: bool = False
    """Whether the model's own numbers are probabilities, so that no logit is explained."""

    def at_output(self, name: str) -> "ExplainedModel":
        """Return the model as what leads to the output of this name.

        What the handler knows is of the output that its predictions are made of; of any other,
        numbers are explained as numbers.

        Raises:
            BadInput: there is none.
        """
        if name == self.output_name:
            return self
        if name not in self.output_names:
            known = ", ".join(self.output_names) or "none: the archive does not name its outputs"
            raise BadInput(f'output_name is "{name}"; expected some of {known}')
        place = self.output_names.index(name)
        return replace(
            self,
            label=str,
            score=lambda outputs: _output_at(outputs, place, name),
            probabilities=lambda _: None,
            is_of_probabilities=False,
            find_target=lambda _row, _target, _scores, _inside: None,
            name_place=None,
            find_region=common_region,
            class_dim=0,
            output_name=name,
        )


def _output_at(outputs: Output, place: int, name: str) -> Tensor:
    tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
    found = tensors[place]
    if not found.is_floating_point() or found.dim() == 0:
        kind = str(found.dtype).removeprefix("torch.")
        raise BadInput(
            f'output "{name}" is {kind}{list(found.shape)}; only real numbers of each row can be '
            "explained"
        )
    return outputs_of(found)
