"""What a worker says of one answer's reasons, and whether the reasons of a stream have changed.

Means do not show a sensor that is stuck: its part was small and stays small. What changes is how
its shares lie among those of before. So each share is ranked among all earlier ones of its part and
of the same predicted class, the reference's rows first. While rows come as the reference's did, the
rank is even between 0 and 1, and tells nothing of the ranks before it, whatever the shares are and
however few the reference knows: that few rows know little is in the ranks already. What is bet on
is that ranks are uneven. Classes are bet on apart: more customers of one kind change nothing.

V. Fedorova, A. Gammerman, I. Nouretdinov and V. Vovk, "Plug-in martingales for testing
exchangeability on-line", ICML 2012; when to raise an alarm: Shin, Ramdas and Rinaldo as in
`rollout.evidence.Drift`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from modelyard.archiver.reference import (
    CELLS,
    MAX_BYTES,
    WINDOW,
    Reasons,
    Reference,
    cell_of,
    read_reasons,
)
from modelyard.archiver.untrusted.json import parse_json
from modelyard.plugins.ops.rollout.evidence import FALSE_ALARMS
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import Reply
from modelyard.serve.dataplane.worker import Worker

OF_A_JOB = wire.LEGACY | wire.KSERVE | wire.PARTS
"""Flags by which a worker reads a request."""
OTHER_FORMS = wire.TENSORS | wire.INSTANCES
"""Flags of requests that are not one body for the handler."""
SLACK = 0.05
"""Share of a class's rows whose shares may lie elsewhere without being news."""
RARER = 4.0
"""Times as rare, or frequent, as in the reference that a class may be which is bet on: the few that
are predicted wrong are most of a class which has nearly gone, and have other reasons."""


def _bets() -> Iterator[Sequence[float]]:
    """Yield what a stake becomes by the eighth of a rank: shares that fall, gather or rise.

    Each is fair while ranks are even, and unfavourable while less than `SLACK` of them lie
    elsewhere than even ones do.
    """
    for low, high in ((0, 1), (0, 4), (3, 4), (4, 5), (2, 6), (4, 8), (7, 8)):
        more = 4.5 if high - low == 1 else 1.5
        yield [(more if low <= at < high else 0.5) / (1 + SLACK * (more - 0.5)) for at in range(8)]
    yield [(2.5 if at in (0, 7) else 0.5) / (1 + SLACK * 2) for at in range(8)]


BETS = tuple(_bets())


def idle_explainer(model: ModelVersion) -> Worker | None:
    """Return a worker that only explains and has nothing to do, while no request waits."""
    if model.explainers is None:
        return None
    if model.pool.slots and not model.explainers.slots:
        model.load_explainers()
    if any(queue.waiting > 0 for queue in model.batchers):
        return None
    return next((each for each in model.explainers.workers if each.is_idle), None)


def read_answer(reply: Reply, parts: Mapping[str, float]) -> Reasons:
    """Return what a worker says, which runs authors' code.

    Raises:
        ValueError: it is not what a worker of ours says.
    """
    body = reply.body
    if not isinstance(body, bytes | bytearray):
        raise ValueError("it came as a stream")
    text = body[:200].decode("utf-8", "replace")
    if reply.status != 200:
        raise ValueError(f"status {reply.status}: {text}")
    label, shares = read_reasons(parse_json(body, MAX_BYTES))
    if shares and shares.keys() != parts.keys():
        raise ValueError(f"expected shares of {', '.join(parts)}, got {text}")
    if not all(isinstance(each, float | int) and 0 <= each <= 1 for each in shares.values()):
        raise ValueError(f"expected shares from 0 to 1, got {text}")
    return Reasons(label, {name: shares[name] for name in parts} if shares else {})


class Ranks:
    """The shares of one part and class that were seen, and what bets on their ranks have won."""

    def __init__(self, cells: list[int]) -> None:
        self._cells = cells + [0] * (CELLS - len(cells))
        self._total = sum(cells)
        self.won = [0.0] * len(BETS)

    def put(self, share: float) -> float:
        """Rank a share, and return what all bets together have."""
        at = cell_of(share)
        self._cells[at] += 1  # equal ones, itself among them, are ranked by lot
        self._total += 1
        above = sum(self._cells[:at]) + random.random() * self._cells[at]
        eighth = min(int(8 * above / self._total), 7)
        self.won = [
            (won + 1) * bet[eighth] for won, bet in zip(self.won, BETS, strict=True)
        ]  # another one begins
        return sum(self.won)


class Change:
    """Sees the reasons of a stream change.

    While nothing changes an alarm comes, on average, after `FALSE_ALARMS` explanations or more, and
    within the first n with a chance of at most n / `FALSE_ALARMS`. After one it begins anew, so
    that further ones come for as long as the reasons are others than the reference's.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._begin()

    def _begin(self) -> None:
        self._ranks = {
            label: [Ranks(list(cells)) for cells in group.cells]
            for label, group in self._reference.classes.items()
        }
        self._won = dict.fromkeys(self._ranks, 0.0)
        rows = self._reference.rows
        self._usual = {label: each.rows / rows for label, each in self._reference.classes.items()}
        self._recent = dict(self._usual)

    @property
    def evidence(self) -> float:
        """What the bets have, as a share of what raises an alarm."""
        bets = len(self._ranks) * len(self._reference.shares) * len(BETS)
        return sum(self._won.values()) / (bets * FALSE_ALARMS) if bets else 0.0

    def _is_as_frequent(self, label: str) -> bool:
        """Count a class; return whether it was about as frequent before as in the reference."""
        usual, recent = self._usual[label], self._recent[label]
        for each, share in self._recent.items():
            self._recent[each] = share + ((each == label) - share) / WINDOW
        return usual / RARER <= recent <= usual * RARER

    def put(self, reasons: Reasons) -> str:
        """Take an explanation; return the part that has changed most if it raises an alarm."""
        ranks = self._ranks.get(reasons.label)
        if ranks is None or not self._is_as_frequent(reasons.label):
            return ""
        won = [each.put(share) for each, share in zip(ranks, reasons.shares.values(), strict=True)]
        self._won[reasons.label] = sum(won)
        if self.evidence < 1:
            return ""
        self._begin()
        return list(reasons.shares)[won.index(max(won))]
