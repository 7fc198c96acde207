"""What a candidate must show, and how often a judge who looks again and again may be wrong."""

from __future__ import annotations

import random

import pytest

from modelyard.plugins.ops.rollout.answers import Comparison, Verdict
from modelyard.plugins.ops.rollout.bounds import upper
from modelyard.plugins.ops.rollout.rule import (
    Judge,
    Outcome,
    Rule,
    Tally,
    bounds_of,
    first_look,
    parse_rule,
)
from modelyard.serve.errors import BadRequest

EQUAL = Comparison(Verdict.EQUAL, True)
NEAR = Comparison(Verdict.WITHIN_TOLERANCE, True, "answer: …", 1e-5)
OTHER_LABEL = Comparison(Verdict.DIFFERS, False, "answer: …", 0.5)
SAME_LABEL = Comparison(Verdict.DIFFERS, True, "answer: …", 0.5)
FAILED = Comparison(Verdict.CANDIDATE_FAILED, None, "status: …")


def tally(*found: tuple[int, Comparison], slower: float = 1.0, noise: int = 0) -> Tally:
    """Return what was counted, with latencies of about 2 ms."""
    counted = Tally()
    draw = random.Random(0)
    for times, each in found:
        for _ in range(times):
            counted.add(each)
            counted.live.times.observe(0.002 * draw.uniform(0.8, 1.2))
            counted.candidate.times.observe(0.002 * slower * draw.uniform(0.8, 1.2))
    for _ in range(noise):
        counted.add_noise(EQUAL)
    return counted


# -- the text ------------------------------------------------------------------------------------


