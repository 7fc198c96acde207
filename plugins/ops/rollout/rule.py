"""What a candidate must show before it answers clients, and whether it has shown it.

A judge looks again and again while traffic comes, and whoever looks often enough finds what he
hopes for. So evidence is used that holds at any time (`evidence`). For each part of a rule, the
chance that a candidate which is worse than the part allows ever passes it is at most one minus the
rule's confidence, and so is the chance that a candidate which keeps to the part is ever refused for
it. These tests weigh everything that was seen; beside each, a detector of changes finds a candidate
that becomes worse later. Times are judged in blocks of requests (`blocks`).

Both versions are measured on the same requests. What the live version's answer differs in from its
own second answer to a request is no fault of the candidate's.
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from modelyard.plugins.ops.rollout import evidence
from modelyard.plugins.ops.rollout.blocks import Blocks
from modelyard.plugins.ops.rollout.comparer import Comparison, Verdict
from modelyard.plugins.ops.rollout.evidence import Bound, Cells, Drift, Span
from modelyard.plugins.ops.rollout.reasons import LIMIT, Leaning
from modelyard.serve.dataplane.metrics import Histogram
from modelyard.serve.errors import BadRequest

LATENCY_BOUNDS = tuple(1e-6 * 1.1**step for step in range(194))
"""Seconds, 1 us to 100 s: a quantile is known to some percent."""
NOISE_SLACK = 0.1
"""Share of the live version's own noise by which a candidate may differ more often, beside what the
rule allows: to tell less at 30 % noise would take a hundred thousand answers."""
NOISE_EVERY = 10
"""One request of so many is answered by the live version twice while there is no doubt."""
FEW_PAIRS = 100
"""Requests that the live version answers twice at first."""
_TAIL_OF = 1000
"""Latest times of the live version of which the 99th percentile is taken."""
_TAIL_EVERY = 50
_DITHER = 0.01
"""Share by which a time may be lengthened, so that of equal ones, too, one in a hundred is above
the 99th percentile."""
_MOST_OPEN = 512
_MOST_MORE = 1 << 24
_NUMBER = r"(\d{1,9}(?:\.\d+)?)"
_ABOVE_0 = "more than 0 and less than 100 %: no amount of traffic shows 0"
_Forms = Mapping[str, tuple[str, int, str]]
"""Name → how its number is written, what is whole, and which numbers are taken."""
_RULE: _Forms = {
    "disagreement": (rf"<= *{_NUMBER} *%", 100, _ABOVE_0),
    "confidence": (rf"=? *{_NUMBER} *%", 100, "50 % or more and below 100 %"),
    "p50": (rf"<= *{_NUMBER}", 1, "a ratio above 0, such as 1.2"),
    "p99": (rf"<= *{_NUMBER}", 1, "a ratio above 0, such as 1.2"),
    "failures": (rf"<= *{_NUMBER} *%", 100, _ABOVE_0),
    "least": (r"=? *(\d{1,9})", 1, "1 or more"),
    "reasons": (rf"<= *{_NUMBER} *%", 100, "more than 0 and at most 100 %, which allows any"),
}
_EXPECT: _Forms = {"labels": (rf"= *{_NUMBER} *%", 100, "labels=95%, above 0 and below 100 %")}


@dataclass(frozen=True)
class Rule:
    """What must be shown."""

    disagreement: float = 0.01
    """Largest share of differing answers, above that of the live version against itself."""
    confidence: float = 0.95
    p50: float = 1.2
    """Times as long as the live version that the candidate may take, at half of the requests."""
    p99: float = 1.2
    """Largest ratio of the 99th percentiles of how long both take."""
    failures: float = 0.005
    """Largest share of requests that the candidate fails at, above that of the live version."""
    least: int = 200
    """How many answers are compared before anything passes."""
    labels: float | None = None
    """Smallest share of equal labels, in place of `disagreement`: the candidate is meant to
    differ."""
    reasons: float | None = None
    """Largest difference of a part's mean share in the explanations of the same requests; None is
    `reasons.LIMIT` where both versions can be compared so."""

    def __str__(self) -> str:
        return (
            f"disagreement<={_percent(self.disagreement)}, confidence {_percent(self.confidence)}, "
            f"p50<={self.p50:g}, p99<={self.p99:g}, failures<={_percent(self.failures)}, "
            f"least {self.least}"
            + ("" if self.reasons is None else f", reasons<={_percent(self.reasons)}")
        )

    @property
    def expect(self) -> str | None:
        """What was given beside the rule, in its form."""
        return None if self.labels is None else f"labels={_percent(self.labels)}"

    @property
    def allowed(self) -> float:
        """The largest share of answers that may differ in what is looked at."""
        return self.disagreement if self.labels is None else 1 - self.labels


def parse_rule(text: str = "", expect: str = "") -> Rule:
    """Read a rule; what it leaves out is as in the default.

    Args:
        text: such as `disagreement<=1%, confidence 95%, p50<=1.2, failures<=0.5%, least 200`.
        expect: such as `labels=95%`; empty where answers are to be the same.

    Raises:
        BadRequest: it is not one; the message says what was expected.
    """
    return Rule(
        **_read("the rule says", text[:500], _RULE, f"parts of: {Rule(reasons=LIMIT)}"),
        **_read("--expect says", expect[:500], _EXPECT, "labels=95%"),
    )


def _read(said: str, text: str, forms: _Forms, usual: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name = next((each for each in forms if part.startswith(each)), "")
        form, whole, taken = forms.get(name, ("", 1, ""))
        found = re.fullmatch(f"{name} *{form}", part) if name else None
        if found is None:
            raise BadRequest(f"{said} {part[:60]!r}; expected {usual}")
        if name in values:
            raise BadRequest(f"{said} {name} twice; expected each part once: {usual}")
        value, most = float(found[1]), 100 if whole == 100 else 1e9
        is_most = name == "reasons" and value == most
        if not ((50 if name == "confidence" else 1e-9) <= value < most or is_most):
            raise BadRequest(f"{said} {part[:60]!r}; expected {taken}")
        values[name] = int(value) if name == "least" else value / whole
    return values


def _percent(value: float) -> str:
    return f"{round(value * 100, 6):g}%"


# -- what is counted -----------------------------------------------------------------------------


@dataclass
class Side:
    """What one of the two versions has answered."""

    total: int = 0
    failed: int = 0
    clients: int = 0
    """Answers to clients among these, and not to copies."""
    times: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    """Seconds that its handler took, of the requests that were timed on both sides."""

    def count(self, failed: bool) -> None:
        """Count an answer, which may have been a failure."""
        self.total += 1
        self.failed += failed


@dataclass
class Check:
    """Answers of the candidate that are compared beside those to copies."""

    words: str
    """What it means where they differ."""
    seen: Counter[float] = field(default_factory=Counter)
    """How many differ (1), and do not (0)."""
    latest: str | None = None
    """Latest difference."""

    def add(self, agrees: bool, difference: str | None) -> None:
        """Count one."""
        self.seen[not agrees] += 1
        self.latest = self.latest if agrees else difference

    def to_json(self) -> dict[str, int]:
        """Return it as the management API has it."""
        return {"compared": self.seen.total(), "differs": self.seen[1]}


class Beside:
    """Pairs what one version does with the latest that the other has done: at the same load."""

    def __init__(self) -> None:
        self._waiting: tuple[deque[float], deque[float]] = deque(maxlen=64), deque(maxlen=64)

    def put(self, is_candidate: bool, value: float) -> tuple[float, float] | None:
        """Return a value of the live version and one of the candidate; None while one is alone."""
        others = self._waiting[not is_candidate]
        if not others:
            self._waiting[is_candidate].append(value)
            return None
        other = others.pop()
        return (other, value) if is_candidate else (value, other)


@dataclass
class Tally:
    """What was counted of a candidate beside the live version."""

    rule: Rule = field(default_factory=Rule)
    """The rule whose limits times are held against."""
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    labels_agree: int = 0
    """How many of those compared name the same labels, or agree and name none."""
    noise: int = 0
    """Requests that the live version answered twice."""
    noise_differs: int = 0
    pairs: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    """Requests that the live version answered twice, and the candidate, by whether the candidate's
    answer differs and whether the second one does."""
    failures: Counter[float] = field(default_factory=Counter)
    """Requests at which only the candidate failed (1), only the live version (-1), or else (0)."""
    slower: Blocks = field(default_factory=Blocks)
    """Requests for which the candidate took longer than the live version, times the limit of p50,
    or did not."""
    tail: Blocks = field(default_factory=Blocks)
    """Requests for which the candidate took longer than the live version's 99th percentile, times
    the limit of p99, or the live version longer than that percentile."""
    timings: int = 0
    """How many times were measured on both sides."""
    live: Side = field(default_factory=Side)
    candidate: Side = field(default_factory=Side)
    again: Check = field(default_factory=lambda: Check(
        "it answers otherwise when it is asked again, alone"))  # fmt: skip
    own: Check = field(default_factory=lambda: Check(
        "what clients get from it is not what the live version answers"))  # fmt: skip
    reasons: Leaning | str = ""
    """What the explanations of both versions say; where they are not compared, why."""
    _open: dict[str, tuple[bool, bool]] = field(default_factory=dict)
    """Request → whether its second answer is known, else the other one, and whether it differs."""
    _beside: Beside = field(default_factory=Beside)
    _latest: deque[float] = field(default_factory=lambda: deque(maxlen=_TAIL_OF))
    _tail_s: float = math.inf
    """The 99th percentile of the live version's times, as far as it is known."""

    def agrees(self, found: Comparison) -> bool:
        """Return whether two answers are as alike as the rule wants them to be."""
        return found.agrees or (self.rule.labels is not None and found.labels_agree is True)

    def add(self, found: Comparison, key: str = "", is_own: bool = False) -> None:
        """Count a request that both answered; its key joins it with its second answer.

        Args:
            found: what comparing the answers found.
            key: the same for both comparisons of a request.
            is_own: whether a client got the candidate's answer: of these, failures are counted
                where they are answered, and only those without are compared.
        """
        verdict = found.verdict
        self.verdicts[verdict] += 1
        self.labels_agree += found.agrees if found.labels_agree is None else found.labels_agree
        if is_own:
            self.own.add(self.agrees(found), found.difference)
        else:
            live, own = (verdict in (each, Verdict.BOTH_FAILED) for each in _FAILED)
            self.candidate.count(own)
            self.failures[own - live] += 1
            if not self.live.clients:  # else it was counted when a client got it
                self.live.count(live)
        if verdict in _ANSWERED:
            self._pair(key, False, not found.agrees)

    def add_noise(self, found: Comparison, key: str = "") -> None:
        """Count a request that the live version answered twice, unless it failed at one of them."""
        if found.verdict in _ANSWERED:
            self.noise += 1
            self.noise_differs += not found.agrees
            self._pair(key, True, not found.agrees)

    def _pair(self, key: str, is_second: bool, differs: bool) -> None:
        other = self._open.pop(key, None)
        if other is not None and other[0] != is_second:
            self.pairs[(other[1], differs) if is_second else (differs, other[1])] += 1
            return
        self._open[key] = is_second, differs
        if len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]

    def answered(self, is_candidate: bool, code: int, _: float = 0.0) -> None:
        """Count an answer that a client got, by its status."""
        side, failed = self.candidate if is_candidate else self.live, code >= 500
        side.count(failed)
        side.clients += 1
        if (both := self._beside.put(is_candidate, failed)) is not None:
            self.failures[both[1] - both[0]] += 1

    def timed(self, live_s: float, candidate_s: float) -> None:
        """Count how long both handlers took, of one request or of two at the same time."""
        self.live.times.observe(live_s)
        self.candidate.times.observe(candidate_s)
        is_slower = candidate_s > self.rule.p50 * live_s
        self.slower.put(not is_slower, is_slower)
        live_s, candidate_s = (
            each * random.uniform(1, 1 + _DITHER) for each in (live_s, candidate_s)
        )
        self.tail.put(live_s > self._tail_s, candidate_s > self.rule.p99 * self._tail_s)
        self._latest.append(live_s)
        self.timings += 1
        if self.timings % _TAIL_EVERY == 0 and self.timings >= FEW_PAIRS:
            self._tail_s = sorted(self._latest)[int(0.99 * len(self._latest))]

    def excess(self, factor: float) -> Cells:
        """Return how often one differed, less `factor` times how often the other did."""
        cells: Counter[float] = Counter()
        for (differs, noise), count in self.pairs.items():
            cells[differs - factor * noise] += count
        return cells

    @property
    def level(self) -> int:
        """Level of the blocks of times that are bet on."""
        return max(self.slower.level, self.tail.level)

    def begin_times(self) -> None:
        """Judge no time that was measured so far; how long blocks have to be stays known."""
        self.timings = 0
        self.slower.begin()
        self.tail.begin()

    @property
    def compared(self) -> int:
        """How many requests both versions have answered."""
        return sum(self.verdicts[each] for each in _ANSWERED)

    @property
    def differs(self) -> int:
        """In how many of these the answers do not mean the same."""
        return self.verdicts[Verdict.DIFFERS]


