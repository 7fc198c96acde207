"""Shapley values of a game: every set of players where they are few, else sets drawn in pairs."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from modelyard.handlers.errors import BadInput
from modelyard.handlers.explain.attribute.attribution import (
    DEFAULT_TOLERANCE,
    Attribution,
    AttributionRequest,
    Tensors,
    chunks,
    stopwatch,
)
from modelyard.handlers.explain.attribute.method import Groups, Method, Shapes
from modelyard.handlers.explain.attribute.windows import check_evaluations, real_dtype
from modelyard.plugins.tasks.methods.features import Features, features_of
from modelyard.plugins.tasks.methods.gradients import DRAWS, enough

LEAST_BUDGET = 1024
"""Least budget of kernel_shap, where nobody said one: all sets of ten features."""

MAX_POINTS = 100_000
"""Sets times baselines that one explanation may ask about."""

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


class Shapley(NamedTuple):
    """Values that add up to the worth of all players."""

    values: Floats
    """(M,)"""
    errors: Floats | None
    """(M,) standard errors, 0 where every set was asked about; None where too few were drawn."""
    each: Floats
    """(M, B) the values by each of the baselines, whose mean the values are."""


@dataclass(frozen=True)
class Game:
    """M players, of which any set has a worth; sets are asked about once, with all the others.

    A worth is the mean over B baselines.

    A set and its complement are a pair: of the two worths only the difference matters to Shapley
    values, which are the weighted regression of these differences on who is in (Lundberg and Lee
    2017, theorem 2, https://arxiv.org/abs/1705.07874; in pairs: Covert and Lee 2021,
    https://arxiv.org/abs/2012.01536).
    """

    players: int
    """Two or more."""
    worth: Callable[[Bools], Floats]
    """Sets (R, M), true for who is in → (R, B)."""
    total: Floats
    """(B,) the worth of all players less that of none."""
    seed: int
    """Seed of the draws."""
    known: dict[bytes, Floats] = field(default_factory=dict)
    """Packed set → its worth less that of its complement."""
    _sizes: dict[int, tuple[Iterator[Bools], list[Bools]]] = field(default_factory=dict)

    @property
    def pairs(self) -> int:
        """How many there are."""
        count: int = 2 ** (self.players - 1) - 1
        return count

    @property
    def fewest(self) -> int:
        """How many pairs a solution needs: each player alone, and without each."""
        return min(self.pairs, self.players)

    def solve(self, pairs: int) -> Shapley:
        """Find the values from so many pairs, `fewest` or more.

        All sets of a size are taken where the share of the draws that is due to the size would
        cover them: sets of one player first, which weigh most.
        """
        counts = self._allot(min(pairs, self.pairs))
        sets = np.concatenate([self._sets(size, count) for size, count in counts.items()])
        weights, left = self._weights(counts)
        return self._regress(sets, self._differences(sets), weights, left)

    def _allot(self, pairs: int) -> dict[int, int]:
        """Return how many pairs of each size (of the smaller set) are to be asked about."""
        sizes = range(1, self.players // 2 + 1)
        whole = {1: self._number(1)} if pairs < self.pairs else {s: self._number(s) for s in sizes}
        while True:
            rest = [size for size in sizes if size not in whole]
            left = pairs - sum(whole.values())
            masses = [self._mass(size) for size in rest]
            shares = np.array(masses) / (sum(masses) or 1.0)
            covered = (s for s, share in zip(rest, shares, strict=True)
                       if left * share >= self._number(s))  # fmt: skip
            if (size := next(covered, None)) is None:
                break
            whole[size] = self._number(size)
        ends = np.rint(np.cumsum(shares) * left).astype(int)
        drawn = zip(rest, np.diff(ends, prepend=0).tolist(), strict=True)
        return whole | {size: count for size, count in drawn if count}

    def _weights(self, counts: dict[int, int]) -> tuple[Floats, Floats]:
        """Return what each pair weighs, and of how many like it it was drawn: 0 where of none.

        The latter is the share of its size that was not drawn, the finite population's correction.
        """
        whole = {size for size, count in counts.items() if count == self._number(size)}
        every = range(1, self.players // 2 + 1)
        mass = sum(self._mass(size) for size in every if size not in whole)
        drawn = sum(count for size, count in counts.items() if size not in whole)
        weights, left = [], []
        for size, count in counts.items():
            weight = self._mass(size) / count if size in whole else mass / drawn
            weights.append(np.full(count, weight))
            left.append(np.full(count, 1 - count / self._number(size)))
        return np.concatenate(weights), np.concatenate(left)

    def _regress(self, sets: Bools, differences: Floats, weights: Floats, left: Floats) -> Shapley:
        """Fit signs @ values to the differences (P, B), so that values add up to the total."""
        signs = 2.0 * sets - 1.0
        count = self.players
        # The Lagrangian of the constrained fit; its inverse takes the right side to the values.
        system = np.zeros((count + 1, count + 1))
        system[:count, :count] = signs.T @ (weights[:, None] * signs)
        scale = float(np.trace(system)) / count
        system[:count, count] = system[count, :count] = scale
        inverse = np.linalg.inv(system)
        right = signs.T @ (weights[:, None] * differences)
        each = inverse[:count, :count] @ right + np.outer(
            inverse[:count, count], scale * self.total
        )
        values = each.mean(1)
        drawn = left > 0
        number = int(drawn.sum())
        if not number:
            all_known = len(sets) == self.pairs
            return Shapley(values, np.zeros(count) if all_known else None, each)
        if number == 1:
            return Shapley(values, None, each)
        # How far each drawn pair pulls at the values; one that has its own way is pulled back.
        pulls = signs[drawn] @ inverse[:count, :count] * weights[drawn, None]
        hold = (pulls * signs[drawn]).sum(1).clip(max=1 - 1e-9)
        pulls *= ((differences.mean(1) - signs @ values)[drawn] / (1 - hold))[:, None]
        pulls -= pulls.mean(0)
        squares = (left[drawn, None] * pulls**2).sum(0) * number / (number - 1)
        return Shapley(values, np.sqrt(squares), each)

    def _differences(self, sets: Bools) -> Floats:
        """Return worth less that of the complement, asking about what is not known yet."""
        keys = [row.tobytes() for row in np.packbits(sets, axis=1)]
        new = [at for at, key in enumerate(keys) if key not in self.known]
        if new:
            asked = sets[new]
            inside, outside = np.split(self.worth(np.concatenate([asked, ~asked])), 2)
            self.known.update(zip([keys[at] for at in new], inside - outside, strict=True))
        return np.array([self.known[key] for key in keys])

    def _sets(self, size: int, count: int) -> Bools:
        """Return the first `count` sets of a size, in the order in which the seed draws them."""
        if size not in self._sizes:
            self._sizes[size] = (
                self._all(size) if count == self._number(size) else self._draws(size),
                [],
            )
        source, found = self._sizes[size]
        found.extend(itertools.islice(source, count - len(found)))
        return np.stack(found[:count])

    def _all(self, size: int) -> Iterator[Bools]:
        # Of two halves that are each other's complement, the one with the first player.
        for members in itertools.islice(
            itertools.combinations(range(self.players), size), self._number(size)
        ):
            yield np.isin(np.arange(self.players), members)

    def _draws(self, size: int) -> Iterator[Bools]:
        """Draw sets that differ; each size has random numbers of its own, so more change none."""
        random = np.random.default_rng([self.seed, size])
        seen: set[bytes] = set()
        while len(seen) < self._number(size):
            row = np.zeros(self.players, bool)
            row[random.choice(self.players, size, replace=False)] = True
            if 2 * size == self.players and not row[0]:
                row = ~row
            if row.tobytes() not in seen:
                seen.add(row.tobytes())
                yield row

    def _number(self, size: int) -> int:
        """Count the pairs of a size."""
        return _combinations(self.players, size) // (2 if 2 * size == self.players else 1)

    def _mass(self, size: int) -> float:
        """Return what all pairs of a size weigh together."""
        return (1 if 2 * size == self.players else 2) / (size * (self.players - size))


_combinations = cache(math.comb)


def set_error(each: Floats) -> Tensor:
    """Return how far the mean over B baselines is off that of all they are drawn from; NaN of one.

    The norm of the standard errors as a share of that of the values, (1,).

    Args:
        each: (M, B) values by each of the baselines.
    """
    count, size = each.shape[1], float(np.linalg.norm(each.mean(1)))
    off = float(np.linalg.norm(each.std(1, ddof=1))) if count > 1 else math.nan
    return torch.tensor([off / math.sqrt(count) / size if size else 0.0])


def kernel_shap(
    request: AttributionRequest,
    *,
    shapes: Shapes,
    groups: Groups = (),
    n_samples: int | None = None,
    seed: int = 0,
    tolerance: float = DEFAULT_TOLERANCE,
    max_samples: int | None = None,
    budget_ms: int | None = None,
) -> Attribution:
    """Return the Shapley values of features, each shared evenly among the values of its feature.

    Features that equal the baseline take no part and get 0. All sets of the others are asked about
    where they fit into the budget; else sets are drawn, each with its complement. Of several
    baselines the worth of a set is the mean over them, as each of them has what is not in it.

    Args:
        request: request of one explanation.
        shapes: shapes as in `feature_ablation`.
        groups: groups as in `occlusion`.
        n_samples: sets, or all there are; without it as many as `tolerance` needs.
        seed: seed of the draws.
        tolerance: the largest error.
        max_samples: where drawing ends without `n_samples`; 4 for each feature and 200 more, or
            1024, without it.
        budget_ms: budget as in `stopwatch`; the first sets are always asked about.

    Source: Lundberg and Lee 2017, theorem 2, https://arxiv.org/abs/1705.07874
    """
    fits = stopwatch(budget_ms)
    coalitions = _Coalitions(request, features_of(request.inputs, shapes, groups))
    players = coalitions.players
    first = 4 * players + 200
    budget = n_samples or max_samples or max(first, LEAST_BUDGET)
    rows = len(coalitions.total)
    budget = min(budget, MAX_POINTS // rows) if n_samples is None else budget
    if players < 2:
        each = coalitions.total[None].repeat(players, 0)
        return coalitions.attribution(Shapley(each.mean(1), np.zeros(players), each), 0)
    game = Game(players, coalitions.worth, coalitions.total, seed)
    if budget < 2 * game.fewest:
        raise BadInput(
            f"{'max' if n_samples is None else 'n'}_samples is {budget}; expected at least "
            f"{2 * game.fewest} for {players} features that are not as in the baseline"
        )
    budget = min(budget, 2 * game.pairs)
    check_evaluations(budget)
    if budget * rows > MAX_POINTS:
        raise BadInput(
            f"n_samples is {budget}, each with {rows} rows of the baseline; expected {MAX_POINTS} "
            "points at most: fewer n_samples, or a shorter file"
        )
    is_open = n_samples is None and budget < 2 * game.pairs
    sets = min(first, budget) if is_open else budget
    while True:
        found = coalitions.attribution(game.solve(sets // 2), 2 * len(game.known))
        error = None if found.error is None else float(found.error)
        if sets >= budget or (error is not None and error <= tolerance):
            return found
        before, sets = sets, enough(sets, error, tolerance, budget)
        if not fits(sets / before - 1):
            return found


class _Coalitions:
    """What the model gives where some features are as in the input, the others as in the baseline.

    Of one explanation.
    """

    def __init__(self, request: AttributionRequest, features: Features) -> None:
        check_evaluations(features.count)
        self.request = request
        self.features = features
        self.playing = features.differing(request)
        """Features that are not as in the baseline, the players."""
        ends = np.array([[True], [False]]).repeat(self.players, 1)
        whole, none = self.worth(ends)
        self.total = whole - none

    @property
    def players(self) -> int:
        """How many there are."""
        return len(self.playing)

    def worth(self, sets: Bools) -> Floats:
        """Return the outputs (R, B) for each set of players (R, M), true for who is in."""
        found = []
        for chunk in chunks(len(sets), self.request.chunk_rows):
            inside = torch.from_numpy(sets[chunk]).to(self.request.device)
            kept = inside.new_zeros(len(inside), self.features.count)
            kept[:, self.playing] = inside
            found.append(self.features.outputs(self.request, kept))
        return torch.cat(found).cpu().numpy()

    def attribution(self, found: Shapley, sets: int) -> Attribution:
        """Give each value its even share of what its feature has."""
        return Attribution(
            self._spread(found.values),
            torch.tensor([sets * len(self.total)], device=self.request.device),
            None if found.errors is None else self._spread(found.errors),
            set_error=set_error(found.each),
        )

    def _spread(self, values: Floats) -> Tensors:
        each = torch.zeros_like(self.features.sizes)
        each[self.playing] = torch.from_numpy(values).to(each)
        shares = self.features.spread(each / self.features.sizes)
        return tuple(
            share[None].to(real_dtype(own))
            for share, own in zip(shares, self.request.inputs, strict=True)
        )


KERNEL_SHAP = Method(
    kernel_shap,
    ("window", *DRAWS),
    needs_gradients=False,
    uses_baseline=True,
    adds_up=True,
    needs_windows=True,
    is_random=True,
    takes_sets=True,
)
