"""How often the judge of a roll-out is wrong, and after how many requests it is sure.

Many roll-outs at once, each of a candidate whose truth is known: what is counted of them are
arrays, and what is looked at, limits and chances are the product's own (`rule.parts_of`). Only the
bets are calculated again, with numpy; `plugins/ops/tests/rollout/test_montecarlo.py` holds both
against each other.

    python -m benchmarks.judge            # the table of docs/rollout.md, from 2,000 roll-outs each
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from modelyard.plugins.ops.rollout import blocks, evidence, rule
from modelyard.plugins.ops.rollout.blocks import Blocks
from modelyard.plugins.ops.rollout.rule import Check, Rule, Tally, parts_of

RATE = 100
CALM_S = 10.0
LOOK_EVERY = 25
"""Requests from one look to the next: what comes in a quarter of a second at 100 a second."""
FAILS = 0.5
"""A verdict, beside 1 for a pass and 0 for none."""


@dataclass(frozen=True)
class Truth:
    """What is true of a candidate and the live version, request by request."""

    differs: float = 0.0
    """Share of answers that differ, beside noise."""
    noise: float = 0.0
    """Share of answers that are other than usual, by chance, of each version."""
    fails: float = 0.0
    """Share of requests that the candidate alone fails at."""
    again: float = 0.0
    """Share of the candidate's second answers that differ from its first, beside noise."""
    own: float = 0.0
    """Share of the answers that clients get from it that differ, beside noise."""
    live_fails: float = 0.0
    """Share of requests that the live version fails at, by chance; the candidate as well."""
    slower: float = 1.0
    """Times as long as the live version that the candidate takes."""
    sigma: float = 0.35
    """Standard deviation of the logarithm of either time."""
    own_sigma: float | None = None
    """The part of this that is not the request's, whose size both versions have in common."""
    slow: str = ""
    """Whom slow periods of the machine hit: `both` at once, or `either` at times of its own."""
    shadow: int = 0
    """Requests of which the times were measured before any was judged."""
    after: int = 0
    """Requests before which the candidate is as the live version."""


@dataclass
class Sides:
    """What one version has answered, in all roll-outs."""

    total: Any = 0
    failed: Any = 0


@dataclass
class Tallies:
    """`rule.Tally` of many roll-outs."""

    rule: Rule
    runs: int
    reasons: str = ""
    compared: int = 0
    labels_agree: int = 0
    differs: Any = 0
    noise: Any = 0
    noise_differs: Any = 0
    pairs: dict[tuple[bool, bool], Any] = field(default_factory=lambda: defaultdict(int))
    failures: dict[float, Any] = field(default_factory=lambda: defaultdict(int))
    slower: ManyBlocks = field(default_factory=lambda: ManyBlocks())
    tail: ManyBlocks = field(default_factory=lambda: ManyBlocks())
    live: Sides = field(default_factory=Sides)
    candidate: Sides = field(default_factory=Sides)
    again: Check = field(default_factory=lambda: Check(""))
    own: Check = field(default_factory=lambda: Check(""))
    excess = Tally.excess

    @property
    def level(self) -> Any:
        """Return `rule.Tally.level` of each."""
        return np.maximum(self.slower.level, self.tail.level)


class ManyBlocks(Blocks):
    """`blocks.Blocks` of many roll-outs; each number is an array."""

    level: Any
    _larger: Any = staticmethod(np.maximum)

    def _lead(self, cells: Any, more: Any, late: Any) -> None:
        leads = np.round(blocks._GRID * more / np.maximum(late, 1)) / blocks._GRID
        for value in np.unique(leads):
            cells[value] = cells[value] + (leads == value)

    def _long_enough(self, variances: list[tuple[int, Any, Any]]) -> Any:
        if not variances:
            return blocks.SHORTEST
        numbers, found, least = zip(*variances, strict=True)
        enough = blocks._NEARLY * np.array(found) >= np.max(least, 0)
        known = np.array(numbers)[enough.argmax(0)]
        return np.where(known > blocks.SHORTEST, known + 1, blocks.SHORTEST)

    def cells(self, level: Any) -> Any:
        """Return the cells of each at its own level."""
        found: dict[float, Any] = defaultdict(int)
        for each in np.unique(level):
            for value, times in super().cells(int(each)).items():
                found[value] = found[value] + np.where(level == each, times, 0)
        return found


