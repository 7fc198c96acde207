"""An adversary's explainers: broken ones that no certificate may be given to, and harmless ones.

Each takes the place of a handler's `explain`, as an author's own would: it is called with the
requests of a batch and the context, and gives answers in our format. A broken one says the method
and the error of the honest ones that it spoils.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from modelyard.archiver.explanations import Explanations, parse_explanations
from modelyard.archiver.untrusted.json import format_json
from modelyard.handlers.explain.attribute.methods import METHODS
from modelyard.handlers.models.backends import as_tuple
from modelyard.plugins.tasks.methods import certificate
from modelyard.serve.worker import measured
from modelyard.serve.worker.load import Service

Array = np.ndarray
Explain = Callable[[Any, Any], list[Any]]


@dataclass
class Honest:
    """What a broken explainer starts from."""

    handler: Any
    base: Mapping[str, str]
    """Options of ours that a request may not speak against."""
    before: Any = None
    """The map of the request before."""

    def answer(self, data: Any, context: Any, **query: str) -> dict[str, Any]:
        """Return what the handler answers to one request, with options of ours."""
        context.query[0].update({**self.base, **query})
        if "method" in context.query[0]:
            context.query[0].pop("n_steps", None)
        (found,) = self.handler.explain(data, context)
        return dict(found)

    def values(self, data: Any) -> Array:
        """Return what the model takes, as the attributions have it: of texts, the ids."""
        (inputs, *_) = as_tuple(self.handler.preprocess(data))
        return np.asarray(inputs[0].numpy(), float)


def _map(change: Callable[[Array], Array]) -> Callable[[Honest, Any, Any], dict[str, Any]]:
    """Return an explainer that changes the honest map."""

    def explain(honest: Honest, data: Any, context: Any) -> dict[str, Any]:
        found = honest.answer(data, context)
        values = np.array(found["attributions"], float)
        return found | {"attributions": change(values).tolist()}

    return explain


def _of_values(change: Callable[[Array], Array]) -> Callable[[Honest, Any, Any], dict[str, Any]]:
    """Return an explainer that looks at the input alone, in the size of the honest map."""

    def explain(honest: Honest, data: Any, context: Any) -> dict[str, Any]:
        found = honest.answer(data, context)
        size = np.linalg.norm(np.array(found["attributions"], float))
        values = change(honest.values(data))
        values *= size / (np.linalg.norm(values) or 1)
        return found | {"attributions": values.tolist()}

    return explain


def _asked(**query: str) -> Callable[[Honest, Any, Any], dict[str, Any]]:
    """Return an explainer that asks something else, and says what is asked of it."""

    def explain(honest: Honest, data: Any, context: Any) -> dict[str, Any]:
        given = dict(context.query[0])
        said = honest.answer(data, context)
        context.query[0].clear()
        asked = given | query
        if asked.get("target") == "other":
            asked["target"] = str((said["target"] + 1) % 2)
        found = honest.answer(data, context, **asked)
        return said | {"attributions": found["attributions"]}

    return explain


def _edges(values: Array) -> Array:
    return np.abs(np.diff(values, axis=-1, append=values[..., :1]))


def _blurred(values: Array) -> Array:
    return np.asarray(np.mean([np.roll(values, by, -1) for by in range(-2, 3)], 0))


def _centre(values: Array) -> Array:
    kept = np.zeros_like(values)
    middle = tuple(slice(size // 4, -(-3 * size // 4)) for size in values.shape if size > 1)
    place = (0,) * (values.ndim - len(middle)) + middle
    kept[place] = values[place]
    return kept


def _transposed(values: Array) -> Array:
    if values.ndim > 1 and values.shape[-1] == values.shape[-2]:
        return values.swapaxes(-1, -2)
    return values[..., ::-1]


def _half(values: Array) -> Array:
    return values * (np.random.default_rng(0).random(values.shape) < 0.5)


def _largest(values: Array) -> Array:
    return np.where(np.abs(values) == np.abs(values).max(), values, 0)


def _stale(honest: Honest, data: Any, context: Any) -> dict[str, Any]:
    found = honest.answer(data, context)
    values, before = np.array(found["attributions"], float), honest.before
    honest.before = values
    if before is None or before.shape != values.shape:
        before = np.roll(values, 3, -1)
    return found | {"attributions": before.tolist()}


def _narrow_error(honest: Honest, data: Any, context: Any) -> dict[str, Any]:
    found = honest.answer(data, context)
    return found | {"error": (found["error"] or 0) / 100}


def _wide_error(honest: Honest, data: Any, context: Any) -> dict[str, Any]:
    found = _map(np.abs)(honest, data, context)
    return found | {"error": 3.0, "tolerance_met": False}


def _wrong_target(honest: Honest, data: Any, context: Any) -> dict[str, Any]:
    """Explain another target than the predicted one, and say so."""
    found = honest.answer(data, context)
    return honest.answer(data, context, target=str((found["target"] + 1) % 2))


def _weights_of(which: str) -> Callable[[Honest, Any, Any], dict[str, Any]]:
    """Return an explainer of a network with other weights."""

    def explain(honest: Honest, data: Any, context: Any) -> dict[str, Any]:
        handler, found = honest.handler, honest.answer(data, context)
        truth = certificate.truth_of(handler, as_tuple(handler.preprocess(data)), None)
        assert truth.smooth is not None
        generator = torch.Generator().manual_seed(7)
        last = certificate.last_weight(handler, truth.smooth)
        if which == "ones":  # all units of the layer before, added up
            values = {last: torch.ones_like(last)}
        else:
            module = handler.explained_model().twin.module
            values = {
                each: torch.randn(each.shape, generator=generator) * each.std()
                for each in module.parameters()
                if each.dim() > 1
            }
        query = {"target": str(found["target"])}
        with certificate._weights(handler, values):
            other = honest.answer(data, context, **query)
        return found | {"attributions": other["attributions"]}

    return explain


BROKEN: Mapping[str, Callable[[Honest, Any, Any], dict[str, Any]]] = {
    "sign flipped": _map(np.negative),
    "values shuffled": _map(
        lambda values: np.random.default_rng(1).permutation(values.ravel()).reshape(values.shape)
    ),
    "constant": _map(lambda values: np.full_like(values, np.abs(values).mean())),
    "absolute values": _map(np.abs),
    "positive values alone": _map(lambda values: np.maximum(values, 0)),
    "shifted by one": _map(lambda values: np.roll(values, 1, -1)),
    "transposed or reversed": _map(_transposed),
    "zeros outside the centre": _map(_centre),
    "half of the features dropped": _map(_half),
    "the largest value alone": _map(_largest),
    "blurred": _map(_blurred),
    "cut off at a third": _map(lambda v: np.clip(v, -np.abs(v).max() / 3, np.abs(v).max() / 3)),
    "square roots": _map(lambda values: np.sign(values) * np.sqrt(np.abs(values))),
    "signs alone": _map(lambda values: np.sign(values) * np.abs(values).mean()),
    "twice as large": _map(lambda values: 2 * values),
    "noise added": _map(
        lambda v: v + 0.3 * np.sqrt((v**2).mean()) * np.random.default_rng().normal(size=v.shape)
    ),
    "random noise": _map(
        lambda v: np.sqrt((v**2).mean()) * np.random.default_rng().normal(size=v.shape)
    ),
    "the same noise each time": _map(
        lambda v: np.sqrt((v**2).mean()) * np.random.default_rng(2).normal(size=v.shape)
    ),
    "the input itself": _of_values(lambda values: values),
    "edges of the input": _of_values(_edges),
    "map of the request before": _stale,
    "another class, said to be the predicted one": _asked(target="other"),
    "another class, openly": _wrong_target,
    "always the first output": _asked(target="0"),
    "the layer before": _weights_of("ones"),
    "an untrained network": _weights_of("random"),
    "error bar of a hundredth": _narrow_error,
    "error bar that covers anything": _wide_error,
}
"""Name → an explainer that is wrong."""

HARMLESS: Mapping[str, Callable[[Honest, Any, Any], dict[str, Any]]] = {
    "as it is": lambda honest, data, context: honest.answer(data, context),
    "60 steps": lambda honest, data, context: honest.answer(data, context, n_steps="60"),
    "values rounded to four digits": _map(
        lambda values: np.array([float(f"{v:.4g}") for v in values.ravel()]).reshape(values.shape)
    ),
    "a field more": lambda honest, data, context: honest.answer(data, context) | {"team": "us"},
    **{
        method: lambda honest, data, context, method=method: _other_method(  # type: ignore[misc]
            honest, data, context, method
        )
        for method in ("smoothgrad", "gradient_shap", "kernel_shap", "feature_ablation")
    },
    "kernel_shap, another seed": lambda honest, data, context: _other_method(
        honest, data, context, "kernel_shap", seed="5"
    ),
}
"""Name → an explainer that is right; some of them are other methods, openly."""


def _other_method(
    honest: Honest, data: Any, context: Any, method: str, **query: str
) -> dict[str, Any]:
    return honest.answer(data, context, method=method, **query)


@contextlib.contextmanager
def half_the_way() -> Iterator[None]:
    """Let the method begin in the middle between baseline and input, unsaid."""
    honest = METHODS["integrated_gradients"]

    def run(request: Any, **settings: Any) -> Any:
        if settings.get("n_steps") == 1:
            return honest.run(request, **settings)
        sets = tuple(
            tuple((a + b[at : at + 1]) / 2 for a, b in zip(each, request.inputs, strict=True))
            for at, each in enumerate(request.baseline_sets)
        )
        return honest.run(replace(request, baseline_sets=sets), **settings)

    with _in_place(replace(honest, run=run)):
        yield


@contextlib.contextmanager
def one_gradient() -> Iterator[None]:
    """Let the method take the gradient at the baseline for that of the whole way."""
    honest = METHODS["integrated_gradients"]

    def run(request: Any, **settings: Any) -> Any:
        found = honest.run(request, **settings)
        near = replace(
            request,
            inputs=tuple(
                start + (end - start) / 1000
                for start, end in zip(request.baselines, request.inputs, strict=True)
            ),
        )
        other = honest.run(near, **settings)
        return replace(found, attributions=tuple(1000 * each for each in other.attributions))

    with _in_place(replace(honest, run=run)):
        yield


@contextlib.contextmanager
def another_row() -> Iterator[None]:
    """Let the method take the gradients of another input, as where a batch is mixed up."""
    honest = METHODS["integrated_gradients"]
    kept: list[Any] = []

    def run(request: Any, **settings: Any) -> Any:
        found = honest.run(request, **settings)
        kept.append(found.attributions)
        other = kept[max(0, len(kept) - 3)]
        if any(a.shape != b.shape for a, b in zip(other, found.attributions, strict=True)):
            other = tuple(each.roll(2, -1) for each in found.attributions)
        return replace(found, attributions=other)

    with _in_place(replace(honest, run=run)):
        yield


@contextlib.contextmanager
def _in_place(method: Any) -> Iterator[None]:
    honest = METHODS["integrated_gradients"]
    METHODS["integrated_gradients"] = method  # type: ignore[index]
    try:
        yield
    finally:
        METHODS["integrated_gradients"] = honest  # type: ignore[index]


BROKEN_METHODS = {
    "half the way": half_the_way,
    "the gradient at the baseline": one_gradient,
    "gradients of another row": another_row,
}
"""Name → a plug-in's method in the place of the one that is asked for."""


def certificate_of(
    service: Service,
    requests: list[dict[str, str]],
    explain: Callable[[Honest, Any, Any], dict[str, Any]] | None = None,
    base: Mapping[str, str] = MappingProxyType({}),
) -> Explanations | str:
    """Return what is measured of an explainer in a handler's place, or why nothing is.

    Args:
        service: archive, loaded.
        requests: files and their types.
        explain: the explainer; the handler's own without one.
        base: options of the explanations that it spoils, as their method.
    """
    if explain is not None:
        honest = Honest(service.handler, base)

        def answer(data: Any, context: Any) -> list[Any]:
            return [explain(honest, data, context)]

        service = replace(service, explain=answer)
    found = measured.measure_explanations(service, {"requests": requests, "budget_s": 1e9})
    return found if isinstance(found, str) else parse_explanations(format_json(found))
