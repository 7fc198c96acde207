"""What a candidate must show, and how a judge who looks again and again decides."""

from __future__ import annotations

import random
import re
import sys

import pytest

from modelyard.plugins.ops.rollout.blocks import SHORTEST
from modelyard.plugins.ops.rollout.comparer import Comparison, Verdict
from modelyard.plugins.ops.rollout.rule import (
    Beside,
    Judge,
    Outcome,
    Rule,
    Tally,
    bounds_of,
    parse_rule,
    parts_of,
)
from modelyard.serve.errors import BadRequest

EQUAL = Comparison(Verdict.EQUAL, True)
NEAR = Comparison(Verdict.WITHIN_TOLERANCE, True, "answer: …", 1e-5)
OTHER_LABEL = Comparison(Verdict.DIFFERS, False, "answer: …", 0.5)
SAME_LABEL = Comparison(Verdict.DIFFERS, True, "answer: …", 0.5)
FAILED = Comparison(Verdict.CANDIDATE_FAILED, None, "status: …")
LIVE_FAILED = Comparison(Verdict.LIVE_FAILED, None, "status: …")
BOTH_FAILED = Comparison(Verdict.BOTH_FAILED, None, "status: …")


def tally(
    *found: tuple[int, Comparison],
    noise: int = 0,
    slower: float = 1.0,
    spread: float = 0.2,
    seconds: float = 0.002,
    times: bool = True,
    rule: Rule | None = None,
) -> Tally:
    """Return what was counted, of a canary that has answered many, with their times.

    The live version was asked again for the last of them, and said the same.
    """
    counted = Tally(rule or Rule())
    draw = random.Random(0)
    for count, each in found:
        add(counted, max(0, count - noise), each)
        add(counted, min(noise, count), each, is_twice=True)
        for _ in range(count if times else 0):
            one, other = (seconds * draw.uniform(1 - spread, 1 + spread) for _ in range(2))
            counted.timed(one, slower * other)
    counted.live.clients = counted.candidate.clients = 10_000
    return counted


def add(counted: Tally, count: int, found: Comparison, is_twice: bool = False) -> Tally:
    """Count so many more."""
    for _ in range(count):
        key = f"r{counted.verdicts.total()}"
        counted.add(found, key)
        if is_twice:
            counted.add_noise(EQUAL, key)
    return counted


# -- the text ------------------------------------------------------------------------------------


def test_a_rule_says_what_it_was_given_and_the_rest_by_default() -> None:
    assert parse_rule() == Rule()
    text = "disagreement<=0.5%, confidence 99%, p50<=1.1, p99<=1.5, failures<=0.1%, least 1000"
    rule = parse_rule(text, "labels=95%")
    assert rule == Rule(0.005, 0.99, 1.1, 1.5, 0.001, 1000, 0.95)
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
        ("p50<=0", "expected a ratio above 0"),
        ("failures<=0%", "no amount of traffic shows 0"),
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


def test_a_candidate_without_differences_passes_once_its_bounds_are_low_enough() -> None:
    judge, counted = Judge(Rule(), is_canary=False), tally((500, EQUAL), noise=100)
    assert judge.look(counted).verdict is Outcome.NOT_ENOUGH
    said = judge.explain(counted).reasons[0]
    assert said == "500 compared; 223 more are needed if none of them differs or fails"
    judge.look(add(counted, 222, EQUAL))
    assert judge.look(counted).verdict is Outcome.NOT_ENOUGH
    found = judge.look(add(counted, 1, EQUAL))
    assert found.verdict is Outcome.PASS
    assert found.bounds["excess"].high <= 0.01
    assert found.bounds["failures"].high == pytest.approx(0.005, rel=1e-3)
    assert found.reasons[0].startswith("0 of 723 answers differ, and 0 of 100")


def test_nothing_passes_before_the_least_is_compared() -> None:
    judge = Judge(parse_rule("disagreement<=50%, failures<=50%, least 300"), is_canary=False)
    counted = tally((299, EQUAL))
    assert judge.look(counted).verdict is Outcome.NOT_ENOUGH
    assert judge.explain(counted).reasons[0].startswith("299 compared; 1 more are needed")
    assert judge.look(add(counted, 1, EQUAL)).verdict is Outcome.PASS


