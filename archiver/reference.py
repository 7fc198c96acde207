"""What a model's reasons usually are: the mean share of each part of an input, kept in an archive.

A part is a named feature of a table or a region of a picture; its share is its part of the sum of
all |attributions| of an explanation. `MAR-INF/reference.json` holds

    {"rows": 200, "shares": {"age": 0.31, "income": 0.52, "other": 0.17}}

the means over the rows that were explained when the archive was written. Live predictions are
explained for the same parts, and their means compared with these.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelyard.archiver.untrusted.json import Fields, format_json, parse_json
from modelyard.archiver.untrusted.names import quoted

MOST_PARTS = 32
"""Most parts that are told apart; the others, which count least, are one: `other`."""
OTHER = "other"
MAX_NAME = 128
"""Characters of a part's name that are kept."""
MAX_BYTES = 64 * 1024
_ROUNDING = 1e-3
"""How far from 1 the means may add up to."""


@dataclass(frozen=True)
class Reference:
    """The mean shares of some rows."""

    rows: int
    """How many gave reasons; one that is as the baseline gives none."""
    shares: Mapping[str, float]
    """Part → mean share; they add up to 1."""

    def fold(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Return shares of these parts alone: what is not among them counts as `other`."""
        folded = dict.fromkeys(self.shares, 0.0)
        for name, share in shares.items():
            name = name[:MAX_NAME]
            place = name if name in folded else OTHER
            folded[place] = folded.get(place, 0.0) + share
        return folded

    def distance(self, shares: Mapping[str, float]) -> float:
        """Return the total variation distance to other mean shares of the same parts.

        Half the sum of |differences|: 0 where they are the same, 1 where they share no part, and
        0.1 where a tenth of the reasons has gone from some parts to others.

        Source: Levin and Peres, Markov Chains and Mixing Times, proposition 4.2.
        """
        return sum(abs(shares[name] - mean) for name, mean in self.shares.items()) / 2


def make_reference(rows: list[dict[str, float]]) -> Reference:
    """Average the shares of rows; the parts with the largest means keep their names.

    Raises:
        ValueError: none of the rows has any.
    """
    rows = [row for row in rows if row]
    if not rows:
        raise ValueError("no row gives a reason: each is as the baseline, or changes no output")
    sums: dict[str, float] = {}
    for row in rows:
        for name, share in row.items():
            sums[name[:MAX_NAME]] = sums.get(name[:MAX_NAME], 0.0) + share
    ranked = sorted(sums, key=lambda name: (name != OTHER, sums[name]), reverse=True)
    kept = ranked if len(ranked) <= MOST_PARTS else [*ranked[: MOST_PARTS - 1], OTHER]
    means = dict.fromkeys(kept, 0.0)
    for name, total in sums.items():
        means[name if name in means else OTHER] += total / len(rows)
    return Reference(len(rows), {name: round(mean, 6) for name, mean in means.items()})


def format_reference(reference: Reference) -> bytes:
    """Write what `parse_reference` reads."""
    return format_json({"rows": reference.rows, "shares": dict(reference.shares)})


def parse_reference(data: bytes) -> Reference:
    """Read a reference.

    Raises:
        ValueError: it is not one; the message is a phrase without the file's name.
    """
    fields = Fields(parse_json(data, MAX_BYTES))
    problems = fields.problems
    rows, entries = fields.integer("rows"), fields.object("shares")
    shares = {name: entries.number(name) for name in entries.values}
    if not problems:
        problems += [f"{quoted(name)} is {share}" for name, share in shares.items() if share < 0]
        problems += [f"{quoted(name)} is too long" for name in shares if len(name) > MAX_NAME]
        if rows < 1:
            problems.append(f"rows is {rows}")
        if not 1 <= len(shares) <= MOST_PARTS:
            problems.append(f"{len(shares)} parts; expected 1 to {MOST_PARTS}")
        if abs(sum(shares.values()) - 1) > _ROUNDING:
            problems.append(f"the shares add up to {sum(shares.values()):.6g}; expected 1")
    fields.check()
    return Reference(rows, shares)


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
