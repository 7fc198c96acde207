"""An image in, the likeliest labels out."""

from typing import Any

import numpy as np

from handlers.backends import Output
from handlers.context import Context
from handlers.errors import HandlerError, LoadError
from handlers.vision_handler import VisionHandler

DEFAULT_TOP_K = 5


class ImageClassifier(VisionHandler):
    """Answer {"label": probability, …}, the likeliest first; `handler.top_k` says how many."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = DEFAULT_TOP_K
        self.labels: list[str] = []

    def initialize(self, context: Context) -> None:
        """Load the archive, its `handler.image` and its `handler.top_k`."""
        super().initialize(context)
        top_k = self.settings.get("top_k", DEFAULT_TOP_K)
        if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
            raise LoadError(f"handler.top_k is {top_k!r}; expected a whole number from 1")
        self.top_k = top_k

    def postprocess(self, outputs: Output) -> list[Any]:
        """Turn logits (N, K) into one dict per request: labels and their softmax, descending."""
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        if logits.dim() != 2:
            raise HandlerError(
                f"the model gave {list(logits.shape)}; an image classifier needs logits [N, K]"
            )
        # numpy: at the sizes of one batch, a call costs a third of torch's.
        weights = logits.float().cpu().numpy()
        weights = np.exp(weights - weights.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        order = (-weights).argsort(axis=1, kind="stable")[:, : self.top_k]
        return list(map(self._name, order.tolist(), weights.tolist()))

    def _name(self, order: list[int], probabilities: list[float]) -> dict[str, float]:
        """Give label → probability; of two outputs with one label, the likelier counts."""
        if len(self.labels) != len(probabilities):
            self.labels = [self.label(index) for index in range(len(probabilities))]
        answer: dict[str, float] = {}
        for index in order:
            answer.setdefault(self.labels[index], probabilities[index])
        return answer
