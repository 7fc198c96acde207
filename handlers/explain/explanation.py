"""A batch and what each of its requests asks for → the explanations of each."""

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from modelyard.archiver.handler_files import MASKS, TYPES
from modelyard.handlers.errors import BadInput, NoGradients, TwinDiffers
from modelyard.handlers.explain.attribute import attribution
from modelyard.handlers.explain.attribute.attribution import AttributionRequest, Tensors
from modelyard.handlers.explain.attribute.cut import Cut, cut_at_embedding
from modelyard.handlers.explain.attribute.method import Measure, Method, Result, StandIn, Windows
from modelyard.handlers.explain.attribute.methods import MEASURES, METHODS
from modelyard.handlers.explain.attribute.trace import SIGMAS
from modelyard.handlers.explain.request.options import ExplainOptions
from modelyard.handlers.explain.request.targets import (
    ExplainedModel,
    Place,
    Target,
    find_targets,
    stacked,
)
from modelyard.handlers.models.backends import Artifact
from modelyard.handlers.proof.agree import Rule, compare


def as_lists(tensor: Tensor) -> Any:
    """Return nested lists; of float32 and less, the fewest digits that are read as the same number.

    As float64, which Python's floats are, 0.1 would be 0.10000000149011612.
    """
    if tensor.dtype == torch.float64 or tensor.dim() == 0:
        return tensor.tolist()
    return orjson.loads(orjson.dumps(_as_array(tensor), option=orjson.OPT_SERIALIZE_NUMPY))


def as_npy(tensor: Tensor) -> bytes:
    """Return a file as `numpy.save` writes it: float64 as it is, all else as float32."""
    file = io.BytesIO()
    np.save(file, _as_array(tensor), allow_pickle=False)
    return file.getvalue()


def _as_array(tensor: Tensor) -> np.ndarray:
    values = tensor.detach() if tensor.dtype == torch.float64 else tensor.detach().float()
    return np.ascontiguousarray(values.cpu().numpy())


NEARLY_NOTHING = 0.01
"""The share of the attributions below which what is left after they cancel is not worth colour."""

FAINT = 0.3
"""Share of full colour that such an explanation is drawn in."""

CONFIDENT = 0.9
"""A baseline that is a class with this probability does not stand for nothing."""


@dataclass(frozen=True)
class Explanation:
    """Why one input led to one output; numbers as in `Attribution`."""

    options: ExplainOptions
    baseline: str
    target: Place
    label: str
    output_name: str | None
    """Name of the output that is explained; None where nobody knows."""
    against: Place | None
    """The target that it is compared with."""
    probability: float | None
    """What a prediction gives for the target; None where it gives no probabilities."""
    explained_with: str
    """The file of the archive that was asked: the artifact that predicts, or its twin."""
    f_input: float
    """Output of the artifact that was asked, as `f_baseline`."""
    f_baseline: float
    f_served: float
    """The same output of the artifact that predicts."""
    sum_attributions: float
    convergence_delta: float | None
    """None where the method promises no sum."""
    path_delta: float | None
    """The largest gap between the output on the way and the sum up to there, as a share of how far
    the output goes; None where the method follows no path."""
    relative_delta: float | None
    """|delta| as a share of |f(input) − f(baseline)|; None where those are equal, too."""
    net_share: float | None
    """|f(input) − f(baseline)| as a share of the sum of all |attributions|, the rest of which
    cancels; None where the method promises no sum, or all are 0."""
    error: float | None
    """How far off the attributions are, as a share of their norm; None where nobody knows."""
    baseline_error: float | None
    """The same of a set of baselines, as a sample of all that could be in it."""
    n_steps: int
    tolerance_met: bool | None
    """Whether the error is within the tolerance; None where nobody knows."""
    attributions: Tensors
    """(*S) per explained input, on the device that made it."""
    errors: Tensors | None
    """(*S) each: how far off each attribution may be."""
    names: tuple[str, ...]
    """Names of the explained inputs."""
    differences: Tensors | None = None
    """(*S) each, as of an `Attribution`."""
    hidden: float = 0.0
    """As of an `Attribution`."""
    baseline_means: str | None = None
    """What the baseline is, where its name does not say it."""
    baseline_label: str | None = None
    """What a prediction says of the baseline."""
    baseline_probability: float | None = None
    sides: tuple[float, float] | None = None
    """What speaks for the target and against it, each added up; None where the values say it."""
    measures: Mapping[str, Any] = field(default_factory=dict)
    """Measures that are asked for → what they say of it."""
    warnings: tuple[str, ...] = ()
    """What a reader has to know before believing it; a sentence each."""

    @property
    def is_next_to_nothing(self) -> bool:
        """Whether what speaks for the target and what speaks against it cancel."""
        return self.net_share is not None and self.net_share < NEARLY_NOTHING

    @property
    def unaccounted(self) -> float:
        """How far the sum may be from what was served for what no value's gradient shows."""
        return abs(self.f_input - self.f_served) + SIGMAS * self.hidden

    @property
    def strength(self) -> float:
        """How strongly it may be drawn: the share of full colour that the largest value gets."""
        return FAINT if self.is_next_to_nothing else 1.0

    def as_json(self) -> dict[str, Any]:
        """Return the answer's fields; every number is finite."""

        def named(each: Iterable[Any]) -> Any:
            by_name = dict(zip(self.names, each, strict=True))
            return by_name if len(by_name) > 1 else next(iter(by_name.values()))

        fields = self.facts()
        fields["shape"] = named(list(each.shape) for each in self.attributions)
        fields["attributions"] = named(map(as_lists, self.attributions))
        if self.options.errors:
            fields["errors"] = None if self.errors is None else named(map(as_lists, self.errors))
        return fields

    def facts(self) -> dict[str, Any]:
        """Return the answer's fields but for its lists of numbers."""
        facts = {
            "method": self.options.method,
            "target": _listed(self.target),
            "against": _listed(self.against),
            "output": self.options.output,
            "served_delta": self.f_input - self.f_served,
            "tolerance": self.options.tolerance,
            "warnings": list(self.warnings),
            "layer": self.options.layer,
            "baseline_means": self.baseline_means,
            "baseline_error": self.baseline_error,
        }
        optional = {name for name in _OPTIONAL if facts[name] is None}
        shown = [name for name in _FACTS if name not in optional]
        return {
            **{name: facts[name] if name in facts else getattr(self, name) for name in shown},
            **self.measures,
        }


