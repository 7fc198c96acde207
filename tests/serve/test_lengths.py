"""Which requests run together when batches are made of like lengths: counts, never times."""

from __future__ import annotations

import random
from collections import deque
from itertools import combinations

import pytest

from modelyard.serve.dataplane.lengths import CALL_BYTES, HIDDEN, choose_alike


def saved(lengths: list[int], batch: tuple[int, ...] | list[int], call_bytes: int) -> int:
    """Calls that a batch saves, less what fills it up, in bytes."""
    longest = max(lengths[at] for at in batch)
    padding = sum(longest - lengths[at] for at in batch)
    return (len(batch) - 1) * (call_bytes - longest // HIDDEN) - padding


def texts(count: int, seed: int) -> list[int]:
    """Lengths as those of sentences and paragraphs: a few are very long."""
    chance = random.Random(seed)
    return [int(chance.lognormvariate(4.3, 0.8)) + 1 for _ in range(count)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("call_bytes", [8, 48, 8192])
def test_no_other_batch_with_the_oldest_saves_more(size: int, call_bytes: int) -> None:
    for seed in range(60):
        lengths = texts(7, seed)
        chosen = choose_alike(lengths, size, call_bytes)
        others = ((0, *more) for count in range(size) for more in combinations(range(1, 7), count))
        # Requests that are further from the longest than a call is worth are no company.
        able = (
            batch
            for batch in others
            if len(batch) == 1
            or max(lengths[at] for at in batch) * (HIDDEN + 1) // HIDDEN
            - min(lengths[at] for at in batch)
            < call_bytes
        )
        best = max(saved(lengths, batch, call_bytes) for batch in able)
        assert saved(lengths, chosen, call_bytes) == best
        assert chosen[0] == 0
        assert len(chosen) <= size
        assert chosen == sorted(set(chosen))


def test_of_equally_long_ones_those_that_came_first_run_first() -> None:
    assert choose_alike([20] * 9, 4, 48) == [0, 1, 2, 3]
    assert choose_alike([20, 500, 20, 20, 500, 20, 20], 3, 48) == [0, 2, 3]


def test_one_that_is_like_no_other_runs_alone() -> None:
    assert choose_alike([900, 20, 25, 22], 8, CALL_BYTES["cpu"]) == [0]
    assert choose_alike([20, 900, 800], 8, CALL_BYTES["cpu"]) == [0]


def test_where_a_call_costs_much_a_batch_is_full_and_still_of_like_length() -> None:
    lengths = [200, 900, 10, 210, 190, 20, 205, 800]
    assert choose_alike(lengths, 4, CALL_BYTES["cuda"]) == [0, 3, 4, 6]
    assert choose_alike(lengths, 8, CALL_BYTES["cuda"]) == list(range(8))


def drain(lengths: list[int], by_length: bool) -> tuple[list[list[int]], float]:
    """Run a queue of 64 that is always refilled; give the batches, and the share of padding."""
    waiting = deque(enumerate(lengths))
    batches, paid, filled = [], 0, 0
    while waiting:
        seen = [length for _, length in list(waiting)[:64]]
        places = choose_alike(seen, 8, CALL_BYTES["cpu"]) if by_length else range(min(8, len(seen)))
        batch = [waiting[place] for place in places]
        for place in reversed(places):
            del waiting[place]
        longest = max(length for _, length in batch)
        paid += len(batch) * longest
        filled += sum(longest - length for _, length in batch)
        batches.append([at for at, _ in batch])
    return batches, filled / paid


def test_batches_of_like_length_are_padded_far_less_and_nobody_is_left_behind() -> None:
    lengths = texts(2000, 3)
    in_order, wasted = drain(lengths, by_length=False)
    alike, filled = drain(lengths, by_length=True)
    assert wasted > 0.5
    assert filled < wasted / 5
    assert len(alike) < 1.4 * len(in_order)
    assert sorted(at for batch in alike for at in batch) == list(range(2000))
    done: set[int] = set()
    for batch in alike:
        assert batch[0] == min(set(range(2000)) - done), "the oldest runs in the next batch"
        done.update(batch)