def test_a_canary_has_answered_the_least_itself() -> None:
    judge, counted = Judge(Rule()), tally((2000, EQUAL), noise=100)
    counted.live.clients, counted.candidate.clients = 10_000, 199
    assert judge.look(counted).verdict is Outcome.NOT_ENOUGH
    said = judge.explain(counted).reasons
    assert said == (
        "the candidate has answered 199 requests and the live version 10000; expected 200 each",
    )
    counted.candidate.clients = 200
    assert judge.look(counted).verdict is Outcome.PASS


def test_what_is_allowed_neither_passes_nor_fails_as_long_as_both_are_possible() -> None:
    """1 of 404, as an outsider measured: more traffic decides, and it is said how much."""
    judge, counted = (
        Judge(Rule(), is_canary=False),
        tally((403, EQUAL), (1, OTHER_LABEL), noise=404),
    )
    assert judge.look(counted).verdict is Outcome.NOT_ENOUGH
    said = judge.explain(counted).reasons
    assert re.match(r"404 compared; (\d+) more are needed if none", said[0])
    needed = int(said[0].split("; ")[1].split()[0])
    assert judge.look(add(counted, needed - 1, NEAR)).verdict is Outcome.NOT_ENOUGH
    assert judge.look(add(counted, 1, NEAR)).verdict is Outcome.PASS


def test_a_part_that_was_shown_once_stays_shown_and_another_is_waited_for() -> None:
    """Failures need more answers than differences; a difference meanwhile takes nothing back."""
    judge, counted = Judge(Rule(), is_canary=False), tally((450, EQUAL), noise=100)
    judge.look(counted)
    assert [said.split(" failed")[0] for said in judge.explain(counted).reasons[1:]] == [
        "the candidate"
    ]
    add(counted, 1, OTHER_LABEL)
    assert judge.look(add(counted, 272, EQUAL)).verdict is Outcome.PASS


def test_what_differs_always_fails_soon_and_a_verdict_stays() -> None:
    judge = Judge(Rule(), is_canary=False)
    found = judge.look(tally((10, OTHER_LABEL), noise=10))
    assert found.verdict is Outcome.FAIL
    assert found.reasons[0].startswith("10 of 10 answers differ, and 0 of 10 of the live version")
    assert "allowed are 1%" in found.reasons[0]
    assert judge.look(tally((10_000, EQUAL))) is found


@pytest.mark.parametrize("second", ["same requests", "other requests"])
def test_what_the_live_version_does_itself_is_no_fault(second: str) -> None:
    """Both differ from the live version's answer at one request in twenty."""
    judge, counted = Judge(Rule(), is_canary=False), Tally()
    for number in range(8000):
        counted.add(OTHER_LABEL if number % 20 == 0 else EQUAL, str(number))
        is_noise = number % 20 == (0 if second == "same requests" else 10)
        counted.add_noise(OTHER_LABEL if is_noise else EQUAL, str(number))
    assert counted.noise_differs == counted.differs == 400
    assert judge.look(counted).verdict is Outcome.PASS
    alone = Tally(verdicts=counted.verdicts, noise=8000, failures=counted.failures)
    for pair, count in counted.pairs.items():
        alone.pairs[pair[0], False] += count
    assert Judge(Rule(), is_canary=False).look(alone).verdict is Outcome.FAIL


def test_a_second_answer_is_joined_with_the_candidates_whichever_comes_first() -> None:
    counted = Tally()
    counted.add(OTHER_LABEL, "one")
    counted.add_noise(EQUAL, "two")
    assert counted.pairs.total() == 0
    counted.add_noise(EQUAL, "one")
    counted.add(EQUAL, "two")
    assert counted.pairs == {(True, False): 1, (False, False): 1}
    counted.add(FAILED, "three")
    counted.add_noise(OTHER_LABEL, "three")
    counted.add_noise(LIVE_FAILED, "four")
    assert counted.pairs.total() == 2
    for number in range(100_000):
        counted.add(EQUAL, str(number))
    assert len(counted._open) <= 1024, "what is never answered twice is forgotten"