_FACTS = (
    *("method", "output_name", "target", "label", "against", "output", "probability", "baseline"),
    *("baseline_means", "baseline_label", "baseline_probability", "explained_with", "f_input"),
    *("f_baseline", "f_served", "served_delta", "sum_attributions", "convergence_delta"),
    *("path_delta", "relative_delta", "net_share", "error", "baseline_error", "n_steps"),
    *("tolerance", "tolerance_met", "warnings", "layer"),
)
"""Fields of an answer in their order."""
_OPTIONAL = ("against", "baseline_means", "baseline_error", "layer")
"""Fields that an answer leaves out where they are None."""


@dataclass(frozen=True)
class _Split:
    """What of a model is differentiated or evaluated, and the tensors that it is called with."""

    model: attribution.Model
    """Called with the explained tensors, then the fixed ones."""
    explained: Tensors
    """(N, *S) each."""
    fixed: Tensors
    """(N, …) each."""
    names: tuple[str, ...]
    """Names of the explained tensors."""
    select: Callable[[Tensors], Tensors]
    """Inputs of the model (B, …) → what of them, or of what follows from them, is explained."""
    restore: Callable[[Tensors], Tensors] = tuple
    """The tensors that it is called with → inputs of the model; not of one that is cut."""
    is_cut: bool = False
    """Whether what is explained follows from the inputs."""


