"""What a candidate must show before it answers clients, and whether it has shown it.

A judge looks again and again while traffic comes. Each look could be wrong by chance, and whoever
looks often enough sees what he hopes for; so the looks share one chance of being wrong (alpha
spending): the first has half of it, each further one half of what is left, and they come when the
count has doubled, whatever was seen. A candidate that is worse than the rule allows passes at any
look with a chance of at most one minus the rule's confidence, however long it is watched.

What is shown to be worse fails at once. Three things are looked at for that (disagreement or
labels, failures, latency), which share another such chance: a candidate that keeps to the rule is
refused by one of these with a chance of at most one minus the confidence.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from modelyard.plugins.ops.rollout.answers import Comparison, Verdict
from modelyard.plugins.ops.rollout.bounds import Bound, excess, lower, share, upper
from modelyard.serve.dataplane.metrics import Histogram
from modelyard.serve.errors import BadRequest

LATENCY_BOUNDS = tuple(0.0001 * 1.1**step for step in range(146))
"""Seconds, 0.1 ms to 100 s: a quantile is known to some percent."""
_FIRST_FAIL_LOOK = 10
_REASONS_TO_FAIL = 3
_MOST_LOOKS = 50
_RULE_FORM = "disagreement<=1%, confidence 95%, p99<=1.2, failures<=0%, least 200"
_PARTS: dict[str, tuple[str, Callable[[float], bool], str]] = {
    "disagreement": (
        r"disagreement *<= *(\d+(?:\.\d+)?) *%",
        lambda value: 0 < value < 100,
        "more than 0 and less than 100 %: no amount of traffic shows 0",
    ),
    "confidence": (
        r"confidence *=? *(\d+(?:\.\d+)?) *%",
        lambda value: 50 <= value < 100,
        "50 % or more and below 100 %",
    ),
    "p99": (
        r"p99 *<= *(\d+(?:\.\d+)?)", lambda value: value > 0, "a ratio above 0, such as 1.2"
    ),
    "failures": (
        r"failures *<= *(\d+(?:\.\d+)?) *%?", lambda value: value < 100, "less than 100 %"
    ),
    "least": (r"least *=? *(\d{1,9})", lambda value: value >= 1, "1 or more"),
}  # fmt: skip
"""Part of a rule → how it is written, whether a value is taken, and which ones are."""
_EXPECT = re.compile(r"labels *= *(\d+(?:\.\d+)?) *%")


@dataclass(frozen=True)
class Rule:
    """What must be shown."""

    disagreement: float = 0.01
    """Largest share of differing answers, above that of the live version against itself."""
    confidence: float = 0.95
    p99: float = 1.2
    """Largest ratio of the candidate's 99th percentile of latency to the live version's."""
    failures: float = 0.0
    """Largest share of requests that the candidate fails at, above that of the live version: as
    seen where the live version never fails, as shown where it does."""
    least: int = 200
    """How many answers are compared before anything passes."""
    labels: float | None = None
    """Smallest share of equal labels, in place of `disagreement`: the candidate is meant to
    differ."""

    def __str__(self) -> str:
        return (
            f"disagreement<={_percent(self.disagreement)}, confidence {_percent(self.confidence)}, "
            f"p99<={self.p99:g}, failures<={_percent(self.failures)}, least {self.least}"
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
        text: such as `disagreement<=1%, confidence 95%, p99<=1.2, failures<=0%, least 200`.
        expect: such as `labels=95%`; empty where answers are to be the same.

    Raises:
        BadRequest: it is not one; the message says what was expected.
    """
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text[:500].split(","))):
        name = next((each for each in _PARTS if part.startswith(each)), "")
        form, is_taken, taken = _PARTS.get(name, ("", bool, ""))
        found = re.fullmatch(form, part) if name else None
        if found is None:
            raise BadRequest(f"the rule says {part[:60]!r}; expected parts of: {_RULE_FORM}")
        if name in values:
            raise BadRequest(f"the rule says {name} twice; expected each part once: {_RULE_FORM}")
        value = float(found[1])
        if not is_taken(value):
            raise BadRequest(f"the rule says {part[:60]!r}; expected {taken}")
        values[name] = value if name == "p99" else int(value) if name == "least" else value / 100
    return Rule(**values, labels=_parse_expect(expect))


