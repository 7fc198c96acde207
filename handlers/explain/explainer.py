"""What a handler holds to explain: a batch of requests → the answers, in the formats asked for."""

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modelyard.archiver.handler_files import MASKS, TYPES
from modelyard.archiver.signature import TensorSpec
from modelyard.handlers.body import parse_json
from modelyard.handlers.errors import BadInput, NoGradients
from modelyard.handlers.explain.attribute.attribution import Tensors
from modelyard.handlers.explain.attribute.methods import METHODS
from modelyard.handlers.explain.draw import bars, page, picture
from modelyard.handlers.explain.draw.bars import Bar, Values
from modelyard.handlers.explain.draw.page import Part
from modelyard.handlers.explain.explanation import Explanation, as_npy, explain_batch
from modelyard.handlers.explain.request.options import (
    MEDIA_TYPES,
    ExplainOptions,
    Row,
    gather_options,
    parse_options,
)
from modelyard.handlers.explain.request.targets import ExplainedModel
from modelyard.handlers.limits import refused_values
from modelyard.handlers.models.backends import Artifact, as_tuple

if TYPE_CHECKING:
    from modelyard.handlers.base import BaseHandler


STEPS = 30
"""Steps of integrated gradients: shares are averaged over many explanations, so each may be
coarse."""
ROWS = 8
"""Rows that share a pass: whoever waits for the worker waits for the end of one."""


def options_of_shares(version: ExplainedModel) -> ExplainOptions:
    """Return how shares are explained: with gradients, where the archive has what gives them."""
    options = ExplainOptions(internal_batch_size=ROWS)
    if version.twin is None or not version.twin.is_differentiable:
        suitable = method_for(version.artifact, version.output_name)
        return replace(options, method=suitable or "feature_ablation")
    return replace(options, n_steps=STEPS)


def method_for(artifact: Artifact, output: str | None) -> str | None:
    """Return the method that suits an output of an artifact without gradients; None of most."""
    suitable = (n for n, each in METHODS.items() if each.suits and each.suits(artifact, output))
    return next(suitable, None)


SCHEMA_VERSION = 1
"""Version of the fields of an answer, as `Explanation` in the description of the API has them: it
rises when one goes, or has another meaning."""

MOST_NUMBERED = 256
"""Values of a row whose places may mean something; the samples of a sound do not."""


