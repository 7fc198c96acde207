"""One row of a batch: numbers → a row of the model's input; logits → labels."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from modelyard.archiver.signature import TensorSpec, fits
from modelyard.base.nearest import did_you_mean
from modelyard.handlers.errors import BadInput, HandlerError, InputMismatch, LoadError
from modelyard.handlers.models.backends import Output, main_output, torch_dtype

DEFAULT_TOP_K = 5

OUTPUT_KINDS = ("logits", "probabilities", "multilabel", "values")
"""What the numbers of an output are; multilabel ones are logits that do not exclude each other."""

KINDS = {
    "softmax": ("logits",),
    "sigmoid": ("multilabel",),
    "none": ("values", "probabilities"),
}
"""What the numbers may be by `handler.function`; the first where nothing else says it."""

PROBLEMS = {"regression": "none", "multi_label_classification": "sigmoid"}
"""`problem_type` of a Hugging Face model → what its logits become."""


def read_numbers(spec: TensorSpec, value: Any) -> np.ndarray:
    """Turn nested lists into one row of an input, without its batch dimension.

    Raises:
        BadInput: not numbers, numbers of the wrong kind, not finite, or of another shape.
    """
    wanted = _numpy_dtype(spec)
    try:
        found = np.asarray(value)
    except ValueError:
        _refuse(spec, "lists of unequal length")
    if found.dtype.kind not in "biuf":
        _refuse(spec, "something else than numbers")
    if found.dtype.kind == "f":
        if wanted.kind != "f" and found.size:
            _refuse(spec, "fractional numbers")
        if not np.isfinite(found).all():
            _refuse(spec, "NaN or Infinity")
    dims = spec.shape[1:]
    if spec.dtype and not (found.ndim == len(dims) and all(map(fits, found.shape, dims))):
        _refuse(spec, f"numbers of shape {list(found.shape)}")
    return as_dtype(spec, found)


def as_dtype(spec: TensorSpec, values: np.ndarray) -> np.ndarray:
    """Return finite numbers in the dtype of an input.

    Raises:
        BadInput: it does not hold them.
    """
    wanted = _numpy_dtype(spec)
    with np.errstate(over="ignore"):  # said below
        numbers = values.astype(wanted)
    is_held = (
        np.isfinite(numbers).all()
        if wanted.kind == "f"
        else (wanted.kind == "b" or values.dtype == wanted or np.array_equal(numbers, values))
    )
    if not is_held:
        _refuse(spec, f"numbers beyond {spec.dtype or wanted}")
    return numbers


def whole(spec: TensorSpec) -> TensorSpec:
    """Return the spec of an input that is one row as it stands."""
    return replace(spec, shape=(1, *spec.shape))


def stack(spec: TensorSpec, rows: Sequence[np.ndarray]) -> Tensor:
    """Gather the rows (*S) of a batch into one tensor (N, *S) of the input's dtype.

    Raises:
        InputMismatch: the rows differ in shape, which no single request is to blame for.
    """
    shapes = {row.shape for row in rows}
    if len(shapes) > 1:
        raise InputMismatch(
            f'input "{spec.name}" has rows of shapes {sorted(map(list, shapes))} in one batch; '
            "pad them in preprocess, or set batchSize: 1 in model-config.yaml"
        )
    tensor = torch.from_numpy(rows[0][None] if len(rows) == 1 else np.array(rows))
    return tensor.to(torch_dtype(spec.dtype)) if spec.dtype else tensor


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the softmax over the last dimension, in the dtype of the logits."""
    weights: np.ndarray = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x)), which no x is too large for."""
    values: np.ndarray = 0.5 * (1 + np.tanh(0.5 * logits))
    return values


FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "none": lambda logits: logits,
}


def read_output_kind(section: Mapping[str, Any]) -> str | None:
    """Return `output_kind` of `handler` in model-config.yaml, None where it is not said.

    Raises:
        LoadError: it is unknown, or `function` says something else.
    """
    kind, function = section.get("output_kind"), section.get("function")
    if kind is not None:
        read_one_of("handler.output_kind", kind, OUTPUT_KINDS)
    if kind and function and kind not in KINDS.get(function, ()):
        raise LoadError(
            f"handler.output_kind is {kind!r} and handler.function {function!r}; expected one of "
            "them: output_kind says what function is to be"
        )
    return kind


def probabilities_of(kind: str, scores: Tensor) -> Tensor | None:
    """Return the probabilities that outputs (N, K) of a kind stand for; None where they do not."""
    if kind == "values" or scores.dim() != 2:
        return None
    if kind == "probabilities":
        return scores
    is_one_by_one = kind == "multilabel" or scores.shape[1] == 1
    return scores.sigmoid() if is_one_by_one else scores.softmax(1)


def wrong_kind(kind: str, is_stated: bool, outputs: Tensor) -> str | None:
    """Return why outputs (N, …, K) cannot be of a kind, and what to say instead.

    Args:
        kind: one of `OUTPUT_KINDS`, which the handler takes them for.
        is_stated: whether the archive says so itself.
        outputs: outputs of a model; of others than real numbers nothing is said.
    """
    if not (outputs.is_floating_point() and outputs.numel()):
        return None
    values = outputs.double()
    low, high = float(values.min()), float(values.max())
    if kind == "probabilities" and not -SUM_SLACK <= low <= high <= 1 + SUM_SLACK:
        return (
            f"handler.output_kind is probabilities, and the model gives {low:.4g} to {high:.4g}; "
            "say logits, multilabel or values in model-config.yaml"
        )
    if kind != "logits" or is_stated or values.shape[-1] < 2 or low < 0:
        return None
    if not float((values.sum(-1) - 1).abs().max()) <= SUM_SLACK:
        return None
    return (
        "the model's numbers are not negative and add up to 1 already, and the handler would take "
        "a softmax of them: say `handler: {output_kind: probabilities}` in model-config.yaml, or "
        "output_kind: logits if they are no probabilities"
    )


SUM_SLACK = 1e-3
"""How far probabilities may be from adding up to 1: float16's rounding."""


