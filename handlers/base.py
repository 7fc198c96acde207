"""The contract of a handler: initialize → preprocess → inference → postprocess, and explain.

The smallest complete handler of an archive changes one step and inherits the others:

    from modelyard.handlers import BaseHandler

    class Doubler(BaseHandler):
        def postprocess(self, outputs):
            return [2 * row for row in super().postprocess(outputs)]
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from modelyard.archiver.handler_files import BACKGROUND_FILE, LABELS_FILE
from modelyard.archiver.labels import count_problem
from modelyard.archiver.model_config import BATCH_INVARIANT
from modelyard.archiver.reference import Reference
from modelyard.archiver.report import Report
from modelyard.archiver.signature import Size, TensorSpec, fits
from modelyard.archiver.untrusted.names import MANIFEST_NAME
from modelyard.base.nearest import did_you_mean
from modelyard.handlers.body import body_of, parse_json
from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, LoadError
from modelyard.handlers.explain.attribute.attribution import Tensors, outputs_of, ranges_of
from modelyard.handlers.explain.attribute.method import Choice
from modelyard.handlers.explain.attribute.methods import METHODS
from modelyard.handlers.explain.draw.bars import Bar
from modelyard.handlers.explain.explainer import MOST_NUMBERED, Explainer
from modelyard.handlers.explain.explanation import Explanation
from modelyard.handlers.explain.request.options import ExplainOptions, Region, Row
from modelyard.handlers.explain.request.targets import ExplainedModel, Target
from modelyard.handlers.infer import run_tensors
from modelyard.handlers.limits import check_stated
from modelyard.handlers.models import rows
from modelyard.handlers.models.backends import Artifact, Output, as_output, as_tuple, main_output
from modelyard.handlers.models.folder import load_label_mapping, read_config, read_reference
from modelyard.handlers.models.packed import PackedModel, open_packed
from modelyard.handlers.proof.agree import Rule
from modelyard.handlers.proof.mutation import Mutation
from modelyard.handlers.ranges import span
from modelyard.handlers.tensors import TensorRequest

_log = logging.getLogger(__name__)

Inputs = Tensor | tuple[Tensor, ...]


class Asked(Mapping[str, Any]):
    """`handler` of model-config.yaml: entries, and the names of all that were asked for.

    Whoever goes through all of them has asked for each.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries
        self._asked: dict[Any, None] = {}

    def __getitem__(self, key: Any) -> Any:
        self._asked[key] = None
        return self._entries[key]

    def __iter__(self) -> Iterator[Any]:
        self._asked |= dict.fromkeys(self._entries)
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def unread(self) -> list[str]:
        """Return a sentence for each entry that nobody has asked for."""
        return [
            f"handler.{key} is not a setting of this handler; expected some of "
            f"{', '.join(self._asked)}{did_you_mean(str(key), self._asked)}"
            for key in self._entries
            if key not in self._asked
        ]