def explain_batch(
    version: ExplainedModel,
    inputs: Tensors,
    options: Sequence[ExplainOptions],
    further: Mapping[str, Measure] = MappingProxyType({}),
) -> list[list[Explanation]]:
    """Explain inputs, (N, *S) each; requests that ask for the same share passes.

    Args:
        version: version that is explained.
        inputs: inputs of the requests.
        options: options of each.
        further: measures that are made of every explanation, beside those that its options ask for.

    Returns:
        For each request one explanation per output and target that it asks for.

    Raises:
        BadInput: an output, target, baseline or layer that this model does not have.
        NoGradients: see `modelyard.handlers.explain.attribute.attribution`.
        TwinDiffers: artifact and twin give different outputs for these inputs.
    """
    found: dict[tuple[str, int], list[Explanation]] = {}
    groups: dict[tuple[str, StandIn | None], list[int]] = {}
    for row, option in enumerate(options):
        for name in option.output_name:
            groups.setdefault((name, METHODS[option.method].stand_in), []).append(row)
    for (name, stand_in), rows in groups.items():
        part = version.at_output(name) if name else version
        part = replace(stand_in(part), origin=part) if stand_in else part
        own = tuple(tensor[rows] for tensor in inputs)
        outputs = _evaluate(part, part.artifact, own)
        targets = {
            row: find_targets(part, row, options[row], each)
            for row, each in zip(rows, outputs, strict=True)
        }
        for alike in _groups(options, rows):
            group = _Group(
                part,
                tuple(tensor[alike] for tensor in inputs),
                outputs[[rows.index(row) for row in alike]],
                [options[row] for row in alike],
                alike,
                [(at, target) for at, row in enumerate(alike) for target in targets[row]],
            )
            found |= zip([(name, row) for row in alike], group.explain(further), strict=True)
    return [
        [each for name in option.output_name for each in found[name, row]]
        for row, option in enumerate(options)
    ]


