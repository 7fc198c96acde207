from pathlib import Path

import pytest

from benchmarks.results import (
    BARE,
    SERVED,
    Cell,
    Footprint,
    Results,
    Sample,
    Spread,
    bare_rate,
    read_results,
    spread,
    summarise,
)


def sample(cell: Cell, rate: float, round: int = 0, failures: int = 0) -> Sample:
    """Return a run of 10 s."""
    requests = int(10 * rate) + failures
    return Sample(cell, round, requests, 10.0, 1.0, 2.0, failures, 0.5, 1.0, 0.0)


def bare(workers: int, batch: int) -> Cell:
    return Cell("digits", BARE, workers, batch=batch)


def served(workers: int, connections: int) -> Cell:
    return Cell("digits", SERVED, workers, connections)


LOOPS = [
    sample(bare(1, 1), 1000),
    sample(bare(1, 8), 1500),
    sample(bare(2, 1), 2100),
    sample(bare(2, 8), 2000),
]


@pytest.mark.parametrize(
    ("workers", "connections", "expected"),
    [
        pytest.param(1, 1, 1000, id="one connection: one request at a time"),
        pytest.param(2, 1, 1000, id="one connection keeps one process busy, whatever there is"),
        pytest.param(1, 64, 1500, id="many connections: the faster batch"),
        pytest.param(2, 64, 2100, id="two workers: two processes"),
    ],
)
def test_a_served_rate_is_held_against_as_much_of_the_bare_loop_as_can_be_busy(
    workers: int, connections: int, expected: float
) -> None:
    assert bare_rate(served(workers, connections), LOOPS, 0) == expected


def test_ratios_are_taken_within_a_round() -> None:
    cell, loop = served(1, 1), bare(1, 1)
    samples = [
        sample(loop, 1000, round=0),
        sample(cell, 750, round=0),
        sample(loop, 400, round=1),
        sample(cell, 100, round=1),
    ]
    row = next(row for row in summarise(samples) if row.cell == cell)
    assert row.ratio == Spread(0.5, 0.25, 0.75)
    assert row.rate == Spread(425, 100, 750)


def test_a_model_without_a_bare_loop_has_no_ratio() -> None:
    (row,) = summarise([sample(Cell("echo", SERVED, 1, 64), 9000)])
    assert row.ratio is None


def test_failed_requests_count_as_failures_and_not_as_rate() -> None:
    found = sample(served(1, 8), 500, failures=100)
    assert found.rate == 500
    (row,) = summarise([found])
    assert row.failures == 100


def test_cpu_is_told_per_request() -> None:
    found = sample(served(1, 8), 1000)
    assert (found.server_us, found.workers_us) == (50, 100)


def test_the_spread_is_median_lowest_and_highest() -> None:
    assert spread([3, 1, 2]) == Spread(2, 1, 3)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    footprint = Footprint("digits", 1, 0, 2.5, 50, 40, 300, 250)
    results = Results({"date": "2026-01-01", "machine": {"cores": 2}}, LOOPS, [footprint])
    results.write(tmp_path / "results.json")
    assert read_results(tmp_path / "results.json") == results
