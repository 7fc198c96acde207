"""What a model's reasons usually are: the shares of each part of an input, kept in an archive.

A part is a named feature of a table or a region of a picture; its share is its part of the sum of
all |attributions| of an explanation. `MAR-INF/reference.json` holds

    {"rows": 200, "shares": {"age": 0.31, "income": 0.52, "other": 0.17}, "floor": 0.04,
     "classes": {"repaid": {"rows": 120, "shares": [0.3, 0.5, 0.2], "cells": ["0 7 …", …],
                            "floor": 0.05}, …}}

the means over the rows that were explained when the archive was written, for each class that was
predicted the same with how often its shares were how large, and what chance alone moves. Live
predictions are explained for the same parts, and compared with these. Archives of before have
neither classes nor floors. `ranges` holds where the numbers of the rows lay, by which a change of a
row is bounded: {"age": {"low": 18, "high": 94, "is_whole": true}, …}.
"""

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from modelyard.archiver.untrusted.json import Fields, format_json, parse_json
from modelyard.archiver.untrusted.names import quoted

MOST_PARTS = 32
"""Most parts that are told apart; the others, which count least, are one: `other`."""
MOST_CLASSES = 16
"""Most classes that are told apart; those that were predicted most often."""
OTHER = "other"
MAX_NAME = 128
"""Characters of a part's or a class's name that are kept."""
MAX_BYTES = 128 * 1024
CELLS = 30
"""Sizes of a share that are told apart: below 0.0001, and seven to each factor of ten."""
WINDOW = 100
"""Explanations over which shares are averaged: each moves the mean by so small a part of its
distance."""
FEW = 20
"""Rows of a class that a training may have seen by chance, and another one not."""
_DRAWS = 200
_SURE = 0.95
_COUNTS = re.compile(r"[0-9]{1,9}( [0-9]{1,9})*")
_ROUNDING = 1e-3
"""How far from 1 the means may add up to."""


MOST_RANGES = 256
"""Numbers of a row whose ranges are kept."""


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


def _read_range(fields: Fields) -> Range:
    found = Range(fields.number("low"), fields.number("high"), fields.boolean("is_whole"))
    if found.low > found.high:
        fields.wrong("low", "at most `high`", found.low)
    return found


class Reasons(NamedTuple):
    """What one explanation says."""

    label: str
    """Predicted class; empty where it is not said."""
    shares: Mapping[str, float]
    """Part → share; nothing where the input is as the baseline."""


def read_reasons(answer: Any) -> Reasons:
    """Return what `shares` of a handler answers: shares, or those with the predicted class.

    Raises:
        ValueError: it is neither.
    """
    label: Any = ""
    shares = answer
    if isinstance(answer, dict) and isinstance(answer.get("shares"), dict):
        label, shares = answer.get("class"), answer["shares"]
    if not isinstance(shares, dict) or not isinstance(label, str):
        raise ValueError(f'expected shares by part, or {{"class": …, "shares": …}}, got {answer!r}')
    return Reasons(label[:MAX_NAME], shares)


def cell_of(share: float) -> int:
    """Return the place of a share among sizes, which are chosen before any is seen."""
    return 0 if share < 1e-4 else min(CELLS - 1, 1 + int(7 * math.log10(share * 1e4)))


@dataclass(frozen=True)
class Group:
    """The shares of rows of one class, by part in the reference's order."""

    rows: int
    shares: Sequence[float]
    """Means."""
    cells: Sequence[Sequence[int]]
    """How many rows had a share of each size, without the empty cells at the end."""
    floor: float
    """How far the mean shares of `FEW` of its rows and of others are apart, in the part that is
    farthest; 95 % of the time they are nearer."""


