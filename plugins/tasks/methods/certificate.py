"""Whether the explanations of an archive can be believed, measured on requests that it holds.

What is judged is what the archive answers, by the handler's own `explain`. What it is judged by is
computed here, from the model alone: a dense integral, the output with and without features, and
maps of the same network whose input or whose last layer is another.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from modelyard.archiver.explanations import FEWEST, Explanations, Finding
from modelyard.handlers.errors import HandlerError, NotMeasured
from modelyard.handlers.explain.attribute.attribution import (
    AttributionRequest,
    Tensors,
    chunks,
    gradients,
    recording,
)
from modelyard.handlers.explain.attribute.cut import cut_at_embedding
from modelyard.handlers.explain.attribute.method import AskedRequest, Measurement, Result
from modelyard.handlers.explain.attribute.methods import METHODS
from modelyard.handlers.explain.explanation import Explanation, explain_batch
from modelyard.handlers.explain.request.options import ExplainOptions
from modelyard.handlers.models.backends import as_tuple
from modelyard.handlers.proof.mutation import Mutation, mutated
from modelyard.plugins.tasks.methods.features import Features, curves_of, features_of, scores_of

if TYPE_CHECKING:
    from modelyard.handlers.base import BaseHandler

MOST_FEATURES = 128
"""Values that are neighbours count together until there are no more features than these."""
INTEGRALS = ("integrated_gradients", "gradient_shap")
"""Methods that give the integral of the gradients from one baseline."""
DENSER = 8
"""The integral has so many times the points that the answer took."""
COVERED = 0.95
"""Share of explanations whose error is to be no larger than it says."""
LARGEST_MISS = 2.0
"""No answer is off by more than this times its error or its tolerance, the larger of the two."""
ROUNDING = 5e-4
"""Share of a number that two computations of it may be apart."""
DRAWS = 6
"""Random orders that an explanation's is compared with, for each request."""
RADIUS = 0.02
"""Noise, as a share of what each value varies by; `quality` takes the same."""
NOISY = 2
"""Noisy copies of each request."""
UNSTABLE = math.sqrt(0.5)
"""Half of how far two unrelated maps of one size are apart, as a share of it."""
RETRIED = 4
"""Requests that a randomised layer is tried with, twice each."""
INSENSITIVE = 0.5
"""Cosine of two maps, half of that of one map with itself."""
COARSE = "30"
"""Steps of the maps that are only compared with each other."""
MOST_STEPS = 810
USELESS = 0.5
"""An error of half of the map covers whatever it is."""
SEED = 0


# -- one request → what it is about ----------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """What is known of one explanation without the explainer."""

    explanation: Explanation
    """Target and outputs as the model has them; its attributions are not looked at."""
    smooth: AttributionRequest | None
    """The request of a method with gradients; None where the archive has none."""
    whole: AttributionRequest
    """The request of a method without."""
    features: Features
    """Features of `whole`."""

    @cached_property
    def differing(self) -> Tensor:
        """The features that are not as in the baseline."""
        return self.features.differing(self.whole)