def log_evidence(cells: Any, mean: Any, span: evidence.Span, is_above: bool) -> Any:
    """Return `evidence.log_evidence` of many."""
    return np.logaddexp.reduce([won for won, _ in _capitals(cells, mean, span, is_above)])


def _capitals(cells: Any, mean: Any, span: evidence.Span, is_above: bool) -> list[Any]:
    room = mean - span[0] if is_above else mean - span[1]
    stakes = evidence.RARE if is_above and span[0] == 0 else evidence.STAKES
    return [
        (
            math.log(part) + sum(
                count * np.log1p(stake * (value - mean) / room) for value, count in cells.items()
            ),
            math.log(part),
        )
        for stake, part in stakes
    ]  # fmt: skip


def with_floor(way: rule.Way, alpha: float, runs: int) -> rule.Way:
    """Return `rule.Way.with_floor` of many."""
    if way.floor is None:
        return way
    count, total = (np.broadcast_to(each, runs) for each in way.floor[:2])
    limits = np.full(runs, way.limit)
    (some,) = np.nonzero(np.broadcast_to(way.cells[1], runs))
    if len(some):
        limits[some] += way.floor[2] * upper(count[some], total[some], alpha * way.chance)
    return way._replace(limit=limits, floor=None)  # type: ignore[arg-type]


def is_shown(way: rule.Way, alpha: float, is_above: bool) -> Any:
    """Return `rule.Way.is_shown` of many."""
    with np.errstate(all="ignore"):
        found = log_evidence(way.cells, way.limit, way.span, is_above)
    return (found >= -math.log(alpha * way.chance)) & np.less(way.limit, 1)


def upper(count: Any, total: Any, alpha: float) -> Any:
    """Return `evidence.upper` of many."""
    ruled_out, possible = np.ones(len(count)), np.zeros(len(count))
    for _ in range(evidence._STEPS):
        middle = (ruled_out + possible) / 2
        cells = {1: count, 0: total - count}
        is_out = log_evidence(cells, middle, (0, 1), False) >= -math.log(alpha)
        ruled_out = np.where(is_out, middle, ruled_out)
        possible = np.where(is_out, possible, middle)
    return np.where(total > 0, ruled_out, 1.0)


