from pathlib import Path

from benchmarks.bare import Loop, merge_loops
from benchmarks.results import (
    BARE,
    OURS,
    Cell,
    Footprint,
    Results,
    Sample,
    Spread,
    best,
    neighbours,
    read_results,
    spread,
    summarise,
)

SERVED_8, BARE_8 = Cell("resnet50", OURS, 2, 8), Cell("resnet50", BARE, 2, 8)


def sample(
    cell: Cell, rate: float, round: int = 0, failures: int = 0, p50_ms: float = 1.0
) -> Sample:
    """Return a run of 10 s."""
    requests = int(10 * rate) + failures
    return Sample(cell, round, requests, 10.0, p50_ms, 2.0, failures, 0.5, 1.0, 0.0)


def test_a_served_run_is_held_against_the_bare_loops_just_before_and_just_after() -> None:
    loops = [sample(BARE_8, 10, round) for round in range(4)]
    others = [
        sample(Cell("resnet50", BARE, 1, 1), 5, 1),
        sample(Cell("tiny", BARE, 2, 8), 5, 1),
        sample(Cell("resnet50", OURS, 2, 8), 5, 1),
    ]
    assert neighbours(sample(SERVED_8, 10, 1), [*loops, *others]) == loops[1:3]


def test_the_ratio_is_the_median_of_all_neighbours_and_so_a_drift_does_not_count() -> None:
    samples = []
    for round, speed in enumerate((100, 80, 60)):
        samples += [sample(BARE_8, speed, round), sample(SERVED_8, speed - 10, round, p50_ms=1.5)]
    samples.append(sample(BARE_8, 40, 3))
    row = next(row for row in summarise(samples) if row.cell == SERVED_8)
    assert row.rate_ratio is not None and row.p50_ratio is not None
    ratios = sorted([90 / 100, 90 / 80, 70 / 80, 70 / 60, 50 / 60, 50 / 40])
    assert row.rate_ratio == Spread((ratios[2] + ratios[3]) / 2, ratios[0], ratios[-1])
    assert row.p50_ratio == Spread(1.5, 1.5, 1.5)
    assert row.rate == Spread(70, 50, 90)


def test_of_each_server_the_fastest_setting_of_a_load_stands_for_it() -> None:
    rates = {OURS: 5, "mosec b=1": 3, "mosec b=8": 4, "ray b=8": 1}
    samples = [sample(Cell("tiny", name, 1, 8), rate, 0) for name, rate in rates.items()]
    found = best(summarise(samples))
    assert {name: row.cell.server for name, row in found.items()} == {
        OURS: OURS, "mosec": "mosec b=8", "ray": "ray b=8",
    }  # fmt: skip


def test_the_bare_loop_itself_and_a_model_without_one_have_no_ratio() -> None:
    rows = summarise([sample(Cell("echo", OURS, 1, 64), 9000), sample(BARE_8, 10)])
    assert [row.rate_ratio for row in rows] == [None, None]


def test_rates_of_bare_processes_are_added_each_over_its_own_time() -> None:
    merged = merge_loops([Loop(100, 10.0, 9.0, 1.0, 2.0), Loop(100, 12.5, 9.0, 1.5, 1.9)])
    assert merged.requests / merged.seconds == 10 + 8
    assert (merged.cpu_s, merged.p50_ms, merged.p99_ms) == (18.0, 1.5, 2.0)


def test_failed_requests_count_as_failures_and_not_as_rate() -> None:
    found = sample(SERVED_8, 500, failures=100)
    assert found.rate == 500
    (row,) = summarise([found])
    assert row.failures == 100


def test_cpu_is_told_per_request() -> None:
    found = sample(SERVED_8, 1000)
    assert (found.server_us, found.workers_us) == (50, 100)


def test_the_spread_is_median_lowest_and_highest() -> None:
    assert spread([3, 1, 2]) == Spread(2, 1, 3)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    footprints = [
        Footprint("tiny", OURS, 1, 0, 2.5, 300, 50, 40, 300, 250, False),
        Footprint("tiny", "mosec", 1, 0, 0.5, 150),
    ]
    samples = [sample(BARE_8, 10), sample(SERVED_8, 9)]
    results = Results({"date": "2026-01-01", "machine": {"cores": 2}}, samples, footprints)
    results.write(tmp_path / "results.json")
    assert read_results(tmp_path / "results.json") == results
