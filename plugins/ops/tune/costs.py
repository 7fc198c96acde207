"""What a request of one model costs, as it was measured: times by batch size, the server, memory.

`tune` measures them and leaves them in model-config.yaml under `tunedCosts`; `plan` reads them from
there or from an archive that holds that file.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from modelyard.base.quantile import nearest_rank
from modelyard.serve.errors import ServeError

KEY = "tunedCosts"
"""Of model-config.yaml."""
LEVELS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 1.0)
"""Shares of the batches that were no slower than the times which are kept of each size."""
DRAWS = 2000
"""Times that are drawn from, by batch size: evenly spread over what was measured."""
MOST_SIZE = 1024
LONGEST_MS = 3_600_000.0


class BadCosts(ServeError):
    """They are missing, or are not what `tune` writes."""


@dataclass(frozen=True)
class Costs:
    """Of one model on one machine."""

    batch_ms: Mapping[int, Sequence[float]]
    """By batch size: how long a worker is busy with one, at each of the levels."""
    server_ms: float
    """The server process has of its core for one request, while it has many."""
    turn_ms: float
    """And for each turn of its event loop: one for a request that comes alone, one for its answer;
    those that come together share them."""
    idle_ms: Mapping[int, Sequence[float]]
    """By the length of a pause, in milliseconds: by how much the first request after it makes the
    server's turn longer, and the worker's batch, for they sleep and their caches are others'."""
    wait_ms: float
    """That a request and its answer are on their way, with nobody busy."""
    worker_mb: float
    """Memory of one worker that is its own."""
    server_mb: float
    """Memory of the server process, and of what workers share."""
    load_s: float
    """From the start of a server to its first answer."""
    threads: int
    """Of each worker."""
    batch_size: int
    """The largest batch of the setting that was measured."""
    cores: int
    """Of the machine."""
    _tables: dict[int, list[float]] = field(default_factory=dict, compare=False, repr=False)

    def mean_s(self, size: int) -> float:
        """Return how long a batch takes on average, in seconds."""
        return fmean(self.times_s(size))

    def times_s(self, size: int) -> list[float]:
        """Return times of a batch, each as likely as the next, in seconds, sorted.

        Between two sizes that were measured they lie on a line; beyond the largest they grow as
        they do from one to the largest.
        """
        if size not in self._tables:
            self._tables[size] = [each / 1e3 for each in self._spread(size)]
        return self._tables[size]

    def _spread(self, size: int) -> list[float]:
        sizes = sorted(self.batch_ms)
        if size in self.batch_ms:
            return spread(self.batch_ms[size])
        at = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        if len(sizes) == 1:
            return [each * size / sizes[0] for each in spread(self.batch_ms[sizes[0]])]
        low, high = (0, -1) if size > sizes[-1] else (at - 1, at)
        share = (size - sizes[low]) / (sizes[high] - sizes[low])
        few, many = spread(self.batch_ms[sizes[low]]), spread(self.batch_ms[sizes[high]])
        return [max(1e-6, a + share * (b - a)) for a, b in zip(few, many, strict=True)]

    def idle_s(self, pause_s: float) -> tuple[float, float]:
        """Return by how much a pause makes the server's next turn longer, and a worker's batch.

        Between two pauses that were measured it lies on a line; beyond the longest it is the same.
        """
        before, low = 0.0, (0.0, 0.0)
        for pause_ms, found in self.idle_ms.items():
            server, worker = found
            if pause_s * 1e3 < pause_ms:
                share = (pause_s * 1e3 - before) / (pause_ms - before)
                server = low[0] + share * (server - low[0])
                worker = low[1] + share * (worker - low[1])
                return server / 1e3, worker / 1e3
            before, low = pause_ms, (server, worker)
        return low[0] / 1e3, low[1] / 1e3

    def as_dict(self) -> dict[str, Any]:
        """Return what is written down."""
        return {
            **{
                name: {key: list(times) for key, times in sorted(getattr(self, name).items())}
                for name in TABLES
            },
            **{name: getattr(self, name) for name in (*NUMBERS, *WHOLE)},
        }


