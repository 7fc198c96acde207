from typing import Any

import pytest

from modelyard.archiver.reference import (
    Range,
    Reference,
    format_reference,
    parse_reference,
    ranges_of,
)
from modelyard.archiver.untrusted.json import format_json


def test_ranges_are_of_the_numbers_that_the_rows_held() -> None:
    numbers = [{"a": 3.0, "b": 0.5}, {"a": -1.0, "b": 2.0}]
    ranges = ranges_of(numbers)
    assert ranges == {"a": Range(-1, 3, True), "b": Range(0.5, 2, False)}
    reference = Reference(2, {"a": 1.0}, 0.1, ranges=ranges)
    assert parse_reference(format_reference(reference)) == reference
    assert ranges_of([]) == {}
    assert len(ranges_of([{str(at): 0.0 for at in range(300)} | {"a" * 200: 1.0}])) == 256


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"a": {"low": 2, "high": 1, "is_whole": False}}, "expected at most `high`, found 2"),
        ({"a": {"low": 2}}, "ranges.a.high"),
        ({"a": {"low": 2, "high": 3, "is_whole": 1}}, "expected true or false"),
        ([], "expected an object"),
    ],
)
def test_what_are_no_ranges_is_refused(wrong: Any, problem: str) -> None:
    document = {"rows": 1, "shares": {"a": 1}, "ranges": wrong}
    with pytest.raises(ValueError, match=problem):
        parse_reference(format_json(document))
