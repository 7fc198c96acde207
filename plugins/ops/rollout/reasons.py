"""Whether a candidate has other reasons than the live version for the same requests.

A version may answer alike because of something else: a column that gives the label away, a mark in
the corner of a picture. Copies that both versions answered are explained for both, by the workers
that only explain. What is compared is the mean share of each part; what is bet on is that one of
them is farther off than the rule allows, over all requests, or over those of one predicted class.
"""

from __future__ import annotations

import asyncio
import copy
import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from modelyard.archiver.reference import OTHER, Reasons, Reference, fold, parse_reference
from modelyard.archiver.untrusted.names import REFERENCE_NAME
from modelyard.plugins.ops.reasons import OTHER_FORMS, explain, read_answer
from modelyard.plugins.ops.rollout import evidence
from modelyard.plugins.ops.rollout.evidence import Bet, Bound
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane.call import Reply
from modelyard.serve.errors import WorkerDied

if TYPE_CHECKING:
    from modelyard.plugins.ops.rollout.shadow import Copy

LIMIT = 0.1
"""Largest difference of a part's mean shares where the rule names none: it lies above what two
trainings of the same data differ by, as `benchmarks.reasons` has it."""
EVERY = 10
"""One copy in so many is explained once reasons were shown to be kept."""
_GRID = 64
"""Differences are counted to a part of so many, up or down by lot, so that their mean stays."""
_MOST_LIMIT = 0.999
Cell = tuple[str | None, str]
"""A predicted class, or None for all requests, and a part."""


class Leaning:
    """How much more, or less, of a candidate's reasons each part is; a part of a rule.

    Args:
        limit: largest difference of a part's mean shares.
        parts: parts that both versions tell apart.
        floors: class → how far apart its mean shares are by chance in few rows. Where shares vary
            much, two trainings are farther apart, too: of a class the limit is so much higher, and
            over all requests at least the largest floor.
    """

    name = "reasons"
    kept: Sequence[Any] = ("each part",)
    broken: Sequence[Any] = ()

    def __init__(
        self, limit: float, parts: Sequence[str], floors: Mapping[str, float] | None = None
    ) -> None:
        self.parts = parts
        self.explained = 0
        """Requests whose answers were explained for both versions."""
        self.problem = ""
        """Why the latest one was not."""
        self._cells: defaultdict[Cell, Counter[float]] = defaultdict(Counter)
        floors = floors or {}
        self.limits: dict[str | None, float] = {None: max([limit, *floors.values()])}
        """Limits by class; None stands for all requests."""
        self.limits |= {label: limit + floor for label, floor in floors.items()}
        self._keeping = self._bets(self.limits[None], is_above=False)
        self._breaking = {
            label: self._bets(most, is_above=True) for label, most in self.limits.items()
        }

    def _bets(self, limit: float, is_above: bool) -> dict[tuple[str, int], Bet]:
        limit = min(limit, _MOST_LIMIT)
        return {(part, sign): Bet(limit, is_above) for part in self.parts for sign in (1, -1)}

    def put(self, live: Reasons, candidate: Reasons) -> None:
        """Take both explanations of one request."""
        self.explained += 1
        moved = {part: candidate.shares[part] - live.shares[part] for part in self.parts}
        _bet(self._keeping, moved)
        for label in (None, live.label):
            if (bets := self._breaking.get(label)) is not None:
                _bet(bets, moved)
                for part, value in moved.items():
                    at = math.floor(value * _GRID + random.random()) / _GRID
                    self._cells[label, part][at] += 1

    def is_kept(self, alpha: float, more: int = 0) -> bool:
        """Return whether each part was shown to be no farther off than the limit."""
        bets = self._keeping.values()
        return all(copy.copy(bet).put(0.0, more).log >= -math.log(alpha) for bet in bets)

    def is_broken(self, alpha: float) -> bool:
        """Return whether a part was shown to be farther off: of all requests, or of a class."""
        every, *classes = (_log(bets) for bets in self._breaking.values())
        logs = [every, evidence.mean_log(classes)] if classes else [every]
        return evidence.mean_log(logs) >= -math.log(alpha)

    def farthest(self, alpha: float) -> tuple[Cell, Bound]:
        """Return the part that is farthest off, how far, and between which ends that is sure.

        Of all parts together the ends fail with chance `alpha`, each. It is a class's part where
        that is shown to be above its limit.
        """
        label = max(self._breaking, key=lambda each: _log(self._breaking[each]))
        if _log(self._breaking[label]) < -math.log(alpha):
            label = None
        part = max(self.parts, key=lambda each: abs(_mean(self._cells[label, each])))
        cells = self._cells[label, part]
        return (label, part), evidence.bound(cells, (-1, 1), alpha / len(self.parts))

    def describe(self, alpha: float) -> str:
        """Return in a sentence what is known."""
        problem = f"; not explained: {self.problem}" if self.problem else ""
        if not self.explained:
            return f"reasons: no request was explained for both versions yet{problem}"
        (label, part), found = self.farthest(alpha)
        of = "" if label is None else f' where "{label}" is predicted'
        sign, than = (1, "more") if found.estimate >= 0 else (-1, "less")
        low, high = sorted(100 * sign * end for end in found[1:])
        return (
            f'reasons: "{part}" has {100 * sign * found.estimate:.1f} points of 100 {than} of them '
            f"than for the live version{of}, {low:.1f} to {high:.1f}, in {self.explained} requests "
            f"explained for both; allowed are {100 * self.limits[label]:.3g} more or less{problem}"
        )


