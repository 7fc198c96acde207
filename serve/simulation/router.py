"""Which cell a request goes to, by what one router knows: how many of its own are in each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

RULES = {
    "least": "least in flight",
    "two": "the lesser of two drawn at random",
    "random": "at random",
    "archive": "least in flight among the cells that have the archive alone",
}


class Router:
    """One router. Cells are numbers.

    Args:
        rule: of `RULES`.
        able: model → the cells that have it.
    """

    def __init__(self, rule: str, able: dict[str, Sequence[int]], chance: Random) -> None:
        self._chance = chance
        makes = {"two": LesserOfTwo, "random": Anywhere}.get(rule, LeastInFlight)
        groups: dict[tuple[int, ...], Group] = {}
        self._groups: dict[str, Group] = {}
        for model, cells in able.items():
            key = tuple(cells)
            if key not in groups:
                groups[key] = makes(key, chance)
            self._groups[model] = groups[key]
        self._all = list(groups.values())

    def pick(self, model: str) -> int | None:
        """Return a cell that is up and has the model, and count the request there."""
        group = self._groups[model]
        cell = group.pick()
        if cell is not None:
            group.add(cell, 1)
        return cell

    def left(self, model: str, cell: int) -> None:
        """Take note that a cell has answered."""
        self._groups[model].add(cell, -1)

    def down(self, cell: int) -> None:
        """Send nothing there any more."""
        for group in self._all:
            group.remove(cell)

    def up(self, cell: int) -> None:
        """Send there again; nothing is in flight."""
        for group in self._all:
            group.put_back(cell)


class Group:
    """Cells that have the same models."""

    def __init__(self, cells: Iterable[int], chance: Random) -> None:
        self._random = chance.random
        self._members = set(cells)
        self._up: list[int] = []
        self._place: dict[int, int] = {}
        self._held: dict[int, int] = {}
        for cell in self._members:
            self.put_back(cell)

    def pick(self) -> int | None:
        """Return one of the cells that are up."""
        raise NotImplementedError

    def add(self, cell: int, count: int) -> None:
        """Count requests in a cell; of one that is down nothing is known."""
        if cell in self._held:
            self._held[cell] += count

    def remove(self, cell: int) -> None:
        """Forget a cell."""
        if self._held.pop(cell, None) is not None:
            place, last = self._place.pop(cell), self._up.pop()
            if last != cell:
                self._up[place] = last
                self._place[last] = place

    def put_back(self, cell: int) -> None:
        """Have a cell among those that are up."""
        if cell in self._members and cell not in self._held:
            self._held[cell] = 0
            self._place[cell] = len(self._up)
            self._up.append(cell)


class Anywhere(Group):
    """All are alike."""

    def pick(self) -> int | None:
        """Return any."""
        return self._up[int(self._random() * len(self._up))] if self._up else None


class LesserOfTwo(Group):
    """Power of two choices (Mitzenmacher 2001)."""

    def pick(self) -> int | None:
        """Return the one with fewer of two that are drawn; they may be the same."""
        if not self._up:
            return None
        up, held = self._up, self._held
        one, other = up[int(self._random() * len(up))], up[int(self._random() * len(up))]
        return one if held[one] <= held[other] else other


class LeastInFlight(Group):
    """Those with equally many lie in one list, so that no search is needed among 10,000."""

    def __init__(self, cells: Iterable[int], chance: Random) -> None:
        self._levels: list[list[int]] = [[]]
        self._at: dict[int, int] = {}
        self._least = 0
        super().__init__(cells, chance)

    def pick(self) -> int | None:
        """Return any of those with the fewest."""
        if not self._held:
            return None
        while not self._levels[self._least]:
            self._least += 1
        level = self._levels[self._least]
        return level[int(self._random() * len(level))]

    def add(self, cell: int, count: int) -> None:
        """Move it to another level."""
        if cell in self._held:
            self._leave(cell)
            super().add(cell, count)
            self._enter(cell)

    def remove(self, cell: int) -> None:
        """Take it from its level."""
        if cell in self._held:
            self._leave(cell)
            super().remove(cell)

    def put_back(self, cell: int) -> None:
        """Have it on the lowest level."""
        if cell in self._members and cell not in self._held:
            super().put_back(cell)
            self._enter(cell)

    def _leave(self, cell: int) -> None:
        level = self._levels[self._held[cell]]
        place, last = self._at.pop(cell), level.pop()
        if last != cell:
            level[place] = last
            self._at[last] = place

    def _enter(self, cell: int) -> None:
        held = self._held[cell]
        while held >= len(self._levels):
            self._levels.append([])
        self._at[cell] = len(self._levels[held])
        self._levels[held].append(cell)
        self._least = min(self._least, held)