class Judges:
    """`rule.Judge` of many roll-outs: after how many requests each was sure, and of what."""

    def __init__(self, given: Rule, runs: int) -> None:
        self.rule = given
        self._alpha = 1 - given.confidence
        self._kept: dict[str, Any] = {}
        self._drifts: dict[tuple[str, int, int], Any] = {}
        self._seen: dict[tuple[str, int, int], Any] = {}
        self.runs = runs
        self.passed_at = np.full(runs, math.inf)
        self.failed_at = np.full(runs, math.inf)

    def look(self, tallies: Tallies) -> None:
        """Look at all."""
        n = tallies.compared
        for part in parts_of(self.rule, tallies):  # type: ignore[arg-type]
            is_broken = np.zeros(self.runs, bool)
            for place, way in enumerate(part.broken):
                way = with_floor(way, self._alpha, self.runs)
                is_broken |= self._has_changed((part.name, place), way)
                is_broken |= is_shown(way, self._alpha, True)
            self.failed_at[is_broken & (self.failed_at == math.inf)] = n
            kept = self._kept.setdefault(part.name, np.full(self.runs, not part.kept))
            for way in part.kept:
                kept |= is_shown(way, self._alpha, False)
        is_kept = np.logical_and.reduce(list(self._kept.values())) & (n >= self.rule.least)
        new = is_kept & (self.passed_at == math.inf) & (self.failed_at == math.inf)
        self.passed_at[new] = n

    def _has_changed(self, key: tuple[str, int], way: rule.Way) -> Any:
        found = np.zeros(self.runs, bool)
        for level in np.unique(way.level):
            here = np.broadcast_to(way.level == level, self.runs)
            found |= here & self._level_has_changed((*key, int(level)), way, here)
        return found

    def _level_has_changed(self, key: tuple[str, int, int], way: rule.Way, here: Any) -> Any:
        seen = self._seen.setdefault(key, {})
        new = {value: np.where(here, count - seen.get(value, 0), 0)
               for value, count in way.cells.items()}  # fmt: skip
        for value, more in new.items():
            seen[value] = seen.get(value, 0) + more
        with np.errstate(all="ignore"):
            grown = _capitals(new, way.limit, way.span, is_above=True)
        before = self._drifts.get(key, [np.full(self.runs, -math.inf)] * len(grown))
        logs = [np.logaddexp(log, part) + won - part
                for log, (won, part) in zip(before, grown, strict=True)]  # fmt: skip
        is_possible = np.less(way.limit, way.span[1])
        is_new = here & is_possible & np.any([more != 0 for more in new.values()], 0)
        self._drifts[key] = [
            np.where(is_new, log, old) for log, old in zip(logs, before, strict=True)
        ]
        return is_possible & (
            np.logaddexp.reduce(self._drifts[key]) >= math.log(evidence.FALSE_ALARMS)
        )

    def noise_every(self, tallies: Tallies) -> Any:
        """Return what `rule.Judge.noise_every` says for each."""
        differs, noise = tallies.differs > 0, tallies.noise_differs > 0
        is_known = self._kept.get("excess", np.zeros(self.runs, bool)) & (noise | ~differs)
        is_first = sum(tallies.pairs.values()) < rule.FEW_PAIRS
        in_doubt = is_first | ((differs | noise) & ~is_known)
        return np.where(in_doubt, 1, rule.NOISE_EVERY)


def simulate(truth: Truth, requests: int, judges: Judges, seed: int = 0) -> Judges:
    """Have what is true of many roll-outs judged."""
    draw = np.random.default_rng(seed)
    given, runs = judges.rule, judges.runs
    tallies = Tallies(given, runs)
    latest = np.full((runs, rule._TAIL_OF), np.nan)
    tail_s = np.full((runs, 1), math.inf)
    every: Any = np.ones(runs)
    machine = _machine(draw, truth, runs, truth.shadow + requests)
    for start in range(0, truth.shadow, LOOK_EVERY):
        _time(draw, truth, tallies, latest, tail_s, start, machine)
    tallies.slower.begin()
    tallies.tail.begin()
    for start in range(0, requests, LOOK_EVERY):
        now = truth if start >= truth.after else replace(
            truth, differs=0, again=0, own=0, fails=0, slower=1
        )  # fmt: skip
        size = runs, LOOK_EVERY
        odd = [draw.random(size) < now.noise for _ in range(3)]
        differs = (draw.random(size) < now.differs) | odd[0] | odd[1]
        second = odd[0] | odd[2]
        is_asked = np.arange(start, start + LOOK_EVERY) % every[:, None] == 0
        live_fails = draw.random(size) < now.live_fails
        fails = (draw.random(size) < now.live_fails) | (draw.random(size) < now.fails)
        tallies.compared += LOOK_EVERY
        tallies.differs = tallies.differs + differs.sum(1)
        tallies.noise = tallies.noise + is_asked.sum(1)
        tallies.noise_differs = tallies.noise_differs + (second & is_asked).sum(1)
        for one in (False, True):
            for other in (False, True):
                found = is_asked & (differs == one) & (second == other)
                tallies.pairs[one, other] = tallies.pairs[one, other] + found.sum(1)
        for value in (-1, 0, 1):
            found = (fails.astype(int) - live_fails == value).sum(1)
            tallies.failures[value] = tallies.failures[value] + found
        for side, failed in ((tallies.live, live_fails), (tallies.candidate, fails)):
            side.total += LOOK_EVERY
            side.failed = side.failed + failed.sum(1)
        if given.p50 < math.inf or given.p99 < math.inf:
            _time(draw, now, tallies, latest, tail_s, truth.shadow + start, machine)
        _check(draw, now, tallies, is_asked, odd[0])
        judges.look(tallies)
        every = judges.noise_every(tallies)
    return judges