TABLES = ("batch_ms", "idle_ms")
NUMBERS = ("server_ms", "turn_ms", "wait_ms", "worker_mb", "server_mb", "load_s")
WHOLE = ("threads", "batch_size", "cores")


def spread(at_levels: Sequence[float]) -> list[float]:
    """Return values, each as likely as the next, of a distribution that is known at `LEVELS`."""
    found: list[float] = []
    step = 0
    for draw in range(DRAWS):
        level = (draw + 0.5) / DRAWS
        while level > LEVELS[step + 1]:
            step += 1
        low, high = LEVELS[step], LEVELS[step + 1]
        share = (level - low) / (high - low)
        found.append(at_levels[step] + share * (at_levels[step + 1] - at_levels[step]))
    return found


def summarise(times_s: Sequence[float]) -> list[float]:
    """Return these times at `LEVELS`, in milliseconds."""
    ordered = sorted(times_s)
    return [float(f"{nearest_rank(ordered, level) * 1e3:.4g}") for level in LEVELS]


def parse_costs(value: Any, where: str) -> Costs:
    """Read what stands under the key.

    Raises:
        BadCosts: it is not what `tune` writes; the message names the first thing that is wrong.
    """
    if not isinstance(value, dict):
        raise BadCosts(f"{where}: {KEY}: expected a mapping, got {type(value).__name__}")
    keys = {*TABLES, *NUMBERS, *WHOLE}
    if set(value) != keys:
        odd = ", ".join(sorted(map(str, set(value) ^ keys)))
        raise BadCosts(f"{where}: {KEY}: missing or unknown: {odd}; run modelyard tune again")
    for name in (*NUMBERS, *WHOLE):
        number = value[name]
        is_right = type(number) is int if name in WHOLE else type(number) in (int, float)
        least = 1 if name in WHOLE else 0
        if not is_right or not least <= number < math.inf:
            kind = "a whole number from 1 up" if name in WHOLE else "a number from 0 up"
            raise BadCosts(f"{where}: {KEY}: {name}: expected {kind}, got {number!r}")
    batches = value["batch_ms"]
    if not isinstance(batches, dict) or not batches:
        raise BadCosts(f"{where}: {KEY}: batch_ms: expected times by batch size")
    for size, times in batches.items():
        if type(size) is not int or not 1 <= size <= MOST_SIZE:
            raise BadCosts(f"{where}: {KEY}: batch_ms: {size!r} is not a batch size")
        if not isinstance(times, list) or len(times) != len(LEVELS) or not _are_times(times):
            raise BadCosts(
                f"{where}: {KEY}: batch_ms: {size}: expected {len(LEVELS)} times in milliseconds "
                "above 0, none below the one before it"
            )
    pauses = value["idle_ms"]
    if not isinstance(pauses, dict) or not all(map(_is_pause, pauses.items())):
        raise BadCosts(
            f"{where}: {KEY}: idle_ms: expected by each pause, in whole milliseconds above 0, two "
            "times from 0 up: the server's and the worker's"
        )
    tables = {
        name: {key: tuple(value[name][key]) for key in sorted(value[name])} for name in TABLES
    }
    return Costs(**{**value, **tables})


def _is_pause(entry: tuple[Any, Any]) -> bool:
    pause, times = entry
    is_key = type(pause) is int and 1 <= pause <= LONGEST_MS
    return (
        is_key
        and isinstance(times, list)
        and len(times) == 2
        and all(type(each) in (int, float) and 0 <= each <= LONGEST_MS for each in times)
    )


def _are_times(values: Sequence[Any]) -> bool:
    are_numbers = all(type(each) in (int, float) and 0 < each <= LONGEST_MS for each in values)
    return are_numbers and list(values) == sorted(values)