_FAILED = Verdict.LIVE_FAILED, Verdict.CANDIDATE_FAILED
_ANSWERED = (Verdict.EQUAL, Verdict.WITHIN_TOLERANCE, Verdict.DIFFERS)


# -- what is judged ------------------------------------------------------------------------------


class Outcome(StrEnum):
    """What a judge says."""

    PASS = "pass"
    FAIL = "fail"
    NOT_ENOUGH = "not enough traffic"


@dataclass(frozen=True)
class Judgement:
    """What a judge says, and why."""

    verdict: Outcome = Outcome.NOT_ENOUGH
    reasons: tuple[str, ...] = ()
    """Sentences with numbers."""
    bounds: dict[str, Bound] = field(default_factory=dict)


class Way(NamedTuple):
    """A way to see whether a mean keeps to a limit."""

    cells: Cells
    limit: float
    span: Span
    chance: float
    """Part of the chance of being wrong that it may use."""
    floor: tuple[int, int, float] | None = None
    """Count and total of a share, and a factor. The share's upper bound times the factor is added
    to the limit, since the candidate is not to blame for it; the bound uses as much chance again.
    """
    level: int = 0
    """Level of the blocks that the values are of."""

    def is_shown(self, alpha: float, is_above: bool, more: int = 0) -> bool:
        """Return whether the mean is shown to be above the limit, or below.

        Args:
            alpha: chance of being wrong of all ways together.
            is_above: whether it is looked for above the limit.
            more: faultless requests that might follow.
        """
        cells = {**self.cells, 0: self.cells.get(0, 0) + more} if more else self.cells
        found = evidence.log_evidence(cells, self.limit, self.span, is_above)
        return self.limit < 1 and found >= -math.log(alpha * self.chance)

    def with_floor(self, alpha: float) -> Way:
        """Return it with the limit that its floor makes."""
        if self.floor is None or not self.cells[1]:
            return self
        high = self.floor[2] * evidence.upper(*self.floor[:2], alpha * self.chance)
        return self._replace(limit=self.limit + high, floor=None)