def _check(
    draw: np.random.Generator, now: Truth, tallies: Tallies, is_asked: Any, odd: Any
) -> None:
    """Count what the candidate answers the second time, and what clients get from it."""
    counted = np.ones_like(is_asked)
    for check, share, where in (
        (tallies.again, now.again, is_asked), (tallies.own, now.own, counted)
    ):  # fmt: skip
        if not share:
            continue
        differs = odd | (draw.random(odd.shape) < now.noise) | (draw.random(odd.shape) < share)
        for value, found in ((1, differs & where), (0, ~differs & where)):
            check.seen[value] = check.seen[value] + found.sum(1)


def _machine(draw: np.random.Generator, truth: Truth, runs: int, requests: int) -> Any:
    """Return how many times as long each time of either version takes by slow periods.

    These come every ten seconds on average, last 0.2 to 5 s, and are 2 to 10 times as long.
    """
    found = np.ones((2, runs, requests), "f4")
    if not truth.slow:
        return np.broadcast_to(np.float32(1), found.shape)
    for times in found.reshape(-1, requests) if truth.slow == "either" else found[0]:
        at = draw.exponential(CALM_S)
        while at * RATE < requests:
            lasts_s, factor = np.exp(draw.uniform(np.log([0.2, 2]), np.log([5, 10])))
            times[int(at * RATE) : int((at + lasts_s) * RATE)] = factor
            at += lasts_s + draw.exponential(CALM_S)
    return found if truth.slow == "either" else found[[0, 0]]


def _time(
    draw: np.random.Generator, now: Truth, tallies: Tallies, latest: Any, tail_s: Any, start: int,
    machine: Any,
) -> None:  # fmt: skip
    size = len(latest), LOOK_EVERY
    own = now.sigma if now.own_sigma is None else now.own_sigma
    common = draw.normal(0, math.sqrt(max(0.0, now.sigma**2 - own**2)), size)
    here = machine[:, :, start : start + LOOK_EVERY]
    live = here[0] * np.exp(common + draw.normal(0, own, size))
    candidate = here[1] * now.slower * np.exp(common + draw.normal(0, own, size))
    given = tallies.rule
    slower = (candidate > given.p50 * live).astype(int)
    live = live * draw.uniform(1, 1 + rule._DITHER, size)
    candidate = candidate * draw.uniform(1, 1 + rule._DITHER, size)
    late = (candidate > given.p99 * tail_s).astype(int)
    live_late = (live > tail_s).astype(int)
    for at in range(LOOK_EVERY):
        tallies.slower.put(1 - slower[:, at], slower[:, at])
        tallies.tail.put(live_late[:, at], late[:, at])
    at = start % rule._TAIL_OF
    latest[:, at : at + LOOK_EVERY] = live
    timed = start + LOOK_EVERY
    if timed % rule._TAIL_EVERY == 0 and timed >= rule.FEW_PAIRS:
        known = min(timed, rule._TAIL_OF)
        tail_s[:] = np.partition(latest[:, :known], int(0.99 * known))[:, int(0.99 * known), None]


