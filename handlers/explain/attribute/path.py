"""Integrated gradients: gradients on the way from the baseline, and how far their sum is off."""

import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from modelyard.handlers.explain.attribute import attribution, trace
from modelyard.handlers.explain.attribute.attribution import Tensors, chunks, column, norms_of
from modelyard.handlers.explain.attribute.trace import SIGMAS

FIRST_STEPS = 30
"""Fewer can agree by chance with a third of them."""

END = 1e-5
"""Ends are asked from so far inside: at a baseline of zeros, kinks of all units may meet."""

SUMS = 64
"""A path keeps so many numbers of each point: all shares where they are no more, else sums."""

FEW = 3.5
"""With n points the bars are wider by this through n: more bends then hide between two points."""

LEAST = 0.1
"""No value's error is stated as less than this share of what they are off by in the mean."""

NARROW = 2e-6
"""No points are put between places that are closer on the way, from 0 to 1."""

MOST_IN_TAIL = 20
"""Points that a gap gets at most where nothing but the tail of a cliff is seen."""

MOST_MENDED = 120
"""Points that the gaps of a path get at most, of all together."""


def integrated_gradients(
    request: attribution.AttributionRequest,
    *,
    n_steps: int | None = None,
    tolerance: float = attribution.DEFAULT_TOLERANCE,
    max_steps: int = attribution.MAX_STEPS,
    budget_ms: int | None = None,
) -> attribution.Attribution:
    """Attribute the output to each input value, by the midpoint rule.

    Without `n_steps`, rows begin with 30 points. Where the output changes between two points by
    what their gradients do not account for, or a few kinks make most of the error, further points
    are put there; else points triple, while error or delta are above the tolerance. The midpoints
    of n steps are among those of 3n, so these are not computed twice, and a row that has met the
    tolerance costs no further passes. Each time the gradients just inside both ends are asked, too.

    Args:
        request: inputs are real-valued; values as after preprocess.
        n_steps: points for every row; None chooses them per row. The error of 1 or 2 is not known.
        tolerance: the largest error, and the largest |delta| as a share of |f_input − f_baseline|.
        max_steps: no row gets more points than this.
        budget_ms: as in `stopwatch`; the first points are always asked.

    Raises:
        NoGradients: the output does not depend on the input through anything differentiable.

    Source: Sundararajan et al. 2017, section 3, https://arxiv.org/abs/1703.01365
    """
    fits = attribution.stopwatch(budget_ms)
    with attribution.recording():
        path = _Path(request, tolerance)
        steps = n_steps or min(FIRST_STEPS, max_steps)
        rows = torch.arange(len(request), device=request.device)
        path.add(rows, steps, _midpoints(steps))
        while n_steps is None:
            for row in rows.tolist():
                room = min(MOST_MENDED, max_steps - int(path.steps[row]))
                if path.verdicts[row].gaps and room > 0 and fits(room / path.asked):
                    path.mend(row, room)
            rows = rows[~attribution.is_met(request, path.found, tolerance)[rows]]
            steps *= 3
            if not len(rows) or steps > max_steps or not fits(len(rows) * steps / path.asked):
                break
            path.add(rows, steps, _new_midpoints(steps))
        return path.found