class Part(NamedTuple):
    """A part of a rule, what it looks at, and in which ways it is shown to be kept or broken."""

    name: str
    kept: tuple[Way, ...]
    """None where nothing has to be shown."""
    broken: tuple[Way, ...]

    def is_kept(self, alpha: float, more: int = 0) -> bool:
        """Return whether it was shown to be kept, or would be after `more` faultless requests."""
        return not self.kept or any(way.is_shown(alpha, False, more) for way in self.kept)


def parts_of(rule: Rule, tally: Tally) -> Iterator[Part | Leaning]:
    """Yield the parts of a rule with what was counted for each.

    Of a request that the live version has answered twice, what is judged is whether the candidate's
    answer differs, less 1 + `NOISE_SLACK` times whether the second one does. Where few are answered
    twice, all of the candidate's answers say something: what differs beyond noise is not more than
    what differs at all, and noise is not above its own upper bound. The candidate's second answers,
    and those that clients got, refuse it, too, where they differ more often than is allowed: to
    refuse, these and the answers to copies share a chance, and so does the bound of the noise.
    """
    n, factor = tally.compared, 1 + NOISE_SLACK
    noise = tally.noise_differs, tally.noise, factor
    if rule.labels is not None:
        other = Way(_counts(n - tally.labels_agree, n), 1 - rule.labels, (0, 1), 1)
        yield Part("labels", (other,), (other._replace(chance=0.7),))
    else:
        pairs = Way(tally.excess(factor), rule.disagreement, (-factor, 1), 0.6)
        counted = Way(_counts(tally.differs, n), rule.disagreement, (0, 1), 0.6)
        beyond = counted._replace(chance=0.1, floor=noise)
        yield Part("excess", (pairs._replace(chance=0.4), counted), (pairs, beyond))
    for name, check in (("again", tally.again), ("own", tally.own)):
        yield Part(name, (), (Way(check.seen, rule.allowed, (0, 1), 0.1, noise),))
    own, live = tally.candidate, tally.live
    pairs = Way(tally.failures, rule.failures, (-1, 1), 0.3)
    floor = live.failed, live.total, 1.0
    failed = Way(_counts(own.failed, own.total), rule.failures, (0, 1), 0.35, floor)
    yield Part("failures", (pairs._replace(chance=1),), (pairs, failed))
    level = tally.level
    if rule.p50 < math.inf:
        p50 = Way(tally.slower.cells(level), 0.0, (-1, 1), 1, level=level)
        yield Part("p50", (p50,), (p50,))
    if rule.p99 < math.inf:
        p99 = Way(tally.tail.cells(level), 0.0, (-1, 1), 1, level=level)
        yield Part("p99", (p99,), (p99._replace(chance=0.5),))
    if isinstance(tally.reasons, Leaning):
        yield tally.reasons
    elif (rule.reasons or 1) < 1:  # asked for: what cannot be compared is not shown
        yield Part("reasons", (Way({}, 0.5, (0, 1), 1),), ())


