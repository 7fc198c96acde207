"""Whether two answers agree, as JSON holds them: golden requests, and whoever compares versions.

Structure, texts, truth values and whole numbers are the same, whatever the tolerance: an id, a
class and a number of seconds are what they are. Of other numbers each is judged by its own unit,
which is learnt from answers of the reference (`modelyard.base.scale`); where nothing was learnt, it
is the number itself.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from modelyard.base.scale import Numbers, Scale, ScaleLearner, over

MOST_GROUPS = 1024
"""Groups of numbers whose scale is learnt; those of what comes later are judged by themselves."""
MOST_MOVE = 0.1
"""Share of the largest number of its group that a number is believed to move by, at most."""
ENOUGH = 8
"""Answers from which a scale is learnt well enough."""


class Pair(NamedTuple):
    """What stands at one place of two answers."""

    place: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        if is_number(self.expected) and is_number(self.got):
            return f"{self.place}: expected {self.expected}, got {self.got}"
        return f"{self.place}: expected {self.expected!r}, got {self.got!r}"


@dataclass
class Group:
    """Numbers of two answers that stand at the same place but for the positions in lists."""

    positions: list[tuple[int, ...]] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)

    def numbers(self) -> tuple[Numbers, Numbers]:
        """Return what is expected and what is there, in the shape of the lists."""
        # A key may read like a list: `a[]` beside a list `a`, whose positions are longer.
        shape = tuple(max(sizes) + 1 for sizes in zip(*self.positions, strict=False))
        if math.prod(shape) != len(self.pairs):  # lists of several lengths
            shape = (len(self.pairs),)
        return tuple(  # type: ignore[return-value]
            np.array([float(pair[side]) for pair in self.pairs]).reshape(shape) for side in (1, 2)
        )


class Numeric(NamedTuple):
    """How far the numbers of two answers are apart."""

    scaled: float
    """Largest difference of a number over its unit; infinite where one only is not finite."""
    worst: Pair | None
    """Where that is; None without a difference."""
    error: float
    """Largest root mean square, over groups, of the differences over the sizes of numbers there."""


@dataclass
class Scales:
    """What the numbers of answers are measured by, learnt from those of the reference."""

    answers: int = 0
    _learners: dict[str, ScaleLearner] = field(default_factory=dict)

    def see(self, answer: Any) -> None:
        """Learn from one answer of the reference."""
        self.answers += 1
        for name, group in pair_up(answer, answer)[1].items():
            self.learn(name, group.numbers()[0])

    def learn(self, name: str, numbers: Numbers) -> None:
        """Learn from the numbers of a group."""
        learner = self._learners.get(name)
        if learner is None:
            if len(self._learners) >= MOST_GROUPS:
                return
            learner = self._learners[name] = ScaleLearner()
        if not learner.fits(numbers):  # lists are nested otherwise
            learner = self._learners[name] = ScaleLearner()
        learner.see(numbers)

    def of(self, name: str, expected: Numbers) -> Scale | None:
        """Return the scale of a group; None where too little was learnt."""
        learner = self._learners.get(name)
        if learner is None or learner.cases < ENOUGH or not learner.fits(expected):
            return None
        scale = learner.scale()
        return scale if scale.fits(expected.shape) else None


def json_difference(
    got: Any, expected: Any, tolerance: float, moves: Mapping[str, Sequence[float]] | None = None
) -> str | None:
    """Return the first difference between two answers as JSON holds them, or None.

    Args:
        got: the answer of a handler.
        expected: what it must be.
        tolerance: largest scaled difference.
        moves: how far the numbers of a group may move beside that, where it is recorded.
    """
    other, groups = pair_up(expected, got)
    if other is not None:
        return str(other)
    for name, group in groups.items():
        wanted, found = group.numbers()
        allowed = tolerance * np.abs(wanted)
        if moves and len(moves.get(name, ())) == wanted.size:
            most = MOST_MOVE * np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)
            allowed = allowed + np.clip(np.reshape(moves[name], wanted.shape), 0.0, most)
        apart = differences(wanted, found)
        if (apart > allowed).any():
            return str(group.pairs[int(np.argmax(over(apart, allowed)))])
    return None


def compare_numbers(groups: Mapping[str, Group], scales: Scales | None = None) -> Numeric:
    """Measure how far the numbers of two answers are apart."""
    worst, place, error = 0.0, None, 0.0
    for name, group in groups.items():
        wanted, found = group.numbers()
        scale = scales.of(name, wanted) if scales is not None else None
        scaled, errors = measure(wanted, found, scale)
        if (largest := float(scaled.max(initial=0.0))) > worst:
            worst, place = largest, group.pairs[int(scaled.argmax())]
        error = max(error, math.sqrt(float(np.square(errors).mean())))
    return Numeric(worst, place, error)


def measure(expected: Numbers, got: Numbers, scale: Scale | None) -> tuple[Numbers, Numbers]:
    """Return differences over the units of numbers, and over their sizes."""
    apart = differences(expected, got)
    finite = np.where(np.isfinite(expected), expected, 0.0)
    if scale is None:
        own = over(apart, np.abs(finite))
        return own, own
    return over(apart, scale.units(finite)), over(apart, scale.sizes(finite))


def differences(expected: Numbers, got: Numbers) -> Numbers:
    """Return |got − expected|: 0 where both are the same, NaN too; infinite where one is not."""
    same = (expected == got) | (np.isnan(expected) & np.isnan(got))
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.nan_to_num(np.abs(got - expected), nan=math.inf, posinf=math.inf)
    return np.where(same, 0.0, apart)


def pair_up(expected: Any, got: Any) -> tuple[Pair | None, dict[str, Group]]:
    """Return the first place at which two answers are no longer alike, and their numbers."""
    groups: dict[str, Group] = {}
    other = None
    for name, position, pair in _walk(expected, got, "answer", "", ()):
        if name is None:
            other = pair
            break
        group = groups.setdefault(name, Group())
        group.positions.append(position)
        group.pairs.append(pair)
    return other, groups


_Step = tuple[str | None, tuple[int, ...], Pair]


def _walk(
    expected: Any, got: Any, place: str, name: str, position: tuple[int, ...]
) -> Iterator[_Step]:
    """Yield the numbers of two answers: the name of their group, their position in it, and both.

    What differs otherwise is yielded without a name. Of the labels of a classification, which are
    others each time, those of the same rank belong together.
    """
    if expected is None and got is None:  # a number may be missing; its place is still one
        yield name, position, Pair(place, math.nan, math.nan)
    elif is_number(expected) and is_number(got):
        are_whole = all(number == number // 1 for number in (expected, got))
        if int not in (type(expected), type(got)) or not are_whole:
            yield name, position, Pair(place, expected, got)
        elif expected != got:  # 3.0 for 3 is the same, and 1234568.0 for 1234567 another id
            yield None, (), Pair(place, expected, got)
    elif isinstance(expected, dict) and isinstance(got, dict) and expected.keys() == got.keys():
        are_ranked = is_top_k(expected)
        for at, (key, value) in enumerate(expected.items()):
            inside = (f"{name}{{}}", (*position, at)) if are_ranked else (f"{name}.{key}", position)
            yield from _walk(value, got[key], f"{place}.{key}", *inside)
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for at, (one, two) in enumerate(zip(expected, got, strict=True)):
            yield from _walk(one, two, f"{place}[{at}]", f"{name}[]", (*position, at))
    elif type(expected) is not type(got) or expected != got:
        yield None, (), Pair(place, expected, got)


def is_top_k(value: dict[str, Any]) -> bool:
    """Return whether an object is a classification: shares of labels, the largest first."""
    shares = list(value.values())
    return (
        len(shares) > 1
        and float in set(map(type, shares))
        and all(map(is_number, shares))
        and all(one >= two for one, two in pairwise(shares))
        and 0 <= shares[-1] <= shares[0] <= 1
    )


def is_number(value: object) -> bool:
    """Return whether it is a number of JSON that a float can hold; True is not 1."""
    return type(value) is float or (type(value) is int and value.bit_length() < 1024)