def test_the_live_version_is_asked_twice_as_long_as_there_is_doubt() -> None:
    judge, counted = Judge(Rule(), is_canary=False), Tally()
    assert judge.noise_every(counted) == 1
    add(counted, 100, EQUAL, is_twice=True)
    assert judge.noise_every(counted) == 10
    add(counted, 1, OTHER_LABEL)
    assert judge.noise_every(counted) == 1
    add(counted, 2000, EQUAL)
    judge.look(counted)
    assert judge.noise_every(counted) == 1, "nothing explains the difference yet"
    counted.add_noise(OTHER_LABEL, "")
    assert judge.noise_every(counted) == 10, "it was shown, and the live version differs, too"
    assert Judge(parse_rule("", "labels=95%")).noise_every(Tally()) == 10


def test_failures_are_bounded_and_one_of_the_live_versions_changes_little() -> None:
    """Eleven of 401 were let pass as soon as the live version had failed once."""
    for live, failed, verdict in (
        (0, 11, Outcome.FAIL), (1, 11, Outcome.NOT_ENOUGH), (1, 20, Outcome.FAIL)
    ):  # fmt: skip
        judge = Judge(Rule(), is_canary=False)
        found = judge.look(tally((390, EQUAL), (failed, FAILED), (live, LIVE_FAILED)))
        assert found.verdict is verdict
    assert found.reasons[0].startswith(
        "the candidate failed at 20 of 411 requests, the live version at 1 of 411: "
    )
    one = Judge(Rule(), is_canary=False).look(tally((2000, EQUAL), (1, FAILED), noise=100))
    assert one.verdict is Outcome.PASS
    assert 0 < one.bounds["failures"].estimate < one.bounds["failures"].high <= 0.005


def test_what_both_fail_at_is_no_fault_and_no_excuse() -> None:
    both = tally((2000, EQUAL), (200, BOTH_FAILED), noise=100)
    assert (both.live.failed, both.candidate.failed) == (200, 200)
    assert Judge(Rule(), is_canary=False).look(both).verdict is Outcome.PASS
    more = Judge(Rule(), is_canary=False).look(add(both, 100, FAILED))
    assert more.verdict is Outcome.FAIL


def test_a_canary_that_fails_clients_fails_after_a_few() -> None:
    counted = Tally()
    for _ in range(400):
        counted.answered(False, 200)
    judge = Judge(Rule())
    while judge.look(counted).verdict is not Outcome.FAIL:
        counted.answered(True, 500)
    assert counted.candidate.failed <= 3
    assert counted.candidate.clients == counted.candidate.failed
    counted = Tally()
    for _ in range(100):
        counted.answered(False, 503)
        counted.answered(True, 503)
    assert Judge(Rule()).look(counted).verdict is Outcome.NOT_ENOUGH
    assert counted.failures == {0: 100}


def test_what_is_answered_once_is_counted_once() -> None:
    """A canary's own answers are compared where it answered: that makes its failures no rarer."""
    counted = tally((400, EQUAL), noise=100, times=False)
    counted.live.clients = counted.candidate.clients = 0
    for number in range(300):
        counted.answered(False, 200)
        counted.answered(True, 500 if number % 10 == 0 else 200)
        counted.add(EQUAL, f"copy {number}")
        if number % 10:
            counted.add(EQUAL, f"own {number}", is_own=True)
    assert counted.compared == 400 + 300 + 270
    assert counted.live.total == 400 + 300
    assert (counted.candidate.total, counted.candidate.failed) == (400 + 600, 30)
    assert counted.failures.total() == 400 + 600
    assert counted.own.to_json() == {"compared": 270, "differs": 0}


@pytest.mark.parametrize(
    ("slower", "verdict"),
    [(1.0, Outcome.PASS), (1.1, Outcome.PASS), (1.5, Outcome.FAIL), (3.0, Outcome.FAIL)],
)
def test_how_long_it_takes_is_judged_of_a_canary(slower: float, verdict: Outcome) -> None:
    counted = tally((2000, EQUAL), noise=100, slower=slower)
    assert Judge(Rule()).look(counted).verdict is verdict
    assert Judge(Rule(), is_canary=False).look(counted).verdict is Outcome.PASS
    loose = parse_rule("p50<=1000, p99<=1000")
    assert Judge(loose).look(
        tally((2000, EQUAL), noise=100, slower=slower, rule=loose)
    ).verdict is (Outcome.PASS)