def _counts(count: int, total: int) -> Cells:
    return {1: count, 0: total - count}


def bounds_of(tally: Tally, alpha: float) -> dict[str, Bound]:
    """Return what is known of a candidate; each bound alone fails with chance `alpha`."""
    n, share, bound = tally.compared, evidence.share, evidence.bound
    differs, noise = share(tally.differs, n, alpha), share(tally.noise_differs, tally.noise, alpha)
    excess, all_of_them = tally.excess(1), share(tally.differs, n, 0.6 * alpha)
    low, high = bound(excess, (-1, 1), 0.4 * alpha)[1:]
    slower = bound(tally.slower.cells(tally.level), (-1, 1), alpha)
    reasons = (
        {"reasons": tally.reasons.farthest(alpha)[1]} if isinstance(tally.reasons, Leaning) else {}
    )
    return {
        **reasons,
        "disagreement": differs,
        "noise": noise,
        "excess": Bound(differs.estimate - noise.estimate, low, min(high, all_of_them.high)),
        "failures": bound(tally.failures, (-1, 1), alpha),
        "labels": share(tally.labels_agree, n, alpha),
        "p50": Bound(*((1 + each) / 2 for each in slower)),
        "p99": bound(tally.tail.cells(tally.level), (-1, 1), alpha),
    }


