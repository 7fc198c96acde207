"""How often changed reasons are seen, in roll-outs and in a stream, and how often wrongly.

Networks are trained on scikit-learn's tables, its digits (nine regions) and the loans example; what
judges is the product's. A candidate is a twin, of another seed and other draws of the training
rows, or it was given a column that says the label in part of the rows, which the live version has
learnt to be noise. Run from the repository's folder: `python -m benchmarks.reasons [--runs 20]`.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from examples.loans.make import draw as draw_loans
from modelyard.archiver.reference import WINDOW, Reasons, Reference, distance, make_reference
from modelyard.handlers.explain.explainer import STEPS, regions
from modelyard.plugins.ops.reasons import Change
from modelyard.plugins.ops.rollout.reasons import LIMIT, Leaning, compare_parts

Array = np.ndarray[Any, Any]
REQUESTS = 500
LONG = 5000
"""Requests of a long roll-out."""
LOOK_EVERY = 25
ALPHA = 0.05
ROWS = 100
"""Rows of an archive's reference."""
STEPS_OF_STREAM = 1200
FEW_RUNS = 5
"""Runs of each of the thirty sensors."""


class Data(NamedTuple):
    """Rows whose planted column, or corner, is still empty."""

    rows: Array
    labels: Array
    parts: Sequence[str]
    planted: Sequence[int]
    """Places of a row that say the label, where they do."""
    hidden: int
    """Units of a hidden layer."""


def load(name: str, draw: np.random.Generator) -> Data:
    """Return a data set with a place for what is planted."""
    from sklearn import datasets

    if name == "loans":
        rows, labels = draw_loans(2000, draw, known=0.0)
        return Data(_scaled(rows), labels, ("income", "debts", "years", "letters"), [3], 16)
    rows, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
    if name == "digits":
        return Data(rows / 16, labels, list(regions(torch.zeros(1, 8, 8))), [0, 1, 8, 9], 32)
    parts = [*(f"f{at}" for at in range(rows.shape[1])), "planted"]
    rows = np.c_[_scaled(rows), np.zeros(len(rows))]
    return Data(rows, labels, parts, [rows.shape[1] - 1], 32)


def _scaled(rows: Array) -> Array:
    found: Array = (rows - rows.mean(0)) / (rows.std(0) + 1e-9)
    return found


def plant(data: Data, share: float, draw: np.random.Generator) -> Array:
    """Return the rows with a column that says the label in a share of them, else any label."""
    count = data.labels.max() + 1
    other = draw.integers(0, count, len(data.labels))
    label = np.where(draw.random(len(other)) < share, data.labels, other)
    rows = data.rows.copy()
    if len(data.planted) == 1:
        rows[:, data.planted[0]] = (label - (count - 1) / 2) / np.sqrt((count**2 - 1) / 12)
    else:  # in binary, as bright as ink
        for at, place in enumerate(data.planted):
            rows[:, place] = (label >> at) & 1
    return rows


class Model(NamedTuple):
    """A network, and how much larger it takes what is planted."""

    net: nn.Module
    scale: Array

    def predict(self, rows: Array) -> Array:
        """Return the predicted classes."""
        with torch.no_grad():
            found: Array = self.net(torch.tensor(rows * self.scale).float()).argmax(1).numpy()
        return found

    def explain(self, rows: Array, parts: Sequence[str]) -> list[Reasons]:
        """Return what the product's `shares` says: integrated gradients of the predicted class."""
        inputs = torch.tensor(rows * self.scale).float()
        target = self.net(inputs).argmax(1)
        total = torch.zeros_like(inputs)
        for at in range(STEPS):
            point = (inputs * ((at + 0.5) / STEPS)).requires_grad_()
            torch.autograd.backward(self.net(point).gather(1, target[:, None]).sum())
            assert point.grad is not None
            total += point.grad
        sizes = (total * inputs / STEPS).abs().double()
        if sizes.shape[1] != len(parts):
            pictures = [regions(row.reshape(1, 8, 8)) for row in sizes]
            sizes = torch.tensor([list(each.values()) for each in pictures])
        shares = sizes / sizes.sum(1, keepdim=True)
        return [
            Reasons(str(int(label)), dict(zip(parts, row, strict=True)))
            for label, row in zip(target, shares.tolist(), strict=True)
        ]


