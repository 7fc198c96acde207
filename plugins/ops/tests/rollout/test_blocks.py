"""Blocks of times: who leads in them, and how long they have to be for times in bursts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from modelyard.plugins.ops.rollout import evidence
from modelyard.plugins.ops.rollout.blocks import SHORTEST, Blocks

SIZE = 2**SHORTEST


def put(blocks: Blocks, *pairs: tuple[int, int]) -> Blocks:
    for pair in pairs:
        blocks.put(*pair)
    return blocks


@pytest.mark.parametrize(
    ("pairs", "lead"),
    [
        ([], 0.0),
        ([(0, 1)], 1.0),
        ([(1, 0)] * 3, -1.0),
        ([(1, 1)] * 5, 0.0),
        ([(0, 1), (0, 1), (0, 1), (1, 0)], 0.5),
        ([(0, 1), (0, 1), (1, 0)], 5 / 16),
        ([(1, 0), (1, 0), (0, 1)], -5 / 16),
    ],
)
def test_a_block_says_whose_late_times_are_more(pairs: list[tuple[int, int]], lead: float) -> None:
    blocks = put(Blocks(), *pairs, *[(0, 0)] * (SIZE - len(pairs) - 1))
    assert blocks.cells(SHORTEST) == {}
    assert put(blocks, (0, 0)).cells(SHORTEST) == {lead: 1}


def test_longer_blocks_are_made_of_two_shorter_ones() -> None:
    blocks = put(Blocks(), *[(0, 1)] * SIZE, *[(1, 0)] * SIZE, *[(0, 1)] * 2 * SIZE)
    assert blocks.cells(SHORTEST) == {1.0: 3, -1.0: 1}
    assert blocks.cells(SHORTEST + 1) == {0.0: 1, 1.0: 1}
    assert blocks.cells(SHORTEST + 2) == {0.5: 1}
    assert blocks.cells(SHORTEST + 3) == {}


def alone(draw: random.Random) -> Iterator[tuple[int, int]]:
    while True:
        yield int(draw.random() < 0.3), int(draw.random() < 0.3)


def apart(draw: random.Random) -> Iterator[tuple[int, int]]:
    """Yield slow periods of about a hundred, of either version."""
    while True:
        slow, length = draw.choice([(0, 0), (1, 0), (0, 1)]), draw.randint(50, 150)
        for _ in range(length):
            yield slow


def together(draw: random.Random) -> Iterator[tuple[int, int]]:
    """Yield slow periods of both."""
    while True:
        share, length = draw.choice([0.1, 0.9]), draw.randint(50, 150)
        for _ in range(length):
            yield int(draw.random() < share), int(draw.random() < share)


def changed(draw: random.Random) -> Iterator[tuple[int, int]]:
    """Yield a candidate that becomes slow for good."""
    for number in range(100_000):
        yield 0, int(draw.random() < (0.1 if number < 1500 else 0.9))


@pytest.mark.parametrize(
    ("times", "least", "most"),
    [(alone, 4, 4), (together, 4, 4), (apart, 6, 9), (changed, 4, 5)],
)
def test_blocks_are_as_long_as_what_one_of_both_is_slow_by(
    times: Callable[[random.Random], Iterator[tuple[int, int]]], least: int, most: int
) -> None:
    levels = []
    for seed in range(9):
        blocks, pairs = Blocks(), times(random.Random(seed))
        for _ in range(4096):
            blocks.put(*next(pairs))
        levels.append(blocks.level)
    assert least <= sorted(levels)[len(levels) // 2] <= most, levels


def test_what_comes_in_bursts_is_bet_on_in_blocks_as_long_and_is_not_evidence() -> None:
    """The same times of both versions; in short blocks the first burst alone seems to be."""
    found: dict[bool, int] = {True: 0, False: 0}
    for seed in range(40):
        blocks, pairs = Blocks(), apart(random.Random(seed))
        for _ in range(4096):
            blocks.put(*next(pairs))
        for is_known in found:
            cells = blocks.cells(blocks.level if is_known else SHORTEST)
            found[is_known] += evidence.log_evidence(cells, 0.0, (-1, 1), True) > 3
    assert found[True] <= 2 < found[False]


def test_how_long_blocks_have_to_be_is_known_from_before() -> None:
    blocks, pairs = Blocks(), apart(random.Random(0))
    for _ in range(4096):
        blocks.put(*next(pairs))
    level = blocks.level
    blocks.begin()
    assert blocks.cells(level) == blocks.cells(SHORTEST) == {}
    assert blocks.level == level > SHORTEST
    put(blocks, *[(0, 1)] * SIZE)
    assert blocks.cells(SHORTEST) == {1.0: 1}


def test_a_level_changes_seldom_so_that_what_is_bet_on_does_not_choose_it() -> None:
    blocks, pairs, changes = Blocks(), apart(random.Random(1)), []
    before = blocks.level
    for number in range(1, 5000):
        blocks.put(*next(pairs))
        if blocks.level != before:
            changes.append(number)
            before = blocks.level
    assert changes and all(number & (number - 1) == 0 for number in changes)


@pytest.mark.parametrize("count", [8, 10, 12])
def test_how_much_blocks_vary_is_taken_from_neighbours_less_the_two_that_are_furthest_apart(
    count: int,
) -> None:
    """Neighbours are 2 apart, and once 1; a variance is half of the mean square, by the pair."""
    blocks = put(Blocks(), *[(0, 1), (1, 0)] * (count // 2 - 1), (0, 1), (0, 0))
    known = count // 2 - 1
    if known < 4:
        assert blocks._variances() == []
        return
    variance = (4 * (known - 1) + 1) / known / 2
    least = variance / (1 + 1.5 * (2 / known) ** 0.5)
    ((level, found, low),) = blocks._variances()
    assert level == 0
    assert found == pytest.approx(variance)
    assert low == pytest.approx(least)


@pytest.mark.parametrize(
    ("variances", "level"),
    [
        ([], 4),
        ([(0, 1.0, 0.8), (4, 1.0, 0.5)], 4),
        ([(0, 1.0, 0.9), (4, 2.0, 1.8), (5, 3.0, 2.5), (6, 2.4, 2.0)], 6),
        ([(4, 2.0, 1.9), (5, 3.0, 2.19)], 4),
        ([(4, 2.0, 1.9), (5, 3.0, 2.21)], 6),
        ([(3, 0.5, 0.4), (4, 0.7, 0.5)], 4),
        ([(4, 0.0, 0.0)], 4),
    ],
)
def test_the_shortest_blocks_are_taken_that_vary_as_much_and_then_the_next(
    variances: list[tuple[int, float, float]], level: int
) -> None:
    assert Blocks()._long_enough(variances) == level