def read_one_of(name: str, value: Any, known: Iterable[str]) -> str:
    """Read one of a few texts of model-config.yaml.

    Raises:
        LoadError: it is something else.
    """
    if value not in (texts := tuple(known)):
        raise LoadError(f"{name} is {value!r}; expected one of {', '.join(texts)}")
    return str(value)


def read_whole(name: str, value: Any, low: int = 1) -> int:
    """Read a whole number of model-config.yaml.

    Raises:
        LoadError: it is something else, or below `low`.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise LoadError(f"{name} is {value!r}; expected a whole number from {low}")
    return value


def read_flag(name: str, value: Any) -> bool:
    """Read true or false of model-config.yaml.

    Raises:
        LoadError: it is something else.
    """
    if not isinstance(value, bool):
        raise LoadError(f"{name} is {value!r}; expected true or false")
    return value


def read_section(handler: Mapping[str, Any], name: str, known: Sequence[str]) -> Mapping[str, Any]:
    """Return an entry of `handler` in model-config.yaml that holds settings of its own.

    Raises:
        LoadError: it is not entries, or has one that is unknown.
    """
    section = {} if (given := handler.get(name)) is None else given
    if not isinstance(section, Mapping):
        raise LoadError(f"handler.{name} is {section!r}; expected entries of {', '.join(known)}")
    if unknown := sorted(map(str, set(section) - set(known))):
        raise LoadError(
            f"handler.{name}.{unknown[0]} is unknown; expected {', '.join(known)}"
            + did_you_mean(unknown[0], known)
        )
    return section


def first_output(outputs: Output, dims: int, expected: str) -> Tensor:
    """Return the output that answers are made of, the first of several.

    Args:
        outputs: outputs of the model.
        dims: how many that output has.
        expected: what messages say of it.

    Raises:
        HandlerError: it has another number of dims.
    """
    found = main_output(outputs)
    if found.dim() != dims:
        raise HandlerError(f"the model gave {list(found.shape)}; {expected}")
    return found


class TopLabels:
    """Return {"label": probability, …} for each row of logits, the likeliest first.

    `handler.output_kind` of model-config.yaml says what the outputs are, and so what becomes of
    them; `handler.function` says the same by what is to be done: `softmax`, `sigmoid` where labels
    do not exclude each other, or `none`. Without either, what the export found them to be counts,
    then `problem_type` of `config.json` as in transformers' pipelines; without that there is a
    softmax over several labels and a sigmoid of one. A single value is a number: a model that
    measures.

    Args:
        section: `handler` of model-config.yaml, whose `top_k` says how many.
        label: output index → its name.
        config: `config.json`.
        found: what the export found the outputs to be.

    Raises:
        LoadError: `top_k` is not a whole number from 1, `output_kind` or `function` unknown.
    """

    def __init__(
        self,
        section: Mapping[str, Any],
        label: Callable[[int], str],
        config: Mapping[str, Any] = MappingProxyType({}),
        found: str | None = None,
    ) -> None:
        self.top_k = read_whole("handler.top_k", section.get("top_k", DEFAULT_TOP_K))
        problem = config.get("problem_type")
        by_problem = PROBLEMS.get(problem) if isinstance(problem, str) else None
        function = section.get("function")
        if function is not None:
            read_one_of("handler.function", function, FUNCTIONS)
        by_function = KINDS[function][0] if function else found
        self.kind = read_output_kind(section) or by_function or KINDS[by_problem or "softmax"][0]
        self._label = label

    def __call__(self, outputs: Output) -> list[Any]:
        """Answer logits (N, K): labels and their probabilities, descending; or a number each."""
        logits = first_output(outputs, 2, "a classifier needs logits [N, K]")
        # numpy: at the sizes of one batch, a call costs a third of torch's.
        weights = logits.float().cpu().numpy()
        function = self._function_of(weights.shape[1])
        if function is None:
            numbers: list[Any] = weights[:, 0].tolist()
            return numbers
        weights = FUNCTIONS[function](weights)
        order = (-weights).argsort(axis=1, kind="stable")[:, : self.top_k]
        return list(map(self._name, order.tolist(), weights.tolist()))

    def _function_of(self, count: int) -> str | None:
        """Return what makes probabilities of so many outputs; None where one is a number."""
        if self.kind in ("probabilities", "values"):
            return None if count == 1 and self.kind == "values" else "none"
        return "sigmoid" if count == 1 or self.kind == "multilabel" else "softmax"

    def _name(self, order: list[int], probabilities: list[float]) -> dict[str, float]:
        """Return label → probability; of two outputs with one label, the likelier counts."""
        answer: dict[str, float] = {}
        for index in order:
            answer.setdefault(self._label(index), probabilities[index])
        return answer


def _numpy_dtype(spec: TensorSpec) -> np.dtype[Any]:
    # bfloat16 is unknown to numpy; float32 holds all of its values.
    return np.dtype("float32" if spec.dtype in ("", "bfloat16") else spec.dtype)


def _refuse(spec: TensorSpec, seen: str) -> NoReturn:
    shape = f" of shape [{', '.join(map(str, spec.shape[1:]))}]" if spec.dtype else ""
    expected = f"{spec.dtype or 'float32'} numbers{shape}"
    if spec.view:
        expected += f": {spec.view} as [real, imaginary]"
    raise BadInput(f'input "{spec.name}" holds {seen}; expected {expected}')