def test_a_rule_says_what_it_was_given_and_the_rest_by_default() -> None:
    assert parse_rule() == Rule()
    text = "disagreement<=0.5%, confidence 99%, p99<=1.5, failures<=0.1%, least 1000"
    rule = parse_rule(text, "labels=95%")
    assert rule == Rule(0.005, 0.99, 1.5, 0.001, 1000, 0.95)
    assert str(rule) == text
    assert rule.expect == "labels=95%"
    assert parse_rule(str(Rule())) == Rule()
    assert parse_rule("least 10,p99 <= 2") == Rule(least=10, p99=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("p95<=1.2", "the rule says 'p95<=1.2'; expected parts of: disagreement<="),
        ("disagreement<1%", "the rule says 'disagreement<1%'; expected"),
        ("disagreement<=0.01", "expected parts of"),
        ("disagreement<=0%", "no amount of traffic shows 0"),
        ("disagreement<=100%", "less than 100 %"),
        ("confidence 100%", "below 100 %"),
        ("confidence 20%", "expected 50 %"),
        ("least 0", "expected 1 or more"),
        ("least 9999999999", "expected parts of"),
        ("p99<=0", "expected a ratio above 0"),
        ("least 5, least 6", "least twice"),
        ("x" * 10_000, "the rule says"),
    ],
)
def test_another_text_is_refused_in_a_line(text: str, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_rule(text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize("text", ["labels=0%", "labels=100%", "labels", "words=5%", "labels=1e9%"])
def test_what_is_expected_is_a_share_of_labels(text: str) -> None:
    with pytest.raises(BadRequest, match="expected labels=95%"):
        parse_rule("", text)


# -- the judge -----------------------------------------------------------------------------------


def test_a_candidate_without_differences_passes_once_its_bound_is_low_enough() -> None:
    judge = Judge(Rule())
    assert judge.first == first_look(Rule())
    # Half of 5 % is for the first look, a fifth of which is for the noise floor.
    assert upper(0, judge.first, 0.02) <= 0.01 < upper(0, judge.first - 1, 0.02)
    early = judge.look(tally((judge.first - 1, EQUAL)))
    assert early.verdict is Outcome.NOT_ENOUGH
    assert (
        early.reasons[0] == f"{judge.first - 1} compared; 1 more are needed if none of them differs"
    )
    found = judge.look(tally((judge.first, EQUAL), noise=40))
    assert found.verdict is Outcome.PASS
    assert found.bounds["excess"].high <= 0.01
    assert found.reasons[0].startswith(f"0 of {judge.first} answers differ, and 0 of 40")


def test_nothing_passes_before_the_least_is_compared() -> None:
    judge = Judge(parse_rule("disagreement<=50%, least 300"))
    assert judge.look(tally((299, EQUAL)), is_over=True).verdict is Outcome.NOT_ENOUGH
    assert judge.look(tally((300, EQUAL))).verdict is Outcome.PASS


def test_what_is_still_needed_is_what_is_needed() -> None:
    judge = Judge(Rule())
    counted = tally((500, EQUAL), (1, OTHER_LABEL))
    found = judge.look(counted)
    assert found.verdict is Outcome.NOT_ENOUGH
    needed = int(found.reasons[0].split("; ")[1].split()[0])
    for _ in range(needed - 1):
        counted.add(NEAR)
        counted.live.times.observe(0.002)
        counted.candidate.times.observe(0.002)
    assert judge.look(counted).verdict is Outcome.NOT_ENOUGH
    counted.add(NEAR)
    assert judge.look(counted).verdict is Outcome.PASS


def test_one_in_a_hundred_is_not_shown_to_be_within_one_in_a_hundred() -> None:
    judge = Judge(Rule())
    found = judge.look(tally((1980, EQUAL), (20, OTHER_LABEL), noise=200))
    assert found.verdict is Outcome.NOT_ENOUGH
    found = judge.look(tally((1980, EQUAL), (20, OTHER_LABEL), noise=200), is_over=True)
    assert found.verdict is Outcome.FAIL
    assert found.reasons[0].startswith(
        "20 of 2000 answers differ, and 0 of 200 of the live version"
    )
    assert "allowed are 1%" in found.reasons[0]


def test_what_differs_always_fails_soon() -> None:
    judge = Judge(Rule())
    assert judge.look(tally((80, OTHER_LABEL), noise=8)).verdict is Outcome.FAIL
    assert judge.look(tally((10_000, EQUAL))).verdict is Outcome.FAIL, "a verdict stays"


def test_what_the_live_version_does_itself_is_no_fault() -> None:
    """Both disagree with the live version in 5 %: that is its noise."""
    counted = tally((9500, EQUAL), (500, OTHER_LABEL))
    for each, times in ((EQUAL, 9500), (OTHER_LABEL, 500)):
        for _ in range(times):
            counted.add_noise(each)
    assert Judge(parse_rule("disagreement<=2%")).look(counted).verdict is Outcome.PASS
    counted.noise = counted.noise_differs = 0
    assert Judge(parse_rule("disagreement<=2%")).look(counted, True).verdict is Outcome.FAIL


def test_failures_above_the_live_versions_do_not_pass_and_fail_when_they_are_many() -> None:
    some = Judge(Rule()).look(tally((2000, EQUAL), (1, FAILED)))
    assert some.verdict is Outcome.NOT_ENOUGH
    assert "the candidate failed at 1 of 2001 requests, the live version at 0" in some.reasons[1]
    assert Judge(Rule()).look(tally((10, FAILED))).verdict is Outcome.FAIL
    both = tally((2000, EQUAL), (3, FAILED), (1, Comparison(Verdict.LIVE_FAILED, None)))
    assert Judge(Rule()).look(both).verdict is Outcome.PASS


def test_a_canary_that_fails_more_often_than_the_live_version_fails() -> None:
    counted = Tally()
    counted.live.count(1000, 10)
    counted.candidate.count(10, 10)
    assert Judge(Rule()).look(counted).verdict is Outcome.FAIL
    counted = Tally()
    counted.live.count(1000, 1000)
    counted.candidate.count(10, 10)
    assert Judge(Rule()).look(counted).verdict is Outcome.NOT_ENOUGH


def test_three_times_slower_fails_and_as_fast_passes() -> None:
    assert Judge(Rule()).look(tally((400, EQUAL), slower=3)).verdict is Outcome.FAIL
    found = Judge(Rule()).look(tally((400, EQUAL), slower=1))
    assert found.verdict is Outcome.PASS
    ratio = found.bounds["p99Ratio"]
    assert ratio.low <= ratio.estimate <= ratio.high
    assert 0.9 < ratio.estimate < 1.1


def test_latency_is_looked_at_until_it_is_known_to_be_within_the_limit_or_over_it() -> None:
    """A few answers that took long make a percentile of few."""
    counted = tally((400, EQUAL))
    for _ in range(8):
        counted.candidate.times.observe(0.004)
    judge = Judge(Rule())
    found = judge.look(counted, is_over=True)
    assert found.verdict is Outcome.NOT_ENOUGH
    assert found.reasons[1].startswith("p99 of the candidate's latency is 1.5")
    later = tally((4000, EQUAL))
    later.candidate.times.observe(0.004)
    assert judge.look(later, is_over=True).verdict is Outcome.PASS


def test_labels_that_are_expected_to_differ_are_judged_by_their_agreement() -> None:
    """A retrained model: every number differs, and 98 % of the labels agree."""
    rule = parse_rule("", "labels=95%")
    found = Judge(rule).look(tally((980, SAME_LABEL), (20, OTHER_LABEL)))
    assert found.verdict is Outcome.PASS
    assert found.reasons[0].startswith("labels agree in 980 of 1000")
    assert found.reasons[0].endswith("1000 answers differ in something")
    assert Judge(rule).look(tally((900, SAME_LABEL), (100, OTHER_LABEL))).verdict is Outcome.FAIL
    undecided = Judge(rule).look(tally((95, SAME_LABEL), (5, OTHER_LABEL)))
    assert undecided.verdict is Outcome.NOT_ENOUGH


def _watched(draw: random.Random, differs: float, noise: float = 0.0) -> Outcome:
    """Return what a judge says first who looks after every twenty of 640 answers.

    Each tenth request is answered by the live version twice, as in a roll-out.
    """
    judge, counted = Judge(parse_rule("disagreement<=2%, least 1, p99<=1000")), Tally()
    counted.live.times.observe(0.002)
    counted.candidate.times.observe(0.002)
    for _ in range(32):
        for at in range(20):
            counted.add(OTHER_LABEL if draw.random() < noise + differs else EQUAL)
            if at % 10 == 0:
                counted.add_noise(OTHER_LABEL if draw.random() < noise else EQUAL)
        found = judge.look(counted)
        if found.verdict is not Outcome.NOT_ENOUGH:
            return found.verdict
    return Outcome.NOT_ENOUGH


RUNS = 60
SELDOM = 10
"""What happens in 5 % of the runs happens in no more: four standard deviations above 3."""


@pytest.mark.parametrize(
    ("differs", "noise", "passes", "fails"),
    [
        (0.0201, 0.05, range(SELDOM + 1), range(RUNS + 1)),
        (0.0199, 0.05, range(RUNS + 1), range(SELDOM + 1)),
        (0.001, 0.0, range(RUNS - SELDOM, RUNS + 1), range(SELDOM + 1)),
        (0.5, 0.05, range(1), range(RUNS - SELDOM, RUNS + 1)),
    ],
    ids=["just over the limit", "just within it", "far within", "far over"],
)
def test_however_often_a_judge_looks_it_is_seldom_wrong_and_sees_what_is_plain(
    differs: float, noise: float, passes: range, fails: range
) -> None:
    """Of a candidate over the limit few pass, and of one within it few are refused."""
    draw = random.Random(2)
    found = [_watched(draw, differs, noise) for _ in range(RUNS)]
    assert found.count(Outcome.PASS) in passes
    assert found.count(Outcome.FAIL) in fails


def test_who_looks_after_every_tenth_answer_spends_no_more_than_who_looks_at_doublings() -> None:
    """640 answers agree, then all differ: both refuse with the same chance of being wrong."""
    found = []
    for looks in (set(range(10, 1281, 10)), {10 * 2**at for at in range(8)}):
        judge, counted = Judge(parse_rule("disagreement<=2%, least 1000")), Tally()
        for n in range(1, 1281):
            counted.add(EQUAL if n <= 640 else OTHER_LABEL)
            counted.add_noise(EQUAL)
            if n in looks:
                judgement = judge.look(counted)
        found.append((judgement.verdict, judgement.confidence))
    assert found[0] == found[1]
    assert found[0][0] is Outcome.FAIL


def test_bounds_know_nothing_before_anything_was_counted() -> None:
    found = bounds_of(Rule(), Tally(), 0.05)
    assert found["excess"] == (0, -1, 1)
    assert found["p99Ratio"].low == 0
    assert found["labels"] == (0, 0, 1)
