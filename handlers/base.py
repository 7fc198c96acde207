"""The contract of a handler: initialize → preprocess → inference → postprocess, and explain.

The smallest complete handler of an archive changes one step and inherits the others:

    from handlers import BaseHandler

    class Doubler(BaseHandler):
        def postprocess(self, outputs):
            return [2 * row for row in super().postprocess(outputs)]
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from handlers.attribution import ExplainOptions, parse_options
from handlers.backends import (
    Artifact,
    DynamicDim,
    InputSpec,
    Output,
    detect_format,
    open_artifact,
)
from handlers.bodies import body_of, parse_json, read_numbers, stack
from handlers.context import Context
from handlers.errors import BadInput, LoadError, NoGradients
from handlers.explanation import Explanation, explain_batch

_log = logging.getLogger(__name__)

Inputs = Tensor | tuple[Tensor, ...]


class BaseHandler:
    """Serve any model: JSON numbers in, JSON numbers out.

    A worker builds it without arguments, calls `initialize` once and then, one batch at a time,
    `handle` or `explain`. Each gives exactly one answer per request, in order: str, bytes, or
    anything that JSON can hold.

    Attributes (set by `initialize`):
        context: what the worker tells; its request fields change with every batch.
        model: the artifact, called with one tensor per input.
        explainer: its differentiable twin, `model` itself where that is differentiable, or None.
        inputs: what the model takes; the first dimension is the batch.
        mapping: output index as str → label, None where the archive has no index_to_name.json.
        device: where the model computes.
    """

    def __init__(self) -> None:
        self.initialized = False
        self.context: Context
        self.manifest: dict[str, Any]
        self.model_yaml_config: dict[str, Any]
        self.model_pt_path: str
        self.map_location: str
        self.device: torch.device
        self.model: Any  # authors put models of their own here
        self.explainer: Artifact | None = None
        self.signature: dict[str, Any] | None = None
        self.inputs: tuple[InputSpec, ...] = ()
        self.output_names: tuple[str, ...] = ()
        self.mapping: dict[str, str] | None = None

    def initialize(self, context: Context) -> None:
        """Load what the archive holds; a worker calls it once, before any request.

        Raises:
            LoadError: the archive cannot be served here.
        """
        self.context = context
        self.manifest = context.manifest or {}
        self.model_yaml_config = context.model_yaml_config
        self.device = torch.device(context.device)
        self.map_location = self.device.type
        folder = Path(context.system_properties["model_dir"])
        artifact = _serialized_file(self.manifest)
        self.model_pt_path = str(folder / artifact)
        ours = self.manifest.get("modelyard") or {}
        self.model = _open(folder, artifact, ours.get("report"), self.device)
        self.explainer = self._open_explainer(folder, artifact, ours.get("explain"))
        self.signature = ours.get("signature")
        self.inputs, self.output_names = _read_signature(self.signature, self.model)
        self._check_batch_size(context.system_properties["batch_size"])
        self.mapping = load_label_mapping(folder / "index_to_name.json")
        self.initialized = True

    def handle(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[Any]:
        """Answer a batch of predictions: one dict per request in, one answer per request out."""
        self.context = context
        return self.postprocess(self.inference(self.preprocess(data)))

    def preprocess(self, data: Sequence[Mapping[str, Any]]) -> Inputs:
        """Turn request bodies into what the model takes: JSON numbers into its dtype and shape.

        A model of one input takes the numbers of one row, `[[0.1, …], …]`; a model of several
        takes an object with one entry per input.

        Raises:
            BadInput: a body that is not JSON, or numbers of another shape.
        """
        rows = [self._each(index, self._read_row, row) for index, row in enumerate(data)]
        columns = zip(*rows, strict=True)
        tensors = tuple(map(stack, self.inputs, columns))
        return tensors[0] if len(tensors) == 1 else tensors

    def inference(self, inputs: Inputs, *args: Any, **kwargs: Any) -> Output:
        """Run the model on a batch; no gradient is recorded."""
        tensors = (inputs,) if isinstance(inputs, Tensor) else inputs
        place = getattr(self.model, "device", self.device)
        with torch.inference_mode():
            output: Output = self.model(*(tensor.to(place) for tensor in tensors), *args, **kwargs)
        return output

    def postprocess(self, outputs: Output) -> list[Any]:
        """Turn outputs into answers: a list per request, or an object of lists by output name."""
        if isinstance(outputs, Tensor):
            rows: list[Any] = outputs.tolist()
            return rows
        columns = [output.tolist() for output in outputs]
        names = self.output_names or tuple(f"output_{i}" for i in range(len(columns)))
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def explain(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[Any]:
        """Answer a batch of explanations: which input values led to the output.

        Each request's query parameters and Accept header say what it wants (`ExplainOptions`);
        requests that want the same share their passes.

        Raises:
            NoGradients: the archive holds nothing that can be differentiated.
            BadInput: options or a body that cannot be used.
        """
        self.context = context
        explainer = self._require_explainer()
        options = [self._each(index, self._read_options, index) for index in range(len(data))]
        inputs = self.preprocess(data)
        if not isinstance(inputs, Tensor):
            raise NoGradients(f"models of {len(inputs)} inputs cannot be explained; only of one")
        explanations = explain_batch(
            explainer,
            inputs.to(explainer.device),
            options,
            label=self.label,
            baseline=self.baseline,
        )
        return [
            self._present(index, *pair)
            for index, pair in enumerate(zip(inputs, explanations, strict=True))
        ]

    def baseline(self, name: str, inputs: Tensor) -> Tensor:
        """Give the input (1, *S) that stands for "no information", for inputs (N, *S)."""
        if name != "zero":
            raise BadInput(f'baseline is "{name}"; expected zero: this model takes no images')
        return torch.zeros_like(inputs[:1])

    def heat_map(self, inputs: Tensor, explanation: Explanation) -> bytes:
        """Draw an explanation's attributions over its input (*S), as a PNG file."""
        raise BadInput("format is png; expected json: this model takes no images to draw over")

    def label(self, index: int) -> str:
        """Give the name of an output index: its label, else the index itself."""
        key = str(index)
        return key if self.mapping is None else self.mapping.get(key, key)

    # --- initialize -----------------------------------------------------------------------------

    def _open_explainer(
        self, folder: Path, artifact: str, explain: Mapping[str, Any] | None
    ) -> Artifact | None:
        twin = (explain or {}).get("artifact", artifact)
        if twin == artifact:
            return self.model if self.model.is_differentiable else None
        return _open(folder, twin, (explain or {}).get("report"), self.device)

    def _check_batch_size(self, batch_size: int) -> None:
        for spec in self.inputs:
            if not spec.shape:
                continue
            rows = spec.shape[0]
            takes = DynamicDim("batch", rows, rows) if isinstance(rows, int) else rows
            if not takes.holds(batch_size):
                raise LoadError(
                    f"batchSize is {batch_size}, the artifact takes {spec}; set batchSize within "
                    "that range in model-config.yaml, or export with a wider one"
                )

    # --- preprocess -----------------------------------------------------------------------------

    def _each(self, index: int, read: Callable[..., Any], *args: Any) -> Any:
        """Call `read` for request `index`; the log, not the client, learns which one was bad."""
        try:
            return read(*args)
        except BadInput as error:
            name = self.context.get_request_id(index)
            _log.info("request %s (index %d of its batch): %s", name, index, error)
            raise

    def _read_row(self, row: Mapping[str, Any]) -> list[np.ndarray]:
        value = parse_json(body_of(row))
        if len(self.inputs) == 1 and not isinstance(value, dict):
            return [read_numbers(self.inputs[0], value)]
        if not isinstance(value, dict) or set(value) != {spec.name for spec in self.inputs}:
            names = ", ".join(spec.name for spec in self.inputs)
            seen = f"the entries {', '.join(value)}" if isinstance(value, dict) else "no object"
            raise BadInput(f"the body holds {seen}; expected a JSON object with exactly: {names}")
        return [read_numbers(spec, value[spec.name]) for spec in self.inputs]

    # --- explain --------------------------------------------------------------------------------

    def _require_explainer(self) -> Artifact:
        if self.explainer is None or not self.explainer.is_differentiable:
            raise NoGradients(
                "this archive holds no differentiable twin of its artifact; build it again with "
                "`modelyard archive … --explain-with FILE.pt2`, exported from the same checkpoint"
            )
        return self.explainer

    def _read_options(self, index: int) -> ExplainOptions:
        accept = self.context.get_request_header(index, "accept")
        return parse_options(self.context.query[index], accept)

    def _present(self, index: int, inputs: Tensor, explanation: Explanation) -> Any:
        """Write the answer of request `index` in the format that it asked for."""
        if explanation.options.format == "png":
            picture = self.heat_map(inputs, explanation)
            self.context.set_response_content_type(index, "image/png")
            return picture
        version = (self.manifest.get("model") or {}).get("modelVersion", "")
        answer = {"model": self.context.model_name, "version": str(version)}
        return answer | explanation.as_json()