@dataclass(frozen=True)
class Row:
    """A truth, what is judged of it, and what must come of it."""

    name: str
    truth: Truth
    requests: int
    rule: Rule
    must: str
    """`pass` or `fail`, in 95 % of the roll-outs; `not pass` or `not fail`, in 5 % at most that
    is; `equal`, refused in 1 % at most; nothing where it is only said how often."""

    def share(self, judges: Judges) -> tuple[float, float]:
        """Return the shares that passed and that were refused within the requests."""
        passed, failed = (
            np.mean(at <= self.requests) for at in (judges.passed_at, judges.failed_at)
        )
        return float(passed), float(failed)

    def is_kept(self, judges: Judges, slack: float = 0.0) -> bool:
        """Return whether it came so, with a slack for few draws."""
        passed, failed = self.share(judges)
        return {
            "pass": passed >= 0.95 - slack,
            "fail": failed >= 0.95 - slack,
            "not pass": passed <= 0.05 + slack,
            "not fail": failed <= 0.05 + slack,
            "equal": failed <= 0.01 + slack,
            "": True,
        }[self.must]


_OFF = 0.99
"""A limit that everything keeps to."""
ANSWERS = Rule(failures=_OFF, p50=math.inf, p99=math.inf)
FAILURES = Rule(disagreement=_OFF, p50=math.inf, p99=math.inf)
P50 = Rule(disagreement=_OFF, failures=_OFF, p99=math.inf)
P99 = Rule(disagreement=_OFF, failures=_OFF, p50=math.inf)
TIMES = Rule(disagreement=_OFF, failures=_OFF)
_SIZES = Truth(sigma=1.0, own_sigma=0.35)


def _noise(share: float) -> float:
    """Return how often an answer is other than usual, where two differ in this share."""
    return 1 - math.sqrt(1 - share)


def _over(noise: float, more: float) -> float:
    """Return which share has to differ beside noise, for the answers to differ so much more."""
    return 1 - (1 - noise - more) / (1 - noise)


