"""Whether two answers agree, as JSON holds them: golden requests, and whoever compares versions."""

import math
from collections.abc import Iterable, Iterator
from typing import Any


def json_difference(
    got: Any, expected: Any, tolerance: float, place: str = "answer", size: float | None = None
) -> str | None:
    """Return the first difference between two answers as JSON holds them, or None.

    A row, by whose largest number differences are scaled, is a list with the lists inside it, or
    the numbers of one object. Whole numbers are equal.

    Args:
        got: the answer of a handler.
        expected: what it must be.
        tolerance: largest scaled difference.
        place: where both stand in the whole answer.
        size: of the row that they are in; their own when absent.
    """
    pairs: Iterable[tuple[str, Any, Any, float | None]]
    if type(got) in _NUMBERS and type(expected) in _NUMBERS:  # True is not 1
        are_whole = isinstance(got, int) and isinstance(expected, int)
        allowed = 0.0 if are_whole else tolerance * (size or _row_size(expected))
        are_nan = got != got and expected != expected
        if got == expected or abs(got - expected) <= allowed or are_nan:
            return None
        return f"{place}: expected {expected}, got {got}"
    if isinstance(got, dict) and isinstance(expected, dict) and got.keys() == expected.keys():
        row = _row_size([value for value in expected.values() if type(value) in _NUMBERS])
        pairs = (
            (f"{place}.{key}", got[key], value, row if type(value) in _NUMBERS else None)
            for key, value in expected.items()
        )
    elif isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        row = size or _row_size(expected)
        pairs = (
            (f"{place}[{at}]", one, other, row)
            for at, (one, other) in enumerate(zip(got, expected, strict=True))
        )
    else:
        same = type(got) is type(expected) and got == expected
        return None if same else f"{place}: expected {expected!r}, got {got!r}"
    differences = (
        json_difference(one, other, tolerance, name, row) for name, one, other, row in pairs
    )
    return next(filter(None, differences), None)


_NUMBERS = (int, float)


def _row_size(row: Any) -> float:
    return max([1.0, *(abs(number) for number in _numbers(row) if math.isfinite(number))])


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif type(value) in _NUMBERS:
        yield value
