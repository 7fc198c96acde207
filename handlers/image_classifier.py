"""An image in, the likeliest labels out."""

from typing import Any

from modelyard.handlers.backends import Output
from modelyard.handlers.context import Context
from modelyard.handlers.labels import DEFAULT_TOP_K, TopLabels, read_top_k
from modelyard.handlers.vision_handler import VisionHandler


class ImageClassifier(VisionHandler):
    """Answer {"label": probability, …}, the likeliest first; `handler.top_k` says how many."""

    def __init__(self) -> None:
        super().__init__()
        self.top_labels = TopLabels(DEFAULT_TOP_K, self.label)

    def initialize(self, context: Context) -> None:
        """Load the archive, its `handler.image` and its `handler.top_k`."""
        super().initialize(context)
        self.top_labels = TopLabels(read_top_k(self.settings), self.label)

    def postprocess(self, outputs: Output) -> list[Any]:
        """Turn logits (N, K) into one dict per request: labels and their softmax, descending."""
        return self.top_labels(outputs)