def load_label_mapping(path: Path) -> dict[str, str] | None:
    """Read index_to_name.json: output index as str → label; None where there is no such file.

    TorchServe's three forms: {"0": "cat"}, {"0": ["n02123045", "tabby"]} (the last name counts)
    and {"object_type_names": ["cat", …]}.
    """
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{path.name} is not JSON: {error}") from error
    if isinstance(content, dict) and "object_type_names" in content:
        content = dict(enumerate(content["object_type_names"]))
    if not isinstance(content, dict):
        raise LoadError(
            f'{path.name} holds a {type(content).__name__}; expected an object like {{"0": "cat"}}'
        )
    return {str(k): str(v[-1] if isinstance(v, list) and v else v) for k, v in content.items()}


def _serialized_file(manifest: Mapping[str, Any]) -> str:
    name = (manifest.get("model") or {}).get("serializedFile")
    if not isinstance(name, str) or not name:
        raise LoadError(
            "the manifest names no artifact (model.serializedFile); "
            "build the archive with `modelyard archive … --artifact FILE`"
        )
    return name


def _open(folder: Path, artifact: str, report: str | None, device: torch.device) -> Artifact:
    path = folder / artifact
    if report is None:
        if not path.is_file():
            raise LoadError(f"the manifest names {artifact}, which the archive does not hold")
        return open_artifact(path, detect_format(path), device)
    try:
        format = json.loads((folder / report).read_text(encoding="utf-8"))["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{report} cannot be read ({error!r}); build the archive again") from error
    return open_artifact(path, format, device)


def _read_signature(
    signature: Mapping[str, Any] | None, artifact: Artifact
) -> tuple[tuple[InputSpec, ...], tuple[str, ...]]:
    """Give the inputs and the outputs' names: as reported at export, else as the artifact says."""
    if signature is None:
        return artifact.inputs, ()
    try:
        limits = signature.get("dims") or {}
        inputs = tuple(_read_spec(entry, limits) for entry in signature["inputs"])
        return inputs, tuple(str(entry["name"]) for entry in signature["outputs"])
    except (KeyError, TypeError, AttributeError) as error:
        raise LoadError(
            f"the manifest's signature cannot be read ({error!r}); build the archive again"
        ) from error


def _read_spec(entry: Mapping[str, Any], limits: Mapping[str, Mapping[str, int]]) -> InputSpec:
    dims = tuple(
        dim
        if isinstance(dim, int)
        else DynamicDim(dim, limits.get(dim, {}).get("min", 0), limits.get(dim, {}).get("max"))
        for dim in entry["shape"]
    )
    return InputSpec(entry["name"], getattr(torch, entry["dtype"]), dims)
