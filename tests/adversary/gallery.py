"""A table of planted wrongs and of harmless changes, and what a check made of them."""

import sys
from collections.abc import Iterable
from typing import NamedTuple


class Row(NamedTuple):
    """What a check said of one change."""

    check: str
    change: str
    is_wrong: bool
    """Whether the change has to be caught; else it has to pass."""
    is_caught: bool


def judge(rows: Iterable[Row], known: frozenset[str] = frozenset()) -> None:
    """Print misses and false alarms, and fail where there is one.

    Args:
        rows: what was tried.
        known: misses that the check does not claim to see, as `check: change`.
    """
    tried = list(rows)
    wrong = [row for row in tried if row.is_wrong]
    harmless = [row for row in tried if not row.is_wrong]
    misses = [f"{row.check}: {row.change}" for row in wrong if not row.is_caught]
    alarms = [f"{row.check}: {row.change}" for row in harmless if row.is_caught]
    lines = [
        f"{len(wrong)} wrongs, {len(misses)} missed; {len(harmless)} harmless changes, "
        f"{len(alarms)} false alarms",
        *(f"  missed: {name}" for name in misses),
        *(f"  false alarm: {name}" for name in alarms),
    ]
    sys.stdout.write("\n" + "\n".join(lines) + "\n")
    assert wrong and harmless, "a gallery has both"
    assert set(misses) == known
    assert alarms == []
