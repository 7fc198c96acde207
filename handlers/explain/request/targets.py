"""A model version as explanations know it, and what of its outputs is explained."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelyard.handlers.errors import BadInput
from modelyard.handlers.explain.attribute import attribution
from modelyard.handlers.explain.attribute.method import Choice
from modelyard.handlers.explain.request.options import MOST_TARGETS, ExplainOptions, Region
from modelyard.handlers.models.backends import Artifact, Output, as_tuple, dtype_name
from modelyard.handlers.proof.agree import Rule

Place = int | str | tuple[int, ...]


@dataclass(frozen=True)
class Target:
    """A weighted sum of the numbers (…) that one request's outputs are."""

    places: Tensor
    """(K,) int64, in the flattened numbers."""
    weights: Tensor
    """(K,) float64"""
    name: Place = ""
    """Name as an answer has it; empty where it is a place alone, and a name is found for it."""
    label: str = ""
    """What people read; empty leaves it to the common rule."""
    output: str | None = None
    """Name of the output that holds it, where the numbers are of several."""
    probability: float | None = None
    """What a prediction gives for it; None where it gives no probabilities, or for a sum."""
    against: Place | None = None
    """The name of what it is compared with."""

    def of(self, outputs: Tensor) -> Tensor:
        """Return its number for each row of outputs (N, …): (N,)."""
        rows = outputs.flatten(1)
        return (rows[:, self.places.to(rows.device)] * self.weights.to(rows)).sum(1)


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
        name: name as an answer has it.
        label: what people read.
        output: output as of `Target`.
        is_mean: divide by how many they are.
    """
    places = numbers.flatten().nonzero().flatten().cpu()
    weights = torch.ones(places.shape, dtype=torch.float64)
    return Target(
        places, weights / max(1, len(places)) if is_mean else weights, name, label, output
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
    baselines: Callable[[str, attribution.Tensors, int], attribution.Tensors]
    """Name, one request's inputs (1, …) and seed → as many tensors (B, …)."""
    window: Callable[[torch.Size, int | None], tuple[int, ...]]
    """Shape of a row and side → shape of a window."""
    score: Callable[[Any], Tensor] = attribution.outputs_of
    """Outputs of a call → the numbers (N, …) of which one per row is explained."""
    probabilities: Callable[[Tensor], Tensor | None] = attribution.softmax_of
    """These numbers → the probabilities that predictions give for them; None where they do not."""
    find_target: Callable[[int, str, Tensor, Tensor | None], Sequence[Target] | None] = (
        lambda row, target, scores, inside: None
    )
    """Row, `target`, scores (…) and which places of all dimensions but that of the classes are in
    the region → what is explained; None leaves it to the common rule."""
    name_place: Callable[[int, tuple[int, ...]], str] | None = None
    """Row and place among scores of more than one dimension → its name."""
    scales: Callable[[Tensor], Tensor] = attribution.ranges_of
    """Values of an input (N, *S) → by how much they vary (N, …), which noise is a share of."""
    default_baseline: str = "zero"
    baseline_means: Callable[[str], str | None] = lambda name: None
    """Name of a baseline → what it is, in words."""
    default_set: str | None = None
    """The baseline of methods that take several rows."""
    embedded: int | None = None
    """Place of the token ids, which are explained where they have become embeddings."""
    between_chunks: Callable[[], None] = field(default=lambda: None)
    find_region: Callable[[int, Region, tuple[int, ...]], Tensor] = common_region
    """Row, region and sizes of an output without its classes → which places are inside."""
    class_dim: int = 0
    """Dimension of scores (…) of more than one that is that of the classes."""
    groups: Callable[[int, torch.Size], Tensor | None] = lambda row, sizes: None
    """Row and shape (*S) of what is explained → the number of the group of each value, from 0 in
    their order: words, categories; None where values have places in dimensions instead."""
    choices: Callable[[int], Sequence[Choice]] = lambda row: ()
    """Row → what its features could be changed to."""
    origin: "ExplainedModel | None" = None
    """The model that predicts, where this one stands in for it."""
    output_names: tuple[str, ...] = ()
    """Names of the outputs, in the order of a call's; empty where nobody knows."""
    output_name: str | None = None
    """Name of the output that `score` takes its numbers from; None where that is of several."""
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
            agreement=self.agreement and replace(self.agreement, scale=None),  # of the other
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
    tensors = as_tuple(outputs)
    found = tensors[place]
    if not found.is_floating_point() or found.dim() == 0:
        raise BadInput(
            f'output "{name}" is {dtype_name(found.dtype)}{list(found.shape)}; only real numbers '
            "of each row can be explained"
        )
    return attribution.outputs_of(found)


