"""How much of what waits a batch takes."""

import random
from collections.abc import Callable

import pytest

from serve.worker.halves import REMEASURE, Halves


def learn(time_of: Callable[[int], float], waiting: int, size: int = 8) -> list[int]:
    """Let it choose often, with these times; return its choices once it has seen both."""
    halves, choices = Halves(size), []
    for _ in range(3 * REMEASURE):
        count = halves.choose(waiting)
        halves.measured(count, time_of(count))
        choices.append(count)
    return choices[REMEASURE:]


@pytest.mark.parametrize(
    ("time_of", "waiting", "expected"),
    [
        pytest.param(lambda n: n, 8, 4, id="grows with the batch"),
        pytest.param(lambda n: n, 7, 4, id="odd"),
        pytest.param(lambda n: n, 2, 1, id="two"),
        pytest.param(lambda n: 10 + n, 8, 8, id="hardly grows"),
        pytest.param(lambda n: 1 + n, 8, 4, id="grows, and a batch costs something"),
        pytest.param(lambda n: 1 + n, 2, 2, id="two, and a batch costs something"),
    ],
)
def test_it_takes_what_answers_sooner_on_average(
    time_of: Callable[[int], float], waiting: int, expected: int
) -> None:
    choices = learn(time_of, waiting)
    assert choices.count(expected) >= len(choices) * (REMEASURE - 1) // REMEASURE
    assert set(choices) == {waiting, (waiting + 1) // 2}  # the other one, now and then


def test_disturbances_do_not_count() -> None:
    chance = random.Random(0)
    choices = learn(lambda n: (1 + n) * (1 if chance.random() < 0.7 else 20), 8)
    assert choices.count(4) > 0.9 * len(choices)


def test_it_learns_anew_when_times_change() -> None:
    halves = Halves(8)
    for round in range(40 * REMEASURE):
        count = halves.choose(8)
        halves.measured(count, count if round < REMEASURE else 10 + count)
    assert halves.choose(8) == 8


@pytest.mark.parametrize(("waiting", "expected"), [(1, 1), (9, 8), (100, 8)])
def test_one_request_and_more_than_a_batch_are_not_halved(waiting: int, expected: int) -> None:
    halves = Halves(8)
    for count in range(1, 9):
        halves.measured(count, float(count))
    assert halves.choose(waiting) == expected
