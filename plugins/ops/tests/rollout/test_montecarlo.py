"""How often a judge is wrong, of many roll-outs at once, and that these judge as the product."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.judge import (
    ANSWERS,
    FAILURES,
    ROWS,
    TIMES,
    Judges,
    ManyBlocks,
    Row,
    Tallies,
    Truth,
    simulate,
)
from modelyard.plugins.ops.rollout.blocks import Blocks, _Level
from modelyard.plugins.ops.rollout.comparer import Verdict
from modelyard.plugins.ops.rollout.rule import Judge, Outcome, Rule, Side, Tally

PAGE = Path(__file__).parents[4] / "docs/rollout.md"
CHECKED = 5
MANY = 1_000_000


SHORT = [row for row in ROWS if row.requests <= 3000]
"""What takes a second or less; the others are judged at night."""


@pytest.mark.parametrize("row", SHORT, ids=[row.name for row in SHORT])
def test_of_many_roll_outs_few_are_judged_wrong(row: Row) -> None:
    judges = simulate(row.truth, row.requests, Judges(row.rule, 100), 1000)
    assert row.is_kept(judges, slack=0.05), row.share(judges)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("at", range(len(ROWS)), ids=[row.name for row in ROWS])
def test_of_two_thousand_no_more_than_the_page_says(at: int) -> None:
    row = ROWS[at]
    judges = simulate(row.truth, row.requests, Judges(row.rule, 2000), at)
    assert row.is_kept(judges), row.share(judges)
    passed, failed = row.share(judges)
    said = f"| {row.name} | {row.requests:,} | {passed:.1%} | {failed:.1%} |"
    assert said in PAGE.read_text(encoding="utf-8")


def test_the_page_has_every_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [row.name for row in ROWS if f"| {row.name} | {row.requests:,} |" not in text] == []


class Both(Judges):
    """Judges some of the roll-outs with the product's own judge as well."""

    def __init__(self, given: Rule, runs: int) -> None:
        super().__init__(given, runs)
        self.own = [Judge(given, is_canary=True) for _ in range(CHECKED)]
        self.said: list[dict[Outcome, int]] = [{} for _ in range(CHECKED)]
        self.asked: list[tuple[int, int]] = []

    def look(self, tallies: Tallies) -> None:
        super().look(tallies)
        every = self.noise_every(tallies)
        for at, judge in enumerate(self.own):
            tally = column(tallies, at)
            self.said[at].setdefault(judge.look(tally).verdict, tallies.compared)
            self.asked.append((judge.noise_every(tally), int(every[at])))


def column(tallies: Tallies, at: int) -> Tally:
    """Return what was counted of one roll-out."""

    def one(count: Any) -> int:
        return int(np.broadcast_to(count, tallies.runs)[at])

    def cells(counts: Any) -> Counter[Any]:
        return Counter({value: one(count) for value, count in counts.items()})

    def picked(many: ManyBlocks) -> Blocks:
        blocks = Blocks()
        blocks.level = one(many.level)
        blocks._levels = [_Level(cells(level.cells)) for level in many._levels]
        return blocks

    differs = one(tallies.differs)
    return Tally(
        tallies.rule,
        Counter({Verdict.EQUAL: tallies.compared - differs, Verdict.DIFFERS: differs}),
        tallies.compared,
        one(tallies.noise),
        one(tallies.noise_differs),
        cells(tallies.pairs),
        cells(tallies.failures),
        picked(tallies.slower),
        picked(tallies.tail),
        0,
        Side(tallies.live.total, one(tallies.live.failed), MANY),
        Side(tallies.candidate.total, one(tallies.candidate.failed), MANY),
    )


@pytest.mark.parametrize(
    ("given", "truth", "requests"),
    [
        (ANSWERS, Truth(), 600),
        (ANSWERS, Truth(differs=0.03, noise=0.02), 2000),
        (ANSWERS, Truth(differs=0.3, after=1000), 1500),
        (FAILURES, Truth(fails=0.03, live_fails=0.01), 1500),
        (FAILURES, Truth(fails=0.002), 2500),
        (TIMES, Truth(slower=1.25, sigma=0.2), 1500),
        (TIMES, Truth(), 3000),
        pytest.param(TIMES, Truth(slow="either", shadow=500), 4000, marks=pytest.mark.nightly),
        (TIMES, Truth(slower=3, after=1500), 3000),
    ],
)
def test_the_product_judges_each_as_all_are_judged(
    given: Rule, truth: Truth, requests: int
) -> None:
    both = Both(given, CHECKED)
    simulate(truth, requests, both, 3)
    for at, said in enumerate(both.said):
        assert said.get(Outcome.FAIL, np.inf) == both.failed_at[at]
        assert said.get(Outcome.PASS, np.inf) == both.passed_at[at]
    assert min(both.failed_at.min(), both.passed_at.min()) < np.inf, "one of them is judged"
    assert {own for own, _ in both.asked} <= {1, 10}
    assert all(own == other for own, other in both.asked)
