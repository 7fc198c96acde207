"""Which of the waiting requests run together: those that came first, or are of like length.

A batch of texts is filled up to its longest, and what fills it costs as much as text does. So
requests share a batch only where the call that is saved is worth more than the padding.
"""

from collections import deque
from collections.abc import Sequence

from modelyard.serve.dataplane import wire

KIND = (
    wire.EXPLAIN | wire.ALONE | wire.DESCRIBE | wire.SHARES | wire.TENSORS | wire.STREAM
    | wire.GOLDEN | wire.TEXTS
)  # fmt: skip
"""Flags that jobs of one batch share."""
NEIGHBOURS = 128
"""How many that wait are looked at: it bounds the work, and how long one is passed by."""

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
        lengths: lengths of the requests' bodies in bytes, the oldest first; at least one.
        size: the largest batch.
        call_bytes: value of `CALL_BYTES`.

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


def take_batch(
    waiting: deque[wire.Item], size: int, call_bytes: int | None = None
) -> list[wire.Item]:
    """Take the first item and up to `size - 1` more of its kind; the others keep their order.

    Args:
        waiting: what has arrived, at least one.
        size: the largest batch, in rows; an item that has more comes alone.
        call_bytes: value of `lengths.CALL_BYTES`, for items of like length; None takes them in
            order.
    """
    first = waiting.popleft()
    batch = [first]
    rows = max(1, first.code)
    kind = first.flags & KIND
    if kind & (wire.ALONE | wire.DESCRIBE):
        return batch
    if call_bytes is not None:
        waiting.appendleft(first)
        return _take_alike(waiting, size, call_bytes)
    others: list[wire.Item] = []
    while waiting and rows < size:
        item = waiting.popleft()
        if item.flags & KIND == kind and rows + max(1, item.code) <= size:
            batch.append(item)
            rows += max(1, item.code)
        else:
            others.append(item)
    waiting.extendleft(reversed(others))
    return batch


def _take_alike(waiting: deque[wire.Item], size: int, call_bytes: int) -> list[wire.Item]:
    kind = waiting[0].flags & KIND
    places = [at for at, item in enumerate(waiting) if item.flags & KIND == kind]
    chosen = choose_alike([len(waiting[at].body) for at in places], size, call_bytes)
    batch = [waiting[places[at]] for at in chosen]
    for at in reversed(chosen):
        del waiting[places[at]]
    return batch