class Explainer:
    """Explains what a handler's model predicts; the handler says what is particular to its inputs.

    Args:
        handler: handler whose hooks are called, so that its subclasses' count.
    """

    def __init__(self, handler: "BaseHandler") -> None:
        self.handler = handler
        self._module: Artifact | None = None

    def explain(self, data: Sequence[Row]) -> list[Any]:
        """Answer a batch; see `BaseHandler.explain`."""
        handler = self.handler
        self._refuse_whole()
        read = [handler._each(at, handler._read_options, at, row) for at, row in enumerate(data)]
        tensors = as_tuple(handler.preprocess([row for _, row in read]))
        options = [each for each, _ in read]
        return [
            self.present(index, tuple(tensor[index] for tensor in tensors), each)
            for index, each in enumerate(explain_batch(handler.explained_model(), tensors, options))
        ]

    def shares(self, data: Sequence[Row]) -> list[dict[str, Any]]:
        """Return what share each part of a request has; see `BaseHandler.shares`."""
        handler = self.handler
        self._refuse_whole()
        tensors = as_tuple(handler.preprocess(data))
        version = handler.explained_model()
        explanations = explain_batch(version, tensors, [options_of_shares(version)] * len(data))
        answers, reference = [], handler.reference
        for index, (explanation,) in enumerate(explanations):
            parts = handler.name_parts(index, explanation)
            total = sum(map(abs, parts.values()))
            shares = {name: abs(each) / total for name, each in parts.items()} if total else {}
            folded = reference.fold(shares) if reference and shares else shares
            answers.append({"class": explanation.label, "shares": folded})
        return answers

    def model(self) -> ExplainedModel:
        """Return what explanations need to know of the model version."""
        handler, served = self.handler, self.served()
        is_one = handler.explainer is None and served.is_differentiable
        return ExplainedModel(
            artifact=served,
            twin=served if is_one else handler.explainer,
            agreement=handler.agreement,
            **{name: getattr(handler, name) for name in _HOOKS},
            between_chunks=handler.context.check_cancelled,
            output_name=handler.main_output,
            is_of_probabilities=handler.output_kind == "probabilities",
        )

    def served(self) -> Artifact:
        """Return the model as an artifact, also where an author put a module of their own there."""
        handler, model = self.handler, self.handler.model
        if isinstance(model, Artifact):
            return model
        if self._module is not None and self._module.module is model:
            return self._module
        if not isinstance(model, nn.Module):
            raise NoGradients(
                f"the handler's model is a {type(model).__name__}; only artifacts and torch "
                "modules can be explained"
            )
        parameters = inspect.signature(model.forward).parameters.values()
        inputs = handler.inputs or tuple(
            TensorSpec(each.name) for each in parameters if each.default is each.empty
        )
        self._module = Artifact("eager", model, inputs, handler.device, model)
        return self._module

    def read_options(self, index: int, row: Row) -> tuple[ExplainOptions, Row]:
        """Return what request `index` asks for, and its body without that."""
        context = self.handler.context
        given, rest = gather_options(context.query[index], row)
        accept = context.get_request_header(index, "accept")
        return parse_options(given, accept, self.handler.formats, self.default_method), rest

    @cached_property
    def default_method(self) -> str:
        """How it is explained where a request does not say it."""
        handler, model = self.handler, self.handler.model
        is_alone = handler.explainer is None and isinstance(model, Artifact)
        suitable = method_for(model, handler.main_output) if is_alone and not model.module else None
        return suitable or ExplainOptions.method

    def baselines(self, name: str, inputs: Tensors, seed: int) -> Tensors:
        """Return what stands for "no information"; see `BaseHandler.baselines`."""
        if name.startswith("file:"):
            return self._read_baselines(name.removeprefix("file:"))
        handler = self.handler
        is_whole = not any(map(Tensor.is_floating_point, inputs))
        found = tuple(
            handler.baseline(name, each, seed) if is_whole or each.is_floating_point() else each
            for each in inputs
        )
        for spec, each in zip(handler.inputs, found, strict=False) if is_whole else ():
            if spec.name not in (*MASKS, *TYPES) and (wrong := refused_values(spec, each, {})):
                raise BadInput(
                    f'baseline is "{name}", which input "{spec.name}" does not take: it {wrong}; '
                    "choose file:NAME, with a request that stands for nothing"
                )
        return found

    def name_parts(self, explanation: Explanation) -> Mapping[str, float]:
        """Return what a value of a short row has, or an input; see `BaseHandler.name_parts`."""
        parts: dict[str, float] = {}
        for name, each in zip(explanation.names, explanation.attributions, strict=True):
            label = name if len(explanation.names) > 1 else ""
            if each.dim() == 1 and len(each) <= MOST_NUMBERED:
                values = each.tolist()
                parts |= {f"{label}[{at}]" if label else str(at): v for at, v in enumerate(values)}
            else:
                parts[name] = float(each.abs().sum(dtype=torch.float64))
        if len(parts) < 2:
            raise BadInput(
                "this model's input has no parts whose shares could be told apart; expected named "
                "features (the handler tabular), a picture, several inputs, or a row of 2 to "
                f"{MOST_NUMBERED} numbers"
            )
        return parts

    def bars(self, inputs: Tensors, explanation: Explanation) -> list[Bar]:
        """Return the explained values by name; see `BaseHandler.bars`."""
        known = dict(zip(self.served().input_names, inputs, strict=False))
        errors = explanation.errors or (None,) * len(explanation.names)
        values = {}
        for name, own, off in zip(explanation.names, explanation.attributions, errors, strict=True):
            shown = known.get(name)
            is_alike = shown is not None and shown.shape == own.shape
            values[name] = Values(own, off, shown if is_alike else None)
        return bars.largest(values)

    def heat_map(self, index: int, inputs: Tensors, explanations: Sequence[Explanation]) -> bytes:
        """Draw bars as a PNG file."""
        drawn = []
        for each in explanations:
            found, part = self._drawn(index, inputs, each)
            drawn.append(bars.render(found, part.answer, part.texts, each.strength))
        return picture.stack(drawn)

    def page(self, index: int, inputs: Tensors, explanations: Sequence[Explanation]) -> bytes:
        """Draw bars as an HTML page."""
        parts = []
        for each in explanations:
            found, part = self._drawn(index, inputs, each)
            figure = bars.figure(found, part.answer, each.strength)
            parts.append(replace(part, figure=figure))
        return page.render(parts)

    def present(self, index: int, inputs: Tensors, explanations: Sequence[Explanation]) -> Any:
        """Write the answer of request `index` in the format that it asked for."""
        handler, context = self.handler, self.handler.context
        options = explanations[0].options
        own = handler.warnings(index)
        explanations = [replace(each, warnings=(*each.warnings, *own)) for each in explanations]
        if (options.aggregate or handler.default_aggregate) == "sum":
            explanations = list(map(self._summed, explanations))
        if options.format == "json":
            answers = [self._as_json(index, inputs, each) for each in explanations]
            several = {"explanations": answers}
            return self.origin() | (several if options.has_several else answers[0])
        media_type = MEDIA_TYPES[options.format]
        if options.format == "html":
            media_type += "; charset=utf-8"
            context.set_response_header(index, "content-security-policy", page.POLICY)
        context.set_response_content_type(index, media_type)
        if options.format in ("png", "html"):
            write = handler.heat_map if options.format == "png" else handler.page
            return write(index, inputs, explanations)
        (explanation,) = explanations  # of these formats no more are asked for
        if options.format == "overlay":
            return handler.overlay(index, inputs, explanation)
        if len(explanation.attributions) > 1:
            raise BadInput(
                f"format is npy; expected json: {', '.join(explanation.names)} are explained, and "
                "the file holds one array"
            )
        # A header has what else there is to say.
        facts = self.origin() | explanation.facts()
        context.set_response_header(index, "x-explanation", json.dumps(facts))
        return as_npy(explanation.attributions[0])

    def _as_json(self, index: int, inputs: Tensors, explanation: Explanation) -> dict[str, Any]:
        regions = self.handler.regions(index, inputs, explanation)
        fields = explanation.facts() | {"regions": regions} if regions else explanation.as_json()
        return fields | self.handler.describe(index, explanation)

    def origin(self) -> dict[str, Any]:
        """Return which model version answers, and by which version of the fields."""
        version = (self.handler.manifest.get("model") or {}).get("modelVersion", "")
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.handler.context.model_name,
            "version": str(version),
            "archive_digest": self.handler.digest,
            "output_kind": self.handler.output_kind,
        }

    def _read_baselines(self, name: str) -> Tensors:
        """Return the inputs that a file or a folder of the archive holds."""
        folder = Path(self.handler.context.system_properties["model_dir"]).resolve()
        place = (folder / name).resolve()
        if not place.is_relative_to(folder) or not place.exists() or place == folder:
            raise BadInput(f'baseline is "file:{name}", which the archive does not hold')
        rows: list[Any] = []
        for file in sorted(each for each in place.rglob("*") if each.is_file()) or [place]:
            content = bytearray(file.read_bytes())
            rows += parse_json(content) if file.suffix == ".json" else [content]
        try:
            # What is noted of the batch's own requests stays as it is.
            inputs = copy.copy(self.handler).preprocess([{"body": row} for row in rows])
        except BadInput as error:
            raise BadInput(f'baseline "file:{name}" cannot be used: {error}') from error
        return as_tuple(inputs)

    def _refuse_whole(self) -> None:
        if self.handler.is_whole:
            raise BadInput(
                "this model's inputs are not made of rows, and explanations are of one row; "
                "expected a prediction"
            )

    def _drawn(
        self, index: int, inputs: Tensors, explanation: Explanation
    ) -> tuple[list[Bar], Part]:
        """Return the bars of an explanation, and what is said around them."""
        found = self.handler.bars(index, inputs, explanation)
        drawn = bars.drawn_of(found, self.handler.thing, explanation.sides)
        return found, page.part_of(explanation, self.handler.fields_of(index, explanation), drawn)

    def _summed(self, explanation: Explanation) -> Explanation:
        """Sum up what belongs together; its error is at most the sum of theirs."""
        together = partial(self.handler.aggregated, explanation)
        summed: dict[str, Any] = {
            name: (each := getattr(explanation, name)) and tuple(map(together, each))
            for name in ("attributions", "errors", "differences")
        }
        return replace(explanation, **summed)


_HOOKS = (
    *("label", "baselines", "window", "score", "probabilities", "find_target", "name_place"),
    *("scales", "default_baseline", "default_set", "embedded", "find_region", "class_dim"),
    *("groups", "choices", "baseline_means", "output_names"),
)
"""What a handler says of its model by the names of `ExplainedModel`."""