class Judge:
    """Says whether a candidate has shown what the rule wants.

    Args:
        rule: the rule.
        is_canary: whether it answers clients: how long that takes is judged only then.
    """

    def __init__(self, rule: Rule, is_canary: bool = True) -> None:
        self.rule = rule if is_canary else replace(rule, p50=math.inf, p99=math.inf)
        self._is_canary = is_canary
        self._alpha = 1 - rule.confidence
        self._kept: set[str] = set()
        """Parts that were shown to be kept."""
        self._drifts: defaultdict[tuple[str, int, int], Drift] = defaultdict(Drift)
        """Part, number of a way and level of its blocks → what sees it change."""
        self._decided: Judgement | None = None

    def look(self, tally: Tally) -> Judgement:
        """Return what there is to say of everything that was counted; its reasons when it is sure.

        It may be asked as often as one likes: what it says does not come sooner.
        """
        if self._decided is not None and self._decided.verdict is Outcome.FAIL:
            return self._decided
        parts = list(parts_of(self.rule, tally))
        worse = [part for part in parts if self._is_broken(part)]
        if worse:
            return self._decide(Outcome.FAIL, worse, tally)
        self._kept |= {
            part.name for part in parts if part.name not in self._kept and part.is_kept(self._alpha)
        }
        is_enough = min(tally.compared, self._answered(tally)) >= self.rule.least
        are_kept = all(part.name in self._kept for part in parts)
        if self._decided is None and is_enough and are_kept:
            return self._decide(Outcome.PASS, [part for part in parts if part.kept], tally)
        return self._decided or Judgement(Outcome.NOT_ENOUGH)

    def _is_broken(self, part: Part | Leaning) -> bool:
        """Return whether a part was broken all the time, or has come to be."""
        found = isinstance(part, Leaning) and part.is_broken(self._alpha)
        for place, way in enumerate(part.broken):
            way = way.with_floor(self._alpha)
            drift = self._drifts[part.name, place, way.level]
            has_changed = drift.look(way.cells, way.limit, way.span)
            found |= has_changed or way.is_shown(self._alpha, True)
        return found

    def _answered(self, tally: Tally) -> float:
        """Return how many clients each of both has answered at least; of a shadow, any number."""
        return min(tally.live.clients, tally.candidate.clients) if self._is_canary else math.inf

    def _decide(self, verdict: Outcome, parts: list[Part | Leaning], tally: Tally) -> Judgement:
        found = bounds_of(tally, self._alpha)
        reasons = tuple(describe(part.name, self.rule, tally, found) for part in parts)
        self._decided = Judgement(verdict, reasons, found)
        return self._decided

    def explain(self, tally: Tally) -> Judgement:
        """Return what there is to say with bounds, and what is missing where nothing is sure."""
        judged, found = self.look(tally), bounds_of(tally, self._alpha)
        if judged.verdict is not Outcome.NOT_ENOUGH:
            return replace(judged, bounds=found)
        parts = [each for each in parts_of(self.rule, tally) if each.name not in self._kept]
        reasons = (describe(part.name, self.rule, tally, found) for part in parts)
        return Judgement(Outcome.NOT_ENOUGH, (self._still_needed(tally, parts), *reasons), found)

    def _still_needed(self, tally: Tally, parts: list[Part | Leaning]) -> str:
        """Return after how many more it would pass if nothing of them was wrong."""
        n = tally.compared
        by_answers = [each for each in parts if each.name not in ("p50", "p99", "reasons")]
        more = [bisect_left(range(_MOST_MORE), True, key=partial(part.is_kept, self._alpha))
                for part in by_answers]  # fmt: skip
        most = max([*more, self.rule.least - n, 0])
        if most:
            return f"{n} compared; {most} more are needed if none of them differs or fails"
        if self._answered(tally) < self.rule.least:
            return (
                f"the candidate has answered {tally.candidate.clients} requests and the live "
                f"version {tally.live.clients}; expected {self.rule.least} each"
            )
        if any(part.name == "reasons" for part in parts):
            return f"{n} compared: more have to be explained for both versions"
        return f"{n} compared, and {tally.timings} timed: more are needed to tell how long it takes"

    @property
    def knows_reasons(self) -> bool:
        """Whether reasons were shown to be kept."""
        return "reasons" in self._kept

    def noise_every(self, tally: Tally) -> int:
        """Return one in how many requests the live version is to answer twice, by what is known.

        Each one at first; then a few, until something differs that noise has not explained yet.
        """
        is_known = "excess" in self._kept and (tally.noise_differs or not tally.differs)
        is_odd = tally.differs or tally.noise_differs
        in_doubt = tally.pairs.total() < FEW_PAIRS or (is_odd and not is_known)
        return 1 if in_doubt and self.rule.labels is None else NOISE_EVERY


