"""Whether two answers agree, as JSON holds them: golden requests, and whoever compares versions."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Pair(NamedTuple):
    """What stands at one place of two answers."""

    place: str
    expected: Any
    got: Any
    scaled: float
    """Their difference over the largest number of their row; infinite where no tolerance helps."""

    def __str__(self) -> str:
        if is_number(self.expected) and is_number(self.got):
            return f"{self.place}: expected {self.expected}, got {self.got}"
        return f"{self.place}: expected {self.expected!r}, got {self.got!r}"


def json_difference(got: Any, expected: Any, tolerance: float) -> str | None:
    """Return the first difference between two answers as JSON holds them, or None.

    Args:
        got: the answer of a handler.
        expected: what it must be.
        tolerance: largest scaled difference.
    """
    found = (pair for pair in json_pairs(got, expected) if pair.scaled > tolerance)
    return next(map(str, found), None)


def json_pairs(
    got: Any, expected: Any, place: str = "answer", size: float | None = None
) -> Iterator[Pair]:
    """Yield what two answers have at the same place, as far as their structure is the same.

    A row, by whose largest number differences are scaled, is a list with the lists inside it, or
    the numbers of one object. Whole numbers are equal.

    Args:
        got: the answer of a handler.
        expected: what it must be.
        place: where both stand in the whole answer.
        size: size of the row that they are in; their own when absent.
    """
    pairs: Iterable[tuple[str, Any, Any, float | None]]
    if is_number(got) and is_number(expected):
        yield Pair(place, expected, got, scaled_difference(got, expected, size))
        return
    if isinstance(got, dict) and isinstance(expected, dict) and got.keys() == expected.keys():
        row = row_size([value for value in expected.values() if is_number(value)])
        pairs = (
            (f"{place}.{key}", got[key], value, row if is_number(value) else None)
            for key, value in expected.items()
        )
    elif isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        row = size or row_size(expected)
        pairs = (
            (f"{place}[{at}]", one, other, row)
            for at, (one, other) in enumerate(zip(got, expected, strict=True))
        )
    else:
        is_same = type(got) is type(expected) and got == expected
        yield Pair(place, expected, got, 0.0 if is_same else math.inf)
        return
    for name, one, other, row_of_both in pairs:
        yield from json_pairs(one, other, name, row_of_both)


def scaled_difference(got: float, expected: float, size: float | None = None) -> float:
    """Return how far two numbers are apart, over the size of their row.

    Infinite where both are whole and differ, or one of them only is not finite.
    """
    if got == expected or (got != got and expected != expected):
        return 0.0
    if isinstance(got, int) and isinstance(expected, int):
        return math.inf
    scaled = abs(got - expected) / (size or row_size(expected))
    return scaled if math.isfinite(scaled) else math.inf


def is_number(value: object) -> bool:
    """Return whether JSON calls it a number; True is not 1."""
    return type(value) in (int, float)


def row_size(row: Any) -> float:
    """Return what the differences of a row are divided by: its largest number, or 1."""
    return max([1.0, *(abs(number) for number in _numbers(row) if math.isfinite(number))])


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif is_number(value):
        yield value