@dataclass(frozen=True)
class _Group:
    """Requests whose options lead to the same call of a method."""

    version: ExplainedModel
    given: Tensors
    """(N, …) each: their inputs."""
    predicted: Tensor
    """(N, …) the outputs of the artifact that predicts."""
    every_option: Sequence[ExplainOptions]
    rows: Sequence[int]
    """Which requests of the whole batch these are."""
    owners: Sequence[tuple[int, Target]]
    """A request, and one of its targets, for each of the M explanations."""

    @property
    def options(self) -> ExplainOptions:
        """What all of them ask for alike."""
        return self.every_option[0]

    @property
    def method(self) -> Method:
        return METHODS[self.options.method]

    def explain(self, further: Mapping[str, Measure]) -> list[list[Explanation]]:
        """Return the explanations of each request; `further` as of `explain_batch`."""
        version, method = self.version, self.method
        sets = [self._baselines(row, option) for row, option in enumerate(self.every_option)]
        request, served, outputs = self._request(sets)
        starts = [self._class_of(each) for each in outputs]
        windows = [self._windows(self.rows[row], request.inputs) for row, _ in self.owners]
        settings: dict[str, Any] = self.options.settings()
        if method.stand_in:
            settings["artifact"] = self.artifact
        if method.looks_at_layer:
            settings["at_layer"] = self._at_layer()
        attributions = _run(method, request, settings, windows)
        found: list[list[Explanation]] = [[] for _ in self.every_option]
        for at, (row, target) in enumerate(self.owners):
            options, (label, chance) = self.every_option[row], starts[row]
            if version.is_of_probabilities:
                options = replace(options, output="probability")
            baseline, count = self._baseline(options), len(sets[row][0])
            part = request.part(slice(at, at + 1))
            numbers = _numbers(part, attributions[at], float(served[at]), options)
            own = settings | (vars(windows[at]) if method.needs_windows else {})
            result = Result(
                part,
                attributions[at].attributions,
                method,
                own | _fixed(method, numbers["n_steps"]),
                windows[at],
                options.seed,
                version.origin or version,
                self.rows[row],
                target.against,
            )
            wanted = {name: each for name, each in MEASURES.items() if getattr(options, name)}
            measured = {name: each(result) for name, each in {**wanted, **further}.items()}
            means = version.baseline_means(baseline)
            numbers["warnings"] += _about_baseline(baseline, label, chance)
            numbers["warnings"] += tuple(w for each in measured.values() for w in each.warnings)
            found[row].append(
                Explanation(
                    options=options,
                    baseline=baseline,
                    baseline_means=f"the mean over {count} rows" if count > 1 else means,
                    names=self.split.names,
                    explained_with=self.artifact.file,
                    target=target.name,
                    label=target.label,
                    probability=target.probability,
                    output_name=target.output,
                    against=target.against,
                    baseline_label=label,
                    baseline_probability=chance,
                    measures={name: each.fields for name, each in measured.items()},
                    **numbers,
                )
            )
        return found

    @cached_property
    def artifact(self) -> Artifact:
        """What the method computes with: what predicts, wherever that will do."""
        twin, name = self.version.twin, self.options.method
        if not self.method.needs_gradients:
            return self.version.artifact
        if twin is None or not twin.is_differentiable:
            free = ", ".join(key for key, method in METHODS.items() if not method.needs_gradients)
            raise NoGradients(
                f"{name} needs gradients, and this archive holds no differentiable twin of its "
                "artifact; build it again with `modelyard archive … --explain-with FILE.pt2`, "
                f"exported from the same checkpoint, or choose one of {free}"
            )
        if self.method.watches and isinstance(twin.module, torch.jit.ScriptModule):
            raise NoGradients(
                f"{name} watches what the model calls, which TorchScript does not show; archive a "
                "pt2 export with --explain-with, or choose integrated_gradients"
            )
        return twin

    @cached_property
    def inputs(self) -> Tensors:
        """(N, …) each, where the artifact computes."""
        return tuple(tensor.to(self.artifact.device) for tensor in self.given)

    @cached_property
    def split(self) -> _Split:
        """Between which tensors and the outputs the explanation is to be."""
        version, artifact, inputs = self.version, self.artifact, self.inputs
        names, needs_gradients = artifact.input_names, self.method.needs_gradients
        if needs_gradients and (cut := self._cut()) is not None:
            front = cut.front

            def select(whole: Tensors) -> Tensors:
                with torch.no_grad():
                    return (front(*whole).detach(),)

            name = self.options.layer or names[version.embedded or 0]
            return _Split(cut.back, select(inputs), inputs, (name,), select, is_cut=True)
        places = [at for at, each in enumerate(inputs) if each.is_floating_point()]
        if version.embedded is not None:
            places = [version.embedded]
        elif not places and needs_gradients:
            takes = ", ".join(map(str, artifact.inputs))
            raise NoGradients(
                f"{self.options.method} needs real-valued inputs, this model takes {takes}; choose "
                "a method without gradients, as occlusion"
            )
        # Masks and types say how the other inputs are to be read.
        own = [at for at, name in enumerate(names) if name not in (*MASKS, *TYPES)]
        places = places or own or list(range(len(inputs)))
        order = [*places, *(at for at in range(len(inputs)) if at not in places)]
        back = [order.index(at) for at in range(len(inputs))]
        return _Split(
            artifact
            if back == sorted(back)
            else lambda *given: artifact(*(given[at] for at in back)),
            tuple(inputs[at] for at in places),
            tuple(inputs[at] for at in order[len(places) :]),
            tuple(names[at] for at in places),
            lambda whole: tuple(whole[at] for at in places),
            lambda given: tuple(given[at] for at in back),
        )

    def _cut(self) -> Cut | None:
        if self.method.cut is not None and not self.method.looks_at_layer:
            return self.method.cut(self.artifact, self._layer)
        embedded = self.version.embedded
        return None if embedded is None else cut_at_embedding(self.artifact, embedded)

    @property
    def _layer(self) -> str:
        if (layer := self.options.layer) is None:
            name = self.options.method
            raise BadInput(f'layer is not given; {name} needs one, as "features.0"')
        return layer

    def _at_layer(self) -> Callable[[AttributionRequest], AttributionRequest]:
        """Return what takes explanations of inputs to the output of a layer."""
        version, split = self.version, self.split
        if split.is_cut:
            name = self.options.method
            raise BadInput(f"{name} does not apply: tokens have no places as pixels have")
        assert self.method.cut is not None
        cut = self.method.cut(self.artifact, self._layer)

        def at_layer(request: AttributionRequest) -> AttributionRequest:
            whole = split.restore((*request.inputs, *request.forward.fixed))
            with torch.no_grad():
                values = cut.front(*whole)
            model: attribution.Model = lambda *tensors: version.score(cut.back(*tensors))  # noqa: E731
            forward = replace(request.forward, model=model, fixed=whole)
            return replace(request, forward=forward, inputs=(values,))

        return at_layer

    def _baseline(self, options: ExplainOptions) -> str:
        several = self.version.default_set if self.method.takes_sets else None
        return options.baseline or several or self.version.default_baseline

    def _baselines(self, row: int, options: ExplainOptions) -> Tensors:
        """Return the baselines (B, *S) of one request."""
        version, split, method = self.version, self.split, options.method
        name = self._baseline(options)
        if name == "zero" and version.embedded is not None:
            if not split.is_cut:
                raise BadInput(
                    f'baseline is "zero", the embedding 0; {method} replaces tokens: expected pad'
                )
            return tuple(torch.zeros_like(each[:1]) for each in split.explained)
        inputs = tuple(tensor[row : row + 1] for tensor in self.inputs)
        found = version.baselines(name, inputs, options.seed)
        count = len(found[0])
        for each, own in zip(found, inputs, strict=True):
            if each.shape[1:] != own.shape[1:]:
                raise BadInput(
                    f"baseline {name} has the shape {list(each.shape[1:])}; expected the input's, "
                    f"{list(own.shape[1:])}"
                )
        if count > 1 and not self.method.takes_sets:
            several = ", ".join(key for key, each in METHODS.items() if each.takes_sets)
            raise BadInput(
                f"baseline {name} holds {count} rows; {method} takes one, {several} several"
            )
        return split.select(tuple(each.to(own) for each, own in zip(found, inputs, strict=True)))

    def _request(
        self, sets: Sequence[Tensors]
    ) -> tuple[AttributionRequest, Tensor, Sequence[Tensor]]:
        """Ask the model about inputs and baselines, and prepare what a method is called with.

        Returns:
            The request of M explanations; (M,) the output at the input of the artifact that
            predicts; (B, …) the outputs at each request's baselines.
        """
        version, split, artifact, owners = self.version, self.split, self.artifact, self.owners
        outputs = self.predicted.to(artifact.device)
        if artifact is not version.artifact:
            outputs = _evaluate(version, artifact, self.inputs)
            _check_agreement(version.agreement, self.predicted.to(outputs), outputs)

        def scored(*tensors: Tensor) -> Tensor:
            return version.score(split.model(*tensors))

        counts = [len(rows[0]) for rows in sets]
        repeated = torch.tensor([row for row, count in enumerate(counts) for _ in range(count)])
        baseline_outputs = attribution.evaluate(
            scored,
            (
                *(torch.cat(column) for column in zip(*sets, strict=True)),
                *(tensor[repeated.to(tensor.device)] for tensor in split.fixed),
            ),
            self._pass_rows(None, ()),
            version.between_chunks,
        )
        is_probability = self.options.output == "probability"
        function = partial(_probabilities, version) if is_probability else None
        at_inputs, at_baselines, at_served = (
            function(each.double()) if function else each.double()
            for each in (outputs, baseline_outputs, self.predicted)
        )
        start_rows = torch.split(at_baselines, counts)
        rows = torch.tensor([row for row, _ in owners], device=outputs.device)
        stack = stacked([target for _, target in owners])
        places, weights = (each.to(outputs.device) for each in stack)
        forward = attribution.ForwardFunction(
            scored,
            places,
            tuple(tensor[rows] for tensor in split.fixed),
            function,
            None if places.shape[1] == 1 and bool((weights == 1).all()) else weights,
        )
        explained = tuple(tensor[rows] for tensor in split.explained)
        is_real = all(map(Tensor.is_floating_point, explained))
        request = AttributionRequest(
            forward,
            explained,
            tuple(sets[row] for row, _ in owners),
            torch.cat([target.of(at_inputs[row : row + 1]) for row, target in owners]),
            torch.stack([target.of(start_rows[row]).mean() for row, target in owners]),
            self._pass_rows(forward if self.method.needs_gradients else None, explained),
            version.between_chunks,
            None if split.is_cut or not is_real else tuple(map(version.scales, explained)),
        )
        served = torch.cat([target.of(at_served[row : row + 1]) for row, target in owners])
        return request, served, torch.split(baseline_outputs, counts)

    def _pass_rows(self, forward: attribution.ForwardFunction | None, inputs: Tensors) -> int:
        """Return how many points share a pass: what is asked for, as the artifact takes it.

        Args:
            forward: function of a pass with gradients, whose memory counts; None for others.
            inputs: inputs of `forward`.
        """
        rows = self.options.internal_batch_size or attribution.FORWARD_ROWS
        if forward and self.options.internal_batch_size is None:
            rows = attribution.gradient_rows(self.artifact, forward, inputs)
        return min(rows, attribution.most_rows(self.artifact))

    def _windows(self, row: int, inputs: Tensors) -> Windows:
        """Return the windows that the method asks about, or the least ones that could be.

        Args:
            row: which request of the batch.
            inputs: (M, *S) each, that are explained.
        """
        groups = [self.version.groups(row, each.shape[1:]) for each in inputs]
        side = self.options.window if self.method.needs_windows else 1
        shapes = []
        for each, group in zip(inputs, groups, strict=True):
            sizes = each.shape[1:] if group is None else torch.Size((int(group.max()) + 1,))
            window = self.version.window(sizes, side)
            shapes.append(tuple(map(min, zip(window, sizes, strict=True))))
        has_any = any(group is not None for group in groups)
        return Windows(tuple(shapes), groups if has_any else ())

    def _class_of(self, outputs: Tensor) -> tuple[str | None, float | None]:
        """Return the label and probability of outputs (B, …) in the mean; None without any."""
        version = self.version
        chances = version.probabilities(outputs.double()) if outputs.dim() == 2 else None
        if chances is None:
            return None, None
        mean = chances.mean(0)
        index = int(mean.argmax())
        return version.label(index), float(mean[index])