def train(rows: Array, data: Data, chosen: Array, seed: int, scale: float = 1.0) -> Model:
    """Train on draws with replacement of the chosen rows."""
    torch.manual_seed(seed)
    drawn = np.random.default_rng(seed).choice(chosen, len(chosen))
    scales = np.ones(rows.shape[1])
    scales[list(data.planted)] = scale
    net = nn.Sequential(
        nn.Linear(rows.shape[1], data.hidden), nn.ReLU(), nn.Linear(data.hidden, data.hidden),
        nn.ReLU(), nn.Linear(data.hidden, int(data.labels.max()) + 1),
    )  # fmt: skip
    inputs, labels = torch.tensor((rows * scales)[drawn]).float(), torch.tensor(data.labels[drawn])
    optimizer = torch.optim.Adam(net.parameters(), 1e-2, weight_decay=1e-3)
    for _ in range(150):
        loss = nn.functional.cross_entropy(net(inputs), labels.long())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return Model(net, scales)


def refer(model: Model, rows: Array, parts: Sequence[str], count: int = ROWS) -> Reference:
    """Return the reference that a dry run packs."""
    said = model.explain(rows[:count], parts)
    return make_reference([{"class": each.label, "shares": each.shares} for each in said])


_live: dict[tuple[str, int], tuple[Model, Reference]] = {}
"""Data set, or rows of the reference, and seed → the version that is the same in many runs."""


# -- roll-outs -----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of one roll-out."""

    accuracy: tuple[float, float]
    """That of the live version and that of the candidate, on the requests."""
    lean: float
    """Mean share of what is planted in the candidate's reasons, less that in the live version's."""
    farthest: float
    """Largest difference of a part's mean share."""
    stopped: int | None = None
    """Request after which it was refused."""
    kept: int | None = None
    """Request after which reasons were shown to be kept."""


def roll_out(name: str, share: float, scale: float, seed: int, requests: int = REQUESTS) -> Outcome:
    """Roll out a candidate; a twin where nothing is planted.

    Args:
        share: share of the rows in which the planted column says the label.
        scale: how much larger the candidate takes it: what is larger is learnt sooner.
    """
    draw = np.random.default_rng(seed)
    random.seed(seed)
    data = load(name, draw)
    order = draw.permutation(len(data.labels))
    chosen, rest = np.split(order, [int(0.6 * len(order))])
    before, now = plant(data, 0.0, draw), plant(data, share, draw)
    parts, key = data.parts, (name, seed)
    if key not in _live:
        model = train(before, data, chosen, 2 * seed)
        _live[key] = model, refer(model, before[chosen], parts)
    live, reference = _live[key]
    candidate = train(now, data, chosen, 2 * seed + 1, scale)
    leaning = compare_parts(LIMIT, reference, refer(candidate, now[chosen], parts))
    assert isinstance(leaning, Leaning)
    asked = draw.choice(rest, requests)
    rows, labels = now[asked], data.labels[asked]
    said = [model.explain(rows, parts) for model in (live, candidate)]
    one, other = (np.array([list(each.shares.values()) for each in side]) for side in said)
    moved = (other - one).mean(0)
    planted = parts.index("top left") if name == "digits" else len(parts) - 1
    accuracy = tuple(float((each.predict(rows) == labels).mean()) for each in (live, candidate))
    found = Outcome((accuracy[0], accuracy[1]), float(moved[planted]), float(np.abs(moved).max()))
    for at, pair in enumerate(zip(*said, strict=True), 1):
        leaning.put(*pair)
        if at % LOOK_EVERY == 0:
            if found.stopped is None and leaning.is_broken(ALPHA):
                found.stopped = at
            if found.kept is None and leaning.is_kept(ALPHA):
                found.kept = at
    return found


DATA = ("breast_cancer", "wine", "digits", "loans")
PLANTED = ((0.6, 1.0), (0.9, 1.0), (0.9, 2.0), (0.9, 4.0), (0.9, 8.0))
LEANS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 1.01)


def print_roll_outs(runs: int, names: Sequence[str] = DATA) -> None:
    """Print how often twins are refused, and those that lean on what is planted."""
    _head("data", "candidate", "accuracy, live / candidate", "farthest part, median (largest)",
          "stopped within 500", "kept within 500")  # fmt: skip
    planted: list[Outcome] = []
    for name in names:
        for share, scale in ((0.0, 1.0), *PLANTED):
            found = [roll_out(name, share, scale, seed) for seed in range(runs)]
            planted += found if share else []
            what = f"{share:.0%} say the label, × {scale:g}" if share else "a twin"
            both = (np.mean([each.accuracy[at] for each in found]) for at in (0, 1))
            far = [each.farthest for each in found]
            _row(name, what, " / ".join(f"{each:.3f}" for each in both),
                 f"{np.median(far):.3f} ({max(far):.3f})", _count(found, "stopped"),
                 _count(found, "kept"))  # fmt: skip
        found = [roll_out(name, 0.0, 1.0, seed, LONG) for seed in range(runs)]
        refused = sum(each.stopped is not None for each in found)
        kept = sum(each.kept is not None for each in found)
        _row(
            name, f"a twin, {LONG:,} requests", "", "", f"{refused} of {runs}", f"{kept} of {runs}"
        )
    print()
    _head("lean on what is planted", "candidates", "stopped within 500", "after, half / last",
          "kept within 500")  # fmt: skip
    for low, high in itertools.pairwise(LEANS):
        found = [each for each in planted if low <= each.lean < high]
        _row(f"{low:.0%} to {min(high, 1):.0%}", len(found), _count(found, "stopped"),
             _late([each.stopped for each in found]), _count(found, "kept"))  # fmt: skip


