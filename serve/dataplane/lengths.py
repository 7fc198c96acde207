"""Which of the waiting requests are of like length, and run together.

A batch of texts is filled up to its longest, and what fills it costs as much as text does. So
requests share a batch only where the call that is saved is worth more than the padding.
"""

from __future__ import annotations

from collections.abc import Sequence

NEIGHBOURS = 128
"""Of those that wait, how many are looked at: it bounds the work, and how long one is passed by."""

CALL_BYTES = {"cpu": 48, "cuda": 8192}
"""What one call costs on a device beside its rows, as so many bytes of text."""

HIDDEN = 16
"""Bytes tell tokens only roughly: among texts as long in bytes, the one of most tokens has about a
sixteenth more than the others, which is padding that nobody sees beforehand."""


def choose_alike(lengths: Sequence[int], size: int, call_bytes: int) -> list[int]:
    """Choose the first request and those that run with it at least cost.

    Each further one saves a call, and costs what fills it up to the longest of the batch, seen or
    hidden. None is taken that costs more than it saves; among equally long ones those that came
    first are.

    Args:
        lengths: of the requests' bodies in bytes, the oldest first; at least one.
        size: the largest batch.
        call_bytes: of `CALL_BYTES`.

    Returns:
        Places in `lengths`, ascending, 0 among them.
    """
    first = lengths[0]
    # Backwards from any place: ever shorter ones, of equally long ones the oldest first.
    ordered = sorted(range(len(lengths)), key=lambda at: (lengths[at], -at))
    best, most_saved = [0], 0
    for top in reversed(range(len(ordered))):
        longest = lengths[ordered[top]]
        if longest < first or size == 1:
            break
        gain = call_bytes - longest // HIDDEN
        if longest - first >= gain:
            continue
        batch, saved = [0], first - longest
        for at in ordered[top::-1]:
            worth = gain - (longest - lengths[at])
            if worth <= 0 or len(batch) == size:
                break
            if at:
                batch.append(at)
                saved += worth
        if saved > most_saved:
            best, most_saved = batch, saved
    return sorted(best)