SHOWN_LABELS = 10
SUM = "sum:"
"""Stands before a class whose numbers are added up over a region."""


def find_targets(
    model: ExplainedModel, row: int, options: ExplainOptions, scores: Tensor
) -> list[Target]:
    """Find what a request means by `target`, `against` and `region`.

    Args:
        model: knows its labels and places.
        row: which request of the batch.
        options: options of the request.
        scores: (…) the numbers that its prediction is made of.

    Raises:
        BadInput: a target or a region that these numbers do not have.
    """
    region, inside = options.region, None
    if region is not None and scores.dim() < 2:
        raise BadInput(
            "region does not apply: this output has one number for each class, and no places"
        )
    if region is not None and not region.is_predicted:
        sizes = list(scores.shape)
        del sizes[model.class_dim]
        inside = model.find_region(row, region, tuple(sizes)).to(scores.device)
    finder = _Finder(model, row, scores, region, inside)
    classes = scores.dim() == 1 and len(scores) > 1
    if options.shows_runner_up and classes and model.probabilities(scores[None]) is not None:
        return finder.find("top-2", "target")
    found = finder.find(options.target, "target")
    if options.against is None:
        return found
    others = finder.find(options.against, "against")
    if len(others) > 1:
        raise BadInput(f'against is "{options.against}"; expected one target')
    return [_contrast(each, others[0]) for each in found]


def stacked(targets: Sequence[Target]) -> tuple[Tensor, Tensor]:
    """Return places and weights (M, K) of M targets; what is filled up weighs nothing."""
    most = max(len(each.places) for each in targets)
    places = torch.zeros((len(targets), most), dtype=torch.int64)
    weights = torch.zeros((len(targets), most), dtype=torch.float64)
    for row, each in enumerate(targets):
        places[row, : len(each.places)] = each.places
        weights[row, : len(each.places)] = each.weights
    return places, weights


def class_index(name: str, count: int, label: Callable[[int], str]) -> int | None:
    """Return the index of a class by itself or by its label."""
    if is_number(name) and int(name) < count:
        return int(name)
    names = [label(index) for index in range(count)]
    return names.index(name) if name in names else None


def known_classes(count: int, label: Callable[[int], str]) -> str:
    """Return what a message says of the classes that there are."""
    names = [label(index) for index in range(min(count, SHOWN_LABELS))]
    shown = ", ".join(names) + (", …" if count > SHOWN_LABELS else "")
    return f"an index from 0 to {count - 1}, or a label: {shown}"


def is_number(text: str) -> bool:
    """Return whether a text is a whole number of sensible length."""
    return text.isascii() and text.isdigit() and len(text) <= 9


def first_of(target: str, count: int, what: str = "target") -> int | None:
    """Return the N of `top-N`; None where a target is something else.

    Raises:
        BadInput: N is 0, or more than there are.
    """
    head, _, tail = target.partition("-")
    if head != "top" or not is_number(tail):
        return None
    most = min(MOST_TARGETS, count)
    if not 1 <= int(tail) <= most:
        raise BadInput(f'{what} is "{target}"; expected top-1 to top-{most}')
    return int(tail)


