"""Which values an input takes, where not every number of its dtype is one.

Written behind the dims of an `--input`:

    <nodes          whole numbers from 0, below the size of a dim (or below a number)
    =1..length      from one end to the other, both included; an end is a number, or a dim's size,
                    or that and a whole number: `length-1`
    =0,3,7          these alone
    …,rising        no value is less than the one before it, along the last dim, and the first is
                    the smallest there is, as offsets begin with 0
    …,falling       no value is more than the one before it, as lengths of packed sequences

Reports and manifests hold {"min": 1, "max": "length"} or {"among": [0, 3, 7]}, and "order".

`Limits` say for which other values an artifact is known to differ from its checkpoint.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

from modelyard.archiver.untrusted.json import Fields, is_number

Number = int | float

ORDERS = ("rising", "falling")
FORM = "<nodes, =1..length, =0..1 or =0,3,7, and ,rising or ,falling behind it"
MAX_AMONG = 1024
# What a float64, and so any reader of JSON, holds exactly.
_MAX_WHOLE = 2**53
_MAX_FLOATS = {"float16": 65504.0, "bfloat16": 3.3e38, "float32": 3.4e38, "float64": 1e300}

_NUMBER = re.compile(r"[+-]?\d{1,18}(\.\d{1,18})?([eE][+-]?\d{1,3})?")
_SIZE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)([+-]\d{1,9})?")
_INTEGER = re.compile(r"(u?)int(8|16|32|64)")


@dataclass(frozen=True)
class End:
    """One end of a range: a number, or a dim's size and a number to add to it."""

    number: Number = 0
    dim: str = ""

    def __str__(self) -> str:
        if not self.dim:
            return repr(self.number)
        return f"{self.dim}{self.number:+d}" if self.number else self.dim

    def at(self, sizes: Mapping[str, int]) -> Number:
        """Return its value where the dims have these sizes."""
        return self.number + (sizes[self.dim] if self.dim else 0)


@dataclass(frozen=True)
class Values:
    """A range with both its ends, or a set of numbers."""

    low: End
    high: End
    among: tuple[Number, ...] = ()
    """The only values, ascending, if the range has gaps; its ends are the range's."""
    order: str = ""
    """Order along the last dim, one of `ORDERS`; empty for none."""

    def __str__(self) -> str:
        if self.among:
            text = f"={','.join(map(repr, self.among))}"
        elif self.low == End(0) and self.high.dim and self.high.number == -1:
            text = f"<{self.high.dim}"
        else:
            text = f"={self.low}..{self.high}"
        return f"{text},{self.order}" if self.order else text

    def ends(self, sizes: Mapping[str, int]) -> tuple[Number, Number]:
        """Return the smallest and the largest value where the dims have these sizes."""
        return self.low.at(sizes), self.high.at(sizes)

    def to_json(self) -> dict[str, Any]:
        """Return the form that reports and manifests hold."""
        document: dict[str, Any] = {"min": _end_json(self.low), "max": _end_json(self.high)}
        if self.among:
            document = {"among": list(self.among)}
        return document | ({"order": self.order} if self.order else {})

    def problem(self, dtype: str, dims: Mapping[str, tuple[int, int]]) -> str | None:
        """Return why no tensor of a dtype can hold them, as a phrase; None if one can.

        Args:
            dtype: torch's name.
            dims: the smallest and the largest size of each dim of the inputs.
        """
        ends = (self.low, self.high)
        for end in ends:
            if end.dim and end.dim not in dims:
                known = f"expected {' or '.join(dims)}" if dims else "the inputs have none"
                return f'"{end.dim}" is not a dim of an input; {known}'
        limits = _limits(dtype)
        if limits is None:
            return f"{dtype} takes no range of values; expected integers or floats"
        numbers = (*self.among, *(end.number for end in ends))
        if "int" in dtype and (fraction := [n for n in numbers if n != int(n)]):
            return f"{fraction[0]} is not a whole number, and {dtype} holds no other"
        smallest, largest = self.low.at(_part(dims, 0)), self.high.at(_part(dims, 1))
        if smallest < limits[0] or largest > limits[1]:
            return (
                f"they go from {smallest} to {largest}, and {dtype} from {limits[0]} to {limits[1]}"
            )
        if self.low.dim == self.high.dim:
            lowest, highest = self.low.number, self.high.number
        else:
            lowest, highest = self.low.at(_part(dims, 1)), self.high.at(_part(dims, 0))
        if lowest > highest:
            return f"{self.low} is not below {self.high} at every size of the dims"
        return None