@dataclass(frozen=True)
class Reference:
    """The mean shares of some rows."""

    rows: int
    """How many gave reasons; one that is as the baseline gives none."""
    shares: Mapping[str, float]
    """Part → mean share; they add up to 1."""
    floor: float | None = None
    """What `distance` of live rows' means is at most while nothing changes, 95 % of the time; None
    where it was not measured."""
    classes: Mapping[str, Group] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    """Range of each number that the rows held."""

    def fold(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Return shares of these parts alone: what is not among them counts as `other`."""
        return fold(shares, self.shares)

    def usual(self, label: str) -> Sequence[float]:
        """Return the mean shares of a class; of all rows, where it is not told apart."""
        group = self.classes.get(label)
        return tuple(self.shares.values()) if group is None else group.shares


def fold(shares: Mapping[str, float], parts: Mapping[str, Any]) -> dict[str, float]:
    """Return shares of some parts alone: what is not among them counts as `other`."""
    folded = dict.fromkeys(parts, 0.0)
    for name, share in shares.items():
        name = name[:MAX_NAME]
        place = name if name in folded else OTHER
        folded[place] = folded.get(place, 0.0) + share
    return folded


def distance(moved: Sequence[float]) -> float:
    """Return the total variation distance of mean shares that are so far apart, part by part.

    Half the sum of |differences|: 0 where they are the same, 1 where they share no part, and 0.1
    where a tenth of the reasons has gone from some parts to others.

    Source: Levin and Peres, Markov Chains and Mixing Times, proposition 4.2.
    """
    return sum(map(abs, moved)) / 2


def make_reference(answers: Sequence[Any]) -> Reference:
    """Average the shares of rows; the parts with the largest means keep their names.

    Args:
        answers: what `shares` of a handler answers to each.

    Raises:
        ValueError: none of the rows has any.
    """
    said = [each for each in map(read_reasons, answers) if each.shares]
    if not said:
        raise ValueError("no row gives a reason: each is as the baseline, or changes no output")
    sums: dict[str, float] = {}
    for _, row in said:
        for name, share in row.items():
            sums[name[:MAX_NAME]] = sums.get(name[:MAX_NAME], 0.0) + share
    ranked = sorted(sums, key=lambda name: (name != OTHER, sums[name]), reverse=True)
    named = ranked if len(ranked) <= MOST_PARTS else [*ranked[: MOST_PARTS - 1], OTHER]
    parts = dict.fromkeys(named, 0.0)
    rows = [list(fold(row, parts).values()) for _, row in said]
    members: dict[str, list[list[float]]] = {}
    for (label, _), each in zip(said, rows, strict=True):
        members.setdefault(label, []).append(each)
    common = sorted(members, key=lambda label: len(members[label]), reverse=True)[:MOST_CLASSES]
    draw = random.Random(0)
    groups = {label: _group(members[label], draw) for label in common}
    means = dict(zip(parts, _means(rows), strict=True))
    bare = Reference(len(rows), means, None, groups)
    moved = [
        [share - usual for share, usual in zip(each, bare.usual(label), strict=True)]
        for (label, _), each in zip(said, rows, strict=True)
    ]
    return Reference(len(rows), means, _floor(moved, draw), groups)


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [round(sum(column) / len(rows), 6) for column in zip(*rows, strict=True)]


def _group(rows: Sequence[Sequence[float]], draw: random.Random) -> Group:
    cells = []
    for column in zip(*rows, strict=True):
        places = list(map(cell_of, column))
        cells.append([places.count(place) for place in range(max(places) + 1)])
    apart = [
        max(abs(a - b) for a, b in zip(*(_means(draw.choices(rows, k=FEW)) for _ in range(2)),
                                       strict=True))
        for _ in range(_DRAWS)
    ]  # fmt: skip
    return Group(len(rows), _means(rows), cells, _quantile(apart))


def _floor(moved: Sequence[Sequence[float]], draw: random.Random) -> float:
    """Return the distance that live rows show by chance, of two bootstrap samples.

    One stands for the reference, which knows its classes from few rows; the other one for as many
    live rows as a mean knows that each moves by 1 / `WINDOW` of its distance: 2 × `WINDOW` − 1.
    """
    apart = []
    for _ in range(_DRAWS):
        one, other = (
            _means(draw.choices(moved, k=count)) for count in (len(moved), 2 * WINDOW - 1)
        )
        apart.append(distance([a - b for a, b in zip(one, other, strict=True)]))
    return _quantile(apart)


def _quantile(values: list[float]) -> float:
    return round(sorted(values)[int(_SURE * len(values))], 6)


def format_reference(reference: Reference) -> bytes:
    """Write what `parse_reference` reads."""
    groups = {
        label: {**vars(group), "cells": [" ".join(map(str, each)) for each in group.cells]}
        for label, group in reference.classes.items()
    }
    ranges = {name: each._asdict() for name, each in reference.ranges.items()}
    shares = dict(reference.shares)
    return format_json({**vars(reference), "shares": shares, "classes": groups, "ranges": ranges})


def parse_reference(data: bytes) -> Reference:
    """Read a reference.

    Raises:
        ValueError: it is not one; the message is a phrase without the file's name.
    """
    fields = Fields(parse_json(data, MAX_BYTES))
    problems = fields.problems
    rows, shares = fields.integer("rows"), fields.mapping("shares", Fields.number)
    ranges = fields.mapping("ranges", lambda at, name: _read_range(at.object(name)), may_lack=True)
    floor = fields.number("floor") if "classes" in fields.values else None
    groups = fields.mapping(
        "classes", lambda at, label: _read_group(at.object(label), len(shares)), may_lack=True
    )
    if not problems:
        problems += [f"{quoted(name)} is {share}" for name, share in shares.items() if share < 0]
        problems += [
            f"{quoted(name)} is too long" for name in (*shares, *groups) if len(name) > MAX_NAME
        ]
        if rows < 1:
            problems.append(f"rows is {rows}")
        if not 1 <= len(shares) <= MOST_PARTS:
            problems.append(f"{len(shares)} parts; expected 1 to {MOST_PARTS}")
        if len(groups) > MOST_CLASSES:
            problems.append(f"{len(groups)} classes; expected at most {MOST_CLASSES}")
        if abs(sum(shares.values()) - 1) > _ROUNDING:
            problems.append(f"the shares add up to {sum(shares.values()):.6g}; expected 1")
    fields.check()
    return Reference(rows, shares, floor, groups, ranges)


def _read_group(fields: Fields, parts: int) -> Group:
    rows, floor = fields.integer("rows"), fields.number("floor")
    shares, cells = fields.items("shares"), [_counts(each) for each in fields.items("cells")]
    are_shares = all(isinstance(each, int | float) and 0 <= each <= 1 for each in shares)
    if len(shares) != parts or not are_shares:
        fields.wrong("shares", f"{parts} numbers from 0 to 1", shares)
    if len(cells) != parts or not all(len(each) <= CELLS and sum(each) == rows for each in cells):
        fields.wrong("cells", f"{parts} texts of at most {CELLS} counts of {rows} rows", cells)
    return Group(rows, shares, cells, floor)


def _counts(text: Any) -> list[int]:
    is_text = isinstance(text, str) and _COUNTS.fullmatch(text)
    return list(map(int, text.split())) if is_text else []


def read_requests(place: Path) -> Iterator[tuple[str, Any]]:
    """Yield a name and a body for each request: of a JSON list, or of a folder of files.

    Raises:
        ValueError: a file that is not a list of bodies; it is named.
    """
    files = sorted(each for each in place.rglob("*") if each.is_file()) or [place]
    for file in files:
        content = bytearray(file.read_bytes())
        if file.suffix != ".json":
            yield file.name, content
            continue
        try:
            rows = parse_json(content)
        except ValueError as error:
            raise ValueError(f"{file.name} is not JSON: {error}") from error
        if not isinstance(rows, list) or not rows:
            raise ValueError(f"{file.name} holds no list; expected request bodies in one")
        yield from ((f"{file.name}[{at}]", row) for at, row in enumerate(rows))