@dataclass(frozen=True)
class _Finder:
    """Finds targets among the scores (…) of one request."""

    model: ExplainedModel
    row: int
    scores: Tensor
    region: Region | None
    inside: Tensor | None
    """Which places are in the region, where that is not the predicted one."""

    def find(self, text: str, what: str) -> list[Target]:
        """Return what a text means; `what` is the option that it was given as."""
        model, region = self.model, self.region
        if text.startswith(SUM):
            return [self._named(self._sum(text.removeprefix(SUM), what))]
        if region is not None and region.is_predicted:
            raise BadInput(
                f'region is predicted and {what} "{text}"; expected the {what} sum:CLASS'
            )
        found = model.find_target(self.row, text, self.scores, self.inside)
        if found is None and region is not None:
            raise BadInput(
                f'region does not apply to the {what} "{text}"; expected sum:CLASS, or one that '
                "this model looks for in a region"
            )
        return list(map(self._named, found or map(at_place, self._places(text, what))))

    def _sum(self, name: str, what: str) -> Target:
        model, scores, inside = self.model, self.scores, self.inside
        if scores.dim() < 2:
            raise BadInput(
                f'{what} is "{SUM}{name}"; expected an index or a label: this output has one '
                "number for each class, and nothing to sum over"
            )
        count = scores.shape[model.class_dim]
        index = class_index(name, count, model.label)
        if index is None:
            raise BadInput(
                f'{what} is "{SUM}{name}"; expected {SUM} and {known_classes(count, model.label)}'
            )
        label = model.label(index)
        if self.region is not None and self.region.is_predicted:
            # A class alone is there where its logit is above 0.
            inside = scores.argmax(model.class_dim) == index
            if count == 1:
                inside = scores.select(model.class_dim, 0) > 0
            if not inside.any():
                raise BadInput(f'region is predicted; "{label}" is predicted nowhere in this input')
        numbers = torch.zeros_like(scores, dtype=torch.bool)
        numbers.select(model.class_dim, index)[...] = True if inside is None else inside
        return sum_over(
            numbers, f"{SUM}{index}", f"sum of {label} over {int(numbers.sum())} places"
        )

    def _named(self, target: Target) -> Target:
        """Return a target with its name, its label and its probability."""
        model, scores = self.model, self.scores
        target = replace(target, output=target.output or model.output_name)
        if target.label:
            return target
        place = int(target.places[0])
        chances = model.probabilities(scores.double().unsqueeze(0))
        probability = None if chances is None else float(chances.flatten()[place])
        name: Place = place
        label = model.label(place)
        if scores.dim() > 1:
            name = tuple(map(int, np.unravel_index(place, tuple(scores.shape))))
            label = ",".join(map(str, name))
            if model.name_place:
                label = model.name_place(self.row, name)
        return replace(target, name=name, label=label, probability=probability)

    def _places(self, text: str, what: str) -> list[int]:
        """Find the places in the flattened scores that a text means."""
        scores, flat = self.scores, self.scores.flatten()
        if text == "predicted":
            return [int(flat.argmax())]
        if (number := first_of(text, len(flat), what)) is not None:
            return flat.topk(number).indices.tolist()
        parts = text.split(",")
        if all(map(is_number, parts)) and len(parts) == scores.dim():
            with contextlib.suppress(ValueError):  # a place outside
                place = tuple(map(int, parts))
                return [int(np.ravel_multi_index(place, tuple(scores.shape)))]
        if scores.dim() == 1:
            index = class_index(text, len(flat), self.model.label)
            if index is not None:
                return [index]
            known = known_classes(len(flat), self.model.label)
        else:
            ends = ",".join(str(size - 1) for size in scores.shape)
            known = f"sum:CLASS, or a place up to {ends}"
        raise BadInput(f'{what} is "{text}"; expected predicted, top-N, {known}')


def _contrast(one: Target, other: Target) -> Target:
    """Return the difference of two: why the one and not the other."""
    if one.name == other.name:
        raise BadInput(f'against is "{other.label}", which is the target; expected another one')
    return replace(
        one,
        places=torch.cat((one.places, other.places)),
        weights=torch.cat((one.weights, -other.weights)),
        label=f"{one.label} rather than {other.label}",
        against=other.name,
    )