_MOST_LABELS = 256
"""Labels whose exchange golden requests are tried with."""


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
        is_whole: whether a request holds whole inputs, since they are not made of rows.
        mapping: output index as str → label, None where no file of the archive says them.
        config: `config.json` of the archive, empty where it has none.
        device: where the model computes.
        report: report of the artifact's export, None in archives without one.
        agreement: how far `model` and `explainer` may be apart, where both have a certificate.
        digest: SHA-256 of the archive's manifest, which lists the digests of all other files.
        reference: the shares that live ones are compared with, None where the archive has none.
    """

    formats: ClassVar[tuple[str, ...]] = ("json", "png", "html", "npy")
    """What explanations can be answered in; the first where the request has no wish."""
    default_baseline: str = "zero"
    default_set: str | None = None
    default_aggregate: ClassVar[str] = "none"
    class_dim: ClassVar[int] = 0
    """Dimension of scores (…) of more than one that is that of the classes."""
    label_dim: ClassVar[int | None] = None
    """Dimension of the first output that the labels name; None where there is none."""
    fills_rows: ClassVar[bool] = False
    """Whether a row is filled up to the longest of its batch, whatever is asked for."""
    thing: ClassVar[str] = "value"
    """What a value of the input is called."""
    embedded: int | None = None
    """Place among the inputs of the token ids, for models that embed them."""
    _settings: Asked | None = None

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
        self.report: Report | None = None
        self.signature: dict[str, Any] | None = None
        self.inputs: tuple[TensorSpec, ...] = ()
        self.is_whole = False
        self.output_names: tuple[str, ...] = ()
        self.main_output: str | None = None
        """Name of the first output of real numbers, which answers and explanations are made of."""
        self._whole_outputs: tuple[bool, ...] = ()
        self._output_sizes: tuple[Size, ...] = ()
        self._names_outputs = False
        """Whether the archive has a file of labels, which is an author's own."""
        self.mapping: dict[str, str] | None = None
        self.config: Mapping[str, Any] = {}
        self.output_kind = "values"
        """What the numbers of the output are, one of `rows.OUTPUT_KINDS`."""
        self.stated_kind: str | None = None
        """The same where the archive's configuration says it."""
        self.found_kind: str | None = None
        """The same where the export's report says it."""
        self.knows_kind = False
        """Whether the archive says what they are, or what they are not."""
        self.agreement: Rule | None = None
        self.digest: str | None = None
        self.reference: Reference | None = None
        self.made_by = ""
        """What makes inputs of requests that hold something else; for messages."""
        self._explaining = Explainer(self)

    def initialize(self, context: Context) -> None:
        """Load what the archive holds; a worker calls it once, before any request.

        Raises:
            LoadError: the archive cannot be served here.
        """
        self.context = context
        self.manifest = context.manifest or {}
        self.model_yaml_config = context.model_yaml_config
        self._settings = None
        self.device = torch.device(context.device)
        self.map_location = self.device.type
        folder = Path(context.system_properties["model_dir"])
        packed = open_packed(folder, self.manifest, self.device, self.model_yaml_config)
        self.model_pt_path = str(packed.path)
        self.model, self.explainer = packed.artifact, packed.explainer
        self.agreement = packed.agreement
        self.inputs = packed.signature.inputs
        self.output_names = tuple(spec.name for spec in packed.signature.outputs)
        main = packed.signature.main
        self.main_output = main.name if main else None
        self._output_sizes = main.shape if main else ()
        self.report = packed.report
        if rows.read_flag(BATCH_INVARIANT, self.model_yaml_config.get(BATCH_INVARIANT, False)):
            self.model = self._as_invariant(packed)
        self.signature = (self.manifest.get("modelyard") or {}).get("signature")
        self.is_whole = self.signature is not None and not _have_rows(self.inputs)
        self._whole_outputs = tuple(
            self.signature is not None and not _have_rows((*self.inputs, spec))
            for spec in packed.signature.outputs
        )
        manifest = folder / MANIFEST_NAME
        if manifest.is_file():
            self.digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
        self._check_batch_size(context.system_properties["batch_size"])
        self.mapping = load_label_mapping(folder)
        self._names_outputs = (folder / LABELS_FILE).is_file()
        self.config = read_config(folder)
        self.stated_kind = rows.read_output_kind(self.handler_settings)
        self.output_kind = self.stated_kind or self.output_kind
        name = self.main_output or ""
        found = packed.report.probabilities if packed.report else {}
        self.found_kind = "probabilities" if found.get(name) else None
        self.knows_kind = name in found or bool(self.config.get("architectures"))
        if self.inputs and self._pad_id is not None and not any(s.is_float for s in self.inputs):
            self.default_baseline = "pad"
        if (folder / BACKGROUND_FILE).is_file():
            self.default_set = f"file:{BACKGROUND_FILE}"
        self.reference = read_reference(folder)
        self.initialized = True

    def handle(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[Any]:
        """Answer a batch of predictions: one dict per request in, one answer per request out."""
        self.context = context
        return self._run_steps(data)

    def _run_steps(self, data: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Answer requests that share a call."""
        with span("decode"):
            inputs = self.preprocess(data)
        with span("forward"):
            outputs = self.inference(inputs)
        with span("encode"):
            return self.postprocess(outputs)

    def infer(self, requests: Sequence[TensorRequest]) -> Sequence[Mapping[str, Any]]:
        """Answer requests of tensors by name, of the Open Inference Protocol: arrays by name.

        Raises:
            BadInput: other names, datatypes, shapes or values than the signature states.
        """
        return run_tensors(self, requests)

    @property
    def has_rows(self) -> bool:
        """Whether requests can share a call: inputs and outputs are made of rows."""
        return not self.is_whole and not any(self._whole_outputs)

    def preprocess(self, data: Sequence[Mapping[str, Any]]) -> Inputs:
        """Turn request bodies into what the model takes: JSON numbers into its dtype and shape.

        A model of one input takes the numbers of one row, `[[0.1, …], …]`; a model of several
        takes an object with one entry per input. Where inputs have no rows, as a graph's nodes and
        edges, a request holds them whole.

        Raises:
            BadInput: a body that is not JSON, or numbers of another shape or beyond those stated.
        """
        read = [self._each(index, self._read_row, row) for index, row in enumerate(data)]
        return self._gather(read, range(len(read)))

    def inference(self, inputs: Inputs, *args: Any, **kwargs: Any) -> Output:
        """Run the model on a batch; no gradient is recorded."""
        place = getattr(self.model, "device", self.device)
        with torch.inference_mode():
            with span("copy"):
                placed = [tensor.to(place) for tensor in as_tuple(inputs)]
            output: Output = self.model(*placed, *args, **kwargs)
        return output

    def postprocess(self, outputs: Output) -> list[Any]:
        """Turn outputs into answers: a list per request, or an object of lists by output name.

        An output that has no row for each request, as a loss or the boxes of an image, is answered
        whole; a model that has one takes one request at a time.
        """
        tensors = as_tuple(outputs)
        whole = self._whole_outputs or (self.is_whole,) * len(tensors)
        columns = [
            [output.tolist()] if is_whole else output.tolist()
            for output, is_whole in zip(tensors, whole, strict=True)
        ]
        if isinstance(outputs, Tensor):
            return columns[0]
        names = self.output_names or tuple(f"output_{i}" for i in range(len(columns)))
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def explain(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[Any]:
        """Answer a batch of explanations: which input values led to the output.

        Each request's query, JSON part and Accept header say what it wants (`ExplainOptions`);
        requests that want the same share their passes.

        Raises:
            NoGradients: the archive holds nothing that can be differentiated, as the method asks.
            BadInput: options or a body that cannot be used.
            TwinDiffers: what would be explained is not what is predicted.
        """
        self.context = context
        return self._explaining.explain(data)

    def shares(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[dict[str, Any]]:
        """Return for each request what share its parts have in the sum of all |attributions|.

        The predicted class is beside them: `{"class": "repaid", "shares": {"age": 0.3, …}}`.

        Parts are those of `name_parts`, as far as the archive's reference tells them apart. A
        request without any attribution, as the baseline itself, has none.

        Raises:
            BadInput, NoGradients, TwinDiffers: as `explain`; or the input has no parts.
        """
        self.context = context
        return self._explaining.shares(data)

    def name_parts(self, index: int, explanation: Explanation) -> Mapping[str, float]:
        """Return what of request `index`'s explanation belongs to each named part of its input.

        A value of a short row is a part, numbered from 0; else each input is one.

        Raises:
            BadInput: it is all one part.
        """
        return self._explaining.name_parts(explanation)

    def numbers(self, row: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the numbers that a request holds by name, as `choices` has them."""
        (first, *others) = self._read_row(row)
        is_row = not others and first.ndim == 1 and len(first) <= MOST_NUMBERED
        return {str(at): float(each) for at, each in enumerate(first if is_row else ())}

    def choices(self, index: int) -> Sequence[Choice]:
        """Return what each value of request `index`'s row could be changed to."""
        ranges = self.reference.ranges if self.reference else {}
        return [Choice(name, int(name), int(name) + 1, range=each) for name, each in ranges.items()]

    def explained_model(self) -> ExplainedModel:
        """Return what explanations need to know of the model version."""
        return self._explaining.model()

    def score(self, outputs: Output) -> Tensor:
        """Return the numbers (N, …) of a call of which `target` chooses what is explained."""
        return outputs_of(outputs, self.output_names)

    def probabilities(self, scores: Tensor) -> Tensor | None:
        """Return the probabilities that predictions give, as `score` has its numbers (N, …).

        None where predictions give none, as where nothing says that the outputs are of classes.
        """
        return rows.probabilities_of(self.output_kind, scores)

    def mutations(self) -> Iterator[Mutation]:
        """Yield changes of what is around the model that golden requests ought to notice."""
        labels = list((self.mapping or {}).items())[:_MOST_LABELS]
        for (one, name), (two, other) in pairwise(labels):
            changed = {**(self.mapping or {}), one: other, two: name}
            advice = f'whose answer names "{name}" or "{other}"'
            yield Mutation("labels", {"mapping": changed}, advice)

    def wrong_kind(self, outputs: Output) -> str | None:
        """Return why a model's outputs cannot be of `output_kind`, or do not fit the labels.

        `modelyard archive` asks for each of its examples.
        """
        main = main_output(outputs)
        return self.wrong_labels(tuple(main.shape)) or rows.wrong_kind(
            self.output_kind, self.stated_kind is not None, main
        )

    def wrong_labels(self, sizes: tuple[Size, ...] = ()) -> str | None:
        """Return why the labels do not fit an output of these sizes, or the one that is stated."""
        sizes = sizes or self._output_sizes
        if self.label_dim is None or self.label_dim >= len(sizes) or not self._names_outputs:
            return None
        count = sizes[self.label_dim]
        return count_problem(self.mapping or {}, count) if isinstance(count, int) else None

    def find_target(
        self, index: int, target: str, scores: Tensor, inside: Tensor | None
    ) -> Sequence[Target] | None:
        """Return what of the scores (…) of request `index` is meant by `target`.

        None leaves it to the common rule: `predicted`, `top-N`, a label or a place.

        Args:
            index: index of the request.
            target: target as it was asked for.
            scores: scores as `score` has them, without the batch.
            inside: which places are in the region that the request names, bool of all
                dimensions but that of the classes; None where it names none.
        """
        return None

    def find_region(self, index: int, region: Region, sizes: tuple[int, ...]) -> Tensor:
        """Return which places of the scores are in a region: bool of `sizes`, without classes."""
        return region.inside(sizes)

    def name_place(self, index: int, place: tuple[int, ...]) -> str:
        """Return the name of a place among scores of more than one dimension."""
        return ",".join(map(str, place))

    def baselines(self, name: str, inputs: Tensors, seed: int) -> Tensors:
        """Return what stands for "no information", for one request's inputs (1, …): (B, …) each.

        `file:NAME` names a file of the archive: JSON with a list of request bodies, or one body
        of another type, or a folder of such files. Every other name is given to `baseline`, for
        whole numbers where there are no others.

        Raises:
            BadInput: there is no such baseline, or an input does not take its values.
        """
        return self._explaining.baselines(name, inputs, seed)

    def baseline_means(self, name: str) -> str | None:
        """Return in words what a baseline is, where its name does not say it."""
        return None

    def baseline(self, name: str, inputs: Tensor, seed: int = 0) -> Tensor:
        """Return the input (1, *S) that stands for "no information", for one request's (1, *S).

        Whole numbers may be token ids: `pad` is `pad_token_id` of `config.json`.
        """
        pad = None if inputs.is_floating_point() else self._pad_id
        if name == "pad" and pad is not None:
            return torch.full_like(inputs, pad)
        if name != "zero":
            known = "zero, pad" if pad is not None else "zero"
            raise BadInput(f'baseline is "{name}"; expected {known} or file:NAME for this model')
        return torch.zeros_like(inputs)

    def window(self, sizes: torch.Size, side: int | None) -> tuple[int, ...]:
        """Return the shape of what methods without gradients replace at once, for rows of a shape.

        Args:
            sizes: sizes of a row.
            side: side as asked for; one value without it.
        """
        return (*[1] * (len(sizes) - 1), side or 1) if sizes else ()

    def groups(self, index: int, sizes: torch.Size) -> Tensor | None:
        """Return which values of request `index` are always replaced together, as one feature.

        That is the number of the group that each is of, int64 of `sizes`, from 0 in their order.
        None where values have places in dimensions instead, of which `window` knows.
        """
        return None

    def scales(self, inputs: Tensor) -> Tensor:
        """Return by how much the values of inputs (N, *S) vary: (N, …). Noise is a share of it.

        Each value of a row (N, F) is a quantity of its own, of which no more is known than its
        size. The values of other inputs are of one kind.
        """
        return inputs.abs() if inputs.dim() == 2 else ranges_of(inputs)

    def aggregated(self, explanation: Explanation, values: Tensor) -> Tensor:
        """Return attributions (*S), or their errors, with what belongs together as one.

        That is the sum, or the mean where each value has what belongs to its whole window.
        """
        whole = self.aggregate(values)
        if not METHODS[explanation.options.method].repeats:
            return whole
        return whole / self.aggregate(torch.ones_like(values))

    def aggregate(self, attributions: Tensor) -> Tensor:
        """Sum attributions (*S) over what belongs together."""
        raise BadInput("aggregate is sum; expected none: this model's inputs have no channels")

    def describe(self, index: int, explanation: Explanation) -> dict[str, Any]:
        """Return further fields of request `index`'s answer; attributions are aggregated."""
        return {}

    def regions(
        self, index: int, inputs: Tensors, explanation: Explanation
    ) -> dict[str, Any] | None:
        """Return the field `regions` of request `index`'s answer, in place of `attributions`.

        None where there is none, as of all but photographs.

        Raises:
            BadInput: they are asked for where there are none.
        """
        if explanation.options.regions:
            raise BadInput("regions is true; expected false: only pictures have regions")
        return None

    def warnings(self, index: int) -> tuple[str, ...]:
        """Return what the reader of request `index`'s explanation has to know; a sentence each."""
        return ()

    def bars(self, index: int, inputs: Tensors, explanation: Explanation) -> list[Bar]:
        """Return the explained values of request `index` by name, for what is drawn of them."""
        return self._explaining.bars(inputs, explanation)

    def heat_map(self, index: int, inputs: Tensors, explanations: Sequence[Explanation]) -> bytes:
        """Draw explanations of request `index`, whose inputs are (*S), as a PNG file."""
        return self._explaining.heat_map(index, inputs, explanations)

    def page(self, index: int, inputs: Tensors, explanations: Sequence[Explanation]) -> bytes:
        """Draw explanations of request `index`, whose inputs are (*S), as an HTML page."""
        return self._explaining.page(index, inputs, explanations)

    def overlay(self, index: int, inputs: Tensors, explanation: Explanation) -> bytes:
        """Draw an explanation of request `index` as a transparent PNG file."""
        raise BadInput("format is overlay; expected another: this model takes no picture")

    def fields_of(self, index: int, explanation: Explanation) -> dict[str, Any]:
        """Return the fields of an explanation of request `index`, but for lists of numbers."""
        return self._explaining.origin() | explanation.facts() | self.describe(index, explanation)

    @property
    def _pad_id(self) -> int | None:
        id = self.config.get("pad_token_id")
        return id if type(id) is int else None

    @property
    def handler_settings(self) -> Mapping[str, Any]:
        """Return `handler` of model-config.yaml, empty where it says nothing.

        Raises:
            LoadError: it is not entries.
        """
        if self._settings is None:
            settings = self.model_yaml_config.get("handler") or {}
            if not isinstance(settings, Mapping):
                raise LoadError(f"handler is {settings!r} in model-config.yaml; expected entries")
            self._settings = Asked(settings)
        return self._settings

    def unread_settings(self) -> list[str]:
        """Return a sentence for each entry of `handler` that nothing has asked for."""
        return self._settings.unread() if self._settings else []

    def label(self, index: int) -> str:
        """Return the name of an output index: its label, else the index itself."""
        key = str(index)
        return key if self.mapping is None else self.mapping.get(key, key)

    # --- initialize -----------------------------------------------------------------------------

    def _as_invariant(self, packed: PackedModel) -> Artifact:
        from modelyard.handlers.models.invariant import keep_bits

        if self.fills_rows:
            raise LoadError(
                f"{BATCH_INVARIANT} in model-config.yaml: {type(self).__name__} fills rows up to "
                "the longest of their batch, so what a row is depends on the others; leave it out"
            )
        batch_size = self.context.system_properties["batch_size"]
        return keep_bits(packed.artifact, packed.report, batch_size)

    def _check_batch_size(self, batch_size: int) -> None:
        if self.is_whole and batch_size != 1:
            raise LoadError(
                f"batchSize is {batch_size}, and {', '.join(map(str, self.inputs))} cannot be "
                "stacked; set batchSize: 1 in model-config.yaml"
            )
        for spec in () if self.is_whole else self.inputs:
            if not fits(batch_size, spec.shape[0] if spec.shape else batch_size):
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
        """Return one request's row of each input; what `preprocess` of most handlers differs in."""
        value = parse_json(body_of(row))
        specs = self._row_specs
        if len(specs) == 1 and not isinstance(value, dict):
            value = {specs[0].name: value}
        if not isinstance(value, dict) or set(value) != {spec.name for spec in self.inputs}:
            names = ", ".join(spec.name for spec in self.inputs)
            seen = f"the entries {', '.join(value)}" if isinstance(value, dict) else "no object"
            raise BadInput(f"the body holds {seen}; expected a JSON object with exactly: {names}")
        return [rows.read_numbers(spec, value[spec.name]) for spec in specs]

    def _gather(self, read: Sequence[Sequence[np.ndarray]], owners: Sequence[int]) -> Inputs:
        """Gather rows of each input into what the model takes.

        Args:
            read: rows of a batch, which are held to the values that the signature states.
            owners: which request each of them belongs to.
        """
        specs = self._row_specs
        if len(specs) > 1 or any(spec.values or spec.limits for spec in specs):
            for owner, row in zip(owners, read, strict=True):
                given = [torch.from_numpy(each) for each in row]
                self._each(owner, check_stated, specs, given, 1, self.made_by)
        tensors = tuple(map(rows.stack, self.inputs, zip(*read, strict=True)))
        if self.is_whole:
            tensors = tuple(tensor[0] for tensor in tensors)
        return as_output(tensors)

    @property
    def _row_specs(self) -> tuple[TensorSpec, ...]:
        """The inputs, of which a request is one place of the first dimension."""
        return tuple(map(rows.whole, self.inputs)) if self.is_whole else self.inputs

    def _read_options(self, index: int, row: Row) -> tuple[ExplainOptions, Row]:
        """Return what request `index` asks of its explanation, and the rest of it."""
        return self._explaining.read_options(index, row)


class Classifier(BaseHandler):
    """Answer {"label": probability, …}, the likeliest first; `handler.top_k` says how many.

    Beside a class that reads pictures or sounds it stands first.
    """

    label_dim: ClassVar[int | None] = 1

    def __init__(self) -> None:
        super().__init__()
        self.top_labels = rows.TopLabels({}, self.label)

    def initialize(self, context: Context) -> None:
        """Load the archive, and how its logits become answers."""
        super().initialize(context)
        self.top_labels = rows.TopLabels(
            self.handler_settings, self.label, self.config, self.found_kind
        )
        self.output_kind = self.top_labels.kind
        self.knows_kind |= any(key in self.handler_settings for key in ("output_kind", "function"))

    def postprocess(self, outputs: Output) -> list[Any]:
        """Turn logits (N, K) into one dict per request: labels and probabilities, descending."""
        return self.top_labels(outputs)


def _have_rows(specs: Sequence[TensorSpec]) -> bool:
    """Return whether a request is one place of the first dimension of every input."""
    first = [spec.shape[0] if spec.shape else None for spec in specs]
    return all(size in (first[0], 1) for size in first)