def _parse_expect(text: str) -> float | None:
    if not text.strip():
        return None
    found = _EXPECT.fullmatch(text.strip())
    if found is None or not 0 < float(found[1]) < 100:
        raise BadRequest(f"--expect is {text[:60]!r}; expected labels=95%, above 0 and below 100 %")
    return float(found[1]) / 100


def _percent(value: float) -> str:
    return f"{round(value * 100, 6):g}%"


@dataclass
class Side:
    """What one of the two versions has answered."""

    total: int = 0
    failed: int = 0
    times: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    """Seconds of its answers."""

    def count(self, answers: int, failed: int) -> None:
        """Count answers, and how many of them were failures."""
        self.total += answers
        self.failed += failed

    def answered(self, code: int, seconds: float) -> None:
        """Count an answer that a client got, by its status, and its time."""
        self.count(1, code >= 500)
        self.times.observe(seconds)


@dataclass
class Tally:
    """What was counted of a candidate beside the live version."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    labels_agree: int = 0
    """How many of those compared name the same labels, or agree and name none."""
    noise: int = 0
    """Requests that the live version answered twice."""
    noise_differs: int = 0
    live: Side = field(default_factory=Side)
    candidate: Side = field(default_factory=Side)

    def add(self, found: Comparison) -> None:
        """Count a request that both answered."""
        self.verdicts[found.verdict] += 1
        self.live.count(1, found.verdict is Verdict.LIVE_FAILED)
        self.candidate.count(1, found.verdict is Verdict.CANDIDATE_FAILED)
        agrees = found.agrees if found.labels_agree is None else found.labels_agree
        self.labels_agree += agrees

    def add_noise(self, found: Comparison) -> None:
        """Count a request that the live version answered twice, unless it failed at one of them."""
        if found.verdict in _ANSWERED:
            self.noise += 1
            self.noise_differs += not found.agrees

    def failures(self, alpha: float) -> Bound:
        """Return by how much the candidate fails more often, bounded as `excess` says."""
        own, live = self.candidate, self.live
        return excess(own.failed, own.total, live.failed, live.total, alpha)

    @property
    def compared(self) -> int:
        """How many requests both versions have answered."""
        return sum(self.verdicts[each] for each in _ANSWERED)

    @property
    def differs(self) -> int:
        """In how many of these the answers do not mean the same."""
        return self.verdicts[Verdict.DIFFERS]


_ANSWERED = (Verdict.EQUAL, Verdict.WITHIN_TOLERANCE, Verdict.DIFFERS)


class Outcome(StrEnum):
    """What a judge says."""

    PASS = "pass"
    FAIL = "fail"
    NOT_ENOUGH = "not enough traffic"


@dataclass(frozen=True)
class Judgement:
    """What a judge says, and why."""

    verdict: Outcome
    reasons: tuple[str, ...] = ()
    """Sentences with numbers."""
    confidence: float | None = None
    """Confidence of each bound of this look, which is above that of the rule; None before a
    look."""
    bounds: dict[str, Bound] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as the management API has it; bounds stand beside."""
        return {
            "verdict": str(self.verdict),
            "reasons": list(self.reasons),
            "confidence": self.confidence,
        }


def bounds_of(rule: Rule, tally: Tally, alpha: float) -> dict[str, Bound]:
    """Return what is known of a candidate; each bound alone fails with chance `alpha`."""
    n = tally.compared
    return {
        "disagreement": share(tally.differs, n, alpha),
        "noise": share(tally.noise_differs, tally.noise, alpha),
        "excess": excess(tally.differs, n, tally.noise_differs, tally.noise, alpha),
        "failures": tally.failures(alpha),
        "p99Ratio": _p99_ratio(tally.candidate.times, tally.live.times, alpha),
        "labels": share(tally.labels_agree, n, alpha),
    }


