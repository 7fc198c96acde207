"""Logits → the likeliest labels: what classifiers of all kinds answer, and the labels' file."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from modelyard.handlers.backends import Output
from modelyard.handlers.errors import HandlerError, LoadError

DEFAULT_TOP_K = 5


class TopLabels:
    """Return {"label": probability, …} for each row of logits, the likeliest first.

    Args:
        top_k: labels per row.
        label: output index → its name.
    """

    def __init__(self, top_k: int, label: Callable[[int], str]) -> None:
        self.top_k = top_k
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


def read_top_k(section: Mapping[str, Any]) -> int:
    """Read `handler.top_k` of model-config.yaml.

    Raises:
        LoadError: no whole number from 1.
    """
    top_k = section.get("top_k", DEFAULT_TOP_K)
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
        raise LoadError(f"handler.top_k is {top_k!r}; expected a whole number from 1")
    return top_k


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