def _run(
    method: Method,
    request: AttributionRequest,
    settings: Mapping[str, Any],
    windows: Sequence[Windows],
) -> list[attribution.Attribution]:
    """Return what the method finds for each of the explanations, which share passes if they can."""
    own = [{**settings, **(vars(each) if method.needs_windows else {})} for each in windows]
    if method.is_random or (method.needs_windows and any(each.groups for each in windows)):
        return [method.run(request.part(slice(at, at + 1)), **each) for at, each in enumerate(own)]
    found = method.run(request, **own[0])
    return [found.part(at) for at in range(len(request))]


def _about_baseline(baseline: str, label: str | None, probability: float | None) -> tuple[str, ...]:
    if probability is None or probability < CONFIDENT:
        return ()
    return (
        f'the baseline "{baseline}" is itself "{label}" with probability {probability:.3f}: '
        "attributions say what the input does compared with that, and may add up to little; "
        "compare with another baseline",
    )


def _listed(place: Place | None) -> Any:
    return list(place) if isinstance(place, tuple) else place


def _probabilities(version: ExplainedModel, outputs: Tensor) -> Tensor:
    """Return the probabilities of outputs (N, …); refuse those that have none."""
    found = version.probabilities(outputs)
    if found is None:
        shape = ", ".join(map(str, outputs.shape[1:]))
        raise BadInput(
            f"output is probability; expected logit: this model gives [N, {shape}] numbers, "
            "and its predictions make no probabilities of them"
        )
    return found