def _bet(bets: Mapping[tuple[str, int], Bet], moved: Mapping[str, float]) -> None:
    for (part, sign), bet in bets.items():
        bet.put(sign * moved[part])


def _log(bets: Mapping[tuple[str, int], Bet]) -> float:
    return evidence.mean_log([bet.log for bet in bets.values()])


def _mean(cells: Mapping[float, int]) -> float:
    return sum(value * count for value, count in cells.items()) / max(1, sum(cells.values()))


def compare_parts(limit: float, live: Reference, candidate: Reference) -> Leaning | str:
    """Return what compares the reasons of two versions, or why they cannot be compared."""
    both = [each for each in live.shares if each in candidate.shares]
    apart = sorted(live.shares.keys() ^ candidate.shares.keys())
    if apart and OTHER not in both:
        return f"reasons are not comparable: parts differ: {', '.join(apart)[:200]}"
    return Leaning(limit, both, {each: group.floor for each, group in live.classes.items()})


class Explained:
    """Has copies explained by both versions, one at a time. Lives on the event loop.

    Args:
        limit: what the rule allows; 1 or more allows anything, and nothing is explained.
    """

    def __init__(self, limit: float, live: ModelVersion, candidate: ModelVersion) -> None:
        self._sides = live, candidate
        self._limit = limit
        self._references: list[Reference] = []
        self._is_running = self._is_ended = False
        self._since = 0
        self.leaning: Leaning | str = ""
        """What both explanations say; where they are not compared, why."""
        self.counts: Counter[str] = Counter()
        """What became of copies that were to be explained."""
        self.begin()

    def begin(self) -> None:
        """Compare anew."""
        self.leaning = self._begin()

    def _begin(self) -> Leaning | str:
        if self._limit >= 1:
            return "reasons are not compared: the rule allows any"
        self._references = []
        for model in self._sides:
            name = f"{model.name} {model.version}"
            if model.explainers is None:
                return f"reasons are not compared: {name} has no workers that explain"
            try:
                data = (model.folder / REFERENCE_NAME).read_bytes()
                self._references.append(parse_reference(data))
            except OSError:
                return f"reasons are not compared: {name} was archived without --reference"
            except ValueError as error:
                return f"reasons are not compared: the reference of {name} is wrong: {error}"
        return compare_parts(self._limit, *self._references)

    def offer(self, copied: Copy, is_kept: bool) -> None:
        """Explain a copy for both versions, where a worker of each has nothing else to do.

        Args:
            is_kept: whether reasons were shown to be kept, so that few more are explained.
        """
        self._since += 1
        if isinstance(self.leaning, str) or self._is_ended or copied.flags & OTHER_FORMS:
            return
        if self._since < (EVERY if is_kept else 1):
            return
        asked = self._sides, copied.head, copied.parts, copied.flags
        if self._is_running or not (sinks := explain(*asked)):
            self.counts["busy"] += 1
            return
        self._since, self._is_running = 0, True
        done = asyncio.gather(*sinks, return_exceptions=True)
        done.add_done_callback(partial(self._ended, self.leaning))

    def _ended(self, leaning: Leaning, done: asyncio.Future[list[Any]]) -> None:
        """Take both explanations; what was cancelled gave way to one that somebody waits for."""
        self._is_running = False
        if done.cancelled():
            return
        said: list[Reasons] = []
        for model, reference, outcome in zip(
            self._sides, self._references, done.result(), strict=True
        ):
            name = f"{model.name} {model.version}"
            if isinstance(outcome, WorkerDied):
                leaning.problem, self._is_ended = f"a worker of {name} died of it", True
            if not isinstance(outcome, Reply):
                self.counts["interrupted"] += 1
                return
            try:
                label, shares = read_answer(outcome, reference.shares)
            except ValueError as error:
                self.counts["failed"] += 1
                leaning.problem = f"{name}: {error}"
                return
            said.append(
                Reasons(label, fold(shares, dict.fromkeys(leaning.parts)) if shares else {})
            )
        self.counts["explained"] += 1
        if all(each.shares for each in said):  # neither says that it is as the baseline
            leaning.put(*said)
