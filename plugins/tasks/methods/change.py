"""Why not X: the smallest change of a row that makes the prediction X.

A change is of as few features as can be, and of those the one with the smallest sum of |to − from|
as shares of the features' ranges; another category counts as a whole range. Numbers stay within the
range that they have in the archive's reference, whole ones whole. Every change that is answered was
predicted, by what predicts.

Of trees all that a number can do to the output happens at their thresholds, and so a search of
these finds the smallest change there is, up to the rounding of what is shown. Of other models a
number is tried at `GRID` places of its range, and the best of these brought nearer by halves.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from modelyard.handlers.errors import BadInput
from modelyard.handlers.explain.attribute.attribution import chunks, most_rows
from modelyard.handlers.explain.attribute.method import Choice, Measurement, Result
from modelyard.handlers.models.backends import Artifact
from modelyard.plugins.tasks.methods.trees import cuts_of

GRID = 21
"""Places of a number's range that are tried, both ends among them."""
MOST_PREDICTIONS = 20_000
"""Changes of a row that are predicted, at most, in a search."""
MOST_SORTED = 2_000_000
"""Changes of so many features that are put in order by their size, at most."""
BEAM = 8
"""Changes of several features that are carried on with a further one."""
DEPTHS = 6
"""Features that there are to be predictions for; the more, the fewer values of each are tried."""
HALVINGS = 12
ROUNDING = 1e-3
"""Share of a range that a number may be moved on by, to be one of few digits."""
NOISE = 0.01
"""Share of its range by which each number is moved at most, to see whether a change holds."""
NEIGHBOURS = 400
ROWS = 256
"""Rows that share a pass."""
Z = 1.96
"""Half the width of an interval of 95 %, in standard deviations."""

Step = tuple[int, Any]
"""A feature by its place among the choices, and the value that it gets."""
Steps = tuple[Step, ...]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Found:
    """A change, and what was predicted of it."""

    steps: Steps
    cost: float
    margin: float
    """Score of X less the best of the others."""

    @property
    def order(self) -> tuple[int, float, float]:
        """What is smaller comes first."""
        return len(self.steps), self.cost, -self.margin


class Search:
    """Changes of one row, predicted in passes; a prediction is counted once.

    Args:
        result: explanation of the row.
        wanted: index of X among the classes.
    """

    def __init__(self, result: Result, wanted: int) -> None:
        self.version = result.version
        self.between = result.request.between_chunks
        self.row = result.request.inputs[0][0].cpu().numpy()
        self.wanted = wanted
        self.choices = [
            each if each.value is not None else replace(each, value=float(self.row[each.start]))
            for each in result.version.choices(result.row)
        ]
        self.asked = 0
        self.cuts = cuts_of(result.version.artifact, result.version.output_name)

    @cached_property
    def candidates(self) -> list[list[Any]]:
        """The values that each feature is tried with."""
        return [self._candidates(each) for each in self.choices]

    def _candidates(self, choice: Choice) -> list[Any]:
        if choice.texts:
            return [text for text in choice.texts if text != choice.value]
        if choice.range is None or choice.range.low == choice.range.high:
            return []
        low, high, is_whole = choice.range
        values = np.linspace(low, high, GRID)
        if self.cuts is not None:
            (zero,), (one,) = choice.encode(0.0), choice.encode(1.0)
            # Above the value the first number of each stretch between two cuts, below it the last.
            cuts = self.cuts.get(choice.start, np.zeros(0, np.float32))
            own = self.row[choice.start]
            near = np.where(cuts > own, cuts, np.nextafter(cuts, np.float32(-np.inf)))
            values = np.append((near.astype(float) - zero) / (one - zero), [low, high])
        if is_whole:
            values = np.where(values > choice.value, np.ceil(values), np.floor(values))
        inside = np.unique(values[(values >= low) & (values <= high)]).tolist()
        return [int(each) if is_whole else each for each in inside if each != choice.value]

    def cost(self, steps: Iterable[Step]) -> float:
        """Return the sum of what features move by, as shares of their ranges."""
        total = 0.0
        for at, value in steps:
            choice = self.choices[at]
            way = choice.range and choice.range.high - choice.range.low
            total += 1.0 if choice.texts or not way else abs(value - choice.value) / way
        return total

    def changed(self, steps: Steps) -> npt.NDArray[Any]:
        """Return the row as a prediction would read it."""
        row = self.row.copy()
        for at, value in steps:
            choice = self.choices[at]
            row[choice.start : choice.end] = choice.encode(value)
        return row

    def scores(self, rows: Sequence[npt.NDArray[Any]]) -> Floats:
        """Return the scores (R, K) that are predicted of rows."""
        artifact: Artifact = self.version.artifact
        found = []
        size = min(ROWS, most_rows(artifact))
        for at in range(0, len(rows), size):
            self.between()
            part = torch.from_numpy(np.stack(rows[at : at + size])).to(artifact.device)
            with torch.no_grad():
                found.append(self.version.score(artifact(part)).double().cpu().numpy())
        self.asked += len(rows)
        return np.concatenate(found)

    def margins(self, scores: Floats) -> Floats:
        """Return by how much X is ahead of the others, above 0 where it is predicted."""
        others = np.delete(scores, self.wanted, axis=1).max(1)
        margins = scores[:, self.wanted] - others
        # Of equal ones the first is predicted.
        ties = (margins == 0) & (scores.argmax(1) == self.wanted)
        return np.where(ties, np.finfo(float).tiny, margins)

    def try_all(self, every: Sequence[Steps]) -> list[Found]:
        """Predict changes."""
        if not every:
            return []
        found = []
        for at in range(0, len(every), ROWS):
            part = every[at : at + ROWS]
            margins = self.margins(self.scores([self.changed(each) for each in part]))
            found += [
                Found(each, self.cost(each), float(m))
                for each, m in zip(part, margins, strict=True)
            ]
        return found