def _numbers(
    request: AttributionRequest,
    found: attribution.Attribution,
    f_served: float,
    options: ExplainOptions,
) -> dict[str, Any]:
    """Return what one explanation says of itself, for the request that it alone answers."""
    method = METHODS[options.method]
    total = attribution.sums_of(found.attributions) if found.total is None else found.total
    difference = request.f_input - request.f_baseline
    numbers = {
        "f_input": float(request.f_input),
        "f_baseline": float(request.f_baseline),
        "f_served": f_served,
        "sum_attributions": float(total),
    }
    wrong = ", ".join(f"{k} = {v}" for k, v in numbers.items() if not math.isfinite(v))
    if wrong:
        raise BadInput(
            f"{wrong}; an explanation needs finite outputs and gradients: send smaller numbers, or "
            "others than those where the model has no slope, as a root of 0; or choose another "
            "baseline"
        )
    delta = float(total - difference) if method.adds_up else None
    rounding = 0.0 if found.rounding is None else float(found.rounding)
    relative = None
    if delta is not None and abs(float(difference)) > rounding:
        relative = abs(delta / float(difference))
    found, net_share, warnings = _apart(found, method, numbers, rounding)
    error = found.error
    hidden = 0.0 if found.hidden is None else float(found.hidden)
    is_within = error is not None and bool(
        error <= options.tolerance
        if method.is_random
        else attribution.is_met(request, found, options.tolerance)
    )
    if delta is not None and error is not None and not options.noise:
        # Draws scatter around the sum, but no further than their errors allow.
        scatter = 3 * float(attribution.sizes_of(found.errors or ())) if method.is_random else 0.0
        if abs(delta) > scatter + max(options.tolerance * abs(float(difference)), rounding):
            if float(error) <= options.tolerance or hidden > abs(delta) / 2:
                warnings += (_missing(delta, float(difference)),)
            is_within = False
    rows = {name: getattr(found, name) for name in ("attributions", "errors", "differences")}
    return numbers | {
        "convergence_delta": delta,
        "path_delta": None if found.path_delta is None else float(found.path_delta),
        "relative_delta": relative,
        "net_share": net_share,
        "error": _finite(error),
        "baseline_error": _finite(found.set_error),
        "n_steps": int(found.n_steps),
        "tolerance_met": None if error is None else is_within,
        "hidden": hidden,
        **{name: each and tuple(tensor[0] for tensor in each) for name, each in rows.items()},
        "warnings": warnings,
        "sides": None if found.sides is None else tuple(found.sides[0].tolist()),
    }


