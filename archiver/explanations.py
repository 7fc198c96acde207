"""The certificate of an archive's explanations: what was measured of them, and by which bounds.

It is made in the dry run, by a plug-in, of requests that the archive holds: its golden requests,
and rows of the reference where `--certificate` says so. `MAR-INF/explanations.json` holds

    {"method": "integrated_gradients",
     "requests": [{"file": "MAR-INF/golden/0.request", "content_type": "image/png"}, …],
     "measured": [{"name": "error", "text": "…", "value": 1.0, "low": null, "high": null,
                   "limit": 0.875, "is_most": false}, …],
     "not_measured": {"randomised layer": "the archive holds no artifact with gradients"}}

An archive whose explanations miss a bound has none; `modelyard verify` measures again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from modelyard.archiver.untrusted.json import Fields, format_json, parse_json

FEWEST, MOST = 4, 16
"""Requests that are looked at: of fewer no interval would say anything."""
MAX_BYTES = 64 * 1024
ROWS_FOLDER = "MAR-INF/explained"
"""Folder of the rows of the reference that are packed to be looked at."""
ROWS_BYTES = 4 << 20
"""Most bytes of these rows together."""
BUDGET_S = 60.0
"""Time that the measures may take where nobody asked for them."""
PATIENCE_S = 400.0
"""The same with `--certificate`, and in `verify`."""
CLOSE = 0.1
"""How far a value may be from the stated one on another machine."""


class Asked(NamedTuple):
    """A request of the archive whose explanation is looked at."""

    file: str
    content_type: str


@dataclass(frozen=True)
class Finding:
    """One measure of explanations, and the bound that it has to keep."""

    name: str
    text: str
    """What was measured, in a few words."""
    value: float
    limit: float
    is_most: bool = False
    """Whether the value may be as large as `limit` at most; at least without."""
    low: float | None = None
    high: float | None = None
    """Ends of the interval of the value, where it has one: it is what has to keep the bound."""

    @property
    def passes(self) -> bool:
        """Whether it keeps the bound; a NaN does not."""
        if self.is_most:
            return (self.value if self.high is None else self.high) <= self.limit
        return (self.value if self.low is None else self.low) >= self.limit

    @property
    def needed(self) -> str:
        """The bound, as a table has it."""
        return f"{'at most' if self.is_most else 'at least'} {self.limit:.2f}"

    @property
    def measured(self) -> str:
        """The value, as a table has it."""
        if self.low is None or self.high is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Explanations:
    """What was measured of an archive's explanations."""

    method: str
    measured: tuple[Finding, ...]
    not_measured: Mapping[str, str]
    """Name of a measure → why it could not be made."""
    requests: tuple[Asked, ...] = field(default=())

    @property
    def problems(self) -> tuple[str, ...]:
        """Each measure that misses its bound, a phrase each."""
        return tuple(
            f"{each.name} is {each.measured}, needed {each.needed}: {each.text}"
            for each in self.measured
            if not each.passes
        )

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield a table's rows: the measure, its value, its bound, and what it says."""
        yield "EXPLANATIONS", "MEASURED", "NEEDED", f"{len(self.requests)} REQUESTS"
        for each in self.measured:
            says = each.text if each.passes else f"missed: {each.text}"
            yield each.name, each.measured, each.needed, says
        for name, why in self.not_measured.items():
            yield name, "not measured", "–", why

    def difference(self, again: "Explanations") -> str | None:
        """Return how what is measured again differs from what is stated here; None if it agrees."""
        stated = {each.name: each for each in self.measured}
        seen = {each.name: each for each in again.measured}
        apart = [f"{each} is not measured any more" for each in stated.keys() - seen.keys()]
        apart += [f"{each} is not stated" for each in seen.keys() - stated.keys()]
        for name in stated.keys() & seen.keys():
            said, found = stated[name], seen[name]
            if not abs(said.value - found.value) <= CLOSE:
                apart.append(f"{name} is stated as {said.measured}, measured as {found.measured}")
            elif (said.is_most, round(said.limit, 3)) != (found.is_most, round(found.limit, 3)):
                apart.append(f"{name} is stated to need {said.needed}, it needs {found.needed}")
        if self.method != again.method:
            apart.append(f"stated of {self.method}, answered by {again.method}")
        return "; ".join([*sorted(apart), *again.problems]) or None


def to_json(found: Explanations) -> dict[str, Any]:
    """Return what `from_json` reads."""
    return {
        "method": found.method,
        "requests": [each._asdict() for each in found.requests],
        "measured": [vars(each) for each in found.measured],
        "not_measured": dict(found.not_measured),
    }


def format_explanations(found: Explanations) -> bytes:
    """Write what `parse_explanations` reads."""
    return format_json(to_json(found))


def parse_explanations(data: bytes) -> Explanations:
    """Read a certificate.

    Raises:
        ValueError: it is not one; the message is a phrase without the file's name.
    """
    return from_json(parse_json(data, MAX_BYTES))


def from_json(value: Any) -> Explanations:
    """Return what `to_json` wrote; errors as `parse_explanations`."""
    fields = Fields(value)
    asked = [(each.text("file"), each.text("content_type")) for each in fields.objects("requests")]
    found = Explanations(
        fields.text("method"),
        tuple(map(_finding, fields.objects("measured"))),
        fields.mapping("not_measured", Fields.text),
        tuple(Asked(*each) for each in asked),
    )
    if not fields.problems and not FEWEST <= len(found.requests) <= MOST:
        fields.problems.append(f"{len(found.requests)} requests; expected {FEWEST} to {MOST}")
    fields.check()
    return found


def spread(count: int, room: int) -> Sequence[int]:
    """Return which of `count` rows are looked at: as many as there is room for, evenly spread."""
    taken = min(count, max(0, room))
    return [at * count // taken for at in range(taken)]


def _finding(fields: Fields) -> Finding:
    ends = {name: fields.values.get(name) for name in ("low", "high")}
    return Finding(
        fields.text("name"), fields.text("text"), fields.number("value"), fields.number("limit"),
        fields.boolean("is_most"),
        **{name: None if value is None else fields.number(name) for name, value in ends.items()},
    )  # fmt: skip