def truth_of(handler: "BaseHandler", inputs: Tensors, baseline: str | None) -> Truth:
    """Ask the model, for the inputs of a request that the handler has just made."""
    results: list[Result] = []

    def note(result: Result) -> Measurement:
        results.append(result)
        return Measurement({})

    version = handler.explained_model()
    options = ExplainOptions(baseline=baseline)
    plain = replace(options, method="feature_ablation")
    ((explanation,),) = explain_batch(version, inputs, [plain], {"note": note})
    smooth = None
    if version.twin is not None and version.twin.is_differentiable:
        one = replace(options, method="integrated_gradients", n_steps=1)
        ((explanation,),) = explain_batch(version, inputs, [one], {"note": note})
        smooth = results[-1].request
    whole, windows = results[0].request, results[0].windows
    features = features_of(whole.inputs, windows.shapes, windows.groups)
    together = -(-features.count // MOST_FEATURES)
    if together > 1:
        masks = tuple(mask // together for mask in features.masks)
        features = Features(masks, -(-features.count // together))
    return Truth(explanation, smooth, whole, features)


def integral(request: AttributionRequest, points: int) -> tuple[Tensors, Tensors]:
    """Return integrated gradients by the midpoint rule, and half of what two halves are apart."""
    starts = tuple(each.detach().clone() for each in request.baselines)
    ways = tuple(end.detach() - start for end, start in zip(request.inputs, starts, strict=True))
    halves = [[torch.zeros_like(way, dtype=torch.float64) for way in ways] for _ in range(2)]
    alphas = (torch.arange(2 * points, dtype=torch.float64) + 0.5) / (2 * points)
    with recording():
        for parity, own in enumerate(halves):
            for chunk in chunks(points, request.chunk_rows):
                request.between_chunks()
                where = alphas[parity::2][chunk]
                rows = torch.zeros(len(where), dtype=torch.int64, device=request.device)
                along = tuple(
                    (start + where.to(way).view(-1, *[1] * (way.dim() - 1)) * way).requires_grad_()
                    for start, way in zip(starts, ways, strict=True)
                )
                for total, way, each in zip(
                    own, ways, gradients(request.forward, along, rows), strict=True
                ):
                    total += (each.double() * way.double()).sum(0, keepdim=True) / points
    mean = tuple((one + two) / 2 for one, two in zip(*halves, strict=True))
    apart = tuple((one - two).abs() / 2 for one, two in zip(*halves, strict=True))
    return mean, apart


# -- the answers of the archive --------------------------------------------------------------------


@dataclass(frozen=True)
class Answered:
    """One request, what the archive answers to it, and the truth."""

    request: AskedRequest
    answer: Mapping[str, Any]
    truth: Truth
    maps: Tensors
    """The attributions of the answer, (*S) for each explained input."""
    inputs: Tensors
    """What the model takes, of this request alone."""
    query: Mapping[str, str]
    """Options that were asked for."""

    def ask(self, **query: str) -> Tensor:
        """Return what the features have in another answer about the same target, (D,)."""
        place = self.truth.explanation.target
        if isinstance(place, int):
            query["target"] = str(place)
        if self.answer.get("method") == "integrated_gradients":
            query["n_steps"] = COARSE
        return self.scores(maps_of(self.request.explain({**self.query, **query}), self.truth))

    def scores(self, maps: Tensors) -> Tensor:
        """Return what each feature has that differs from the baseline, (D,)."""
        method = METHODS.get(str(self.answer.get("method")))
        shaped = tuple(
            each.view(*[1] * (mask.dim() - each.dim()), *each.shape)
            for each, mask in zip(maps, self.truth.features.masks, strict=True)
        )
        if method and not method.multiplies:  # slopes: of a step to the baseline, their shares
            whole = self.truth.whole
            shaped = tuple(
                each * (end[0] - start[0]).sign() if each.shape == end[0].shape else each
                for each, end, start in zip(shaped, whole.inputs, whole.baselines, strict=True)
            )
        is_mean = bool(method and method.repeats)
        return scores_of(self.truth.features, shaped, is_mean=is_mean)[self.truth.differing]


def maps_of(answer: Any, truth: Truth) -> Tensors:
    """Return the attributions of an answer.

    Raises:
        NotMeasured: it has none in the form of ours.
    """
    numbers = answer if isinstance(answer, dict) else {}
    given = numbers.get("attributions")
    names = truth.explanation.names if len(truth.explanation.names) > 1 else ("",)
    several = given if isinstance(given, dict) else {"": given}
    try:
        maps = tuple(torch.tensor(several[name], dtype=torch.float64) for name in names)
        for each, mask in zip(maps, truth.features.masks, strict=True):
            each.view(*[1] * (mask.dim() - each.dim()), *each.shape).expand(mask.shape)
        for name in ("error", "tolerance", "f_input", "f_baseline"):
            float(numbers.get(name) or 0.0)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise NotMeasured("explanations are answered in a form of the handler's own") from error
    return maps


# -- one measure of one request: numbers, or why there are none ------------------------------------


def _target(handler: "BaseHandler", one: Answered) -> tuple[float, ...]:
    """Return 1 where the answer is about the predicted target and has the model's own outputs."""
    truth = one.truth.explanation
    place = list(truth.target) if isinstance(truth.target, tuple) else truth.target
    pairs = [(one.answer.get(name), getattr(truth, name)) for name in ("f_input", "f_baseline")]
    size = max(abs(known) for _, known in pairs)
    is_same = all(
        said is not None and abs(float(said) - known) <= ROUNDING * size for said, known in pairs
    )
    return (float(is_same and one.answer.get("target") == place),)


def _error(handler: "BaseHandler", one: Answered) -> tuple[float, ...]:
    """Return whether the error is covered, what it is said to be, and what it is."""
    answer, stated = one.answer, float(one.answer.get("error") or 0.0)
    rounding = ROUNDING if answer.get("error") is None else ROUNDING / 5
    wanted, slack = _wanted(handler, one)
    pairs = [
        (own if own.shape == each.shape else handler.aggregated(one.truth.explanation, own), each)
        for own, each in zip(wanted, one.maps, strict=True)
    ]
    size = _norm(one.maps)
    true = _norm([own - each for own, each in pairs]) / size if size else math.inf
    tolerance = float(answer.get("tolerance") or 0.0)
    if not true <= LARGEST_MISS * max(stated, tolerance) + slack + rounding:
        return -1.0, stated, true
    is_covered = true <= stated + slack + rounding and stated <= USELESS
    if answer.get("tolerance_met"):
        is_covered &= stated <= tolerance * (1 + ROUNDING)
    return float(is_covered), stated, true


def _wanted(handler: "BaseHandler", one: Answered) -> tuple[Tensors, float]:
    """Return what the answer's method should give, and by what share that may be off itself.

    For a method that is not an integral, that is what it gives again with another seed.
    """
    name, request = str(one.answer.get("method")), one.truth.smooth
    if name in INTEGRALS and request is not None and len(request.baseline_sets[0][0]) == 1:
        steps = one.answer.get("n_steps")
        steps = min(max(steps if isinstance(steps, int) else 0, int(COARSE)), MOST_STEPS)
        mean, apart = integral(request, DENSER * steps // 2 + 7)
        return tuple(each[0] for each in mean), _norm(apart) / (_norm(mean) or 1.0)
    if name not in METHODS:
        raise NotMeasured(f"nothing says what {name} should give")
    layer = one.answer.get("layer")
    options = ExplainOptions(
        name, baseline=one.answer.get("baseline"), layer=layer if isinstance(layer, str) else None,
        seed=SEED + 1,
    )  # fmt: skip
    ((again,),) = explain_batch(handler.explained_model(), one.inputs, [options])
    # Both are off by their own errors, of which each is a standard deviation.
    return tuple(each.double() for each in again.attributions), 3 * (again.error or 0.0)


def _removal(handler: "BaseHandler", one: Answered) -> tuple[float, ...]:
    """Return by how much its order beats a random one, in deletion and in insertion.

    The unit is the range of all the outputs that were seen.
    """
    features, request = one.truth.features, one.truth.whole
    count = len(one.truth.differing)
    _need(count)
    scores = torch.zeros(features.count, dtype=torch.float64)
    scores[one.truth.differing] = one.scores(one.maps)
    generator = np.random.default_rng(SEED)
    orders = [scores, *(torch.from_numpy(generator.random(features.count)) for _ in range(DRAWS))]
    own, *others = [curves_of(request, features, each) for each in orders]
    seen = [*own.deletion, *own.insertion]
    span = max(seen) - min(seen)
    if span == 0:
        raise NotMeasured("the output does not depend on the input")
    deletion = np.mean([np.mean(each.deletion) for each in others]) - np.mean(own.deletion)
    insertion = np.mean(own.insertion) - np.mean([np.mean(each.insertion) for each in others])
    return float(deletion / span), float(insertion / span)


def _agreement(handler: "BaseHandler", one: Answered) -> tuple[float, ...]:
    """Return the rank correlation with occlusion, and of how many features.

    A feature is taken from the input, and put into the baseline: the mean of the two changes is
    what a method that shares effects fairly gives each of two features that act together.
    """
    features, request, places = one.truth.features, one.truth.whole, one.truth.differing
    _need(len(places))
    kept = torch.ones((2 * len(places) + 2, features.count), dtype=torch.bool)
    kept[len(places) + 1 :] = False
    kept[range(len(places)), places] = False
    kept[range(len(places) + 1, 2 * len(places) + 1), places] = True
    outputs = features.outputs(request, kept).mean(1)
    without, within = outputs[: len(places) + 1], outputs[len(places) + 1 :]
    falls = (without[-1] - without[:-1]) + (within[:-1] - within[-1])
    return _rank_correlation(one.scores(one.maps), falls), float(len(places))


def _stability(handler: "BaseHandler", one: Answered) -> tuple[float, ...]:
    """Return the largest change of what the features have, as a share of it, under noise."""
    before = one.scores(one.maps)
    generator = torch.Generator().manual_seed(SEED)
    changes = []
    for _ in range(NOISY):
        with _noisy(handler, one, generator):
            after = one.ask()
        changes.append(_distance(before, after))
    return (max(changes),)


def _randomised(handler: "BaseHandler", one: Answered) -> tuple[float, ...]:
    """Return the mean cosine with the maps of the network whose last layer is drawn anew, twice.

    The second draw is the first with its sign changed: the map of a network whose last layer is
    linear changes its sign too, so that whatever two maps share by chance is not counted.
    """
    if one.truth.smooth is None:
        raise NotMeasured("the archive holds no artifact with gradients, whose layers could change")
    weight = last_weight(handler, one.truth.smooth)
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randn(weight.shape, generator=generator).to(weight) * weight.std()
    before = one.scores(one.maps)
    found = []
    for value in (drawn, -drawn):
        with _weights(handler, {weight: value}):
            found.append(_cosine(before, one.ask()))
    return (float(np.mean(found)),)


def last_weight(handler: "BaseHandler", request: AttributionRequest) -> Tensor:
    """Return the matrix or the kernel that is nearest to the explained output.

    It is looked for in the graph of a call, from its end: so it is the last of any module, and of
    an exported program.

    Raises:
        NotMeasured: the model shows none, as where its weights are constants.
    """
    twin = handler.explained_model().twin
    assert twin is not None and twin.module is not None
    own = {id(each): each for each in twin.module.parameters() if each.dim() > 1}
    with recording():
        for each in own.values():
            each.requires_grad_()
        try:
            rows = torch.zeros(1, dtype=torch.int64, device=request.device)
            output = request.forward(tuple(each.detach().clone() for each in request.inputs), rows)
        finally:
            for each in own.values():
                each.requires_grad_(False)
    near = [output.grad_fn]
    seen = set()
    while near:
        after: list[Any] = []
        for node in near:
            if node is None or node in seen:
                continue
            seen.add(node)
            if (found := own.get(id(getattr(node, "variable", None)))) is not None:
                return found
            after += [each for each, _ in node.next_functions]
        near = after
    raise NotMeasured("the model shows no layer with weights that could be drawn anew")


@contextmanager
def _weights(handler: "BaseHandler", values: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Put other values in the place of the twin's weights, and let it predict meanwhile."""
    before = {each: each.data for each in values}
    changes = {"model": handler.explained_model().twin, "agreement": None}
    try:
        for each, value in values.items():
            each.data = value
        cut_at_embedding.cache_clear()  # it may hold weights as constants
        with mutated(handler, Mutation("weights", changes, "")):
            yield
    finally:
        for each, value in before.items():
            each.data = value
        cut_at_embedding.cache_clear()


@contextmanager
def _noisy(handler: "BaseHandler", one: Answered, generator: torch.Generator) -> Iterator[None]:
    """Add noise to what explanations are made of: real-valued inputs, or the vectors of tokens."""

    def moved(values: Tensor, scale: Tensor) -> Tensor:
        noise = 2 * torch.rand(values.shape, generator=generator).to(values) - 1
        return values + RADIUS * scale.to(values) * noise

    if handler.embedded is not None:
        table = _table(handler, one)
        spread = table.amax(-1, keepdim=True) - table.amin(-1, keepdim=True)
        with _weights(handler, {table: moved(table.data, spread)}):
            yield
        return
    if not any(each.is_floating_point() for each in one.truth.whole.inputs):
        raise NotMeasured("the inputs are whole numbers, which do not vary by a little")
    preprocess, calls = handler.preprocess, []

    def noisy(*args: Any, **kwargs: Any) -> Any:
        calls.append(True)
        inputs = preprocess(*args, **kwargs)
        found = tuple(
            moved(each, handler.scales(each)) if each.is_floating_point() else each
            for each in as_tuple(inputs)
        )
        return found[0] if isinstance(inputs, Tensor) else found

    with mutated(handler, Mutation("noise", {"preprocess": noisy}, "")):
        yield
    if not calls:
        raise NotMeasured("the handler's explain does not call its preprocess")


def _table(handler: "BaseHandler", one: Answered) -> Tensor:
    """Return the weights that token ids are looked up in."""
    request, twin = one.truth.smooth, handler.explained_model().twin
    if request is not None and twin is not None and twin.module is not None:
        ids = one.inputs[handler.embedded or 0].flatten()
        vectors = request.inputs[0].flatten(0, -2)
        for each in twin.module.parameters():
            fits = each.dim() == 2 and each.shape[1:] == vectors.shape[1:]
            if fits and len(each) > int(ids.max()) and torch.equal(each[ids], vectors):
                return each
    raise NotMeasured("the inputs are whole numbers, which do not vary by a little")


def _need(features: int) -> None:
    if features < 3:
        raise NotMeasured("inputs have fewer than three features that differ from the baseline")


# -- all of them → the findings --------------------------------------------------------------------

_Rows = Sequence[tuple[float, ...]]


def _share(name: str, rows: _Rows) -> Finding:
    right = sum(row[0] == 1 for row in rows)
    text = f"{right} of {len(rows)} are of the predicted target, with the model's own outputs"
    return Finding(name, text, right / len(rows), 1.0)


def _coverage(name: str, rows: _Rows) -> Finding:
    right = sum(row[0] == 1 for row in rows)
    _, stated, true = max(rows, key=lambda row: row[2] - row[1])
    text = (
        f"{right} of {len(rows)} are off by no more than they say; the worst by {true:.2g}, "
        f"said {stated:.2g}"
    )
    value = 0.0 if any(row[0] < 0 for row in rows) else right / len(rows)
    return Finding(name, text, value, 1 - _misses(len(rows)) / len(rows))


def _misses(count: int) -> int:
    """Return how many of so many may miss, before a coverage of `COVERED` is refuted at 5 %."""
    below, misses = 0.0, -1
    while below < 0.95:
        misses += 1
        below += math.comb(count, misses) * (1 - COVERED) ** misses * COVERED ** (count - misses)
    return misses


def _advantage(which: int, text: str) -> Callable[[str, _Rows], Finding]:
    def find(name: str, rows: _Rows) -> Finding:
        mean, low, high = _interval([row[which] for row in rows])
        return Finding(name, text, mean, 0.0, low=low, high=high)

    return find


def _ranks(name: str, rows: _Rows) -> Finding:
    """The bound is what the mean of unrelated ranks exceeds once in 20 times."""
    chance = Z * math.sqrt(sum(1 / (row[1] - 1) for row in rows)) / len(rows)
    mean = float(np.mean([row[0] for row in rows]))
    return Finding(name, "rank correlation with occlusion, above chance", mean, chance)


def _changes(name: str, rows: _Rows) -> Finding:
    middle = float(np.median([row[0] for row in rows]))
    return Finding(
        name, f"change under noise of {RADIUS:.0%}, in the middle", middle, UNSTABLE, True
    )


def _likeness(name: str, rows: _Rows) -> Finding:
    mean = float(np.mean([row[0] for row in rows]))
    text = "cosine with the map of the network whose last layer is drawn anew"
    return Finding(name, text, mean, INSENSITIVE, True)


_MEASURES: Mapping[
    Callable[["BaseHandler", Answered], tuple[float, ...]],
    Mapping[str, Callable[[str, _Rows], Finding]],
] = {
    _target: {"target": _share},
    _error: {"error": _coverage},
    _removal: {
        "deletion": _advantage(0, "the output falls earlier than in random order"),
        "insertion": _advantage(1, "the output rises earlier than in random order"),
    },
    _agreement: {"agreement": _ranks},
    _stability: {"stability": _changes},
    _randomised: {"randomised layer": _likeness},
}


def certify(
    handler: "BaseHandler", requests: Sequence[AskedRequest], budget_s: float
) -> Explanations:
    """Measure the explanations that an archive gives by default.

    Args:
        handler: handler of the archive, loaded.
        requests: requests of it, of which as many are looked at as there is time for.
        budget_s: seconds that this may take.

    Raises:
        NotMeasured: nothing can be said; the message is a phrase that gives the reason.
    """
    if len(requests) < FEWEST:
        raise NotMeasured(f"{FEWEST} requests are needed, there are {len(requests)}")
    rows: dict[Any, list[tuple[float, ...]]] = {measure: [] for measure in _MEASURES}
    reasons: dict[Any, str] = {}
    used: list[AskedRequest] = []
    began = time.monotonic()
    for request in requests:
        one = _answered(handler, request)
        used.append(request)
        for measure, found in rows.items():
            if measure is _randomised and len(found) == RETRIED:
                continue
            try:
                found.append(measure(handler, one))
            except HandlerError as error:
                reasons[measure] = str(error)
        if not rows[_error]:  # the other measures do not tell a map from half of it
            raise NotMeasured(reasons[_error])
        each_s = (time.monotonic() - began) / len(used)
        if each_s * FEWEST > budget_s:
            raise NotMeasured(
                f"{FEWEST} requests would take {FEWEST * each_s:.0f} s, more than {budget_s:.0f}; "
                "--certificate waits for it"
            )
        if len(used) >= FEWEST and each_s * (len(used) + 1) > budget_s:
            break
    measured, missing = [], {}
    for measure, findings in _MEASURES.items():
        for name, find in findings.items():
            if len(rows[measure]) >= min(FEWEST, len(used)):
                measured.append(find(name, rows[measure]))
            else:
                missing[name] = reasons[measure]
    asked = tuple(each.asked for each in used)
    return Explanations(str(one.answer.get("method")), tuple(measured), missing, asked)


_QUERIES: Sequence[Mapping[str, str]] = (
    *({}, {"aggregate": "none"}),  # where an answer is of parts, as of a sound's
    {"method": "feature_ablation"},  # where nothing has gradients
)


def _answered(handler: "BaseHandler", request: AskedRequest) -> Answered:
    """Ask for the default explanation, then look at the same request without the explainer."""
    first: HandlerError | None = None
    for query in _QUERIES:
        try:
            answer = request.explain(query)
            inputs = request.inputs()
            baseline = answer.get("baseline") if isinstance(answer, dict) else None
            truth = truth_of(handler, inputs, baseline if isinstance(baseline, str) else None)
            return Answered(request, answer, truth, maps_of(answer, truth), inputs, query)
        except HandlerError as error:
            first = first or error
    raise NotMeasured(str(first)) from first


# -- numbers ---------------------------------------------------------------------------------------


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(each.double().square().sum()) for each in tensors))


def _distance(one: Tensor, other: Tensor) -> float:
    size = float(one.norm())
    return float((one - other).norm()) / size if size else math.inf


def _cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine; 1 where one is 0, which says nothing of the other network."""
    sizes = float(one.norm() * other.norm())
    return float(one @ other) / sizes if sizes else 1.0


def _rank_correlation(one: Tensor, other: Tensor) -> float:
    """Return Spearman's correlation, equal values sharing their ranks; 0 where all are equal."""
    ranks = []
    for each in (one, other):
        _, place, counts = np.unique(each.numpy(), return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        ranks.append(((ends - counts + 1 + ends) / 2)[place])
    if not all(rank.std() > 0 for rank in ranks):
        return 0.0
    one_off, other_off = (rank - rank.mean() for rank in ranks)
    return float(one_off @ other_off / np.sqrt(one_off @ one_off * (other_off @ other_off)))


Z = 1.645
"""What a standard normal number exceeds once in 20 times."""


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and the ends of its interval by Student's t: each is exceeded once in 20.

    The quantile is Fisher's expansion, off by 0.3 % for four values and less for more.

    Source: Abramowitz and Stegun, 26.7.5
    """
    free = len(values) - 1
    t = (
        Z
        + (Z**3 + Z) / (4 * free)
        + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * free**2)
        + (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / (384 * free**3)
    )
    mean = float(np.mean(values))
    half = t * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, mean - half, mean + half
