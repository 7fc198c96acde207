"""What is said of what runs beside predictions."""

from benchmarks.beside import Half, tabulate


def test_a_pairs_change_is_held_against_the_goal_and_misses_are_kept() -> None:
    alone, fine, slow = (
        Half(0.5, p99, cpu, 4, 0) for p99, cpu in ((2.0, 1.0), (2.02, 1.2), (3.0, 1.4))
    )
    pairs = {
        "a": [(alone, fine)] * 2 + [(alone, slow)],
        "b": [(alone, slow._replace(times=0, failed=2))],
    }
    _, a, b = tabulate(pairs, {"a": "scrape", "b": "log"}).splitlines()
    assert a.split() == [
        "scrape",
        "4",
        "0.50",
        "0.50",
        "2.00",
        "2.02",
        "+1.0%",
        "50.00",
        "0",
        "met",
    ]
    assert b.split()[-5:] == ["+50.0%", "–", "2", "not", "met"]