ROWS = [
    *(Row(f"{100 * share:g} % of the answers differ", Truth(differs=share), n, ANSWERS, must)
      for share, n, must in (
        (0.0, 500, "pass"), (0.005, 5000, "not fail"), (0.0105, 10_000, "not pass"),
        (0.02, 3000, "fail"), (0.05, 400, "fail"), (0.1, 200, "fail"), (0.5, 50, "fail"),
    )),
    *(Row(f"identical, {100 * share:g} % noise", Truth(noise=_noise(share)), 10_000, ANSWERS,
          "pass") for share in (0.01, 0.05, 0.1, 0.2, 0.3)),
    *(Row(f"{100 * share:g} % noise, and 0.1 % more than allowed",
          Truth(noise=_noise(share), differs=_over(share, 0.011 + 0.1 * share)), 10_000, ANSWERS,
          "not pass") for share in (0.05, 0.3)),
    *(Row(f"{100 * share:g} % differ after 3,000", Truth(differs=share, after=3000), 3000 + n,
          ANSWERS, "fail") for share, n in ((1.0, 50), (0.5, 100), (0.2, 150), (0.1, 300))),
    Row("nothing fails", Truth(), 800, FAILURES, "pass"),
    Row("0.25 % fail", Truth(fails=0.0025), 5000, FAILURES, "not fail"),
    Row("0.525 % fail", Truth(fails=0.00525), 10_000, FAILURES, "not pass"),
    Row("1 in 60 fail, 1 in 300 of the live version", Truth(fails=1 / 75, live_fails=1 / 300),
        5000, FAILURES, "not pass"),
    Row("1 in 60 of both fail", Truth(live_fails=1 / 60), 10_000, FAILURES, "not fail"),
    Row("10 % fail", Truth(fails=0.1), 200, FAILURES, "fail"),
    Row("1.205 times as long at p50", Truth(slower=1.205), 10_000, P50, "not pass"),
    Row("1.205 times as long at p99", Truth(slower=1.205), 10_000, P99, "not pass"),
    Row("the same at p99, heavy tail", Truth(slower=1.205, sigma=1), 10_000, P99, "not pass"),
    Row("as fast", Truth(), 5000, TIMES, "pass"),
    Row("as fast, longer", Truth(), 10_000, TIMES, "equal"),
    Row("as fast, heavy tail", Truth(sigma=1), 10_000, TIMES, "equal"),
    Row("as fast, heavy tail of requests", _SIZES, 10_000, TIMES, "equal"),
    Row("1.3 times as long", Truth(slower=1.3), 2000, TIMES, "fail"),
    Row("1.3 times, heavy tail of requests", replace(_SIZES, slower=1.3), 2000, TIMES, "fail"),
    Row("1.3 times, heavy tail", Truth(slower=1.3, sigma=1), 2000, TIMES, "not pass"),
    Row("the same", Truth(slower=1.3, sigma=1), 15_000, TIMES, "fail"),
    Row("2 times as long", Truth(slower=2), 200, TIMES, "fail"),
    Row("2 times, heavy tail of requests", replace(_SIZES, slower=2), 200, TIMES, "fail"),
    Row("2 times, heavy tail", Truth(slower=2, sigma=1), 400, TIMES, "fail"),
    Row("2 times as long after 3,000", Truth(slower=2, after=3000), 3500, TIMES, "fail"),
    *(Row(f"{100 * share:g} % of what clients get differs after 400",
          Truth(own=share, after=400), 400 + n, ANSWERS, "fail")
      for share, n in ((1.0, 25), (0.5, 50), (0.1, 800))),
    *(Row(f"{100 * share:g} % differ when asked again", Truth(again=share), n, ANSWERS, "fail")
      for share, n in ((1.0, 50), (0.5, 100), (0.1, 3000))),
    *(Row(f"{100 * noise:g} % noise, 1 % more of second and clients' answers",
          Truth(noise=_noise(noise), own=0.01, again=0.01), 10_000, ANSWERS, "not fail")
      for noise in (0.0, 0.3)),
    *(Row(f"slow periods of both, {name}", Truth(slower=slower, slow="both"), n, given, must)
      for name, slower, n, given, must in (
        ("as fast", 1, 10_000, TIMES, "equal"), ("1.3 times", 1.3, 2000, TIMES, "fail"),
        ("2 times", 2, 200, TIMES, "fail"), ("1.205 times at p50", 1.205, 10_000, P50, "not pass"),
        ("1.205 times at p99", 1.205, 10_000, P99, "not pass"),
      )),
    *(Row(f"slow periods of either, {name}",
          Truth(slower=slower, slow="either", shadow=shadow), n, given, must)
      for name, slower, shadow, n, given, must in (
        ("as fast, after a shadow", 1, 3000, 10_000, TIMES, "not fail"),
        ("2 times, after a shadow", 2, 3000, 10_000, TIMES, "fail"),
        ("1.205 times at p50, after a shadow", 1.205, 3000, 10_000, P50, ""),
        ("1.205 times at p99, after a shadow", 1.205, 3000, 10_000, P99, ""),
        ("as fast, no shadow", 1, 0, 10_000, TIMES, ""),
      )),
]  # fmt: skip


def _quantiles(at: Any, requests: int) -> str:
    shown = [each if each <= requests else None for each in np.sort(at)]
    middle, late = shown[len(shown) // 2], shown[math.ceil(0.95 * len(shown)) - 1]
    return " / ".join("–" if each is None else f"{each:,.0f}" for each in (middle, late))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000)
    runs = parser.parse_args().runs
    print("| candidate | requests | passed | refused | passed after | refused after | wanted |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for seed, row in enumerate(ROWS):
        judges = simulate(row.truth, row.requests, Judges(row.rule, runs), seed)
        passed, failed = row.share(judges)
        after = [_quantiles(at, row.requests) for at in (judges.passed_at, judges.failed_at)]
        print(
            f"| {row.name} | {row.requests:,} | {passed:.1%} | {failed:.1%} | {after[0]} | "
            f"{after[1]} | {row.must or '–'}{'' if row.is_kept(judges) else ' MISSED'} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