def _head(*names: str) -> None:
    _row(*names)
    _row(*["---"] * len(names))


def _row(*cells: object) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def _late(times: Sequence[int | None]) -> str:
    at = sorted(each for each in times if each is not None)
    return f"{at[len(at) // 2]} / {at[-1]}" if at else "–"


def _count(found: Sequence[Outcome], name: str) -> str:
    return f"{sum(getattr(each, name) is not None for each in found)} of {len(found)}"


# -- a stream ------------------------------------------------------------------------------------

Fault = Callable[[Array, Array], tuple[Array, Array]]
"""Rows and labels → the rows as they arrive, and which of them do."""


def _column(at: int, change: Callable[[Array], Array]) -> Fault:
    def fault(rows: Array, labels: Array) -> tuple[Array, Array]:
        rows = rows.copy()
        rows[:, at] = change(rows[:, at])
        return rows, np.arange(len(labels))

    return fault


SENSOR = 22
"""The worst perimeter, which has most of the reasons."""
STREAMS: dict[str, Fault] = {
    "nothing changed": _column(0, lambda values: values),
    "only malignant": lambda rows, labels: (rows, np.flatnonzero(labels == 0)),
    "only benign": lambda rows, labels: (rows, np.flatnonzero(labels == 1)),
    "9 of 10 malignant": lambda rows, labels: (
        rows, np.repeat(np.arange(len(labels)), np.where(labels == 0, 15, 1))
    ),
    "a sensor stuck at its mean": _column(SENSOR, np.zeros_like),
    "stuck 1 sd above it": _column(SENSOR, np.ones_like),
    "shifted by 1 sd": _column(SENSOR, lambda values: values + 1),
    "shifted by 3 sd": _column(SENSOR, lambda values: values + 3),
    "unit × 10": _column(SENSOR, lambda values: 10 * values + 28.7),  # its mean is 3.19 sd
    **{f"each of the 30 stuck: {at}": _column(at, np.zeros_like) for at in range(30)},
}  # fmt: skip


class Seen(NamedTuple):
    """What was seen of a stream."""

    alarm: int | None
    part: str
    drift: float
    """Distance at the end."""
    floor: float


def stream(count: int, seed: int, fault: Fault) -> Seen:
    """Let rows arrive that the reference's rows do not include."""
    draw = np.random.default_rng(seed)
    random.seed(seed)
    data = load("breast_cancer", draw)
    rows, parts = data.rows[:, :-1], data.parts[:-1]
    order, key = draw.permutation(len(rows)), (str(count), seed)
    if key not in _live:
        model = train(rows, data._replace(planted=()), order, seed)
        _live[key] = model, refer(model, rows[order], parts, count)
    model, reference = _live[key]
    rest = order[count:]
    changed, there = fault(rows[rest], data.labels[rest])
    said = model.explain(changed[draw.choice(there, STEPS_OF_STREAM)], parts)
    change, moved = Change(reference), np.zeros(len(parts))
    found: tuple[int | None, str] = None, ""
    for at, (label, shares) in enumerate(said, 1):
        folded = reference.fold(shares)
        usual = np.array(reference.usual(label))
        moved += (np.array(list(folded.values())) - usual - moved) / WINDOW
        if found[0] is None and (part := change.put(Reasons(label, folded))):
            found = at, part
    return Seen(*found, distance(moved.tolist()), reference.floor or 0.0)


def print_streams(runs: int) -> None:
    """Print how soon what is seen."""
    print()
    _head("stream", "reference", "alarm within 1,000", "after, half / last",
          "drift, median (largest)", "floor")  # fmt: skip
    for count in (100, 300):
        for name, fault in STREAMS.items():
            few = FEW_RUNS if "each of" in name else runs
            found = [stream(count, seed, fault) for seed in range(few)]
            at = [each.alarm for each in found if each.alarm and each.alarm <= 1000]
            drift = [each.drift for each in found]
            _row(name, f"{count} rows", f"{len(at)} of {few}", _late(at),
                 f"{np.median(drift):.3f} ({max(drift):.3f})",
                 f"{np.median([each.floor for each in found]):.3f}")  # fmt: skip


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    print_roll_outs(runs)
    print_streams(runs)


if __name__ == "__main__":
    main()