def describe(name: str, rule: Rule, tally: Tally, bounds: dict[str, Bound]) -> str:
    """Return in a sentence what is known of one part of the rule."""
    if (check := {"again": tally.again, "own": tally.own}.get(name)) is not None:
        return (
            f"{check.words}: {check.seen[1]} of {check.seen.total()}, and the live version's own "
            f"answers differ in {tally.noise_differs} of {tally.noise}; {check.latest}"
        )
    if name == "reasons":
        told = tally.reasons
        return told if isinstance(told, str) else told.describe(1 - rule.confidence)
    ends = f"{100 * bounds[name].low:.2f} to {100 * bounds[name].high:.2f} %"
    n, live, own = tally.compared, tally.live, tally.candidate
    return {
        "labels": f"labels agree in {tally.labels_agree} of {n}, {ends} of all; expected are "
        f"{rule.expect} or more. {tally.differs} answers differ in something",
        "excess": f"{tally.differs} of {n} answers differ, and {tally.noise_differs} of "
        f"{tally.noise} of the live version from its own: {ends} more; allowed are "
        f"{_percent(rule.disagreement)} and a tenth of its own",
        "failures": f"the candidate failed at {own.failed} of {own.total} requests, the live "
        f"version at {live.failed} of {live.total}: {ends} more; allowed are "
        f"{_percent(rule.failures)}",
        "p50": f"p50: the candidate takes more than {rule.p50:g} times as long at {ends} of the "
        f"requests, of {tally.timings} timed; expected less than half",
        "p99": f"p99: of the longest times in each {2**tally.level} requests, {ends} more are the "
        f"candidate's, at {rule.p99:g} times the live version's p99, of {tally.timings} timed; "
        "expected fewer",
    }[name]