def _p99_ratio(candidate: Histogram, live: Histogram, alpha: float) -> Bound:
    """Return the ratio of the 99th percentiles, bounded by what their ranks may be off.

    Of n latencies the number that the true percentile is above is binomial: between which two of
    them it lies is known whatever their distribution is. Two such bounds make one of the ratio.
    """
    before, after = _p99(live, alpha / 2), _p99(candidate, alpha / 2)
    if not (before.estimate > 0 and after.estimate > 0):
        return Bound(1.0, 0.0, math.inf)
    high = after.high / before.low if before.low > 0 else math.inf
    return Bound(after.estimate / before.estimate, after.low / before.high, high)


def _p99(times: Histogram, alpha: float) -> Bound:
    n = sum(times.counts)
    if not n:
        return Bound(0.0, 0.0, math.inf)
    above = round(n * 0.01)
    most, least = upper(above, n, alpha), lower(above, n, alpha)
    return Bound(
        times.quantile(0.99),
        times.quantile(1 - most),
        times.quantile(1 - least) if least > 0 else times.quantile(1.0),
    )


class Judge:
    """Says whether a candidate has shown what the rule wants.

    It looks at a tally when enough has been counted since its last look.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.first = first_look(rule)
        self._looks = self._fail_looks = 0
        self._next, self._next_fail = self.first, _FIRST_FAIL_LOOK
        self._was_over = False
        self._decided: Judgement | None = None

    def look(self, tally: Tally, is_over: bool = False) -> Judgement:
        """Return what there is to say now.

        Args:
            tally: tally of everything since the judge began.
            is_over: the time that the candidate was given has passed. What could not be shown in
                it, though there was traffic enough, is refused; but for its latency, which is
                looked at until it is known.
        """
        if self._decided is not None and self._decided.verdict is Outcome.FAIL:
            return self._decided
        n = tally.compared
        if (answers := max(n, tally.candidate.total)) >= self._next_fail:
            self._fail_looks += 1
            self._next_fail = 2 * answers
            alpha = self._alpha(self._fail_looks)
            bounds = bounds_of(self.rule, tally, alpha / _REASONS_TO_FAIL)
            if reasons := _shown_worse(self.rule, tally, bounds):
                return self._decide(Outcome.FAIL, reasons, alpha / _REASONS_TO_FAIL, bounds)
        if self._decided is not None:
            return self._decided
        alpha = self._alpha(self._looks + 1)
        bounds = bounds_of(self.rule, tally, alpha)
        missing, slow = _missing(self.rule, tally, bounds), _slow(self.rule, tally, bounds)
        is_last = is_over and not self._was_over and n >= self.first
        if n >= self._next or is_last:
            self._looks += 1
            self._next = 2 * n
            self._was_over |= is_last
            if not missing and not slow:
                return self._decide(Outcome.PASS, _shown(self.rule, tally, bounds), alpha, bounds)
            if is_over and missing:
                return self._decide(Outcome.FAIL, missing, alpha, bounds)
        reasons = [self._still_needed(tally), *missing, *slow]
        return Judgement(Outcome.NOT_ENOUGH, tuple(reasons), 1 - alpha, bounds)

    def _alpha(self, look: int) -> float:
        return math.ldexp(1 - self.rule.confidence, -look)

    def _decide(
        self, verdict: Outcome, reasons: list[str], alpha: float, bounds: dict[str, Bound]
    ) -> Judgement:
        self._decided = Judgement(verdict, tuple(reasons), 1 - alpha, bounds)
        return self._decided

    def _still_needed(self, tally: Tally) -> str:
        """Return at which look it would pass if nothing more differed."""
        n, at, look = tally.compared, self._next, self._looks + 1
        noise = tally.noise / n if n else 0.0
        while look < _MOST_LOOKS:
            later = (at, tally.noise_differs, round(noise * at))
            if _deciding(self.rule, tally, self._alpha(look), *later).high <= self.rule.allowed:
                return f"{n} compared; {at - n} more are needed if none of them differs"
            at, look = 2 * at, look + 1
        return f"{n} compared; no number that could be counted is enough"


def first_look(rule: Rule) -> int:
    """Return how many must be compared before a candidate without any difference can pass."""
    low, high = 1, 1
    while not _could_pass(high, rule):
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _could_pass(middle, rule) else (middle + 1, high)
    return max(rule.least, high)


def _could_pass(n: int, rule: Rule) -> bool:
    alpha = (1 - rule.confidence) / 2
    return _deciding(rule, Tally(), alpha, n, 0, 0).high <= rule.allowed


def _deciding(rule: Rule, tally: Tally, alpha: float, n: int, of_noise: int, noise: int) -> Bound:
    """Return the share that the rule is about, were `n` compared and nothing more differed."""
    if rule.labels is not None:
        return share(tally.compared - tally.labels_agree, n, alpha)
    return excess(tally.differs, n, of_noise, noise, alpha)


def _missing(rule: Rule, tally: Tally, bounds: dict[str, Bound]) -> list[str]:
    """Return what has not been shown, latency left out."""
    missing = []
    if _high(rule, bounds) > rule.allowed:
        missing.append(_describe(rule, tally, bounds))
    failures = bounds["failures"]
    # Where the live version fails, too, one of both has the more of them by chance.
    seen = failures.low if tally.live.failed else failures.estimate
    if seen > rule.failures:
        missing.append(_describe_failures(rule, tally))
    return missing


def _slow(rule: Rule, tally: Tally, bounds: dict[str, Bound]) -> list[str]:
    """Return what has not been seen of latency; of few answers, a percentile may be anything."""
    timed = min(sum(side.times.counts) for side in (tally.live, tally.candidate))
    if rule.p99 < math.inf and timed < rule.least:
        return [f"{timed} latencies of both were measured, expected {rule.least}"]
    is_slow = bounds["p99Ratio"].estimate > rule.p99
    return [_describe_p99(rule, bounds["p99Ratio"])] if is_slow else []


def _shown(rule: Rule, tally: Tally, bounds: dict[str, Bound]) -> list[str]:
    """Return all that was wanted, with what was seen."""
    return [
        _describe(rule, tally, bounds),
        _describe_failures(rule, tally),
        _describe_p99(rule, bounds["p99Ratio"]),
    ]


def _shown_worse(rule: Rule, tally: Tally, bounds: dict[str, Bound]) -> list[str]:
    """Return in what the candidate is worse than the rule allows, beyond the chance of a bound."""
    worse = []
    low = bounds["excess"].low if rule.labels is None else 1 - bounds["labels"].high
    if low > rule.allowed:
        worse.append(_describe(rule, tally, bounds))
    if bounds["failures"].low > rule.failures:
        worse.append(_describe_failures(rule, tally))
    if bounds["p99Ratio"].low > rule.p99:
        worse.append(_describe_p99(rule, bounds["p99Ratio"]))
    return worse


def _high(rule: Rule, bounds: dict[str, Bound]) -> float:
    return bounds["excess"].high if rule.labels is None else 1 - bounds["labels"].low


def _describe(rule: Rule, tally: Tally, bounds: dict[str, Bound]) -> str:
    n = tally.compared
    if rule.labels is not None:
        low, high = _share(bounds["labels"].low), _share(bounds["labels"].high)
        return (
            f"labels agree in {tally.labels_agree} of {n}, {low} to {high} of all; expected "
            f"{_percent(rule.labels)} or more. {tally.differs} answers differ in something"
        )
    low, high = _share(bounds["excess"].low), _share(bounds["excess"].high)
    return (
        f"{tally.differs} of {n} answers differ, and {tally.noise_differs} of {tally.noise} of the "
        f"live version from its own: {low} to {high} more; allowed are {_percent(rule.allowed)}"
    )


def _describe_failures(rule: Rule, tally: Tally) -> str:
    return (
        f"the candidate failed at {tally.candidate.failed} of {tally.candidate.total} requests, "
        f"the live version at {tally.live.failed} of {tally.live.total}; allowed are "
        f"{_percent(rule.failures)} more"
    )


def _describe_p99(rule: Rule, ratio: Bound) -> str:
    if math.isinf(rule.p99):
        return "its latency is judged once it answers"
    return (
        f"p99 of the candidate's latency is {ratio.estimate:.2f} times the live version's, "
        f"{ratio.low:.2f} to {ratio.high:.2f}; allowed are {rule.p99:g}"
    )


def _share(value: float) -> str:
    return f"{100 * max(0.0, value):.2f} %"