def look(search: Search) -> tuple[Found | None, str]:
    """Find the smallest change, and say how sure it is that there is none smaller.

    Returns:
        The change, None where none was found; and a key of `_SURE`.
    """
    sure = "smallest tried" if search.cuts is None else "smallest"
    singles: list[Steps] = [
        ((at, value),) for at, values in enumerate(search.candidates) for value in values
    ]
    if len(singles) > MOST_PREDICTIONS // 2:
        singles, sure = singles[:: -(-len(singles) // (MOST_PREDICTIONS // 2))], "best found"
    tried = search.try_all(singles)
    if best := _best(tried):
        # The first of each feature, as far as halves could still bring it before the best.
        reach = best.cost + (1 / (GRID - 1) if search.cuts is None else 0)
        firsts = [
            _best(each for each in tried if each.steps[0][0] == at)
            for at in range(len(search.choices))
        ]
        close = [_nearer(search, each) for each in firsts if each and each.cost <= reach]
        return min(close, key=lambda each: each.order), sure
    for count in range(2, len(search.choices) + 1) if sure != "best found" else ():
        several, is_whole = _search_of(search, count)
        if several:
            return _nearer(search, several), sure
        if not is_whole:
            sure = "best found"
            break
    if sure != "best found":
        return None, sure
    found = _carry_on(search, tried)
    return found and _nearer(search, found), "best found"


def _search_of(search: Search, count: int) -> tuple[Found | None, bool]:
    """Predict changes of so many features, the smallest first, until one makes it X.

    Returns:
        It, and whether else all were predicted.
    """
    values = search.candidates
    costs = [np.array([search.cost([(at, value)]) for value in each])
             for at, each in enumerate(values)]  # fmt: skip
    number = _ways(list(map(len, values)), count)
    if number > MOST_SORTED:
        return None, False
    groups = list(itertools.combinations(np.flatnonzero(list(map(len, values))).tolist(), count))
    if not groups:
        return None, True
    sums = [reduce(np.add.outer, [costs[at] for at in each]).ravel() for each in groups]
    which = np.repeat(np.arange(len(groups)), list(map(len, sums)))
    place = np.concatenate([np.arange(len(each)) for each in sums])
    order = np.argsort(np.concatenate(sums), kind="stable")
    left = (MOST_PREDICTIONS - search.asked) // 2  # the other half is for what comes after
    for chunk in chunks(min(number, left), ROWS):
        every: list[Steps] = []
        for at in order[chunk]:
            group = groups[which[at]]
            chosen = np.unravel_index(place[at], [len(values[each]) for each in group])
            picked = zip(group, chosen, strict=True)
            every.append(tuple((each, values[each][one]) for each, one in picked))
        if best := _best(search.try_all(every)):
            return best, True
    return None, number <= left


def _ways(sizes: Sequence[int], count: int) -> int:
    """Return how often one of each of so many lists can be chosen, among lists of these sizes."""
    ways = [1] + [0] * count
    for size in sizes:
        for at in range(count, 0, -1):
            ways[at] += ways[at - 1] * size
    return ways[count]


def _best(tried: Iterable[Found]) -> Found | None:
    wanted = (each for each in tried if each.margin > 0)
    return min(wanted, key=lambda each: each.order, default=None)


def _carry_on(search: Search, tried: Sequence[Found]) -> Found | None:
    """Add feature after feature to the changes that bring X nearest, until it is predicted.

    Of each feature the values are tried that alone bring it nearest.
    """
    by_feature: dict[int, list[Steps]] = {}
    for each in sorted(tried, key=lambda each: -each.margin):
        by_feature.setdefault(each.steps[0][0], []).append(each.steps)
    left = MOST_PREDICTIONS - search.asked
    number = max(1, left // (DEPTHS * BEAM * max(1, len(by_feature))))
    singles = [steps for every in by_feature.values() for steps in every[:number]]
    while tried:
        # The best of each set of features: others have other values of the same.
        beam: dict[tuple[int, ...], Found] = {}
        for each in sorted(tried, key=lambda each: (-each.margin, each.cost)):
            if len(beam) < BEAM:
                beam.setdefault(tuple(at for at, _ in each.steps), each)
        every = {
            tuple(sorted((*each.steps, step), key=lambda one: one[0]))
            for each in beam.values()
            for (step,) in singles
            if step[0] not in {at for at, _ in each.steps}
        }
        if len(every) > MOST_PREDICTIONS - search.asked:
            break
        tried = search.try_all(sorted(every, key=repr))
        if best := _best(tried):
            return best
    return None


def _nearer(search: Search, found: Found) -> Found:
    """Take back what is not needed, bring numbers nearer to what they were, and round them."""
    for step in found.steps:
        rest = tuple(each for each in found.steps if each != step)
        if rest and (fewer := _best(search.try_all([rest]))):
            found = fewer
    for at, value in found.steps:
        choice = search.choices[at]
        if choice.range is None or choice.texts:
            continue
        others = tuple(each for each in found.steps if each[0] != at)
        near, far = min(max(choice.value, choice.range.low), choice.range.high), value
        for _ in range(HALVINGS if search.cuts is None else 0):
            middle = (near + far) / 2
            if choice.range.is_whole:
                middle = round(middle)
                if middle in (near, far):
                    break
            if best := _best(search.try_all([_with(others, at, middle)])):
                far, found = middle, best
            else:
                near = middle
        if not choice.range.is_whole:
            found = _rounded(search, found, others, at, far)
    return found


def _with(others: Steps, at: int, value: Any) -> Steps:
    return tuple(sorted((*others, (at, value)), key=lambda step: step[0]))


def _rounded(search: Search, found: Found, others: Steps, at: int, value: float) -> Found:
    """Return the change with the number of fewest digits that is hardly further away."""
    choice = search.choices[at]
    assert choice.range is not None
    low, high, _ = choice.range
    width = high - low
    away = 1 if value > choice.value else -1
    for digits in range(-math.ceil(math.log10(width)), 17):
        unit = 10.0**-digits
        short = round(away * math.ceil(away * value / unit) * unit, digits)
        if abs(short - value) <= ROUNDING * width and low <= short <= high:
            return _best(search.try_all([_with(others, at, short)])) or found
    return found


def change(result: Result) -> Measurement:
    """Find the smallest change that makes the prediction the target of `against`.

    Raises:
        BadInput: there is none to look for.
    """
    version, inputs = result.version, result.request.inputs
    if not isinstance(result.against, int):
        raise BadInput(
            "change looks for what makes the prediction another class: name it, against="
        )
    is_row = len(inputs) == 1 and inputs[0].dim() == 2 and len(version.artifact.inputs) == 1
    search = Search(result, result.against) if is_row and not result.method.cut else None
    if search is None or not any(search.candidates):
        raise BadInput(
            "change does not apply: nothing says what the values of this input could be; expected "
            "a table or a row of numbers, archived with --reference FILE, which says their ranges"
        )
    start = search.scores([search.row])
    if version.probabilities(torch.from_numpy(start)) is None or start.shape[1] < 2:
        raise BadInput("change does not apply: this model's predictions are not of classes")
    label = version.label(search.wanted)
    if search.margins(start)[0] > 0:
        said = f"“{label}” is predicted as it is"
        return Measurement({"label": label, "is_found": True, "changes": [], "summary": said})
    found, sure = look(search)
    fields: dict[str, Any] = {"label": label, "is_found": found is not None}
    if found is not None:
        fields |= _told(search, found, sure, result.seed)
    fields |= {"predictions": search.asked, "summary": _summary(search, found, sure, fields)}
    return Measurement(fields)


def _told(search: Search, found: Found, sure: str, seed: int) -> dict[str, Any]:
    changes = [
        {"feature": search.choices[at].name, "from": search.choices[at].value, "to": value}
        for at, value in found.steps
    ]
    scores = search.scores([search.changed(found.steps)])
    assert search.margins(scores)[0] > 0
    chances = search.version.probabilities(torch.from_numpy(scores))
    assert chances is not None
    share, low, high = holds(search, found, seed)
    return {
        "changes": changes,
        "size": found.cost,
        "probability": float(chances[0, search.wanted]),
        "margin": float(search.margins(scores)[0]),
        "sureness": sure,
        "holds": {"share": share, "low": low, "high": high, "noise": NOISE, "draws": NEIGHBOURS},
    }


def holds(search: Search, found: Found, seed: int) -> tuple[float, float, float]:
    """Return of how many neighbours X is predicted too, and the interval of that (Wilson, 95 %).

    A neighbour has every number moved by up to `NOISE` of its range, a whole one by whole steps.
    """
    random = np.random.default_rng(seed)
    values = dict(found.steps)
    rows = []
    for _ in range(NEIGHBOURS):
        row = search.changed(found.steps)
        for at, choice in enumerate(search.choices):
            if choice.range is not None and not choice.texts:
                width = choice.range.high - choice.range.low
                noise = random.uniform(-NOISE, NOISE) * width
                noise = round(noise) if choice.range.is_whole else noise
                row[choice.start : choice.end] = choice.encode(values.get(at, choice.value) + noise)
        rows.append(row)
    share = float((search.margins(search.scores(rows)) > 0).mean())
    count = NEIGHBOURS + Z**2
    middle = (share * NEIGHBOURS + Z**2 / 2) / count
    half = Z * math.sqrt(share * (1 - share) * NEIGHBOURS + Z**2 / 4) / count
    return share, max(0.0, middle - half), min(1.0, middle + half)


_SURE = {
    "smallest": "no smaller change does",
    "smallest tried": f"no smaller one of {GRID} values a feature does",
    "best found": "a smaller one may, not all were tried",
}


_NONE = {
    "smallest": "there is none",
    "smallest tried": f"there is none of {GRID} values a feature",
    "best found": "not all were tried",
}


def _summary(search: Search, found: Found | None, sure: str, fields: Mapping[str, Any]) -> str:
    label = fields["label"]
    if found is None:
        return (
            f"no change within the reference's ranges was found that makes it “{label}”, by "
            f"{search.asked} predictions; {_NONE[sure]}"
        )
    said = ", ".join(
        f"{each['feature']} {_spell(each['to'])} in place of {_spell(each['from'])}"
        for each in fields["changes"]
    )
    kept = fields["holds"]
    return (
        f"“{label}” with {said}: probability {fields['probability']:.3f}; {_SURE[sure]}; it holds "
        f"for {100 * kept['share']:.0f} % of neighbours within {100 * NOISE:.0f} % of the ranges"
    )


def _spell(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
