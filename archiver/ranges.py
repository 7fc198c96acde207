"""Where the numbers of the reference's rows lay, by which a change of a row is bounded.

`ranges` of `MAR-INF/reference.json` holds

    {"age": {"low": 18, "high": 94, "is_whole": true}, …}
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from modelyard.archiver.untrusted.json import Fields

MOST_RANGES = 256
"""Numbers of a row whose ranges are kept."""
MAX_NAME = 128


class Range(NamedTuple):
    """What the rows held of one number."""

    low: float
    high: float
    is_whole: bool
    """Whether all were whole numbers."""


def ranges_of(numbers: Sequence[Mapping[str, float]]) -> dict[str, Range]:
    """Return the range of each number; rows have all the same names."""
    names = [name for name in (numbers or [{}])[0] if len(name) <= MAX_NAME]
    columns = {name: [float(row[name]) for row in numbers] for name in names[:MOST_RANGES]}
    return {
        name: Range(min(column), max(column), all(map(float.is_integer, column)))
        for name, column in columns.items()
    }


def read_ranges(fields: Fields) -> dict[str, Range]:
    """Read the ranges of a reference; none where it says none. Problems are noted."""
    stated = fields.object("ranges") if "ranges" in fields.values else Fields({})
    found = {}
    for name in stated.values:
        each = stated.object(name)
        found[name] = Range(each.number("low"), each.number("high"), each.boolean("is_whole"))
        if found[name].low > found[name].high:
            each.wrong("low", "at most `high`", found[name].low)
    return found
