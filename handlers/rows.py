"""One row of a batch: numbers → a row of the model's input; logits → labels."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from modelyard.archiver.signature import TensorSpec, fits
from modelyard.handlers.backends import Output, torch_dtype
from modelyard.handlers.errors import BadInput, HandlerError, InputMismatch, LoadError

DEFAULT_TOP_K = 5


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
    return found.astype(wanted)


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


class TopLabels:
    """Return {"label": probability, …} for each row of logits, the likeliest first.

    Args:
        section: `handler` of model-config.yaml, whose `top_k` says how many.
        label: output index → its name.

    Raises:
        LoadError: `top_k` is not a whole number from 1.
    """

    def __init__(self, section: Mapping[str, Any], label: Callable[[int], str]) -> None:
        self.top_k = top_k = section.get("top_k", DEFAULT_TOP_K)
        if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
            raise LoadError(f"handler.top_k is {top_k!r}; expected a whole number from 1")
        self._label = label
        self._names: list[str] = []

    def __call__(self, outputs: Output) -> list[Any]:
        """Answer logits (N, K): labels and their softmax, descending."""
        logits = outputs if isinstance(outputs, Tensor) else outputs[0]
        if logits.dim() != 2:
            raise HandlerError(
                f"the model gave {list(logits.shape)}; a classifier needs logits [N, K]"
            )
        # numpy: at the sizes of one batch, a call costs a third of torch's.
        weights = logits.float().cpu().numpy()
        weights = np.exp(weights - weights.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        order = (-weights).argsort(axis=1, kind="stable")[:, : self.top_k]
        return list(map(self._name, order.tolist(), weights.tolist()))

    def _name(self, order: list[int], probabilities: list[float]) -> dict[str, float]:
        """Return label → probability; of two outputs with one label, the likelier counts."""
        if len(self._names) != len(probabilities):
            self._names = [self._label(index) for index in range(len(probabilities))]
        answer: dict[str, float] = {}
        for index in order:
            answer.setdefault(self._names[index], probabilities[index])
        return answer


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


def _numpy_dtype(spec: TensorSpec) -> np.dtype[Any]:
    # bfloat16 is unknown to numpy; float32 holds all of its values.
    return np.dtype("float32" if spec.dtype in ("", "bfloat16") else spec.dtype)


def _refuse(spec: TensorSpec, seen: str) -> NoReturn:
    shape = f" of shape [{', '.join(map(str, spec.shape[1:]))}]" if spec.dtype else ""
    dtype = spec.dtype or "float32"
    raise BadInput(f'input "{spec.name}" holds {seen}; expected {dtype} numbers{shape}')