def _finite(number: Tensor | None) -> float | None:
    return float(number) if number is not None and bool(number.isfinite()) else None


def _missing(delta: float, difference: float) -> str:
    return (
        f"f(input) − f(baseline) is {difference:.3g}, and the attributions miss it by "
        f"{-delta:.3g}: the output changes where it has no slope, as by rounding or a comparison, "
        "or between two points; ask occlusion or kernel_shap, which follow no slopes"
    )


def _fixed(method: Method, steps: int) -> dict[str, int]:
    """Return the setting that makes a method take as many points again as it took."""
    if "n_steps" in method.options:
        return {"n_steps": steps}
    return {"n_samples": steps} if method.is_random and not method.needs_windows else {}


def _apart(
    found: attribution.Attribution, method: Method, numbers: Mapping[str, float], rounding: float
) -> tuple[attribution.Attribution, float | None, tuple[str, ...]]:
    """Add to the errors how far a twin is from what it stands for, and see what is left.

    The gap between the two at the input is shared among the values by their sizes: so much the
    attributions would have to move at least, for the sum to be that of what was served.

    Returns:
        The attribution with its errors, the net share, and sentences about the two.
    """
    size = float(attribution.sizes_of(found.attributions))
    gap = abs(numbers["f_input"] - numbers["f_served"])
    difference = numbers["f_input"] - numbers["f_baseline"]
    warnings = []
    if gap and size > rounding and found.errors is not None:
        errors = tuple(
            error + each.abs() * (gap / size)
            for error, each in zip(found.errors, found.attributions, strict=True)
        )
        found = replace(found, errors=errors)
    if not (method.adds_up and size > rounding):
        return found, None, ()
    share = abs(difference) / size
    if share < NEARLY_NOTHING:
        warnings.append(
            f"f(input) − f(baseline) is {difference:.2g}, next to nothing beside the sizes of the "
            f"attributions, which add up to {size:.2g}: what speaks for the target and what speaks "
            "against it cancel; choose another baseline or target"
        )
    return found, share, tuple(warnings)


def _evaluate(version: ExplainedModel, artifact: Artifact, inputs: Tensors) -> Tensor:
    """Return the outputs (N, …) of the requests' inputs, which came as one batch and so fit one."""
    inputs = tuple(tensor.to(artifact.device) for tensor in inputs)
    return attribution.evaluate(
        lambda *tensors: version.score(artifact(*tensors)),
        inputs,
        len(inputs[0]),
        version.between_chunks,
    )


def _check_agreement(rule: Rule | None, outputs: Tensor, twin: Tensor) -> None:
    """Refuse to explain what was not predicted.

    Args:
        rule: between the two; without one there is nothing to refuse by.
        outputs: (N, …) of the artifact that predicts.
        twin: (N, …) of its twin.
    """
    if rule is None:
        return
    for row in range(len(outputs)):
        expected, found = twin[row : row + 1], outputs[row : row + 1]
        difference = rule.merge([compare(expected, found, rule.tolerance, rule.scale)])
        if rule.agrees(difference):
            continue
        if rule.is_quantized:
            allowed = f"the same largest value and an error of at most {rule.max_error:.2g}"
            seen = f"{difference.error:.2g}"
        else:
            allowed = f"a scaled difference of {rule.tolerance:.3g}"
            seen = f"{difference.scaled:.2g}"
        at = int((found - expected).abs().argmax())
        raise TwinDiffers(
            f"for this input the artifact gives {found.flatten()[at].item():.7g} at output {at} "
            f"and its twin {expected.flatten()[at].item():.7g}; expected {allowed}, seen {seen}, "
            "so an explanation of the one would not be one of the other: ask with a method without "
            "gradients, as occlusion, or export both again"
        )


def _groups(options: Sequence[ExplainOptions], rows: Sequence[int]) -> list[list[int]]:
    """Gather the requests that one call of a method can answer together."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        option = options[row]
        alone = row if METHODS[option.method].is_random else None
        settings = tuple(sorted(option.settings().items()))
        rest = (option.output, option.window, option.layer, option.internal_batch_size)
        groups.setdefault((alone, option.method, settings, rest), []).append(row)
    return list(groups.values())