def test_equal_times_pass_in_whatever_unit() -> None:
    """Times that are the same to the microsecond have no percentile that one in 100 is above."""
    for seconds in (30e-6, 0.01, 2.0):
        counted = tally((2000, EQUAL), noise=100, spread=0.0, seconds=seconds)
        assert Judge(Rule()).look(counted).verdict is Outcome.PASS


def test_a_slow_tail_is_found_where_the_median_is_the_same() -> None:
    draw, counted = random.Random(0), tally((2000, EQUAL), noise=100, times=False)
    for _ in range(2000):
        slow = 5 if draw.random() < 0.05 else 1
        counted.timed(draw.uniform(0.9, 1.1), slow * draw.uniform(0.9, 1.1))
    found = Judge(Rule()).look(counted)
    assert found.verdict is Outcome.FAIL
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith("p99: ")
    assert found.bounds["p50"].high < 0.5


def test_what_each_did_is_set_beside_what_the_other_did_last() -> None:
    beside = Beside()
    assert [beside.put(False, each) for each in (1, 2, 3)] == [None, None, None]
    assert beside.put(True, 10) == (3, 10)
    assert beside.put(True, 11) == (2, 11)
    assert beside.put(True, 12) == (1, 12)
    assert beside.put(True, 13) is None
    assert beside.put(False, 4) == (4, 13)
    for each in range(1000):
        beside.put(False, each)
    assert sum(beside.put(True, 0) is not None for _ in range(1000)) == 64


def test_labels_that_are_expected_to_differ_are_judged_by_their_agreement() -> None:
    """A retrained model: every number differs, and 98 % of the labels agree."""
    rule = parse_rule("", "labels=95%")
    found = Judge(rule, False).look(tally((980, SAME_LABEL), (20, OTHER_LABEL)))
    assert found.verdict is Outcome.PASS
    assert found.reasons[0].startswith("labels agree in 980 of 1000")
    assert found.reasons[0].endswith("1000 answers differ in something")
    worse = Judge(rule, False).look(tally((900, SAME_LABEL), (100, OTHER_LABEL)))
    assert worse.verdict is Outcome.FAIL
    undecided = Judge(rule, False).look(tally((95, SAME_LABEL), (5, OTHER_LABEL)))
    assert undecided.verdict is Outcome.NOT_ENOUGH


def test_how_often_one_looks_changes_no_verdict_of_what_stays_as_it_is() -> None:
    draw = random.Random(3)
    seen = [draw.random() < 0.05 for _ in range(1000)]
    found = []
    for every in (1, 50):
        judge, counted = Judge(Rule(), is_canary=False), Tally()
        for number, differs in enumerate(seen):
            counted.add(OTHER_LABEL if differs else EQUAL, str(number))
            counted.add_noise(EQUAL, str(number))
            if number % every == 0 and judge.look(counted).verdict is Outcome.FAIL:
                found.append(number)
                break
    assert 0 <= found[1] - found[0] <= 50


def test_a_look_costs_the_same_however_much_was_counted() -> None:
    """The evidence is a function of counts: some hundred logarithms, on the event loop."""
    calls = []
    for times in (1, 20):
        counted = tally((500 * times, EQUAL), (times, OTHER_LABEL), (times, FAILED))
        judge = Judge(parse_rule("least 1000000"))
        with Counting() as count:
            assert judge.look(counted).verdict is Outcome.NOT_ENOUGH
        calls.append(count.calls)
    assert max(calls) < 3000


class Counting:
    """Counts the calls of functions."""

    calls = 0

    def __enter__(self) -> Counting:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, _frame: object, event: str, _: object) -> None:
        self.calls += event == "call"


def test_bounds_know_nothing_before_anything_was_counted() -> None:
    found = bounds_of(Tally(), 0.05)
    assert found["excess"] == (0, -1, 1)
    assert found["failures"] == (0, -1, 1)
    assert found["labels"] == (0, 0, 1)
    assert found["p50"] == (0.5, 0, 1)