@dataclass(frozen=True)
class Limits:
    """Values of an input for which an artifact is known to differ from its checkpoint."""

    nan: bool = False
    """Whether it differs for NaN."""
    low: Number | None = None
    """The smallest number for which it agrees, where some that are smaller differ."""
    high: Number | None = None
    """The largest number for which it agrees, where some that are larger differ."""
    closed: bool = False
    """Whether it differs for rows of a mask that let nothing through."""
    padded: bool = False
    """Whether it differs for rows of a mask that do not let their first position through."""

    def __str__(self) -> str:
        return " or ".join(
            text
            for stated, text in (
                (self.nan, "NaN"),
                (self.low is not None, f"a value below {self.low or 0:g}"),
                (self.high is not None, f"a value above {self.high or 0:g}"),
                (self.closed, "a row that is masked everywhere"),
                (self.padded, "a row that is padded on the left"),
            )
            if stated
        )

    def to_json(self) -> dict[str, Any]:
        """Return the form that reports and manifests hold: what is stated alone."""
        return {
            key: each for key, each in vars(self).items() if each is not None and each is not False
        }


def read_limits(fields: Fields) -> Limits:
    """Read limits as reports and manifests hold them; problems are noted in `fields`."""
    stated: dict[str, Any] = {
        each.name: fields.number(each.name) if each.default is None else fields.boolean(each.name)
        for each in dataclass_fields(Limits)
        if each.name in fields.values
    }
    return Limits(**stated)


def parse_values(text: str) -> Values:
    """Read what stands behind the dims of an `--input`.

    Raises:
        ValueError: a phrase that says what is wrong.
    """
    sign, *items = text[:1], *text[1:].split(",")
    order = items.pop() if items[-1] in ORDERS else ""
    if sign == "<" and len(items) == 1:
        end = _parse_end(items[0])
        return Values(End(0), End(end.number - 1, end.dim), order=order)
    if sign == "=" and len(items) == 1 and ".." in items[0]:
        low, _, high = items[0].partition("..")
        return Values(_parse_end(low), _parse_end(high), order=order)
    if sign == "=" and items and all(map(_NUMBER.fullmatch, items)):
        return _among(map(_parse_number, items), order)
    raise ValueError(f'"{text}" is not a range of values')


def read_values(fields: Fields) -> Values:
    """Read values as reports and manifests hold them; problems are noted in `fields`."""
    order = fields.text_or_none("order") or ""
    if order not in ("", *ORDERS):
        fields.wrong("order", " or ".join(ORDERS), order)
    if "among" not in fields.values:
        return Values(_read_end(fields, "min"), _read_end(fields, "max"), order=order)
    numbers = fields.items("among")
    if not (0 < len(numbers) <= MAX_AMONG and all(map(is_number, numbers))):
        fields.wrong("among", f"1 to {MAX_AMONG} numbers", numbers)
        numbers = [0]
    return _among(numbers, order)


def read_end(value: Any) -> End | None:
    """Return an end as reports hold it, or None for what is not one."""
    if is_number(value):
        return End(value)
    try:
        return _parse_end(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _among(numbers: Any, order: str) -> Values:
    among = tuple(sorted(set(numbers)))
    if len(among) > MAX_AMONG:
        raise ValueError(f"{len(among)} values are listed; at most {MAX_AMONG} can be")
    return Values(End(among[0]), End(among[-1]), among, order)


def _read_end(fields: Fields, key: str) -> End:
    end = read_end(fields.values.get(key))
    if end is None:
        fields.wrong(key, "a number, or a dim's name such as nodes-1", fields.values.get(key))
    return end or End(0)


def _parse_end(text: str) -> End:
    if _NUMBER.fullmatch(text):
        return End(_parse_number(text))
    size = _SIZE.fullmatch(text)
    if size is None:
        raise ValueError(f'"{text}" is neither a number nor the name of a dim')
    return End(int(size[2] or 0), size[1])


def _parse_number(text: str) -> Number:
    return float(text) if set(text) & set(".eE") else int(text)


def _end_json(end: End) -> Number | str:
    return str(end) if end.dim else end.number


def _limits(dtype: str) -> tuple[Number, Number] | None:
    """Return the smallest and the largest number of a dtype that can be stated."""
    if integer := _INTEGER.fullmatch(dtype):
        bits = int(integer[2]) - (not integer[1])
        return 0 if integer[1] else max(-(2**bits), -_MAX_WHOLE), min(2**bits - 1, _MAX_WHOLE)
    largest = _MAX_FLOATS.get(dtype)
    return None if largest is None else (-largest, largest)


def _part(dims: Mapping[str, tuple[int, int]], place: int) -> dict[str, int]:
    return {name: ends[place] for name, ends in dims.items()}