class _Path:
    """Gradients along the straight lines from baselines to inputs, summed point by point."""

    def __init__(self, request: attribution.AttributionRequest, tolerance: float) -> None:
        self.request = request
        self.tolerance = tolerance
        self.asked = 0
        """How many points were asked about, of all rows."""
        # Tensors made under inference_mode cannot take part in autograd; copies can.
        self.baselines = tuple(tensor.detach().clone() for tensor in request.baselines)
        self.deltas = tuple(
            tensor.detach() - baseline
            for tensor, baseline in zip(request.inputs, self.baselines, strict=True)
        )
        count, device = len(request), request.device
        self.steps = torch.zeros(count, dtype=torch.int64, device=device)
        """Midpoints of each row, and what its gaps got."""
        self.even = self.steps.clone()
        """Midpoints alone."""
        self.sizes = torch.zeros(count, dtype=torch.float64, device=device)
        """Sizes of what is added up: rounding is a share of them."""
        self.sums, self.coarse, self.ends, self.bends, self.shifts, self.spreads = (
            tuple(
                torch.zeros_like(delta, dtype=torch.promote_types(delta.dtype, torch.float32))
                for delta in self.deltas
            )
            for _ in range(6)
        )
        self.bends, self.spreads = (
            tuple(each.double() for each in tensors) for tensors in (self.bends, self.spreads)
        )
        """Sums of the gradients, see `_scale`; what a third of the points makes of them; how much
        more they rise in a step at the input than at the baseline; squares of bends, see `Trace`.
        Of mended gaps: what their further points add to the mean, and the square of its
        deviation."""
        self.places = torch.zeros(0, dtype=torch.float64)
        """Where the last points were put, in every row that got some."""
        self.points: list[Tensor] = []
        """Tables of points: the row, place, whether it counts, output, slope, shares of each."""
        self.verdicts = [trace.Verdict(1.0, 0.0, 0.0, 0.0, ())] * count
        self.mended: list[dict[int, trace.Mended]] = [{} for _ in range(count)]

    @cached_property
    def _signs(self) -> Tensor:
        """Random signs of the values (D / SUMS, SUMS), by which they are added up; 1 of a few."""
        sizes = sum(delta[0].numel() for delta in self.deltas)
        random = torch.Generator().manual_seed(0)
        signs = torch.randint(2, (-(-sizes // SUMS) * SUMS,), generator=random).double() * 2 - 1
        signs[sizes:] = 0
        return (signs if sizes > SUMS else signs.abs()).view(-1, SUMS).to(self.request.device)

    def _ask(self, row: Tensor, places: Tensor) -> tuple[Tensors, Tensor]:
        """Return gradients (R, *S) at places of rows, and what is kept of each point (R, 5 + K)."""
        self.request.between_chunks()
        self.asked += len(row)
        deltas = tuple(delta[row] for delta in self.deltas)
        points = tuple(
            baseline[row] + column(places.to(delta), delta) * delta
            for baseline, delta in zip(self.baselines, deltas, strict=True)
        )
        for point in points:
            point.requires_grad_()
        outputs, gradients = attribution.outputs_and_gradients(self.request.forward, points, row)
        # A value that is as in the baseline has no share, whatever its gradient: it may be NaN.
        gradients = tuple(
            torch.where(delta == 0, torch.zeros_like(each), each).to(total.dtype)
            for each, delta, total in zip(gradients, deltas, self.sums, strict=True)
        )
        # float64: the product of a gradient of 1e38 and its way is not in float32.
        parts = [(each.double() * delta).flatten(1)
                 for each, delta in zip(gradients, deltas, strict=True)]  # fmt: skip
        shares = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        facts = torch.stack(
            [row.double(), places.double(), shares.abs().sum(1), outputs.double(), shares.sum(1)], 1
        )
        if (missing := self._signs.numel() - shares.shape[1]) > 0:
            shares = torch.nn.functional.pad(shares, (0, missing))
        kept = torch.einsum("rks,ks->rs", shares.view(len(row), -1, SUMS), self._signs)
        return gradients, torch.cat([facts, kept], 1)

    def add(self, rows: Tensor, steps: int, places: Tensor) -> None:
        """Add gradients for `rows` (R,) at new places (A,) of theirs, which then have `steps`."""
        scale = _scale(steps)
        for sums, coarse in zip(self.sums, self.coarse, strict=True):
            sums[rows] *= scale / _scale(max(1, steps // 3))
            coarse[rows] = 3 * sums[rows]
        for each in (*self.ends, *self.bends, *self.shifts, *self.spreads):
            each[rows] = 0
        for row in rows.tolist():
            self.mended[row] = {}
        places = torch.cat([torch.tensor([END]), places, torch.tensor([1 - END])]).double()
        inside = torch.full_like(places, scale)
        inside[0] = inside[-1] = 0
        thirds = torch.zeros_like(places)
        if int(self.even[rows[0]]) == 0:
            thirds[1:-1] = _coarse_weights(steps) * scale
        rises = torch.zeros_like(places)
        for outer, inner in ((0, 1), (-1, -2)):
            rise = 0.1 / steps / (places[outer] - places[inner]).abs()
            rises[outer] += rise
            rises[inner] -= rise
        self.even[rows] = self.steps[rows] = steps
        self.places = places
        which = rows.repeat_interleave(len(places))
        where, *weights = (
            each.to(rows.device).repeat(len(rows)) for each in (places, inside, thirds, rises)
        )
        kept = self._nothing()
        for chunk in chunks(len(which), self.request.chunk_rows):
            row = which[chunk]
            gradients, facts = self._ask(row, where[chunk])
            is_inside = (weights[0][chunk] > 0).double()
            self.sizes.index_add_(0, row, facts[:, 2] * is_inside)
            facts[:, 2] = is_inside
            self.points.append(facts)
            for totals, weight in zip((self.sums, self.coarse, self.ends), weights, strict=True):
                for total, gradient in zip(totals, gradients, strict=True):
                    total.index_add_(0, row, gradient * column(weight[chunk].to(total), total))
            kept = self._bend(kept, (row, where[chunk], gradients))
        self._judge(rows.tolist())

    def _nothing(self) -> tuple[Tensor, Tensor, Tensors]:
        """Return no points: rows, places and gradients."""
        none = torch.zeros(0, dtype=torch.int64, device=self.request.device)
        return none, none.double(), tuple(each[:0] for each in self.sums)

    def _bend(
        self, kept: tuple[Tensor, Tensor, Tensors], new: tuple[Tensor, Tensor, Tensors]
    ) -> tuple[Tensor, Tensor, Tensors]:
        """Add squares of bends of four points each up; return the last three, for the next ones."""
        row, places = (torch.cat(pair) for pair in zip(kept[:2], new[:2], strict=True))
        columns = [torch.cat(pair) for pair in zip(kept[2], new[2], strict=True)]
        if len(row) > 3:
            steps = places.diff()
            is_one = row[3:] == row[:-3]
            for bends, gradients in zip(self.bends, columns, strict=True):
                bend = _bends_of(gradients, steps)
                bend = torch.where(column(is_one, bend), bend, torch.zeros_like(bend))
                bends.index_add_(0, row[1:-2], bend.double().square_())
        return row[-3:], places[-3:], tuple(each[-3:] for each in columns)

    def _judge(self, rows: Sequence[int]) -> None:
        found = self._sums()
        every = torch.cat(self.points)
        sizes, roundings = norms_of(found).tolist(), self._rounding().tolist()
        for row in rows:
            points = every[every[:, 0] == row]
            # The ends were asked each time.
            order = points[:, 1].argsort()
            inner = order[points[order, 2] > 0]
            points = points[torch.cat([order[:1], inner, order[-1:]])].cpu()
            self.verdicts[row] = trace.Trace(
                points[:, 1], points[:, 3], points[:, 4], points[:, 5:]
            ).judge(
                (float(self.request.f_baseline[row]), float(self.request.f_input[row])),
                sizes[row],
                roundings[row],
                self.tolerance * sizes[row] / 4,
                self.mended[row],
            )

    def mend(self, row: int, most: int) -> None:
        """Put points into the gaps of a row, the widest first, until they hide nothing."""
        steps = int(self.even[row])
        gaps = self.verdicts[row].gaps
        if len(gaps) > trace.MOST_GAPS or most < 2 * len(gaps):
            return
        bounds = [0.0, *_midpoints(steps).tolist(), 1.0]
        size = float(norms_of(self._sums())[row])
        rounding = float(self._rounding()[row])
        places: list[float] = []
        spans: list[list[tuple[float, Tensors, Tensor]]] = [[] for _ in gaps]

        def ask(new: list[tuple[int, float]]) -> None:
            places.extend(place for _, place in new)
            for chunk in chunks(len(new), self.request.chunk_rows):
                where = torch.tensor([place for _, place in new[chunk]], device=self.request.device)
                which = torch.full((len(where),), row, device=self.request.device)
                gradients, facts = self._ask(which, where.double())
                for at, (span, place) in enumerate(new[chunk]):
                    own = tuple(each[at : at + 1] for each in gradients)
                    spans[span].append((place, own, facts[at].cpu()))
            for each in spans:
                each.sort(key=lambda point: point[0])

        ask([(span, min(max(place, END), 1 - END)) for span, gap in enumerate(gaps)
             for place in bounds[gap : gap + 2]])  # fmt: skip
        while len(places) < most:
            wide = []
            for span, points in enumerate(spans):
                heights = torch.stack([facts[5:] for _, _, facts in points]).abs() / steps
                tops, at = heights.max(0)
                # Where nothing but tails is seen, their cliff is beside the highest point of one.
                tails = set(at[(tops > 0) & (tops < trace.TAIL * size)].tolist())
                tails = tails if len(points) < MOST_IN_TAIL else set()
                for place, ((a, _, left), (b, _, right)) in enumerate(itertools.pairwise(points)):
                    rest, bend = _between(a, left, b, right)
                    size = max(size, abs(rest))
                    bad = max(abs(rest) - rounding, bend)
                    if b - a > NARROW and (
                        bad > self.tolerance * size / 16 or {place, place + 1} & tails
                    ):
                        wide.append((bad, span, (a + b) / 2))
            wide.sort(reverse=True)
            room = min(most - len(places), self.request.chunk_rows)
            if not wide:
                break
            ask([(span, place) for _, span, place in wide[:room]])
        self.steps[row] += len(places)
        for gap, points in zip(gaps, spans, strict=True):
            self._mend(row, gap, points, rounding)
        # What bends in these gaps alone is no longer missed: only what is left of the squares.
        inner = torch.tensor([bounds[gap + each] for gap in gaps for each in (0, 1)])
        near = self.places[((self.places[:, None] - inner).abs() < 4 / steps).any(1)]
        for which, bends in enumerate(self.bends):
            levels = [torch.zeros_like(spans[0][0][1][which])] * len(near)
            for gap, points in zip(gaps, spans, strict=True):
                jump = points[-1][1][which] - points[0][1][which]
                levels = [
                    level + jump if float(place) > (bounds[gap] + bounds[gap + 1]) / 2 else level
                    for place, level in zip(near, levels, strict=True)
                ]
            if len(near) > 3:
                own = _bends_of(torch.cat(levels), near.diff().to(bends.device))
                left = (bends[row] - own.double().square().sum(0)).abs()
                bends[row] = torch.maximum(left, bends[row] * 1e-6)
        self._judge([row])

    def _mend(
        self, row: int, gap: int, points: list[tuple[float, Tensors, Tensor]], rounding: float
    ) -> None:
        """Take the points of a gap in."""
        steps = int(self.even[row])
        rest = hidden = jumps = 0.0
        for (a, one, left), (b, other, right) in itertools.pairwise(points):
            apart, _ = _between(a, left, b, right)
            rest += apart
            beyond = max(0.0, abs(apart) - (b - a) * abs(float(right[4] - left[4])) - rounding)
            if b - a > NARROW:
                hidden += beyond
            else:
                jumps += beyond
            for which, (start, end) in enumerate(zip(one, other, strict=True)):
                self.shifts[which][row] += ((start + end) * ((b - a) / 2))[0]
                self.spreads[which][row] += (end - start)[0].double().square() * ((b - a) ** 2 / 12)
        first, last = points[0][1], points[-1][1]
        for which, (start, end) in enumerate(zip(first, last, strict=True)):
            # What the midpoint rule had here: at an end the one midpoint alone, for half a step.
            at_end = end if gap == 0 else start
            mean = at_end / 2 if gap in (0, steps) else (start + end) / 2
            self.shifts[which][row] -= (mean / steps)[0]
            if gap in (0, steps):  # how it rises there is known by now
                rise = 0.1 / steps / (0.5 / steps - END)
                self.ends[which][row] -= rise * (start - end if gap == 0 else end - start)[0]
        self.mended[row][gap] = trace.Mended(rest, hidden, jumps)

    def _sums(self) -> Tensors:
        """Return the attributions."""
        return tuple(
            delta * (total / column(self._whole.to(total), delta) + shift)
            for delta, total, shift in zip(self.deltas, self.sums, self.shifts, strict=True)
        )

    @property
    def _whole(self) -> Tensor:
        """What the sums are of, (M,): a mean is a sum over this."""
        wholes = [steps * _scale(steps) for steps in self.even.tolist()]
        return torch.tensor(wholes, dtype=torch.float64, device=self.request.device)

    def _rounding(self) -> Tensor:
        ends = self.request.f_input.abs() + self.request.f_baseline.abs()
        return attribution.ROUNDING * self._unit * (self.sizes / self.even + ends)

    @property
    def _unit(self) -> float:
        return max(torch.finfo(delta.dtype).eps for delta in self.deltas)

    @property
    def found(self) -> attribution.Attribution:
        """What the points so far amount to."""
        attributions = self._sums()
        sharpness, path_delta, hidden, jumps = torch.tensor(
            [[each.sharpness, each.path_delta, each.hidden, each.jumps] for each in self.verdicts],
            dtype=torch.float64, device=self.request.device,
        ).T  # fmt: skip
        step = 1 / self.even.double()
        bars = []
        for delta, bends, ends, spread in zip(
            self.deltas, self.bends, self.ends, self.spreads, strict=True
        ):
            deviation = (bends * column(step**2 / 18, bends) + spread).sqrt()
            scale = column(SIGMAS * (1 + FEW * step) * sharpness, bends)
            rise = ends.abs() * column(13 * step / 24, ends)
            bars.append(delta.abs() * (deviation * scale + rise))
        # Of waves that are resolved, no error is larger than what a third of the points made.
        apart = [
            delta * (total - third) / column(self._whole.to(total), delta)
            for delta, total, third in zip(self.deltas, self.sums, self.coarse, strict=True)
        ]
        norm = norms_of(tuple(bars))
        most = torch.where(sharpness < 1, norms_of(tuple(apart)) / norm.clamp(min=1e-300), 1)
        most = most.clamp(max=1)
        count = sum(delta[0].numel() for delta in self.deltas)
        unit = attribution.ROUNDING * self._unit
        floor = unit * self.sizes * step / count + LEAST * norm * most / count**0.5
        # What nobody accounts for may be anybody's: more of it is shared out than was seen.
        mean = attribution.sizes_of(attributions) / count + 1e-300
        most_hidden = SIGMAS * hidden / (norms_of(attributions) + mean * count**0.5)
        errors = tuple(
            torch.where(
                delta == 0,
                torch.zeros_like(delta),
                torch.maximum(bar * column(most, bar), column(floor, bar))
                + unit * each.abs()
                + (each.abs() + column(mean, each)) * column(most_hidden, each),
            ).to(each.dtype)
            for bar, each, delta in zip(bars, attributions, self.deltas, strict=True)
        )
        return attribution.Attribution(
            attributions,
            self.steps.clone(),
            errors if int(self.even.min()) >= 3 else None,
            self._rounding(),
            hidden=hidden + jumps,
            path_delta=path_delta,
            differences=tuple(apart),
        )


def _bends_of(gradients: Tensor, steps: Tensor) -> Tensor:
    """Return what of each jump but the first and last (R − 3, …) its neighbours do not foretell."""
    lengths = column((steps / steps.abs().min()).to(gradients), gradients)
    slopes = gradients.diff(dim=0) / lengths
    return (slopes[1:-1] - slopes[:-2] / 2 - slopes[2:] / 2) * lengths[1:-1]


def _between(a: float, left: Tensor, b: float, right: Tensor) -> tuple[float, float]:
    """Return what the output does beyond its slopes between two points, and what bends may add."""
    width = b - a
    rest = float(right[3] - left[3]) - width * float(left[4] + right[4]) / 2
    return rest, SIGMAS * width * float((right[5:] - left[5:]).norm()) / 12**0.5


def _scale(steps: int) -> float:
    """Return what gradients are multiplied with before they are added up.

    A power of two, so that nothing is rounded, and sums of 1e38 stay finite.
    """
    return 2.0 ** -math.ceil(math.log2(steps))


def _midpoints(n: int) -> Tensor:
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def _coarse_weights(n: int) -> Tensor:
    """Return how often each of n midpoints counts where every third one stands for three.

    What is left over, one or two at the end, stands for itself.
    """
    weights = torch.zeros(n, dtype=torch.float64)
    threes = 3 * (n // 3)
    weights[1:threes:3] = 3
    weights[threes:] = 1
    return weights


def _new_midpoints(n: int) -> Tensor:
    """Return the midpoints of n steps that are not midpoints of n/3: every third one is."""
    return _midpoints(n)[torch.arange(n) % 3 != 1]