def test_answers_beside_each_other_are_counted_by_who_failed() -> None:
    counted = Tally()
    for live, candidate, times in ((200, 200, 1), (200, 500, 2), (503, 200, 3), (500, 500, 4)):
        for _ in range(times):
            counted.answered(False, live)
            counted.answered(True, candidate)
    assert counted.failures == {0: 5, 1: 2, -1: 3}
    assert (counted.live.clients, counted.candidate.clients) == (10, 10)


@pytest.mark.parametrize(
    ("candidate_s", "least", "most", "slower"), [(1.19, 0, 0, False), (1.3, 56, 56, True)]
)
def test_what_takes_longer_than_the_tail_allows_is_late(
    candidate_s: float, least: int, most: int, slower: bool
) -> None:
    counted = Tally()
    for _ in range(1000):  # the tail is known after a hundred
        counted.timed(1.0, candidate_s)
    cells = counted.tail.cells(SHORTEST)
    assert least <= sum(count for lead, count in cells.items() if lead > 0) <= most
    assert counted.slower.cells(SHORTEST) == {1 if slower else -1: 62}


def of_noise(candidate: int, noise: int) -> Tally:
    """Count 3,000 requests answered thrice, of which so many of ten differ, never the same."""
    counted = Tally()
    for at in range(3000):
        counted.add(OTHER_LABEL if at % 10 < candidate else EQUAL, str(at))
        counted.add_noise(OTHER_LABEL if at % 10 >= 10 - noise else EQUAL, str(at))
    return counted


@pytest.mark.parametrize(("candidate", "noise", "is_broken"), [(3, 2, True), (2, 2, False)])
def test_of_two_that_differ_from_themselves_the_noise_is_taken_off_once(
    candidate: int, noise: int, is_broken: bool
) -> None:
    excess = next(parts_of(Rule(), of_noise(candidate, noise)))
    shown = [way.with_floor(0.01).is_shown(0.01, is_above=True) for way in excess.broken]
    assert excess.name == "excess" and any(shown) is is_broken


@pytest.mark.parametrize("rule", [Rule(), Rule(labels=0.9)], ids=str)
def test_no_part_uses_more_than_the_chance_of_being_wrong(rule: Rule) -> None:
    parts = list(parts_of(rule, of_noise(1, 1)))
    answers = [part for part in parts if part.name in ("excess", "labels", "again", "own")]
    assert [bool(part.kept) for part in answers] == [True, False, False]
    together = [way for part in answers for way in part.broken]
    others = [part.broken for part in parts if part not in answers]
    for ways in (*(part.kept for part in parts if part.kept), *others, together):
        # The upper bound of a floor, of which there is one for all, uses as much again.
        spent = sum(way.chance for way in ways)
        spent += max(way.chance * (way.floor is not None) for way in ways)
        assert 0.5 <= spent <= 1 + 1e-9


def test_eight_blocks_in_which_all_are_slower_are_enough() -> None:
    counted, shown = Tally(), []
    for _ in range(8):
        for _ in range(2**SHORTEST):
            counted.timed(1.0, 1.3)
        (way,) = next(part for part in parts_of(Rule(), counted) if part.name == "p50").broken
        shown.append(way.is_shown(0.05, is_above=True))
    assert shown == [False] * 5 + [True] * 3


@pytest.mark.parametrize("count", [0, 1, 3])
def test_what_is_hardly_known_is_bounded_by_what_can_be(count: int) -> None:
    counted = Tally()
    for _ in range(count):
        counted.timed(1.0, 1.0)
    for name, bound in bounds_of(counted, 0.05).items():
        least = -1 if name in ("excess", "failures", "p99") else 0
        assert least <= bound.low <= bound.high <= 1, name


@pytest.mark.parametrize(
    ("clients", "reason"),
    [
        (299, "the candidate has answered 299 requests and the live version 299; expected 300 "),
        (300, "3000 compared, and 0 timed: more are needed to tell how long it takes"),
    ],
)
def test_a_canary_answers_as_many_clients_as_are_compared_at_least(
    clients: int, reason: str
) -> None:
    judge, counted = Judge(Rule(least=300)), of_noise(0, 0)
    for _ in range(clients):
        counted.answered(False, 200)
        counted.answered(True, 200)
    judge.look(counted)
    assert judge.explain(counted).reasons[0].startswith(reason)
