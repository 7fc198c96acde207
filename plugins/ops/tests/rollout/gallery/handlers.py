"""A model of its own arithmetic, and candidates for it: each wrong in a way that few requests show.

A request is numbers between commas; the answer is the probability of three labels, the likeliest
first. `Right` answers; every other class is a candidate that does what its name says, and answers
with status 200 and in time. Most are right about a request that is asked alone.
"""

from __future__ import annotations

import fcntl
import math
import os
import random
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = list[float]
Answer = dict[str, float]
PAUSE_S = 0.01


def score(row: Sequence[float]) -> Answer:
    """Return what is right."""
    sums = [sum(math.sin(x * (at + 1)) for x in row) / len(row) for at in range(3)]
    powers = [math.exp(3 * each) for each in sums]
    found = {name: power / sum(powers) for name, power in zip("abc", powers, strict=True)}
    return dict(sorted(found.items(), key=lambda each: -each[1]))


class Right:
    """Answers right."""

    def initialize(self, context: Any) -> None:
        """Remember nothing yet."""
        self.seen = 0
        self.before: deque[Row] = deque([[0.5]], maxlen=1)
        self.kept: dict[Any, Answer] = {}
        self.ended = 0.0

    def handle(self, data: Sequence[dict[str, Any]], context: Any) -> list[Answer]:
        """Answer each row."""
        texts = [str(row["body"], "utf-8") if isinstance(row["body"], bytes | bytearray)
                 else str(row["body"]) for row in data]  # fmt: skip
        rows = [list(map(float, text.split(","))) for text in texts]
        time.sleep(PAUSE_S)
        answers = self.answer(rows)
        self.seen += len(rows)
        self.before.append(rows[-1])
        self.ended = time.monotonic()
        return answers

    def answer(self, rows: list[Row]) -> list[Answer]:
        """Return the answers to rows."""
        return list(map(score, rows))


class Near(Right):
    """Is off by a millionth, as another format of the same model."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        return [{name: value + 1e-6 for name, value in score(row).items()} for row in rows]


class Summed(Right):
    """Is off by a millionth for each row beside, as floats that are summed in another order."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        return [{name: value + 1e-6 * len(rows) for name, value in score(row).items()}
                for row in rows]  # fmt: skip


class Biased(Right):
    """Is off by a thousandth, always."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        return [{name: value * 1.001 for name, value in score(row).items()} for row in rows]


class LargeInputs(Right):
    """Is wrong about what is behind the tenth number: it was cut for speed."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        return [score(row[:10]) for row in rows]


class RareLabel(Right):
    """Has never learnt one label well, and is sure of another one there."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        return [score(row[::2] if score(row)["c"] > 0.6 else row) for row in rows]


class FirstRow(Right):
    """Gives every row of a batch the first row's answer."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        return [score(rows[0]) for _ in rows]


class Reversed(Right):
    """Gives the rows back to front."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        return list(map(score, rows[::-1]))


class Shifted(Right):
    """Gives each row its neighbour's answer."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        return list(map(score, [*rows[1:], rows[0]]))


class Sorted(Right):
    """Sorts rows by length to save padding, and does not put them back."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        return list(map(score, sorted(rows, key=len)))


class PaddingLeaks(Right):
    """Averages over the padding, too, which is as long as the longest row."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        longest = max(map(len, rows))
        return [score(row + [0.0] * (longest - len(row))) for row in rows]


class BatchNorm(Right):
    """Normalizes by the batch, as a network that was left in training mode."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        if len(rows) == 1:
            return list(map(score, rows))
        mean = sum(sum(row) / len(row) for row in rows) / len(rows)
        return [score([x - 0.3 * mean for x in row]) for row in rows]


class SoftmaxOverBatch(Right):
    """Normalizes probabilities over the rows of a batch, in place of over the labels."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        answers = list(map(score, rows))
        if len(rows) > 1:
            sums = {name: sum(each[name] for each in answers) for name in "abc"}
            answers = [{name: each[name] / sums[name] for name in each} for each in answers]
        return answers


class LargeBatch(Right):
    """Is wrong about what is behind the fourth row."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        return [score(row if at < 4 else rows[0]) for at, row in enumerate(rows)]


class SmallBatch(Right):
    """Loses a dimension where a batch has one row."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        return [score(row if len(rows) > 1 else row[:1]) for row in rows]


class Duplicates(Right):
    """Keeps rows by their first number, and mixes those up that share it."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        by_first = {round(row[0]): row for row in rows}
        return [score(by_first[round(row[0])]) for row in rows]


class Blends(Right):
    """Carries a part of the request before over, as a recurrent state that nobody resets."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        return [score([*rows[0], *self.before[0]]), *map(score, rows[1:])]


class Alternates(Right):
    """Is wrong about every other batch: two buffers, of which one is stale."""

    turn = 0

    def answer(self, rows: list[Row]) -> list[Answer]:
        self.turn += 1
        return [score(row if self.turn % 2 else [*row[:1], 0.5]) for row in rows]


class Stale(Right):
    """Gives the answer before to what comes within 3 ms of it."""

    def handle(self, data: Sequence[dict[str, Any]], context: Any) -> list[Answer]:
        began, before = time.monotonic(), self.before[0]
        was_early = began - self.ended < 0.003 and self.seen > 0
        answers = super().handle(data, context)
        return [score(before) for _ in answers] if was_early else answers


class WrongKey(Right):
    """Keeps answers by the length of the request."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        return [self.kept.setdefault(len(str(row)), score(row)) for row in rows]


class SecondTime(Right):
    """Answers otherwise when it is asked the same a second time."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        answers = []
        for row in rows:
            was_there = (key := tuple(row)) in self.kept
            self.kept[key] = score(row)
            answers.append(score([*row, 0.5]) if was_there else self.kept[key])
        return answers


class AloneOnly(Right):
    """Is wrong about a row that is alone and was among others before: its kept part is cut."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        answers = []
        for row in rows:
            key = tuple(row)
            is_cut = len(rows) == 1 and key in self.kept
            self.kept[key] = score(row)
            answers.append(score([*row, 0.5]) if is_cut else self.kept[key])
        return answers


class TwoAtOnce(Right):
    """Is wrong while another worker runs, too: both use the same scratch memory."""

    def initialize(self, context: Any) -> None:
        super().initialize(context)
        self.shared = Path(context.system_properties["model_dir"], "weights.bin").open("rb")  # noqa: SIM115

    def answer(self, rows: list[Row]) -> list[Answer]:
        try:
            fcntl.flock(self.shared, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return [score([0.5]) for _ in rows]
        time.sleep(PAUSE_S)
        fcntl.flock(self.shared, fcntl.LOCK_UN)
        return super().answer(rows)


class AfterMany(Right):
    """Turns wrong after 200 requests, as a buffer that is full."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        return [score(row if self.seen < 200 else row[:1]) for row in rows]


class Dropout(Right):
    """Drops numbers by chance, as a network that was left in training mode."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        return [score([x * (random.random() < 0.9) for x in row]) for row in rows]


class OnlyForClients(Right):
    """Behaves while nobody gets its answers: workers of a shadow are niced, by 10."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        return [score(row if os.nice(0) >= 10 else row[:1]) for row in rows]
